//! [`Local`]: one owner's handle to a zone.

use super::counters::Tally;
use super::error::FrameError;
use super::kept::Kept;
use super::magazine::Magazine;
use super::map::Part;
use super::number::{Frame, Order};
use super::scatter::Scatter;
use super::zone::Zone;
use core::ops::Deref;

/// The most frees between two checks for pressure.
const CHECK_EVERY: u32 = 256;

/// One owner's handle to a zone: its magazine and the region that it has reserved. One per thread
/// of control.
///
/// The magazine holds frames as parts of words of the map, found by the word's number. So a freed
/// frame is checked against the magazine at once, the frames of one word return to the map by one
/// compare-and-swap, and alloc and free of one frame make no atomic read-modify-write. When the
/// magazine is full, the highest words return first, since the zone allocates low ones first: free
/// frames gather at the top and become whole regions. When it has so many words that even full it
/// would have few frames of each, as after frees in random order, all return, and frees go directly
/// to the zone until some are close together again or the owner claims frames. A freed run of 2 MiB
/// is kept whole for the next alloc of one. All frames return on drop, and when the zone is
/// [under pressure](Zone::under_pressure): an owner detects that within 256 frees, or when its
/// allocs have used up the frames of one word, by one relaxed load each. An owner that makes no
/// calls keeps its frames.
///
/// `H` is how it refers to the zone: a borrow ([`Zone::local`]) or anything else that dereferences
/// to it ([`Local::new`]), so that a program can keep it beside what owns the zone.
#[derive(Debug)]
pub struct Local<H: Deref<Target = Zone>> {
    pub(super) zone: H,
    pub(super) magazine: Magazine,
    pub(super) scatter: Scatter,
    /// Regions that were freed as a whole.
    pub(super) kept: Kept,
    /// The most frames in the magazine.
    limit: u32,
    /// How many frames an empty magazine claims.
    batch: u32,
    /// At which difference the counts are added to the zone's.
    fold_at: u64,
    /// At how many frees the owner next checks for pressure.
    pub(super) check_at: u64,
    /// At how many frees it next checks the magazine's fill. What the magazine has and the frees
    /// before that are together at most the limit.
    pub(super) trim_at: u64,
    /// Whether the fill has been checked, or never exceeds the limit.
    checked: bool,
    pub(super) region: Option<u32>,
    slot: Option<u32>,
    pub(super) tally: Tally,
    /// How many frames the owner had cached when its counts were last added to the zone's.
    held_before: i64,
}

impl Zone {
    /// Returns a new owner's handle, for one thread of control. O(owners), and it allocates its
    /// magazine: 16 bytes for each 64 frames of the zone, at most 64 KiB.
    ///
    /// The magazine holds at most 1/32 of the zone, at least 512 frames and at most 32,768 (128
    /// MiB); less in zones of up to 16 MiB. Besides, the owner keeps at most 4 runs of 2 MiB that
    /// it freed, and at most 1/32 of the zone. All of these are unavailable to other owners.
    pub fn local(&self) -> Local<&Self> {
        Local::new(self)
    }
}

impl<H: Deref<Target = Zone>> Local<H> {
    /// Creates an owner's handle from any reference to the zone; see [`Zone::local`]. The reference
    /// must always dereference to the same zone: otherwise frames of different zones are confused,
    /// and calls may panic.
    pub fn new(zone: H) -> Self {
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
            kept: Kept::new(&zone),
            limit,
            batch,
            fold_at: u64::from(zone.frames() / 256).clamp(64, 4096),
            check_at: CHECK_EVERY.min(trim_at).into(),
            trim_at: trim_at.into(),
            checked: claimed == 0,
            region: None,
            slot: zone.slots.claim(),
            tally: Tally::default(),
            held_before: 0,
            zone,
        }
    }

    /// Returns the zone.
    pub fn zone(&self) -> &Zone {
        &self.zone
    }

    /// Returns how many frames the owner has cached: in the magazine, and in runs of 2 MiB that it
    /// keeps. O(1).
    pub fn held(&self) -> u32 {
        let counted = self.held_before + self.tally.held();
        u32::try_from(counted).unwrap_or(0)
    }

    fn in_magazine(&self) -> u32 {
        self.held().saturating_sub(self.kept.frames())
    }

    /// Allocates a run of 2^order frames, aligned to its size; single frames come from the
    /// magazine, and runs of 2 MiB from those that the owner freed last. O(1) for order 0.
    ///
    /// # Errors
    /// [`FrameError::Exhausted`], as for [`Zone::alloc`]; the magazine has been flushed by then.
    #[inline]
    pub fn alloc(&mut self, order: Order) -> Result<Frame, FrameError> {
        let frame = match order.get() {
            0 => match self.magazine.pop() {
                Some(frame) => Ok(frame),
                None => self.alloc_slow(),
            },
            _ => self.alloc_run_of(order),
        };
        match frame {
            Ok(_) => self.tally.singles += u64::from(order.frames()),
            Err(_) => {
                self.tally.exhausted += 1;
                self.zone.set_under_pressure();
            }
        }
        frame
    }

    /// Frees a run, whichever owner allocated it; single frames go to the magazine. O(2^order /
    /// 64), and for single ones O(1) on average.
    ///
    /// # Errors
    /// As for [`Zone::free`]; a frame in this magazine is a [`FrameError::DoubleFree`] too.
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
        self.tally.frees += frames;
        if self.tally.frees >= self.check_at {
            self.maintain();
        }
    }

    #[cold]
    fn maintain(&mut self) {
        let slack = self.slack();
        if self.scatter.is_sparse(self.magazine.words(), self.limit) {
            self.flush_magazine();
        }
        if self.tally.frees >= self.trim_at {
            // Counted from then on: a trim may add the counts to the zone's.
            let next = self.make_room(slack);
            self.trim_at = self.tally.frees + u64::from(next);
        }
        // Not after `trim_at`: from then on the magazine may be over the limit.
        self.check_at = (self.tally.frees + u64::from(slack.min(CHECK_EVERY))).min(self.trim_at);
        self.flush_under_pressure();
        self.fold_if_due();
    }

    /// Trims the magazine if it has room for less than `slack` frames. Returns after how many frees
    /// its fill is checked next.
    fn make_room(&mut self, slack: u32) -> u32 {
        let (held, checked) = (self.in_magazine(), core::mem::replace(&mut self.checked, true));
        if held > self.limit - slack {
            if !checked && held <= self.limit {
                // The first check comes early where no claim has left anything. Later, an owner
                // whose magazine stays nearly full would check it all the time.
                return self.limit - held + 1;
            }
            // Leaves room for a quarter more, so that what is trimmed is worth a look at all words.
            self.trim(self.limit - slack - self.limit / 4);
        }
        slack
    }

    /// How many frames are freed between two looks at how many the magazine has, at most: with so
    /// many left it is full enough.
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
        let mut held = self.in_magazine();
        let mut end = usize::MAX - 1;
        while let Some(index) = self.magazine.last_full(end).filter(|_| held > keep) {
            held = held.saturating_sub(self.magazine.peek(index).len());
            self.evict(index);
            end = index;
        }
    }

    /// Releases all cached frames. Returns whether there were any.
    pub(super) fn flush(&mut self) -> bool {
        let any = self.release_kept();
        self.flush_magazine() || any
    }

    /// Releases all frames of the magazine, and forgets its words. Returns whether there were any
    /// frames.
    pub(super) fn flush_magazine(&mut self) -> bool {
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
        self.release_kept_under_pressure();
        let mut part = self.claim(self.batch_for(1));
        if part.mask == 0 && self.break_kept() {
            part = self.held_part();
        }
        let frame = part.pop().ok_or_else(|| self.zone.exhausted(Order::PAGE))?;
        self.restore(part);
        Ok(frame)
    }

    fn evict(&mut self, index: usize) {
        let part = self.magazine.take(index);
        if part.mask != 0 {
            self.tally.claimed -= i64::from(part.len());
            // Fails only after a wrong free elsewhere, which cannot be reported here.
            _ = self.zone.release(part);
        }
        self.fold_if_due();
    }

    /// How many frames to claim for `want`; no more than that under pressure.
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
        // Whether frees bypass the magazine is asked before what it has.
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
        self.tally.claimed += i64::from(part.len());
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
        let (singles, bulk, frees) = (self.tally.singles, self.tally.bulk_filled, self.tally.frees);
        let due = (singles + bulk).abs_diff(frees) >= self.fold_at
            || self.tally.claimed.unsigned_abs() >= self.fold_at
            || singles + bulk >= 1 << 16;
        if due {
            self.fold();
        }
    }

    pub(super) fn fold(&mut self) {
        self.check_at = self.check_at.saturating_sub(self.tally.frees);
        self.trim_at = self.trim_at.saturating_sub(self.tally.frees);
        self.held_before += self.tally.held();
        self.zone.fold(core::mem::take(&mut self.tally));
    }
}

impl<H: Deref<Target = Zone>> Drop for Local<H> {
    fn drop(&mut self) {
        self.flush();
        self.zone.fold(self.tally);
        if let Some(region) = self.region {
            self.zone.ensure_visible(region);
        }
        if let Some(slot) = self.slot {
            self.zone.slots.release(slot);
        }
    }
}
