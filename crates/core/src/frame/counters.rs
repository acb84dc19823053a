//! [`FrameStats`], the counters behind it that a zone's owners share, and [`Watermarks`]: how many
//! frames bulk calls leave free.

use crate::sync::{AtomicU64, CachePadded, Mutex, Ordering};
use alloc::sync::Arc;
use alloc::vec::Vec;

/// A zone's counters, in frames unless stated otherwise.
///
/// Exact while no call is being made: an owner's [`ZoneLocal`](super::ZoneLocal) counts by plain
/// stores of its own, which a report adds up.
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
    /// [`Watermarks`].
    pub fell_back: u64,
    /// Claims (of at most 64 frames, or one run) that only succeeded in a region reserved by
    /// another owner.
    pub stolen: u64,
    /// Calls (not frames) that returned nothing.
    pub exhausted: u64,
}

/// The counters that all owners share. Those that change together share a cache line. Owners add
/// theirs now and then, so that the number of free frames is known roughly without asking them.
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
    /// Counts of owners that they have not yet added to the zone's. Locked by reports, by calls
    /// that would stop at a watermark, and where owners are created and dropped.
    owners: Mutex<Vec<Arc<CachePadded<OwnerTally>>>>,
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

    fn add(&mut self, other: Self) {
        self.singles = self.singles.wrapping_add(other.singles);
        self.frees = self.frees.wrapping_add(other.frees);
        self.bulk_filled = self.bulk_filled.wrapping_add(other.bulk_filled);
        self.bulk_missed = self.bulk_missed.wrapping_add(other.bulk_missed);
        self.bulk_partial = self.bulk_partial.wrapping_add(other.bulk_partial);
        self.fell_back = self.fell_back.wrapping_add(other.fell_back);
        self.exhausted = self.exhausted.wrapping_add(other.exhausted);
        self.claimed = self.claimed.wrapping_add(other.claimed);
    }
}

/// A number that one thread changes and others read.
#[derive(Debug)]
pub(super) struct Count(AtomicU64);

impl Count {
    fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    #[inline(always)]
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `n`, and returns the sum. No read-modify-write: the caller is the only one that changes
    /// it.
    #[inline(always)]
    pub(super) fn add(&self, n: u64) -> u64 {
        let sum = self.get().wrapping_add(n);
        self.0.store(sum, Ordering::Relaxed);
        sum
    }

    #[inline(always)]
    pub(super) fn sub(&self, n: u64) {
        self.0.store(self.get().wrapping_sub(n), Ordering::Relaxed);
    }

    fn take(&self) -> u64 {
        let n = self.get();
        self.0.store(0, Ordering::Relaxed);
        n
    }
}

/// A [`Tally`] that its owner changes and reports read.
#[derive(Debug)]
pub(super) struct OwnerTally {
    pub(super) singles: Count,
    pub(super) frees: Count,
    pub(super) bulk_filled: Count,
    pub(super) bulk_missed: Count,
    pub(super) bulk_partial: Count,
    pub(super) fell_back: Count,
    pub(super) exhausted: Count,
    pub(super) claimed: Count,
}

impl OwnerTally {
    fn new() -> Self {
        Self {
            singles: Count::new(),
            frees: Count::new(),
            bulk_filled: Count::new(),
            bulk_missed: Count::new(),
            bulk_partial: Count::new(),
            fell_back: Count::new(),
            exhausted: Count::new(),
            claimed: Count::new(),
        }
    }

    pub(super) fn read(&self) -> Tally {
        self.each(Count::get)
    }

    /// Sets the counts that tell how many frames are free to 0, and returns what they were. Those of
    /// calls that got less than they asked for stay: only reports need them.
    pub(super) fn take_frames(&self) -> Tally {
        Tally {
            singles: self.singles.take(),
            frees: self.frees.take(),
            bulk_filled: self.bulk_filled.take(),
            claimed: self.claimed.take().cast_signed(),
            ..Tally::default()
        }
    }

    /// Sets all counts to 0, and returns what they were.
    fn take(&self) -> Tally {
        self.each(Count::take)
    }

    fn each(&self, of: impl Fn(&Count) -> u64) -> Tally {
        Tally {
            singles: of(&self.singles),
            frees: of(&self.frees),
            bulk_filled: of(&self.bulk_filled),
            bulk_missed: of(&self.bulk_missed),
            bulk_partial: of(&self.bulk_partial),
            fell_back: of(&self.fell_back),
            exhausted: of(&self.exhausted),
            claimed: of(&self.claimed).cast_signed(),
        }
    }

    /// See [`Tally::bulk`].
    pub(super) fn bulk(&self, asked: usize, got: usize, fell_back: bool) {
        self.bulk_filled.add(got as u64);
        if got < asked || fell_back {
            self.bulk_short(asked, got, fell_back);
        }
    }

    #[cold]
    fn bulk_short(&self, asked: usize, got: usize, fell_back: bool) {
        let mut tally = Tally::default();
        tally.bulk(asked, got, fell_back);
        self.fell_back.add(tally.fell_back);
        self.bulk_missed.add(tally.bulk_missed);
        self.bulk_partial.add(tally.bulk_partial);
        self.exhausted.add(tally.exhausted);
    }

    /// See [`Tally::held`].
    pub(super) fn held(&self) -> i64 {
        let in_use = self.singles.get().wrapping_add(self.bulk_filled.get());
        self.claimed.get().wrapping_sub(in_use.wrapping_sub(self.frees.get())).cast_signed()
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
            owners: Mutex::new(Vec::new()),
        }
    }

    /// Returns the counts of a new owner.
    pub(super) fn enter(&self) -> Arc<CachePadded<OwnerTally>> {
        let tally = Arc::new(CachePadded(OwnerTally::new()));
        self.owners.lock().push(Arc::clone(&tally));
        tally
    }

    /// Adds the counts of an owner that ends.
    pub(super) fn leave(&self, tally: &Arc<CachePadded<OwnerTally>>) {
        let mut owners = self.owners.lock();
        self.fold(tally.take());
        owners.retain(|owner| !Arc::ptr_eq(owner, tally));
    }

    /// Returns what owners have counted and not yet added.
    fn unfolded(&self) -> Tally {
        let mut sum = Tally::default();
        self.owners.lock().iter().for_each(|owner| sum.add(owner.read()));
        sum
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

    /// Returns how many frames are in use, as far as owners have added their counts.
    pub(super) fn in_use(&self) -> u64 {
        let frees = self.frees.load(Ordering::Relaxed);
        u64::try_from(self.allocs().wrapping_sub(frees).cast_signed()).unwrap_or(0)
    }

    /// Returns how many frames are in use or in magazines, as far as owners have added their counts.
    /// Below 0 where a frame was freed whose allocation its owner has not added yet.
    pub(super) fn taken(&self) -> i64 {
        let frees = self.frees.load(Ordering::Relaxed);
        let held = self.held.load(Ordering::Relaxed);
        self.allocs().wrapping_sub(frees).wrapping_add(held).cast_signed()
    }

    /// Like [`taken`](Self::taken), with what owners have not added. Exact while no call is being
    /// made elsewhere. O(owners), under their lock.
    pub(super) fn taken_exactly(&self) -> i64 {
        // Frames claimed by an owner are in use or held.
        let unfolded = self.unfolded().claimed;
        self.taken().wrapping_add(unfolded)
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
        let owners = self.unfolded();
        let read =
            |counter: &AtomicU64, more: u64| counter.load(Ordering::Relaxed).wrapping_add(more);
        let frees = read(&self.frees, owners.frees);
        let filled = read(&self.bulk_filled, owners.bulk_filled);
        let missed = read(&self.bulk_missed, owners.bulk_missed);
        let allocs = read(&self.singles, owners.singles).wrapping_add(filled);
        let held = read(&self.held, owners.held().cast_unsigned()).cast_signed();
        // While calls are being made, more may seem to be freed than was allocated.
        let level = |level: i64| u64::try_from(level).unwrap_or(0).min(frames);
        FrameStats {
            frames,
            allocs,
            frees,
            in_use: level(allocs.wrapping_sub(frees).cast_signed()),
            held: level(held),
            bulk_asked: filled.saturating_add(missed),
            bulk_filled: filled,
            bulk_partial: read(&self.bulk_partial, owners.bulk_partial),
            fell_back: read(&self.fell_back, owners.fell_back),
            stolen: read(&self.stolen, 0),
            exhausted: read(&self.exhausted, owners.exhausted),
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

/// A zone's watermarks, in free frames.
///
/// A bulk call stops at `low`, an urgent one at `min`, and then takes one ordinary frame, so that
/// even it gets something while memory remains. Calls for a single frame or run ignore them. Under
/// pressure, owners flush their magazines with their next calls, until `high` is reached.
///
/// A call that would stop at a watermark adds up what all owners have counted, so it stops there and
/// not before. One that seems to be far from it does not, and may pass it by what other owners have
/// not reported yet: about 1/256 of the zone, at most 4,608 frames, for each.
///
/// ```
/// use pinfold_core::frame::{Urgency, Watermarks, Zone};
///
/// // A driver's own zone: of 1,024 frames the last 64 are for the calls that free others.
/// let reserve = Watermarks::new(16, 64, 96).ok_or("not in order")?;
/// let zone = Zone::with_watermarks(1024, reserve)?;
/// let mut owner = zone.local();
/// let mut requests = [None; 1024];
/// assert_eq!(owner.fill(&mut requests), 1024 - 64 + 1);
/// let mut writeback = [None; 32];
/// assert_eq!(owner.fill_by(&mut writeback, Urgency::Urgent), 32);
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Watermarks {
    min: u32,
    low: u32,
    high: u32,
}

impl Watermarks {
    /// No watermarks: bulk calls may take all frames.
    pub const NONE: Self = Self { min: 0, low: 0, high: 0 };

    /// Returns these watermarks, if `min <= low <= high`.
    pub const fn new(min: u32, low: u32, high: u32) -> Option<Self> {
        if min <= low && low <= high { Some(Self { min, low, high }) } else { None }
    }

    /// Returns the watermarks that [`Zone::new`](super::Zone::new) uses: `min` is 1/1024 of the
    /// frames, at most 16,384 (64 MiB); `low` is 5/4 and `high` 3/2 of that. Zones under 64 MiB
    /// have none.
    pub(super) const fn for_frames(frames: u32) -> Self {
        if frames < 16_384 {
            return Self::NONE;
        }
        let min = if frames / 1024 < 16_384 { frames / 1024 } else { 16_384 };
        Self { min, low: min + min / 4, high: min + min / 2 }
    }

    /// Returns the number of free frames at which other bulk calls stop.
    pub(super) const fn low(self) -> u32 {
        self.low
    }

    /// Returns the number of free frames above which the pressure ends.
    pub(super) const fn high(self) -> u32 {
        self.high
    }

    pub(super) fn mark(self, urgency: Urgency) -> u32 {
        match urgency {
            Urgency::Normal => self.low,
            Urgency::Urgent => self.min,
        }
    }
}

/// The watermark down to which a bulk call may allocate frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Urgency {
    /// To the watermark *low*.
    #[default]
    Normal,
    /// To the watermark *min*: for callers that free more than they allocate, such as a path that
    /// writes memory out.
    Urgent,
}

/// The frames that the watermarks leave to one bulk call.
#[derive(Clone, Copy)]
pub(super) struct Allowance {
    /// The number of frames that the call may still claim.
    pub(super) left: u64,
    /// Whether it reached the watermark and took its one ordinary frame.
    pub(super) fell_back: bool,
}

impl Allowance {
    /// Returns how many of `want` frames may be claimed; at the watermark one, and only once.
    pub(super) fn of(&mut self, want: u32) -> u32 {
        if self.left == 0 {
            return u32::from(!core::mem::replace(&mut self.fell_back, true));
        }
        u32::try_from(self.left).unwrap_or(u32::MAX).min(want)
    }

    pub(super) fn spend(&mut self, frames: u32) {
        self.left = self.left.saturating_sub(frames.into());
    }
}
