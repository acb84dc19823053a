//! The states of a block. Who moves it from one to another is explained in [`row`](super::row).

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

/// Frees the first of these blocks of the row's owner, up to one that is not an allocated raw block. Returns how many.
#[inline(always)]
pub(super) fn free_first(states: &[AtomicU8]) -> usize {
    let is_raw = |state: &State<'_>| state.is_allocated_as(Form::Raw);
    let mut freed = 0;
    // Eight at a time, without a bound to check for each. A remote free in between is found when it is collected (see `row`).
    for lot in states.as_chunks::<8>().0 {
        let lot = lot.each_ref().map(State::new);
        if !lot.iter().fold(true, |all, state| all & is_raw(state)) {
            break;
        }
        lot.into_iter().for_each(State::set_free);
        freed += 8;
    }
    let rest = states.iter().skip(freed).map(State::new);
    freed + rest.take_while(is_raw).map(State::set_free).count()
}

/// Whether this is the state of an allocated block.
pub(super) fn is_live(state: u8) -> bool {
    state == Form::Raw as u8 || state == Form::Owned as u8
}
