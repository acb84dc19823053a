//! A file, read and written through io_uring with O_DIRECT and fixed buffers.
//!
//! A [`FileQueue`] owns the buffers of the transfers in flight and returns each with its result. A
//! short transfer is continued inside. Without O_DIRECT, fixed buffers or io_uring itself the queue
//! works more slowly, and reports it in [`FileQueue::notes`].
//!
//! ```
//! use pinfold::Arena;
//! use pinfold::uring::{FileQueue, Options};
//! use std::fs::OpenOptions;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = Arena::builder().size(1 << 20).build_unmapped()?; // no device, no domain
//! let options = Options { fixed: &[memory.fixed()], ..Options::default() };
//! let path = std::env::current_exe()?;
//! let mut queue = FileQueue::open(&path, OpenOptions::new().read(true), &options)?;
//! queue.read(memory.alloc(4096)?, 0, 4096, 7)?; // offset, length, tag
//! let mut done = Vec::new();
//! queue.wait(1, &mut done)?;
//! assert_eq!((done[0].tag, &done[0].result), (7, &Ok(())));
//! # Ok(()) }
//! ```
//!
//! | feature | since Linux | without it |
//! | --- | --- | --- |
//! | io_uring with `READ` and `WRITE` | 5.6 | `pread` and `pwrite`, one after the other |
//! | fixed buffers (`READ_FIXED`, `WRITE_FIXED`), registered files | 5.1 | the kernel pins and looks up for each transfer |
//! | memory of any ring ([`RingBuffers`]) | 5.1 | see there |
//! | polling ([`Options::poll`]) | 5.1, and a device with poll queues | the device's interrupt |
//! | deferred completions ([`Options::one_thread`]) | 6.1 | they interrupt the thread |
//! | waiting with a time limit | 5.11 | a drop waits without a limit |
//! | the alignment of O_DIRECT (`STATX_DIOALIGN`) | 6.1 | blocks of 4 KiB are assumed |
//!
//! O_DIRECT transfers whole blocks ([`direct_alignment`]). A read that ends within the last
//! block of a file is issued in whole blocks, and ends at the end of the file. A write that ends
//! within a block is padded with zeroes if it is at the end of the file; the file is then too long
//! until [`FileQueue::set_len`] truncates it. Where either exceeds the limit of a file's size
//! (`RLIMIT_FSIZE`), the kernel sends `SIGXFSZ` besides the error, as for any write: it ends a
//! program that neither handles nor ignores it.

mod error;
mod file;
mod index;
mod note;
mod places;
mod queue;
mod registered;
mod ring;
mod slot;
#[cfg(test)]
mod tests;

pub use crate::memory::Fixed;
pub use error::{FileError, Op};
pub use file::direct_alignment;
pub use index::{BufferIndex, RegisterError};
pub use note::{BufferedReason, Note};
pub use queue::{FileQueue, quarantined_buffers};
pub use registered::{RingBuffers, set_place};
pub use slot::{Completion, Options, Rejected, Submitted};
