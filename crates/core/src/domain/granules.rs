//! A map of the granules of a window.

use core::ops::Range;

/// Granules in a window.
pub(super) const GRANULES: u32 = 512;
/// Words of such a map.
pub(super) const WORDS: usize = (GRANULES / 64) as usize;

/// Which granules of a window are in use: a bit for each of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Granules(pub(super) [u64; WORDS]);

/// Yields the words that `count` granules from `first` on are in, with their bits in each.
pub(super) fn words(first: u32, count: u32) -> impl Iterator<Item = (usize, u64)> {
    let end = first.saturating_add(count).min(GRANULES);
    let mut at = first;
    core::iter::from_fn(move || {
        let bits = end.checked_sub(at).filter(|&left| left > 0)?.min(64 - at % 64);
        let word = ((at / 64) as usize, (u64::MAX >> (64 - bits)) << (at % 64));
        at += bits;
        Some(word)
    })
}

impl Granules {
    /// Marks `count` granules from `first` on as in use.
    #[inline]
    fn set(&mut self, first: u32, count: u32) {
        for (word, bits) in words(first, count) {
            if let Some(word) = self.0.get_mut(word) {
                *word |= bits;
            }
        }
    }

    /// Marks them as free.
    #[inline]
    fn clear(&mut self, first: u32, count: u32) {
        let bit = first % 64;
        if bit + count < 64
            && let Some(word) = self.0.get_mut((first / 64) as usize)
        {
            // All in one word, as most are.
            *word &= !(((1 << count) - 1) << bit);
            return;
        }
        for (word, bits) in words(first, count) {
            if let Some(word) = self.0.get_mut(word) {
                *word &= !bits;
            }
        }
    }

    /// Marks all that `others` contains as free, and returns how many it contains.
    fn clear_all(&mut self, others: &Self) -> u32 {
        let mut cleared = 0;
        for (word, bits) in self.0.iter_mut().zip(others.0) {
            *word &= !bits;
            cleared += bits.count_ones();
        }
        cleared
    }

    /// Returns the first run of at least `count` free granules at or behind `from`, in full.
    ///
    /// # Errors
    /// The length of the longest run there.
    fn free_run(&self, from: u32, count: u32) -> Result<Range<u32>, u32> {
        let mut longest = 0;
        let mut start = self.next(from, 0);
        while start < GRANULES {
            let end = self.next(start, u64::MAX);
            if end - start >= count {
                return Ok(start..end);
            }
            longest = longest.max(end - start);
            start = self.next(end, 0);
        }
        Err(longest)
    }

    /// Returns the first granule at or behind `from` that is free, if `wanted` is 0, or in use, if
    /// it is all ones; 512 if there is none.
    fn next(&self, from: u32, wanted: u64) -> u32 {
        let mut at = from;
        while let Some(&word) = self.0.get((at / 64) as usize) {
            let found = !(word ^ wanted) & (u64::MAX << (at % 64));
            if found != 0 {
                return at - at % 64 + found.trailing_zeros();
            }
            at = at - at % 64 + 64;
        }
        GRANULES
    }
}

/// The granules of a window, of which runs that are free are taken. It remembers how long a run can
/// be at most, so that a window full of short ones is searched once, and not for each longer run
/// that is wanted.
#[derive(Debug)]
pub(super) struct FreeRuns {
    used: Granules,
    /// No free run is longer.
    longest: u32,
}

impl FreeRuns {
    /// Returns those of a window that is free.
    pub(super) fn new() -> Self {
        Self { used: Granules::default(), longest: GRANULES }
    }

    /// Marks `count` granules from `first` on as free.
    #[inline(always)]
    pub(super) fn free(&mut self, first: u32, count: u32) {
        self.used.clear(first, count);
        if self.longest < GRANULES {
            // At worst they join two of the longest.
            self.longest = (2 * self.longest + count).min(GRANULES);
        }
    }

    /// Marks all that `others` contains as free, and returns how many it contains.
    pub(super) fn free_all(&mut self, others: &Granules) -> u32 {
        let freed = self.used.clear_all(others);
        if freed > 0 {
            self.longest = GRANULES;
        }
        freed
    }

    /// Takes the first run of at least `count` granules at or behind `from`, all of it. O(1) if too
    /// little has become free since a search of the whole window found none.
    pub(super) fn take(&mut self, from: u32, count: u32) -> Option<Range<u32>> {
        if self.longest < count {
            return None;
        }
        match self.used.free_run(from, count) {
            Ok(run) => {
                self.used.set(run.start, run.end - run.start);
                Some(run)
            }
            Err(longest) => {
                if from == 0 {
                    self.longest = longest;
                }
                None
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_map_agrees_with_a_list_of_flags(
            changes in proptest::collection::vec((any::<bool>(), 0..GRANULES, 1..300u32), 1..40),
            from in 0..=GRANULES,
            count in 1..300u32,
        ) {
            let (mut map, mut model) = (Granules::default(), [false; GRANULES as usize]);
            for (set, first, count) in changes {
                let count = count.min(GRANULES - first);
                if set { map.set(first, count) } else { map.clear(first, count) }
                model[first as usize..(first + count) as usize].fill(set);
            }
            let bit = |at: u32| map.0[(at / 64) as usize] >> (at % 64) & 1 == 1;
            prop_assert!((0..GRANULES).all(|at| bit(at) == model[at as usize]));
            let is_free = |at: u32| at < GRANULES && !model[at as usize];
            let first = (from..GRANULES).find(|&at| {
                (at == from || !is_free(at - 1)) && (at..at + count).all(is_free)
            });
            let expected = first.map(|at| at..(at..).find(|&end| !is_free(end)).unwrap());
            prop_assert_eq!(map.free_run(from, count).ok(), expected);
        }

        /// What it remembers hides no run, whatever was taken, and freed in whole or in part.
        #[test]
        fn every_run_that_is_free_is_found(
            steps in proptest::collection::vec((0..3u8, 0..GRANULES, 1..200u32), 1..120),
        ) {
            let (mut runs, mut model) = (FreeRuns::new(), Granules::default());
            for (step, at, count) in steps {
                let count = count.min(GRANULES - at);
                match step {
                    0 => {
                        let from = if at % 4 == 0 { at } else { 0 };
                        let expected = model.free_run(from, count).ok();
                        prop_assert_eq!(runs.take(from, count), expected.clone());
                        // Short runs stay free, as between mappings that live.
                        if let Some(run) = expected {
                            let kept = run.start + count;
                            runs.free(kept, run.end - kept);
                            model.set(run.start, count);
                        }
                    }
                    1 => {
                        runs.free(at, count);
                        model.clear(at, count);
                    }
                    _ => {
                        let mut others = Granules::default();
                        others.set(at, count);
                        runs.free_all(&others);
                        model.clear_all(&others);
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_cleared_is_counted() {
        let (mut map, mut others) = (Granules::default(), Granules::default());
        map.set(60, 200);
        others.set(63, 66);
        assert_eq!(map.clear_all(&others), 66);
        assert_eq!(map.free_run(0, 61), Ok(63..129));
        assert_eq!(map.clear_all(&Granules::default()), 0);
    }
}
