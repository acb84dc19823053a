//! `pools`: a short workload on a model controller, and what it left in the DMA pools.

use crate::account::PoolReport;
use crate::args::{IoArgs, PoolsArgs, Rw};
use crate::failure::Failure;
use crate::io;
use crate::output;
use crate::signal::Interrupt;
use crate::targets::spec::TargetSpec;
use crate::units::ByteSize;
use serde::Serialize;

#[derive(Serialize)]
struct Report<'a> {
    pools: &'a [PoolReport],
}

/// Runs the workload, and prints the report.
pub(crate) fn run(args: PoolsArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let workload = IoArgs {
        target: TargetSpec::SoftMemory(ByteSize(64 << 20)),
        rw: Rw::Randrw,
        bs: ByteSize(1 << 20),
        iodepth: 32,
        size: None,
        numjobs: 1,
        poll: false,
        runtime: None,
        time_based: false,
        rwmixread: 50,
        verify: false,
        bsrange: None,
        number_ios: None,
        force: false,
        stack: args.stack,
        json: args.json,
    };
    let stack = io::measure(&workload, &interrupt)?.stack;
    if args.json {
        return output::json(&Report { pools: &stack.pools });
    }
    let mut text = stack.pools_to_kernel_text();
    text.push('\n');
    stack.pools_to_text(&mut text);
    output::text(&text)
}
