//! `io`: a workload on one target.

use crate::args::{IoArgs, Protect, Rw, TargetSpec};
use crate::engine::jobs::{self, JobsStats, Task};
use crate::engine::verify::{COUNTED_BLOCKS, VerifyOptions};
use crate::engine::worker::EngineError;
use crate::engine::workload::{Workload, refill};
use crate::failure::Failure;
use crate::output;
use crate::progress::{End, Progress};
use crate::random::Random;
use crate::report::CpuReport;
use crate::report::io::{IoParameters, IoReport};
use crate::report::stack::StackReport;
use crate::setup::error::{LimitError, OpenError};
use crate::setup::open::{OpenTarget, RequestLimits, TargetOptions, check_opened, check_requests};
use crate::setup::part::{self, Part};
use crate::setup::resolve::{ResolvedTarget, check_units, stack_for};
use crate::setup::stack::BufferNeed;
use crate::setup::staged::{Place, check_folder, place, scratch, scratch_in};
use crate::signal::Interrupt;
use crate::targets::file;
use crate::units::{Share, TimeSpan, counted};
use pinfold::{Buffer, CpuTime};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// Runs the workload, and prints the report, also of one that ended early.
pub(crate) fn run(args: &IoArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let (report, ended) = measure_all(args, &interrupt)?;
    if args.json {
        output::json(&report)?;
    } else {
        output::text(&report.to_string())?;
    }
    ended.map_or(Ok(()), Err)
}

/// A target with the part of it that is used.
struct Region {
    target: ResolvedTarget,
    capacity: u64,
    /// Whether the target is a file that was created for the run.
    is_new: bool,
}

/// Checks the options that depend on the kind of target.
fn check_options(args: &IoArgs, spec: &TargetSpec) -> Result<(), OpenError> {
    if args.verify && args.rw.trims() {
        let reason = "the contents of deallocated blocks are undefined: verify with --rw randrw";
        let (option, value) = ("rw", args.rw.name().to_owned());
        return Err(OpenError::Unsupported { option, value, reason: reason.to_owned() });
    }
    check_units(args.stack.iommu_units, [spec])
}

/// Resolves the target.
fn resolve(args: &IoArgs, spec: &TargetSpec) -> Result<Region, Failure> {
    let (target, capacity) = match spec {
        TargetSpec::SoftMemory(size, _) => {
            let used = args.size.map_or(size.0, |used| used.of(size.0));
            // Jobs that begin at the same place use the same bytes.
            let parts = if args.offset_increment.is_some() { args.numjobs.into() } else { 1 };
            let used = used.saturating_mul(parts);
            let target = ResolvedTarget::memory(spec, *size, if args.writes() { used } else { 0 })?;
            return Ok(Region { target, capacity: size.0, is_new: false });
        }
        TargetSpec::SoftImage(path, _) => ResolvedTarget::image(spec, path, args.writes())?,
        TargetSpec::Pci { .. } if args.writes() && !args.force => {
            return Err(OpenError::HoldsData(spec.to_string()).into());
        }
        TargetSpec::Pci { via, bdf, nsid } => {
            let interrupts = if args.poll { 0 } else { args.numjobs.into() };
            ResolvedTarget::pci(spec, (*via, *bdf), *nsid, interrupts, args.stack.machine)?
        }
        TargetSpec::File(path) => match place(path)? {
            Place::Exists => ResolvedTarget::existing(spec, path, args.writes())?,
            place => return create(args, spec, path, place),
        },
    };
    if args.writes() && !args.force && target.holds_data() {
        return Err(OpenError::HoldsData(target.name).into());
    }
    Ok(Region { target, capacity, is_new: false })
}

/// Creates a scratch file with room for all jobs, at `path` or in that folder.
fn create(args: &IoArgs, spec: &TargetSpec, path: &Path, place: Place) -> Result<Region, Failure> {
    let target = || spec.to_string();
    // Before its size is asked for: the name of a device that does not exist needs none.
    if place == Place::New {
        check_folder(path)?;
        if path.as_os_str().as_bytes().ends_with(b"/") {
            return Err(OpenError::NoFolder(target()).into());
        }
    }
    let bytes = |share, option| match share {
        Share::Bytes(bytes) => Ok(bytes),
        Share::Percent(_) => Err(LimitError::ShareOfNothing { option, target: target() }),
    };
    let Some(size) = args.size else {
        let state = if place == Place::Folder { "is a folder" } else { "does not exist" };
        return Err(LimitError::SizeNeeded { target: target(), state }.into());
    };
    let increment =
        args.offset_increment.map_or(Ok(0), |share| bytes(share, "offset-increment"))?;
    let others = increment.saturating_mul(u64::from(args.numjobs).saturating_sub(1));
    let capacity =
        bytes(size, "size")?.saturating_add(bytes(args.offset, "offset")?).saturating_add(others);
    let file = if place == Place::Folder { scratch_in(path)? } else { scratch(path)? };
    Ok(Region {
        target: ResolvedTarget::staged(spec, path, file, capacity),
        capacity,
        is_new: true,
    })
}

/// The smallest block that all targets accept.
const SMALLEST_BLOCK: usize = 4096;

/// Runs the workload to its end.
pub(crate) fn measure(args: &IoArgs, interrupt: &Interrupt) -> Result<IoReport, Failure> {
    match measure_all(args, interrupt)? {
        (report, None) => Ok(report),
        (_, Some(failure)) => Err(failure),
    }
}

/// Runs the workload, and returns its report and, if it ended early, why.
fn measure_all(
    args: &IoArgs,
    interrupt: &Interrupt,
) -> Result<(IoReport, Option<Failure>), Failure> {
    let spec = &args.target;
    check_options(args, spec)?;
    let Region { target, capacity, is_new } = resolve(args, spec)?;
    let sizes = args.block_sizes();
    let RequestLimits { block: min_block, .. } =
        check_requests(sizes.min, args.iodepth, &[&target])?;
    let requests = check_requests(sizes.max, args.iodepth, &[&target])?;
    let RequestLimits { block, depth } = requests;
    let part = part::part(args, &target.name, capacity, block)?;
    let jobs = usize::from(args.numjobs);
    if args.verify && (jobs as u64) > part.blocks {
        return Err(LimitError::Jobs { jobs, blocks: part.blocks, target: target.name }.into());
    }
    let spare = if args.verify || !target.has_controller() {
        0
    } else {
        spare(args.stack.protect, jobs, depth, block)
    };
    let count = depth.saturating_add(spare).saturating_mul(jobs);
    let lower = match (depth > 1, block > SMALLEST_BLOCK, jobs > 1) {
        (true, true, true) => "--iodepth, --bs or --numjobs",
        (true, true, false) => "--iodepth or --bs",
        (true, false, true) => "--iodepth or --numjobs",
        (true, false, false) => "--iodepth",
        (false, true, true) => "--bs or --numjobs",
        (false, true, false) => "--bs",
        (false, false, true) => "--numjobs",
        (false, false, false) => "",
    };
    let buffers = BufferNeed { count, bytes: block, threads: jobs, lower };
    let stack = stack_for(args.stack, &[&target], buffers)?;
    let alignment = file::alignment([min_block as u64, block as u64, part.offset, part.increment]);
    let options = TargetOptions {
        alignment,
        depth,
        jobs,
        jobs_option: "numjobs",
        poll: args.poll,
        direct: true,
        one_thread: true,
    };
    let mut target = OpenTarget::open(target, &stack, options)?;
    check_opened(requests, target.target().info())?;
    if let Some(reason) = target.target().info().no_trim.filter(|_| args.rw.trims()) {
        let (option, value) = ("rw", args.rw.name().to_owned());
        return Err(OpenError::Unsupported { option, value, reason: reason.to_owned() }.into());
    }
    let workload = workload(args, part, block, depth);
    let task = Task {
        workload,
        verify: args
            .verify
            .then_some(VerifyOptions { min_block, counted_blocks: COUNTED_BLOCKS / jobs as u64 }),
    };
    let needs_layout = is_new && args.rw.needs_layout() && !args.verify;
    let mut buffers = stack.buffers().map_err(OpenError::from)?;
    if needs_layout || needs_data(args) {
        fill(&mut buffers, block)?;
    }
    let mut run = Run { target: &mut target, buffers, interrupt };
    let (mut stats, mut cpu, mut ended) = (JobsStats::default(), CpuReport::default(), None);
    if needs_layout {
        ended = run.lay_out(workload, capacity);
    }
    if ended.is_none() {
        let before = CpuTime::here();
        stats = run.task(task, if args.verify { "verifying" } else { "running" }, jobs);
        cpu = CpuReport::since(before, stats.workload.requests.requests());
        ended = stats.ended.take().map(Failure::from);
    }
    if args.writes() {
        let synced = run.target.target().sync(interrupt);
        // The first failure is the cause.
        ended = ended
            .or_else(|| synced.err().map(|error| EngineError::of_flush(error, interrupt).into()));
    }
    let parameters = IoParameters {
        target: spec.to_string(),
        is_scratch: is_new,
        workload,
        min_block: min_block as u64,
        iodepth: depth as u64,
        numjobs: jobs as u64,
        ended_early: ended.as_ref().map(Failure::line),
    };
    let mut notes = target.notes();
    notes.extend(notes_of(spec, part, block));
    Ok((IoReport::new(parameters, stats, cpu, StackReport::new(&stack, &[&target]), notes), ended))
}

/// Returns whether buffers are written from without having been filled for it: a verified run fills
/// them itself, and what only reads or trims needs no data.
fn needs_data(args: &IoArgs) -> bool {
    args.writes() && !args.verify && !args.rw.trims()
}

/// Returns the workload of each job; if it is verified, that of all together.
fn workload(args: &IoArgs, part: Part, block: usize, depth: usize) -> Workload {
    let limit = if args.time_based { u64::MAX } else { part.blocks };
    Workload {
        rw: args.rw,
        block,
        start: part.offset,
        blocks: part.blocks,
        requests: args.verify_requests.unwrap_or(limit),
        runtime: args.runtime.map(|TimeSpan(runtime)| runtime),
        ramp: args.ramp_time.map_or(Duration::ZERO, |TimeSpan(ramp)| ramp),
        rwmixread: args.rwmixread,
        rate: args.rate.map(|rate| rate.0).filter(|rate| *rate > 0),
        depth,
        increment: part.increment,
        seed: 0,
        flush_every: Some(args.fsync).filter(|every| *every > 0),
    }
}

/// Returns what the options mean here that is not what a reader may expect.
fn notes_of(spec: &TargetSpec, part: Part, block: usize) -> Vec<String> {
    let mut notes = Vec::new();
    if part.tail > 0 {
        let end = part.offset.saturating_add(part.blocks.saturating_mul(block as u64));
        notes.push(format!(
            "{spec}: the {} from byte {end} were not used: less than one request of {block} bytes",
            counted(part.tail, "byte")
        ));
    }
    if let TargetSpec::File(path) = spec
        && path.starts_with("/dev")
        && !path.starts_with("/dev/shm")
        && path.metadata().is_ok_and(|metadata| metadata.is_file())
    {
        notes.push(format!("{spec}: a regular file among the devices, so its data is in memory"));
    }
    notes
}

/// Bytes of buffers that a job has beyond its depth: at a microsecond for a flush that is more than
/// any controller reads meanwhile.
const SPARE_BYTES: usize = 1 << 20;

/// Returns how many buffers of a job take the place of those that are held until their flush has
/// completed: as many as its depth, since all requests may complete together. Without them the
/// controller would have fewer requests meanwhile.
fn spare(protect: Protect, jobs: usize, depth: usize, block: usize) -> usize {
    // With more jobs than processors, others run while one waits.
    let runs_alone =
        std::thread::available_parallelism().is_ok_and(|processors| jobs < processors.get());
    match protect {
        Protect::Revoke | Protect::Batch if runs_alone => depth.min(SPARE_BYTES / block.max(1)),
        // Nothing is held, or nothing is done until it has returned.
        Protect::Revoke | Protect::Batch | Protect::Static | Protect::Strict => 0,
    }
}

/// A run on an open target.
struct Run<'r, 's> {
    target: &'r mut OpenTarget<'s>,
    buffers: Vec<Buffer>,
    interrupt: &'r Interrupt,
}

impl Run<'_, '_> {
    /// Writes all of a new file once, so that there is something to read, and returns why that
    /// ended early, if it did.
    fn lay_out(&mut self, workload: Workload, capacity: u64) -> Option<Failure> {
        let blocks = capacity.saturating_sub(workload.start) / workload.block.max(1) as u64;
        let layout = Workload {
            rw: Rw::Write,
            blocks,
            requests: blocks,
            runtime: None,
            ramp: Duration::ZERO,
            rate: None,
            flush_every: None,
            ..workload
        };
        let laid_out = self.task(Task { workload: layout, verify: None }, "laying out", 1);
        let failed = |error| EngineError::of_flush(error, self.interrupt);
        let synced = || self.target.target().sync(self.interrupt).map_err(failed).err();
        laid_out.ended.or_else(synced).map(Failure::from)
    }

    /// Runs `task` with at most `most` jobs.
    fn task(&mut self, task: Task, title: &str, most: usize) -> JobsStats {
        let Workload { requests, blocks, block, runtime, ramp, .. } = task.workload;
        let mut targets = self.target.targets();
        targets.truncate(most);
        let jobs = targets.len() as u64;
        let requests = match task.verify {
            None if requests == u64::MAX => None,
            None => Some(requests.saturating_mul(jobs)),
            Some(_) => Some(requests.saturating_add(blocks.saturating_mul(2))),
        };
        let end = End {
            bytes: requests.map(|requests| requests.saturating_mul(block as u64)),
            // Each pass of a verified run lasts this long.
            time: runtime
                .filter(|_| task.verify.is_none())
                .map(|runtime| runtime.saturating_add(ramp)),
        };
        let progress = Progress::requests(title, end);
        jobs::run(targets, task, &mut self.buffers, &progress, self.interrupt)
    }
}

/// Fills the buffers with data that does not compress, and differs between any two of them.
fn fill(buffers: &mut [Buffer], block: usize) -> Result<(), Failure> {
    let mut random = Random::new(0);
    Ok(buffers.iter_mut().try_for_each(|buffer| refill(buffer, block, &mut random))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::SoftOptions;
    use crate::units::ByteSize;

    #[test]
    fn only_writes_need_data_in_the_buffers() {
        let needs = |rw, verify| {
            needs_data(&IoArgs {
                rw,
                verify,
                ..IoArgs::new(TargetSpec::SoftMemory(ByteSize(1 << 20), SoftOptions::default()))
            })
        };
        for rw in [Rw::Read, Rw::Randread, Rw::Trim, Rw::Randtrim] {
            assert!(!needs(rw, false), "{rw:?}");
        }
        for rw in [Rw::Write, Rw::Randwrite, Rw::Rw, Rw::Randrw] {
            assert!(needs(rw, false) && !needs(rw, true), "{rw:?}");
        }
    }
}
