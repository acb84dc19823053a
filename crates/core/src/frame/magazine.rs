//! [`Magazine`]: an owner's cached frames, as words of the map; and [`Scatter`], which decides
//! whether frees bypass them.

use super::map::Part;
use super::number::Frame;
use alloc::boxed::Box;
use alloc::vec;

/// Frames as parts of words of the map, one word a *way*, found by the lower bits of the word's
/// number.
#[derive(Debug)]
pub(super) struct Magazine {
    /// The word that allocs use, with its frames: its way has none. A pair of an alloc and a free
    /// computes no address of a way.
    current: Part,
    /// The way of the current word, or of the last one.
    at: usize,
    ways: Box<[Part]>,
    /// A bit for each way that has a word.
    known: Box<[u64]>,
    /// A bit for each way that has frames.
    full: Box<[u64]>,
    /// The number of the latter, so that an empty magazine is not searched.
    fulls: u32,
}

impl Magazine {
    /// Creates an empty magazine of `ways` ways, a power of two.
    pub(super) fn new(ways: u32) -> Self {
        let bits = || vec![0; ways.div_ceil(64) as usize].into();
        Self {
            current: Part::NONE,
            at: 0,
            ways: vec![Part::NONE; ways as usize].into(),
            known: bits(),
            full: bits(),
            fulls: 0,
        }
    }

    #[inline(always)]
    pub(super) fn index_of(&self, word: u32) -> usize {
        word as usize & (self.ways.len() - 1)
    }

    /// Returns how many words have frames.
    pub(super) fn words(&self) -> u32 {
        self.fulls + u32::from(self.current.mask != 0)
    }

    /// Returns whether no way has a word.
    pub(super) fn is_blank(&self) -> bool {
        self.next_way(0).is_none()
    }

    /// Takes the lowest frame of the current word.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<Frame> {
        self.current.pop()
    }

    /// Returns the current word, and which of its frames are here.
    #[inline(always)]
    pub(super) fn current(&self) -> Part {
        self.current
    }

    /// Adds frames of the current word.
    #[inline(always)]
    pub(super) fn add_current(&mut self, mask: u64) {
        self.current.mask |= mask;
    }

    /// Returns which frames of a word are here, if it has a way.
    #[inline(always)]
    pub(super) fn held_of(&self, word: u32) -> Option<u64> {
        if word == self.current.word {
            return Some(self.current.mask);
        }
        let way = &self.ways[self.index_of(word)];
        (way.word == word).then_some(way.mask)
    }

    /// Returns the word of a way, and which of its frames are here.
    pub(super) fn peek(&self, index: usize) -> Part {
        let way = self.ways[index];
        if way.word == self.current.word { self.current } else { way }
    }

    /// Adds frames of a word that has some here, if neither it nor the current word is empty and
    /// none of these is here or among `free`. Returns whether that is so.
    #[inline(always)]
    pub(super) fn add_elsewhere(&mut self, part: Part, free: u64) -> bool {
        let index = self.index_of(part.word);
        let way = &mut self.ways[index];
        // The current word's way has no frames.
        let may = way.word == part.word
            && way.mask != 0
            && self.current.mask != 0
            && (free | way.mask) & part.mask == 0;
        if may {
            way.mask |= part.mask;
        }
        may
    }

    /// Adds frames of a word that has a way. It becomes the current one if one of the two has no
    /// frames.
    #[inline(always)]
    pub(super) fn add(&mut self, part: Part) {
        if part.word == self.current.word {
            self.current.mask |= part.mask;
            return;
        }
        let index = self.index_of(part.word);
        let held = self.ways[index].mask;
        if held != 0 && self.current.mask != 0 {
            self.ways[index].mask = held | part.mask;
        } else {
            self.settle();
            self.make_current(index);
            self.current.mask |= part.mask;
        }
    }

    /// Puts frames into the way of their word, which has no frames of another word, and makes that
    /// the current one.
    pub(super) fn put(&mut self, part: Part) {
        self.settle();
        let index = self.index_of(part.word);
        if self.ways[index].word != part.word {
            self.ways[index].word = part.word;
            self.known[index / 64] |= 1 << (index % 64);
        }
        self.make_current(index);
        self.current.mask |= part.mask;
    }

    /// Puts the frames of the current word into its way. No word is the current one then.
    #[inline(always)]
    pub(super) fn settle(&mut self) {
        if self.current.mask != 0 {
            self.ways[self.at].mask = self.current.mask;
            self.set_full(self.at);
        }
        self.current = Part::NONE;
    }

    /// Makes the word of a way the current one; the last one has no frames.
    #[inline(always)]
    fn make_current(&mut self, index: usize) {
        self.current = self.ways[index];
        self.at = index;
        if self.current.mask != 0 {
            self.ways[index].mask = 0;
            self.clear_full(index);
        }
    }

    #[inline(always)]
    fn set_full(&mut self, index: usize) {
        self.full[index / 64] |= 1 << (index % 64);
        self.fulls += 1;
    }

    #[inline(always)]
    fn clear_full(&mut self, index: usize) {
        self.full[index / 64] &= !(1 << (index % 64));
        self.fulls -= 1;
    }

    /// Empties a way, and forgets its word.
    pub(super) fn take(&mut self, index: usize) -> Part {
        if self.ways[index].word == self.current.word {
            self.settle();
        }
        let way = core::mem::replace(&mut self.ways[index], Part::NONE);
        self.known[index / 64] &= !(1 << (index % 64));
        if way.mask != 0 {
            self.clear_full(index);
        }
        way
    }

    /// Takes the frames of some word that has any, of the current one first. Their word keeps its
    /// way.
    #[inline(always)]
    pub(super) fn take_any(&mut self) -> Part {
        if self.current.mask == 0 && !self.seek() {
            return Part::NONE;
        }
        Part { word: self.current.word, mask: core::mem::take(&mut self.current.mask) }
    }

    /// Makes a word with frames the current one, if there is any; the current one has none.
    #[inline(always)]
    pub(super) fn seek(&mut self) -> bool {
        if self.fulls == 0 {
            return false;
        }
        // Starts at the current way, so that words freed together are used together.
        let start = self.at / 64;
        for step in 0..self.full.len() {
            let word = (start + step) & (self.full.len() - 1);
            if self.full[word] != 0 {
                self.make_current(word * 64 + self.full[word].trailing_zeros() as usize);
                return true;
            }
        }
        false
    }

    /// Returns the first way from `from` on that has a word, with frames or without.
    pub(super) fn next_way(&self, from: usize) -> Option<usize> {
        let mut mask = !0 << (from % 64);
        for word in from / 64..self.known.len() {
            let known = self.known[word] & mask;
            mask = !0;
            if known != 0 {
                return Some(word * 64 + known.trailing_zeros() as usize);
            }
        }
        None
    }

    /// Returns the last way that has frames, apart from the current word's, if none behind `end`
    /// has.
    pub(super) fn last_full(&self, end: usize) -> Option<usize> {
        let word = self.full.iter().take(end / 64 + 1).rposition(|&full| full != 0)?;
        Some(word * 64 + self.full[word].ilog2() as usize)
    }
}

/// A full magazine with fewer frames than this in each of its words is sparse: it saves too few
/// compare-and-swaps.
const DENSE: u32 = 16;
/// The number of consecutive evictions of words with one or two frames after which frees go to the
/// zone.
const SPARSE_EVICTIONS: u32 = 64;
/// The number of consecutive frees into the previous free's word that end the bypass.
const REPEATS: u32 = 2;

/// While frees are scattered they go directly to the zone, where each costs one compare-and-swap.
/// In the magazine it would cost that too, later, and the search for what to evict.
#[derive(Debug, Default)]
pub(super) struct Scatter {
    direct: bool,
    sparse_evictions: u32,
    last_word: u32,
    /// The number of consecutive frees into the word of the previous free.
    repeats: u32,
    /// The number of the last of these frees.
    repeated_at: u64,
}

impl Scatter {
    /// Returns whether a magazine that has frames of `words` words would be so sparse with the most
    /// that it may hold that frees bypass it from now on.
    pub(super) fn is_sparse(&mut self, words: u32, limit: u32) -> bool {
        let sparse = words.saturating_mul(DENSE) > limit;
        self.direct |= sparse;
        sparse
    }

    /// Notes that a word with `frames` frames has made room for another. Returns whether frees
    /// bypass the magazine from now on.
    pub(super) fn note_evicted(&mut self, frames: u32) -> bool {
        self.sparse_evictions = if frames <= 2 { self.sparse_evictions + 1 } else { 0 };
        if self.sparse_evictions >= SPARSE_EVICTIONS {
            self.sparse_evictions = 0;
            self.direct = true;
        }
        self.direct
    }

    /// Returns whether frees bypass the magazine, which then has no words.
    #[inline(always)]
    pub(super) fn bypasses(&self) -> bool {
        self.direct
    }

    /// Notes a free of a word that bypassed the magazine; `frees` counts these. Several into one
    /// word, one after another, end that.
    #[inline(always)]
    pub(super) fn note_bypassed(&mut self, word: u32, frees: u64) {
        if word == self.last_word {
            self.note_repeated(frees);
        }
        self.last_word = word;
    }

    #[inline(always)]
    fn note_repeated(&mut self, frees: u64) {
        self.repeats = if frees == self.repeated_at + 1 { self.repeats + 1 } else { 1 };
        self.repeated_at = frees;
        self.direct &= self.repeats < REPEATS;
    }

    /// Whether `frames` of one word are enough to be put into the magazine again.
    pub(super) fn is_dense(&self, frames: u32) -> bool {
        frames >= DENSE
    }

    /// Ends that, since the owner claims frames again.
    pub(super) fn end(&mut self) {
        self.direct = false;
    }
}
