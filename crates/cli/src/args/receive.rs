//! The options of `receive`.

use super::parse::target;
use super::target::TargetSpec;
use crate::output;
use crate::units::{ByteSize, TimeSpan};
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use pinfold_xdp::Attached;
use std::path::PathBuf;

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
    /// [default: 32M, or less where all queues together would take more than half of what is available]
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
