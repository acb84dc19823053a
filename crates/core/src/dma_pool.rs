//! DMA pools: blocks of one size, cut from chunks that a device can reach.
//!
//! A pool asks its [`ChunkSource`] for chunks of frames, small ones first (the smallest that wastes at most an eighth),
//! then as much again as it has, up to 2 MiB at a time; so a small pool stays small and a large one has large pages.
//! The rules of sizes, alignment and boundary, and the [report](PoolStats), are those of Linux's `dma_pool`.
//!
//! All state is out of band: nothing is read from a block or written to one but by
//! [`alloc_zeroed`](DmaPool::alloc_zeroed) and in [debug mode](DmaPool::with_debug). A device that goes on writing into a freed block
//! spoils that block's next content and nothing else.
//!
//! # How it works
//!
//! The blocks of a chunk are accounted for in *rows* of 64, 128 bytes each: a bit for each free block, a byte for each
//! block's state, and who keeps the row. An owner ([`Local`]; the pool itself has one, under a lock, for calls without a
//! `Local`) keeps rows and has one of them at hand, whose free blocks are its magazine: one word of bits. Alloc and free
//! through a `Local` clear or set a bit of that word and write the block's state, by plain loads and stores. When it is
//! empty, or a block of another row is freed, that other row is the one at hand. A free finds its row from the
//! address: a range check, a table that the pool owns, a multiplication and a shift; never a header. Of a block of the
//! row at hand the multiplication alone proves where it is.
//!
//! A row whose blocks are all out is nobody's, and whoever frees one of them keeps it next; a block of a row that another
//! owner keeps is *posted* to that owner. Rows that are free for the most part go to and from the depot, many at a time.
//!
//! Every operation takes constant time, amortised, whatever the number of blocks. No free allocates, and no lock is held
//! while the [`ChunkSource`] is at work: while one owner waits for a chunk the others free blocks, and allocate those that
//! are free.
//!
//! # How much memory a pool holds
//!
//! An alloc takes a block of its owner's rows, else of the depot or of the pool's own owner; only when none of these has
//! one does the pool grow, by a chunk of 2 MiB at most (or of one block, where that is larger). What other owners keep is
//! bounded, as in the Hoard allocator (Berger et al., ASPLOS 2000): a row of which half is free goes to the depot, where
//! any owner takes it, except for 8 to 32 such rows an owner (a quarter of the pool's, divided by the owners). Therefore,
//! with *peak* the most blocks in use at a time,
//!
//! ```text
//! blocks of the pool <= 2 * peak + 10,304 for each owner + one chunk
//! ```
//!
//! where 10,304 are 32 rows, the one at hand, and 128 whose blocks were all out when they were last looked at. In a pool that
//! never had two `Local`s at a time the threshold is 7/8 and the factor 8, because a free into a row of the depot costs
//! two read-modify-writes more.
//!
//! The bound does not cover what others post to rows that an owner keeps and that still have free blocks, until the owner
//! looks at them: two rows at each call that leaves its row at hand. An owner that makes no calls, or far fewer than
//! it keeps such rows, holds those blocks meanwhile; drop a [`Local`] that is not going to be used.
//!
//! # What is checked
//!
//! Each raw free is, also in release builds: whether the address lies in a chunk of this pool, whether a block starts
//! there, whether the device's address belongs to it, whether it is in use, and that no [`Block`] owns it
//! ([`FreeError::Owned`], also where the free races with the block's drop). A refused free changes nothing. Only a second
//! free of a raw block in the very instant of the first, one through the `Local` that keeps the block's row and one
//! elsewhere, is not told to its caller; it is found when the row is next used, frees nothing, and is counted in
//! [`PoolStats::late_double_frees`]. (What a copy of a [`RawBlock`] cannot tell is whether it is freed a
//! second time after the block was handed out anew; [`Block`] cannot be freed twice.)

mod block;
mod bulk;
mod census;
mod coherent;
mod current;
mod depot;
mod directory;
mod error;
mod free;
mod geometry;
mod growth;
mod list;
mod local;
mod owner;
mod pool;
mod quick;
mod raw;
mod report;
mod row;
mod row_ref;
mod source;
mod spin_lock;
mod terms;
mod turn;
#[cfg(any(test, feature = "bench-internals"))]
mod unchecked;
mod watch;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

#[cfg(test)]
#[cfg(loom)]
mod loom_models;

pub use block::Block;
pub use census::Busy;
pub use coherent::Coherent;
pub use error::{AllocError, BulkFreeError, CreateError, FreeError, SourceError};
pub use local::Local;
pub use pool::DmaPool;
pub use raw::RawBlock;
pub use report::{PoolStats, REPORT_HEADER, WIDE_HEADER};
pub use source::ChunkSource;
pub use watch::{Damage, FREE_PATTERN, FRESH_PATTERN, LastUse, OwnerTag};
