//! Page pools: pages that keep their mapping while they are recycled.
//!
//! A receive path fills a device's ring with pages, passes what arrives on to other threads, and has the pages
//! back when those are done. Mapping each page and taking it back would cost more than the packet; here a page is mapped
//! with its chunk and stays so. The shape and the [counters](Counts) are those of Linux's `page_pool`.
//!
//! # How it works
//!
//! One *consumer*, who has the [`PagePool`], takes pages out of a magazine of 128: no lock, no atomic
//! read-modify-write. What it gives back goes there too. Everybody else's pages come back through a *ring*
//! ([`Config::ring`]): lock-free, bounded, one compare-and-swap a page, or one for up to 64 with [`Remote`]. When the
//! magazine is empty, up to 64 pages are taken out of the ring; only when that is empty too the pool goes below: to the
//! pages that met a full ring, then to its chunk, then to its source.
//!
//! ```text
//! alloc ◀─ magazine ◀─ ring ◀─ drop of a page, from any thread
//!             ▲          └─ full: below
//!             └─ below: what met a full ring · the rest of the newest chunk · a chunk from the source
//! ```
//!
//! Chunks come from a [`ChunkSource`]: 64 pages first, then as much again as the pool has, up to 2 MiB. That maps up to 512
//! pages by one call and with one large leaf, and it is one span, in which a page's I/O virtual address is an addition. The pool
//! gives no chunk back before it goes.
//!
//! All state is out of band: 16 bytes for each 4096 (0.4 %) and 8 for each 2 MiB of the span. Every free takes
//! constant time and allocates nothing; only the pages that meet a full ring, and those that come back
//! after the pool went, take a lock.
//!
//! # What is checked
//!
//! A [`Page`] and a [`Fragment`] can not be freed twice. Each raw free is checked, also in release builds: whether the
//! address lies in a page of this pool, whether the page starts there, whether the device's address belongs to it, whether
//! it is out, and that it is not one that a [`Page`] holds. A refused free changes nothing. A second raw free in the very
//! instant of the first, one of them through a [`Remote`], is not told to its caller; it is found by the consumer, frees
//! nothing (each time that a page is handed out raw it has another generation) and is counted ([`Counts::waive`]). What a
//! copy of a [`RawPage`] cannot tell is whether it is freed *after* the page was handed out raw again.
//!
//! # The end
//!
//! [`PagePool::destroy`] takes the device's access to every page away at once, although pages are still out, and says who
//! [holds](Holder) them. The memory itself stays valid for the holders; a chunk goes back to the source with its last page.

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
