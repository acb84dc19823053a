//! The state word of a page: its fields, and the rules for changing it.
//!
//! Each page has one state word beside it: a generation and a count. The count is of entries that
//! are not zero (or are about to be written): leaves, links, links retired. It rises from 0 only
//! under the table's lock, and only under the lock is a page whose count is 0 retired. Otherwise it
//! rises by a compare-and-swap that proves, by the generation, that the page has not changed its
//! home meanwhile.
//!
//! Between the two is a bit that is set while a thread clears leaves of the page. Others that clear
//! there wait for a few stores; those that map do not. So a leaf is found and cleared by one
//! thread, and counted out once, even if two clear the same range against the contract; and the
//! page keeps its home until the bit is cleared.
//!
//! Another bit marks a pinned page. It counts one entry, whatever it holds: it is never empty, so
//! it keeps its home, and its leaves are neither counted nor cleared but through the pin.

use super::format::span;
use super::pages::Page;
use crate::sync::{Ordering, relax};

/// A page's generation, whether it is pinned, whether a thread is clearing leaves of it, and its
/// count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageState(u64);

/// The bits of the count. A page has 512 entries; threads that break the contract may count others
/// for a moment.
const COUNT_BITS: u32 = 20;
/// The page is pinned.
const PINNED: u64 = 1 << COUNT_BITS;
/// A thread is clearing leaves of the page.
const CLEARING: u64 = PINNED << 1;
/// The shift of the generation. It has 42 bits: to mistake a later generation for its own, a thread
/// would have to stay between two instructions for weeks, while others retire and reclaim the same
/// page all the time.
const GENERATION_SHIFT: u32 = COUNT_BITS + 2;

impl PageState {
    #[inline]
    pub(super) fn count(self) -> u32 {
        u32::try_from(self.0 & (PINNED - 1)).unwrap_or(u32::MAX)
    }

    #[inline]
    pub(super) fn is_pinned(self) -> bool {
        self.0 & PINNED != 0
    }

    /// Whether entries of the page may be counted without the lock.
    #[inline]
    pub(super) fn is_open(self) -> bool {
        self.count() > 0 && !self.is_pinned()
    }

    /// Whether the page holds nothing, and no thread is clearing leaves of it.
    #[inline]
    pub(super) fn is_unused(self) -> bool {
        self.count() == 0 && self.0 & CLEARING == 0
    }

    /// Whether removing `n` entries leaves a page that must be retired now.
    #[inline]
    fn ends_with(self, n: u16) -> bool {
        self.count() == u32::from(n)
    }

    #[inline]
    pub(super) fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT
    }

    /// Returns the state of the next generation, with nothing in the page.
    #[inline]
    fn next_generation(self) -> Self {
        Self(self.generation().wrapping_add(1) << GENERATION_SHIFT)
    }
}

/// The lowest bits of a home: the level. Homes are multiples of 2 MiB.
const LEVEL: u64 = 7;

impl Page<'_> {
    #[inline]
    pub(super) fn state(self) -> PageState {
        PageState(self.record().state.load(Ordering::Acquire))
    }

    /// Begins the page's next generation, with nothing in it, at level `level` of the path to
    /// `iova`. Under the lock.
    ///
    /// It must be linked before anything is counted in it.
    pub(super) fn renew(self, iova: u64, level: u8) {
        self.record().state.store(self.state().next_generation().0, Ordering::Release);
        // After the state, which no longer is of the previous generation for a thread that finds
        // this home.
        self.record().home.store(home(iova, level), Ordering::Release);
    }

    /// Returns whether the page is the one at `level` on the path to `iova`, if it is in use. See
    /// [`Store::descend_unlocked`](super::store::Store::descend_unlocked).
    #[inline]
    pub(super) fn is_home_of(self, iova: u64, level: u8) -> bool {
        self.record().home.load(Ordering::Acquire) == home(iova, level)
    }

    /// Returns the first address that the page translates. Under the lock.
    pub(super) fn base(self) -> u64 {
        self.record().home.load(Ordering::Relaxed) & !LEVEL
    }

    /// Returns the level of the page. Under the lock.
    pub(super) fn level(self) -> u8 {
        (self.record().home.load(Ordering::Relaxed) & LEVEL) as u8
    }

    /// Counts `n` more entries. Under the lock, or while the caller's own entries keep the count
    /// above 0.
    pub(super) fn count(self, n: u16) {
        self.record().state.fetch_add(u64::from(n), Ordering::AcqRel);
    }

    /// Pins a linked page that holds nothing; returns whether it does. Under the lock.
    pub(super) fn pin(self) -> bool {
        let seen = self.state();
        // Fails if a thread that breaks the contract has begun to clear there.
        seen.is_unused() && self.exchange(seen, seen.0 + (PINNED | 1)).is_ok()
    }

    /// Removes the pin of a page that holds nothing. Under the lock.
    pub(super) fn unpin(self) {
        self.record().state.fetch_sub(PINNED | 1, Ordering::AcqRel);
    }

    /// Counts `n` more entries if the page is still in the generation of `seen` and not empty.
    #[inline]
    pub(super) fn count_if(self, seen: PageState, n: u16) -> bool {
        let mut now = seen;
        while now.is_open() && now.generation() == seen.generation() {
            match self.exchange(now, now.0 + u64::from(n)) {
                Ok(()) => return true,
                Err(other) => now = other,
            }
        }
        false
    }

    /// Counts `n` entries less; returns whether none is left.
    pub(super) fn uncount(self, n: u16) -> bool {
        PageState(self.record().state.fetch_sub(u64::from(n), Ordering::AcqRel)).ends_with(n)
    }

    /// Excludes other clears from the page if it is still in the generation of `seen` and not
    /// empty. From here to [`end_clear`](Self::end_clear) it keeps its home.
    #[inline]
    pub(super) fn begin_clear(self, seen: PageState) -> bool {
        let mut now = seen;
        let mut spins = 0;
        while now.is_open() && now.generation() == seen.generation() {
            if now.0 & CLEARING != 0 {
                relax(spins);
                spins = spins.saturating_add(1);
                now = self.state();
                continue;
            }
            match self.exchange(now, now.0 | CLEARING) {
                Ok(()) => return true,
                Err(other) => now = other,
            }
        }
        false
    }

    /// Admits other clears and counts `n` entries less; returns whether none is left.
    #[inline]
    pub(super) fn end_clear(self, n: u16) -> bool {
        let before = self.record().state.fetch_sub(CLEARING + u64::from(n), Ordering::AcqRel);
        PageState(before).ends_with(n)
    }

    #[inline]
    fn exchange(self, seen: PageState, new: u64) -> Result<(), PageState> {
        let word = &self.record().state;
        match word.compare_exchange(seen.0, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(now) => Err(PageState(now)),
        }
    }
}

/// Returns the home of the page at `level` on the path to `iova`.
#[inline]
const fn home(iova: u64, level: u8) -> u64 {
    iova & !(span(level + 1) - 1) | level as u64
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// 2^32 uses of one page are an hour of mapping and unmapping.
    #[test]
    fn a_generation_does_not_return_after_any_number_of_uses() {
        let seen = PageState(0).next_generation();
        for power in 16..42 {
            let later = PageState((1 << power) << GENERATION_SHIFT).next_generation();
            assert_ne!(later.generation(), seen.generation(), "after 2^{power}");
            assert!(later.generation() > 1 << power && later.is_unused() && !later.is_pinned());
        }
        assert_eq!(PageState(PINNED | CLEARING | 512).count(), 512);
    }
}
