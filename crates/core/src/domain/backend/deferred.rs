//! Retired table pages, until the flush that follows has completed.

use crate::invalidate::Ticket;
use crate::sync::{AtomicU64, Mutex, Ordering};
use crate::table::{Format, Retired, Table};

/// Retired table pages that wait for their flush. Its lock is held for list operations only, each
/// of one step: not while entries are cleared, not while a flush is waited for, and not while pages
/// are reclaimed.
pub(super) struct DeferredReclaim {
    lists: Mutex<Lists>,
    /// The ticket that the next pages to be reclaimed wait for, `u64::MAX` if there are none: so
    /// that a map or clear that finds none due takes no lock.
    due: AtomicU64,
    /// Pages reclaimed so far. Written with the lock held.
    reclaimed: AtomicU64,
}

/// Table pages, and the ticket after which no walker can hold them.
type Pending = (Retired, Ticket);

#[derive(Default)]
struct Lists {
    /// Pages being gathered, with the ticket of the last request.
    open: Pending,
    /// Pages waiting for their ticket. No page is added, so that a steady stream of revocations
    /// cannot delay it.
    waiting: Pending,
    /// The number of threads that are reclaiming pages from these lists.
    reclaiming: u32,
}

/// The progress of a reclaim of pages.
pub(super) struct Progress {
    /// Pages reclaimed so far.
    pub(super) reclaimed: u64,
    /// Whether a thread is reclaiming pages that do not count yet.
    pub(super) goes_on: bool,
}

impl Lists {
    /// If no pages are waiting, lets those gathered wait. Returns the ticket that the waiting ones
    /// are due with.
    fn advance(&mut self) -> u64 {
        if self.waiting.0.is_empty() {
            self.waiting = core::mem::take(&mut self.open);
        }
        if self.waiting.0.is_empty() { u64::MAX } else { self.waiting.1.0 }
    }
}

impl Default for DeferredReclaim {
    fn default() -> Self {
        let lists = Mutex::new(Lists::default());
        Self { lists, due: AtomicU64::new(u64::MAX), reclaimed: AtomicU64::new(0) }
    }
}

impl DeferredReclaim {
    /// Adds pages whose flush has been requested and completes with `ticket`.
    pub(super) fn add<F: Format>(&self, table: &Table<F>, retired: Retired, ticket: Ticket) {
        let mut lists = self.lists.lock();
        // Fails only if the pages belong to another table, which does not happen; they would stay
        // retired.
        let _ = table.append(&mut lists.open.0, retired);
        lists.open.1 = lists.open.1.max(ticket);
        let due = lists.advance();
        self.due.store(due, Ordering::Release);
    }

    /// Reclaims the pages whose ticket `is_completed`, and then lets those gathered meanwhile wait
    /// for theirs.
    #[inline(always)]
    pub(super) fn reclaim<F: Format>(
        &self,
        table: &Table<F>,
        is_completed: impl Fn(Ticket) -> bool,
    ) {
        let due = self.due.load(Ordering::Acquire);
        if due != u64::MAX && is_completed(Ticket(due)) {
            self.reclaim_due(table, is_completed);
        }
    }

    /// Reclaims as [`reclaim`](Self::reclaim) does, which has found that there is something due.
    #[cold]
    fn reclaim_due<F: Format>(&self, table: &Table<F>, is_completed: impl Fn(Ticket) -> bool) {
        let mut lists = self.lists.lock();
        let due = !lists.waiting.0.is_empty() && is_completed(lists.waiting.1);
        let (retired, _) =
            if due { core::mem::take(&mut lists.waiting) } else { Pending::default() };
        let next = lists.advance();
        self.due.store(next, Ordering::Release);
        if retired.is_empty() {
            return;
        }
        lists.reclaiming += 1;
        drop(lists);
        let pages = u64::from(retired.len());
        drop(table.reclaim(retired)); // as in `add`
        let mut lists = self.lists.lock();
        lists.reclaiming -= 1;
        self.reclaimed.fetch_add(pages, Ordering::Release);
    }

    /// Returns the ticket after which all pages held here can be reclaimed.
    pub(super) fn last(&self) -> Ticket {
        let lists = self.lists.lock();
        lists.open.1.max(lists.waiting.1)
    }

    /// Returns how many pages have been reclaimed so far, by all threads. Takes no lock.
    pub(super) fn reclaimed(&self) -> u64 {
        self.reclaimed.load(Ordering::Acquire)
    }

    /// Returns the same, and whether another thread is reclaiming pages now.
    pub(super) fn progress(&self) -> Progress {
        let lists = self.lists.lock();
        Progress { reclaimed: self.reclaimed(), goes_on: lists.reclaiming > 0 }
    }
}
