//! The options of `replay`.

use crate::units::ByteSize;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use pinfold_bench::policy::PolicyKind;
use pinfold_bench::replay::MAX_OPERATIONS;
use std::path::PathBuf;

#[derive(Clone, Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The trace: text of tracefs or of `trace-cmd report`, plain, .gz or .zst; - for standard
    /// input
    #[arg(value_name = "TRACE", required_unless_present = "how")]
    pub(crate) trace: Option<PathBuf>,

    /// The policies, separated by commas [default: all]
    #[arg(long = "policy", value_name = "POLICY", value_delimiter = ',', value_parser = policy())]
    pub(crate) policies: Vec<PolicyKind>,

    /// When the operations are made
    #[arg(long, value_name = "TIMING", default_value = "fast")]
    pub(crate) timing: TimingArg,

    /// Draw the address space over time into a folder, as SVG: recorded, and of each policy
    #[arg(long, value_name = "DIR")]
    pub(crate) svg: Option<PathBuf>,

    /// List what is still mapped at the end of the trace: of each device and each policy whose
    /// table can be read
    #[arg(long)]
    pub(crate) mapped: bool,

    /// The number of maps and unmaps to read
    #[arg(long, value_name = "N", default_value_t = MAX_OPERATIONS, value_parser = clap::value_parser!(u64).range(1..=MAX_OPERATIONS))]
    pub(crate) limit: u64,

    /// What the maps and unmaps may take in memory, read and replayed by one policy at a time; more
    /// is refused
    #[arg(long, value_name = "SIZE", default_value = "4G", allow_negative_numbers = true)]
    pub(crate) memory: ByteSize,

    /// Memory for the I/O page table of each device
    #[arg(long, value_name = "SIZE", default_value = "64M", allow_negative_numbers = true)]
    pub(crate) table_bytes: ByteSize,

    /// Print JSON: an object per line for the trace, for each device, and for each device and
    /// policy
    #[arg(long)]
    pub(crate) json: bool,

    /// Explain how to record a trace, and replay nothing
    #[arg(long)]
    pub(crate) how: bool,
}

/// When operations are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum TimingArg {
    /// One after the other
    Fast,
    /// At the times of the trace
    Original,
}

fn policy() -> impl TypedValueParser<Value = PolicyKind> {
    let names = PossibleValuesParser::new(PolicyKind::ALL.map(PolicyKind::name));
    names.try_map(|name| PolicyKind::named(&name).ok_or("not a policy"))
}
