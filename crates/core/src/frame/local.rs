//! One owner's way to a zone.

use super::map::{Part, parts};
use super::stats::Tally;
use super::zone::Zone;
use super::{Frame, FrameError, Order};

/// How many words a magazine of frames holds frames of.
const WAYS: usize = 8;

/// One owner's way to a zone: its magazine and the region that it has reserved.
///
/// The magazine holds frames as parts of words of the map, one word a way, found by the word's number. So a frame
/// that comes back is checked against the magazine at once, frames of one word go back by one compare-and-swap, and
/// a frame handed out and taken back costs no atomic read-modify-write. All goes back on drop.
#[derive(Debug)]
pub struct Local<'z> {
    zone: &'z Zone,
    ways: [Part; WAYS],
    /// The way that the next frame comes from.
    current: usize,
    /// How many ways are used, less one: a power of two less one, smaller for small zones.
    way_mask: u32,
    /// How many frames an empty magazine asks for.
    batch: u32,
    /// How far the count of frames in use may be behind.
    fold_at: u64,
    region: Option<u32>,
    slot: Option<u32>,
    pub(super) tally: Tally,
}

impl Zone {
    /// An owner's handle, for one thread of control. O(owners).
    ///
    /// Its magazine holds at most 512 frames, fewer in zones under 16 MiB; others cannot have those.
    pub fn local(&self) -> Local<'_> {
        let regions = self.regions();
        let way_mask = (regions.next_power_of_two() / 2).clamp(1, 8) - 1;
        Local {
            zone: self,
            ways: [Part::NONE; WAYS],
            current: 0,
            way_mask,
            batch: (regions * 8).min(64),
            fold_at: u64::from(self.frames() / 256).clamp(64, 4096),
            region: None,
            slot: self.enter(),
            tally: Tally::default(),
        }
    }
}

impl<'z> Local<'z> {
    /// The zone.
    pub fn zone(&self) -> &'z Zone {
        self.zone
    }

    /// How many frames lie in the magazine.
    pub fn held(&self) -> u32 {
        self.ways.iter().map(|way| way.len()).sum()
    }

    /// One run of 2^order frames, aligned to its size; single frames come from the magazine. O(1) for order 0.
    ///
    /// # Errors
    /// [`FrameError::Exhausted`], as for [`Zone::alloc`].
    #[inline]
    pub fn alloc(&mut self, order: Order) -> Result<Frame, FrameError> {
        let frame = match order.get() {
            0 => match self.ways[self.current % WAYS].pop() {
                Some(frame) => Ok(frame),
                None => self.alloc_far(),
            },
            _ => self.alloc_run_of(order),
        };
        match frame {
            Ok(_) => self.tally.allocs += u64::from(order.frames()),
            Err(_) => self.tally.exhausted += 1,
        }
        frame
    }

    /// Takes a run back, whoever handed it out; single frames go to the magazine. O(2^order / 64).
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
        }
        self.tally.frees += u64::from(order.frames());
        Ok(())
    }

    #[cold]
    fn alloc_far(&mut self) -> Result<Frame, FrameError> {
        let mut part = self.next_part(1);
        let frame = part.pop().ok_or_else(|| self.zone.exhausted(Order::PAGE))?;
        self.put_back(part);
        Ok(frame)
    }

    fn alloc_run_of(&mut self, order: Order) -> Result<Frame, FrameError> {
        let near = match order.get() {
            1..=6 => self.region.and_then(|region| self.zone.claim_order_in(region, order.get())),
            _ => None,
        };
        near.map_or_else(|| self.zone.take(order), |part| Ok(part.first()))
    }

    /// Refuses a run of which a frame lies in the magazine.
    fn refuse_held(&self, first: Frame, run: u32) -> Result<(), FrameError> {
        self.zone.check(first, run)?;
        for part in parts(first.index(), run) {
            for way in self.ways.iter().filter(|way| way.word == part.word) {
                let held = Part { mask: way.mask & part.mask, ..part };
                if held.mask != 0 {
                    return Err(FrameError::DoubleFree { frame: held.first() });
                }
            }
        }
        Ok(())
    }

    /// Puts frames that come back into the magazine.
    #[inline(always)]
    pub(super) fn keep(&mut self, part: Part) -> Result<(), FrameError> {
        let index = (part.word & self.way_mask) as usize;
        let way = &mut self.ways[index % WAYS];
        if way.word == part.word {
            // Free in the map, or held here: either way it was free already.
            let already = self.zone.map.free_of(part) | (way.mask & part.mask);
            if already != 0 {
                return Err(FrameError::DoubleFree { frame: Part { mask: already, ..part }.first() });
            }
            way.mask |= part.mask;
            self.current = index;
            return Ok(());
        }
        self.replace(index, part)
    }

    #[inline(never)]
    fn replace(&mut self, index: usize, part: Part) -> Result<(), FrameError> {
        let already = self.zone.map.free_of(part);
        if already != 0 {
            return Err(FrameError::DoubleFree { frame: Part { mask: already, ..part }.first() });
        }
        self.evict(index);
        self.ways[index % WAYS] = part;
        self.current = index;
        Ok(())
    }

    fn evict(&mut self, index: usize) {
        let way = &mut self.ways[index % WAYS];
        if way.mask != 0 {
            // They are ours; only a wrong free by another can have made them free, and there is nobody to tell.
            _ = self.zone.release(*way);
        }
        *way = Part::NONE;
        self.fold_if_due();
    }

    /// Frames of one word: what the magazine has, else up to `want` (but at least a batch) from the zone. What is not
    /// needed of it must be [`put_back`](Self::put_back).
    pub(super) fn next_part(&mut self, want: u32) -> Part {
        // The current way first: its frames came back last.
        for step in 0..WAYS {
            let way = &mut self.ways[(self.current + step) % WAYS];
            if way.mask != 0 {
                return core::mem::replace(way, Part::NONE);
            }
        }
        self.fold_if_due();
        self.claim(want.max(self.batch))
    }

    /// At most `want` frames of one word, from the magazine first.
    pub(super) fn take_part(&mut self, want: u32) -> Part {
        let mut part = self.next_part(want);
        let some = part.split(want);
        self.put_back(part);
        some
    }

    /// Puts frames into the magazine that were taken from it, or from the zone while it was empty.
    pub(super) fn put_back(&mut self, part: Part) {
        if part.mask == 0 {
            return;
        }
        let index = (part.word & self.way_mask) as usize;
        if self.ways[index % WAYS].word != part.word {
            self.evict(index);
            self.ways[index % WAYS] = part;
        } else {
            self.ways[index % WAYS].mask |= part.mask;
        }
        self.current = index;
    }

    /// Claims from the reserved region, and reserves another where it has nothing left.
    fn claim(&mut self, n: u32) -> Part {
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
        let (allocs, frees) = (self.tally.allocs, self.tally.frees);
        if allocs.abs_diff(frees) >= self.fold_at || allocs >= 1 << 16 {
            self.zone.counters().fold(core::mem::take(&mut self.tally));
        }
    }
}

impl Drop for Local<'_> {
    fn drop(&mut self) {
        for index in 0..WAYS {
            self.evict(index);
        }
        self.zone.counters().fold(self.tally);
        if let Some(region) = self.region {
            self.zone.ensure_visible(region);
        }
        if let Some(slot) = self.slot {
            self.zone.exit(slot);
        }
    }
}
