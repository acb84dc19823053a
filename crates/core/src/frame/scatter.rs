//! [`Scatter`]: whether an owner's frees are so far apart that its magazine gains nothing.

/// A full magazine with fewer frames than this in each of its words is sparse: it saves too few
/// compare-and-swaps.
const DENSE: u32 = 16;
/// So many words with one or two frames are evicted one after another before frees go to the zone.
const SPARSE_EVICTIONS: u32 = 64;
/// So many frees into the word of the free before end that.
const REPEATS: u32 = 2;

/// While frees are scattered they go directly to the zone, where each costs one compare-and-swap.
/// In the magazine it would cost that too, later, and the search for what to evict.
#[derive(Debug, Default)]
pub(super) struct Scatter {
    direct: bool,
    sparse_evictions: u32,
    last_word: u32,
    /// How many frees into the word of the free before there have been, one after another.
    repeats: u32,
    /// Which free was the last of these.
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

    /// Whether so many frames of one word are put into the magazine again.
    pub(super) fn is_dense(&self, frames: u32) -> bool {
        frames >= DENSE
    }

    /// Ends that, since the owner claims frames again.
    pub(super) fn end(&mut self) {
        self.direct = false;
    }
}
