//! `io`: a workload on one target, in fio's words.

pub(crate) mod engine;
pub(crate) mod report;

use crate::args::{IoArgs, Rw};
use crate::copy::stack_account;
use crate::failure::{Failure, LimitError};
use crate::limits;
use crate::open::{OpenError, Opened, Place, Scratch, Use};
use crate::output;
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::stack::Stack;
use crate::target::Bytes;
use crate::target::spec::TargetSpec;
use engine::{Outcome, Workload};
use pinfold::Buffer;
use report::IoAccount;
use std::time::Duration;

/// Runs the workload, and prints what it did.
pub(crate) fn run(args: &IoArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let account = measure(args, &interrupt)?;
    if args.json { output::json(&account) } else { output::text(&account.to_text()) }
}

fn writes(rw: Rw) -> bool {
    matches!(rw, Rw::Write | Rw::Randwrite | Rw::Randrw)
}

/// The target, how many bytes of it there are, and what removes it at the end where it was made for the run.
fn place(args: &IoArgs) -> Result<(Place, u64, Option<Scratch>), Failure> {
    let spec = &args.target;
    let (place, bytes) = match spec {
        TargetSpec::SoftMemory(size) => {
            let used = args.size.unwrap_or(*size);
            return Ok((Place::memory(spec, *size, if writes(args.rw) { used.0 } else { 0 })?, size.0, None));
        }
        TargetSpec::SoftImage(path) => Place::image(spec, path, writes(args.rw))?,
        TargetSpec::File(path) if !path.exists() => {
            let Some(size) = args.size else { return Err(LimitError::SizeNeeded(spec.to_string()).into()) };
            let (scratch, file) = Scratch::create(path)?;
            return Ok((Place::staged(spec, path, file, size.0), size.0, Some(scratch)));
        }
        TargetSpec::File(path) if writes(args.rw) => Place::write_file(spec, path)?,
        TargetSpec::File(path) => Place::read_file(spec, path)?,
    };
    if writes(args.rw) && !args.force && place.holds_data() {
        return Err(OpenError::HoldsData(place.name).into());
    }
    Ok((place, bytes, None))
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
pub(crate) fn measure(args: &IoArgs, interrupt: &Interrupt) -> Result<IoAccount, Failure> {
    let (place, capacity, scratch) = place(args)?;
    let (block, depth) = limits::check(args.bs, args.iodepth, &[&place])?;
    let blocks = region(args, &place.name, capacity, block)?;
    let stack = Stack::build(args.stack, (depth, block), u64::from(place.has_controller()))?;
    let mut opened = Opened::open(place, &stack, Use { block, depth, jobs: 1, poll: false })?;
    limits::check_opened(block, depth, opened.target().info())?;
    let mut buffers = stack.buffers()?;
    fill(&mut buffers, block)?;

    let workload = Workload {
        rw: args.rw,
        block,
        blocks,
        requests: if args.time_based { u64::MAX } else { blocks },
        runtime: args.runtime.map(Duration::from_secs),
        reads_in_100: args.rwmixread,
    };
    if scratch.is_some() && args.rw != Rw::Write {
        let lay_out = Workload { rw: Rw::Write, requests: blocks, runtime: None, ..workload };
        go(&mut opened, lay_out, &mut buffers, ("laying out", interrupt))?;
        opened.target().sync()?;
    }
    let outcome = go(&mut opened, workload, &mut buffers, ("running", interrupt))?;
    if writes(args.rw) {
        opened.target().sync()?;
    }
    let account = stack_account(&stack, &[&opened]);
    let notes = opened.notes();
    let target = args.target.to_string();
    let account = IoAccount::new(target, depth as u64, (&workload, &outcome), account, notes);
    drop((opened, scratch));
    Ok(account)
}

fn go(
    opened: &mut Opened<'_>,
    workload: Workload,
    buffers: &mut Vec<Buffer>,
    (title, interrupt): (&str, &Interrupt),
) -> Result<Outcome, Failure> {
    let total = workload.requests.min(workload.blocks).saturating_mul(workload.block as u64);
    let progress = Progress::new(title, total);
    Ok(engine::run(opened.target(), workload, buffers, &progress, interrupt)?)
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
