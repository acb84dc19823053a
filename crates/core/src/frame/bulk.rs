//! Bulk calls of [`Zone`] and [`Local`]: filling arrays, lists, and freeing arrays.

use super::counters::Tally;
use super::error::FrameError;
use super::list::{FrameList, Parts};
use super::local::Local;
use super::map::Part;
use super::number::Frame;
use super::watermark::{Allowance, Urgency};
use super::zone::{Bounds, Zone};
use core::ops::Deref;

/// The result of a fill.
struct Filled {
    /// The number of slots that were empty.
    asked: usize,
    /// How many of those are full now.
    got: usize,
    /// The rest of the last part.
    left: Part,
}

/// Fills the empty slots from the parts that `next` claims; its argument is how many frames are still wanted.
#[inline(always)]
fn fill_from(slots: &mut [Option<Frame>], mut next: impl FnMut(u32) -> Part) -> Filled {
    let asked = slots.iter().filter(|slot| slot.is_none()).count();
    let all_empty = asked == slots.len();
    let (mut part, mut got, mut rest) = (Part::NONE, 0, slots);
    while got < asked {
        if part.mask == 0 {
            part = next(u32::try_from(asked - got).unwrap_or(u32::MAX));
            if part.mask == 0 {
                break;
            }
        }
        let empty = if all_empty {
            rest.len()
        } else {
            let full = rest.iter().take_while(|slot| slot.is_some()).count();
            rest = rest.get_mut(full..).unwrap_or_default();
            rest.iter().take(64).take_while(|slot| slot.is_none()).count()
        };
        let filled = fill_slots(&mut part, rest.get_mut(..empty).unwrap_or_default());
        rest = rest.get_mut(filled..).unwrap_or_default();
        got += filled;
    }
    Filled { asked, got, left: part }
}

/// Moves the first frames of a part that are neighbours into slots, which are empty. Returns how many.
#[inline(always)]
fn fill_slots(part: &mut Part, slots: &mut [Option<Frame>]) -> usize {
    let shift = part.mask.trailing_zeros();
    let run = (part.mask >> shift).trailing_ones();
    let first = part.word * 64 + shift;
    for (slot, index) in slots.iter_mut().zip(first..first + run) {
        *slot = Frame::new(index);
    }
    let filled = run.min(u32::try_from(slots.len()).unwrap_or(u32::MAX));
    part.mask &= !((!0 >> (64 - filled)) << shift);
    filled as usize
}

/// Empties the full slots by parts of one word each, which `give` frees. Returns how many.
#[inline(always)]
fn empty_into(
    bounds: Bounds,
    slots: &mut [Option<Frame>],
    mut give: impl FnMut(Part) -> Result<(), FrameError>,
) -> (usize, Result<(), FrameError>) {
    let (mut freed, mut at) = (0, 0);
    while let Some(rest) = slots.get_mut(at..).filter(|rest| !rest.is_empty()) {
        let (part, len) = match leading_part(bounds, rest) {
            Ok(found) => found,
            Err(error) => return (freed, Err(error)),
        };
        let rest = rest.get_mut(..len).unwrap_or_default();
        if part.mask != 0 {
            match give(part) {
                Ok(()) => {
                    rest.fill(None);
                    freed += part.len() as usize;
                }
                // One of them is already free; those before it are still freed.
                Err(_) => {
                    for slot in rest {
                        if let Some(frame) = *slot {
                            if let Err(error) = give(Part::of(frame)) {
                                return (freed, Err(error));
                            }
                            *slot = None;
                            freed += 1;
                        }
                    }
                }
            }
        }
        at += len;
    }
    (freed, Ok(()))
}

/// Returns the frames of one word at the start of `slots`, and how many slots those are.
#[inline(always)]
fn leading_part(bounds: Bounds, slots: &[Option<Frame>]) -> Result<(Part, usize), FrameError> {
    if let Some(found) = leading_run(bounds, slots) {
        return Ok(found);
    }
    let mut part = Part::NONE;
    for (index, slot) in slots.iter().enumerate() {
        let Some(frame) = *slot else { continue };
        let one = Part::of(frame);
        if part.mask == 0 {
            bounds.check(frame, 1)?;
            part = one;
        } else if one.word != part.word || one.mask & part.mask != 0 || bounds.check(frame, 1).is_err() {
            return Ok((part, index));
        } else {
            part.mask |= one.mask;
        }
    }
    Ok((part, slots.len()))
}

/// Returns the rest of a word if `slots` starts with it in order, as a fill leaves it.
#[inline(always)]
fn leading_run(bounds: Bounds, slots: &[Option<Frame>]) -> Option<(Part, usize)> {
    let first = (*slots.first()?)?;
    let one = Part::of(first);
    let rest_of_word = 64 - one.mask.trailing_zeros();
    let run = u32::try_from(slots.len()).unwrap_or(u32::MAX).min(rest_of_word);
    if run < 8 || bounds.check(first, run).is_err() {
        return None;
    }
    let in_order = slots
        .iter()
        .zip(first.index()..first.index() + run)
        .fold(true, |so_far, (slot, index)| so_far & (*slot == Frame::new(index)));
    in_order.then(|| {
        let mask = (!0 >> (64 - run)) << one.mask.trailing_zeros();
        (Part { word: one.word, mask }, run as usize)
    })
}

impl Zone {
    /// Fills the empty slots, never touches the full ones, and returns how many slots are full afterwards. Fewer than all is
    /// normal: the zone has reached [`Watermarks::low`](super::Watermarks::low) or has no more free frames. O(slots), about
    /// one compare-and-swap for 64 frames.
    pub fn fill(&self, slots: &mut [Option<Frame>]) -> usize {
        self.fill_by(slots, Urgency::Normal)
    }

    /// As [`fill`](Self::fill), down to the watermark for `urgency`.
    pub fn fill_by(&self, slots: &mut [Option<Frame>], urgency: Urgency) -> usize {
        let full = slots.len();
        let mut allowance = self.allowance(urgency, 0);
        let Filled { asked, got, .. } = fill_from(slots, |want| self.claim_allowed(want, &mut allowance));
        self.count_bulk(asked, got, allowance);
        full - (asked - got)
    }

    /// Fills all empty slots or none. Allocates memory if the frames come from more than 12 words of the map.
    ///
    /// # Errors
    /// [`FrameError::Short`] if fewer frames are free above [`Watermarks::low`](super::Watermarks::low): no slot has changed
    /// and no frame is allocated.
    pub fn fill_all(&self, slots: &mut [Option<Frame>]) -> Result<(), FrameError> {
        let mut allowance = self.allowance(Urgency::Normal, 0);
        let asked = slots.iter().filter(|slot| slot.is_none()).count();
        let mut parts = Parts::gather(asked, |want| self.claim_allowed(want, &mut allowance));
        let result = fill_all_from(slots, asked, &mut parts);
        parts.release_to(self);
        self.count_bulk(asked, if result.is_ok() { asked } else { 0 }, allowance);
        result
    }

    /// Allocates a chain of `n` frames, or of as many as [`fill`](Self::fill) would get. Frames that are not taken from it
    /// are freed on drop.
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

    /// Frees the frames of all full slots, empties the slots, and returns how many those were. Neighbouring slots with frames
    /// of one word cost one compare-and-swap.
    ///
    /// # Errors
    /// [`FrameError::Foreign`], [`FrameError::DoubleFree`]. The slot of the frame that it names and all after it are
    /// unchanged; those before it are freed and empty.
    pub fn free_bulk(&self, slots: &mut [Option<Frame>]) -> Result<usize, FrameError> {
        let (freed, result) = empty_into(self.bounds(), slots, |part| {
            self.kept.refuse(part.first().index(), 1)?;
            self.release(part)
        });
        if freed > 0 {
            self.count_free(freed as u64);
        }
        result.map(|()| freed)
    }
}

/// Fills all empty slots, of which there are `asked`, or none, from frames of which there are `asked` at most.
fn fill_all_from(slots: &mut [Option<Frame>], asked: usize, parts: &mut Parts) -> Result<(), FrameError> {
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
    pub fn fill_by(&mut self, slots: &mut [Option<Frame>], urgency: Urgency) -> usize {
        let full = slots.len();
        let mut supply = Supply::new(urgency);
        let Filled { asked, got, left } = fill_from(slots, |want| supply.next(self, want));
        self.restore(left);
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
        let (freed, result) = empty_into(self.zone.bounds(), slots, |part| self.cache(part));
        self.count_frees(freed as u64);
        result.map(|()| freed)
    }
}

/// The frames of an owner's bulk call: from the magazine, then from the zone as far as the watermarks allow.
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
