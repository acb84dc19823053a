//! `pools`: a short workload on a model controller, and the DMA pools of its driver.

use super::io;
use crate::args::{IoArgs, PoolsArgs, Rw, SoftOptions, TargetSpec};
use crate::failure::Failure;
use crate::output;
use crate::report::stack::PoolReport;
use crate::signal::Interrupt;
use crate::units::ByteSize;
use serde::Serialize;

#[derive(Serialize)]
struct Report<'a> {
    pools: &'a [PoolReport],
}

/// Runs the workload and prints the report.
pub(crate) fn run(args: PoolsArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let workload = IoArgs {
        rw: Rw::Randrw,
        bs: ByteSize(1 << 20),
        iodepth: 32,
        stack: args.stack,
        ..IoArgs::new(TargetSpec::SoftMemory(ByteSize(64 << 20), SoftOptions::default()))
    };
    let stack = io::measure(&workload, &interrupt)?.stack;
    if args.json {
        return Ok(output::json(&Report { pools: &stack.pools })?);
    }
    let mut text = stack.pools_to_kernel_text();
    text.push('\n');
    stack.pools_to_text(&mut text);
    Ok(output::text(&text)?)
}
