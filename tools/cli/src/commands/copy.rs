//! `copy`: all bytes of one target to another, through a third on request; the destination is
//! complete or absent.

use crate::args::{CopyArgs, Sparse, TargetSpec};
use crate::engine::digest::digest;
use crate::engine::pump::{Plan, Ranges, Transfer, pump};
use crate::engine::worker::EngineError;
use crate::failure::Failure;
use crate::output;
use crate::progress::Progress;
use crate::report::copy::{CopyReport, Hashes, PhaseReport};
use crate::report::stack::StackReport;
use crate::setup::error::{LimitError, OpenError};
use crate::setup::open::{
    OpenTarget, RequestLimits, TargetOptions, check_opened, check_requests, depth_for,
};
use crate::setup::resolve::{ResolvedTarget, check_units, refuse_to_replace, stack_for};
use crate::setup::stack::BufferNeed;
use crate::setup::staged::{Place, Staged, check_folder, place, scratch};
use crate::signal::Interrupt;
use crate::targets::file;
use pinfold::Buffer;
use rustix::fs::Mode;
use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

/// Copies and prints the report, also of a copy that failed or was stopped.
pub(crate) fn run(args: &CopyArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let (report, ended) = copy(args, &interrupt)?;
    let printed = print(args, &report);
    ended.and(printed)
}

fn print(args: &CopyArgs, report: &CopyReport) -> Result<(), Failure> {
    if args.quiet {
        return Ok(());
    }
    if args.json {
        return Ok(output::json(report)?);
    }
    let mut text = if args.details { report.to_string() } else { report.summary() };
    if args.pools {
        text.push('\n');
        text.push_str(&report.stack.pools_to_kernel_text());
    }
    Ok(output::text(&text)?)
}

/// The targets of a copy, checked before any memory is allocated.
struct Job {
    source: ResolvedTarget,
    destination: ResolvedTarget,
    via: Option<ResolvedTarget>,
    /// The destination's file until it is renamed or removed.
    staged: Option<Staged>,
    /// The bytes to copy.
    ranges: Ranges,
    /// The final length of the destination's file.
    destination_bytes: u64,
}

impl Job {
    fn prepare(args: &CopyArgs) -> Result<Self, Failure> {
        check_units(
            args.stack.iommu_units,
            [&args.source, &args.destination].into_iter().chain(&args.via),
        )?;
        let (source, capacity) = open_source(args)?;
        let total = args.size.map_or(capacity, |size| size.0);
        if total > capacity {
            let target = source.name;
            return Err(LimitError::Beyond { size: total, capacity, target }.into());
        }
        let via = args.via.as_ref().map(|spec| open_via(spec, args, total)).transpose()?;
        if let Some(via) = via.as_ref().filter(|via| via.is_same_file(&source)) {
            return Err(OpenError::ViaIsSource(via.name.clone()).into());
        }
        let ranges = match (args.sparse, source.file()) {
            (Sparse::Auto, Some(file)) => Ranges::of_file(file, total),
            _ => Ranges::whole(total),
        };
        let (destination, staged, destination_bytes) = open_destination(args, &source, &ranges)?;
        Ok(Self { source, destination, via, staged, ranges, destination_bytes })
    }

    fn targets(&self) -> impl Iterator<Item = &ResolvedTarget> {
        [&self.source, &self.destination].into_iter().chain(&self.via)
    }
}

fn open_source(args: &CopyArgs) -> Result<(ResolvedTarget, u64), Failure> {
    let spec = &args.source;
    match spec {
        TargetSpec::File(path) => Ok(ResolvedTarget::existing(spec, path, false)?),
        TargetSpec::SoftImage(path, _) => Ok(ResolvedTarget::image(spec, path, false)?),
        TargetSpec::SoftMemory(..) => Err(LimitError::EmptySource(spec.to_string()).into()),
        TargetSpec::Pci { via, bdf, nsid } => {
            let (place, interrupts) = ((*via, *bdf), u32::from(!args.poll));
            Ok(ResolvedTarget::pci(spec, place, *nsid, interrupts, args.stack.machine)?)
        }
    }
}

fn open_via(spec: &TargetSpec, args: &CopyArgs, total: u64) -> Result<ResolvedTarget, Failure> {
    let (target, capacity) = match spec {
        TargetSpec::SoftMemory(size, _) => (ResolvedTarget::memory(spec, *size, total)?, size.0),
        TargetSpec::SoftImage(path, _) => {
            let (target, bytes) = ResolvedTarget::image(spec, path, true)?;
            if target.holds_data() && !args.force {
                return Err(OpenError::HoldsData(target.name).into());
            }
            (target, bytes)
        }
        TargetSpec::Pci { .. } => overwritten(spec, args)?,
        TargetSpec::File(path) => {
            (ResolvedTarget::staged(spec, path, scratch(path)?, total), u64::MAX)
        }
    };
    check_capacity(spec, capacity, total)?;
    Ok(target)
}

/// Resolves a real controller's namespace that will be overwritten, with its capacity.
fn overwritten(spec: &TargetSpec, args: &CopyArgs) -> Result<(ResolvedTarget, u64), Failure> {
    match spec {
        TargetSpec::Pci { via, bdf, nsid } if args.force => {
            let (place, interrupts) = ((*via, *bdf), u32::from(!args.poll));
            Ok(ResolvedTarget::pci(spec, place, *nsid, interrupts, args.stack.machine)?)
        }
        _ => Err(OpenError::HoldsData(spec.to_string()).into()),
    }
}

fn open_destination(
    args: &CopyArgs,
    source: &ResolvedTarget,
    ranges: &Ranges,
) -> Result<(ResolvedTarget, Option<Staged>, u64), Failure> {
    let spec = &args.destination;
    let total = ranges.total();
    let (path, bytes) = match spec {
        TargetSpec::SoftMemory(size, _) => {
            let target = ResolvedTarget::memory(spec, *size, total)?;
            check_capacity(spec, size.0, total)?;
            return Ok((target, None, total));
        }
        TargetSpec::Pci { .. } => {
            let (target, capacity) = overwritten(spec, args)?;
            check_capacity(spec, capacity, total)?;
            return Ok((target, None, total));
        }
        TargetSpec::File(path) => (path, total),
        // An image has at least one block; an empty one could not be opened again.
        TargetSpec::SoftImage(path, options) => {
            let block = options.block_bytes.into();
            (path, total.next_multiple_of(block).max(block))
        }
    };
    if matches!(place(path), Ok(Place::New)) {
        check_folder(path)?;
    }
    if args.force {
        refuse_to_replace(path, spec)?;
    }
    let staged = Staged::create(path, args.force, mode_like(source), source.file())?;
    staged.reserve(bytes, ranges)?;
    let file = staged.file().try_clone();
    let file = file.map_err(|error| OpenError::System { name: spec.to_string(), error })?;
    let target = ResolvedTarget::staged(spec, path, file, bytes);
    Ok((target, Some(staged), bytes))
}

/// Returns the permissions of the source, before the umask.
fn mode_like(source: &ResolvedTarget) -> Mode {
    let metadata = source.file().and_then(|file| file.metadata().ok());
    Mode::from_raw_mode(metadata.map_or(0o666, |metadata| metadata.permissions().mode() & 0o777))
}

/// Checks that `total` bytes, in whole blocks, fit into `capacity`.
fn check_capacity(spec: &TargetSpec, capacity: u64, total: u64) -> Result<(), Failure> {
    let block = spec.soft_options().block_bytes.into();
    // A partial block at the end cannot be used.
    let (capacity, needed) = (capacity / block * block, total.next_multiple_of(block));
    if needed <= capacity {
        return Ok(());
    }
    Err(Failure::TooSmall { target: spec.to_string(), capacity, needed })
}

/// The state of a running copy.
struct Run<'a> {
    args: &'a CopyArgs,
    interrupt: &'a Interrupt,
    buffers: Vec<Buffer>,
    ranges: &'a Ranges,
    block: usize,
    phases: Vec<PhaseReport>,
}

impl Run<'_> {
    /// Copies, and verifies the copy where that is requested.
    fn all(
        &mut self,
        source: &mut OpenTarget<'_>,
        destination: &mut OpenTarget<'_>,
        via: Option<&mut OpenTarget<'_>>,
    ) -> Result<Option<Hashes>, Failure> {
        // Files and images created for the copy read as zeroes.
        let write_holes = matches!(self.args.destination, TargetSpec::Pci { .. });
        match via {
            None => self.phase(source, destination, "copying", write_holes)?,
            Some(via) => {
                // Its holes are never read.
                self.phase(source, via, "there", false)?;
                self.phase(via, destination, "and back", write_holes)?;
            }
        }
        check_length(self.args, source, self.ranges.total())?;
        if self.args.verify { self.verify(source, destination).map(Some) } else { Ok(None) }
    }

    fn phase(
        &mut self,
        from: &mut OpenTarget<'_>,
        to: &mut OpenTarget<'_>,
        title: &str,
        write_holes: bool,
    ) -> Result<(), Failure> {
        let (source, destination) = (from.target(), to.target());
        let names = (source.info().name.clone(), destination.info().name.clone());
        let transfer = Transfer { ranges: self.ranges, block: self.block, write_holes };
        let progress = self.progress(title, transfer.bytes());
        let (stats, result) =
            pump(source, destination, transfer, &mut self.buffers, &progress, self.interrupt);
        self.phases.push(PhaseReport::new(names.0, names.1, &stats));
        Ok(result?)
    }

    fn progress(&self, title: &str, total: u64) -> Progress {
        if self.args.quiet { Progress::hidden() } else { Progress::new(title, total) }
    }

    fn verify(
        &mut self,
        source: &mut OpenTarget<'_>,
        destination: &mut OpenTarget<'_>,
    ) -> Result<Hashes, Failure> {
        let plan = Plan { total: self.ranges.total(), block: self.block };
        let mut hash = |target: &mut OpenTarget<'_>, title| {
            let progress = self.progress(title, plan.total);
            digest(target.target(), plan, &mut self.buffers, &progress, self.interrupt)
        };
        let hashes = Hashes {
            source: hash(source, "verifying source")?,
            destination: hash(destination, "verifying copy")?,
        };
        if hashes.source == hashes.destination {
            return Ok(hashes);
        }
        Err(Failure::Differs {
            source_name: self.args.source.to_string(),
            destination: self.args.destination.to_string(),
            source_hash: hashes.source.to_string(),
            destination_hash: hashes.destination.to_string(),
        })
    }
}

/// Copies; the destination exists if this succeeds, and is absent otherwise. Returns the report
/// with the outcome, or why nothing was begun.
pub(crate) fn copy(
    args: &CopyArgs,
    interrupt: &Interrupt,
) -> Result<(CopyReport, Result<(), Failure>), Failure> {
    let job = Job::prepare(args)?;
    let targets: Vec<_> = job.targets().collect();
    let requests = check_requests(args.bs, args.iodepth, &targets)?;
    let RequestLimits { block, .. } = requests;
    let depth = depth_for(job.ranges.total(), requests);
    let lower = match (block > 4096, depth > 1) {
        (true, true) => "--bs or --iodepth",
        (true, false) => "--bs",
        (false, true) => "--iodepth",
        (false, false) => "",
    };
    let buffers = BufferNeed { count: depth, bytes: block, threads: 1, lower };
    let stack = stack_for(args.stack, &targets, buffers)?;
    let open = |target: ResolvedTarget| -> Result<OpenTarget<'_>, Failure> {
        // Only controllers are polled: whether a file can be polled is unknown while it is empty.
        let poll = args.poll && target.has_controller();
        let alignment = file::alignment([block as u64]);
        let options = TargetOptions {
            alignment,
            depth,
            jobs: 1,
            jobs_option: "numjobs",
            poll,
            one_thread: true,
            direct: true,
        };
        let mut target = OpenTarget::open(target, &stack, options)?;
        check_opened(requests, target.target().info())?;
        Ok(target)
    };
    let Job { source, destination, via, staged, ranges, destination_bytes } = job;
    let (mut source, mut destination) = (open(source)?, open(destination)?);
    let mut via = via.map(open).transpose()?;

    let (buffers, phases) = (stack.buffers().map_err(OpenError::from)?, Vec::new());
    let mut run = Run { args, interrupt, buffers, ranges: &ranges, block, phases };
    let began = Instant::now();
    let copied = run.all(&mut source, &mut destination, via.as_mut());
    let opened: Vec<_> = [&source, &destination].into_iter().chain(&via).collect();
    let mut notes: Vec<_> = opened.iter().flat_map(|opened| opened.notes()).collect();
    if matches!(args.destination, TargetSpec::SoftMemory(..)) {
        let name = &args.destination;
        notes.push(format!(
            "{name} is memory of this run and is gone with it: name soft:IMAGE or a file to keep the copy"
        ));
    }
    let mut report = CopyReport {
        command: "copy",
        source: args.source.to_string(),
        destination: args.destination.to_string(),
        via: args.via.as_ref().map(ToString::to_string),
        bytes: ranges.total(),
        hole_bytes: ranges.total() - ranges.data_bytes(),
        block_bytes: block as u64,
        iodepth: depth as u64,
        seconds: began.elapsed().as_secs_f64(),
        phases: run.phases,
        sha256: *copied.as_ref().unwrap_or(&None),
        stack: StackReport::new(&stack, &opened),
        notes,
        error: None,
        left: match args.destination {
            TargetSpec::Pci { .. } => "holds a part",
            // It may have existed, and is replaced only by the whole.
            TargetSpec::File(_) | TargetSpec::SoftImage(..) if args.force => "is as it was",
            _ => "does not exist",
        },
    };
    drop((source, via, destination));
    let ended = copied.and_then(|_| {
        if interrupt.is_raised() {
            return Err(EngineError::Interrupted.into());
        }
        Ok(staged.map_or(Ok(()), |staged| staged.commit(destination_bytes))?)
    });
    report.error = ended.as_ref().err().map(Failure::line);
    Ok((report, ended))
}

/// Checks the length of the source: one that has grown would be copied only in part, and a hole at
/// its end is not read.
fn check_length(args: &CopyArgs, source: &OpenTarget<'_>, before: u64) -> Result<(), Failure> {
    let name = args.source.to_string();
    match source.file_bytes().map_err(OpenError::File)? {
        Some(after) if after < before => {
            Err(EngineError::SourceEnded { name, at: after, expected: before }.into())
        }
        Some(after) if after > before && args.size.is_none() => {
            Err(Failure::SourceGrew { name, before, after })
        }
        _ => Ok(()),
    }
}
