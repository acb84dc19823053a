//! [`Magazine`]: an owner's cached frames, as words of the map.

use super::map::{Part, WORDS};
use super::number::Frame;
use alloc::boxed::Box;
use alloc::vec;

/// Frames as parts of words of the map, one word a *way*, found by the lower bits of the word's number.
#[derive(Debug)]
pub(super) struct Magazine {
    ways: Box<[Part]>,
    /// A bit for each way with frames, and for some that have become empty.
    used: Box<[u64]>,
    /// The number of set bits, so that an empty magazine is not searched.
    uses: u32,
    /// The way that allocs use: the last one freed into.
    current: usize,
}

impl Magazine {
    /// Creates an empty magazine of `ways` ways, a power of two.
    pub(super) fn new(ways: u32) -> Self {
        Self {
            ways: vec![Part::NONE; ways as usize].into(),
            used: vec![0; ways.div_ceil(64) as usize].into(),
            uses: 0,
            current: 0,
        }
    }

    #[inline(always)]
    pub(super) fn index_of(&self, word: u32) -> usize {
        word as usize & (self.ways.len() - 1)
    }

    /// Returns how many frames it has. O(ways with frames).
    pub(super) fn held(&self) -> u32 {
        let (mut held, mut from) = (0, 0);
        while let Some(index) = self.next_used(from) {
            held += self.peek(index).len();
            from = index + 1;
        }
        held
    }

    /// Takes the lowest frame of the current way.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<Frame> {
        self.ways[self.current].pop()
    }

    /// Returns which frames of a word are here, if it has a way.
    #[inline(always)]
    pub(super) fn held_of(&self, word: u32) -> Option<u64> {
        let way = &self.ways[self.index_of(word)];
        (way.word == word).then_some(way.mask)
    }

    /// Adds frames of a word that has a way.
    #[inline(always)]
    pub(super) fn add(&mut self, part: Part) {
        let index = self.index_of(part.word);
        self.ways[index].mask |= part.mask;
        self.current = index;
    }

    /// Puts a word into its way, which must be empty.
    pub(super) fn put(&mut self, part: Part) {
        let index = self.index_of(part.word);
        self.ways[index] = part;
        let used = &mut self.used[index / 64];
        self.uses += u32::from(*used & 1 << (index % 64) == 0);
        *used |= 1 << (index % 64);
        self.current = index;
    }

    pub(super) fn peek(&self, index: usize) -> Part {
        self.ways[index]
    }

    /// Forgets which words of a region had ways; none of them has frames.
    pub(super) fn forget_region(&mut self, region: u32) {
        for word in region * WORDS..(region + 1) * WORDS {
            let index = self.index_of(word);
            if self.ways[index].word == word {
                self.ways[index] = Part::NONE;
            }
        }
    }

    /// Empties a way.
    pub(super) fn take(&mut self, index: usize) -> Part {
        let used = &mut self.used[index / 64];
        self.uses -= u32::from(*used & 1 << (index % 64) != 0);
        *used &= !(1 << (index % 64));
        core::mem::replace(&mut self.ways[index], Part::NONE)
    }

    /// Empties some way that has frames, the current one first.
    #[inline(always)]
    pub(super) fn take_any(&mut self) -> Part {
        if self.ways[self.current].mask != 0 || self.seek() { self.take(self.current) } else { Part::NONE }
    }

    /// Makes a way with frames the current one, if there is any. O(ways emptied since the last call).
    pub(super) fn seek(&mut self) -> bool {
        if self.uses == 0 {
            return false;
        }
        // Starts at the current way, so that words freed together are used together.
        let start = self.current / 64;
        for step in 0..self.used.len() {
            let word = (start + step) & (self.used.len() - 1);
            while self.used[word] != 0 {
                let index = word * 64 + self.used[word].trailing_zeros() as usize;
                if self.ways[index].mask != 0 {
                    self.current = index;
                    return true;
                }
                self.take(index);
            }
        }
        false
    }

    /// Returns how many words have frames, or have had since they were last taken.
    pub(super) fn words(&self) -> u32 {
        self.uses
    }

    /// Returns the first way from `from` on that has a word, with frames or without.
    pub(super) fn next_way(&self, from: usize) -> Option<usize> {
        let mut mask = !0 << (from % 64);
        for word in from / 64..self.used.len() {
            let used = self.used[word] & mask;
            mask = !0;
            if used != 0 {
                return Some(word * 64 + used.trailing_zeros() as usize);
            }
        }
        None
    }

    /// Returns the first way from `from` on that has frames.
    pub(super) fn next_used(&self, from: usize) -> Option<usize> {
        let mut mask = !0 << (from % 64);
        for word in from / 64..self.used.len() {
            let mut used = self.used[word] & mask;
            mask = !0;
            while used != 0 {
                let index = word * 64 + used.trailing_zeros() as usize;
                if self.ways[index].mask != 0 {
                    return Some(index);
                }
                used &= used - 1;
            }
        }
        None
    }

    /// Returns the last way below `end` that has frames.
    pub(super) fn last_used(&self, end: usize) -> Option<usize> {
        let end = end.min(self.ways.len());
        let mut mask = !(!0 << (end % 64));
        for word in (0..=end / 64).rev() {
            let mut used = self.used.get(word).map_or(0, |used| used & mask);
            mask = !0;
            while used != 0 {
                let bit = used.ilog2();
                let index = word * 64 + bit as usize;
                if self.ways[index].mask != 0 {
                    return Some(index);
                }
                used &= !(1 << bit);
            }
        }
        None
    }
}
