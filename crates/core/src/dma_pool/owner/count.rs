//! [`Count`]: how many blocks an owner has in use, and had at most.

use super::signed;
use core::hint::cold_path;

/// Blocks that an owner has taken from rows less those that it has returned to them, since the last [`reset`](Self::reset), and those
/// that were in its stash then. What of them is not in the stash is in use: the stash itself counts nothing.
///
/// What is counted is how many fewer they are than the peak, so that an alloc from a row changes one number, unless it raises the peak.
#[derive(Default, Debug)]
pub(in super::super) struct Count {
    /// The maximum of [`used`](Self::used).
    peak: i64,
    /// The peak less the blocks taken from rows. Below 0 if so many of these are in the stash, and where a block that was freed twice
    /// has been counted twice until now.
    room: i64,
}

impl Count {
    /// Counts a block that was taken from a row, with none in the stash.
    #[inline(always)]
    pub(in super::super) fn take(&mut self) {
        // One store: a store that waits for memory is followed by as many others as there is room for.
        match self.room {
            1.. => self.room -= 1,
            0 => {
                // Laid out apart from the rest: as often only while the pool is used for the first time.
                cold_path();
                self.peak += 1;
            }
            ..0 => {
                cold_path();
                self.room -= 1;
                self.note(0);
            }
        }
    }

    /// Counts blocks that were taken from a row, with `stashed` in the stash.
    #[inline(always)]
    pub(in super::super) fn take_many(&mut self, blocks: usize, stashed: usize) {
        self.room -= signed(blocks);
        self.note(stashed);
    }

    /// Counts blocks that were returned to a row.
    #[inline(always)]
    pub(in super::super) fn give(&mut self, blocks: usize) {
        self.room += signed(blocks);
    }

    /// Takes back what was counted for blocks that were freed twice.
    pub(in super::super) fn correct(&mut self, blocks: u64) {
        self.room -= blocks.cast_signed();
    }

    /// Raises the peak, if more blocks than that are in use.
    #[inline(always)]
    pub(in super::super) fn note(&mut self, stashed: usize) {
        let over = self.used(stashed) - self.peak;
        if over > 0 {
            self.peak += over;
            self.room += over;
        }
    }

    /// Returns how many blocks are in use, less those that were at the last [`reset`](Self::reset).
    #[inline(always)]
    pub(in super::super) fn used(&self, stashed: usize) -> i64 {
        self.peak - self.room - signed(stashed)
    }

    /// Returns the maximum of [`used`](Self::used).
    pub(in super::super) fn peak(&self) -> i64 {
        self.peak
    }

    /// Begins anew: 0 blocks are in use, and were at most.
    pub(in super::super) fn reset(&mut self, stashed: usize) {
        *self = Self { peak: 0, room: -signed(stashed) };
    }

    /// Raises the peak, without a block.
    #[cfg(all(test, not(loom)))]
    pub(in super::super) fn set_peak(&mut self, peak: i64) {
        self.room += peak - self.peak;
        self.peak = peak;
    }
}
