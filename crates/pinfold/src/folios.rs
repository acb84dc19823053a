//! The folios behind memory, and what depends on them: the charge, the borders of a ring's places,
//! the leaves of a map, and physical addresses.
//!
//! A *folio* is what the kernel handles as one page: a hugepage of a pool (2 MiB, 1 GiB), a
//! transparent hugepage, or a plain page of 4 KiB. A [`Survey`] lists the folios of memory by their
//! size. It serves [`OwnedMemory`](crate::OwnedMemory) and arenas alike, and everything that takes
//! them:
//!
//! | consumer | what it takes from the folios | who pins |
//! | --- | --- | --- |
//! | a ring ([`RingBuffers`](crate::uring::RingBuffers), [`FileQueue`](crate::uring::FileQueue)) | where its places of 1 GiB end, so that no folio is in two; what the kernel charges: [`Forecast::ring`] | the kernel, while the memory is in the table |
//! | a domain that maps the memory whole ([`MappingPolicy::Whole`](crate::MappingPolicy)) | addresses at which leaves of 2 MiB or 1 GiB fit | the kernel, behind VFIO and iommufd; the software IOMMU needs no pin |
//! | a device without an IOMMU | physical addresses, located by a shift and a mask | this module, by an io_uring of its own |
//! | a program that builds descriptors of physical addresses itself ([`OwnedMemory::folios`](crate::OwnedMemory::folios)) | the same table, for PRP lists and SGLs | this module, unless a mapping pins the memory already |
//!
//! # What counts against `RLIMIT_MEMLOCK`
//!
//! A ring's table is charged plain pages for each place that touches them, and larger folios whole,
//! once per table. A mapping behind VFIO or iommufd is charged its own bytes, each mapping anew.
//! A process with `CAP_IPC_LOCK` is not charged.
//!
//! # When the memory is unmapped
//!
//! Pinned pages keep their frames until they are unpinned: a device accesses these pages, and never
//! pages mapped at the addresses since. The owner of memory keeps it mapped for as long as it is
//! registered, so nothing watches for an unmap.

mod charge;
mod pinned;
mod survey;

pub use charge::Forecast;
pub(crate) use charge::ring_charge;
pub(crate) use pinned::PinnedFolios;
pub use pinned::{Folios, PinError};
pub use survey::{Backing, Means, MemoryError, Piece, Survey};
pub(crate) use survey::{PLACE, leaf, places};
