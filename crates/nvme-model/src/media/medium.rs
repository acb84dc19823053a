//! What every medium provides.

use crate::bus::BusFault;
use std::io;

/// Takes the next piece of what was read; the pieces come in order and make up the whole.
pub type Sink<'a> = dyn FnMut(&[u8]) -> Result<(), BusFault> + 'a;
/// Fills the next piece of what is to be written.
pub type Source<'a> = dyn FnMut(&mut [u8]) -> Result<(), BusFault> + 'a;

/// Why the medium did not do it.
#[derive(Debug, thiserror::Error)]
pub enum MediaError {
    /// The other side of the copy faulted.
    #[error(transparent)]
    Bus(#[from] BusFault),
    /// The medium is full.
    #[error("the medium is full")]
    Full,
    /// The system refused.
    #[error("the medium failed: {0}")]
    Io(io::Error),
}

impl From<io::Error> for MediaError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full,
            _ => Self::Io(error),
        }
    }
}

/// A medium: bytes from 0 to [`bytes`](Self::bytes).
///
/// Data is handed over in pieces of the medium's own choice, in place, so that memory needs no bounce buffer. The
/// caller keeps `at + len` within [`bytes`](Self::bytes); what lies outside is an error, never a panic.
pub trait Media: Send + Sync + 'static {
    /// The size; it does not change.
    fn bytes(&self) -> u64;
    /// Hands `len` bytes from `at` to `sink`.
    ///
    /// # Errors
    /// [`MediaError`]; `sink` may have had a part.
    fn read(&self, at: u64, len: usize, sink: &mut Sink<'_>) -> Result<(), MediaError>;
    /// Stores `len` bytes from `source` at `at`.
    ///
    /// # Errors
    /// [`MediaError`]; a part may have been stored.
    fn write(&self, at: u64, len: usize, source: &mut Source<'_>) -> Result<(), MediaError>;
    /// Forgets `len` bytes from `at`; they read as zeroes from now on.
    ///
    /// # Errors
    /// [`MediaError`]; a part may have been forgotten.
    fn discard(&self, at: u64, len: u64) -> Result<(), MediaError>;
    /// Makes what was written durable.
    ///
    /// # Errors
    /// [`MediaError::Io`] where the system could not.
    fn flush(&self) -> Result<(), MediaError>;
}

/// What an access outside the medium gets.
fn outside(at: u64, len: u64, bytes: u64) -> MediaError {
    MediaError::Io(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{len} bytes at {at} of a medium of {bytes} bytes"),
    ))
}

/// Whether `at..at + len` is inside.
pub(crate) fn check(at: u64, len: u64, bytes: u64) -> Result<(), MediaError> {
    match at.checked_add(len) {
        Some(end) if end <= bytes => Ok(()),
        _ => Err(outside(at, len, bytes)),
    }
}
