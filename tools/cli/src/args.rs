//! The one definition of the command line: parsing, `--help`, completions and the man page come
//! from here.

pub(crate) mod foreign;
mod help;
pub(crate) mod io;
pub(crate) mod target;

pub(crate) use help::man_page;
pub(crate) use io::{IoArgs, Rw};
pub(crate) use target::{SoftOptions, TargetSpec, Via};

use crate::output;
use crate::server::address::NbdAddress;
use crate::units::{ByteSize, TimeSpan};
use clap::builder::{
    OsStringValueParser, PathBufValueParser, PossibleValuesParser, RangedU64ValueParser,
    TypedValueParser,
};
use clap::{Args, Parser, Subcommand, ValueEnum};
use pinfold::pci::Bdf;
use pinfold_replay::MAX_OPERATIONS;
use pinfold_replay::policy::PolicyKind;
use pinfold_xdp::Attached;
use std::path::PathBuf;
use std::time::Duration;

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
    /// Run a workload on a target and measure it, or verify every byte
    #[command(after_long_help = help::IO.long, after_help = help::IO.examples)]
    Io(Box<IoArgs>),
    /// Serve a target as a network block device (NBD)
    #[command(after_long_help = help::SERVE.long, after_help = help::SERVE.examples)]
    Serve(ServeArgs),
    /// Run a program that opens VFIO against a model device, and report what its driver does wrong
    #[command(after_long_help = help::CHECK.long, after_help = help::CHECK.examples)]
    Check(CheckArgs),
    /// Report what this machine supports, what is missing, and the command that fixes it
    #[command(after_long_help = help::DOCTOR.long, after_help = help::DOCTOR.examples)]
    Doctor(DoctorArgs),
    /// Report an NVMe controller's identity, namespaces and health
    #[command(after_long_help = help::NVME.long, after_help = help::NVME.examples)]
    Nvme(NvmeArgs),
    /// Run a short workload on a model controller and report its DMA pools
    #[command(after_long_help = help::POOLS.long, after_help = help::POOLS.examples)]
    Pools(PoolsArgs),
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
    /// Print the man page of the program and all its commands, or of one command
    #[command(after_long_help = help::MAN.long, after_help = help::MAN.examples)]
    Man {
        /// The command
        #[arg(value_parser = help::page_of)]
        command: Option<String>,
    },
}

/// How the memory stack is used.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct StackArgs {
    /// When a controller can reach the data buffers
    #[arg(long, value_enum, default_value_t = Protect::Batch)]
    pub(crate) protect: Protect,

    /// The most bytes of buffers that wait for their flush: a completion that exceeds it waits, as
    /// with `--protect strict`, and 0 means that all do [default: no limit]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) held_limit: Option<ByteSize>,

    /// The number of units over which the software IOMMU spreads the model controllers: each has a
    /// queue of its own, and a flush is complete when all have completed it. Not with vfio:BDF,
    /// which is behind the units of the machine [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..), allow_negative_numbers = true)]
    pub(crate) iommu_units: Option<u8>,

    /// For how long a command is sent again to a controller that permits it (its status has DNR
    /// clear, as of a namespace that is not ready): after the delay that the controller asks for,
    /// otherwise after 1 ms, 2 ms, and so on up to a second
    #[arg(long, value_name = "TIME", default_value = "10s", allow_negative_numbers = true)]
    pub(crate) retry_limit: TimeSpan,

    /// Where the DMA memory comes from
    #[arg(long, value_enum, default_value_t = Memory::Auto)]
    pub(crate) memory: Memory,

    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// What the user says about the machine.
#[derive(Clone, Copy, Default, Debug, Args)]
pub(crate) struct MachineArgs {
    /// Allow vtd:BDF[/NSID]: an NVMe controller (without a driver of the kernel) behind a VT-d unit
    /// that the program takes, after a boot with intel_iommu=off intremap=off iomem=relaxed. Other
    /// devices behind the unit reach nothing meanwhile. A program that is killed leaves the unit
    /// with tables in memory that is freed: reboot then
    #[cfg(feature = "vtd")]
    #[arg(long)]
    pub(crate) i_own_this_machine: bool,
}

impl Default for StackArgs {
    fn default() -> Self {
        let retry_limit = TimeSpan(Duration::from_secs(10));
        Self {
            protect: Protect::Batch,
            held_limit: None,
            iommu_units: None,
            retry_limit,
            memory: Memory::Auto,
            machine: MachineArgs::default(),
        }
    }
}

/// When a controller can reach the data buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protect {
    /// From submission to completion; the job waits for the flush before it goes on (requests that
    /// complete together share it)
    Strict,
    /// From submission to completion, with one flush for each request (the queue merges those that
    /// it gets while it is busy); the buffer is held until the flush has completed, and the job
    /// goes on
    Revoke,
    /// From submission to completion, with one flush for all requests that complete together; the
    /// buffers are held until the flush has completed, and the job goes on
    Batch,
    /// Always: they are mapped once, and never flushed
    Static,
}

impl Protect {
    /// Returns the name as on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Revoke => "revoke",
            Self::Batch => "batch",
            Self::Static => "static",
        }
    }
}

/// Where the DMA memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
pub(crate) enum Memory {
    /// The largest pages available
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
    /// Transparent hugepages; the size is rounded up to 2 MiB
    #[serde(rename = "thp")]
    Thp,
    /// Pages of 4 KiB
    #[serde(rename = "plain")]
    Plain,
    /// A memory file, which can be shared with another process
    #[serde(rename = "memfd")]
    Memfd,
    /// A memory file on reserved pages of 2 MiB
    #[serde(rename = "memfd-2m")]
    #[value(name = "memfd-2m")]
    Memfd2m,
    /// A memory file on reserved pages of 1 GiB
    #[serde(rename = "memfd-1g")]
    #[value(name = "memfd-1g")]
    Memfd1g,
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

    /// The treatment of holes of the source file
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

/// The treatment of holes of the source file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Sparse {
    /// They are not read, and stay holes; a real controller's namespace is written with zeroes
    /// there
    Auto,
    /// They are read and written as zeroes
    Never,
}

/// A device of `check`: `soft:1G`, or `BDF=soft:1G`, or `BDF/GROUP=soft:1G`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct CheckDevice {
    pub(crate) bdf: Option<Bdf>,
    pub(crate) group: Option<u32>,
    pub(crate) target: TargetSpec,
}

impl std::fmt::Display for CheckDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.target)
    }
}

impl CheckDevice {
    fn parse(text: &str) -> Result<Self, String> {
        let (place, target) = match text.split_once("=soft:") {
            Some((place, rest)) => (Some(place), format!("soft:{rest}")),
            None => (None, text.to_owned()),
        };
        let target =
            TargetSpec::from_os_string(target.into()).map_err(|error| error.to_string())?;
        if !matches!(target, TargetSpec::SoftMemory(..) | TargetSpec::SoftImage(..)) {
            return Err("the device is a model: soft:SIZE or soft:IMAGE".to_owned());
        }
        let Some(place) = place else { return Ok(Self { bdf: None, group: None, target }) };
        let (bdf, group) = match place.split_once('/') {
            Some((bdf, group)) => (bdf, Some(group)),
            None => (place, None),
        };
        let group = group.map(str::parse).transpose();
        let group = group.map_err(|_| "an IOMMU group is a number".to_owned())?;
        let bdf = bdf.parse::<Bdf>().map_err(|error| error.to_string())?;
        Ok(Self { bdf: Some(bdf), group, target })
    }

    /// As [`parse`](Self::parse), for a disk, which has none of the options of a controller.
    fn parse_disk(text: &str) -> Result<Self, String> {
        let device = Self::parse(text)?;
        match device.target.soft_options() == SoftOptions::default() {
            true => Ok(device),
            false => Err("a virtio disk has blocks of 512 bytes, and is ready at once".to_owned()),
        }
    }

    /// The controller that a program finds if no device is named.
    pub(crate) fn only() -> Self {
        const BYTES: u64 = 1 << 30;
        let target = TargetSpec::SoftMemory(ByteSize(BYTES), SoftOptions::default());
        Self { bdf: None, group: None, target }
    }
}

/// From which severity on a finding fails the run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum FailOn {
    /// From errors on
    Error,
    /// From warnings on
    Warning,
    /// From notes on
    Note,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct CheckArgs {
    /// A device that the program finds: soft:SIZE or soft:IMAGE, at 0000:01:00.0 (the second at
    /// 0000:02:00.0); or BDF=soft:SIZE, or BDF/GROUP=soft:SIZE [default: soft:1G, if there is no
    /// other device]
    #[arg(long, value_name = "DEVICE", value_parser = CheckDevice::parse)]
    pub(crate) nvme: Vec<CheckDevice>,

    /// A virtio disk that the program finds, behind the NVMe controllers: as for --nvme
    #[arg(long, value_name = "DEVICE", value_parser = CheckDevice::parse_disk)]
    pub(crate) virtio_blk: Vec<CheckDevice>,

    /// Make the devices as bad as the specification allows; the seed decides how
    #[arg(long, value_name = "SEED", value_parser = seed)]
    pub(crate) hostile: Option<u64>,

    /// Set a property of the devices, whatever the seed decides: mqes=1, or several, separated by
    /// commas, each once; docs/check.md lists them
    #[arg(long, value_name = "NAME=VALUE", value_delimiter = ',')]
    pub(crate) knob: Vec<pinfold_check::Knob>,

    /// The width of the IOMMU: 39 or 48
    #[arg(long, value_name = "BITS", default_value_t = 39, value_parser = iova_bits)]
    pub(crate) iova_bits: u32,

    /// Offer groups and type 1 alone, as a kernel without iommufd
    #[arg(long)]
    pub(crate) type1_only: bool,

    /// Look also at munmap, mremap, madvise, fallocate and ftruncate, and at mmap over what is there:
    /// memory that a device may still access is found to go then, and each of these calls takes longer
    #[arg(long)]
    pub(crate) watch_memory: bool,

    /// Kill the program after this time: the exit code is 124, if there is no finding
    #[arg(long, value_name = "TIME")]
    pub(crate) time_limit: Option<TimeSpan>,

    /// The severity from which on a finding makes the exit code 3
    #[arg(long, value_enum, value_name = "SEVERITY", default_value_t = FailOn::Error)]
    pub(crate) fail_on: FailOn,

    /// Do not report the findings whose identifiers are in this file, one a line; # begins a comment
    #[arg(long, value_name = "FILE")]
    pub(crate) suppress: Option<PathBuf>,

    /// Write the report to this file [default: standard error]
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,

    /// Write the report as one JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    pub(crate) program: Vec<std::ffi::OsString>,
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("a seed is a number from 0 to {}", u64::MAX))
}

fn iova_bits(text: &str) -> Result<u32, String> {
    match text {
        "39" => Ok(39),
        "48" => Ok(48),
        _ => Err("an IOMMU has 39 or 48 bits".to_owned()),
    }
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

    #[command(flatten)]
    pub(crate) machine: MachineArgs,

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
pub(crate) struct ServeArgs {
    /// The target to serve: file:PATH or a bare path, soft:SIZE, soft:IMAGE, vfio:BDF[/NSID]
    #[arg(value_name = "TARGET", value_parser = target())]
    pub(crate) target: TargetSpec,

    /// Where clients connect: unix:PATH, or HOST:PORT (10809 is NBD's port, 0 any)
    #[arg(long, value_name = "ADDRESS", value_parser = OsStringValueParser::new().try_map(NbdAddress::try_from))]
    pub(crate) nbd: Option<NbdAddress>,

    /// The same as --nbd unix:PATH; - for a socket in a temporary directory, as with --run and no
    /// address
    #[arg(short = 'U', long, value_name = "PATH", conflicts_with = "nbd")]
    pub(crate) unix: Option<PathBuf>,

    /// Serve while this command runs: a shell command with $uri, $nbd, $unixsocket and $port; its
    /// exit code is the program's
    #[arg(long, value_name = "COMMAND")]
    pub(crate) run: Option<String>,

    /// Write the process ID to a file as soon as clients can connect, and remove it at the end
    #[arg(short = 'P', long, alias = "pid-file", value_name = "PATH")]
    pub(crate) pidfile: Option<PathBuf>,

    /// Refuse writes, and open the target for reading alone
    #[arg(short = 'r', long, alias = "readonly")]
    pub(crate) read_only: bool,

    /// Serve the part of the target that begins here
    #[arg(
        short = 'o',
        long,
        value_name = "SIZE",
        default_value = "0",
        allow_negative_numbers = true
    )]
    pub(crate) offset: ByteSize,

    /// Serve only so many bytes [default: all from --offset]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) length: Option<ByteSize>,

    /// The name of the export; clients that ask for none get it, too
    #[arg(long, value_name = "NAME", default_value = "")]
    pub(crate) name: String,

    /// A description of the export, for clients that list it
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) description: String,

    /// The most clients at a time; more are refused
    #[arg(long, value_name = "MAX", default_value_t = 1024, value_parser = count(1 << 20))]
    pub(crate) connections: usize,

    /// The memory that payloads use at a time (a quarter more is allocated); a larger request is
    /// served in parts [default: 64M, at most an eighth of what is available]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) buffers: Option<ByteSize>,

    /// The number of threads, each with its own queue
    /// [default: one for each core, and for 4 MiB of --buffers]
    #[arg(long, value_name = "N", value_parser = count(256))]
    pub(crate) threads: Option<usize>,

    /// The number of requests in flight of each thread
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = depth, allow_negative_numbers = true)]
    pub(crate) iodepth: u64,

    /// Serve only clients that use TLS, with server-cert.pem and server-key.pem in this folder
    #[arg(long, value_name = "FOLDER")]
    pub(crate) tls_certificates: Option<PathBuf>,

    /// Require a certificate of each client, signed by ca-cert.pem in the folder of
    /// --tls-certificates
    #[arg(long, requires = "tls_certificates")]
    pub(crate) tls_verify_peer: bool,

    /// Use the page cache of a file, instead of O_DIRECT
    #[arg(long)]
    pub(crate) cached: bool,

    /// Poll controllers for completions instead of sleeping until an interrupt
    #[arg(long)]
    pub(crate) poll: bool,

    #[command(flatten)]
    pub(crate) stack: StackArgs,

    /// Print one JSON object when clients can connect, and one at the end
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses a queue depth. A number beyond 64 bits becomes the largest, so that the target's limit is
/// named for it, too.
fn depth(text: &str) -> Result<u64, std::num::ParseIntError> {
    text.parse().or_else(|error: std::num::ParseIntError| match error.kind() {
        std::num::IntErrorKind::PosOverflow => Ok(u64::MAX),
        _ => Err(error),
    })
}

/// Parses a target.
fn target() -> impl TypedValueParser<Value = TargetSpec> {
    OsStringValueParser::new().try_map(TargetSpec::from_os_string)
}

/// Parses a target, or the bare address of a controller.
fn controller() -> impl TypedValueParser<Value = TargetSpec> {
    OsStringValueParser::new().try_map(TargetSpec::controller)
}

fn count(most: u64) -> impl TypedValueParser<Value = usize> {
    RangedU64ValueParser::<usize>::new().range(1..=most)
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ReceiveArgs {
    /// The network interface
    #[arg(value_name = "IFACE")]
    pub(crate) interface: String,

    /// Receive from one queue [default: all queues, a thread for each]
    #[arg(long, value_name = "N")]
    pub(crate) queue: Option<u32>,

    /// End after this many packets
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,

    /// End after this time: 10, 500ms, 2m [default: until SIGINT]
    #[arg(long, value_name = "TIME")]
    pub(crate) seconds: Option<TimeSpan>,

    /// Write the packets to a file that tcpdump and Wireshark read
    #[arg(long, value_name = "FILE", conflicts_with = "reflect", value_parser = named_file())]
    pub(crate) pcap: Option<PathBuf>,

    /// Send each packet back, with its addresses swapped
    #[arg(long)]
    pub(crate) reflect: bool,

    /// Store the packets, each from the page that it was received into: file:PATH or a bare path,
    /// soft:SIZE, soft:IMAGE
    #[arg(long, value_name = "TARGET", value_parser = target(), conflicts_with_all = ["pcap", "reflect", "small_chunks"])]
    pub(crate) to: Option<TargetSpec>,

    /// Memory for packets, for each queue
    /// [default: 32M, or less where all queues together would take more than half of what is
    /// available]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) memory: Option<ByteSize>,

    /// Use chunks of 2048 bytes instead of 4096: half the memory, for an MTU of up to 1774
    #[arg(long)]
    pub(crate) small_chunks: bool,

    /// Receive in the driver (native) or in the network stack (generic) only
    /// [default: native, or generic where the driver refuses it]
    #[arg(long, value_name = "MODE", value_enum)]
    pub(crate) xdp: Option<XdpMode>,

    /// Have the kernel poll the card instead of waiting for its interrupts
    #[arg(long)]
    pub(crate) busy_poll: bool,

    /// Receive from an interface that carries the default route, too; replace what --pcap or --to
    /// names
    #[arg(long)]
    pub(crate) force: bool,

    /// Print the report as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Where the XDP program runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum XdpMode {
    Native,
    Generic,
}

impl From<XdpMode> for Attached {
    fn from(mode: XdpMode) -> Self {
        match mode {
            XdpMode::Native => Self::Native,
            XdpMode::Generic => Self::Generic,
        }
    }
}

/// Parses a path. `-` would be a file of that name, where users of tcpdump mean the standard
/// output, as `/dev/stdout` is.
fn named_file() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| {
        if path.as_os_str() == "-" || output::is_stdout(&path) {
            Err("the report goes to the standard output: name a file or a FIFO")
        } else {
            Ok(path)
        }
    })
}

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

    /// The most memory of the maps and unmaps, read and replayed by one policy at a time; more is
    /// refused
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
