//! Deferred reclaim: retired table pages, until the flush that covers them has completed.

use crate::invalidate::Ticket;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::table::{Format, Retired, Table};

/// Retired table pages that wait for their flush. Its lock is held for list operations only: not while entries are
/// cleared, and not while a flush is waited for.
#[derive(Default)]
pub(super) struct DeferredReclaim {
    lists: Mutex<Lists>,
    /// Whether there are any pages, so that a clear that finds none takes no lock.
    any: AtomicBool,
    /// Pages reclaimed so far. Written with the lock held.
    reclaimed: AtomicU64,
}

/// Table pages, and the ticket after which no walker can hold them.
type Pending = (Retired, Ticket);

#[derive(Default)]
struct Lists {
    /// Pages being gathered, with the ticket of the last request.
    open: Pending,
    /// Pages waiting for their ticket. No page is added, so that a steady stream of revocations cannot delay it.
    waiting: Pending,
}

impl DeferredReclaim {
    /// Adds pages whose flush has been requested and completes with `ticket`.
    pub(super) fn add<F: Format>(&self, table: &Table<F>, retired: Retired, ticket: Ticket) {
        let mut lists = self.lists.lock();
        // Fails only if the pages belong to another table, which does not happen; they would stay retired.
        let _ = table.append(&mut lists.open.0, retired);
        lists.open.1 = lists.open.1.max(ticket);
        self.any.store(true, Ordering::Release);
    }

    /// Reclaims the pages whose ticket `is_completed`, and then lets those gathered meanwhile wait for theirs.
    pub(super) fn reclaim<F: Format>(&self, table: &Table<F>, is_completed: impl Fn(Ticket) -> bool) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut lists = self.lists.lock();
        if !lists.waiting.0.is_empty() && is_completed(lists.waiting.1) {
            let (retired, _) = core::mem::take(&mut lists.waiting);
            let pages = u64::from(retired.len());
            drop(table.reclaim(retired)); // as in `add`
            self.reclaimed.fetch_add(pages, Ordering::Release);
        }
        if lists.waiting.0.is_empty() {
            lists.waiting = core::mem::take(&mut lists.open);
        }
        self.any.store(!lists.waiting.0.is_empty(), Ordering::Release);
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

    /// Returns the same, including the pages that another thread is reclaiming now.
    pub(super) fn reclaimed_exactly(&self) -> u64 {
        let _lists = self.lists.lock();
        self.reclaimed()
    }
}
