//! Bulk calls of [`Zone`] and [`Local`]: filling arrays, lists, and freeing arrays.

use super::arrays::{Filled, empty_into, fill_from};
use super::counters::Tally;
use super::error::FrameError;
use super::list::{FrameList, Parts};
use super::local::Local;
use super::map::Part;
use super::number::Frame;
use super::watermark::{Allowance, Urgency};
use super::zone::Zone;
use core::ops::Deref;

impl Zone {
    /// Fills the empty slots, never touches the full ones, and returns how many slots are full
    /// afterwards. Fewer than all is normal: the zone has reached
    /// [`Watermarks::low`](super::Watermarks::low) or has no more free frames. O(slots), about one
    /// compare-and-swap for 64 frames.
    pub fn fill(&self, slots: &mut [Option<Frame>]) -> usize {
        self.fill_by(slots, Urgency::Normal)
    }

    /// As [`fill`](Self::fill), down to the watermark for `urgency`.
    pub fn fill_by(&self, slots: &mut [Option<Frame>], urgency: Urgency) -> usize {
        let full = slots.len();
        let mut allowance = self.allowance(urgency, 0);
        let Filled { asked, got, .. } =
            fill_from(slots, |want| self.claim_allowed(want, &mut allowance));
        self.count_bulk(asked, got, allowance);
        full - (asked - got)
    }

    /// Fills all empty slots or none. Allocates memory if the frames come from more than 12 words
    /// of the map.
    ///
    /// # Errors
    /// [`FrameError::Short`] if fewer frames are free above
    /// [`Watermarks::low`](super::Watermarks::low): no slot has changed and no frame is allocated.
    pub fn fill_all(&self, slots: &mut [Option<Frame>]) -> Result<(), FrameError> {
        let mut allowance = self.allowance(Urgency::Normal, 0);
        let asked = slots.iter().filter(|slot| slot.is_none()).count();
        let mut parts = Parts::gather(asked, |want| self.claim_allowed(want, &mut allowance));
        let result = fill_all_from(slots, asked, &mut parts);
        parts.release_to(self);
        self.count_bulk(asked, if result.is_ok() { asked } else { 0 }, allowance);
        result
    }

    /// Allocates a chain of `n` frames, or of as many as [`fill`](Self::fill) would get. Frames
    /// that are not taken from it are freed on drop.
    pub fn take_list(&self, n: usize) -> FrameList<&Self> {
        let mut allowance = self.allowance(Urgency::Normal, 0);
        let parts = Parts::gather(n, |want| self.claim_allowed(want, &mut allowance));
        self.count_bulk(n, parts.len(), allowance);
        FrameList::new(self, parts)
    }

    fn count_bulk(&self, asked: usize, got: usize, allowance: Allowance) {
        let mut tally = Tally::default();
        tally.bulk(asked, got, allowance.fell_back);
        // Without an owner nothing is in a magazine.
        tally.claimed = got as i64;
        self.fold(tally);
    }

    /// Frees the frames of all full slots, empties the slots, and returns how many those were.
    /// Neighbouring slots with frames of one word cost one compare-and-swap.
    ///
    /// # Errors
    /// [`FrameError::Foreign`], [`FrameError::DoubleFree`]. The slot of the frame that it names and
    /// all after it are unchanged; those before it are freed and empty.
    pub fn free_bulk(&self, slots: &mut [Option<Frame>]) -> Result<usize, FrameError> {
        let (freed, result) = empty_into(self.bounds(), slots, |part, _| {
            self.refuse_kept(part)?;
            self.release(part)
        });
        if freed > 0 {
            self.count_free(freed as u64);
        }
        result.map(|()| freed)
    }
}

/// Fills all empty slots, of which there are `asked`, or none, from frames of which there are
/// `asked` at most.
fn fill_all_from(
    slots: &mut [Option<Frame>],
    asked: usize,
    parts: &mut Parts,
) -> Result<(), FrameError> {
    if parts.len() < asked {
        return Err(FrameError::Short { asked, missing: asked - parts.len() });
    }
    fill_from(slots, |_| parts.pop_part());
    Ok(())
}

impl<H: Deref<Target = Zone>> Local<H> {
    /// As [`Zone::fill`], from the magazine first: watermarks apply to the rest.
    pub fn fill(&mut self, slots: &mut [Option<Frame>]) -> usize {
        self.fill_by(slots, Urgency::Normal)
    }

    /// As [`Zone::fill_by`], from the magazine first: watermarks apply to the rest.
    #[inline]
    pub fn fill_by(&mut self, slots: &mut [Option<Frame>], urgency: Urgency) -> usize {
        let full = slots.len();
        let mut supply = Supply::new(urgency);
        let Filled { asked, got, left } = fill_from(slots, |want| supply.next(self, want));
        if left.mask != 0 {
            self.restore(left);
        }
        self.tally.bulk(asked, got, supply.fell_back());
        self.after_bulk(got < asked);
        full - (asked - got)
    }

    /// As [`Zone::fill_all`], from the magazine first.
    ///
    /// # Errors
    /// As for [`Zone::fill_all`].
    pub fn fill_all(&mut self, slots: &mut [Option<Frame>]) -> Result<(), FrameError> {
        let mut supply = Supply::new(Urgency::Normal);
        let asked = slots.iter().filter(|slot| slot.is_none()).count();
        let mut parts = Parts::gather(asked, |want| supply.next_exactly(self, want));
        let result = fill_all_from(slots, asked, &mut parts);
        self.tally.claimed -= parts.len() as i64;
        parts.release_to(&self.zone);
        self.tally.bulk(asked, if result.is_ok() { asked } else { 0 }, supply.fell_back());
        self.after_bulk(result.is_err());
        result
    }

    /// As [`Zone::take_list`], from the magazine first.
    pub fn take_list(&mut self, n: usize) -> FrameList<H>
    where
        H: Clone,
    {
        let mut supply = Supply::new(Urgency::Normal);
        let parts = Parts::gather(n, |want| supply.next_exactly(self, want));
        self.tally.bulk(n, parts.len(), supply.fell_back());
        self.after_bulk(parts.len() < n);
        FrameList::new(self.zone.clone(), parts)
    }

    /// Sets the zone under pressure after a call that reached a watermark.
    fn after_bulk(&self, short: bool) {
        if short {
            self.zone.set_under_pressure();
        }
    }

    /// As [`Zone::free_bulk`], into the magazine.
    ///
    /// # Errors
    /// As for [`Zone::free_bulk`].
    pub fn free_bulk(&mut self, slots: &mut [Option<Frame>]) -> Result<usize, FrameError> {
        let (freed, result) =
            empty_into(self.zone.bounds(), slots, |part, frames| self.cache(part, frames));
        self.count_frees(freed as u64);
        result.map(|()| freed)
    }
}

/// The frames of an owner's bulk call: from the magazine, then from the zone as far as the
/// watermarks allow.
struct Supply {
    urgency: Urgency,
    /// Computed when the magazine is empty; most calls need none.
    allowance: Option<Allowance>,
}

impl Supply {
    fn new(urgency: Urgency) -> Self {
        Self { urgency, allowance: None }
    }

    fn fell_back(&self) -> bool {
        self.allowance.is_some_and(|allowance| allowance.fell_back)
    }

    #[inline(always)]
    fn next(&mut self, local: &mut Local<impl Deref<Target = Zone>>, want: u32) -> Part {
        let held = local.held_part();
        if held.mask != 0 { held } else { self.claim(local, want) }
    }

    /// At most `want` frames.
    fn next_exactly(&mut self, local: &mut Local<impl Deref<Target = Zone>>, want: u32) -> Part {
        let mut part = self.next(local, want);
        let some = part.split(want);
        local.restore(part);
        some
    }

    fn claim(&mut self, local: &mut Local<impl Deref<Target = Zone>>, want: u32) -> Part {
        local.release_kept_under_pressure();
        let new = || local.zone.allowance(self.urgency, local.tally.claimed);
        let allowance = self.allowance.get_or_insert_with(new);
        let part = match allowance.of(local.batch_for(want)) {
            0 => Part::NONE,
            n => local.claim(n),
        };
        allowance.spend(part.len());
        // What the owner keeps as runs is its own, like the magazine.
        if part.mask == 0 && local.break_kept() { local.held_part() } else { part }
    }
}
