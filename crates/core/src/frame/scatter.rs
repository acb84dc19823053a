//! [`Scatter`]: whether an owner's frees are so far apart that its magazine gains nothing.

use super::map::Part;

/// A magazine with fewer frames than this in each of its words is sparse: it saves too few compare-and-swaps.
const DENSE: u32 = 8;
/// So many words with one or two frames are evicted one after another before frees go to the zone.
const SPARSE_EVICTIONS: u32 = 64;
/// So many frees into the word of the free before end that.
const REPEATS: u32 = 2;

/// While frees are scattered they go directly to the zone, where each costs one compare-and-swap. In the magazine it would cost
/// that too, later, and the search for what to evict.
#[derive(Debug, Default)]
pub(super) struct Scatter {
    direct: bool,
    sparse_evictions: u32,
    last_word: u32,
    repeats: u32,
}

impl Scatter {
    /// Returns whether a full magazine with `held` frames in `words` words is so sparse that frees bypass it from now on.
    pub(super) fn is_sparse(&mut self, held: u32, words: u32) -> bool {
        self.direct |= held < words.saturating_mul(DENSE);
        self.direct
    }

    /// Notes that a word with `frames` frames has made room for another. Returns whether frees bypass the magazine from now on.
    pub(super) fn note_evicted(&mut self, frames: u32) -> bool {
        self.sparse_evictions = if frames <= 2 { self.sparse_evictions + 1 } else { 0 };
        if self.sparse_evictions >= SPARSE_EVICTIONS {
            self.sparse_evictions = 0;
            self.direct = true;
        }
        self.direct
    }

    /// Returns whether these freed frames bypass the magazine. Several frees into one word end that.
    pub(super) fn bypasses(&mut self, part: Part) -> bool {
        if self.direct {
            self.repeats = if part.word == self.last_word { self.repeats + 1 } else { 0 };
            self.last_word = part.word;
            self.direct = self.repeats < REPEATS && part.len() < DENSE;
        }
        self.direct
    }

    /// Ends that, since the owner claims frames again.
    pub(super) fn end(&mut self) {
        self.direct = false;
    }
}
