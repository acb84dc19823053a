//! System calls, each in a small function with the proof of its unsafe block and the first kernel
//! that has it, and parsers for `/proc` and `/sys`. Uses nothing above it.
//!
//! rustix where it has the call, libc where it does not (`mbind`).

pub mod control_group;
mod errno;
pub(crate) mod files;
pub mod hugepages;
pub(crate) mod image_lock;
pub(crate) mod iommufd;
pub(crate) mod kernel;
pub(crate) mod limits;
pub(crate) mod pages;
pub(crate) mod process;
pub(crate) mod region;
pub(crate) mod release;
pub(crate) mod ring_memory;
pub mod threads;
pub(crate) mod trial;
pub(crate) mod uring;
pub(crate) mod vfio;
pub(crate) mod window;

pub use errno::Errno;
pub(crate) use errno::bytes;
