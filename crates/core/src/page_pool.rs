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

mod account;
mod consumer;
mod destroy;
mod error;
mod fragment;
mod magazine;
mod remote;
mod report;
mod ring;
mod shared;
mod source;

#[cfg(test)]
#[cfg(loom)]
mod loom_models;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use consumer::PagePool;
pub use destroy::Destroyed;
pub use error::{AllocError, BulkFreeError, CreateError, FreeError, RevokeError, TooManyTags};
pub use fragment::Fragment;
pub use remote::Remote;
pub use report::{Counts, Holder, PoolStats};
pub use source::{RevocableSource, SyncOps};

use crate::addr::Iova;
use crate::dma_pool::ChunkSource;
use crate::frame::Order;
use crate::mem::DmaMemory;
use core::fmt;
use core::ptr::NonNull;
use ring::Entry;
use shared::Shared;

/// What a page pool is like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// How large a page is: 4 KiB times 2^order, up to 2 MiB.
    pub order: Order,
    /// How many pages the ring holds: a power of two, up to 2^20.
    pub ring: u32,
    /// Where in a page the device starts to write, in bytes: before it there is room for headers.
    pub offset: usize,
    /// How many bytes from there the device may write; 0: all of the rest.
    pub max_len: usize,
}

impl Default for Config {
    /// Pages of 4 KiB, a ring of 1024, and the device may write all of a page.
    fn default() -> Self {
        Self { order: Order::PAGE, ring: 1024, offset: 0, max_len: 0 }
    }
}

/// A name for who holds a page, in one pool. In another pool it stands for another name, or for none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tag(u32);

impl Tag {
    /// Nobody in particular: what a page has if nothing is said.
    pub const NONE: Self = Self(0);
}

/// A page, raw: where it is for the processor and for the device. `Copy`, so the pool checks what is freed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawPage {
    ptr: NonNull<u8>,
    iova: Iova,
}

// SAFETY: it is two addresses. Reaching the memory through them is `unsafe`, or goes through `DmaMemory`.
unsafe impl Send for RawPage {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawPage {}

impl RawPage {
    /// The page with these two addresses, for callers that keep them elsewhere. Checked where it is used.
    pub const fn from_parts(ptr: NonNull<u8>, iova: Iova) -> Self {
        Self { ptr, iova }
    }

    /// Where the page is in this process.
    pub const fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// What the device is told.
    pub const fn iova(&self) -> Iova {
        self.iova
    }
}

/// A page that goes back to its pool when it is dropped, from any thread; it may outlive the pool.
///
/// Dropped, it goes through the ring. [`PagePool::recycle`] is the consumer's quick way back, [`Remote::recycle_all`]
/// that of other threads for many.
pub struct Page<S: ChunkSource> {
    /// Alive as long as the page is out (see `shared`).
    shared: NonNull<Shared<S>>,
    frame: u32,
    /// How many bytes the device may have written since the page was last synced for it.
    written: u32,
}

// SAFETY: it is the one owner of its page, of a pool whose shared part is `Send` and `Sync`.
unsafe impl<S: ChunkSource> Send for Page<S> {}
// SAFETY: by a shared reference its memory is reached by atomics, and its account by atomics.
unsafe impl<S: ChunkSource> Sync for Page<S> {}

impl<S: ChunkSource> Page<S> {
    #[inline(always)]
    fn shared(&self) -> &Shared<S> {
        // SAFETY: alive as long as the page is out, which it is until `self` is dropped or taken apart.
        unsafe { self.shared.as_ref() }
    }

    /// What the device is told: the page's first byte. It writes from [`Config::offset`] bytes further on.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.shared().raw_at(self.frame).iova
    }

    /// The page's memory, all of it, to be read and written beside the device.
    #[inline]
    pub fn memory(&self) -> DmaMemory<'_> {
        self.shared().memory_of(self.frame)
    }

    /// Says who holds the page, for [`PagePool::holders`]. Kept until the page is back.
    #[inline]
    pub fn tag(&self, tag: Tag) {
        if let Some(account) = self.shared().directory.account(self.frame) {
            account.set_owned(tag.0);
        }
    }

    /// Gives the processor what the device wrote: `len` bytes from [`Config::offset`], at most
    /// [`Config::max_len`]. When the page goes back, only those are synced for the device. On a coherent machine that is
    /// all bookkeeping.
    #[inline]
    pub fn sync_for_cpu(&mut self, len: usize) {
        let config = self.shared().config;
        let len = len.min(config.max_len);
        // At most 2 MiB.
        self.written = u32::try_from(len).unwrap_or(u32::MAX);
        if let Some(ops) = &self.shared().sync {
            self.shared().sync_range(&**ops, self.frame, config.offset, len, false);
        }
    }

    /// The page synced for the device, on its way back: from here it is the entry that must go to the ring, once.
    #[inline(always)]
    fn into_entry(self) -> Entry {
        self.shared().sync_for_device(self.frame, self.written as usize);
        let entry = Entry::owned(self.frame);
        core::mem::forget(self);
        entry
    }
}

impl<S: ChunkSource> Drop for Page<S> {
    #[inline]
    fn drop(&mut self) {
        self.shared().sync_for_device(self.frame, self.written as usize);
        // SAFETY: the page was handed out as owned, to this value, and comes back with it.
        unsafe { shared::give_back(self.shared, &[Entry::owned(self.frame)]) };
    }
}

impl<S: ChunkSource> fmt::Debug for Page<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Page").field("iova", &self.iova()).field("len", &self.memory().len()).finish()
    }
}
