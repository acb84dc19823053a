//! I/O virtual addresses: which ranges of an address space are free.
//!
//! An [`IovaSpace`] is two radix trees, one below 4 GiB and one above. The leaves are *regions* of
//! 2 MiB: free, allocated as a whole, or shared by smaller allocations and then with a map, one bit
//! per 4 KiB. Each part of a tree records the free runs at its ends and the longest one inside, at
//! each page size; a search descends once and is never linear, under a 32-bit limit either. First
//! fit: addresses stay dense, so they share table pages.
//!
//! Memory follows the regions in use and not the allocations: 50,000 pages that abut take 98 maps.
//!
//! **A free needs no memory.** The nodes of a small allocation stay until its region is entirely
//! free. Allocations are not recorded one by one: whole allocations, several abutting ones, or
//! parts may be freed; only freeing a part of an allocation of 2 MiB or more may need memory, for
//! the region that is shared from then on.
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

#[cfg(test)]
#[cfg(not(loom))]
mod check;
mod error;
mod node;
mod region;
mod search;
mod space;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
mod tree;

pub use error::IovaError;
pub use space::{IovaSpace, IovaStats};
