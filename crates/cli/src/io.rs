//! `io`: a workload on one target, in fio's words.

mod cpu;
pub(crate) mod engine;
pub(crate) mod jobs;
pub(crate) mod report;
pub(crate) mod verify;

use crate::args::{IoArgs, Rw};
use crate::copy::stack_report;
use crate::failure::{Failure, LimitError};
use crate::limits;
use crate::memory;
use crate::open::{OpenError, Opened, Place, Use, domain_of, scratch};
use crate::output;
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::stack::Stack;
use crate::targets::spec::TargetSpec;
use crate::targets::{Bytes, file};
use crate::units::TimeSpan;
use cpu::CpuReport;
use engine::Workload;
use jobs::{Completed, Task};
use pinfold::{Buffer, CpuTime};
use report::IoReport;

/// Runs the workload, and prints what it did.
pub(crate) fn run(args: &IoArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let account = measure(args, &interrupt)?;
    if args.json { output::json(&account) } else { output::text(&account.to_text()) }
}

/// The target, how many bytes of it there are, and whether it was made for the run.
fn place(args: &IoArgs) -> Result<(Place, u64, bool), Failure> {
    let spec = &args.target;
    let (place, bytes) = match spec {
        TargetSpec::SoftMemory(size) => {
            let used = args.size.unwrap_or(*size);
            return Ok((Place::memory(spec, *size, if args.writes() { used.0 } else { 0 })?, size.0, false));
        }
        TargetSpec::SoftImage(path) => Place::image(spec, path, args.writes())?,
        TargetSpec::Vfio { .. } if args.writes() && !args.force => {
            return Err(OpenError::HoldsData(spec.to_string()).into());
        }
        TargetSpec::Vfio { bdf, nsid } => {
            let interrupts = if args.poll { 0 } else { args.numjobs.into() };
            Place::pci(spec, *bdf, *nsid, interrupts)?
        }
        TargetSpec::File(path) if !path.exists() => {
            let Some(size) = args.size else { return Err(LimitError::SizeNeeded(spec.to_string()).into()) };
            return Ok((Place::staged(spec, path, scratch(path)?, size.0), size.0, true));
        }
        TargetSpec::File(path) => Place::existing(spec, path, args.writes())?,
    };
    if args.writes() && !args.force && place.holds_data() {
        return Err(OpenError::HoldsData(place.name).into());
    }
    Ok((place, bytes, false))
}

/// How many whole blocks of the target are used.
fn region(args: &IoArgs, name: &str, capacity: u64, block: usize) -> Result<u64, LimitError> {
    let size = args.size.map_or(capacity, |size| size.0);
    let target = || name.to_owned();
    if size > capacity {
        return Err(LimitError::Beyond { size, capacity, target: target() });
    }
    match size / block as u64 {
        0 => Err(LimitError::Region { size, block: block as u64, target: target() }),
        blocks => Ok(blocks),
    }
}

/// Runs the workload.
pub(crate) fn measure(args: &IoArgs, interrupt: &Interrupt) -> Result<IoReport, Failure> {
    let (place, capacity, is_new) = place(args)?;
    let (least, most) = args.lengths();
    let (shortest, _) = limits::check(least, args.iodepth, &[&place])?;
    let (block, depth) = limits::check(most, args.iodepth, &[&place])?;
    let blocks = region(args, &place.name, capacity, block)?;
    let jobs = usize::from(args.numjobs);
    if (jobs as u64) > blocks {
        return Err(LimitError::Jobs { jobs, blocks, target: place.name }.into());
    }
    let slots = depth.saturating_mul(jobs);
    let controllers = u64::from(place.has_controller());
    memory::check(Stack::need((slots, block), controllers, place.held_bytes()), args.stack.memory)?;
    let stack = Stack::build(args.stack, domain_of(&[&place])?, (slots, block), controllers)?;
    let how = Use { block: file::granule((shortest, block)), depth, jobs, poll: args.poll };
    let mut opened = Opened::open(place, &stack, how)?;
    limits::check_opened(block, depth, opened.target().info())?;
    let mut buffers = stack.buffers()?;
    fill(&mut buffers, block)?;

    let workload = Workload {
        rw: args.rw,
        block,
        blocks,
        requests: args.number_ios.unwrap_or(if args.time_based { u64::MAX } else { blocks }),
        runtime: args.runtime.map(|TimeSpan(runtime)| runtime),
        reads_in_100: args.rwmixread,
    };
    if is_new && args.rw != Rw::Write && !args.verify {
        let lay_out = Workload { rw: Rw::Write, requests: blocks, runtime: None, ..workload };
        go(&mut opened, (lay_out, Task::Run), &mut buffers, ("laying out", interrupt))?;
        opened.target().sync()?;
    }
    let (task, title) = if args.verify {
        (Task::Check(shortest, verify::COUNTED / jobs as u64), "verifying")
    } else {
        (Task::Run, "running")
    };
    let before = CpuTime::here();
    let Completed { outcome, verified } =
        go(&mut opened, (workload, task), &mut buffers, (title, interrupt))?;
    let cpu = CpuReport::since(before, outcome.reads.requests + outcome.writes.requests);
    if args.writes() {
        opened.target().sync()?;
    }
    let account = stack_report(&stack, &[&opened]);
    let notes = opened.notes();
    let target = args.target.to_string();
    let mut account = IoReport::new(target, depth as u64, (&workload, &outcome), account, notes);
    (account.least_block_bytes, account.numjobs) = (least.0, jobs as u64);
    account.verified = verified;
    account.cpu = cpu;
    drop(opened);
    Ok(account)
}

fn go(
    opened: &mut Opened<'_>,
    (workload, task): (Workload, Task),
    buffers: &mut Vec<Buffer>,
    (title, interrupt): (&str, &Interrupt),
) -> Result<Completed, Failure> {
    let blocks = match task {
        Task::Run => workload.requests.min(workload.blocks),
        Task::Check(..) => workload.blocks.saturating_mul(2),
    };
    let progress = match (task, workload.runtime) {
        (Task::Run, Some(runtime)) if workload.requests == u64::MAX => Progress::timed(title, runtime),
        _ => Progress::new(title, blocks.saturating_mul(workload.block as u64)),
    };
    Ok(jobs::run(opened.targets(), (&workload, task), buffers, &progress, interrupt)?)
}

/// What is written: bytes that do not compress, and are not the same in any two buffers.
fn fill(buffers: &mut [Buffer], block: usize) -> Result<(), Failure> {
    let mut random: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut piece = [0u8; 4096];
    for buffer in buffers {
        for at in (0..block).step_by(piece.len()) {
            for word in piece.chunks_exact_mut(8) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                word.copy_from_slice(&random.to_le_bytes());
            }
            let len = piece.len().min(block - at);
            buffer.write_at(at, piece.get(..len).unwrap_or_default())?;
        }
    }
    Ok(())
}
