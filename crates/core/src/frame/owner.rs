//! [`ZoneLocal`]: one owner's handle to a zone.

use super::counters::OwnerTally;
use super::inner::Inner;
use super::magazine::{Magazine, Scatter};
use super::map::{Part, parts};
use super::number::{AlreadyFree, Frame, FrameError, Order};
use crate::share::Stock;
use crate::sync::CachePadded;
use alloc::sync::Arc;

/// The most frees between two checks for pressure.
const CHECK_EVERY: u32 = 256;

/// One owner's handle to a zone: its magazine and the region that it has reserved. One per thread
/// of control.
///
/// The magazine holds frames as parts of words of the map, found by the word's number. So a freed
/// frame is checked against the magazine at once, the frames of one word return to the map by one
/// compare-and-swap, and alloc and free of one frame make no atomic read-modify-write. When the
/// magazine is full, the highest words return first, since the zone allocates low ones first: free
/// frames gather at the top and become whole regions. When it has too many words to hold more than
/// a few frames of each, as after frees in random order, all return, and frees go directly to the
/// zone until some are close together again or the owner claims frames. All frames return on drop,
/// and when the zone is [under pressure](super#watermarks): an owner detects that within 256 frees,
/// or when its allocs have used up the frames of one word, by one relaxed load each. An owner that
/// makes no calls keeps its frames. It keeps the zone alive.
#[derive(Debug)]
pub struct ZoneLocal {
    pub(super) zone: Stock<Inner>,
    pub(super) magazine: Magazine,
    pub(super) scatter: Scatter,
    /// The most frames in the magazine.
    limit: u32,
    /// The number of frames that an empty magazine claims.
    batch: u32,
    /// The difference at which the counts are added to the zone's.
    fold_at: u64,
    /// The number of frees at which the owner next checks for pressure.
    pub(super) check_at: u64,
    /// The number of frees at which it next checks the magazine's fill. The frames in the magazine
    /// and the frees until then are together at most the limit.
    pub(super) trim_at: u64,
    /// Whether the fill has been checked, or never exceeds the limit.
    checked: bool,
    pub(super) region: Option<u32>,
    slot: Option<u32>,
    pub(super) tally: Arc<CachePadded<OwnerTally>>,
    /// The number of frames that the owner had cached when its counts were last added to the
    /// zone's.
    held_before: i64,
}

impl ZoneLocal {
    pub(super) fn new(zone: Stock<Inner>) -> Self {
        let regions = zone.regions();
        let batch = (regions * 8).min(64);
        // Besides frees, a first claim adds up to `batch - 1` frames. Once the fill has been
        // checked, the next check is at most `slack` frees away, so that there is room for both.
        let (ways, limit, claimed) = match regions {
            // In small zones a magazine must not withhold most of the frames. It has no room for
            // more than the limit.
            ..=16 => {
                let ways = (regions.next_power_of_two() / 2).clamp(1, 8);
                (ways, ways * 64, 0)
            }
            _ => {
                let ways = (regions * 8).next_power_of_two().min(4096);
                (ways, (zone.frames() / 32).clamp(512, 32_768), batch - 1)
            }
        };
        let trim_at = limit - claimed;
        Self {
            magazine: Magazine::new(ways),
            scatter: Scatter::default(),
            limit,
            batch,
            fold_at: u64::from(zone.frames() / 256).clamp(64, 4096),
            check_at: CHECK_EVERY.min(trim_at).into(),
            trim_at: trim_at.into(),
            checked: claimed == 0,
            region: None,
            slot: zone.slots.claim(),
            tally: zone.counters.enter(),
            held_before: 0,
            zone,
        }
    }

    /// Returns how many frames the owner has cached. O(1).
    pub fn held(&self) -> u32 {
        let counted = self.held_before + self.tally.held();
        u32::try_from(counted).unwrap_or(0)
    }

    /// Allocates a run of 2^order frames, aligned to its size; single frames come from the
    /// magazine. O(1) for order 0.
    ///
    /// # Errors
    /// [`FrameError::Exhausted`], as for [`Zone::alloc`](super::Zone::alloc); the magazine has been
    /// flushed by then.
    #[inline]
    pub fn alloc(&mut self, order: Order) -> Result<Frame, FrameError> {
        if order == Order::PAGE
            && let Some(frame) = self.magazine.pop()
        {
            self.tally.singles.add(1);
            return Ok(frame);
        }
        self.alloc_elsewhere(order)
    }

    /// Like `alloc`, where the current word has no frame.
    #[inline(never)]
    fn alloc_elsewhere(&mut self, order: Order) -> Result<Frame, FrameError> {
        let frame = match order.get() {
            0 => self.alloc_slow(),
            _ => self.alloc_run_of(order),
        };
        match frame {
            Ok(_) => _ = self.tally.singles.add(order.frames().into()),
            Err(_) => {
                self.tally.exhausted.add(1);
                self.zone.set_under_pressure();
            }
        }
        frame
    }

    /// Frees a run, whichever owner allocated it; single frames go to the magazine. O(2^order /
    /// 64), and for single ones O(1) on average.
    ///
    /// # Errors
    /// As for [`Zone::free`](super::Zone::free); a frame in this magazine is a
    /// [`FrameError::DoubleFree`] too.
    #[inline]
    pub fn free(&mut self, frame: Frame, order: Order) -> Result<(), FrameError> {
        if order != Order::PAGE {
            return self.free_run_of(frame, order);
        }
        self.zone.check(frame, 1)?;
        self.cache(Part::of(frame), 1)?;
        self.count_frees(1);
        Ok(())
    }

    /// Counts freed frames, and checks now and then whether the magazine is full or the zone under
    /// pressure.
    #[inline(always)]
    pub(super) fn count_frees(&mut self, frames: u64) {
        if self.tally.frees.add(frames) >= self.check_at {
            self.maintain();
        }
    }

    #[cold]
    fn maintain(&mut self) {
        let slack = self.slack();
        if self.scatter.is_sparse(self.magazine.words(), self.limit) {
            self.flush();
        }
        if self.tally.frees.get() >= self.trim_at {
            // Counted from then on: a trim may add the counts to the zone's.
            let next = self.make_room(slack);
            self.trim_at = self.tally.frees.get() + u64::from(next);
        }
        // Not after `trim_at`: from then on the magazine may be over the limit.
        self.check_at =
            (self.tally.frees.get() + u64::from(slack.min(CHECK_EVERY))).min(self.trim_at);
        self.flush_under_pressure();
        self.fold_if_due();
    }

    /// Trims the magazine if it has room for less than `slack` frames. Returns after how many frees
    /// its fill is checked next.
    fn make_room(&mut self, slack: u32) -> u32 {
        let (held, checked) = (self.held(), core::mem::replace(&mut self.checked, true));
        if held > self.limit - slack {
            if !checked && held <= self.limit {
                // The first check comes early where no claim has left anything. Later, an owner
                // whose magazine stays nearly full would check it all the time.
                return self.limit - held + 1;
            }
            // Leaves room for a quarter more, so that a trim frees enough to repay reading all
            // words.
            self.trim(self.limit - slack - self.limit / 4);
        }
        slack
    }

    /// Returns the most frees between two checks of the magazine's fill. A magazine with that much
    /// room left is full enough.
    fn slack(&self) -> u32 {
        (self.limit / 4).min(CHECK_EVERY).max(self.limit / 16)
    }

    /// Flushes the magazine if the zone is under pressure.
    fn flush_under_pressure(&mut self) {
        if self.zone.under_pressure() && self.flush() {
            // Folded at once, so that the zone detects its recovery.
            self.fold();
        }
    }

    /// Releases the highest words until at most `keep` frames are held: the zone allocates low ones
    /// first, so high regions can become whole.
    fn trim(&mut self, keep: u32) {
        self.magazine.settle();
        let mut held = self.held();
        let mut end = usize::MAX - 1;
        while let Some(index) = self.magazine.last_full(end).filter(|_| held > keep) {
            held = held.saturating_sub(self.magazine.peek(index).len());
            self.evict(index);
            end = index;
        }
    }

    /// Releases all cached frames, and forgets their words. Returns whether there were any frames.
    pub(super) fn flush(&mut self) -> bool {
        let (mut from, mut any) = (0, false);
        while let Some(index) = self.magazine.next_way(from) {
            any |= self.magazine.peek(index).mask != 0;
            self.evict(index);
            from = index + 1;
        }
        any
    }

    #[cold]
    fn alloc_slow(&mut self) -> Result<Frame, FrameError> {
        if self.magazine.seek() {
            let frame = self.magazine.pop().ok_or_else(|| self.zone.exhausted(Order::PAGE));
            self.flush_under_pressure();
            self.fold_if_due();
            return frame;
        }
        let mut part = self.claim(self.batch_for(1));
        let frame = part.pop().ok_or_else(|| self.zone.exhausted(Order::PAGE))?;
        self.restore(part);
        Ok(frame)
    }

    fn evict(&mut self, index: usize) {
        let part = self.magazine.take(index);
        if part.mask != 0 {
            self.tally.claimed.sub(part.len().into());
            // Fails only after a wrong free elsewhere, which cannot be reported here.
            _ = self.zone.release(part);
        }
        self.fold_if_due();
    }

    /// Returns how many frames to claim for `want`; under pressure, only those.
    pub(super) fn batch_for(&self, want: u32) -> u32 {
        if self.zone.under_pressure() { want } else { want.max(self.batch) }
    }

    /// Takes the frames of one word from the magazine.
    #[inline(always)]
    pub(super) fn held_part(&mut self) -> Part {
        self.magazine.take_any()
    }

    /// Puts frames from the magazine or the zone into the magazine.
    pub(super) fn restore(&mut self, part: Part) {
        if part.mask == 0 {
            return;
        }
        // Whether frees bypass the magazine is checked before its contents.
        self.scatter.end();
        let index = self.magazine.index_of(part.word);
        let way = self.magazine.peek(index);
        if way.mask != 0 && way.word != part.word {
            self.evict(index);
        }
        self.magazine.put(part);
    }

    /// Claims from the reserved region, and reserves another when it has none left.
    pub(super) fn claim(&mut self, n: u32) -> Part {
        self.fold_if_due();
        let part = self.claim_near(n);
        self.tally.claimed.add(part.len().into());
        part
    }

    fn claim_near(&mut self, n: u32) -> Part {
        self.scatter.end();
        loop {
            if let Some(region) = self.region {
                if let Some(part) = self.zone.claim_in(region, n) {
                    return part;
                }
                // Frames may have been freed in it since the claim.
                self.zone.leave_full(region);
            }
            self.region = self.slot.and_then(|slot| self.zone.reserve(slot));
            if self.region.is_none() {
                return self.zone.claim_some(n);
            }
        }
    }

    pub(super) fn fold_if_due(&mut self) {
        let tally = &self.tally;
        let (singles, bulk, frees) =
            (tally.singles.get(), tally.bulk_filled.get(), tally.frees.get());
        let due = (singles + bulk).abs_diff(frees) >= self.fold_at
            || tally.claimed.get().cast_signed().unsigned_abs() >= self.fold_at
            || singles + bulk >= 1 << 16;
        if due {
            self.fold();
        }
    }

    pub(super) fn fold(&mut self) {
        let counted = self.tally.take_frames();
        self.check_at = self.check_at.saturating_sub(counted.frees);
        self.trim_at = self.trim_at.saturating_sub(counted.frees);
        self.held_before += counted.held();
        self.zone.fold(counted);
    }
}

/// Freed frames on their way into the magazine, or past it.
impl ZoneLocal {
    /// Puts freed frames of one word into the magazine; `frames` is how many.
    #[inline(always)]
    pub(super) fn cache(&mut self, part: Part, frames: u32) -> Result<(), AlreadyFree> {
        let current = self.magazine.current();
        if part.word == current.word && current.mask != 0 {
            let already = self.zone.map.free_of(part) | (current.mask & part.mask);
            if already == 0 {
                self.magazine.add_current(part.mask);
                return Ok(());
            }
        }
        self.cache_elsewhere(part, frames)
    }

    /// Like `cache`, for any word. First what frees in random order need.
    #[inline(never)]
    fn cache_elsewhere(&mut self, part: Part, frames: u32) -> Result<(), AlreadyFree> {
        if self.scatter.bypasses() {
            return self.bypass(part, frames);
        }
        let free = self.zone.map.free_of(part);
        if self.magazine.add_elsewhere(part, free) { Ok(()) } else { self.cache_rest(part, frames) }
    }

    /// Like `cache`, for what is left.
    #[inline(never)]
    fn cache_rest(&mut self, part: Part, frames: u32) -> Result<(), AlreadyFree> {
        let Some(held) = self.magazine.held_of(part.word) else {
            return self.cache_new(part, frames);
        };
        if self.is_free(part, held) {
            return Err(self.already_free(part, held));
        }
        self.magazine.add(part);
        Ok(())
    }

    /// Whether one of these frames is free: in the map, or among those `held` of its word in the
    /// magazine.
    #[inline(always)]
    fn is_free(&self, part: Part, held: u64) -> bool {
        self.zone.free_of(part) | (held & part.mask) != 0
    }

    /// Returns the first of these frames that is free.
    #[cold]
    fn already_free(&self, part: Part, held: u64) -> AlreadyFree {
        let mask = self.zone.map.free_of(part) | (held & part.mask);
        AlreadyFree(Part { mask, ..part }.first())
    }

    /// Like `cache`, where the word has no way.
    #[inline(never)]
    fn cache_new(&mut self, part: Part, frames: u32) -> Result<(), AlreadyFree> {
        if self.is_free(part, 0) {
            return Err(self.already_free(part, 0));
        }
        if self.zone.under_pressure() {
            self.flush();
            self.zone.release(part)?;
            self.tally.claimed.sub(frames.into());
            // Folded at once, so that the zone detects its recovery.
            self.fold();
            return Ok(());
        }
        let evicted = self.magazine.peek(self.magazine.index_of(part.word)).mask;
        self.restore(part);
        if evicted != 0 && self.scatter.note_evicted(evicted.count_ones()) {
            self.flush();
        }
        Ok(())
    }

    /// Frees frames in the map, while the magazine is empty.
    #[inline(never)]
    fn bypass(&mut self, part: Part, frames: u32) -> Result<(), AlreadyFree> {
        debug_assert!(self.magazine.is_blank(), "frees bypass a magazine with frames");
        if frames != 1 || self.zone.under_pressure() {
            return self.bypass_many(part, frames);
        }
        let free = self.zone.release_bits(part)?;
        self.tally.claimed.sub(1);
        self.scatter.note_bypassed(part.word, self.tally.frees.get());
        self.zone.note_released_at_random(part, free);
        Ok(())
    }

    #[inline(never)]
    fn bypass_many(&mut self, part: Part, frames: u32) -> Result<(), AlreadyFree> {
        if self.scatter.is_dense(frames) || self.zone.under_pressure() {
            return self.cache_new(part, frames);
        }
        self.zone.release(part)?;
        self.tally.claimed.sub(frames.into());
        Ok(())
    }
}

/// Runs, which go past the magazine.
impl ZoneLocal {
    pub(super) fn alloc_run_of(&mut self, order: Order) -> Result<Frame, FrameError> {
        self.fold_if_due();
        let near = match order.get() {
            1..=6 => self.region.and_then(|region| self.zone.claim_order_in(region, order.get())),
            _ => None,
        };
        let found = match near {
            Some(part) => Ok(part.first()),
            None => self.zone.alloc_uncounted(order).or_else(|error| {
                if self.flush() { self.zone.alloc_uncounted(order) } else { Err(error) }
            }),
        };
        if found.is_ok() {
            self.tally.claimed.add(order.frames().into());
        }
        found
    }

    pub(super) fn free_run_of(&mut self, frame: Frame, order: Order) -> Result<(), FrameError> {
        self.refuse_held(frame, order.frames())?;
        self.zone.free_run_of(frame, order)?;
        self.tally.claimed.sub(order.frames().into());
        // The magazine is as full as before, so the next free into it is soon enough to check that.
        self.tally.frees.add(order.frames().into());
        self.flush_under_pressure();
        self.fold_if_due();
        Ok(())
    }

    /// Refuses a run that has a frame in the magazine.
    fn refuse_held(&self, first: Frame, run: u32) -> Result<(), FrameError> {
        self.zone.check(first, run)?;
        for part in parts(first.index(), run) {
            let mask = self.magazine.held_of(part.word).unwrap_or(0) & part.mask;
            if mask != 0 {
                return Err(FrameError::DoubleFree { frame: Part { mask, ..part }.first() });
            }
        }
        Ok(())
    }
}

impl Drop for ZoneLocal {
    fn drop(&mut self) {
        self.flush();
        self.zone.end_owner(&self.tally);
        if let Some(region) = self.region {
            self.zone.ensure_visible(region);
        }
        if let Some(slot) = self.slot {
            self.zone.slots.release(slot);
        }
    }
}
