//! `io`: a workload on one target, with fio's options, or the jobs of a job file.

use crate::args::{IoArgs, OutputFormat, Protect, Rw, TargetSpec, job_file};
use crate::engine::jobs::{self, JobsStats, Task};
use crate::engine::verify::{COUNTED_BLOCKS, VerifyOptions};
use crate::engine::workload::Workload;
use crate::failure::Failure;
use crate::histogram::PERCENTILES;
use crate::output;
use crate::progress::Progress;
use crate::random::Random;
use crate::report::cpu::CpuReport;
use crate::report::fio;
use crate::report::io::{IoParameters, IoReport};
use crate::report::stack::StackReport;
use crate::setup::error::OpenError;
use crate::setup::limits::{self, LimitError, RequestLimits};
use crate::setup::memory::{self, BufferNeed};
use crate::setup::open::OpenTarget;
use crate::setup::options::TargetOptions;
use crate::setup::resolve::{ResolvedTarget, check_units, domain_of};
use crate::setup::scratch::scratch;
use crate::setup::stack::Stack;
use crate::signal::Interrupt;
use crate::targets::file;
use crate::targets::target::DataBuffer;
use crate::units::{Percentiles, TimeSpan};
use pinfold::{Buffer, CpuTime};
use std::time::{Duration, Instant};

/// Runs the workload, or the jobs of a file, and prints the reports; `given` are the options on the command line.
pub(crate) fn run(args: &IoArgs, given: &[String]) -> Result<(), Failure> {
    let began = Instant::now();
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let Some(path) = args.job_file() else {
        return print(args, &[measure(args, &interrupt)?], began);
    };
    let mut reports = Vec::new();
    for job in job_file::read(path, args, given)? {
        reports.push(measure(&job, &interrupt)?);
    }
    print(args, &reports, began)
}

fn print(args: &IoArgs, reports: &[IoReport], began: Instant) -> Result<(), Failure> {
    if args.output_format == OutputFormat::Json {
        return Ok(output::pretty_json(&fio::to_json(reports, began.elapsed()))?);
    }
    for (at, report) in reports.iter().enumerate() {
        if args.json {
            output::json(report)?;
        } else if reports.len() > 1 {
            output::text(&format!("{}{}: {report}", if at > 0 { "\n" } else { "" }, report.name))?;
        } else {
            output::text(&report.to_string())?;
        }
    }
    Ok(())
}

/// A target with the part of it that is used.
struct Region {
    target: ResolvedTarget,
    capacity: u64,
    /// Whether the target is a file that was created for the run.
    is_new: bool,
}

/// Resolves the target.
fn resolve(args: &IoArgs, spec: &TargetSpec) -> Result<Region, Failure> {
    let unsupported = |option, value: &str, reason: String| OpenError::Unsupported {
        option,
        value: value.to_owned(),
        reason,
    };
    let engine = if matches!(spec, TargetSpec::File(_)) { "io_uring" } else { "pinfold" };
    if let Some(other) = args.ioengine.as_deref().filter(|other| *other != engine) {
        let reason =
            format!("{spec} is driven by {engine}: leave the option out, or use --ioengine {engine}");
        return Err(unsupported("ioengine", other, reason).into());
    }
    if !args.direct && !matches!(spec, TargetSpec::File(_)) {
        let reason = format!("{spec} has no page cache: leave the option out");
        return Err(unsupported("direct", "0", reason).into());
    }
    if !args.norandommap {
        let reason = "a map of used blocks is not supported: leave the option out".to_owned();
        return Err(unsupported("norandommap", "0", reason).into());
    }
    if !args.group_reporting {
        let reason =
            "the jobs are reported together: write one section for each job in a job file".to_owned();
        return Err(unsupported("group-reporting", "0", reason).into());
    }
    if args.verify && args.rw.trims() {
        let reason = "the contents of deallocated blocks are undefined: verify with --rw randrw".to_owned();
        return Err(unsupported("rw", args.rw.name(), reason).into());
    }
    check_units(args.stack.iommu_units, [spec])?;
    let (target, capacity) = match spec {
        TargetSpec::SoftMemory(size) => {
            let used = args.size.unwrap_or(*size);
            let target = ResolvedTarget::memory(spec, *size, if args.writes() { used.0 } else { 0 })?;
            return Ok(Region { target, capacity: size.0, is_new: false });
        }
        TargetSpec::SoftImage(path) => ResolvedTarget::image(spec, path, args.writes())?,
        TargetSpec::Vfio { .. } if args.writes() && !args.force => {
            return Err(OpenError::HoldsData(spec.to_string()).into());
        }
        TargetSpec::Vfio { bdf, nsid } => {
            let interrupts = if args.poll { 0 } else { args.numjobs.into() };
            ResolvedTarget::pci(spec, *bdf, *nsid, interrupts)?
        }
        TargetSpec::File(path) if !path.exists() => {
            let Some(size) = args.size else { return Err(LimitError::SizeNeeded(spec.to_string()).into()) };
            let capacity = size.0.saturating_add(args.offset.0);
            let target = ResolvedTarget::staged(spec, path, scratch(path)?, capacity);
            return Ok(Region { target, capacity, is_new: true });
        }
        TargetSpec::File(path) => ResolvedTarget::existing(spec, path, args.writes())?,
    };
    if args.writes() && !args.force && target.holds_data() {
        return Err(OpenError::HoldsData(target.name).into());
    }
    Ok(Region { target, capacity, is_new: false })
}

/// Returns how many whole blocks of the target are used.
fn blocks(args: &IoArgs, name: &str, capacity: u64, block: usize) -> Result<u64, LimitError> {
    let (offset, target, block) = (args.offset.0, || name.to_owned(), block as u64);
    if !offset.is_multiple_of(block) {
        return Err(LimitError::Offset { offset, block, target: target() });
    }
    let available = capacity.saturating_sub(offset);
    let size = args.size.map_or(available, |size| size.0);
    if size > available {
        return Err(LimitError::Beyond { size, capacity: available, target: target() });
    }
    match size / block {
        0 => Err(LimitError::Region { size, block, target: target() }),
        blocks => Ok(blocks),
    }
}

/// Runs the workload.
pub(crate) fn measure(args: &IoArgs, interrupt: &Interrupt) -> Result<IoReport, Failure> {
    let spec = args.spec().ok_or(OpenError::NoTarget)?;
    let Region { target, capacity, is_new } = resolve(args, spec)?;
    let sizes = args.block_sizes();
    let RequestLimits { block: min_block, .. } = limits::check(sizes.min, args.iodepth, &[&target])?;
    let requests = limits::check(sizes.max, args.iodepth, &[&target])?;
    let RequestLimits { block, depth } = requests;
    let blocks = blocks(args, &target.name, capacity, block)?;
    let jobs = usize::from(args.numjobs);
    if (jobs as u64) > blocks {
        return Err(LimitError::Jobs { jobs, blocks, target: target.name }.into());
    }
    let spare = if args.verify || !target.has_controller() {
        0
    } else {
        spare(args.stack.protect, jobs, depth, block)
    };
    let count = depth.saturating_add(spare).saturating_mul(jobs);
    let buffers = BufferNeed { count, bytes: block, lower: "--iodepth, --bs or --numjobs" };
    let controllers = u64::from(target.has_controller());
    memory::check(Stack::need(buffers, controllers, target.held_bytes()), args.stack.memory)?;
    let stack =
        Stack::build(args.stack, domain_of(&[&target], args.stack.iommu_units)?, buffers, controllers)?;
    let alignment = file::alignment([min_block as u64, block as u64, args.offset.0]);
    let options = TargetOptions {
        alignment,
        depth,
        jobs,
        jobs_option: "numjobs",
        poll: args.poll,
        direct: args.direct,
        moves: false,
    };
    let mut target = OpenTarget::open(target, &stack, options)?;
    limits::check_opened(requests, target.target().info())?;
    if let Some(reason) = target.target().info().no_trim.filter(|_| args.rw.trims()) {
        let (option, value) = ("rw", args.rw.name().to_owned());
        return Err(OpenError::Unsupported { option, value, reason: reason.to_owned() }.into());
    }
    let mut buffers = stack.buffers()?;
    fill(&mut buffers, block)?;

    let workload = Workload {
        rw: args.rw,
        block,
        start: args.offset.0,
        blocks,
        requests: args.number_ios.unwrap_or(if args.time_based { u64::MAX } else { blocks }),
        runtime: args.runtime.map(|TimeSpan(runtime)| runtime),
        ramp: args.ramp_time.map_or(Duration::ZERO, |TimeSpan(ramp)| ramp),
        rwmixread: args.rwmixread,
        rate: args.rate.map(|rate| rate.0.max(1)),
        depth,
    };
    if is_new && args.rw.needs_layout() && !args.verify {
        let (ramp, rate) = (Duration::ZERO, None);
        let layout = Workload { rw: Rw::Write, requests: blocks, runtime: None, ramp, rate, ..workload };
        run_task(
            &mut target,
            Task { workload: layout, verify: None },
            &mut buffers,
            "laying out",
            interrupt,
        )?;
        target.target().sync()?;
    }
    let verify =
        args.verify.then_some(VerifyOptions { min_block, counted_blocks: COUNTED_BLOCKS / jobs as u64 });
    let title = if args.verify { "verifying" } else { "running" };
    let before = CpuTime::here();
    let stats = run_task(&mut target, Task { workload, verify }, &mut buffers, title, interrupt)?;
    let cpu = CpuReport::since(before, stats.workload.requests.requests());
    if args.writes() {
        target.target().sync()?;
    }
    let parameters = IoParameters {
        name: args.name.clone(),
        target: spec.to_string(),
        workload,
        min_block: min_block as u64,
        iodepth: depth as u64,
        numjobs: jobs as u64,
        percentiles: args
            .percentile_list
            .as_ref()
            .map_or_else(|| PERCENTILES.to_vec(), |Percentiles(list)| list.clone()),
    };
    Ok(IoReport::new(parameters, stats, cpu, StackReport::new(&stack, &[&target]), target.notes()))
}

/// Bytes of buffers that a job has beyond its depth: at a microsecond for a flush that is more than any controller reads meanwhile.
const SPARE_BYTES: usize = 1 << 20;

/// The depth from which on a job has them. With fewer requests in flight a user measures latency, and expects not one more.
const SPARE_DEPTH: usize = 16;

/// Returns how many buffers of a job take the place of those that are held until their flush has completed. Without them the
/// controller would have fewer requests meanwhile.
fn spare(protect: Protect, jobs: usize, depth: usize, block: usize) -> usize {
    // Where there are more jobs than processors, others run while one waits.
    let runs_alone = std::thread::available_parallelism().is_ok_and(|processors| jobs < processors.get());
    match protect {
        Protect::Revoke if runs_alone && depth >= SPARE_DEPTH => depth.min(SPARE_BYTES / block.max(1)),
        // Nothing is held, or nothing is done until it has returned.
        Protect::Revoke | Protect::Static | Protect::Strict => 0,
    }
}

fn run_task(
    target: &mut OpenTarget<'_>,
    task: Task,
    buffers: &mut Vec<Buffer>,
    title: &str,
    interrupt: &Interrupt,
) -> Result<JobsStats, Failure> {
    let Workload { requests, blocks, block, runtime, .. } = task.workload;
    let blocks = match task.verify {
        None => requests.min(blocks),
        Some(_) => blocks.saturating_mul(2),
    };
    let progress = match (task.verify, runtime) {
        (None, Some(runtime)) if requests == u64::MAX => Progress::timed(title, runtime),
        _ => Progress::new(title, blocks.saturating_mul(block as u64)),
    };
    Ok(jobs::run(target.targets(), task, buffers, &progress, interrupt)?)
}

/// Fills the buffers with data that does not compress, and differs between any two of them.
fn fill(buffers: &mut [Buffer], block: usize) -> Result<(), Failure> {
    let mut random = Random::new(0);
    let mut chunk = [0u8; 4096];
    for buffer in buffers {
        for at in (0..block).step_by(chunk.len()) {
            random.fill(&mut chunk);
            let len = chunk.len().min(block - at);
            buffer.write_at(at, chunk.get(..len).unwrap_or_default())?;
        }
    }
    Ok(())
}
