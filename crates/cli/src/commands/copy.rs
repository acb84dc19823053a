//! `copy`: all bytes of one target to another, through a third on request; the destination is complete or absent.

use crate::args::{CopyArgs, TargetSpec};
use crate::engine::digest::digest;
use crate::engine::error::EngineError;
use crate::engine::pump::{Plan, pump};
use crate::failure::Failure;
use crate::output;
use crate::progress::Progress;
use crate::report::copy::{CopyReport, Hashes, PhaseReport};
use crate::report::stack::StackReport;
use crate::setup::error::OpenError;
use crate::setup::limits::{self, LimitError, RequestLimits};
use crate::setup::memory::{self, BufferNeed};
use crate::setup::open::OpenTarget;
use crate::setup::options::TargetOptions;
use crate::setup::resolve::{ResolvedTarget, check_units, domain_of};
use crate::setup::scratch::{Place, check_folder, place, scratch};
use crate::setup::stack::Stack;
use crate::setup::staged::Staged;
use crate::signal::Interrupt;
use crate::targets::file;
use pinfold::Buffer;
use rustix::fs::Mode;
use std::os::unix::fs::PermissionsExt;

/// Copies and prints the report.
pub(crate) fn run(args: &CopyArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let report = copy(args, &interrupt)?;
    if args.json {
        return Ok(output::json(&report)?);
    }
    let mut text = report.to_string();
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
    total: u64,
    /// The final length of the destination's file.
    destination_bytes: u64,
}

impl Job {
    fn prepare(args: &CopyArgs) -> Result<Self, Failure> {
        check_units(args.stack.iommu_units, [&args.source, &args.destination].into_iter().chain(&args.via))?;
        let (source, capacity) = open_source(&args.source, args.poll)?;
        let total = args.size.map_or(capacity, |size| size.0);
        if total > capacity {
            let target = source.name;
            return Err(LimitError::Beyond { size: total, capacity, target }.into());
        }
        let via = args.via.as_ref().map(|spec| open_via(spec, args, total)).transpose()?;
        if let Some(via) = via.as_ref().filter(|via| via.is_same_file(&source)) {
            return Err(OpenError::ViaIsSource(via.name.clone()).into());
        }
        let (destination, staged, destination_bytes) = open_destination(args, &source, total)?;
        Ok(Self { source, destination, via, staged, total, destination_bytes })
    }

    fn targets(&self) -> impl Iterator<Item = &ResolvedTarget> {
        [&self.source, &self.destination].into_iter().chain(&self.via)
    }
}

fn open_source(spec: &TargetSpec, poll: bool) -> Result<(ResolvedTarget, u64), Failure> {
    match spec {
        TargetSpec::File(path) => Ok(ResolvedTarget::existing(spec, path, false)?),
        TargetSpec::SoftImage(path, _) => Ok(ResolvedTarget::image(spec, path, false)?),
        TargetSpec::SoftMemory(..) => Err(LimitError::EmptySource(spec.to_string()).into()),
        TargetSpec::Vfio { bdf, nsid } => Ok(ResolvedTarget::pci(spec, *bdf, *nsid, u32::from(!poll))?),
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
        TargetSpec::Vfio { .. } => overwritten(spec, args)?,
        TargetSpec::File(path) => (ResolvedTarget::staged(spec, path, scratch(path)?, total), u64::MAX),
    };
    check_capacity(spec, capacity, total)?;
    Ok(target)
}

/// Resolves a real controller's namespace that will be overwritten, with its capacity.
fn overwritten(spec: &TargetSpec, args: &CopyArgs) -> Result<(ResolvedTarget, u64), Failure> {
    match spec {
        TargetSpec::Vfio { bdf, nsid } if args.force => {
            Ok(ResolvedTarget::pci(spec, *bdf, *nsid, u32::from(!args.poll))?)
        }
        _ => Err(OpenError::HoldsData(spec.to_string()).into()),
    }
}

fn open_destination(
    args: &CopyArgs,
    source: &ResolvedTarget,
    total: u64,
) -> Result<(ResolvedTarget, Option<Staged>, u64), Failure> {
    let spec = &args.destination;
    let (path, bytes) = match spec {
        TargetSpec::SoftMemory(size, _) => {
            let target = ResolvedTarget::memory(spec, *size, total)?;
            check_capacity(spec, size.0, total)?;
            return Ok((target, None, total));
        }
        TargetSpec::Vfio { .. } => {
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
    let staged = Staged::create(path, args.force, mode_like(source), source.file())?;
    staged.reserve(bytes)?;
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
    plan: Plan,
    phases: Vec<PhaseReport>,
}

impl Run<'_> {
    fn phase(
        &mut self,
        from: &mut OpenTarget<'_>,
        to: &mut OpenTarget<'_>,
        title: &str,
    ) -> Result<(), Failure> {
        let (source, destination) = (from.target(), to.target());
        let names = (source.info().name.clone(), destination.info().name.clone());
        let progress = Progress::new(title, self.plan.total);
        let stats = pump(source, destination, self.plan, &mut self.buffers, &progress, self.interrupt)?;
        self.phases.push(PhaseReport::new(names.0, names.1, &stats));
        Ok(())
    }

    fn verify(
        &mut self,
        source: &mut OpenTarget<'_>,
        destination: &mut OpenTarget<'_>,
    ) -> Result<Hashes, Failure> {
        let mut hash = |target: &mut OpenTarget<'_>, title| {
            let progress = Progress::new(title, self.plan.total);
            digest(target.target(), self.plan, &mut self.buffers, &progress, self.interrupt)
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

/// Copies; the destination exists if this succeeds, and is absent otherwise.
pub(crate) fn copy(args: &CopyArgs, interrupt: &Interrupt) -> Result<CopyReport, Failure> {
    let job = Job::prepare(args)?;
    let targets: Vec<_> = job.targets().collect();
    let requests = limits::check(args.bs, args.iodepth, &targets)?;
    let RequestLimits { block, .. } = requests;
    let depth = limits::depth_for(job.total, requests);
    let domain = domain_of(&targets, args.stack.iommu_units)?;
    let controllers = targets.iter().filter(|target| target.has_controller()).count() as u64;
    let held = targets.iter().map(|target| target.held_bytes()).sum();
    let buffers = BufferNeed { count: depth, bytes: block, lower: "--bs or --iodepth" };
    memory::check(Stack::need(buffers, controllers, held), args.stack.memory)?;
    let stack = Stack::build(args.stack, domain, buffers, controllers)?;
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
            moves: false,
            direct: true,
        };
        let mut target = OpenTarget::open(target, &stack, options)?;
        limits::check_opened(requests, target.target().info())?;
        Ok(target)
    };
    let Job { source, destination, via, staged, total, destination_bytes } = job;
    let (mut source, mut destination) = (open(source)?, open(destination)?);
    let mut via = via.map(open).transpose()?;

    let plan = Plan { total, block };
    let mut run = Run { args, interrupt, buffers: stack.buffers()?, plan, phases: Vec::new() };
    match &mut via {
        None => run.phase(&mut source, &mut destination, "copying")?,
        Some(via) => {
            run.phase(&mut source, via, "there")?;
            run.phase(via, &mut destination, "and back")?;
        }
    }
    if args.size.is_none() {
        check_not_grown(&args.source, &source, total)?;
    }
    let sha256 = if args.verify { Some(run.verify(&mut source, &mut destination)?) } else { None };

    let opened: Vec<_> = [&source, &destination].into_iter().chain(&via).collect();
    let report = CopyReport {
        command: "copy",
        source: args.source.to_string(),
        destination: args.destination.to_string(),
        via: args.via.as_ref().map(ToString::to_string),
        bytes: total,
        block_bytes: block as u64,
        iodepth: depth as u64,
        phases: run.phases,
        sha256,
        stack: StackReport::new(&stack, &opened),
        notes: opened.iter().flat_map(|opened| opened.notes()).collect(),
    };
    drop((source, via, destination));
    if interrupt.is_raised() {
        return Err(EngineError::Interrupted.into());
    }
    if let Some(staged) = staged {
        staged.commit(destination_bytes)?;
    }
    Ok(report)
}

/// Checks that the source has not grown: it would be copied only in part.
fn check_not_grown(spec: &TargetSpec, source: &OpenTarget<'_>, before: u64) -> Result<(), Failure> {
    match source.file_bytes().map_err(OpenError::File)? {
        Some(after) if after > before => Err(Failure::SourceGrew { name: spec.to_string(), before, after }),
        _ => Ok(()),
    }
}
