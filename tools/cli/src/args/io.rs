//! The command line of `io`: fio's options, and those that fio does not have.

use super::fio::{Distribution, ThinkTime};
use super::target::{SpecError, TargetSpec};
use super::{StackArgs, depth};
use crate::units::{ByteSize, Percentiles, Share, SizeError, SizeRange, TimeSpan};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Args, Id, Parser, ValueEnum};
use std::ffi::OsString;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The job's name where none is given.
pub(crate) const NAME: &str = "pinfold";

#[derive(Clone, Debug, Args)]
pub(crate) struct IoArgs {
    /// The target to read or write: file:PATH or a bare path, soft:SIZE, soft:IMAGE,
    /// vfio:BDF[/NSID]; a folder, for a scratch file in it; or a job file (*.fio)
    #[arg(
        value_name = "TARGET", value_parser = io_target(), required_unless_present_any = ["filename", "directory"]
    )]
    pub(crate) target: Option<IoTarget>,

    /// The target, as fio spells it: a colon in a name is written \: (or the name as file:NAME)
    #[arg(
        long, value_name = "TARGET", value_parser = OsStringValueParser::new().try_map(fio_name),
        conflicts_with = "target"
    )]
    pub(crate) filename: Option<TargetSpec>,

    /// The folder of --filename; alone, the folder of a scratch file
    #[arg(
        long, value_name = "DIR", conflicts_with = "target",
        value_parser = OsStringValueParser::new().try_map(fio_folder)
    )]
    pub(crate) directory: Option<PathBuf>,

    /// The job's name in --output-format json
    #[arg(long, value_name = "NAME", default_value = NAME)]
    pub(crate) name: String,

    /// A text for the reports
    #[arg(long, value_name = "TEXT")]
    pub(crate) description: Option<String>,

    /// The direction and order of the requests
    #[arg(long, alias = "readwrite", value_enum, default_value_t = Rw::Read)]
    pub(crate) rw: Rw,

    /// Bytes of one request, a multiple of 512
    #[arg(
        long,
        aliases = ["blocksize", "block_size"],
        value_name = "SIZE",
        default_value = "4k",
        value_parser = block_size,
        allow_negative_numbers = true
    )]
    pub(crate) bs: ByteSize,

    /// The number of requests that a job keeps in flight; from 16 on, with fewer jobs than
    /// processors, those that only wait for their flush (--protect batch or revoke) do not count
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = depth, allow_negative_numbers = true)]
    pub(crate) iodepth: u64,

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
        visible_alias = "offset_increment",
        value_name = "SIZE|N%",
        requires = "size",
        conflicts_with = "verify",
        allow_negative_numbers = true
    )]
    pub(crate) offset_increment: Option<Share>,

    /// How much each job moves within its part, less or more than --size: bytes, or per cent of
    /// --size
    #[arg(
        long, visible_alias = "io_size", aliases = ["io_limit", "io-limit"], value_name = "SIZE|N%",
        conflicts_with = "verify", allow_negative_numbers = true
    )]
    pub(crate) io_size: Option<Share>,

    /// How often each job moves --size bytes
    #[arg(long, value_name = "N", conflicts_with = "verify", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) loops: Option<u32>,

    /// The number of concurrent jobs, each with a thread, a queue and --iodepth requests; each
    /// moves --size bytes, as in fio (with --verify each a part of them)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) numjobs: u16,

    /// Stop after this time (10, 10s, 500ms, 2m), unless --size bytes have been moved before
    #[arg(long, value_name = "TIME", allow_negative_numbers = true)]
    pub(crate) runtime: Option<TimeSpan>,

    /// Run for --runtime, regardless of how much has been moved
    #[arg(
        long, visible_alias = "time_based", requires = "runtime", value_name = "0|1", value_parser = switch,
        num_args = 0..=1, require_equals = true, default_missing_value = "1", default_value = "0",
        hide_default_value = true, action = ArgAction::Set
    )]
    pub(crate) time_based: bool,

    /// Run this long before the statistics and --runtime begin
    #[arg(long, visible_alias = "ramp_time", value_name = "TIME", allow_negative_numbers = true)]
    pub(crate) ramp_time: Option<TimeSpan>,

    /// The most bytes per second of each job, separately for reads, writes and trims; 0 for no
    /// limit
    #[arg(long, value_name = "SIZE", value_parser = rate::<ByteSize>, allow_negative_numbers = true)]
    pub(crate) rate: Option<ByteSize>,

    /// The most requests per second of each job, separately for reads, writes and trims; 0 for no
    /// limit
    #[arg(
        long, visible_alias = "rate_iops", value_name = "N", conflicts_with = "rate",
        value_parser = rate::<u64>
    )]
    pub(crate) rate_iops: Option<u64>,

    /// The percentage of reads with --rw rw and randrw
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) rwmixread: u8,

    /// The percentage of writes, in place of --rwmixread
    #[arg(
        long, value_name = "PERCENT", conflicts_with = "rwmixread",
        value_parser = clap::value_parser!(u8).range(0..=100)
    )]
    pub(crate) rwmixwrite: Option<u8>,

    /// How random offsets are distributed: random, zipf:THETA, pareto:H, normal:DEVIATION
    #[arg(
        long,
        visible_alias = "random_distribution",
        value_name = "NAME[:NUMBER]",
        default_value = "random",
        conflicts_with = "verify"
    )]
    pub(crate) random_distribution: Distribution,

    /// Choose the same random offsets in each run
    #[arg(
        long, value_name = "0|1", value_parser = switch, num_args = 0..=1, require_equals = true, default_missing_value = "1", default_value = "1", hide_default_value = true,
        action = ArgAction::Set
    )]
    pub(crate) randrepeat: bool,

    /// The seed of the random offsets
    #[arg(long, value_name = "N")]
    pub(crate) randseed: Option<u64>,

    /// Choose random offsets without a map of used blocks, so that one may repeat before all were
    /// used [always on]
    #[arg(
        long, value_name = "0|1", value_parser = switch, num_args = 0..=1, require_equals = true,
        default_missing_value = "1", default_value = "1", hide_default_value = true, action = ArgAction::Set
    )]
    pub(crate) norandommap: bool,

    /// Open a file with O_DIRECT, if its file system supports it
    #[arg(long, value_name = "0|1", value_parser = switch, default_value = "1", action = ArgAction::Set)]
    pub(crate) direct: bool,

    /// The opposite of --direct
    #[arg(
        long, value_name = "0|1", value_parser = switch, num_args = 0..=1, require_equals = true,
        default_missing_value = "1", conflicts_with = "direct", action = ArgAction::Set
    )]
    pub(crate) buffered: Option<bool>,

    /// Flush after this many writes, beside the other requests; 0 for never
    #[arg(
        long,
        visible_alias = "fdatasync",
        value_name = "N",
        default_value_t = 0,
        conflicts_with = "verify"
    )]
    pub(crate) fsync: u64,

    /// Count the flush at the end of what was written in the time of the run
    #[arg(
        long, visible_alias = "end_fsync", aliases = ["fsync_on_close", "fsync-on-close"], value_name = "0|1",
        value_parser = switch, num_args = 0..=1, require_equals = true, default_missing_value = "1",
        default_value = "0", hide_default_value = true, action = ArgAction::Set
    )]
    pub(crate) end_fsync: bool,

    /// Pause this long (100 or 100us, 10ms, 1s) after every --thinktime-blocks requests have
    /// completed
    #[arg(long, value_name = "TIME", conflicts_with = "verify")]
    pub(crate) thinktime: Option<ThinkTime>,

    /// How many requests are between two pauses
    #[arg(
        long, visible_alias = "thinktime_blocks", value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) thinktime_blocks: u64,

    /// Fill a buffer with new random data before each write, instead of once
    #[arg(
        long, visible_alias = "refill_buffers", value_name = "0|1", value_parser = switch, num_args = 0..=1,
        require_equals = true, default_missing_value = "1", default_value = "0", hide_default_value = true,
        action = ArgAction::Set
    )]
    pub(crate) refill_buffers: bool,

    /// How requests are submitted: io_uring for a file (libaio and posixaio mean the same),
    /// pinfold for a controller
    #[arg(long, value_name = "NAME")]
    pub(crate) ioengine: Option<String>,

    /// Poll for completions instead of sleeping until an interrupt
    #[arg(
        long, alias = "hipri", value_name = "0|1", value_parser = switch, num_args = 0..=1, require_equals = true,
        default_missing_value = "1", default_value = "0", hide_default_value = true, action = ArgAction::Set
    )]
    pub(crate) poll: bool,

    /// Write the region first, compare every byte that is read, and read all of it again at the
    /// end; fio's methods (crc32c, md5, ...) are names for it
    #[arg(
        long, value_name = "METHOD", value_parser = verify, num_args = 0..=1, require_equals = true,
        default_missing_value = "1", action = ArgAction::Set
    )]
    pub(crate) verify: Option<bool>,

    /// With --verify: the smallest and the largest request, rounded to blocks of the target,
    /// instead of --bs
    #[arg(long, value_name = "SIZE-SIZE", requires = "verify", conflicts_with = "bs")]
    pub(crate) bsrange: Option<SizeRange>,

    /// With --verify: the number of requests of all jobs between the first pass and the last
    /// [default: as many as --size has]
    #[arg(long, alias = "verify_requests", value_name = "N", requires = "verify")]
    pub(crate) verify_requests: Option<u64>,

    /// Stop each pass of --loops after this many requests of each job, unless --size bytes have
    /// been moved before; --time-based ignores it
    #[arg(
        long, visible_alias = "number_ios", value_name = "N", conflicts_with = "verify_requests",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) number_ios: Option<u64>,

    /// Overwrite the contents of an existing file or image, or of a real controller's namespace
    #[arg(long)]
    pub(crate) force: bool,

    #[command(flatten)]
    pub(crate) stack: StackArgs,

    /// The percentiles of the latencies, separated by colons: 50:99:99.9 [default: fio's]
    #[arg(long, visible_alias = "percentile_list", value_name = "LIST")]
    pub(crate) percentile_list: Option<Percentiles>,

    /// Report all jobs of --numjobs together [always on]
    #[arg(
        long, visible_alias = "group_reporting", value_name = "0|1", value_parser = switch,
        num_args = 0..=1, require_equals = true, default_missing_value = "1", default_value = "1",
        hide_default_value = true, action = ArgAction::Set
    )]
    pub(crate) group_reporting: bool,

    /// Print text, or JSON with fio's keys
    #[arg(long, alias = "output_format", value_enum, default_value_t = OutputFormat::Normal)]
    pub(crate) output_format: OutputFormat,

    /// Print the report as one JSON object with all figures of the memory stack; of a job file, a
    /// line for each section
    #[arg(long, conflicts_with = "output_format")]
    pub(crate) json: bool,

    /// fio's options that change nothing here
    #[arg(
        long = "thread", hide = true, value_name = "VALUE", num_args = 0..=1, require_equals = true,
        default_missing_value = "1", action = ArgAction::Append, aliases = super::fio::IGNORED
    )]
    pub(crate) ignored: Vec<String>,
}

/// The options of one job file section.
#[derive(Debug, Parser)]
#[command(name = "pinfold io", no_binary_name = true, disable_help_flag = true)]
struct Section {
    #[command(flatten)]
    io: IoArgs,
}

/// Returns the options of `io` that are on the command line, without those that have their
/// defaults.
pub(crate) fn given(matches: &ArgMatches) -> Vec<String> {
    let Some(io) = matches.subcommand_matches("io") else { return Vec::new() };
    let on_command_line = |id: &&Id| io.value_source(id.as_str()) == Some(ValueSource::CommandLine);
    io.ids().filter(on_command_line).map(|id| id.as_str().replace('_', "-")).collect()
}

impl IoArgs {
    /// Creates the defaults for `target`.
    pub(crate) fn new(target: TargetSpec) -> Self {
        Self {
            target: Some(IoTarget::Target(target)),
            filename: None,
            directory: None,
            description: None,
            name: NAME.to_owned(),
            rw: Rw::Read,
            bs: ByteSize(4096),
            iodepth: 1,
            size: None,
            offset: Share::Bytes(0),
            offset_increment: None,
            io_size: None,
            loops: None,
            numjobs: 1,
            runtime: None,
            time_based: false,
            ramp_time: None,
            rate: None,
            rate_iops: None,
            rwmixread: 50,
            rwmixwrite: None,
            random_distribution: Distribution::Random,
            randrepeat: true,
            randseed: None,
            norandommap: true,
            direct: true,
            buffered: None,
            fsync: 0,
            end_fsync: false,
            thinktime: None,
            thinktime_blocks: 1,
            refill_buffers: false,
            ioengine: None,
            poll: false,
            verify: None,
            bsrange: None,
            verify_requests: None,
            number_ios: None,
            force: false,
            stack: StackArgs::default(),
            percentile_list: None,
            group_reporting: true,
            output_format: OutputFormat::Normal,
            json: false,
            ignored: Vec::new(),
        }
    }

    /// Parses the options of a job file section, each as on the command line.
    pub(super) fn of_section(options: &[String]) -> Result<Self, clap::Error> {
        Section::try_parse_from(options).map(|section| section.io)
    }

    /// Returns the target; one of the three options is required.
    pub(crate) fn spec(&self) -> Result<TargetSpec, SpecError> {
        match (&self.target, &self.filename, &self.directory) {
            (Some(IoTarget::Target(spec)), ..) | (None, Some(spec), None) => Ok(spec.clone()),
            (None, Some(TargetSpec::File(name)), Some(folder)) if name.is_relative() => {
                Ok(TargetSpec::File(folder.join(name)))
            }
            (None, Some(other), Some(_)) => Err(SpecError::InDirectory(other.to_string())),
            // With a slash at its end it is no name for a new file.
            (None, None, Some(folder)) => Ok(TargetSpec::File(folder.join(""))),
            (None, None, None) | (Some(IoTarget::JobFile(_)), ..) => {
                Err(SpecError::Empty(String::new()))
            }
        }
    }

    /// Returns whether a file bypasses the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.buffered.map_or(self.direct, |buffered| !buffered)
    }

    /// Returns the percentage of reads.
    pub(crate) fn percent_of_reads(&self) -> u8 {
        self.rwmixwrite.map_or(self.rwmixread, |writes| 100_u8.saturating_sub(writes))
    }

    /// Returns whether every byte is compared.
    pub(crate) fn verifies(&self) -> bool {
        self.verify == Some(true)
    }

    /// Returns the path of the job file, if the target is one.
    pub(crate) fn job_file(&self) -> Option<&Path> {
        match &self.target {
            Some(IoTarget::JobFile(path)) => Some(path),
            _ => None,
        }
    }

    /// Returns the fewest and the most bytes of one request.
    pub(crate) fn block_sizes(&self) -> SizeRange {
        self.bsrange.unwrap_or(SizeRange { min: self.bs, max: self.bs })
    }

    /// Returns whether the workload changes the target.
    pub(crate) fn writes(&self) -> bool {
        self.verifies() || !matches!(self.rw, Rw::Read | Rw::Randread)
    }
}

/// The target of `io`, or its job file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum IoTarget {
    /// A job file: a bare path that ends in `.fio`.
    JobFile(PathBuf),
    /// A target.
    Target(TargetSpec),
}

fn io_target() -> impl TypedValueParser<Value = IoTarget> {
    OsStringValueParser::new().try_map(|text| {
        let path = PathBuf::from(&text);
        let is_job_file =
            path.extension().is_some_and(|name| name == "fio") && !TargetSpec::has_kind(&text);
        if is_job_file { Ok(IoTarget::JobFile(path)) } else { fio_name(text).map(IoTarget::Target) }
    })
}

#[expect(clippy::needless_pass_by_value, reason = "the shape of clap's `try_map`")]
fn fio_name(text: OsString) -> Result<TargetSpec, SpecError> {
    TargetSpec::of_fio(&text)
}

#[expect(clippy::needless_pass_by_value, reason = "the shape of clap's `try_map`")]
fn fio_folder(text: OsString) -> Result<PathBuf, SpecError> {
    match TargetSpec::of_fio(&text)? {
        TargetSpec::File(folder) => Ok(folder),
        other => Err(SpecError::NoFolder(other.to_string())),
    }
}

/// The direction and order of the requests of `io`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[expect(clippy::enum_variant_names, reason = "fio's names")]
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
    #[value(alias = "readwrite")]
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

/// How the report of `io` is printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum OutputFormat {
    /// Text
    Normal,
    /// fio's JSON: one object with one element of `jobs` for each section
    Json,
}
/// Parses fio's switches: alone, or with 0 or 1.
fn switch(text: &str) -> Result<bool, &'static str> {
    match text {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err("write 0 or 1"),
    }
}

/// Parses the size of requests: one, or fio's list of a size for each direction if all are the
/// same.
fn block_size(text: &str) -> Result<ByteSize, SizeError> {
    let sizes: Vec<ByteSize> = text.split(',').map(str::parse).collect::<Result<_, _>>()?;
    match sizes.split_first() {
        Some((first, rest)) if rest.iter().all(|other| other == first) => Ok(*first),
        _ => Err(SizeError::Directions(text.to_owned())),
    }
}

/// Parses a rate: one, or fio's list of a rate for each direction if all are the same.
fn rate<T>(text: &str) -> Result<T, String>
where
    T: FromStr<Err: Display> + PartialEq,
{
    let parse = |rate: &str| rate.parse().map_err(|error: T::Err| error.to_string());
    let (first, rest) =
        text.split_once(',').map_or((text, None), |(first, rest)| (first, Some(rest)));
    let first: T = parse(first)?;
    for other in rest.iter().flat_map(|rest| rest.split(',')) {
        if parse(other)? != first {
            return Err("it has a rate for each direction, and a job has one for all: write one rate, or a section for \
                        each direction in a job file"
                .to_owned());
        }
    }
    Ok(first)
}

/// The methods of fio's `verify` that detect what a comparison of every byte detects.
const METHODS: [&str; 16] = [
    "1",
    "md5",
    "crc64",
    "crc32c",
    "crc32c-intel",
    "crc32",
    "crc16",
    "crc7",
    "xxhash",
    "sha512",
    "sha256",
    "sha1",
    "sha3-224",
    "sha3-256",
    "sha3-384",
    "sha3-512",
];

/// Parses `--verify`: alone, with 0, or with a method of fio's.
fn verify(text: &str) -> Result<bool, &'static str> {
    match text {
        "0" | "false" => Ok(false),
        method if METHODS.contains(&method) => Ok(true),
        _ => Err(
            "every byte is compared: write --verify alone, or one of fio's checksums (crc32c, md5, sha256, ...)",
        ),
    }
}
