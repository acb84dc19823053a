//! What every medium provides.

use crate::bus::BusFault;
use std::io;

/// Accepts the next piece of the data that is read, in order.
pub type ReadSink<'a> = dyn FnMut(&[u8]) -> Result<(), BusFault> + 'a;
/// Fills the next piece of the data that is written, in order.
pub type WriteSource<'a> = dyn FnMut(&mut [u8]) -> Result<(), BusFault> + 'a;

/// Why an access to the medium failed.
#[derive(Debug, thiserror::Error)]
pub enum MediaError {
    /// The access to memory faulted.
    #[error(transparent)]
    Bus(#[from] BusFault),
    /// The medium is full.
    #[error("the medium is full")]
    Full,
    /// A system call failed.
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
/// Data is passed in place, in pieces of the medium's choice, so that media in memory need no
/// bounce buffer. Accesses beyond [`bytes`](Self::bytes) are errors.
pub trait Media: Send + Sync + 'static {
    /// Returns the size, which does not change.
    fn bytes(&self) -> u64;
    /// Passes `len` bytes from `at` to `sink`.
    ///
    /// # Errors
    /// [`MediaError`]; `sink` may have received a part.
    fn read(&self, at: u64, len: usize, sink: &mut ReadSink<'_>) -> Result<(), MediaError>;
    /// Stores `len` bytes from `source` at `at`.
    ///
    /// # Errors
    /// [`MediaError`]; a part may have been stored.
    fn write(&self, at: u64, len: usize, source: &mut WriteSource<'_>) -> Result<(), MediaError>;
    /// Discards `len` bytes from `at`, which then read as zeroes.
    ///
    /// # Errors
    /// [`MediaError`]; a part may have been discarded.
    fn discard(&self, at: u64, len: u64) -> Result<(), MediaError>;
    /// Makes completed writes durable. Once it has failed, it fails: what was written before may be
    /// lost.
    ///
    /// # Errors
    /// [`MediaError`] of the first failure.
    fn flush(&self) -> Result<(), MediaError>;
}

/// Returns the error of an access outside the medium.
fn outside(at: u64, len: u64, bytes: u64) -> MediaError {
    MediaError::Io(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{len} bytes at {at} of a medium of {bytes} bytes"),
    ))
}

/// Checks that `at..at + len` is inside.
pub(crate) fn check(at: u64, len: u64, bytes: u64) -> Result<(), MediaError> {
    match at.checked_add(len) {
        Some(end) if end <= bytes => Ok(()),
        _ => Err(outside(at, len, bytes)),
    }
}
