//! The zone's counters.

use super::zone::Zone;
use crate::sync::{AtomicU64, CachePadded, Ordering};

/// What a zone has done and has in use, in frames where nothing else is said.
///
/// An owner's [`Local`](super::Local) keeps its counts to itself and folds them in now and then, at the latest when
/// it is dropped: while it lives, `in_use` and `high_water` may be off by some 1/256 of the zone (at most 4608
/// frames) for each `Local`, and what it served from its magazine is not counted yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct FrameStats {
    /// How many frames the zone has.
    pub frames: u64,
    /// Frames handed out since the beginning.
    pub allocs: u64,
    /// Frames taken back since the beginning.
    pub frees: u64,
    /// Frames handed out and not taken back; those in magazines do not count.
    pub in_use: u64,
    /// The most frames that were in use at once.
    pub high_water: u64,
    /// Frames that bulk calls were asked for.
    pub bulk_asked: u64,
    /// Frames that bulk calls got.
    pub bulk_filled: u64,
    /// Bulk calls that got less than they were asked for.
    pub bulk_partial: u64,
    /// Calls (not frames) that got nothing because nothing was free.
    pub exhausted: u64,
}

/// The counters that all owners share. Those that change together share a cache line.
#[derive(Debug)]
pub(super) struct Counters {
    allocs: CachePadded<AtomicU64>,
    frees: CachePadded<AtomicU64>,
    high_water: AtomicU64,
    bulk_asked: CachePadded<AtomicU64>,
    bulk_missed: AtomicU64,
    bulk_partial: AtomicU64,
    exhausted: AtomicU64,
}

/// What one owner has counted and not yet folded in.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) allocs: u64,
    pub(super) frees: u64,
    pub(super) bulk_asked: u64,
    pub(super) bulk_missed: u64,
    pub(super) bulk_partial: u64,
    pub(super) exhausted: u64,
}

impl Tally {
    /// Counts a bulk call that was to get `asked` frames and got `got`.
    pub(super) fn bulk(&mut self, asked: usize, got: usize) {
        self.allocs += got as u64;
        self.bulk_asked += asked as u64;
        self.bulk_missed += (asked - got) as u64;
        self.bulk_partial += u64::from(got < asked);
        self.exhausted += u64::from(got == 0 && asked > 0);
    }
}

impl Counters {
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            allocs: CachePadded(zero()),
            frees: CachePadded(zero()),
            high_water: zero(),
            bulk_asked: CachePadded(zero()),
            bulk_missed: zero(),
            bulk_partial: zero(),
            exhausted: zero(),
        }
    }

    #[inline(always)]
    pub(super) fn alloc(&self, frames: u64) {
        let allocs = self.allocs.fetch_add(frames, Ordering::Relaxed).wrapping_add(frames);
        // An owner's frees may be folded in before another's allocs: then nothing is known to be in use.
        let in_use = allocs.saturating_sub(self.frees.load(Ordering::Relaxed));
        if in_use > self.high_water.load(Ordering::Relaxed) {
            self.high_water.fetch_max(in_use, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    pub(super) fn free(&self, frames: u64) {
        self.frees.fetch_add(frames, Ordering::Relaxed);
    }

    pub(super) fn exhausted(&self) {
        self.exhausted.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds what an owner has counted; its frees first, or all it ever took would seem to be in use at once.
    pub(super) fn fold(&self, tally: Tally) {
        for (counter, n) in [
            (&*self.frees, tally.frees),
            (&*self.bulk_asked, tally.bulk_asked),
            (&self.bulk_missed, tally.bulk_missed),
            (&self.bulk_partial, tally.bulk_partial),
            (&self.exhausted, tally.exhausted),
        ] {
            if n > 0 {
                counter.fetch_add(n, Ordering::Relaxed);
            }
        }
        if tally.allocs > 0 {
            self.alloc(tally.allocs);
        }
    }
}

impl Zone {
    /// The counters. Each is exact when nobody works; while others work they may be some steps apart. O(1).
    pub fn stats(&self) -> FrameStats {
        let counters = self.counters();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (frees, allocs) = (read(&counters.frees), read(&counters.allocs));
        let (asked, missed) = (read(&counters.bulk_asked), read(&counters.bulk_missed));
        let frames = u64::from(self.frames());
        FrameStats {
            frames,
            allocs,
            frees,
            in_use: allocs.saturating_sub(frees).min(frames),
            high_water: read(&counters.high_water).min(frames),
            bulk_asked: asked,
            bulk_filled: asked.saturating_sub(missed),
            bulk_partial: read(&counters.bulk_partial),
            exhausted: read(&counters.exhausted),
        }
    }
}
