//! The DMA memory stack for user space.
//!
//! Pinned memory from Linux ([`memory`]), or memory that the program has ([`OwnedMemory`]), and what
//! its pages are ([`folios`]); the I/O address spaces of devices ([`domain`]) behind VFIO ([`vfio`]) or a
//! software IOMMU; files through io_uring ([`uring`]); and what the machine offers ([`probe`]). Pools,
//! frames and gather lists are in [`pinfold_core`], re-exported
//! as [`core`], so that one dependency is enough.
//!
//! ```
//! use pinfold::{Arena, DmaPool, Domain, FromDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?; // or a VFIO device's
//! let arena = Arena::builder().size(64 << 20).build(&domain)?; // hugepages, if available
//! let pool = DmaPool::builder("descriptors").block(128).align(128).build(&arena)?;
//! let mut local = pool.local(); // owned by this thread: no lock on its path
//! let block = local.alloc_zeroed()?; // block.iova() goes into the descriptor
//! let buffer = arena.alloc(8 << 20)?; // or memory that the program already has
//! let mapping = domain.map(buffer, FromDevice)?; // the device may write it from here ...
//! # let device = domain.port().ok_or("no device")?;
//! # device.write(mapping.iova().start(), b"from the device")?;
//! # device.write(block.iova(), b"done")?;
//! let mut buffer = mapping.unmap()?; // ... to here
//! # assert_eq!(&buffer.as_slice()?[..15], b"from the device");
//! # assert_eq!(block.memory().read_u8(0)?, b'd');
//! # Ok(())
//! # }
//! ```
//!
//! The arena's [report](ArenaMemory::report) lists the sources that were unavailable, and the
//! commands that fix them.
//!
//! # I want to ...
//!
//! | task | type or module | example |
//! | --- | --- | --- |
//! | write a first driver, step by step | `docs/guide.md` in the repository | `copy_engine` |
//! | have memory that a device can reach, on hugepages if there are any | [`Arena`], [`Source`] | `owned_driver` |
//! | let a device read or write a buffer, and take the access away | [`Domain::map`](core::domain::Domain::map), [`Mapping`] | `owned_driver` |
//! | revoke many mappings with one flush | [`DomainLocal`] | `owned_driver` |
//! | drive a device: from the buffers of a request to the buffers again | [`requests::Requests`] | `copy_engine` |
//! | revoke without waiting, and await the end | [`Revoked`], [`Ticket`] | `revoke_async` |
//! | pass memory that my program already has to devices and rings | [`OwnedMemory`] | `owned_memory` |
//! | pass memory that is not whole pages | [`memory::BouncePool`] | |
//! | allocate descriptors of one size | [`DmaPool`] | `fixed_pools` |
//! | receive into pages that stay mapped | [`PagePool`] | `fixed_pools` |
//! | read and write a file with O_DIRECT and fixed buffers | [`uring::FileQueue`] | `owned_memory` |
//! | use hugepages with a ring of my own | [`uring::RingBuffers`], [`adapters`] | `io_uring_ring` |
//! | know the pages of memory: their size, what a registration is charged, where they are physically | [`folios`], [`OwnedMemory::folios`] | `owned_memory` |
//! | drive a PCI device | [`vfio::Device`], [`pci::Binder`] | `wait_epoll`, `vfio_check` |
//! | drive a PCI device behind a VT-d unit of my own | the module `vtd` (feature `vtd`) | |
//! | drive an NVMe controller, a virtio disk, an `AF_XDP` socket | the crates `pinfold-nvme`, `pinfold-virtio`, `pinfold-xdp` | `owned_memory`, `virtio_blk_soft` |
//! | test a driver without a device | [`Domain::soft`], [`soft`] | `owned_driver` |
//! | put a `Vec`, `Bytes` or a guest's memory into an arena | [`adapters`] | `allocator`, `bytes`, `vm_memory` |
//! | know what this machine offers, and the command that adds what is missing | [`probe`] | |
//!
//! # Examples
//!
//! `cargo run -p pinfold --example NAME` runs an example; the first line of each has its complete
//! command.
//!
//! | example | shows |
//! | --- | --- |
//! | `copy_engine` | the program of `docs/guide.md`: a first driver, and a model of its device |
//! | `owned_driver` | domain, arena, descriptors and mapped buffers in one struct that moves between threads |
//! | `fixed_pools` | descriptors and pages whose number is fixed when the program starts |
//! | `revoke_async` | revocations awaited in `async` functions |
//! | `wait_epoll` | an interrupt in the program's own event loop |
//! | `io_uring_ring` | a program's own ring with registered hugepages |
//! | `allocator` | a `Vec` in DMA memory (`--features allocator-api2`) |
//! | `bytes` | a received message as `Bytes`, without a copy (`--features bytes`) |
//! | `vm_memory` | a guest's memory (`--features vm-memory`) |
//! | `vfio_check` | the guarantees of the VFIO backends, on a real device |
//! | `owned_memory` (`-p pinfold-nvme`) | a file through the program's own hugepages to an NVMe controller |
//! | `virtio_blk_soft` (`-p pinfold-virtio`) | a driver of the crate `virtio-drivers` |
//!
//! # Terms
//!
//! | term | meaning |
//! | --- | --- |
//! | [`Iova`], [`PhysAddr`] | an address as the device issues it; a physical address |
//! | arena | pinned memory: [`ArenaMemory`], and [`Arena`] for that memory in one domain |
//! | owner | one thread of control with its own handle: `pool.local()`, `arena.local()`, `domain.local()` ([`DomainLocal`]) |
//! | domain | one I/O address space: what the devices attached to it can reach |
//! | mapping | a buffer mapped into a domain for one direction |
//! | mapping policy | whether memory is mapped as a whole for its lifetime, or only the parts in use |
//! | segment | a range that the device can address in one piece: `Iova` and length |
//! | window | 2 MiB of a domain's addresses that one owner allocates from, in order |
//! | ticket | a position in an invalidation queue; when it has completed, so has the flush: [`Ticket`] |
//! | revoked, quiesced | the entry is cleared and a flush requested; the flush has completed |
//! | late, deferred | the flush is past its deadline and may still complete; the domain holds the memory until then |
//! | quarantine | memory that a device may still reach: never reused, counted |
//! | register, unregister | declare memory to a domain or a ring; the reverse |
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod adapters;
mod backend;
pub mod domain;
pub mod folios;
pub mod memory;
pub mod pci;
pub mod probe;
pub mod requests;
mod sys;
pub mod uring;
pub mod vfio;
#[cfg(feature = "vtd")]
pub mod vtd;

#[cfg(all(feature = "vtd", not(target_arch = "x86_64")))]
compile_error!("the feature `vtd` is for x86-64, whose IOMMU it drives");

#[cfg(feature = "soft")]
pub use backend::soft;
pub use domain::{Domain, DomainLocal};
pub use memory::arena::{self, Arena, ArenaLocal, ArenaMemory};
pub use memory::{
    Buffer, MappingPolicy, OwnedMemory, OwnedPiece, OwnedPieces, Source, quarantined_bytes,
};
pub use pinfold_core as core;
pub use pinfold_core::access::{self, Access, Bidirectional, FromDevice, ToDevice};
pub use pinfold_core::addr::{self, Iova, IovaRange, PageSize, PhysAddr, Segment};
pub use pinfold_core::dma_pool::{self, DmaPool};
pub use pinfold_core::domain::{
    BackendError, MapError, Mapping, NotQuiesced, Pinned, Revoked, Unrevoked, deferred_bytes,
};
pub use pinfold_core::invalidate::{Ticket, WaitError, WaitLimit};
pub use pinfold_core::mem::DmaMemory;
pub use pinfold_core::page_pool::{self, PagePool};
pub use sys::Errno;
pub use sys::image_lock::{ImageLock, is_image_in_use, lock_image};
pub use sys::limits::MemlockLimit;
pub use sys::process::{CpuTime, Signals};

/// Compiles and runs the program of the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;
