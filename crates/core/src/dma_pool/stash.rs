//! [`Stash`]: the blocks that an owner freed last, which it allocates first.

use super::row_ref::{RowRef, Spot};

/// The most blocks of a stash. One under the model checker.
pub(super) const STASH: usize = if cfg!(loom) { 1 } else { 16 };
/// How many of them are below the top.
const BELOW: usize = STASH - 1;
/// The slots for those: a power of two, so that no index is out of range.
const SLOTS: usize = STASH.next_power_of_two();

/// A block: where it is, and where its state is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Site {
    /// Its offset in the span, in bytes.
    pub(super) offset: u64,
    pub(super) row: RowRef,
    pub(super) bit: u32,
}

/// A block in a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stashed {
    /// Its offset in the span, in bytes.
    pub(super) offset: u64,
    pub(super) spot: Spot,
}

impl From<Site> for Stashed {
    #[inline(always)]
    fn from(site: Site) -> Self {
        Self { offset: site.offset, spot: Spot::new(site.row, site.bit) }
    }
}

/// Whether the top is in the stash. Two bits instead of an enumeration, of which one is tested by itself: what is made of three
/// cases begins with that of an empty stash.
#[derive(Clone, Copy, Debug)]
struct Top(u8);

impl Top {
    /// It was popped last.
    const POPPED: Self = Self(0);
    /// It is, and there were as few blocks in the stash before it was pushed.
    const PUSHED: Self = Self(1);
    /// It is, and it must be noted when there are as few without it: see [`recount`](Stash::recount).
    const UNCOUNTED: Self = Self(2);

    #[inline(always)]
    fn is_in(self) -> bool {
        self.0 != 0
    }

    #[inline(always)]
    fn is_counted(self) -> bool {
        self.0 & Self::PUSHED.0 != 0
    }
}

/// A short stack of free blocks. Each is free by its state and not in its row's `avail`, so that nothing else allocates it,
/// whichever owner has the row meanwhile.
///
/// A program that frees and allocates in turn is served from here without a look at the rows, however far apart its
/// blocks are: the block that was popped last is recognised by its offset when it returns.
///
/// The top is apart from the others. When a block leaves it and returns, only a flag changes, to a value that is a constant:
/// no call waits for what the call before it has stored, as with the depth of a stack (two loads of values just stored, some
/// 10 cycles of a pair where the processor does not predict them).
#[derive(Debug)]
pub(super) struct Stash {
    /// The offset of the block that was pushed or popped last; before that one of no block.
    top: u64,
    /// Where its state is.
    top_spot: Option<Spot>,
    /// Whether that is in the stash.
    state: Top,
    slots: [Option<Stashed>; SLOTS],
    /// How many blocks there are below the top.
    below: usize,
}

impl Stash {
    pub(super) fn new() -> Self {
        Self { top: u64::MAX, top_spot: None, state: Top::POPPED, slots: [None; SLOTS], below: 0 }
    }

    /// Returns its blocks.
    #[cfg(all(test, not(loom)))]
    pub(super) fn blocks(&self) -> impl Iterator<Item = Stashed> + '_ {
        let top = self.top().filter(|_| self.has_top());
        self.slots.iter().take(self.below).flatten().copied().chain(top)
    }

    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.below + usize::from(self.has_top())
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        // One test instead of two.
        self.below | usize::from(self.state.0) == 0
    }

    /// Returns whether the block that was pushed or popped last is in the stash: the last call was a free.
    #[inline(always)]
    pub(super) fn has_top(&self) -> bool {
        self.state.is_in()
    }

    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        self.has_top() && self.is_full_below()
    }

    /// Returns whether no block can move below the top.
    #[inline(always)]
    pub(super) fn is_full_below(&self) -> bool {
        self.below >= BELOW
    }

    /// Returns the block that was pushed or popped last.
    #[inline(always)]
    fn top(&self) -> Option<Stashed> {
        self.top_spot.map(|spot| Stashed { offset: self.top, spot })
    }

    /// Removes the block that was pushed last, if there were as few in the stash before since the last
    /// [`recount`](Self::recount).
    #[inline(always)]
    pub(super) fn pop_counted(&mut self) -> Option<Stashed> {
        if !self.state.is_counted() {
            return None;
        }
        self.state = Top::POPPED;
        // SAFETY: the state says that there is a block at the top.
        Some(unsafe { self.top().unwrap_unchecked() })
    }

    /// Removes the block that was pushed last.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<Stashed> {
        if self.has_top() {
            self.state = Top::POPPED;
            // SAFETY: the state said that there was a block at the top.
            return Some(unsafe { self.top().unwrap_unchecked() });
        }
        self.below = self.below.checked_sub(1)?;
        // SAFETY: `push` fills a slot when it raises `below`, and none is emptied.
        let block = unsafe { self.slots[self.below % SLOTS].unwrap_unchecked() };
        self.set_top(block);
        Some(block)
    }

    /// From now on no number of blocks in the stash has been noted but that of now.
    #[inline(always)]
    pub(super) fn recount(&mut self) {
        if self.has_top() {
            self.state = Top::UNCOUNTED;
        }
    }

    /// Returns the block that was pushed or popped last, if that is the one at `offset`. It may belong to any owner by now, or its
    /// chunk be released: its row and its state tell. If it is allocated, it was popped.
    #[inline(always)]
    pub(super) fn top_at(&self, offset: u64) -> Option<Spot> {
        // An address before the span can have the offset of no block.
        if offset == self.top { self.top_spot } else { None }
    }

    /// Puts back the block that was popped last.
    #[inline(always)]
    pub(super) fn push_top(&mut self) {
        debug_assert!(self.top_spot.is_some());
        self.state = Top::PUSHED;
    }

    /// Adds a block after another [was popped](Self::has_top).
    #[inline(always)]
    pub(super) fn push_first(&mut self, block: Stashed) {
        debug_assert!(!self.has_top());
        self.set_top(block);
        self.state = Top::PUSHED;
    }

    /// Adds a block above one that [is in the stash](Self::has_top), if there is room [below](Self::is_full_below).
    #[inline(always)]
    pub(super) fn push_next(&mut self, block: Stashed) {
        debug_assert!(self.has_top() && !self.is_full_below());
        self.slots[self.below % SLOTS] = self.top();
        self.below += 1;
        self.set_top(block);
        self.state = Top::PUSHED;
    }

    /// Adds a block, if the stash is not [full](Self::is_full).
    pub(super) fn push(&mut self, block: Stashed) {
        if self.has_top() { self.push_next(block) } else { self.push_first(block) }
    }

    #[inline(always)]
    fn set_top(&mut self, block: Stashed) {
        (self.top, self.top_spot) = (block.offset, Some(block.spot));
    }
}
