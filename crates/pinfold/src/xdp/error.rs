//! The error of a system call.

use crate::sys::Errno;

/// A system call that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{call}: {errno}")]
pub struct CallError {
    /// The call, and what it was for.
    pub call: &'static str,
    /// The error.
    pub errno: Errno,
}

/// Names the call that failed.
pub(super) fn at(call: &'static str) -> impl Fn(Errno) -> CallError {
    move |errno| CallError { call, errno }
}
