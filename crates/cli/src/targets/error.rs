//! Why a target failed.

use super::record::Io;
use pinfold::uring::FileError;
use pinfold_core::domain::BackendError;
use pinfold_core::mem::AccessError;
use pinfold_nvme::driver::{CommandError, PollError, Reject};
use rustix::io::Errno;

/// Returns what to do about a controller that did not become ready, to be appended to the error.
fn retried(error: &CommandError) -> &'static str {
    match error {
        CommandError::Status(status) if status.is_not_ready() => {
            "; raise --retry-limit if the device becomes ready later"
        }
        _ => "",
    }
}

/// Returns whether a file system that has no such operation answers a trim with `errno`.
pub(crate) const fn is_no_operation(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS)
}

/// Returns what to do about a trim that has failed, to be appended to the error.
const fn trim_advice(errno: Errno) -> &'static str {
    match errno {
        errno if is_no_operation(errno) => {
            "; --rw trim needs a file system with holes, or a device that discards"
        }
        Errno::NOSPC | Errno::DQUOT => "; free some space there: a hole can need some",
        _ => "",
    }
}

/// Why a target failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum TargetError {
    /// A file failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A controller completed a request with an error.
    #[error("{target}: {io}: {error}{}", retried(error))]
    Command {
        /// The target's name.
        target: String,
        /// The request.
        io: Box<Io>,
        /// The controller's error.
        error: CommandError,
    },
    /// A controller did not complete a request in time.
    #[error(
        "{target}: {io}: no answer in time; the buffer is quarantined, since the controller may still reach it: \
         check the device"
    )]
    Timeout {
        /// The target's name.
        target: String,
        /// The request.
        io: Box<Io>,
    },
    /// A controller did not make written data durable.
    #[error("{target}: flushing: {}", error.as_ref().map_or("no answer in time".to_owned(), ToString::to_string))]
    Flush {
        /// The target's name.
        target: String,
        /// The controller's error; `None` if it did not respond.
        error: Option<CommandError>,
    },
    /// The driver rejected a request.
    #[error("{target}: {reason}")]
    Rejected {
        /// The target's name.
        target: String,
        /// The driver's reason.
        reason: Reject,
    },
    /// A controller cannot be polled for completions.
    #[error("{target}: {error}")]
    Poll {
        /// The target's name.
        target: String,
        /// The driver's error.
        error: PollError,
    },
    /// The domain could not map a buffer, or could not revoke its mapping.
    #[error("{target}: {error}")]
    Domain {
        /// The target's name.
        target: String,
        /// The domain's error.
        error: BackendError,
    },
    /// A file system or block device cannot deallocate a range.
    #[error("{target}: {io}: {errno}{}", trim_advice(*.errno))]
    Trim {
        /// The target's name.
        target: String,
        /// The request.
        io: Box<Io>,
        /// The system's error.
        errno: Errno,
    },
    /// An access outside of a buffer.
    #[error(transparent)]
    Memory(#[from] AccessError),
    /// An injected failure.
    #[cfg(test)]
    #[error("the fake failed")]
    Fake,
}
