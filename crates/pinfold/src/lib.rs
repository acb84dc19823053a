//! The DMA memory stack for user space.
//!
//! [`pinfold_core`] keeps the accounts; this crate gets the memory from Linux ([`arena`], [`buffer`]) or takes what the
//! program has ([`registered`]), keeps the
//! address spaces of devices ([`domain`], [`soft`]), moves files through io_uring ([`uring`]) and says what the machine offers ([`probe`]).
//!
//! # What it feels like
//!
//! ```
//! use pinfold::{Arena, DmaPool, Domain, FromDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let arena = Arena::builder().size(64 << 20).build(&domain)?; // hugepages, if there are any
//! let pool = DmaPool::new(&arena, "descriptors", 128, 128, 0)?; // size, align, boundary
//! let mut local = pool.local(); // owned by this thread: no atomics on its path
//! let block = local.alloc_zeroed()?; // block.iova() is what the device is told
//! let buffer = arena.alloc(8 << 20)?; // or a buffer that the program already has
//! let mapped = domain.map(buffer, FromDevice)?; // from here the device may write it ...
//! # let device = domain.port().ok_or("no device")?;
//! # device.write(mapped.iova().start(), b"from the device")?;
//! # device.write(block.iova(), b"done")?;
//! let mut buffer = mapped.unmap()?; // ... to here, and not a moment longer
//! # assert_eq!(&buffer.as_slice()?[..15], b"from the device");
//! # assert_eq!(block.memory().read_u8(0)?, b'd');
//! # Ok(())
//! # }
//! ```
//!
//! What the arena did not get, and the command that mends it, is in its [report](ArenaMemory::report).
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
