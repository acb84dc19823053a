//! The one definition of the command line: parsing, `--help`, completions and the man page come from here.

use crate::targets::spec::TargetSpec;
use crate::units::{ByteSize, SizeRange, TimeSpan};
use clap::builder::{
    OsStringValueParser, PossibleValue, PossibleValuesParser, RangedU64ValueParser, TypedValueParser,
};
use clap::{Args, Parser, Subcommand, ValueEnum};
use pinfold::pci::Bdf;
use pinfold_bench::SUITES;
use std::path::PathBuf;

mod help;

/// DMA memory for user space: copy files through it, measure it, see what this machine offers for it.
#[derive(Debug, Parser)]
#[command(name = "pinfold", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_long_help = help::TOP, after_help = help::TOP_SHORT)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Say more on standard error: -v what falls back, -vv each step
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Move bytes from one target to another through registered DMA memory
    #[command(after_long_help = help::COPY, after_help = help::SHORT)]
    Copy(CopyArgs),
    /// Read or write a target for a while and measure it, in fio's words
    #[command(after_long_help = help::IO, after_help = help::SHORT)]
    Io(IoArgs),
    /// What this machine offers, what is missing, and the command that mends it
    #[command(after_long_help = help::DOCTOR, after_help = help::SHORT)]
    Doctor(DoctorArgs),
    /// What an NVMe controller is, which namespaces it has, and how it is
    #[command(after_long_help = help::NVME, after_help = help::SHORT)]
    Nvme(NvmeArgs),
    /// Run a short copy through a model controller and report on its DMA pools
    #[command(after_long_help = help::POOLS, after_help = help::SHORT)]
    Pools(PoolsArgs),
    /// Measure Pinfold head to head with what it replaces
    #[command(after_long_help = help::BENCH, after_help = help::SHORT)]
    Bench(BenchArgs),
    /// Give devices to VFIO, so that programs can drive them
    #[command(after_long_help = help::BIND, after_help = help::SHORT)]
    Bind(BindArgs),
    /// Give devices back to the drivers that they had
    #[command(after_long_help = help::UNBIND, after_help = help::SHORT)]
    Unbind(UnbindArgs),
    /// Print completions for a shell
    #[command(after_long_help = help::COMPLETIONS, after_help = help::SHORT)]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the man page
    #[command(after_long_help = help::MAN, after_help = help::SHORT)]
    Man,
}

/// A depth; one beyond 64 bits is as impossible as the largest, and is named with the same limit.
fn depth(text: &str) -> Result<u64, std::num::ParseIntError> {
    text.parse().or_else(|error: std::num::ParseIntError| match error.kind() {
        std::num::IntErrorKind::PosOverflow => Ok(u64::MAX),
        _ => Err(error),
    })
}

fn target() -> impl TypedValueParser<Value = TargetSpec> {
    OsStringValueParser::new().try_map(TargetSpec::from_os_string)
}

fn controller() -> impl TypedValueParser<Value = TargetSpec> {
    OsStringValueParser::new().try_map(TargetSpec::controller)
}

#[derive(Clone, Debug, Args)]
pub(crate) struct CopyArgs {
    /// Where the bytes are: file:PATH or a bare path, soft:IMAGE, vfio:BDF[/NSID]
    #[arg(value_name = "SRC", value_parser = target())]
    pub(crate) source: TargetSpec,

    /// Where they go; it must not exist, unless --force is given
    #[arg(value_name = "DST", value_parser = target())]
    pub(crate) destination: TargetSpec,

    /// Go by way of a third target: write all of it, then read all of it back
    #[arg(long, value_name = "TARGET", value_parser = target())]
    pub(crate) via: Option<TargetSpec>,

    /// Replace the destination if it exists; overwrite an image given with --via, or a real controller's namespace
    #[arg(long)]
    pub(crate) force: bool,

    /// Copy so many bytes from the start of the source; all of them if not given
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) size: Option<ByteSize>,

    /// Ask controllers for completions again and again, instead of sleeping until an interrupt
    #[arg(long)]
    pub(crate) poll: bool,

    /// Read source and destination again and compare their SHA-256 before the destination gets its name
    #[arg(long)]
    pub(crate) verify: bool,

    #[command(flatten)]
    pub(crate) stack: StackArgs,

    /// Bytes moved by one request, a multiple of 512
    #[arg(long, value_name = "SIZE", default_value = "1M", allow_negative_numbers = true)]
    pub(crate) bs: ByteSize,

    /// How many requests are in flight at a time
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = depth, allow_negative_numbers = true)]
    pub(crate) iodepth: u64,

    /// Print the pools' report in the kernel's format, too
    #[arg(long)]
    pub(crate) pools: bool,

    /// Print the account as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// How the memory stack is used.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct StackArgs {
    /// When a controller can reach the data buffers
    #[arg(long, value_enum, default_value_t = Protect::Revoke)]
    pub(crate) protect: Protect,

    /// Where the DMA memory comes from
    #[arg(long, value_enum, default_value_t = Memory::Auto)]
    pub(crate) memory: Memory,
}

/// When a controller can reach the data buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protect {
    /// Always: they are mapped once
    Static,
    /// From submission to completion; a buffer is held until the flush of a whole batch is over
    Revoke,
    /// From submission to completion; each completion waits for its own flush
    Strict,
}

/// Where the DMA memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
pub(crate) enum Memory {
    /// The largest pages that can be had
    #[serde(rename = "auto")]
    Auto,
    /// Reserved pages of 1 GiB
    #[serde(rename = "hugetlb-1g")]
    #[value(name = "hugetlb-1g")]
    Hugetlb1g,
    /// Reserved pages of 2 MiB
    #[serde(rename = "hugetlb-2m")]
    #[value(name = "hugetlb-2m")]
    Hugetlb2m,
    /// Transparent hugepages
    #[value(alias = "transparent")]
    #[serde(rename = "thp")]
    Thp,
    /// Pages of 4 KiB
    #[serde(rename = "plain")]
    Plain,
    /// A memory file, which can be shared with another process
    #[serde(rename = "memfd")]
    Memfd,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct IoArgs {
    /// What is read or written: file:PATH or a bare path, soft:SIZE, soft:IMAGE, vfio:BDF[/NSID]
    #[arg(value_name = "TARGET", value_parser = target())]
    pub(crate) target: TargetSpec,

    /// What is done
    #[arg(long, alias = "readwrite", value_enum, default_value_t = Rw::Read)]
    pub(crate) rw: Rw,

    /// Bytes of one request, a multiple of 512
    #[arg(
        long,
        alias = "blocksize",
        value_name = "SIZE",
        default_value = "4k",
        allow_negative_numbers = true
    )]
    pub(crate) bs: ByteSize,

    /// How many requests are in flight at a time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = depth, allow_negative_numbers = true)]
    pub(crate) iodepth: u64,

    /// How much of the target is used, and how much is moved; all of it if not given
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) size: Option<ByteSize>,

    /// How many jobs run side by side, each with a thread, a queue, --iodepth requests and a part of the target
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) numjobs: u16,

    /// Ask a controller for completions again and again, instead of sleeping until its interrupt
    #[arg(long)]
    pub(crate) poll: bool,

    /// Stop after so long (10, 10s, 500ms, 2m), if --size has not been moved before
    #[arg(long, value_name = "TIME", allow_negative_numbers = true)]
    pub(crate) runtime: Option<TimeSpan>,

    /// Go on until --runtime is over, however much has been moved
    #[arg(long, visible_alias = "time_based", requires = "runtime")]
    pub(crate) time_based: bool,

    /// How many of 100 requests of --rw randrw are reads
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) rwmixread: u8,

    /// Write the region first, compare every byte that is read, and read all of it again at the end
    #[arg(long)]
    pub(crate) verify: bool,

    /// With --verify: the fewest and the most bytes of a request, each made whole blocks of the target, instead of --bs
    #[arg(long, value_name = "SIZE-SIZE", requires = "verify", conflicts_with = "bs")]
    pub(crate) bsrange: Option<SizeRange>,

    /// With --verify: how many requests there are between the first pass and the last, instead of --size's worth
    #[arg(long, visible_alias = "number_ios", value_name = "N", requires = "verify")]
    pub(crate) number_ios: Option<u64>,

    /// Write over what an existing file or image, or a real controller's namespace, holds
    #[arg(long)]
    pub(crate) force: bool,

    #[command(flatten)]
    pub(crate) stack: StackArgs,

    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

impl IoArgs {
    /// The fewest and the most bytes of one request.
    pub(crate) fn lengths(&self) -> (ByteSize, ByteSize) {
        self.bsrange.map_or((self.bs, self.bs), |SizeRange(least, most)| (least, most))
    }

    /// Whether it writes.
    pub(crate) fn writes(&self) -> bool {
        self.verify || matches!(self.rw, Rw::Write | Rw::Randwrite | Rw::Randrw)
    }
}

/// What `io` does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Rw {
    /// Reads from first to last
    Read,
    /// Writes from first to last
    Write,
    /// Reads anywhere
    Randread,
    /// Writes anywhere
    Randwrite,
    /// Reads and writes anywhere
    Randrw,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct NvmeArgs {
    /// The controller: BDF or vfio:BDF, soft:SIZE, soft:IMAGE
    #[arg(value_name = "TARGET", value_parser = controller())]
    pub(crate) target: TargetSpec,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct BindArgs {
    /// The addresses of PCI devices: 0000:01:00.0, or 01:00.0
    #[arg(value_name = "BDF", required = true)]
    pub(crate) devices: Vec<Bdf>,

    /// Also where a disk or a network interface of it is in use: what is mounted loses its disk
    #[arg(long)]
    pub(crate) force: bool,

    /// Print one JSON object a device
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct UnbindArgs {
    /// The addresses of PCI devices: 0000:01:00.0, or 01:00.0
    #[arg(value_name = "BDF", required = true)]
    pub(crate) devices: Vec<Bdf>,

    /// Print one JSON object a device
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct PoolsArgs {
    #[command(flatten)]
    pub(crate) stack: StackArgs,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct BenchArgs {
    /// What is measured; everything if none is named
    #[arg(value_name = "SUITE", value_parser = suite())]
    pub(crate) suites: Vec<String>,

    /// Print each figure as one JSON object on a line of its own
    #[arg(long)]
    pub(crate) json: bool,

    /// Less work, rougher figures
    #[arg(long)]
    pub(crate) quick: bool,

    /// How many runs are counted, after one that is not [default: 9, or 3 with --quick]
    #[arg(long, value_name = "N", value_parser = runs())]
    pub(crate) runs: Option<usize>,

    /// Write a picture of each suite into a folder, as SVG
    #[arg(long, value_name = "DIR")]
    pub(crate) plot: Option<PathBuf>,

    /// Explain all cases and subjects, and measure nothing
    #[arg(long)]
    pub(crate) list: bool,
}

fn suite() -> PossibleValuesParser {
    PossibleValuesParser::new(SUITES.iter().map(|suite| PossibleValue::new(suite.name).help(suite.about)))
}

fn runs() -> impl TypedValueParser<Value = usize> {
    RangedU64ValueParser::<usize>::new().range(1..=1000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_examples_and_the_exit_codes() {
        let mut cli = Cli::command();
        cli.build();
        for command in cli.get_subcommands_mut().filter(|command| command.get_name() != "help") {
            let help = command.render_long_help().to_string();
            assert!(help.contains("Examples:\n  pinfold "), "{}", command.get_name());
        }
        assert!(cli.render_long_help().to_string().contains("130"));
    }
}
