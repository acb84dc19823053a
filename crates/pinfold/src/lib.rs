//! The DMA memory stack for user space: everything between `mmap` and the device.
//!
//! [`memory`] obtains pinned memory from Linux, [`registered`] uses the memory that a program already has, [`domain`] gives
//! devices access to it and revokes that access, [`uring`] reads and writes files with it, [`vfio`] opens devices, and [`probe`]
//! reports what the machine offers. What needs no operating system is in [`pinfold_core`], re-exported as [`core`].
//!
//! # Example
//!
//! ```
//! use pinfold::{Arena, DmaPool, Domain, FromDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let arena = Arena::builder().size(64 << 20).build(&domain)?; // hugepages if available
//! let pool = DmaPool::new(&arena, "descriptors", 128, 128, 0)?; // size, align, boundary
//! let mut local = pool.local(); // one thread's handle: no atomics on its path
//! let block = local.alloc_zeroed()?; // block.iova() goes into the descriptor
//! let buffer = arena.alloc(8 << 20)?; // or memory that the program already has
//! let mapping = domain.map(buffer, FromDevice)?; // the device may write from here ...
//! # let device = domain.port().ok_or("no device")?;
//! # device.write(mapping.iova().start(), b"from the device")?;
//! # device.write(block.iova(), b"done")?;
//! let mut buffer = mapping.unmap()?; // ... to here, and no longer
//! # assert_eq!(&buffer.as_slice()?[..15], b"from the device");
//! # assert_eq!(block.memory().read_u8(0)?, b'd');
//! # Ok(())
//! # }
//! ```
//!
//! What an arena could not get, and the command that fixes it, is in its [report](ArenaMemory::report).
//!
//! # Terms
//!
//! | term | meaning |
//! | --- | --- |
//! | [`Iova`], [`PhysAddr`] | an address as the device issues it; a physical address |
//! | arena | pinned memory from the operating system: its range, page size, NUMA node, and its IOVA range in each domain |
//! | frame | a 4 KiB page of an arena, or an aligned run of 2^order of them |
//! | zone | the allocator of an arena's frames |
//! | block, chunk | a fixed-size piece of a DMA pool; the run of frames that a pool cuts into blocks |
//! | owner | one thread of control with its own handle, for instance `pool.local()` |
//! | cache (magazine), depot | free objects held by one owner; where owners exchange them |
//! | segment | a range that the device can address in one piece: [`Iova`] and length |
//! | folio | an equal-sized piece of a registered buffer, as large as its pages really are |
//! | domain | one I/O address space: what the devices attached to it can reach |
//! | mapping | a buffer mapped into a domain for one direction: [`ToDevice`], [`FromDevice`] or [`Bidirectional`] |
//! | mapping policy | whether an arena is mapped as a whole for its lifetime, or only the parts in use |
//! | register, unregister | make memory known to a domain or a ring; the reverse |
//! | in flight | submitted to a device, a ring or a queue, and not completed |
//! | ticket | a position in an invalidation queue; `completed >= ticket` means that the flush has completed |
//! | revoked, quiesced | the entry is cleared and a flush requested; the flush has completed, no device can reach the memory |
//! | retire, reclaim | remove a table page from the table; make it free, after its flush |
//! | quarantined | memory that a device may still reach: never reused, counted |
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod adapters;
mod backend;
pub mod domain;
pub mod memory;
pub mod pci;
pub mod probe;
pub mod registered;
mod sys;
pub mod uring;
pub mod vfio;

#[cfg(feature = "soft")]
pub use backend::soft;
pub use domain::Domain;
pub use memory::arena::{self, Arena, ArenaLocal, ArenaMemory};
pub use memory::{Buffer, MappingPolicy, OwnedMemory, OwnedPiece, OwnedPieces, Source};
pub use pinfold_core as core;
pub use pinfold_core::access::{self, Access, Bidirectional, FromDevice, ToDevice};
pub use pinfold_core::addr::{self, Iova, IovaRange, PageSize, PhysAddr, Segment};
pub use pinfold_core::dma_pool::{self, DmaPool};
pub use pinfold_core::domain::{BackendError, Mapping, Pinned, Revoked};
pub use pinfold_core::mem::DmaMemory;
pub use pinfold_core::page_pool::{self, PagePool};
pub use pinfold_core::share;
pub use sys::Errno;
pub use sys::cpu::CpuTime;
pub use sys::limits::MemlockLimit;
pub use sys::signals::Signals;
