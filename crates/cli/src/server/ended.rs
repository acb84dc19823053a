//! Why a connection ends.

use pinfold_nbd::{HandshakeError, RequestError};
use std::io;

/// How many errors, of the target and of clients, are logged as warnings; the others only on
/// request.
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
    /// What the client sends are no requests.
    #[error("{0}")]
    Request(#[from] RequestError),
}

impl Ended {
    /// Returns whether the client is to blame.
    pub(super) fn is_violation(&self) -> bool {
        match self {
            Self::Closed => false,
            // Of TLS; a socket has no such error.
            Self::Broken(error) => error.kind() == io::ErrorKind::InvalidData,
            Self::Handshake(_) | Self::Request(_) => true,
        }
    }
}
