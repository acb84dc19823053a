//! The options of `serve`.

use super::parse::{depth, target};
use super::stack::StackArgs;
use super::target::TargetSpec;
use crate::server::address::NbdAddress;
use crate::units::ByteSize;
use clap::Args;
use clap::builder::{OsStringValueParser, RangedU64ValueParser, TypedValueParser};
use std::path::PathBuf;

#[derive(Clone, Debug, Args)]
pub(crate) struct ServeArgs {
    /// What to serve: file:PATH or a bare path, soft:SIZE, soft:IMAGE, vfio:BDF[/NSID]
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

fn count(most: u64) -> impl TypedValueParser<Value = usize> {
    RangedU64ValueParser::<usize>::new().range(1..=most)
}
