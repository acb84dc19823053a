//! The map of a region of which some granules are free and some are not: a bit per granule.

use super::node::{ALIGNS, Extent, REGION, Summary};

const WORDS: usize = 8;

/// A bit per granule of a region, set if it is free; the lowest bit of the first word is the lowest
/// address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(align(64))]
pub(super) struct Region([u64; WORDS]);

/// The first and the last bit of an extent that lies in one region.
#[inline]
fn bits(part: Extent) -> (usize, usize) {
    ((part.start % REGION) as usize, ((part.end - 1) % REGION) as usize)
}

/// The words that hold the bits `first..=last`, and which of their bits these are.
#[inline(always)]
fn masks(first: usize, last: usize) -> impl Iterator<Item = (usize, u64)> {
    (first / 64..=last / 64).map(move |word| {
        let from = if word == first / 64 { !0 << (first % 64) } else { !0 };
        let to = if word == last / 64 { !0 >> (63 - last % 64) } else { !0 };
        (word, from & to)
    })
}

/// The bits of `word` at which `len` set bits begin (1 to 64).
#[inline]
fn starts(mut word: u64, len: u64) -> u64 {
    let mut have = 1;
    while have < len && word != 0 {
        let step = have.min(len - have);
        word &= word >> step;
        have += step;
    }
    word
}

impl Region {
    /// All granules in one state.
    pub(super) fn new(free: bool) -> Self {
        Self([if free { !0 } else { 0 }; WORDS])
    }

    /// The first word, which links spare maps.
    pub(super) fn word(&mut self) -> &mut u64 {
        &mut self.0[0]
    }

    /// Changes the state of `part`, in this region, to `free` or used if all of it is in the other
    /// state; otherwise returns false.
    #[inline]
    pub(super) fn change(&mut self, part: Extent, free: bool) -> bool {
        let (first, last) = bits(part);
        let all = if free { 0 } else { !0 };
        let fits = masks(first, last).all(|(word, mask)| (self.0[word] ^ all) & mask == 0);
        if fits {
            self.set(part, free);
        }
        fits
    }

    /// Changes the state of `part`, in this region.
    #[inline]
    pub(super) fn set(&mut self, part: Extent, free: bool) {
        let (first, last) = bits(part);
        for (word, mask) in masks(first, last) {
            if free {
                self.0[word] |= mask;
            } else {
                self.0[word] &= !mask;
            }
        }
    }

    /// The first granule, counted from the region's, at which `len` free ones begin. A pass over 8
    /// words.
    #[inline]
    pub(super) fn find(&self, len: u64) -> Option<u64> {
        // The number of free granules that end where the word begins.
        let mut run = 0;
        for (at, &word) in (0..REGION).step_by(64).zip(&self.0) {
            if word == 0 {
                run = 0;
                continue;
            }
            if run + u64::from(word.trailing_ones()) >= len {
                return Some(at - run);
            }
            if word == !0 {
                run += 64;
                continue;
            }
            if len < 64 {
                let fits = starts(word, len);
                if fits != 0 {
                    return Some(at + u64::from(fits.trailing_zeros()));
                }
            }
            run = u64::from(word.leading_ones());
        }
        None
    }

    /// Whether all granules before `part`, in this region, are free.
    #[inline]
    pub(super) fn is_free_before(&self, part: Extent) -> bool {
        let (first, _) = bits(part);
        let (full, rest) = self.0.split_at(first / 64);
        let below = !(!0 << (first % 64));
        rest.first().is_none_or(|word| word & below == below) && full.iter().all(|&word| word == !0)
    }

    /// Returns the length of the free run around `part`, all of which is free, and whether the run
    /// ends with the region.
    pub(super) fn run_around(&self, part: Extent) -> (u64, bool) {
        let (first, last) = bits(part);
        let (mut start, mut end) = (first, last + 1);
        while start > 0 {
            // The bits below `start` in its word, moved to the top.
            let below = self.0[(start - 1) / 64] << (63 - (start - 1) % 64);
            let ones = below.leading_ones() as usize;
            start -= ones;
            if ones == 0 || !start.is_multiple_of(64) {
                break;
            }
        }
        while end < WORDS * 64 {
            let above = self.0[end / 64] >> (end % 64);
            let ones = above.trailing_ones() as usize;
            end += ones;
            if ones == 0 || !end.is_multiple_of(64) {
                break;
            }
        }
        ((end - start) as u64, end == WORDS * 64)
    }

    /// The end of the run of granules in one state that begins at bit `from`, and whether they are
    /// free.
    pub(super) fn run_from(&self, from: u64) -> (u64, bool) {
        let bit = |at: u64| self.0[(at / 64 % 8) as usize] >> (at % 64);
        let free = bit(from) & 1 == 1;
        let mut end = from;
        while end < REGION {
            let word = if free { bit(end) } else { !bit(end) };
            // The bits that are shifted in are not part of the word.
            let ones = u64::from(word.trailing_ones()).min(64 - end % 64);
            end += ones;
            if !end.is_multiple_of(64) || ones == 0 {
                break;
            }
        }
        (end, free)
    }

    /// Summarises the region, which begins at granule `base`.
    pub(super) fn summary(&self, base: u64) -> Summary {
        let (mut run, mut most) = (0, 0);
        let mut head = None;
        for &word in &self.0 {
            if word == !0 {
                run += 64;
                continue;
            }
            if word == 0 {
                head = head.or(Some(run));
                most = most.max(run);
                run = 0;
                continue;
            }
            let joined = run + u64::from(word.trailing_ones());
            head = head.or(Some(joined));
            run = u64::from(word.leading_ones());
            most = joined.max(run).max(most);
            if most < 64 {
                let mut longer = starts(word, most + 1);
                while longer != 0 {
                    most += 1;
                    longer &= longer >> 1;
                }
            }
        }
        let head = head.unwrap_or(run);
        let best = ALIGNS.map(|align| {
            // A region begins at a multiple of its size; what is aligned to more can only begin
            // there.
            if align == 1 {
                most.max(run)
            } else if base & (align - 1) == 0 {
                head
            } else {
                0
            }
        });
        Summary { head, tail: run, best }
    }
}
