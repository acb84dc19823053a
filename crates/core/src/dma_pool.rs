//! DMA pools: blocks of one size, cut from chunks that a device can reach.
//!
//! A pool acquires chunks of frames from its [`ChunkSource`]: first the smallest that wastes at most an eighth of itself,
//! then as many bytes as the pool already has, up to 2 MiB. Sizes, alignment, boundary and the [report](PoolStats) follow
//! Linux's `dma_pool`.
//!
//! ```
//! use pinfold_core::dma_pool::{Block, ChunkSource, DmaPool, Local};
//! use pinfold_core::share::Shared;
//!
//! /// Pool, handle and blocks in one struct: it has no lifetime and can move between threads.
//! struct Driver<S: ChunkSource> {
//!     pool: Shared<DmaPool<S>>,
//!     local: Local<S>, // one per thread; its calls take no lock
//!     in_flight: Vec<Block<S>>,
//! }
//!
//! impl<S: ChunkSource> Driver<S> {
//!     fn new(source: S) -> Result<Self, Box<dyn core::error::Error>> {
//!         let pool = Shared::new(DmaPool::new(source, "descriptors", 64, 64, 4096)?);
//!         Ok(Self { local: pool.local(), pool, in_flight: Vec::new() })
//!     }
//!
//!     fn submit(&mut self, payload: u64) -> Result<u64, Box<dyn core::error::Error>> {
//!         let descriptor = self.local.alloc_zeroed()?;
//!         descriptor.memory().write_u64(0, payload)?;
//!         let iova = descriptor.iova().raw(); // what the device is given
//!         self.in_flight.push(descriptor);
//!         Ok(iova)
//!     }
//! }
//! ```
//!
//! Within one function a borrow is sufficient: `let mut local = pool.local();` on a `DmaPool` that is not shared. The
//! example `no_std_pool` is a complete program with its own source.
//!
//! # Which block
//!
//! | block | freed by | cost of a free | for |
//! | --- | --- | --- | --- |
//! | [`LocalBlock`] | its drop, on the thread of its [`LocalCell`] | no lock, no read-modify-write | what one thread allocates and drops |
//! | [`Block`] | its drop, on any thread | the pool's lock; a share of a shared pool | what is sent to another thread, or stored without a lifetime |
//! | | [`Local::free`], [`Local::free_many`] | no lock, no read-modify-write | those of them that a thread with a `Local` frees |
//! | | [`DmaPool::free_many`] | the lock and the shares once for 64 | those that a thread without one frees |
//! | [`RawBlock`] | its address, checked | no lock through a `Local` | what a device's ring keeps as numbers |
//! | [`BlockRun`] | its addresses, checked | the same, less for each block (`pinfold-runs` in `pinfold bench pool`) | rings whose buffers come and go together |
//!
//! A block in a row of another owner costs two read-modify-writes more; `free_many` frees those of one row that follow each other
//! for two together. A block in a row of the depot costs two more as well, which frees in random order often pay.
//!
//! For blocks that the program writes as soon as it has allocated them, [`DmaPool::with_prefetch`] has each alloc prefetch the
//! first line of a later block.
//!
//! All state is out of band: the pool accesses a block's memory only in [`alloc_zeroed`](DmaPool::alloc_zeroed) and in
//! [debug mode](DmaPool::with_debug). A device that still writes to a freed block corrupts that block's next content
//! and nothing else.
//!
//! # How it works
//!
//! The state of a chunk's blocks is kept in *rows* of 64 blocks, 128 bytes each: a bit for each free block, a byte for
//! each block's state, and the row's owner. An owner ([`Local`]; the pool itself has one, under a lock, for calls without
//! a `Local`) has rows, one of them *current*, whose free blocks are its magazine: one word of bits. Before it is a *stash* of
//! the 16 blocks that were freed last, which are allocated first. Alloc and free through a `Local` move a block to or from the
//! stash, or clear or set a bit of the word, and write the block's state, by plain loads and stores. When the current row is
//! empty, or frees in order reach another row, that other row becomes the current one. A freed block goes to the stash, to the current
//! row if it belongs there and the last call was a free as well, and when the stash is full it is only marked free in its row. A free finds the row from the address: a range check, a table that the pool owns, and a multiplication; there
//! are no headers. The block that the stash gave out last is recognised by its address. Bulk calls treat neighbours as one, and
//! take and return whole rows.
//!
//! A row whose blocks are all allocated has no owner, or keeps an owner that frees its blocks itself; otherwise the first to free one
//! of them becomes its owner. A block in a row of another owner is freed *remotely*, by a list in the row that its owner collects. Rows that are mostly free move
//! to and from the depot, many at a time.
//!
//! Every operation takes constant amortised time for any number of blocks. No free allocates memory, and no lock is held
//! while the [`ChunkSource`] runs: while one owner waits for a chunk, others allocate and free blocks.
//!
//! # How much memory a pool holds
//!
//! A pool grows by a chunk when an alloc finds no free block: not in the rows of its owner, not in the depot, and not with the
//! pool's own owner, which serves the calls without a `Local`. A chunk has at most 2 MiB, or 1 GiB if a block is larger.
//! Only [`shrink`](DmaPool::shrink), [`shrink_shared`](DmaPool::shrink_shared) and the pool's end release chunks.
//!
//! So a pool has, besides the blocks in use, the free blocks that other owners keep, which an alloc of this owner cannot get:
//!
//! | kept by | what | at most | how to bound it |
//! | --- | --- | --- | --- |
//! | each owner | its stash | 16 blocks | drop a [`Local`] that is not going to be used: it returns all that it keeps |
//! | | the free blocks of its current row | 64 blocks | the same |
//! | | rows that are half free, or more | 32 rows; 8 in a small pool, or with many owners | the same |
//! | | rows without a free block at its last check, in which others have freed since | 128 rows | the same |
//! | | the free blocks of all its other rows | fewer than are in use there | a [maximum](#limits) for the pool |
//! | the pool | rows in the depot, which every owner finds | no limit | [`shrink`](DmaPool::shrink), or a maximum |
//!
//! Together, with *peak* for the most blocks that were in use at a time, that is the bound of the Hoard allocator (Berger et al.,
//! ASPLOS 2000):
//!
//! ```text
//! blocks of the pool <= 2 * peak + 10,336 for each owner + one chunk
//! ```
//!
//! 10,336 is `64 * (32 + 1 + 128) + 2 * 16`: the rows of the table, and the stash twice, since its blocks make rows look fuller
//! than they are. Two cases are different:
//!
//! - In a pool that has never had two `Local`s at a time a row moves to the depot from 7/8 free blocks on, not from half, so the
//!   factor is 8. No other owner needs those blocks, and a free into a row of the depot costs two more read-modify-writes.
//! - Blocks that others free in a row which still has free blocks are beyond the bound until the row's owner finds them. It looks at
//!   two such rows with each call that moves a row; an owner that makes no calls, or far fewer than it has such rows, keeps them
//!   meanwhile.
//!
//! A block of a stash keeps its chunk from being [released](DmaPool::shrink).
//!
//! # Limits
//!
//! [`set_limits`](DmaPool::set_limits) gives a pool two limits, in blocks:
//!
//! | limit | effect |
//! | --- | --- |
//! | minimum | acquired at once, and kept when the pool is [shrunk](DmaPool::shrink) |
//! | maximum | an alloc that would need more is refused with [`AllocError::Maximum`] |
//!
//! Both are checked where chunks are added and released, not where blocks are allocated and freed. With both equal the pool has
//! a fixed size (of whole chunks: see [`Limits::maximum`]); [`for_each_block`](DmaPool::for_each_block) then shows all its
//! blocks to hardware that must know them.
//!
//! A pool at its maximum cannot grow, so others are refused the free blocks that an idle [`Local`] keeps. Hence an owner keeps fewer
//! rows from the time on at which the pool was at its maximum and had two `Local`s: *R* with free blocks, however few, and *R*
//! that others have freed in, besides its current row and its stash.
//!
//! | rows of the pool, divided by its owners | *R* | blocks kept: `64 * (2 * R + 1) + 16` |
//! | --- | --- | --- |
//! | up to 8 | all of them | at most 1,104 |
//! | 8 to 32 | 8 | 1,104 |
//! | 32 to 128 | a quarter of them | 1,104 to 4,176 |
//! | 128 and more | 32 | 4,176 |
//!
//! The pool's own owner is one of them, and keeps nothing that others are refused. A `Local` keeps to this when it next changes its
//! current row; one that was the only one until then keeps rows of which up to 7/8 are free, until it makes calls or is dropped.
//! The price: rows move to the depot sooner, and a free into a row there costs two more read-modify-writes, which frees in random
//! order often pay.
//!
//! [`fill_all`](Local::fill_all) allocates all the blocks of a request or none, and
//! [`shrink_shared`](DmaPool::shrink_shared) releases chunks beside owners that keep using the pool. For memory on a NUMA
//! node, use a source that is on it: a pool for each node.
//!
//! # Checks
//!
//! Each raw free is checked, also in release builds: the address is the start of a block in a chunk of this pool, the device
//! address belongs to it, and the block is allocated and not owned by a [`Block`] ([`FreeError::Owned`], also if the free
//! races with the block's drop). A refused free changes nothing. One case is not reported to the caller: two frees of one
//! raw block at the same instant, one of them through the `Local` that owns the row. The second is detected when the row is
//! next used, frees nothing, and is counted in [`PoolStats::late_double_frees`]. (Freeing a stale copy of a [`RawBlock`]
//! after the block was allocated again frees the new allocation: the copy is indistinguishable from it. A [`Block`] cannot
//! be freed twice.)

mod bits;
mod block;
mod bulk;
mod cell;
mod census;
mod coherent;
mod current;
mod depot;
mod directory;
mod error;
mod free;
mod geometry;
mod growth;
mod limits;
mod list;
mod local;
mod many;
mod owner;
mod pool;
mod quick;
mod raw;
mod reserve;
mod row;
mod row_ref;
mod run;
mod shrink;
mod slot;
mod source;
mod stash;
mod state;
mod stats;
mod terms;
mod turn;
mod watch;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

#[cfg(test)]
#[cfg(loom)]
mod loom_models;

pub use block::Block;
pub use cell::{LocalBlock, LocalCell};
pub use census::Busy;
pub use coherent::Coherent;
pub use error::{
    AllocError, BulkAllocError, BulkFreeError, CreateError, FreeError, LimitError, SourceError, SpanError,
};
pub use limits::Limits;
pub use local::Local;
pub use pool::DmaPool;
pub use raw::RawBlock;
pub use run::BlockRun;
pub use source::ChunkSource;
pub(crate) use source::span_memory;
pub use stats::{PoolStats, REPORT_HEADER, WIDE_HEADER};
pub use watch::{Damage, FREE_PATTERN, FRESH_PATTERN, LastUse, OwnerTag};
