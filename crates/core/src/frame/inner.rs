//! [`Inner`], the state that the handles of a zone share: allocating and freeing in the map.

use super::counters::{Allowance, Counters, OwnerTally, Tally, Urgency, Watermarks};
use super::hints::{Hints, Limits, Slots};
use super::map::{Claimed, Map, Part, REGION, WORDS, parts};
use super::number::{AlreadyFree, Frame, FrameError, MAX_ZONE, MIN_ZONE, Order};
use crate::sync::{AtomicU32, CachePadded, Ordering};
use alloc::sync::Arc;

/// The number of partly free regions tried for a run before a whole one is split.
pub(super) const MAX_PARTIAL: usize = 64;

#[derive(Debug)]
pub(super) struct Inner {
    frames: u32,
    pub(super) map: Map,
    /// Regions with some free frames.
    pub(super) partial: Hints,
    /// Regions with all frames free.
    pub(super) whole: Hints,
    /// The longest runs that regions may have.
    pub(super) limits: Limits,
    /// The word of the last frame that was allocated without a [`ZoneLocal`](super::ZoneLocal).
    pub(super) rover: CachePadded<AtomicU32>,
    /// The regions that owners have reserved: see [`Inner::reserve`].
    pub(super) slots: Slots,
    pub(super) counters: Counters,
    pub(super) watermarks: Watermarks,
    /// Not 0 while the zone is short of frames: see [`Inner::under_pressure`].
    pub(super) under_pressure: CachePadded<AtomicU32>,
}

impl Inner {
    pub(super) fn new(frames: u32, watermarks: Watermarks) -> Result<Self, FrameError> {
        // With few regions, reserving one would withhold a large part of the zone from other
        // owners.
        Self::with_slots(frames, watermarks, (frames / REGION / 4).min(256))
    }

    /// Like `new`, for at most `slots` owners that reserve regions.
    pub(super) fn with_slots(
        frames: u32,
        watermarks: Watermarks,
        slots: u32,
    ) -> Result<Self, FrameError> {
        if !(MIN_ZONE..=MAX_ZONE).contains(&frames) {
            return Err(FrameError::ZoneSize { frames });
        }
        let (whole, rest) = (frames / REGION, frames % REGION);
        let regions = frames.div_ceil(REGION);
        let mut map = Map::new(regions)?;
        let partial = Hints::new(regions, 0)?;
        if rest > 0 {
            for part in parts(frames, REGION - rest) {
                map.exclude(part);
            }
            partial.set(whole);
        }
        Ok(Self {
            frames,
            map,
            partial,
            whole: Hints::new(regions, whole)?,
            limits: Limits::new(regions)?,
            rover: CachePadded(AtomicU32::new(0)),
            slots: Slots::new(slots)?,
            counters: Counters::new(),
            watermarks,
            under_pressure: CachePadded(AtomicU32::new(0)),
        })
    }

    pub(super) fn frames(&self) -> u32 {
        self.frames
    }

    pub(super) fn regions(&self) -> u32 {
        self.frames.div_ceil(REGION)
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn metadata_bytes(&self) -> usize {
        let hints = self.partial.bytes() + self.whole.bytes() + self.limits.bytes();
        size_of::<Self>() + self.map.bytes() + hints + self.slots.bytes()
    }

    /// Returns how many frames are allocated in the map: those in use and those in magazines. Exact
    /// while no other thread uses the zone.
    #[cfg(test)]
    pub(super) fn taken(&self) -> u64 {
        let regions = self.regions();
        let excluded = u64::from(regions) * u64::from(REGION) - u64::from(self.frames);
        let taken: u64 = (0..regions)
            .filter(|&r| !self.whole.has(r))
            .map(|r| u64::from(self.map.taken_in(r)))
            .sum();
        taken.saturating_sub(excluded)
    }

    /// Frees a single frame or a run.
    #[inline(always)]
    pub(super) fn free(&self, frame: Frame, order: Order) -> Result<(), FrameError> {
        if order == Order::PAGE {
            self.check(frame, 1)?;
            self.release(Part::of(frame))?;
        } else {
            self.free_run_of(frame, order)?;
        }
        self.count_free(order.frames().into());
        Ok(())
    }

    /// Frees a run of an order without counting it.
    pub(super) fn free_run_of(&self, frame: Frame, order: Order) -> Result<(), FrameError> {
        self.check(frame, order.frames())?;
        if !frame.index().is_multiple_of(order.frames()) {
            return Err(FrameError::Misaligned { frame, order });
        }
        Ok(self.release_range(frame.index(), order.frames())?)
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
        self.fold(Tally { exhausted: 1, ..Tally::default() });
        self.set_under_pressure();
    }

    /// Allocates a run of an order without counting it.
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
                self.update_hints_after_free(region);
                part
            }
            None => Part::NONE,
        }
    }

    /// Claims at most `n` frames of a word.
    #[inline(always)]
    pub(super) fn claim_at(&self, word: u32, n: u32) -> Part {
        self.confirm(word, self.map.claim(word, n))
    }

    /// Undoes a claim in a region that is claimed as a whole, and otherwise updates the hints.
    #[inline(always)]
    fn confirm(&self, word: u32, claimed: Claimed) -> Part {
        let part = Part { word, mask: claimed.mask };
        if part.mask != 0 {
            if self.map.is_claimed(part.region()) {
                return self.undo(part);
            }
            if claimed.was_whole {
                self.update_hints_after_claim(part.region());
            }
        }
        part
    }

    #[cold]
    fn undo(&self, part: Part) -> Part {
        // Does not fail: the bits were set by this thread.
        if let Ok(free) = self.map.release(part) {
            self.note_released(part, free);
        }
        Part::NONE
    }

    /// Claims at most `n` frames of one word of a region, the first that has one.
    pub(super) fn claim_in(&self, region: u32, n: u32) -> Option<Part> {
        words(region).map(|word| self.claim_at(word, n)).find(|part| part.mask != 0)
    }

    /// Claims a run of order 1..=6 in a region.
    pub(super) fn claim_order_in(&self, region: u32, order: u8) -> Option<Part> {
        words(region)
            .map(|word| self.confirm(word, self.map.claim_order(word, order)))
            .find(|part| part.mask != 0)
    }

    /// Frees frames of one word in the map. O(1), except in a region that was claimed as a whole.
    #[inline(always)]
    pub(super) fn release(&self, part: Part) -> Result<(), AlreadyFree> {
        let free = self.release_bits(part)?;
        self.note_released(part, free);
        Ok(())
    }

    /// Like `release`, without updating limits and hints. Returns which frames of the word are free
    /// now.
    #[inline(always)]
    pub(super) fn release_bits(&self, part: Part) -> Result<u64, AlreadyFree> {
        self.map.release(part).or_else(|_| self.release_of_whole(part))
    }

    #[cold]
    fn release_of_whole(&self, part: Part) -> Result<u64, AlreadyFree> {
        // Again in any case: another thread may have set the bits since.
        self.split(part.region());
        self.map.release(part)
    }

    /// Returns which of these frames are free in the map.
    #[inline(always)]
    pub(super) fn free_of(&self, part: Part) -> u64 {
        let free = self.map.free_of(part);
        if free != 0 { self.free_of_whole(part) } else { 0 }
    }

    #[cold]
    fn free_of_whole(&self, part: Part) -> u64 {
        // Again in any case, as for a release.
        self.split(part.region());
        self.map.free_of(part)
    }

    /// Updates the limits and hints after frames have been freed in the map: `free` are the free
    /// frames of their word now.
    #[inline(always)]
    pub(super) fn note_released(&self, part: Part, free: u64) {
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

    /// Like `note_released`, where mostly neither a limit nor a hint changes.
    #[inline(always)]
    pub(super) fn note_released_at_random(&self, part: Part, free: u64) {
        if self.limits.is_too_low(part, free) || free == !0 || !self.partial.has(part.region()) {
            self.note_change(part, free);
        }
    }

    #[inline(never)]
    fn note_change(&self, part: Part, free: u64) {
        self.note_released(part, free);
    }
}

/// Runs of more than one word: orders 7 and up, and contiguous runs of any length.
impl Inner {
    /// See [`Zone::alloc_run`](super::Zone::alloc_run).
    pub(super) fn alloc_run(
        &self,
        run_frames: u32,
        align_frames: u32,
    ) -> Result<Frame, FrameError> {
        if run_frames == 0 {
            return Err(FrameError::Empty { frame: None });
        }
        if !align_frames.is_power_of_two() {
            return Err(FrameError::Alignment { align_frames });
        }
        let Some(frame) = self.find_run(run_frames, align_frames) else {
            self.count_exhausted();
            return Err(FrameError::NoRun { run_frames, align_frames, frames: self.frames });
        };
        self.counters.alloc(run_frames.into());
        Ok(frame)
    }

    /// See [`Zone::free_run`](super::Zone::free_run).
    pub(super) fn free_run(&self, first: Frame, run_frames: u32) -> Result<(), FrameError> {
        if run_frames == 0 {
            return Err(FrameError::Empty { frame: Some(first) });
        }
        self.check(first, run_frames)?;
        self.release_range(first.index(), run_frames)?;
        self.count_free(run_frames.into());
        Ok(())
    }

    /// Allocates a run of order 7 and up.
    pub(super) fn alloc_large(&self, order: Order) -> Result<Frame, FrameError> {
        let run = order.frames();
        let found = match run {
            ..REGION => self.search(order.get(), MAX_PARTIAL, |region| {
                let mut places = (0..REGION / run).map(|i| region * REGION + i * run);
                places.find(|&first| self.claim_range(first, run)).map(Frame::inside)
            }),
            _ => self.first_fit(run, run),
        };
        found.ok_or_else(|| self.exhausted(order))
    }

    fn find_run(&self, run: u32, align: u32) -> Option<Frame> {
        let order = run.max(align).checked_next_power_of_two()?.trailing_zeros();
        match u8::try_from(order)
            .ok()
            .filter(|&order| order < Order::HUGE.get())
            .and_then(Order::new)
        {
            Some(order) => {
                let frame = self.alloc_uncounted(order).ok()?;
                let rest = order.frames() - run;
                if rest > 0 {
                    // Does not fail: only this call owns them.
                    _ = self.release_range(frame.index() + run, rest);
                }
                Some(frame)
            }
            None => self.first_fit(run, align.max(REGION)),
        }
    }

    /// Claims the first run that starts with a region: wholly free regions, and the front of one
    /// more.
    fn first_fit(&self, run: u32, align: u32) -> Option<Frame> {
        self.limits.use_from_now_on();
        self.update_rover_hints();
        let step = align / REGION;
        let (whole, rest) = (run / REGION, run % REGION);
        let mut region = 0_u32;
        loop {
            if whole > 0 {
                region = self.whole.next_from(region)?.checked_next_multiple_of(step)?;
            }
            if u64::from(region) * u64::from(REGION) + u64::from(run) > u64::from(self.frames) {
                return None;
            }
            let first = region * REGION;
            let gap = (region..region + whole).rev().find(|&r| !self.whole.has(r));
            let taken = gap.or_else(|| {
                (rest > 0 && !self.all_free(first + whole * REGION, rest)).then_some(region + whole)
            });
            match taken {
                // No run can start before the last obstacle.
                Some(obstacle) => region = (obstacle + 1).checked_next_multiple_of(step)?,
                None if self.claim_range(first, run) => return Some(Frame::inside(first)),
                None => region = region.checked_add(step)?,
            }
        }
    }

    fn all_free(&self, first: u32, run: u32) -> bool {
        parts(first, run)
            .all(|part| !self.map.is_claimed(part.region()) && self.map.free_of(part) == part.mask)
    }

    /// Claims exactly these frames, or none.
    fn claim_range(&self, first: u32, run: u32) -> bool {
        let mut done = first;
        for (region, start, frames) in pieces(first, run) {
            let claimed = match frames {
                REGION => self.claim_region(region),
                _ => self.claim_words(start, frames),
            };
            if !claimed {
                // Does not fail: only this call owns them.
                _ = self.release_range(first, done - first);
                return false;
            }
            done += frames;
        }
        true
    }

    /// Claims exactly these frames of a region, or none.
    fn claim_words(&self, first: u32, frames: u32) -> bool {
        if !self.all_free(first, frames) {
            return false;
        }
        for (done, part) in parts(first, frames).enumerate() {
            if self.confirm(part.word, self.map.claim_exactly(part)).mask == 0 {
                for part in parts(first, frames).take(done) {
                    _ = self.release(part);
                }
                return false;
            }
        }
        true
    }

    /// Frees exactly these frames, if all of them are allocated.
    pub(super) fn release_range(&self, first: u32, run: u32) -> Result<(), AlreadyFree> {
        for (region, start, frames) in pieces(first, run) {
            if frames == REGION && self.map.is_claimed(region) {
                continue;
            }
            let mut free =
                parts(start, frames).map(|part| Part { mask: self.free_of(part), ..part });
            if let Some(free) = free.find(|part| part.mask != 0) {
                return Err(AlreadyFree(free.first()));
            }
        }
        for (region, start, frames) in pieces(first, run) {
            if frames != REGION || !self.release_region(region) {
                parts(start, frames).try_for_each(|part| self.release(part))?;
            }
        }
        Ok(())
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

/// Returns the parts of a run by region: its number, the first frame, and how many.
fn pieces(first: u32, run: u32) -> impl Iterator<Item = (u32, u32, u32)> {
    let end = first + run;
    (first / REGION..end.div_ceil(REGION)).map(move |region| {
        let start = first.max(region * REGION);
        (region, start, end.min((region + 1) * REGION) - start)
    })
}

/// Watermarks, and whether the zone is under pressure.
impl Inner {
    /// Returns how many frames are free in the map, not in use and in no magazine, as far as owners
    /// have added their counts. O(1).
    pub(super) fn available(&self) -> i64 {
        i64::from(self.frames()) - self.counters.taken()
    }

    /// Returns whether the zone has run out of frames or a bulk call has reached a watermark, and
    /// at most [`high`](Watermarks::high) frames have been free since. Then owners hold no cached
    /// frames.
    #[inline]
    pub(super) fn under_pressure(&self) -> bool {
        self.under_pressure.load(Ordering::Relaxed) != 0
    }

    pub(super) fn set_under_pressure(&self) {
        if !self.under_pressure() {
            self.under_pressure.store(1, Ordering::Relaxed);
        }
    }

    #[cold]
    pub(super) fn update_pressure(&self) {
        if self.available() > self.watermarks.high().into() {
            self.under_pressure.store(0, Ordering::Relaxed);
        }
    }

    /// Returns what a bulk call that wants `want` frames may claim, for a caller that has claimed
    /// `unknown` more frames than it has added to the counters.
    pub(super) fn allowance(&self, urgency: Urgency, want: usize, unknown: i64) -> Allowance {
        let mark = i64::from(self.watermarks.mark(urgency));
        let above = |available: i64| u64::try_from(available.saturating_sub(mark)).unwrap_or(0);
        let left = match (mark, above(self.available().saturating_sub(unknown))) {
            (0, _) => u64::MAX,
            // It may have seemed less because of what other owners have not added yet.
            (_, left) if left < want as u64 => {
                above(i64::from(self.frames()) - self.counters.taken_exactly())
            }
            (_, left) => left,
        };
        Allowance { left, fell_back: false }
    }

    /// Adds the counts of an owner or a bulk call.
    pub(super) fn fold(&self, tally: Tally) {
        self.counters.fold(tally);
        if self.under_pressure() {
            self.update_pressure();
        }
    }

    /// Adds the counts of an owner that ends.
    pub(super) fn end_owner(&self, tally: &Arc<CachePadded<OwnerTally>>) {
        self.counters.leave(tally);
        if self.under_pressure() {
            self.update_pressure();
        }
    }
}
