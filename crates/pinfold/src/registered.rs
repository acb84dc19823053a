//! Registered buffers: memory that the program already has, pinned and described.
//!
//! [`Buffers`] accepts any memory of this process: hugepages of a pool (2 MiB, 1 GiB; private,
//! shared, memfd), transparent hugepages, plain pages, pages of files, and mixtures of these,
//! beginning and ending anywhere. It determines the real size of the pages ([`Survey`]), pins them,
//! accounts for what is pinned, and keeps a table of where every byte is ([`Registered`]).
//!
//! Memory can be lent ([`Buffers::register`]), or given up by value
//! ([`Buffers::register_owned`]); pieces of [`OwnedMemory`](crate::OwnedMemory) are payloads of any
//! device whose domain knows it.
//!
//! # How memory is pinned
//!
//! By an io_uring of its own, in whose buffer table the memory is registered. Its pages keep their
//! frames, and are not reused, until they leave the table. The kernel can clone the table to other
//! rings without pinning or charging again ([`Buffers::ring`]; Linux 6.12). The kernel pins for
//! writing, so memory that is mapped read-only (for devices that read) is locked instead (`mlock`),
//! which keeps it resident but not in its frame: [`Registration::is_pinned`].
//!
//! # What counts against `RLIMIT_MEMLOCK`
//!
//! The kernel charges plain pages for each registration that touches them, and larger ones
//! (hugepages, and every other page of several frames) whole, once per table. [`PinnedStats`] has
//! these charges, and the bytes that are really pinned. A process with `CAP_IPC_LOCK` is not
//! charged.
//!
//! # When registered memory is unmapped
//!
//! The pages stay pinned: I/O in flight accesses them, and never another program's pages nor what
//! was mapped at the addresses since. The view of the *process* depends on the call:
//!
//! | call | the process afterwards | the registration |
//! | --- | --- | --- |
//! | `munmap`, `mmap` over it | no longer sees the pages | revoked |
//! | `mremap` to other addresses | sees the same pages there | revoked |
//! | `MADV_DONTNEED`, `MADV_REMOVE`, a hole in the file | sees zeroes in new pages | revoked |
//! | `fork` | keeps the pages (Linux 5.9; the child has copies) | unchanged; the child cannot change it |
//! | `mprotect` | may no longer write; devices still may | unchanged |
//!
//! *Revoked*: with userfaultfd (Linux 5.19, for anonymous memory, hugetlb and memfd), the call
//! returns only after the registration is marked, and every later use of it fails with
//! [`RegistrationError::Gone`]. Without it ([`Registration::revoked_on_unmap`] returns the reason)
//! the registration continues to describe the old pages. In both cases they are unpinned when the
//! buffer is unregistered.
//!
//! ```
//! use pinfold::registered::{Buffers, View};
//! use pinfold::{Access, OwnedMemory};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let own = OwnedMemory::from_vec(vec![0u8; 3 << 20])?; // wherever it came from
//! let mut buffers = match Buffers::new(64, View::Process) {
//!     Ok(buffers) => buffers,
//!     Err(_no_io_uring) => return Ok(()),
//! };
//! let index = buffers.register_owned(&own, Access::READ | Access::WRITE)?;
//! let hold = buffers.hold(index)?; // I/O begins ...
//! for segment in buffers.segments(index, 4096, 1 << 20)? {
//!     println!("{} bytes at {}", segment.len, segment.iova);
//! }
//! buffers.release(hold)?; // ... and has completed
//! println!("{}", buffers.stats());
//! # Ok(())
//! # }
//! ```

mod buffers;
mod enter;
mod footprint;
mod pin;
mod registration;
mod survey;
mod unmap_monitor;

pub use buffers::{Buffers, quarantined_bytes};
pub use footprint::PinnedStats;
pub use pin::RingPlace;
pub use pinfold_core::folio::{BufferIndex, Hold, NotHeld, Registered};
pub use registration::{Registration, Released, View};
pub use survey::{Backing, Gone, Means, MemoryError, Piece, RegistrationError, Survey};
