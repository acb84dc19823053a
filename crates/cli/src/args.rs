//! The one definition of the command line: parsing, `--help`, completions and the man page come
//! from here.

pub(crate) mod fio;
mod help;
pub(crate) mod io;
pub(crate) mod job_file;
mod parse;
mod receive;
mod replay;
mod serve;
pub(crate) mod stack;
pub(crate) mod target;

pub(crate) use fio::{Distribution, ThinkTime};
pub(crate) use io::{IoArgs, OutputFormat, Rw};
pub(crate) use receive::ReceiveArgs;
pub(crate) use replay::{ReplayArgs, TimingArg};
pub(crate) use serve::ServeArgs;
pub(crate) use stack::{Memory, Protect, StackArgs};
pub(crate) use target::{SoftOptions, TargetSpec};

use crate::units::ByteSize;
use clap::builder::{PossibleValue, PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use parse::{controller, depth, target};
use pinfold::pci::Bdf;
use pinfold_bench::SUITES;
use std::path::PathBuf;

/// DMA memory for user space: copy files through it, measure it, check what this machine supports
#[derive(Debug, Parser)]
#[command(name = "pinfold", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_long_help = help::TOP.long, after_help = help::TOP.examples)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Log more on standard error: -v fallbacks, -vv each step
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Copy one target to another through registered DMA memory
    #[command(after_long_help = help::COPY.long, after_help = help::COPY.examples)]
    Copy(CopyArgs),
    /// Run a workload on a target and measure it, with fio's options
    #[command(after_long_help = help::IO.long, after_help = help::IO.examples)]
    Io(Box<IoArgs>),
    /// Serve a target as a network block device (NBD)
    #[command(after_long_help = help::SERVE.long, after_help = help::SERVE.examples)]
    Serve(ServeArgs),
    /// Report what this machine supports, what is missing, and the command that fixes it
    #[command(after_long_help = help::DOCTOR.long, after_help = help::DOCTOR.examples)]
    Doctor(DoctorArgs),
    /// Report an NVMe controller's identity, namespaces and health
    #[command(after_long_help = help::NVME.long, after_help = help::NVME.examples)]
    Nvme(NvmeArgs),
    /// Run a short workload on a model controller and report its DMA pools
    #[command(after_long_help = help::POOLS.long, after_help = help::POOLS.examples)]
    Pools(PoolsArgs),
    /// Measure Pinfold side by side with what it replaces
    #[command(after_long_help = help::BENCH.long, after_help = help::BENCH.examples)]
    Bench(BenchArgs),
    /// Replay a recorded trace of the kernel's DMA mappings through every policy
    #[command(after_long_help = help::REPLAY.long, after_help = help::REPLAY.examples)]
    Replay(ReplayArgs),
    /// Receive the packets of a network interface through AF_XDP
    #[command(after_long_help = help::RECEIVE.long, after_help = help::RECEIVE.examples)]
    Receive(ReceiveArgs),
    /// Bind devices to vfio-pci, so that programs can drive them
    #[command(after_long_help = help::BIND.long, after_help = help::BIND.examples)]
    Bind(BindArgs),
    /// Bind devices to their previous drivers again
    #[command(after_long_help = help::UNBIND.long, after_help = help::UNBIND.examples)]
    Unbind(UnbindArgs),
    /// Print completions for a shell
    #[command(after_long_help = help::COMPLETIONS.long, after_help = help::COMPLETIONS.examples)]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the man page
    #[command(after_long_help = help::MAN.long, after_help = help::MAN.examples)]
    Man,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct CopyArgs {
    /// The source: file:PATH or a bare path, soft:IMAGE, vfio:BDF[/NSID]
    #[arg(value_name = "SRC", value_parser = target())]
    pub(crate) source: TargetSpec,

    /// The destination; it must not exist, unless --force is given
    #[arg(value_name = "DST", value_parser = target())]
    pub(crate) destination: TargetSpec,

    /// Copy through a third target: write all of it, then read all of it back
    #[arg(long, value_name = "TARGET", value_parser = target())]
    pub(crate) via: Option<TargetSpec>,

    /// Replace the destination if it exists; overwrite an image given with --via, or a real
    /// controller's namespace
    #[arg(long)]
    pub(crate) force: bool,

    /// The number of bytes to copy, from the start of the source [default: all]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) size: Option<ByteSize>,

    /// Poll controllers for completions instead of sleeping until an interrupt
    #[arg(long)]
    pub(crate) poll: bool,

    /// Read source and destination again and compare their SHA-256 before the destination is
    /// renamed to its name
    #[arg(long)]
    pub(crate) verify: bool,

    #[command(flatten)]
    pub(crate) stack: StackArgs,

    /// What happens to holes of the source file
    #[arg(long, value_enum, default_value_t = Sparse::Auto)]
    pub(crate) sparse: Sparse,

    /// Bytes of one request, a multiple of 512
    #[arg(long, value_name = "SIZE", default_value = "1M", allow_negative_numbers = true)]
    pub(crate) bs: ByteSize,

    /// The number of requests in flight
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = depth, allow_negative_numbers = true)]
    pub(crate) iodepth: u64,

    /// Also print the DMA pools in the kernel's format
    #[arg(long, conflicts_with = "quiet")]
    pub(crate) pools: bool,

    /// Print all of the report: requests and their latencies, memory, controllers, mappings,
    /// flushes, pools
    #[arg(long, conflicts_with = "quiet")]
    pub(crate) details: bool,

    /// Print nothing but errors
    #[arg(short, long, conflicts_with = "json")]
    pub(crate) quiet: bool,

    /// Print the report as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// What happens to holes of the source file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Sparse {
    /// They are not read, and stay holes; a real controller's namespace is written with zeroes
    /// there
    Auto,
    /// They are read and written as zeroes
    Never,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print the report as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct NvmeArgs {
    /// The controller: BDF or vfio:BDF, soft:SIZE, soft:IMAGE
    #[arg(value_name = "TARGET", value_parser = controller())]
    pub(crate) target: TargetSpec,

    /// Print the report as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct BindArgs {
    /// The addresses of PCI devices: 0000:01:00.0, or 01:00.0
    #[arg(value_name = "BDF", required = true)]
    pub(crate) devices: Vec<Bdf>,

    /// Bind it even if its disk or network interface is in use: mounted file systems lose their
    /// disk
    #[arg(long)]
    pub(crate) force: bool,

    /// Print one JSON object for each device
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct UnbindArgs {
    /// The addresses of PCI devices: 0000:01:00.0, or 01:00.0
    #[arg(value_name = "BDF", required = true)]
    pub(crate) devices: Vec<Bdf>,

    /// Print one JSON object for each device
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct PoolsArgs {
    #[command(flatten)]
    pub(crate) stack: StackArgs,

    /// Print the report as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct BenchArgs {
    /// The suites to run [default: all]
    #[arg(value_name = "SUITE", value_parser = suite())]
    pub(crate) suites: Vec<String>,

    /// Print one JSON object per line for each figure
    #[arg(long)]
    pub(crate) json: bool,

    /// Do less work, for rougher figures
    #[arg(long)]
    pub(crate) quick: bool,

    /// The number of measured runs, after a warm-up run [default: 9, or 3 with --quick]
    #[arg(long, value_name = "N", value_parser = runs())]
    pub(crate) runs: Option<usize>,

    /// Write a plot of each suite into a folder, as SVG
    #[arg(long, value_name = "DIR")]
    pub(crate) plot: Option<PathBuf>,

    /// Explain all cases and subjects, and measure nothing
    #[arg(long)]
    pub(crate) list: bool,
}

fn suite() -> PossibleValuesParser {
    PossibleValuesParser::new(
        SUITES.iter().map(|suite| PossibleValue::new(suite.name).help(suite.about)),
    )
}

fn runs() -> impl TypedValueParser<Value = usize> {
    RangedU64ValueParser::<usize>::new().range(1..=1000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_help_ends_with_examples() {
        let mut cli = Cli::command();
        cli.build();
        for command in cli.get_subcommands_mut().filter(|command| command.get_name() != "help") {
            for help in [command.render_help(), command.render_long_help()] {
                let help = help.to_string();
                let examples = help.rsplit("\n\n").next().unwrap();
                assert!(examples.starts_with("Examples:\n  "), "{}: {help}", command.get_name());
                assert!(examples.contains("pinfold "), "{}", command.get_name());
            }
        }
        assert!(cli.render_long_help().to_string().contains("130"));
    }
}
