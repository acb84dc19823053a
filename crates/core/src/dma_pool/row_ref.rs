//! [`RowRef`]: a reference to a row, for lists and owners. [`Spot`]: one to a block's state in its row.

use super::row::Row;
use super::state::State;
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

/// A reference to the state of a block, from which its row and its bit there follow: the states are the first bytes of a row, whose
/// size and alignment are 128.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Spot(
    #[cfg(not(loom))] NonNull<u8>,
    // Loom's atomics are larger.
    #[cfg(loom)] (RowRef, u32),
);

// SAFETY: as for `RowRef`.
unsafe impl Send for Spot {}

#[cfg(not(loom))]
impl Spot {
    #[inline(always)]
    pub(super) fn new(row: RowRef, bit: u32) -> Self {
        let state = core::ptr::from_ref(row.state(bit)).addr() - row.0.addr().get();
        // SAFETY: the state lies in the row, to all of which the pointer refers.
        Self(unsafe { row.0.cast::<u8>().add(state) })
    }

    #[inline(always)]
    pub(super) fn bit(self) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "masked")]
        let within = (self.0.addr().get() & (align_of::<Row>() - 1)) as u32;
        within
    }

    #[inline(always)]
    pub(super) fn row(self) -> RowRef {
        // SAFETY: `new` added as much to the address of a row, a multiple of its alignment.
        RowRef(unsafe { self.0.sub(self.bit() as usize) }.cast())
    }

    /// Returns the block's state.
    #[inline(always)]
    pub(super) fn state(&self) -> State<'_> {
        // SAFETY: `new` made the pointer from a reference to an `AtomicU8` of a row that is alive by the contract of
        // `RowRef::new`.
        State::new(unsafe { self.0.cast().as_ref() })
    }
}

#[cfg(loom)]
impl Spot {
    pub(super) fn new(row: RowRef, bit: u32) -> Self {
        Self((row, bit))
    }

    pub(super) fn bit(self) -> u32 {
        self.0.1
    }

    pub(super) fn row(self) -> RowRef {
        self.0.0
    }

    pub(super) fn state(&self) -> State<'_> {
        State::new(self.0.0.state(self.0.1))
    }
}
