//! [`Stash`]: the blocks that an owner freed last, which it allocates first.

use super::row_ref::{RowRef, Spot};

/// The most blocks of a stash. One under the model checker.
pub(super) const STASH: usize = if cfg!(loom) { 1 } else { 16 };
/// The slots: one more, for the block that was popped last from a full stash; a power of two, so that no index is out of range.
const SLOTS: usize = (STASH + 1).next_power_of_two();

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

/// A short stack of free blocks. Each is free by its state and not in its row's `avail`, so that nothing else allocates it,
/// whichever owner has the row meanwhile.
///
/// A program that frees and allocates in turn is served from here without a look at the rows, however far apart its
/// blocks are: the block that was popped last is recognised by its offset when it returns.
#[derive(Debug)]
pub(super) struct Stash {
    slots: [Option<Stashed>; SLOTS],
    len: usize,
    /// The offset of the block that was popped last, while it is still in the slot above the others; otherwise one of no block.
    last_popped: u64,
}

impl Stash {
    pub(super) fn new() -> Self {
        Self { slots: [None; SLOTS], len: 0, last_popped: u64::MAX }
    }

    /// Returns its blocks.
    #[cfg(all(test, not(loom)))]
    pub(super) fn blocks(&self) -> impl Iterator<Item = Stashed> + '_ {
        self.slots.iter().take(self.len).flatten().copied()
    }

    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        self.len >= STASH
    }

    /// Removes the block that was pushed last.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<Stashed> {
        let last = self.len.checked_sub(1)?;
        let block = self.slots[last % SLOTS]?;
        self.len = last;
        self.last_popped = block.offset;
        Some(block)
    }

    /// Returns the block that was popped last, if that is the one at `offset`. It may belong to any owner by now, or its
    /// chunk be released: its row and its state tell.
    #[inline(always)]
    pub(super) fn last_popped(&self, offset: u64) -> Option<Spot> {
        if offset != self.last_popped {
            return None;
        }
        // An address before the span can have the offset of no block.
        self.slots[self.len % SLOTS].filter(|block| block.offset == offset).map(|block| block.spot)
    }

    /// Puts back the block that was popped last.
    #[inline(always)]
    pub(super) fn push_last_popped(&mut self) {
        self.len += 1;
        // What is in the slot above now was popped before it, and may be allocated.
        self.last_popped = u64::MAX;
    }

    /// Adds a block. Returns false if there is no room.
    #[inline(always)]
    pub(super) fn push(&mut self, block: Stashed) -> bool {
        if self.is_full() {
            return false;
        }
        self.slots[self.len % SLOTS] = Some(block);
        self.len += 1;
        self.last_popped = u64::MAX;
        true
    }
}
