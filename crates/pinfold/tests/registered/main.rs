//! Memory of the program on this machine's kernel: what its pages are, what the kernel charges for
//! it, and where it is. A test binary of its own: it changes the machine's pool of hugepages, and
//! reads what the kernel says that the whole process has pinned, so its tests run one at a time.
//! Cases that a machine does not allow are skipped with a message.
#![expect(clippy::unwrap_used, reason = "test code outside of test functions")]

mod common;
mod limits;
mod physical;
mod rings;
mod shapes;
