//! I/O virtual addresses: which ranges of an address space are free.
//!
//! An [`IovaSpace`] stores the *free* extents, not the allocated ones: mappings that abut leave nothing between them, so
//! tens of thousands of static mappings are a handful of entries. The extents are in balanced trees, one below 4 GiB
//! and one above, and each subtree records its largest gap; a search for a fit descends once and is never linear,
//! under a 32-bit limit either. First fit: addresses stay dense, so they share table pages.
//!
//! **A free needs no memory.** A freed range may split an allocated run and become an extent of its own, which
//! needs a node; the allocation has reserved it.
//!
//! Allocations are not recorded one by one: whole allocations, several abutting ones, or parts may be freed. Only
//! freeing *more pieces than were allocated* can end with [`IovaError::Pieces`].
//!
//! ```
//! use pinfold_core::iova::IovaSpace;
//!
//! # fn main() -> Result<(), pinfold_core::iova::IovaError> {
//! let space = IovaSpace::new(39)?;
//! let range = space.alloc(6 << 20, 2 << 20, None)?;
//! assert!(range.start().is_aligned(2 << 20));
//! println!("{}", space.stats());
//! space.free(range)?;
//! # Ok(())
//! # }
//! ```

mod error;
mod iova_space;
mod space;
mod stats;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
mod tree;

pub use error::IovaError;
pub use iova_space::IovaSpace;
pub use stats::IovaStats;
