//! [`Stash`]: the blocks that an owner freed last, which it allocates first.

use super::row_ref::RowRef;

/// The most blocks of a stash. One under the model checker.
pub(super) const STASH: usize = if cfg!(loom) { 1 } else { 16 };

/// A block: where it is, and where its state is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Site {
    /// Its offset in the span, in bytes.
    pub(super) offset: u64,
    pub(super) row: RowRef,
    pub(super) bit: u32,
}

/// A short stack of free blocks. Each is free by its state and not in its row's `avail`, so that nothing else allocates it,
/// whichever owner has the row meanwhile.
///
/// A program that frees and allocates in turn is served from here without a look at the rows, however far apart its
/// blocks are: the block that was popped last is recognised by its offset when it returns.
#[derive(Debug)]
pub(super) struct Stash {
    blocks: [Option<Site>; STASH],
    len: usize,
    /// The most blocks: 0 in debug mode, in which no block is found by a fast path.
    most: usize,
}

impl Stash {
    pub(super) fn new(most: usize) -> Self {
        Self { blocks: [None; STASH], len: 0, most: most.min(STASH) }
    }

    /// Returns its blocks.
    #[cfg(all(test, not(loom)))]
    pub(super) fn sites(&self) -> impl Iterator<Item = Site> + '_ {
        self.blocks.iter().take(self.len).flatten().copied()
    }

    #[inline(always)]
    pub(super) fn has_room(&self) -> bool {
        self.len < self.most
    }

    /// Removes the block that was pushed last.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<Site> {
        let last = self.len.checked_sub(1)?;
        let site = *self.blocks.get(last)?;
        self.len = last;
        site
    }

    /// Returns the block that was popped last, if that is the one at `offset`. It may belong to any owner by now, or its
    /// chunk be released: its row and its state tell.
    #[inline(always)]
    pub(super) fn last_popped(&self, offset: u64) -> Option<Site> {
        (*self.blocks.get(self.len)?).filter(|site| site.offset == offset)
    }

    /// Puts back the block that was popped last.
    #[inline(always)]
    pub(super) fn push_last_popped(&mut self) {
        self.len += 1;
    }

    /// Adds a block. Returns false if there is no room.
    #[inline(always)]
    pub(super) fn push(&mut self, site: Site) -> bool {
        if !self.has_room() {
            return false;
        }
        if let Some(slot) = self.blocks.get_mut(self.len) {
            *slot = Some(site);
            self.len += 1;
        }
        true
    }
}
