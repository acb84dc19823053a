//! Why the server could not start, or ended with an error.

use super::address::NbdAddress;
use std::io;
use std::path::PathBuf;

/// Why the server could not start, or ended with an error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    /// The address cannot be listened at.
    #[error("cannot listen at {address}: {error}; name another address with --nbd")]
    Listen {
        /// The address.
        address: NbdAddress,
        /// The system's error.
        error: io::Error,
    },
    /// Another server is there.
    #[error("{0}: a server listens there already; stop it, or name another address with --nbd")]
    InUse(NbdAddress),
    /// There is no usable certificate.
    #[error(
        "--tls-certificates: {path}: {reason}; the folder needs server-cert.pem and server-key.pem, and for --tls-verify-peer \
         ca-cert.pem (docs/serve.md shows how to make them)", path = path.display()
    )]
    Certificates {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A system call of an event loop failed.
    #[error(
        "an event loop cannot work: {call}: {error}{}",
        if error.raw_os_error() == Some(24) { "; raise `ulimit -n`" } else { "" } // EMFILE
    )]
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
    #[error("a thread of the server could not be started: {0}; lower --threads")]
    Thread(io::Error),
    /// Too little memory to serve any client.
    #[error("--buffers {asked}: {threads} threads need at least {needed} bytes")]
    Buffers {
        /// The value.
        asked: u64,
        /// How many threads there are.
        threads: usize,
        /// The least.
        needed: u64,
    },
}
