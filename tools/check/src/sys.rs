//! System calls that no library wraps: seccomp's user notification, the start of a program in a
//! namespace of its own, and signals that never wait; and memory that is shared with the program.

pub(crate) mod seccomp;
pub(crate) mod signal;
pub(crate) mod spawn;
pub(crate) mod window;
