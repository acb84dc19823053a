//! DMA pools: blocks of one size, cut from chunks that a device can reach.
//!
//! ```
//! use pinfold_core::dma_pool::{Block, ChunkSource, DmaPool, PoolLocal};
//!
//! /// Pool, handle and blocks in one struct: it can move between threads.
//! struct Driver {
//!     local: PoolLocal, // one per thread; a call rarely takes a lock
//!     in_flight: Vec<Block>,
//! }
//!
//! impl Driver {
//!     fn new<S: ChunkSource + Clone + 'static>(
//!         arena: &S,
//!     ) -> Result<Self, Box<dyn core::error::Error>> {
//!         let builder = DmaPool::builder("descriptors").block(64).align(64).boundary(4096);
//!         let pool = builder.build(arena)?;
//!         Ok(Self { local: pool.local(), in_flight: Vec::new() })
//!     }
//!
//!     fn submit(&mut self, payload: u64) -> Result<u64, Box<dyn core::error::Error>> {
//!         let descriptor = self.local.alloc_zeroed()?;
//!         descriptor.memory().write_u64(0, payload)?;
//!         let iova = descriptor.iova().raw(); // what the device is given
//!         self.in_flight.push(descriptor);
//!         Ok(iova)
//!     }
//!
//!     fn complete(&mut self) {
//!         self.in_flight.drain(..).for_each(|descriptor| self.local.free(descriptor));
//!     }
//! }
//! ```
//!
//! # How it works
//!
//! **Owners.** Each [`PoolLocal`] has two *magazines*, arrays of the numbers of free blocks
//! (Bonwick and Adams, USENIX 2001). Alloc pops a number, free pushes one. When both magazines are
//! empty, or full, one is exchanged as a whole at the *depot*, under its lock. The *front* is an
//! owner behind a lock of its own, for calls on [`DmaPool`] itself and for each [`Block`] that is
//! dropped, not freed by a `PoolLocal`. No block belongs to an owner: what one allocates and
//! another frees is an ordinary free there. Growing and shrinking have a permit: a flag, and a lock
//! that its holder alone takes. Debug mode has a lock for its history, which each alloc and free
//! takes.
//!
//! **States.** One byte a block, out of band, is absent, free, raw or owned, and for a moment
//! *listed* (free, while the pool is being shrunk). A raw free claims its block by one
//! compare-exchange of raw to free, and waits for no other thread: of any number of raw frees of one
//! allocation, on any threads, one succeeds. Alloc and the free of a [`Block`] store plainly,
//! because the number in a magazine, or the `Block`, is exclusive. A foreign, misaligned, double or
//! still-owned free is refused in release builds too, and changes nothing. One wrong free cannot be
//! told from a right one: that of a stale copy of a [`RawBlock`] after the same block was allocated
//! as raw again. It frees that allocation; no block gets two owners by it.
//!
//! **Addresses.** The span of the source is divided into *units* of 2 MiB (1 GiB for larger
//! blocks). A unit has an array of state bytes from when its first chunk is acquired until the pool
//! ends, so a late wrong free still finds the state, and the pool's own state is bounded by its
//! span, however often it grows and shrinks ([`Builder`] has the figures). Blocks lie at the
//! multiples of their size in a unit, or in each part of it that they must not cross the end of. So
//! an address becomes a number by a look-up of its unit, a shift and mask if there is a boundary,
//! one multiplication that is exact for multiples, and the state byte, which says whether a chunk
//! has the block.
//!
//! **Chunks** are acquired when an alloc finds no free block: first the smallest run of which at
//! most a quarter can be unused, then as many bytes as the pool has, up to 2 MiB; smaller ones if
//! the source has no other. A block that two chunks share is in neither, so a chunk that starts at
//! no multiple of the size has up to one block less. Their blocks are allocated in ascending order, and not accessed before. No
//! lock is held while the source runs. [`shrink`](DmaPool::shrink) releases the chunks whose blocks
//! are all in the depot.
//!
//! **Device-writable memory** holds no link, header or state: a device that writes to a freed block
//! corrupts its next content and nothing else. The pool itself accesses blocks in `alloc_zeroed`
//! and in [debug mode](Builder::debug) only.
//!
//! # What owners keep
//!
//! An owner's two magazines together have room for [`Builder::cached_bytes`] bytes of blocks, 512
//! KiB unless set, but for at least one block and at most 1,024. So a pool has, besides the blocks
//! in use, at most that for each owner, the front included, and what is in the depot, which every
//! owner finds. When an alloc fails, the front's blocks are moved to the depot, and other owners
//! return theirs at their next exchange; an idle owner keeps at most its cap until it is
//! [flushed](PoolLocal::flush) or dropped. At a [maximum](Builder::maximum) others can be refused
//! those blocks. A forgotten `PoolLocal` (`mem::forget`) keeps them forever, and the pool alive.
//!
//! # False sharing
//!
//! State bytes of neighbouring blocks share cache lines, 64 to a line. Owners get neighbours in
//! runs of a magazine, so they meet in the first and last line of a run only, until blocks are
//! exchanged between owners in random order; a line that two owners write costs each a cache miss,
//! and nothing else.

mod block;
mod debug;
mod directory;
mod error;
mod grow;
mod inner;
mod layout;
mod local;
mod magazine;
mod pool;
mod shrink;
mod source;
mod state;
mod unit;

pub use block::Block;
pub use debug::{Damage, FREE_PATTERN, FRESH_PATTERN, LastUse};
pub use error::{
    AllocError, BulkAllocError, BulkFreeError, CreateError, FreeError, RangeError, SourceError,
    SpanError,
};
pub use local::PoolLocal;
pub use pool::{Builder, Busy, DmaPool, DmaPoolStats};
pub(crate) use source::span_memory;
pub use source::{ChunkSource, Coherent};
pub use unit::RawBlock;
pub(crate) use unit::list;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

#[cfg(test)]
#[cfg(loom)]
mod loom_models;
