//! Page pools: pages that keep their mapping while they are recycled.
//!
//! A receive path fills a device's ring with pages, passes what arrives on to other threads, and gets the pages back when
//! those have finished. Mapping and unmapping each page would cost more than the packet; here a page is mapped with its
//! chunk and stays mapped. The structure and the [counters](Counts) follow Linux's `page_pool`.
//!
//! ```
//! use pinfold_core::page_pool::{Config, Page, PagePool, RevocableSource};
//!
//! fn receive<S: RevocableSource>(source: S) -> Result<(), Box<dyn core::error::Error>> {
//!     let mut pool = PagePool::new(source, "rx", Config::default())?;
//!     let mut ring: [Option<Page<S>>; 64] = [const { None }; 64];
//!     let full = pool.fill(&mut ring); // the device's descriptors get `page.iova()`
//!     for page in ring.iter_mut().take(full).filter_map(Option::take) {
//!         pool.recycle(page); // on the consumer's thread; elsewhere a drop returns it
//!     }
//!     pool.destroy(); // revokes the device's access, also to pages that are still held
//!     Ok(())
//! }
//! ```
//!
//! # How it works
//!
//! One *consumer*, which has the [`PagePool`], allocates from a magazine of 128 pages and recycles into it: no lock, no
//! atomic read-modify-write. Pages freed by other threads come back through a *ring* ([`Config::ring`]): lock-free,
//! bounded, one compare-and-swap per page, or one for up to 64 with [`Remote`]. When the magazine is empty, up to 64 pages
//! are taken from the ring; only when that is empty too, the pool uses the pages that met a full ring, then the rest of its
//! newest chunk, then its source.
//!
//! ```text
//! alloc ◀─ magazine ◀─ ring ◀─ drop of a page, from any thread
//!             ▲          └─ full: spill
//!             └─ spill · the rest of the newest chunk · a chunk from the source
//! ```
//!
//! Chunks come from a [`ChunkSource`](crate::dma_pool::ChunkSource): 64 pages first, then as much again as the pool has, up
//! to 2 MiB. That maps up to 512 pages by one call and with one large leaf, and a page's I/O virtual address is an addition.
//! The pool releases no chunk before its end.
//!
//! All state is out of band: 16 bytes for each 4096 (0.4 %) and 8 for each 2 MiB of the span. Every free takes constant
//! time and allocates no memory; only pages that meet a full ring, and those freed after the pool's end, take a lock.
//!
//! # What is checked
//!
//! A [`Page`] and a [`Fragment`] cannot be freed twice. Each raw free is checked, also in release builds: that the address
//! lies in a page of this pool, that the page starts there, that the device's address belongs to it, that it is allocated,
//! and that no [`Page`] holds it. A refused free changes nothing. One case is not reported to the caller: a second raw free
//! at the very moment of the first, one of them through a [`Remote`]. The consumer finds it, it frees nothing (each raw
//! allocation of a page has another generation), and it is counted ([`Counts::waive`]). (A copy of a [`RawPage`] that is
//! freed after the page was allocated raw again cannot be told from the new one.)
//!
//! # The end
//!
//! [`PagePool::destroy`] revokes the device's access to every page at once, also to those still held, and names the
//! [holders](Holder). The memory stays valid for them; a chunk is released with its last page.

mod config;
mod consumer;
mod destroy;
mod end;
mod error;
mod fragment;
mod inner;
mod keep;
mod magazine;
mod open;
mod page;
mod raw;
mod records;
mod remote;
mod report;
mod ring;
mod source;

#[cfg(test)]
#[cfg(loom)]
mod loom_models;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use config::{Config, Tag};
pub use consumer::PagePool;
pub use destroy::Destroyed;
pub use error::{AllocError, BulkFreeError, CreateError, FreeError, RevokeError, TooManyTags};
pub use fragment::Fragment;
pub use page::Page;
pub use raw::RawPage;
pub use remote::Remote;
pub use report::{Counts, Holder, PoolStats};
pub use source::{RevocableSource, SyncOps};
