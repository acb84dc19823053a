//! [`FrameStats`], and the counters behind it that a zone's owners share.

use crate::sync::{AtomicU64, CachePadded, Ordering};

/// A zone's counters, in frames unless stated otherwise.
///
/// An owner's [`ZoneLocal`](super::ZoneLocal) counts by itself and adds its counts now and then, at
/// the latest when it is dropped: while it lives, `in_use` and `held` may be off by about 1/256 of
/// the zone (at most 4608 frames) for each `ZoneLocal`, and by what bulk calls have since taken
/// from its magazine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct FrameStats {
    /// Frames of the zone.
    pub frames: u64,
    /// Frames ever allocated.
    pub allocs: u64,
    /// Frames ever freed.
    pub frees: u64,
    /// Frames allocated now, without those in magazines.
    pub in_use: u64,
    /// Frames in the magazines of owners: neither in use nor available to others.
    pub held: u64,
    /// Frames requested by bulk calls: the empty slots of a `fill`, the length of a list.
    pub bulk_asked: u64,
    /// Frames that bulk calls returned; those that a failed `fill_all` released do not count.
    pub bulk_filled: u64,
    /// Bulk calls that returned fewer frames than requested, because of a watermark or of no free
    /// frames.
    pub bulk_partial: u64,
    /// Bulk calls that reached a watermark and tried one ordinary frame: see
    /// [`Watermarks`](super::Watermarks).
    pub fell_back: u64,
    /// Claims (of at most 64 frames, or one run) that only succeeded in a region reserved by
    /// another owner.
    pub stolen: u64,
    /// Calls (not frames) that returned nothing.
    pub exhausted: u64,
}

/// The counters that all owners share. Those that change together share a cache line.
#[derive(Debug)]
pub(super) struct Counters {
    /// Frames allocated by single calls.
    singles: CachePadded<AtomicU64>,
    bulk_filled: AtomicU64,
    frees: CachePadded<AtomicU64>,
    /// Frames moved into magazines less those moved out of them.
    held: AtomicU64,
    bulk_missed: CachePadded<AtomicU64>,
    bulk_partial: AtomicU64,
    fell_back: AtomicU64,
    stolen: AtomicU64,
    exhausted: AtomicU64,
}

/// The counts of one owner or one bulk call since they were last added to the zone's.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) singles: u64,
    pub(super) frees: u64,
    pub(super) bulk_filled: u64,
    pub(super) bulk_missed: u64,
    pub(super) bulk_partial: u64,
    pub(super) fell_back: u64,
    pub(super) exhausted: u64,
    /// Frames claimed from the map less those released to it.
    pub(super) claimed: i64,
}

impl Tally {
    /// Returns by how much more frames are cached: claimed and not in use.
    pub(super) fn held(&self) -> i64 {
        let in_use = self.singles.wrapping_add(self.bulk_filled).wrapping_sub(self.frees);
        self.claimed.wrapping_sub(in_use.cast_signed())
    }

    /// Counts a bulk call that requested `asked` frames and got `got`.
    pub(super) fn bulk(&mut self, asked: usize, got: usize, fell_back: bool) {
        self.bulk_filled += got as u64;
        self.fell_back += u64::from(fell_back);
        if got < asked {
            self.bulk_missed += (asked - got) as u64;
            self.bulk_partial += 1;
            self.exhausted += u64::from(got == 0);
        }
    }
}

impl Counters {
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            singles: CachePadded(zero()),
            bulk_filled: zero(),
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
        self.singles.fetch_add(frames, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(super) fn free(&self, frames: u64) {
        self.frees.fetch_add(frames, Ordering::Relaxed);
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

    /// Frames in magazines. When owners free what others allocated, the sum may temporarily be
    /// below 0.
    pub(super) fn held(&self) -> u64 {
        u64::try_from(self.held.load(Ordering::Relaxed).cast_signed()).unwrap_or(0)
    }

    /// Adds an owner's counts; its frees first, or all that it ever allocated would seem to be in
    /// use at once.
    pub(super) fn fold(&self, tally: Tally) {
        for (counter, n) in [
            (&*self.frees, tally.frees),
            (&self.held, tally.held().cast_unsigned()),
            (&*self.bulk_missed, tally.bulk_missed),
            (&self.bulk_partial, tally.bulk_partial),
            (&self.fell_back, tally.fell_back),
            (&self.exhausted, tally.exhausted),
            (&self.bulk_filled, tally.bulk_filled),
            (&*self.singles, tally.singles),
        ] {
            if n > 0 {
                counter.fetch_add(n, Ordering::Relaxed);
            }
        }
    }

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
            bulk_asked: filled.saturating_add(missed),
            bulk_filled: filled,
            bulk_partial: read(&self.bulk_partial),
            fell_back: read(&self.fell_back),
            stolen: read(&self.stolen),
            exhausted: read(&self.exhausted),
        }
    }
}

impl core::fmt::Display for FrameStats {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { frames, allocs, frees, in_use, held, .. } = self;
        writeln!(f, "frames {frames}, in use {in_use}, in magazines {held}")?;
        writeln!(f, "allocated {allocs}, freed {frees}")?;
        let Self { bulk_asked, bulk_filled, bulk_partial, fell_back, stolen, exhausted, .. } = self;
        writeln!(
            f,
            "bulk: requested {bulk_asked}, got {bulk_filled}, partial calls {bulk_partial}"
        )?;
        write!(
            f,
            "at a watermark {fell_back}, from reserved regions {stolen}, failed calls {exhausted}"
        )
    }
}
