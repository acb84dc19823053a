//! Page pools: pages that keep their mapping while they are recycled.
//!
//! A receive path fills a device's ring with pages, passes received pages to other threads, and
//! gets them back later. Mapping and unmapping each page would cost more than the packet; here a
//! page is mapped with its chunk and stays mapped. The structure and the [counters](Counts) follow
//! Linux's `page_pool`.
//!
//! ```
//! use pinfold_core::page_pool::{Config, Page, PagePool, RevocableSource};
//!
//! fn receive(source: impl RevocableSource + 'static) -> Result<(), Box<dyn core::error::Error>> {
//!     let mut pool = PagePool::new(source, "rx", Config::default())?;
//!     let mut ring: [Option<Page>; 64] = [const { None }; 64];
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
//! One *consumer*, which owns the [`PagePool`], allocates from a magazine of 128 pages and recycles
//! into it without a lock or an atomic read-modify-write. Other threads return pages through a
//! *ring* ([`Config::ring`]): bounded, without a lock, one compare-and-swap per page, or per 64
//! pages with [`Remote`]. A full magazine moves 64 pages there, by one compare-and-swap too. An
//! empty one is refilled with up to 64 pages: from the ring; if that is empty, or its first entry
//! not filled yet, from the *spill* list of pages that met a full ring; then from the rest of the
//! newest chunk; then from the source.
//!
//! ```text
//! alloc   ◀─ magazine ◀─ ring ◀─ drop of a page, on any thread; a full magazine
//! recycle ─▶    ▲          └─ full: spill list
//!               └─ spill list · rest of the newest chunk · new chunk from the source
//! ```
//!
//! Chunks come from a [`ChunkSource`](crate::dma_pool::ChunkSource): 64 pages first, then as many
//! as the pool already has, up to 2 MiB. One call maps up to 512 pages with one large leaf, and a
//! page's I/O virtual address is computed by an addition. The pool releases no chunk before it is
//! closed or destroyed.
//!
//! [`Config::max_in_use`] limits the pages that are in use at a time. A page that was allocated
//! once stays in circulation, so the limit is checked only where a page is allocated for the first
//! time.
//!
//! It is not the [block pool](crate::dma_pool) with a mapping, although both have magazines: a page
//! has a holder's name, shares and a generation, so an exchange of arrays with a depot would not
//! replace the ring's entries, and one consumer needs no depot.
//!
//! All state is out of band: 16 bytes for each 4096 (0.4 %) and 8 for each 2 MiB of the span. No
//! free allocates memory; only pages that meet a full ring, or that are freed after the pool was
//! taken down, take a lock. A free takes constant time, with two exceptions: if second raw frees
//! have filled the spill list, it is sorted to discard them; and after the pool was taken down a
//! free searches the list of chunks and may release one.
//!
//! # Checks
//!
//! A [`Page`] and a [`Fragment`] cannot be freed twice. Each raw free is checked, also in release
//! builds: the address is the start of a page of this pool, the device address belongs to it, and
//! the page is allocated and not held by a [`Page`]. A refused free changes nothing. One case is
//! not reported to the caller: two raw frees of one page at the same instant, one of them through a
//! [`Remote`]. The consumer detects the second by its generation, ignores it and counts it
//! ([`Counts::waive`]), no matter how many allocations later, except for a free that a thread began
//! 2^32 allocations of the page earlier. (Freeing a stale copy of a [`RawPage`] after the page was
//! allocated raw again frees the new allocation: the copy is indistinguishable from it.)
//!
//! # Taking a pool down
//!
//! [`PagePool::destroy`] revokes the device's access to every page at once, also to pages still
//! held, and names the [holders](Holder). Their memory stays valid; a chunk is released with its
//! last page.

mod config;
mod consumer;
mod error;
mod fragment;
mod inner;
mod page;
mod records;
mod ring;
mod stats;
mod teardown;

#[cfg(test)]
#[cfg(loom)]
mod loom_models;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use crate::dma_pool::{AllocError, FreeError};
pub use config::{Config, RawPage, RevocableSource, SyncOps, Tag};
pub use consumer::PagePool;
pub use error::{CreateError, RevokeError, TooManyTags};
pub use fragment::Fragment;
pub use page::{Page, Remote};
pub use stats::{Counts, Holder, PagePoolStats};
pub use teardown::Destroyed;
