//! [`List`]: a doubly linked list of rows.

use super::row_ref::RowRef;
use crate::sync::Ordering;

/// A list of rows, linked through the rows. All operations take constant time and allocate nothing.
#[derive(Default, Debug)]
pub(super) struct List {
    head: Option<RowRef>,
    tail: Option<RowRef>,
    len: usize,
}

impl List {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns its rows, from the front.
    #[cfg(all(test, not(loom)))]
    pub(super) fn rows(&self) -> alloc::vec::Vec<RowRef> {
        let rows: alloc::vec::Vec<_> =
            core::iter::successors(self.head, |row| RowRef::follow(&row.next)).collect();
        assert_eq!((rows.len(), rows.last()), (self.len, self.tail.as_ref()));
        rows
    }

    pub(super) fn front(&self) -> Option<RowRef> {
        self.head
    }

    pub(super) fn push_front(&mut self, row: RowRef) {
        row.prev.store(core::ptr::null_mut(), Ordering::Relaxed);
        row.next.store(RowRef::link(self.head), Ordering::Relaxed);
        match self.head {
            Some(head) => head.prev.store(RowRef::link(Some(row)), Ordering::Relaxed),
            None => self.tail = Some(row),
        }
        self.head = Some(row);
        self.len += 1;
    }

    pub(super) fn push_back(&mut self, row: RowRef) {
        row.next.store(core::ptr::null_mut(), Ordering::Relaxed);
        row.prev.store(RowRef::link(self.tail), Ordering::Relaxed);
        match self.tail {
            Some(tail) => tail.next.store(RowRef::link(Some(row)), Ordering::Relaxed),
            None => self.head = Some(row),
        }
        self.tail = Some(row);
        self.len += 1;
    }

    pub(super) fn pop_front(&mut self) -> Option<RowRef> {
        let row = self.head?;
        self.remove(row);
        Some(row)
    }

    pub(super) fn pop_back(&mut self) -> Option<RowRef> {
        let row = self.tail?;
        self.remove(row);
        Some(row)
    }

    /// Removes a row that is in this list.
    pub(super) fn remove(&mut self, row: RowRef) {
        let (prev, next) = (RowRef::follow(&row.prev), RowRef::follow(&row.next));
        match prev {
            Some(prev) => prev.next.store(RowRef::link(next), Ordering::Relaxed),
            None => self.head = next,
        }
        match next {
            Some(next) => next.prev.store(RowRef::link(prev), Ordering::Relaxed),
            None => self.tail = prev,
        }
        self.len -= 1;
    }
}
