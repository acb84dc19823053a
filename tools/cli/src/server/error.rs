//! Why a connection ends, and why the server could not start or ended with an error.

use super::address::NbdAddress;
use crate::output;
use crate::setup::staged::StagedError;
use pinfold_nbd::{HandshakeError, RequestError};
use std::io;
use std::path::PathBuf;

/// The longest path of a socket: `sun_path` less the zero at its end (unix(7)).
pub(super) const MAX_PATH: usize = 107;

/// Why the server could not start, or ended with an error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    /// The address cannot be listened at.
    #[error(
        "cannot listen on {address}: {error}{}",
        output::files_or(error, "; name another address with --nbd")
    )]
    Listen {
        /// The address.
        address: NbdAddress,
        /// The system's error.
        error: io::Error,
    },
    /// Another server is there.
    #[error("{0}: a server listens there already; stop it, or name another address with --nbd")]
    InUse(NbdAddress),
    /// A path that no socket can have.
    #[error(
        "{path}: {bytes} bytes, {} more than the {MAX_PATH} that a socket's path may have; name a shorter path, or a relative one",
        .bytes - MAX_PATH, path = path.display()
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// No address.
    #[error("where clients connect is missing: --nbd ADDRESS, -U PATH, or --run COMMAND")]
    NoAddress,
    /// An address beside a socket that was passed.
    #[error(
        "{0}: a socket was passed by socket activation (LISTEN_FDS); leave the option out, or start the server without"
    )]
    Passed(&'static str),
    /// A descriptor that was passed cannot be used.
    #[error(
        "socket activation passed what cannot be used: {0}; pass one listening stream socket, Unix or TCP"
    )]
    NotUsable(String),
    /// `--offset` or `--length` outside of the target.
    #[error("--{option} {asked}: {reason}")]
    Range {
        /// The option.
        option: &'static str,
        /// The value.
        asked: u64,
        /// The limit that it exceeds.
        reason: String,
    },
    /// The command of `--run` was not started, or is lost.
    #[error("--run {command:?}: {error}{}", output::files_or(error, ""))]
    Run {
        /// The command.
        command: String,
        /// The system's error.
        error: io::Error,
    },
    /// The command of `--run` has failed.
    #[error("--run {command:?}: {status}")]
    Command {
        /// The command.
        command: String,
        /// The exit status of the command.
        status: std::process::ExitStatus,
        /// The exit code as a shell reports it.
        code: u8,
    },
    /// The path of `--pidfile` has something else.
    #[error("--pidfile {path}: {reason}; name another path", path = path.display())]
    PidFileTaken {
        /// The path.
        path: PathBuf,
        /// Why it is not replaced.
        reason: String,
    },
    /// The file of `--pidfile` was not created.
    #[error("--pidfile: {0}")]
    PidFile(StagedError),
    /// The file of `--pidfile` was not written.
    #[error("--pidfile {path}: {error}{advice}", path = path.display(), advice = output::advice_or(error, "; name a path on another file system"))]
    PidFileWrite {
        /// The path.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// A folder for a socket was not created.
    #[error("no folder for a socket: {path}: {error}; name an address with --nbd, or another folder with TMPDIR", path = path.display())]
    Folder {
        /// The path.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// There is no usable certificate.
    #[error(
        "--tls-certificates: {path}: {reason}; the folder needs server-cert.pem and server-key.pem, and for --tls-verify-peer \
         ca-cert.pem (docs/serve.md shows how to make them)", path = path.display()
    )]
    Certificates {
        /// The file.
        path: PathBuf,
        /// The defect.
        reason: String,
    },
    /// A system call of an event loop failed.
    #[error("an event loop cannot work: {call}: {error}{}", output::files_or(error, ""))]
    EventLoop {
        /// The call.
        call: &'static str,
        /// The system's error.
        error: io::Error,
    },
    /// The server has ended, and what clients have written may not be durable.
    #[error(
        "{0}: the last flush failed, so what clients have written may be lost: compare it, or write it again"
    )]
    Unflushed(String),
    /// A thread could not be started.
    #[error("a thread of the server could not be started: {0}, or lower --threads")]
    Thread(String),
    /// Too little memory to serve any client.
    #[error("--buffers {asked}: {threads} threads need at least {needed} bytes")]
    Buffers {
        /// The value.
        asked: u64,
        /// The number of threads.
        threads: usize,
        /// The least.
        needed: u64,
    },
}

impl ServeError {
    /// Returns whether the command line requests something impossible.
    pub(crate) fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::Buffers { .. }
                | Self::PathTooLong { .. }
                | Self::NoAddress
                | Self::Passed(_)
                | Self::Range { .. }
        )
    }
}

// Why a connection ends.

/// The number of errors, of the target and of clients, that are logged as warnings; the others only
/// on request.
pub(super) const WARNINGS: u64 = 10;

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    /// The client has closed it.
    #[error("it has closed the connection")]
    Closed,
    /// It is broken.
    #[error("{0}")]
    Broken(io::Error),
    /// The client broke the rules of the handshake.
    #[error("{0}")]
    Handshake(#[from] HandshakeError),
    /// The client does not send requests.
    #[error("{0}")]
    Request(#[from] RequestError),
}

impl Ended {
    /// Returns whether the client is to blame.
    pub(super) fn is_violation(&self) -> bool {
        match self {
            Self::Closed => false,
            // The error of TLS; a socket has no such error.
            Self::Broken(error) => error.kind() == io::ErrorKind::InvalidData,
            Self::Handshake(_) | Self::Request(_) => true,
        }
    }
}
