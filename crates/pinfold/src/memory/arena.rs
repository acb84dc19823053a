//! Arenas: pinned memory from the operating system, mapped into one or several domains.
//!
//! An arena is one contiguous range of memory. [`ArenaMemory`] is the memory and its allocator: it
//! allocates [`Buffer`](crate::Buffer)s, and can exist before any device is open. An [`Arena`] is
//! that memory in one domain, where it has one contiguous range of I/O virtual addresses, so that
//! the address of anything inside is an addition. As a
//! [`ChunkSource`](pinfold_core::dma_pool::ChunkSource) it feeds DMA pools and page pools; one that
//! is mapped per use can revoke a page pool's chunks while their pages are still in use
//! ([`RevocableSource`](pinfold_core::page_pool::RevocableSource)).
//!
//! ```
//! use pinfold::Arena;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // For io_uring, or a device that is opened later:
//! let memory = Arena::builder().size(4 << 20).build_unmapped()?;
//! let mut buffer = memory.alloc(8192)?;
//! buffer.as_mut_slice()?.fill(7);
//! # let domain = pinfold::Domain::soft()?;
//! let arena = memory.map_into(&domain)?; // the device is there
//! let mapping = domain.map(buffer, pinfold::access::ToDevice)?;
//! # drop((arena, mapping));
//! # Ok(()) }
//! ```
//!
//! # Guarantees
//!
//! - **Contents.** Fresh memory reads as zero, and takes no page until it is touched. Recycled
//!   memory holds what its last user left: use [`ArenaMemory::alloc_zeroed`] where that matters.
//! - **Address.** The memory does not move within this process, and children of `fork` get no copy
//!   (`MADV_DONTFORK`), so that a write after a fork does not move the parent to another page than
//!   the one that the device uses.
//! - **Residency.** hugetlb pages are always resident. Other pages are locked when they are first
//!   touched (`MLOCK_ONFAULT`), where `RLIMIT_MEMLOCK` allows it ([`ArenaReport::residency`]).
//!   Locking keeps a page in memory but lets the kernel migrate it to another frame; the pin of
//!   VFIO, iommufd or an io_uring registration is what keeps the *frame* for a real device. The
//!   software IOMMU uses addresses of this process and needs neither, so a failure to lock is
//!   reported and no error ([`Pinning::Required`] makes it one).
//! - **Lifetime.** The memory is unmapped from all domains, and then from the process, when the
//!   last handle, buffer and pool chunk is dropped. If frames are never freed (a pool was destroyed
//!   while blocks were in use, a revoke timed out) or an unmap fails, the whole arena is
//!   quarantined, since a device may still write to it:
//!   [`quarantined_bytes`](crate::quarantined_bytes).

mod builder;
mod error;
mod handle;
mod local;
mod state;
#[cfg(test)]
mod tests;

pub use crate::memory::attachment::MappingPolicy;
pub use crate::memory::source::{
    NotLocked, Residency, Source, SourceUnavailable, UnavailableReason, UnknownSource,
};
pub use builder::{ArenaBuilder, Pinning};
pub use error::{ArenaReport, ArenaStats, BuildError, NotExclusive};
pub use handle::{Arena, ArenaMemory};
pub use local::ArenaLocal;
pub use pinfold_core::dma_pool::AllocError;
pub(crate) use state::Run;
