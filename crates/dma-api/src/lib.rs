//! Pinfold below the crate [`dma_api`]: drivers that are generic over its `DmaOp` get memory behind
//! an I/O domain, unmodified.
//!
//! `no_std` and `alloc`: a [`Platform`] needs a domain of `pinfold-core`, over any backend, and a
//! source of memory. In a process these are a `pinfold::Domain` and a `pinfold::Arena`.
//!
//! ```
//! use dma_api::{DmaConstraints, DmaDirection};
//! use pinfold::{Arena, Domain};
//! use pinfold_dma_api::Platform;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let device = domain.port().ok_or("only models have ports")?;
//! let arena = Arena::builder().size(4 << 20).build(&domain)?;
//! let platform = Platform::leak((*domain).clone(), move |bytes| arena.alloc(bytes).ok());
//!
//! let dma = platform.device(DmaConstraints::new(u64::MAX)); // what a driver's `new` is given
//! let mut data = vec![7u8; 100]; // from the heap: the device gets a copy
//! let map = dma.map_streaming_slice_for_device(&mut data, 1, DmaDirection::Bidirectional)?;
//! let at = pinfold_core::addr::Iova::new(map.dma_addr().as_u64());
//! device.write(at, b"from the device")?;
//! map.complete_for_cpu(0..map.bytes_len());
//! drop(map); // revoked: when this returns, no device reaches the copy
//! assert_eq!(&data[..15], b"from the device");
//! assert!(device.write(at, b"too late").is_err());
//! assert!(platform.stats().is_clean());
//! # Ok(()) }
//! ```
//!
//! # What a device can access
//!
//! | memory | how it is mapped | what the device may do |
//! | --- | --- | --- |
//! | allocated: arrays, boxes, pools (contiguous or coherent, which are the same here) | whole pages of its own, from the allocation to the free | read and write: the interface has no direction |
//! | mapped buffers (`StreamingMap`) | a copy in whole pages of its own, from the map to the unmap | what the direction allows |
//!
//! Revocation is strict: a free or unmap waits until no device reaches the memory, and only then
//! returns it to the source. Nothing else of the program is on the pages, which are zeroed first.
//!
//! A buffer can be anywhere, so the device always gets a copy. It has the buffer's bytes from the
//! map on; `prepare_for_device` copies them again, and `complete_for_cpu` copies back what the
//! device wrote, if it may write. Bytes that it did not write keep their value.
//!
//! # Constraints
//!
//! The address mask, the alignment (also beyond a page, then for the processor's address too), and
//! a boundary that is a power of two are satisfied whatever memory the source returns. Other
//! constraints are refused: a length beyond the largest segment or the boundary, an alignment or a
//! boundary that is no power of two. Address 0, which drivers treat as no address, is never used.
//!
//! # Failures
//!
//! If access cannot be revoked in time, the memory and its addresses are quarantined: never reused,
//! and counted ([`Stats::quarantined_bytes`], and by the domain). `dealloc_coherent` then returns
//! an error; the other calls have no result. A free of memory that is not allocated, or of a part,
//! changes nothing and is counted too ([`Stats::invalid`]).
//!
//! # Responsibilities of the driver
//!
//! `dma-api` gives a driver slices of memory that its device may write at any time, and a
//! `StreamingMap` does not borrow its buffer. Nothing here can check whether the driver leaves the
//! memory alone meanwhile, and keeps the buffer alive. `docs/dma-api.md` in the repository lists
//! the defects found in drivers.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![no_std]

extern crate alloc;

mod mapped;
mod plan;
mod platform;
mod stats;

pub use platform::Platform;
pub use stats::Stats;
