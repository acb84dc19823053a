//! The command line of `io`.

use super::target::{SpecError, TargetSpec};
use super::{StackArgs, depth};
use crate::units::{ByteSize, Share, SizeRange, TimeSpan};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use std::path::Path;

#[derive(Clone, Debug, Args)]
pub(crate) struct IoArgs {
    /// The target to read or write: file:PATH or a bare path, soft:SIZE, soft:IMAGE,
    /// vfio:BDF[/NSID]; or a folder, for a scratch file in it
    #[arg(value_name = "TARGET", value_parser = io_target())]
    pub(crate) target: TargetSpec,

    /// The direction and order of the requests
    #[arg(long, value_enum, default_value_t = Rw::Read)]
    pub(crate) rw: Rw,

    /// The percentage of reads with --rw rw and randrw
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) rwmixread: u8,

    /// Bytes of one request, a multiple of 512
    #[arg(long, value_name = "SIZE", default_value = "4k", allow_negative_numbers = true)]
    pub(crate) bs: ByteSize,

    /// The number of requests that a job keeps in flight; with fewer jobs than processors,
    /// those that only wait for their flush (--protect batch or revoke) do not count
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = depth, allow_negative_numbers = true)]
    pub(crate) iodepth: u64,

    /// The number of concurrent jobs, each with a thread, a queue and --iodepth requests; each
    /// moves --size bytes (with --verify each a part of them)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) numjobs: u16,

    /// The size of the part of the target that each job uses, and the number of bytes that it
    /// moves: bytes, or per cent of the target [default: all from --offset]
    #[arg(long, value_name = "SIZE|N%", allow_negative_numbers = true)]
    pub(crate) size: Option<Share>,

    /// Where the part that is used begins, a multiple of --bs: bytes, or per cent of the target,
    /// rounded up to --bs
    #[arg(long, value_name = "SIZE|N%", default_value = "0", allow_negative_numbers = true)]
    pub(crate) offset: Share,

    /// How much further on the part of each next job of --numjobs begins
    /// [default: all jobs use the same part]
    #[arg(
        long,
        value_name = "SIZE|N%",
        requires = "size",
        conflicts_with = "verify",
        allow_negative_numbers = true
    )]
    pub(crate) offset_increment: Option<Share>,

    /// Stop after this time (10, 10s, 500ms, 2m), unless --size bytes have been moved before
    #[arg(long, value_name = "TIME", allow_negative_numbers = true)]
    pub(crate) runtime: Option<TimeSpan>,

    /// Run for --runtime, regardless of how much has been moved
    #[arg(long, requires = "runtime")]
    pub(crate) time_based: bool,

    /// Run this long before the statistics and --runtime begin
    #[arg(long, value_name = "TIME", allow_negative_numbers = true)]
    pub(crate) ramp_time: Option<TimeSpan>,

    /// The most bytes per second of each job, separately for reads, writes and trims; 0 for no
    /// limit
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) rate: Option<ByteSize>,

    /// Flush after this many writes, beside the other requests; 0 for never
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "verify")]
    pub(crate) fsync: u64,

    /// Write the region first, compare every byte that is read, and read all of it again at the
    /// end
    #[arg(long)]
    pub(crate) verify: bool,

    /// With --verify: the smallest and the largest request, rounded to blocks of the target,
    /// instead of --bs
    #[arg(long, value_name = "SIZE-SIZE", requires = "verify", conflicts_with = "bs")]
    pub(crate) bsrange: Option<SizeRange>,

    /// With --verify: the number of requests of all jobs between the first pass and the last
    /// [default: as many as --size has]
    #[arg(long, value_name = "N", requires = "verify")]
    pub(crate) verify_requests: Option<u64>,

    /// Poll for completions instead of sleeping until an interrupt
    #[arg(long)]
    pub(crate) poll: bool,

    /// Overwrite the contents of an existing file or image, or of a real controller's namespace
    #[arg(long)]
    pub(crate) force: bool,

    #[command(flatten)]
    pub(crate) stack: StackArgs,

    /// Print the report as one JSON object with all figures of the memory stack
    #[arg(long)]
    pub(crate) json: bool,
}

impl IoArgs {
    /// Creates the defaults for `target`.
    pub(crate) fn new(target: TargetSpec) -> Self {
        Self {
            target,
            rw: Rw::Read,
            rwmixread: 50,
            bs: ByteSize(4096),
            iodepth: 1,
            numjobs: 1,
            size: None,
            offset: Share::Bytes(0),
            offset_increment: None,
            runtime: None,
            time_based: false,
            ramp_time: None,
            rate: None,
            fsync: 0,
            verify: false,
            bsrange: None,
            verify_requests: None,
            poll: false,
            force: false,
            stack: StackArgs::default(),
            json: false,
        }
    }

    /// Returns the fewest and the most bytes of one request.
    pub(crate) fn block_sizes(&self) -> SizeRange {
        self.bsrange.unwrap_or(SizeRange { min: self.bs, max: self.bs })
    }

    /// Returns whether the workload changes the target.
    pub(crate) fn writes(&self) -> bool {
        self.verify || !matches!(self.rw, Rw::Read | Rw::Randread)
    }
}

/// Parses a target. A bare path that ends in `.fio` is a job file of fio's: taken as a target, it
/// would be read or overwritten.
fn io_target() -> impl TypedValueParser<Value = TargetSpec> {
    OsStringValueParser::new().try_map(|text| {
        let is_job_file = Path::new(&text).extension().is_some_and(|name| name == "fio");
        if is_job_file && !TargetSpec::has_kind(&text) {
            return Err(SpecError::JobFile(text.to_string_lossy().into_owned()));
        }
        TargetSpec::from_os_string(text)
    })
}

/// The direction and order of the requests of `io`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[expect(clippy::enum_variant_names, reason = "the names of fio")]
pub(crate) enum Rw {
    /// Sequential reads
    Read,
    /// Sequential writes
    Write,
    /// Sequential trims: the blocks are deallocated
    Trim,
    /// Random reads
    Randread,
    /// Random writes
    Randwrite,
    /// Random trims
    Randtrim,
    /// Sequential reads and writes
    Rw,
    /// Random reads and writes
    Randrw,
}

impl Rw {
    /// Returns the name as on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Trim => "trim",
            Self::Randread => "randread",
            Self::Randwrite => "randwrite",
            Self::Randtrim => "randtrim",
            Self::Rw => "rw",
            Self::Randrw => "randrw",
        }
    }

    /// Returns whether the offsets are random.
    pub(crate) fn is_random(self) -> bool {
        matches!(self, Self::Randread | Self::Randwrite | Self::Randtrim | Self::Randrw)
    }

    /// Returns whether it deallocates.
    pub(crate) fn trims(self) -> bool {
        matches!(self, Self::Trim | Self::Randtrim)
    }

    /// Returns whether a file that is created for it has to be written first.
    pub(crate) fn needs_layout(self) -> bool {
        self != Self::Write
    }
}
