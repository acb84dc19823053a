//! The states of a block. Who moves it from one to another is explained in [`row`](super::row).

use crate::sync::lot::{self, LOT};
use crate::sync::{AtomicU8, Ordering};

/// Not allocated: in its row's `avail`, in the magazine of the row's owner, or in an owner's stash.
pub(super) const FREE: u8 = 0;
/// Freed remotely, not yet collected.
pub(super) const REMOTE_FREED: u8 = 3;

/// How a block was allocated. A free takes effect only if it names the same form.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Form {
    /// As a [`RawBlock`](super::RawBlock): the program frees it by address.
    Raw = 1,
    /// As a [`Block`](super::Block), which alone may free it.
    Owned = 2,
}

/// Why a free was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FreeRefusal {
    /// The block is not in use.
    Free,
    /// A [`Block`](super::Block) owns it.
    Owned,
}

impl FreeRefusal {
    pub(super) fn from_state(state: u8) -> Self {
        if state == Form::Owned as u8 { Self::Owned } else { Self::Free }
    }
}

/// The state of a block of the row's owner.
#[derive(Clone, Copy, Debug)]
pub(super) struct State<'r>(&'r AtomicU8);

impl<'r> State<'r> {
    #[inline(always)]
    pub(super) fn new(state: &'r AtomicU8) -> Self {
        Self(state)
    }

    /// As [`Row::is_allocated_as`](super::row::Row::is_allocated_as).
    #[inline(always)]
    pub(super) fn is_allocated_as(self, form: Form) -> bool {
        self.0.load(Ordering::Relaxed) == form as u8
    }

    /// As [`Row::set_allocated`](super::row::Row::set_allocated).
    #[inline(always)]
    pub(super) fn set_allocated(self, form: Form) {
        self.0.store(form as u8, Ordering::Relaxed);
    }

    /// As [`Row::set_free`](super::row::Row::set_free).
    #[inline(always)]
    pub(super) fn set_free(self) {
        if cfg!(loom) {
            // Loom does not order a store behind another thread's compare-and-swap of which the storing thread knows nothing;
            // a processor does, as there is one order of the changes of a byte.
            self.0.swap(FREE, Ordering::Relaxed);
        } else {
            self.0.store(FREE, Ordering::Relaxed);
        }
    }
}

/// Eight times the state of an allocated raw block.
const ALL_RAW: u64 = Form::Raw as u64 * 0x0101_0101_0101_0101;
/// Eight times the state of a free one.
const ALL_FREE: u64 = FREE as u64 * 0x0101_0101_0101_0101;

/// Splits the states of neighbouring blocks, of which the first is block `from` of its row, into lots that start at multiples of
/// eight, and the states before and after them.
#[inline(always)]
fn in_lots(states: &[AtomicU8], from: u32) -> (&[AtomicU8], &[[AtomicU8; LOT]], &[AtomicU8]) {
    let before = (from.wrapping_neg() as usize % LOT).min(states.len());
    let (before, rest) = states.split_at(before);
    let (lots, after) = rest.as_chunks();
    (before, lots, after)
}

/// Marks neighbouring free blocks of the row's owner as allocated raw ones. The first is block `from` of the row.
#[inline(always)]
pub(super) fn allocate_run(states: &[AtomicU8], from: u32) {
    let (before, lots, after) = in_lots(states, from);
    before.iter().for_each(|state| State::new(state).set_allocated(Form::Raw));
    lots.iter().for_each(|states| lot::store(states, ALL_RAW));
    after.iter().for_each(|state| State::new(state).set_allocated(Form::Raw));
}

/// Frees the first of these neighbouring blocks of the row's owner, up to one that is not an allocated raw block. The first is
/// block `from` of the row. Returns how many.
#[inline(always)]
pub(super) fn free_run(states: &[AtomicU8], from: u32) -> usize {
    let one_by_one = |states: &[AtomicU8]| {
        let raw = states.iter().map(State::new).take_while(|state| state.is_allocated_as(Form::Raw));
        raw.map(State::set_free).count()
    };
    let (before, lots, after) = in_lots(states, from);
    let mut freed = one_by_one(before);
    if freed < before.len() {
        return freed;
    }
    for states in lots {
        // A remote free between the load and the store is found when it is collected (see `row`), as with one block.
        if lot::load(states) != ALL_RAW {
            return freed + one_by_one(states);
        }
        lot::store(states, ALL_FREE);
        freed += LOT;
    }
    freed + one_by_one(after)
}

/// Whether this is the state of an allocated block.
pub(super) fn is_live(state: u8) -> bool {
    state == Form::Raw as u8 || state == Form::Owned as u8
}
