//! Memory for devices: its sources, arenas and buffers.
//!
//! ```
//! use pinfold::{Arena, Domain, access::ToDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let arena = Arena::builder().size(4 << 20).build(&domain)?;
//! let mut buffer = arena.alloc(8192)?;
//! buffer.as_mut_slice()?.fill(7);
//! let mapping = domain.map(buffer, ToDevice)?; // the device may read it ...
//! let buffer = mapping.unmap()?; // ... until here
//! # drop(buffer);
//! println!("{}\n{}", arena.report(), arena.stats());
//! # Ok(()) }
//! ```
//!
//! # A pool for each NUMA node
//!
//! An arena is on one node ([`numa_node`](arena::ArenaBuilder::numa_node): a page of another node
//! is an error, never a substitute), and a pool is in one arena. So memory near a device, or near
//! the threads of a node, is an arena and a pool of their own; a block returns to the pool that it
//! came from, and so to its node, whichever thread frees it.
//!
//! ```no_run
//! use pinfold::{Arena, DmaPool, Domain};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! // Of a device: /sys/bus/pci/devices/ADDRESS/numa_node, which is -1 where there is one node only.
//! let nodes = [0, 1];
//! let pool_on = |node: u32| -> Result<_, Box<dyn std::error::Error>> {
//!     let arena = Arena::builder().size(64 << 20).numa_node(node).build(&domain)?;
//!     let builder = DmaPool::builder(&format!("descriptors-{node}")).block(128).align(128);
//!     Ok(builder.minimum(4096).build(&arena)?) // 4,096 blocks on this node, or an error now
//! };
//! let pools = nodes.into_iter().map(pool_on).collect::<Result<Vec<_>, _>>()?;
//! let mut local = pools[1].local(); // for a thread, or a device, of node 1
//! let descriptor = local.alloc()?;
//! # drop(descriptor);
//! # Ok(()) }
//! ```

pub mod arena;
mod attachment;
pub mod bounce;
mod buffer;
mod claim;
mod obtain;
mod offsets;
mod owned;
mod source;

pub use attachment::{Fixed, MappingPolicy, quarantined_bytes};
pub use bounce::{BounceError, BounceLocal, BouncePool, Bounced};
pub use buffer::Buffer;
pub use claim::{Claim, ClaimedFor, InUse};
pub(crate) use obtain::try_one_page;
pub use offsets::Offsets;
pub use owned::{CutError, OwnedMemory, OwnedMemoryError, OwnedPiece, OwnedPieces, Reclaim};
pub use source::{
    NotLocked, Residency, Source, SourceUnavailable, UnavailableReason, UnknownSource,
};

pub use crate::sys::trial::Inaccessible;
use std::ptr::NonNull;

/// Faults in the pages of memory that another owner mapped, for writing, and so tries whether it
/// can be read and written: what would raise a signal later is an error now. Its contents stay.
///
/// Memory of a userfaultfd is faulted in by its handler, for which the call waits.
///
/// # Errors
/// [`Inaccessible`].
pub fn populate(memory: NonNull<[u8]>) -> Result<(), Inaccessible> {
    let (addr, len) = (memory.cast::<u8>().addr().get(), memory.len());
    crate::sys::trial::check_mapped(addr, len)?;
    crate::sys::trial::populate(addr, len)
}
