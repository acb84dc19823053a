//! Which table pages are free, linked or retired: everything that only changes under the table's lock.
//!
//! A page is *free*, or has a *home*: the one entry that may point to it. At home it is *linked* (the entry says so) or
//! *retired* (the entry says that it was there). A retired page is on exactly one list, waiting for a flush; until
//! it is reclaimed it can be brought back, **at its home only**: a walker that still holds the old link
//! is then right again. That is why mapping next to a pending flush needs no flush of its own.

use alloc::vec::Vec;

/// The number of a page that is none.
pub(super) const NONE: u32 = u32::MAX;

/// A list of pages, threaded through [`Meta::next`], and the addresses that they translated.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    pub(super) head: u32,
    pub(super) len: u32,
    pub(super) start: u64,
    pub(super) end: u64,
}

impl Default for List {
    fn default() -> Self {
        Self { head: NONE, len: 0, start: u64::MAX, end: 0 }
    }
}

/// What the account knows of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meta {
    /// The page that holds the entry which points here, and the entry's number in it.
    pub(super) parent: u32,
    pub(super) slot: u16,
    pub(super) level: u8,
    /// Taken out, not yet reclaimed.
    pub(super) retired: bool,
    /// On a list of retired pages (a page that was brought back is still on its list).
    pub(super) listed: bool,
    /// The next page of the same list, or of the free ones.
    pub(super) next: u32,
    /// The first address that goes through the page.
    pub(super) base: u64,
}

const BLANK: Meta =
    Meta { parent: NONE, slot: 0, level: 0, retired: false, listed: false, next: NONE, base: 0 };

/// The account of one table's pages.
#[derive(Debug)]
pub(super) struct PageDirectory {
    pub(super) pages: Vec<Meta>,
    free: u32,
    /// Pages from here on have never been used, and need not be zero.
    fresh: u32,
    pub(super) available: u32,
    /// Retired by a failed map or by a reclaim; the next clear takes them along.
    pub(super) pending: List,
    pub(super) retired: u32,
    pub(super) high_water: u32,
}

/// A page just taken, and whether it must be zeroed first.
pub(super) struct Taken {
    pub(super) page: u32,
    pub(super) dirty: bool,
}

impl PageDirectory {
    /// The account of `count` pages, or `None` where there is no memory for it.
    pub(super) fn new(count: u32) -> Option<Self> {
        let mut pages = Vec::new();
        pages.try_reserve_exact(count as usize).ok()?;
        pages.resize(count as usize, BLANK);
        let (pending, free) = (List::default(), NONE);
        Some(Self { pages, free, fresh: 0, available: count, pending, retired: 0, high_water: 0 })
    }

    // Every page number below came from this account (`page_at` checks those read from memory).
    pub(super) fn of(&mut self, page: u32) -> &mut Meta {
        &mut self.pages[page as usize]
    }

    /// Takes a free page, the one freed last, and gives it a home. O(1).
    pub(super) fn take(&mut self, parent: u32, slot: u16, level: u8, base: u64) -> Option<Taken> {
        let page = if self.free != NONE {
            let page = self.free;
            self.free = self.of(page).next;
            Taken { page, dirty: false }
        } else if (self.fresh as usize) < self.pages.len() {
            self.fresh += 1;
            Taken { page: self.fresh - 1, dirty: true }
        } else {
            return None;
        };
        self.available -= 1;
        *self.of(page.page) = Meta { parent, slot, level, base, ..BLANK };
        self.high_water = self.high_water.max(self.in_use() + self.retired);
        Some(page)
    }

    /// Makes a page free. All of it is zero. O(1).
    pub(super) fn give(&mut self, page: u32) {
        let next = self.free;
        *self.of(page) = Meta { next, ..BLANK };
        self.free = page;
        self.available += 1;
    }

    pub(super) fn in_use(&self) -> u32 {
        // Neither term is more than the number of pages, which is a `u32`.
        let all = u32::try_from(self.pages.len()).unwrap_or(NONE);
        all - self.available - self.retired
    }

    /// Puts a page that has just been retired on a list. O(1).
    pub(super) fn push(&mut self, list: &mut List, page: u32) {
        let meta = self.of(page);
        meta.next = list.head;
        let (base, bits) = (meta.base, 12 + 9 * u32::from(meta.level));
        list.head = page;
        list.len += 1;
        list.start = list.start.min(base);
        list.end = list.end.max(base + (1 << bits));
    }

    /// Takes the first page of a list. O(1).
    pub(super) fn pop(&mut self, list: &mut List) -> Option<u32> {
        if list.head == NONE {
            return None;
        }
        let page = list.head;
        list.head = self.of(page).next;
        list.len -= 1;
        Some(page)
    }

    /// Moves what is pending to `to`. O(pending).
    pub(super) fn move_pending(&mut self, to: &mut List) {
        let mut pending = core::mem::take(&mut self.pending);
        self.move_all(&mut pending, to);
    }

    /// Moves all pages of `from` to `to`. O(pages of `from`).
    pub(super) fn move_all(&mut self, from: &mut List, to: &mut List) {
        while let Some(page) = self.pop(from) {
            self.push(to, page);
        }
    }
}
