//! The counters that a zone's owners share.

use crate::sync::{AtomicU64, CachePadded, Ordering};

/// What a zone has done and has in use, in frames where nothing else is said.
///
/// An owner's [`Local`](super::Local) keeps its counts to itself and folds them in now and then, at the latest when
/// it is dropped: while it lives, `in_use`, `held` and `high_water` may be off by some 1/256 of the zone (at most 4608
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
    /// Frames in the magazines of owners: neither in use nor free for others.
    pub held: u64,
    /// The most frames that were in use at once.
    pub high_water: u64,
    /// Frames that bulk calls were asked for: the empty slots of a `fill`, the length of a list.
    pub bulk_asked: u64,
    /// Frames that bulk calls got and kept; those that `fill_all` gave back again do not count.
    pub bulk_filled: u64,
    /// Bulk calls that got less than they were asked for, be it for a watermark or for want of frames.
    pub bulk_partial: u64,
    /// Bulk calls that came to a watermark and tried one ordinary frame: see [`Watermarks`](super::Watermarks).
    pub fell_back: u64,
    /// Claims (of at most 64 frames, or one run) that found nothing but in a region which another owner had reserved.
    pub stolen: u64,
    /// Calls (not frames) that asked for something and got nothing.
    pub exhausted: u64,
}

/// The counters that all owners share. Those that change together share a cache line.
#[derive(Debug)]
pub(super) struct Counters {
    /// Frames handed out one run at a time.
    singles: CachePadded<AtomicU64>,
    bulk_filled: AtomicU64,
    high_water: AtomicU64,
    frees: CachePadded<AtomicU64>,
    /// A sum of differences: what owners took into their magazines, less what left them.
    held: AtomicU64,
    bulk_missed: CachePadded<AtomicU64>,
    bulk_partial: AtomicU64,
    fell_back: AtomicU64,
    stolen: AtomicU64,
    exhausted: AtomicU64,
}

/// What one owner, or one bulk call, has counted and not yet folded in.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) singles: u64,
    pub(super) frees: u64,
    pub(super) bulk_filled: u64,
    pub(super) bulk_missed: u64,
    pub(super) bulk_partial: u64,
    pub(super) fell_back: u64,
    pub(super) exhausted: u64,
    /// Frames that an owner claimed from the map, less those that it gave back to it.
    pub(super) claimed: i64,
}

impl Tally {
    /// Counts a bulk call that was to get `asked` frames and got `got`.
    pub(super) fn bulk(&mut self, asked: usize, got: usize, fell_back: bool) {
        self.bulk_filled += got as u64;
        self.fell_back += u64::from(fell_back);
        self.bulk_missed += (asked - got) as u64;
        self.bulk_partial += u64::from(got < asked);
        self.exhausted += u64::from(got == 0 && asked > 0);
    }
}

impl Counters {
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            singles: CachePadded(zero()),
            bulk_filled: zero(),
            high_water: zero(),
            frees: CachePadded(zero()),
            held: zero(),
            bulk_missed: CachePadded(zero()),
            bulk_partial: zero(),
            fell_back: zero(),
            stolen: zero(),
            exhausted: zero(),
        }
    }

    #[inline(always)]
    pub(super) fn alloc(&self, frames: u64) {
        let singles = self.singles.fetch_add(frames, Ordering::Relaxed).wrapping_add(frames);
        self.note_in_use(singles.wrapping_add(self.bulk_filled.load(Ordering::Relaxed)));
    }

    fn bulk(&self, frames: u64) {
        let bulk = self.bulk_filled.fetch_add(frames, Ordering::Relaxed).wrapping_add(frames);
        self.note_in_use(bulk.wrapping_add(self.singles.load(Ordering::Relaxed)));
    }

    #[inline(always)]
    fn note_in_use(&self, allocs: u64) {
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

    #[cold]
    pub(super) fn stolen(&self) {
        self.stolen.fetch_add(1, Ordering::Relaxed);
    }

    fn allocs(&self) -> u64 {
        self.singles.load(Ordering::Relaxed).wrapping_add(self.bulk_filled.load(Ordering::Relaxed))
    }

    pub(super) fn in_use(&self) -> u64 {
        let frees = self.frees.load(Ordering::Relaxed);
        self.allocs().saturating_sub(frees)
    }

    /// Frames in magazines. Where owners free what others took, a sum that is not whole yet may be below 0.
    pub(super) fn held(&self) -> u64 {
        u64::try_from(self.held.load(Ordering::Relaxed).cast_signed()).unwrap_or(0)
    }

    /// Adds what an owner has counted; its frees first, or all it ever took would seem to be in use at once.
    pub(super) fn fold(&self, tally: Tally) {
        let in_use = tally.singles.wrapping_add(tally.bulk_filled).wrapping_sub(tally.frees);
        let held = tally.claimed.cast_unsigned().wrapping_sub(in_use);
        for (counter, n) in [
            (&*self.frees, tally.frees),
            (&self.held, held),
            (&*self.bulk_missed, tally.bulk_missed),
            (&self.bulk_partial, tally.bulk_partial),
            (&self.fell_back, tally.fell_back),
            (&self.exhausted, tally.exhausted),
        ] {
            if n > 0 {
                counter.fetch_add(n, Ordering::Relaxed);
            }
        }
        if tally.bulk_filled > 0 {
            self.bulk(tally.bulk_filled);
        }
        if tally.singles > 0 {
            self.alloc(tally.singles);
        }
    }
}

impl Counters {
    pub(super) fn stats(&self, frames: u64) -> FrameStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (frees, allocs) = (read(&self.frees), self.allocs());
        let (filled, missed) = (read(&self.bulk_filled), read(&self.bulk_missed));
        FrameStats {
            frames,
            allocs,
            frees,
            in_use: allocs.saturating_sub(frees).min(frames),
            held: self.held().min(frames),
            high_water: read(&self.high_water).min(frames),
            bulk_asked: filled.saturating_add(missed),
            bulk_filled: filled,
            bulk_partial: read(&self.bulk_partial),
            fell_back: read(&self.fell_back),
            stolen: read(&self.stolen),
            exhausted: read(&self.exhausted),
        }
    }
}
