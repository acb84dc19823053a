//! [`Zone`], the allocator of frames: its state, and allocating and freeing in the map.

use super::counters::{Counters, FrameStats};
use super::error::{AlreadyFree, FrameError};
use super::hints::{Hints, total_order};
use super::kept_marks::Marks;
use super::limits::Limits;
use super::map::{Map, Part, REGION, WORDS};
use super::number::{Frame, MAX_ZONE, MIN_ZONE, Order};
use super::slots::Slots;
use super::watermark::Watermarks;
use crate::sync::{AtomicU32, CachePadded, Ordering};

/// How many partly free regions are tried for a run before a whole one is split.
pub(super) const MAX_PARTIAL: usize = 64;

/// The allocator of the frames of a range of memory. All operations are lock-free and can be called
/// from any thread.
#[derive(Debug)]
pub struct Zone {
    frames: u32,
    pub(super) map: Map,
    /// Regions with some free frames.
    pub(super) partial: Hints,
    /// Regions with all frames free.
    pub(super) whole: Hints,
    /// The longest runs that regions may have.
    pub(super) limits: Limits,
    /// The word of the last frame that was allocated without a [`Local`](super::Local).
    pub(super) rover: CachePadded<AtomicU32>,
    /// Which regions owners have reserved: see [`Zone::reserve`].
    pub(super) slots: Slots,
    /// Which regions owners keep for their next run of 2 MiB.
    pub(super) kept: Marks,
    pub(super) counters: Counters,
    pub(super) watermarks: Watermarks,
    /// Not 0 while the zone is short of frames: see [`Zone::under_pressure`].
    pub(super) under_pressure: CachePadded<AtomicU32>,
}

impl Zone {
    /// The fewest frames that a zone has: 2 MiB.
    pub const MIN_FRAMES: u32 = MIN_ZONE;
    /// The most frames that a zone has: 1 TiB.
    pub const MAX_FRAMES: u32 = MAX_ZONE;

    /// Creates a zone of `frames` frames, all free, with the marks of [`Watermarks::for_frames`].
    ///
    /// Its metadata is 0.13 byte per frame and about 2 KiB. The map is not touched before it is
    /// used, so even 1 TiB takes a fraction of a millisecond where the system provides zeroed
    /// memory.
    ///
    /// # Errors
    /// [`FrameError::ZoneSize`].
    pub fn new(frames: u32) -> Result<Self, FrameError> {
        // With few regions, reserving one would withhold a large part of the zone from other
        // owners.
        Self::with_slots(frames, (frames / REGION / 4).min(256))
    }

    pub(super) fn with_slots(frames: u32, slots: u32) -> Result<Self, FrameError> {
        if !(Self::MIN_FRAMES..=Self::MAX_FRAMES).contains(&frames) {
            return Err(FrameError::ZoneSize { frames });
        }
        let (whole, rest) = (frames / REGION, frames % REGION);
        let regions = frames.div_ceil(REGION);
        let mut map = Map::new(regions);
        let partial = Hints::new(regions, 0);
        if rest > 0 {
            for part in super::map::parts(frames, REGION - rest) {
                map.exclude(part);
            }
            partial.set(whole);
        }
        Ok(Self {
            frames,
            map,
            partial,
            whole: Hints::new(regions, whole),
            limits: Limits::new(regions),
            rover: CachePadded(AtomicU32::new(0)),
            slots: Slots::new(slots),
            kept: Marks::new(regions),
            counters: Counters::new(),
            watermarks: Watermarks::for_frames(frames),
            under_pressure: CachePadded(AtomicU32::new(0)),
        })
    }

    /// Returns how many frames the zone has.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// Returns how many bytes the metadata takes.
    pub fn metadata_bytes(&self) -> usize {
        let hints =
            self.partial.bytes() + self.whole.bytes() + self.limits.bytes() + self.kept.bytes();
        size_of::<Self>() + self.map.bytes() + hints + self.slots.bytes()
    }

    /// Returns how many frames are allocated in the map: those in use and those in magazines. Exact
    /// while no other thread uses the zone. O(regions that are not wholly free); for reports and
    /// tests.
    pub fn taken(&self) -> u64 {
        let regions = self.frames.div_ceil(REGION);
        let excluded = u64::from(regions) * u64::from(REGION) - u64::from(self.frames);
        let taken: u64 = (0..regions)
            .filter(|&r| !self.whole.has(r))
            .map(|r| u64::from(self.map.taken_in(r)))
            .sum();
        taken.saturating_sub(excluded)
    }

    /// Returns how many regions of 2 MiB are wholly free, so that they can serve [`Order::HUGE`].
    /// Exact while no other thread uses the zone. O(regions); for reports and tests.
    pub fn whole_regions(&self) -> u32 {
        let whole = (0..self.frames / REGION).filter(|&r| self.map.is_whole(r)).count();
        u32::try_from(whole).unwrap_or(u32::MAX)
    }

    pub(super) fn regions(&self) -> u32 {
        self.frames.div_ceil(REGION)
    }

    /// Returns the counters. Each is exact while no other thread uses the zone, otherwise they may
    /// be some steps apart. O(1).
    pub fn stats(&self) -> FrameStats {
        self.counters.stats(self.frames.into())
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Allocates a run of 2^order frames, aligned to its size. O(1) for order 0. For a run, a
    /// region where it was not found is looked at again only after a free there.
    ///
    /// Frames in the magazines of owners are unavailable.
    ///
    /// # Errors
    /// [`FrameError::Exhausted`]. For orders above 6 also if another thread tries the same run at
    /// the same moment and fails.
    #[inline]
    pub fn alloc(&self, order: Order) -> Result<Frame, FrameError> {
        match self.alloc_uncounted(order) {
            Ok(frame) => {
                self.counters.alloc(order.frames().into());
                Ok(frame)
            }
            Err(error) => {
                self.count_exhausted();
                Err(error)
            }
        }
    }

    /// Frees a run, whichever owner allocated it. O(2^order / 64).
    ///
    /// Not detected: a second free of a single frame that is in the magazine of a
    /// [`Local`](super::Local) (see the [module](super)).
    ///
    /// # Errors
    /// [`FrameError::Foreign`], [`FrameError::Misaligned`], [`FrameError::DoubleFree`]; nothing has
    /// changed, unless another thread freed part of the same run at the same moment: then the
    /// frames before the one named are free.
    #[inline]
    pub fn free(&self, frame: Frame, order: Order) -> Result<(), FrameError> {
        if order == Order::PAGE {
            self.check(frame, 1)?;
            self.free_one(Part::of(frame))?;
        } else {
            self.free_uncounted(frame, order)?;
        }
        self.count_free(order.frames().into());
        Ok(())
    }

    /// Frees a single frame, of which the bounds have been checked.
    #[inline(always)]
    pub(super) fn free_one(&self, part: Part) -> Result<(), AlreadyFree> {
        self.refuse_kept(part)?;
        self.release(part)
    }

    /// Counts frames that were freed in the map.
    #[inline(always)]
    pub(super) fn count_free(&self, frames: u64) {
        self.counters.free(frames);
        if self.under_pressure() {
            self.update_pressure();
        }
    }

    #[cold]
    pub(super) fn count_exhausted(&self) {
        self.counters.exhausted();
        self.set_under_pressure();
    }

    /// As [`alloc`](Self::alloc), without counting.
    #[inline]
    pub(super) fn alloc_uncounted(&self, order: Order) -> Result<Frame, FrameError> {
        let part = match order.get() {
            0 => self.claim_some(1),
            order @ 1..=6 => self
                .search(order, MAX_PARTIAL, |region| self.claim_order_in(region, order))
                .unwrap_or(Part::NONE),
            _ => return self.alloc_large(order),
        };
        if part.mask == 0 { Err(self.exhausted(order)) } else { Ok(part.first()) }
    }

    /// As [`free`](Self::free), without counting.
    #[inline]
    pub(super) fn free_uncounted(&self, frame: Frame, order: Order) -> Result<(), FrameError> {
        self.check(frame, order.frames())?;
        self.kept.refuse(frame.index(), order.frames())?;
        self.free_checked(frame, order)
    }

    /// Frees a run that lies in the zone, and of which no owner keeps a frame.
    pub(super) fn free_checked(&self, frame: Frame, order: Order) -> Result<(), FrameError> {
        if !frame.index().is_multiple_of(order.frames()) {
            return Err(FrameError::Misaligned { frame, order });
        }
        match order.get() {
            0 => self.release(Part::of(frame))?,
            _ => self.release_range(frame.index(), order.frames())?,
        }
        Ok(())
    }

    pub(super) fn exhausted(&self, order: Order) -> FrameError {
        FrameError::Exhausted { order, frames: self.frames }
    }

    #[inline(always)]
    pub(super) fn bounds(&self) -> Bounds {
        Bounds { frames: self.frames }
    }

    /// See [`Bounds::check`].
    #[inline(always)]
    pub(super) fn check(&self, frame: Frame, run_frames: u32) -> Result<(), FrameError> {
        self.bounds().check(frame, run_frames)
    }

    /// Claims at most `n` frames of one word, for a caller that has reserved no region.
    #[inline]
    pub(super) fn claim_some(&self, n: u32) -> Part {
        let part = self.claim_at(self.rover.load(Ordering::Relaxed), n);
        if part.mask != 0 { part } else { self.claim_slow(n) }
    }

    #[cold]
    fn claim_slow(&self, n: u32) -> Part {
        let region = self.rover.load(Ordering::Relaxed) / WORDS;
        let part = self
            .claim_in(region, n)
            .or_else(|| self.search(0, usize::MAX, |region| self.claim_in(region, n)));
        match part {
            Some(part) => {
                self.rover.store(part.word, Ordering::SeqCst);
                total_order();
                self.update_hints_after_free(region);
                part
            }
            None => Part::NONE,
        }
    }

    #[inline(always)]
    fn claim_at(&self, word: u32, n: u32) -> Part {
        let claimed = self.map.claim(word, n);
        if claimed.was_whole {
            self.update_hints_after_claim(word / WORDS);
        }
        Part { word, mask: claimed.mask }
    }

    /// Claims at most `n` frames of one word of a region, the first that has one.
    pub(super) fn claim_in(&self, region: u32, n: u32) -> Option<Part> {
        words(region).map(|word| self.claim_at(word, n)).find(|part| part.mask != 0)
    }

    /// Claims a run of order 1..=6 in a region.
    pub(super) fn claim_order_in(&self, region: u32, order: u8) -> Option<Part> {
        words(region).find_map(|word| {
            let claimed = self.map.claim_order(word, order);
            if claimed.was_whole {
                self.update_hints_after_claim(region);
            }
            (claimed.mask != 0).then_some(Part { word, mask: claimed.mask })
        })
    }

    /// Frees frames in the map. O(1).
    #[inline(always)]
    pub(super) fn release(&self, part: Part) -> Result<(), AlreadyFree> {
        let free = self.map.release(part)?;
        self.note_released(part, free);
        Ok(())
    }

    /// Updates the limits and hints after frames have been freed in the map: `free` are the free
    /// frames of their word now.
    #[inline(always)]
    pub(super) fn note_released(&self, part: Part, free: u64) {
        total_order();
        let region = part.region();
        if self.limits.is_too_low(part, free) {
            self.limits.note_free(part, free);
        }
        if free == !0 {
            self.word_emptied(region);
        } else if !self.partial.has(region) {
            self.ensure_visible(region);
        }
    }

    /// As `note_released`, where mostly neither a limit nor a hint changes.
    #[inline(always)]
    pub(super) fn note_released_at_random(&self, part: Part, free: u64) {
        total_order();
        if self.limits.is_too_low(part, free) || free == !0 || !self.partial.has(part.region()) {
            self.note_change(part, free);
        }
    }

    #[inline(never)]
    fn note_change(&self, part: Part, free: u64) {
        self.note_released(part, free);
    }

    /// Refuses frames of one word in a region that an owner keeps.
    #[inline(always)]
    pub(super) fn refuse_kept(&self, part: Part) -> Result<(), AlreadyFree> {
        if self.kept.has(part.region()) { Err(AlreadyFree(part.first())) } else { Ok(()) }
    }
}

/// The size of a zone, to check frames against.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    frames: u32,
}

impl Bounds {
    /// Checks that a run lies in the zone.
    #[inline(always)]
    pub(super) fn check(self, frame: Frame, run_frames: u32) -> Result<(), FrameError> {
        let ends_inside =
            frame.index().checked_add(run_frames).is_some_and(|end| end <= self.frames);
        if ends_inside {
            Ok(())
        } else {
            Err(FrameError::Foreign { frame, run_frames, frames: self.frames })
        }
    }
}

/// Returns the words of a region.
fn words(region: u32) -> core::ops::Range<u32> {
    region * WORDS..(region + 1) * WORDS
}
