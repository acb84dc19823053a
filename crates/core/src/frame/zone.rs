//! The zone: which region a frame comes from, and what happens when it comes back.

use super::counters::{Counters, FrameStats};
use super::error::FrameError;
use super::hints::{Hints, total_order};
use super::map::{Map, Part, REGION, WORDS};
use super::number::{Frame, MAX_ZONE, MIN_ZONE, Order};
use super::slots::Slots;
use super::watermark::Watermarks;
use crate::sync::{AtomicU32, CachePadded, Ordering};

/// How many partly free regions are tried for a run before a whole one is broken.
pub(super) const PATIENCE: usize = 64;

/// The account of a region's frames. All operations are lock-free, and work from any thread.
#[derive(Debug)]
pub struct Zone {
    frames: u32,
    pub(super) map: Map,
    /// Regions of which some frames are free.
    pub(super) partial: Hints,
    /// Regions of which all frames are free.
    pub(super) whole: Hints,
    /// The word that the last frame came from which was taken without a [`Local`](super::Local).
    rover: CachePadded<AtomicU32>,
    /// Which regions owners have reserved: see [`Zone::reserve`].
    pub(super) slots: Slots,
    counters: Counters,
    pub(super) watermarks: Watermarks,
    /// Not 0 after the zone has run short: see [`Zone::pressed`].
    pub(super) pressed: CachePadded<AtomicU32>,
}

impl Zone {
    /// The fewest frames that a zone has: 2 MiB.
    pub const MIN_FRAMES: u32 = MIN_ZONE;
    /// The most frames that a zone has: 1 TiB.
    pub const MAX_FRAMES: u32 = MAX_ZONE;

    /// A zone of `frames` frames, all free, with the marks of [`Watermarks::for_frames`]; any number of frames from
    /// 2 MiB to 1 TiB.
    ///
    /// Takes 0.126 byte a frame, besides some 2 KiB. The map is not touched before it is used, so even 1 TiB takes a
    /// fraction of a millisecond where the system hands out zeroed memory.
    ///
    /// # Errors
    /// [`FrameError::ZoneSize`].
    pub fn new(frames: u32) -> Result<Self, FrameError> {
        // With few regions, reserving one would keep a large part of the zone from the others.
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
            rover: CachePadded(AtomicU32::new(0)),
            slots: Slots::new(slots),
            counters: Counters::new(),
            watermarks: Watermarks::for_frames(frames),
            pressed: CachePadded(AtomicU32::new(0)),
        })
    }

    /// How many frames the zone has.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// How many bytes the account itself takes.
    pub fn metadata_bytes(&self) -> usize {
        size_of::<Self>() + self.map.bytes() + self.partial.bytes() + self.whole.bytes() + self.slots.bytes()
    }

    /// How many frames are taken by the map itself: those in use and those in magazines. Exact when nobody
    /// works. O(regions that are not wholly free); for reports and tests.
    pub fn taken(&self) -> u64 {
        let regions = self.frames.div_ceil(REGION);
        let excluded = u64::from(regions) * u64::from(REGION) - u64::from(self.frames);
        let taken: u64 =
            (0..regions).filter(|&r| !self.whole.has(r)).map(|r| u64::from(self.map.taken_in(r))).sum();
        taken.saturating_sub(excluded)
    }

    /// How many regions of 2 MiB are wholly free, so that [`Order::HUGE`] can be served from them. Exact when nobody
    /// works. O(regions); for reports and tests.
    pub fn whole_regions(&self) -> u32 {
        let whole = (0..self.frames / REGION).filter(|&r| self.map.is_whole(r)).count();
        u32::try_from(whole).unwrap_or(u32::MAX)
    }

    pub(super) fn regions(&self) -> u32 {
        self.frames.div_ceil(REGION)
    }

    /// Returns the counters. Each is exact while no other thread uses the zone, otherwise they may be some steps apart. O(1).
    pub fn stats(&self) -> FrameStats {
        self.counters.stats(self.frames.into())
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// One run of 2^order frames, aligned to its size. O(1) for order 0; a run may look at each partly free region.
    ///
    /// Frames that lie in the magazines of others are not to be had here.
    ///
    /// # Errors
    /// [`FrameError::Exhausted`]. For orders above 6 also where another who tries the same run at the same moment has
    /// to give it up again.
    #[inline]
    pub fn alloc(&self, order: Order) -> Result<Frame, FrameError> {
        match self.take(order) {
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

    /// Takes a run back, whoever handed it out. O(2^order / 64).
    ///
    /// # Errors
    /// [`FrameError::Foreign`], [`FrameError::Misaligned`], [`FrameError::DoubleFree`]; nothing has changed, unless
    /// another freed part of the same run at the same moment: then the frames before the one named are free.
    #[inline]
    pub fn free(&self, frame: Frame, order: Order) -> Result<(), FrameError> {
        self.give(frame, order)?;
        self.count_free(order.frames().into());
        Ok(())
    }

    /// Counts frames that came back to the map.
    #[inline(always)]
    pub(super) fn count_free(&self, frames: u64) {
        self.counters.free(frames);
        if self.pressed() {
            self.relieve();
        }
    }

    #[cold]
    pub(super) fn count_exhausted(&self) {
        self.counters.exhausted();
        self.press();
    }

    /// [`alloc`](Self::alloc), not counted.
    #[inline]
    pub(super) fn take(&self, order: Order) -> Result<Frame, FrameError> {
        let part = match order.get() {
            0 => self.claim_some(1),
            order @ 1..=6 => {
                self.search(PATIENCE, |region| self.claim_order_in(region, order)).unwrap_or(Part::NONE)
            }
            _ => return self.take_large(order),
        };
        if part.mask == 0 { Err(self.exhausted(order)) } else { Ok(part.first()) }
    }

    /// [`free`](Self::free), not counted.
    #[inline]
    pub(super) fn give(&self, frame: Frame, order: Order) -> Result<(), FrameError> {
        self.check(frame, order.frames())?;
        if !frame.index().is_multiple_of(order.frames()) {
            return Err(FrameError::Misaligned { frame, order });
        }
        match order.get() {
            0 => self.release(Part::of(frame)),
            _ => self.release_range(frame.index(), order.frames()),
        }
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

    /// Claims at most `n` frames, all of one word, for whoever has reserved nothing.
    #[inline]
    pub(super) fn claim_some(&self, n: u32) -> Part {
        let part = self.claim_at(self.rover.load(Ordering::Relaxed), n);
        if part.mask != 0 { part } else { self.claim_far(n) }
    }

    #[cold]
    fn claim_far(&self, n: u32) -> Part {
        let region = self.rover.load(Ordering::Relaxed) / WORDS;
        let part =
            self.claim_in(region, n).or_else(|| self.search(usize::MAX, |region| self.claim_in(region, n)));
        match part {
            Some(part) => {
                self.rover.store(part.word, Ordering::SeqCst);
                total_order();
                self.settle(region);
                part
            }
            None => Part::NONE,
        }
    }

    #[inline(always)]
    fn claim_at(&self, word: u32, n: u32) -> Part {
        let claimed = self.map.claim(word, n);
        if claimed.was_whole {
            self.dent(word / WORDS);
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
                self.dent(region);
            }
            (claimed.mask != 0).then_some(Part { word, mask: claimed.mask })
        })
    }

    /// Tries regions until one has what is asked: at most `patience` partly free ones, then whole ones, then all
    /// others. Twice, since a region may move from one set to another behind the search.
    pub(super) fn search<T>(&self, patience: usize, mut attempt: impl FnMut(u32) -> Option<T>) -> Option<T> {
        for _ in 0..2 {
            let mut tried = 0;
            let mut from = 0;
            while let Some(region) = self.partial.next_from(from).filter(|_| tried < patience) {
                if let found @ Some(_) = attempt(region) {
                    return found;
                }
                if !self.map.has_free(region) {
                    self.leave(&self.partial, region);
                }
                (from, tried) = (region + 1, tried + 1);
            }
            let resume = from;
            from = 0;
            while let Some(region) = self.whole.next_from(from) {
                if let found @ Some(_) = attempt(region) {
                    return found;
                }
                if !self.map.is_whole(region) {
                    self.leave(&self.whole, region);
                }
                from = region + 1;
            }
            from = resume;
            while let Some(region) = self.partial.next_from(from) {
                if let found @ Some(_) = attempt(region) {
                    return found;
                }
                from = region + 1;
            }
            if let found @ Some(_) = self.slots.reserved().find_map(&mut attempt) {
                self.counters.stolen();
                return found;
            }
        }
        None
    }

    /// Gives frames back. O(1).
    #[inline(always)]
    pub(super) fn release(&self, part: Part) -> Result<(), FrameError> {
        let emptied = self.map.release(part).map_err(|frame| FrameError::DoubleFree { frame })?;
        total_order();
        let region = part.region();
        if emptied {
            self.word_emptied(region);
        } else if !self.partial.has(region) && !self.whole.has(region) {
            self.partial.set(region);
        }
        Ok(())
    }

    fn word_emptied(&self, region: u32) {
        self.ensure_visible(region);
        // The region at hand would go to and fro between the sets with every other frame: it waits.
        if self.rover.load(Ordering::SeqCst) / WORDS != region {
            self.settle(region);
        }
    }

    /// Puts the region at hand where it belongs, before whole regions are looked for.
    pub(super) fn settle_rover(&self) {
        self.settle(self.rover.load(Ordering::SeqCst) / WORDS);
    }

    /// Moves a region that is whole to the whole ones.
    fn settle(&self, region: u32) {
        if self.whole.has(region) || !self.map.is_whole(region) {
            return;
        }
        self.whole.set(region);
        total_order();
        if self.map.is_whole(region) {
            self.leave(&self.partial, region);
        } else {
            // Somebody claimed from it before it was in the set, and could not know.
            self.dent(region);
        }
    }

    /// A whole region has lost a frame: it is partly free now.
    #[inline(always)]
    pub(super) fn dent(&self, region: u32) {
        total_order();
        if self.whole.has(region) {
            self.partial.set(region);
            self.leave(&self.whole, region);
        }
    }

    /// Takes a region out of a set, and sees to it that it is in another if it has free frames.
    pub(super) fn leave(&self, set: &Hints, region: u32) {
        if set.take(region) {
            self.ensure_visible(region);
        }
    }

    /// Reserves a region with free frames for the owner of a slot, a partly free one first: takes it out of the sets and
    /// publishes it in the slot, so that others leave it alone as long as they find anything else.
    pub(super) fn reserve(&self, slot: u32) -> Option<u32> {
        for set in [&self.partial, &self.whole] {
            let mut from = 0;
            while let Some(region) = set.next_from(from) {
                // Published first: a search that no longer finds the region in the set finds it here.
                self.slots.publish(slot, Some(region));
                if set.take(region) && self.map.has_free(region) {
                    return Some(region);
                }
                from = region + 1;
            }
        }
        self.slots.publish(slot, None);
        None
    }

    /// Keeps the promise of [`Hints`] for a region.
    pub(super) fn ensure_visible(&self, region: u32) {
        if !self.partial.has(region) && !self.whole.has(region) && self.map.has_free(region) {
            self.partial.set(region);
        }
    }
}

/// Which frames a zone has.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    frames: u32,
}

impl Bounds {
    /// Checks that a run lies in the zone.
    #[inline(always)]
    pub(super) fn check(self, frame: Frame, run_frames: u32) -> Result<(), FrameError> {
        let ends_inside = frame.index().checked_add(run_frames).is_some_and(|end| end <= self.frames);
        if ends_inside { Ok(()) } else { Err(FrameError::Foreign { frame, run_frames, frames: self.frames }) }
    }
}

/// The words of a region.
fn words(region: u32) -> core::ops::Range<u32> {
    region * WORDS..(region + 1) * WORDS
}
