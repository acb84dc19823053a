//! The directory of table pages, free, linked or retired: everything that only changes under the
//! table's lock.
//!
//! A page is *free*, or has a *home*: the one entry that may link it. There it is *linked*, or
//! *retired* (the entry records that it was linked). A retired page is on exactly one list, waiting
//! for a flush; until it is reclaimed it can be relinked, **at its home only**: a walker that still
//! holds the old link is then correct. That is why mapping next to a pending flush needs no flush
//! of its own.

use super::pages::PageIndex;
use crate::sync::count_steps;
use alloc::vec::Vec;

/// The number of pages of a list that are handled under one hold of the table's lock, which other
/// threads need to link a page.
pub(super) const PAGES_A_HOLD: u32 = 64;

/// A list of pages, threaded through [`Meta::next`].
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    pub(super) head: PageIndex,
    /// The last page, if there is one: two lists are joined in one step.
    tail: PageIndex,
    pub(super) len: u32,
}

impl List {
    pub(super) fn is_empty(&self) -> bool {
        self.head == PageIndex::NONE
    }
}

impl Default for List {
    fn default() -> Self {
        Self { head: PageIndex::NONE, tail: PageIndex::NONE, len: 0 }
    }
}

/// The metadata of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meta {
    /// The page that holds the entry which links this one, and the entry's number in it.
    pub(super) parent: PageIndex,
    pub(super) slot: u16,
    /// Unlinked, not yet reclaimed.
    pub(super) retired: bool,
    /// On a list of retired pages (a page that was relinked is still on its list).
    pub(super) listed: bool,
    /// The next page of the same list, or of the free ones.
    pub(super) next: PageIndex,
}

const BLANK: Meta =
    Meta { parent: PageIndex::NONE, slot: 0, retired: false, listed: false, next: PageIndex::NONE };

/// The metadata of one chunk: that of its first pages, and how many pages it has.
#[derive(Debug)]
pub(super) struct MetaChunk {
    metas: Vec<Meta>,
    count: u32,
}

impl MetaChunk {
    fn is_used_up(&self) -> bool {
        self.metas.len() >= self.count as usize
    }
}

/// The directory of one table's pages.
#[derive(Debug)]
pub(super) struct PageDirectory {
    /// The metadata of each chunk's pages that have been used; the others need not be zero.
    chunks: Vec<MetaChunk>,
    /// The first chunk that may have pages that have not been used.
    filling: usize,
    capacity: u32,
    free: PageIndex,
    pub(super) available: u32,
    /// Retired by a failed map or by a reclaim; added to the next clear.
    pub(super) pending: List,
    pub(super) retired: u32,
    pub(super) high_water: u32,
}

/// A page just allocated, and whether it must be zeroed first.
pub(super) struct NewPage {
    pub(super) page: PageIndex,
    pub(super) dirty: bool,
}

impl PageDirectory {
    /// Creates the directory of no pages.
    pub(super) fn new() -> Self {
        Self {
            chunks: Vec::new(),
            filling: 0,
            capacity: 0,
            free: PageIndex::NONE,
            available: 0,
            pending: List::default(),
            retired: 0,
            high_water: 0,
        }
    }

    /// Allocates the metadata of a chunk of `count` pages and a place for it; `None` if there is no
    /// memory.
    pub(super) fn prepare(&mut self, count: u32) -> Option<MetaChunk> {
        let mut metas = Vec::new();
        metas.try_reserve_exact(count as usize).ok()?;
        self.chunks.try_reserve(1).ok()?;
        Some(MetaChunk { metas, count })
    }

    /// Adds a chunk that was prepared.
    pub(super) fn add(&mut self, chunk: MetaChunk) {
        self.capacity += chunk.count;
        self.available += chunk.count;
        self.chunks.push(chunk);
    }

    /// Whether a page was ever used. A link in damaged memory may lead to any of the table's
    /// memory.
    pub(super) fn has(&self, page: PageIndex) -> bool {
        self.chunks.get(page.chunk()).is_some_and(|chunk| page.offset() < chunk.metas.len())
    }

    // Every page number below came from this directory, or was found there (`has`).
    pub(super) fn of(&mut self, page: PageIndex) -> &mut Meta {
        count_steps(1);
        &mut self.chunks[page.chunk()].metas[page.offset()]
    }

    /// Allocates a free page, the one freed last, with a home. O(1).
    pub(super) fn alloc(&mut self, parent: PageIndex, slot: u16) -> Option<NewPage> {
        let new = if self.free != PageIndex::NONE {
            let page = self.free;
            self.free = self.of(page).next;
            NewPage { page, dirty: false }
        } else {
            while self.chunks.get(self.filling)?.is_used_up() {
                self.filling += 1;
            }
            let chunk = self.chunks.get_mut(self.filling)?;
            let page = PageIndex::new(self.filling, chunk.metas.len())?;
            chunk.metas.push(BLANK);
            NewPage { page, dirty: true }
        };
        self.available -= 1;
        *self.of(new.page) = Meta { parent, slot, ..BLANK };
        self.high_water = self.high_water.max(self.in_use() + self.retired);
        Some(new)
    }

    /// Frees a page, all of which is zero. O(1).
    pub(super) fn free(&mut self, page: PageIndex) {
        let next = self.free;
        *self.of(page) = Meta { next, ..BLANK };
        self.free = page;
        self.available += 1;
    }

    pub(super) fn in_use(&self) -> u32 {
        self.capacity - self.available - self.retired
    }

    /// Adds a page that has just been retired to a list. O(1).
    pub(super) fn push(&mut self, list: &mut List, page: PageIndex) {
        let meta = self.of(page);
        meta.next = list.head;
        if list.is_empty() {
            list.tail = page;
        }
        list.head = page;
        list.len += 1;
    }

    /// Removes the first page of a list. O(1).
    pub(super) fn pop(&mut self, list: &mut List) -> Option<PageIndex> {
        if list.is_empty() {
            return None;
        }
        let page = list.head;
        list.head = self.of(page).next;
        list.len -= 1;
        Some(page)
    }

    /// Moves the pending pages to `to`. O(1).
    pub(super) fn move_pending(&mut self, to: &mut List) {
        let mut pending = core::mem::take(&mut self.pending);
        self.move_all(&mut pending, to);
    }

    /// Moves all pages of `from` to `to`, before its own. O(1).
    pub(super) fn move_all(&mut self, from: &mut List, to: &mut List) {
        let first = core::mem::take(from);
        if first.is_empty() {
            return;
        }
        self.of(first.tail).next = to.head;
        let tail = if to.is_empty() { first.tail } else { to.tail };
        *to = List { head: first.head, tail, len: first.len + to.len };
    }
}
