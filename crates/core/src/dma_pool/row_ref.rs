//! [`RowRef`]: a reference to a row, for lists and owners.

use super::row::Row;
use crate::sync::{AtomicPtr, Ordering};
use core::ptr::NonNull;

/// A reference to a row, valid as long as the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RowRef(NonNull<Row>);

// SAFETY: it is a shared reference to a `Row`, which is `Sync`.
unsafe impl Send for RowRef {}

impl RowRef {
    /// # Safety
    /// The row is neither moved nor freed while any copy of the value is used.
    #[inline(always)]
    pub(super) unsafe fn new(row: &Row) -> Self {
        Self(NonNull::from(row))
    }

    /// The row as a link of a list.
    pub(super) fn link(row: Option<Self>) -> *mut Row {
        row.map_or(core::ptr::null_mut(), |row| row.0.as_ptr())
    }

    /// The row that a link points to: links are only ever made by [`link`](Self::link), from a `RowRef`.
    pub(super) fn follow(at: &AtomicPtr<Row>) -> Option<Self> {
        NonNull::new(at.load(Ordering::Relaxed)).map(Self)
    }
}

impl core::ops::Deref for RowRef {
    type Target = Row;
    #[inline(always)]
    fn deref(&self) -> &Row {
        // SAFETY: the row is alive by the contract of `new`, the only way to a value.
        unsafe { self.0.as_ref() }
    }
}
