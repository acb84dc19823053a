//! `pools`: a short copy through a model controller, and what it left in the DMA pools.

use crate::account::PoolAccount;
use crate::args::PoolsArgs;
use crate::failure::Failure;
use crate::output;
use serde::Serialize;

#[derive(Serialize)]
struct Report {
    pools: Vec<PoolAccount>,
}

/// Runs the workload, and prints the report.
pub(crate) fn run(args: PoolsArgs) -> Result<(), Failure> {
    let report = Report { pools: Vec::new() };
    if args.json {
        return output::json(&report);
    }
    output::text("")
}
