//! One owner's way to a zone.

use super::counters::Tally;
use super::error::FrameError;
use super::magazine::Magazine;
use super::map::{Part, parts};
use super::number::{Frame, Order};
use super::zone::Zone;
use core::ops::Deref;

/// How many frees, at most, lie between two looks at whether the zone has run short.
const LOOK: u64 = 256;

/// One owner's way to a zone: its magazine and the region that it has reserved.
///
/// The magazine holds frames as parts of words of the map, found by the word's number. So a frame that comes back is
/// checked against the magazine at once, frames of one word go back by one compare-and-swap, and a frame handed out
/// and taken back costs no atomic read-modify-write. Frames that come back in any order gather there until their
/// words are worth it: when the magazine is full, the highest words go back first, since the zone
/// hands out low ones first: so what is free gathers at the top and becomes whole. All goes back on
/// drop, and after the zone has run short ([`Zone::pressed`]): an owner that works sees that within 256 frees, or when
/// its allocs have used up the frames of one word of the map, by one relaxed load each. An owner that makes no calls
/// keeps what it has.
///
/// `H` is how it refers to the zone: a borrow ([`Zone::local`]) or anything else that dereferences to it
/// ([`Local::new`]), so that a program can keep it beside what owns the zone.
#[derive(Debug)]
pub struct Local<H: Deref<Target = Zone>> {
    pub(super) zone: H,
    magazine: Magazine,
    /// How many frames the magazine may hold.
    limit: u32,
    /// How many frames an empty magazine asks for.
    batch: u32,
    /// How far the count of frames in use may be behind.
    fold_at: u64,
    /// At how many frees the owner looks again at whether the zone has run short ...
    look_at: u64,
    /// ... and at how full the magazine is: before that it cannot be over its limit.
    trim_at: u64,
    region: Option<u32>,
    slot: Option<u32>,
    pub(super) tally: Tally,
}

impl Zone {
    /// An owner's handle, for one thread of control. O(owners), and it allocates its magazine: 16 bytes for each 64
    /// frames of the zone, at most 64 KiB.
    ///
    /// The magazine holds at most 1/32 of the zone, but 512 frames in any case and 32,768 (128 MiB) at most; less in
    /// zones under 16 MiB. Others cannot have those.
    pub fn local(&self) -> Local<&Self> {
        Local::new(self)
    }
}

impl<H: Deref<Target = Zone>> Local<H> {
    /// The same for a handle to the zone that is not a borrow. It must always dereference to the same zone: otherwise
    /// frames are mixed up between zones, and calls may panic.
    pub fn new(zone: H) -> Self {
        let regions = zone.regions();
        // In small zones few frames may be kept from the others.
        let (ways, limit) = match regions {
            ..=16 => {
                let ways = (regions.next_power_of_two() / 2).clamp(1, 8);
                (ways, ways * 64)
            }
            _ => ((regions * 8).next_power_of_two().min(4096), (zone.frames() / 32).clamp(512, 32_768)),
        };
        Self {
            magazine: Magazine::new(ways),
            limit,
            batch: (regions * 8).min(64),
            fold_at: u64::from(zone.frames() / 256).clamp(64, 4096),
            look_at: LOOK.min(limit.into()),
            trim_at: limit.into(),
            region: None,
            slot: zone.slots.claim(),
            tally: Tally::default(),
            zone,
        }
    }

    /// Returns the zone.
    pub fn zone(&self) -> &Zone {
        &self.zone
    }

    /// How many frames lie in the magazine. O(words that it has frames of).
    pub fn held(&self) -> u32 {
        self.magazine.held()
    }

    /// One run of 2^order frames, aligned to its size; single frames come from the magazine. O(1) for order 0.
    ///
    /// # Errors
    /// [`FrameError::Exhausted`], as for [`Zone::alloc`]; the magazine has been given back by then.
    #[inline]
    pub fn alloc(&mut self, order: Order) -> Result<Frame, FrameError> {
        let frame = match order.get() {
            0 => match self.magazine.pop() {
                Some(frame) => Ok(frame),
                None => self.alloc_far(),
            },
            _ => self.alloc_run_of(order),
        };
        match frame {
            Ok(_) => self.tally.singles += u64::from(order.frames()),
            Err(_) => {
                self.tally.exhausted += 1;
                self.zone.press();
            }
        }
        frame
    }

    /// Takes a run back, whoever handed it out; single frames go to the magazine. O(2^order / 64), and for single
    /// ones O(1) on average.
    ///
    /// # Errors
    /// As for [`Zone::free`]; a frame that lies in this magazine is a [`FrameError::DoubleFree`] too.
    #[inline]
    pub fn free(&mut self, frame: Frame, order: Order) -> Result<(), FrameError> {
        if order == Order::PAGE {
            self.zone.check(frame, 1)?;
            self.keep(Part::of(frame))?;
        } else {
            self.refuse_held(frame, order.frames())?;
            self.zone.give(frame, order)?;
            self.tally.claimed -= i64::from(order.frames());
        }
        self.count_frees(order.frames().into());
        Ok(())
    }

    /// Counts frames that came back, and looks after the magazine when it may be full or the zone short.
    #[inline(always)]
    pub(super) fn count_frees(&mut self, frames: u64) {
        self.tally.frees += frames;
        if self.tally.frees >= self.look_at {
            self.look_after();
        }
    }

    #[cold]
    fn look_after(&mut self) {
        let quarter = u64::from(self.limit / 4).max(1);
        if self.tally.frees >= self.trim_at {
            // Room for a quarter at least, or it would have to be looked after with each free.
            if self.held() > self.limit / 4 * 3 {
                self.trim(self.limit / 2);
            }
            self.trim_at = self.tally.frees + quarter;
        }
        self.look_at = self.tally.frees + quarter.min(LOOK);
        self.give_back_if_pressed();
        self.fold_if_due();
    }

    /// Gives the magazine back where the zone has run short.
    fn give_back_if_pressed(&mut self) {
        if self.zone.pressed() && self.give_all_back() {
            // Told at once, or the zone would not know that the need is over.
            self.fold();
        }
    }

    /// Gives back the highest words until at most `keep` frames are held: the zone hands out low ones first, so what is
    /// high is left to become whole.
    fn trim(&mut self, keep: u32) {
        let mut held = self.magazine.held();
        let mut end = usize::MAX;
        while let Some(index) = self.magazine.last_used(end).filter(|_| held > keep) {
            held -= self.magazine.peek(index).len();
            self.evict(index);
            end = index;
        }
    }

    /// Gives all frames of the magazine back. Returns whether there were any.
    fn give_all_back(&mut self) -> bool {
        let (mut from, mut any) = (0, false);
        while let Some(index) = self.magazine.next_used(from) {
            self.evict(index);
            (from, any) = (index + 1, true);
        }
        any
    }

    #[cold]
    fn alloc_far(&mut self) -> Result<Frame, FrameError> {
        if self.magazine.seek() {
            let frame = self.magazine.pop().ok_or_else(|| self.zone.exhausted(Order::PAGE));
            self.give_back_if_pressed();
            return frame;
        }
        let mut part = self.claim(self.batch_for(1));
        let frame = part.pop().ok_or_else(|| self.zone.exhausted(Order::PAGE))?;
        self.put_back(part);
        Ok(frame)
    }

    fn alloc_run_of(&mut self, order: Order) -> Result<Frame, FrameError> {
        let near = match order.get() {
            1..=6 => self.region.and_then(|region| self.zone.claim_order_in(region, order.get())),
            _ => None,
        };
        let found = match near {
            Some(part) => Ok(part.first()),
            None => self
                .zone
                .take(order)
                .or_else(|error| if self.give_all_back() { self.zone.take(order) } else { Err(error) }),
        };
        if found.is_ok() {
            self.tally.claimed += i64::from(order.frames());
        }
        found
    }

    /// Refuses a run of which a frame lies in the magazine.
    fn refuse_held(&self, first: Frame, run: u32) -> Result<(), FrameError> {
        self.zone.check(first, run)?;
        for part in parts(first.index(), run) {
            let way = self.magazine.peek(self.magazine.index_of(part.word));
            let held = Part { mask: way.mask & part.mask, ..part };
            if way.word == part.word && held.mask != 0 {
                return Err(FrameError::DoubleFree { frame: held.first() });
            }
        }
        Ok(())
    }

    /// Puts frames that come back into the magazine.
    #[inline(always)]
    pub(super) fn keep(&mut self, part: Part) -> Result<(), FrameError> {
        if let Some(held) = self.magazine.held_of(part.word) {
            // Free in the map, or held here: either way it was free already.
            let already = self.zone.map.free_of(part) | (held & part.mask);
            if already != 0 {
                return Err(FrameError::DoubleFree { frame: Part { mask: already, ..part }.first() });
            }
            self.magazine.add(part);
            return Ok(());
        }
        self.keep_far(part)
    }

    #[inline(never)]
    fn keep_far(&mut self, part: Part) -> Result<(), FrameError> {
        let already = self.zone.map.free_of(part);
        if already != 0 {
            return Err(FrameError::DoubleFree { frame: Part { mask: already, ..part }.first() });
        }
        if self.zone.pressed() {
            self.give_all_back();
            self.zone.release(part)?;
            self.tally.claimed -= i64::from(part.len());
            // Told at once, or nobody would know that the need is over.
            self.fold();
            return Ok(());
        }
        self.put_back(part);
        Ok(())
    }

    fn evict(&mut self, index: usize) {
        let part = self.magazine.take(index);
        if part.mask != 0 {
            self.tally.claimed -= i64::from(part.len());
            // They are ours; only a wrong free by another can have made them free, and there is nobody to tell.
            _ = self.zone.release(part);
        }
        self.fold_if_due();
    }

    /// How many frames to claim where `want` are wanted; no more than that while the zone runs short.
    pub(super) fn batch_for(&self, want: u32) -> u32 {
        if self.zone.pressed() { want } else { want.max(self.batch) }
    }

    /// Frames of one word that the magazine has.
    #[inline(always)]
    pub(super) fn held_part(&mut self) -> Part {
        self.magazine.take_any()
    }

    /// Puts frames into the magazine that were taken from it or from the zone.
    pub(super) fn put_back(&mut self, part: Part) {
        if part.mask == 0 {
            return;
        }
        if self.magazine.held_of(part.word).is_some() {
            self.magazine.add(part);
        } else {
            self.evict(self.magazine.index_of(part.word));
            self.magazine.put(part);
        }
    }

    /// Claims from the reserved region, and reserves another where it has nothing left.
    pub(super) fn claim(&mut self, n: u32) -> Part {
        self.fold_if_due();
        let part = self.claim_near(n);
        self.tally.claimed += i64::from(part.len());
        part
    }

    fn claim_near(&mut self, n: u32) -> Part {
        loop {
            if let Some(region) = self.region {
                if let Some(part) = self.zone.claim_in(region, n) {
                    return part;
                }
                // It may have got frames back between the claim and now.
                self.zone.ensure_visible(region);
            }
            self.region = self.slot.and_then(|slot| self.zone.reserve(slot));
            if self.region.is_none() {
                return self.zone.claim_some(n);
            }
        }
    }

    fn fold_if_due(&mut self) {
        let (singles, bulk, frees) = (self.tally.singles, self.tally.bulk_filled, self.tally.frees);
        let due = (singles + bulk).abs_diff(frees) >= self.fold_at
            || self.tally.claimed.unsigned_abs() >= self.fold_at
            || singles + bulk >= 1 << 16;
        if due {
            self.fold();
        }
    }

    fn fold(&mut self) {
        self.look_at = self.look_at.saturating_sub(self.tally.frees);
        self.trim_at = self.trim_at.saturating_sub(self.tally.frees);
        self.zone.fold(core::mem::take(&mut self.tally));
    }
}

impl<H: Deref<Target = Zone>> Drop for Local<H> {
    fn drop(&mut self) {
        self.give_all_back();
        self.zone.fold(self.tally);
        if let Some(region) = self.region {
            self.zone.ensure_visible(region);
        }
        if let Some(slot) = self.slot {
            self.zone.slots.release(slot);
        }
    }
}
