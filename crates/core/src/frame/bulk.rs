//! Many frames in one call.

use super::list::{FrameList, Parts};
use super::local::Local;
use super::map::Part;
use super::stats::Tally;
use super::zone::Zone;
use super::{Frame, FrameError};

/// Fills the empty slots from parts that `next` gets, which is told how many more are wanted. Returns what was asked,
/// what it got, and what is left of the last part.
#[inline(always)]
pub(super) fn fill_from(
    slots: &mut [Option<Frame>],
    mut next: impl FnMut(u32) -> Part,
) -> (usize, usize, Part) {
    let asked = slots.iter().filter(|slot| slot.is_none()).count();
    let (mut part, mut got) = (Part::NONE, 0);
    for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
        if part.mask == 0 {
            part = next(u32::try_from(asked - got).unwrap_or(u32::MAX));
        }
        *slot = part.pop();
        if slot.is_none() {
            break;
        }
        got += 1;
    }
    (asked, got, part)
}

/// Empties the full slots by parts of one word each, which `give` takes. Returns how many.
fn empty_into(
    zone: &Zone,
    slots: &mut [Option<Frame>],
    mut give: impl FnMut(Part) -> Result<(), FrameError>,
) -> (usize, Result<(), FrameError>) {
    let (mut freed, mut at) = (0, 0);
    while let Some(rest) = slots.get_mut(at..).filter(|rest| !rest.is_empty()) {
        let (part, len) = match leading_part(zone, rest) {
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
                // One of them is free already. Those before it are not to suffer for it.
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

/// The frames of one word with which `slots` begins, and how many slots those are.
fn leading_part(zone: &Zone, slots: &[Option<Frame>]) -> Result<(Part, usize), FrameError> {
    let mut part = Part::NONE;
    for (index, slot) in slots.iter().enumerate() {
        let Some(frame) = *slot else { continue };
        let one = Part::of(frame);
        if part.mask == 0 {
            zone.check(frame, 1)?;
            part = one;
        } else if one.word != part.word || one.mask & part.mask != 0 || zone.check(frame, 1).is_err() {
            return Ok((part, index));
        } else {
            part.mask |= one.mask;
        }
    }
    Ok((part, slots.len()))
}

impl Zone {
    /// Fills the empty slots only, never touches the full ones, and returns how many slots are full afterwards.
    /// Less than all is normal, and means that no more was free. O(slots), about one compare-and-swap for 64 frames.
    pub fn fill(&self, slots: &mut [Option<Frame>]) -> usize {
        let full = slots.len();
        let (asked, got, _) = fill_from(slots, |want| self.claim_some(want));
        let mut tally = Tally::default();
        tally.bulk(asked, got);
        self.counters().fold(tally);
        full - (asked - got)
    }

    /// Fills all of the empty slots, or none. Allocates a list as it goes.
    ///
    /// # Errors
    /// [`FrameError::Short`] where fewer frames are free: no slot has changed, and none is taken.
    pub fn fill_all(&self, slots: &mut [Option<Frame>]) -> Result<(), FrameError> {
        let mut tally = Tally::default();
        let (asked, result) = fill_all_from(self, slots, |want| self.claim_some(want));
        tally.bulk(asked, if result.is_ok() { asked } else { 0 });
        self.counters().fold(tally);
        result
    }

    /// A chain of `n` frames, or of as many as were free. Frames that are not taken from it go back on drop.
    pub fn take_list(&self, n: usize) -> FrameList<'_> {
        let parts = Parts::gather(n, |want| self.claim_some(want));
        let mut tally = Tally::default();
        tally.bulk(n, parts.len());
        self.counters().fold(tally);
        FrameList::new(self, parts)
    }

    /// Takes back the frames of all full slots, which are empty afterwards, and returns how many those were. Frames
    /// of one word that stand together cost one compare-and-swap.
    ///
    /// # Errors
    /// [`FrameError::Foreign`], [`FrameError::DoubleFree`]. The slot of the frame that it names, and all after it, are
    /// as they were; those before it are free and empty.
    pub fn free_bulk(&self, slots: &mut [Option<Frame>]) -> Result<usize, FrameError> {
        let (freed, result) = empty_into(self, slots, |part| self.release(part));
        self.counters().free(freed as u64);
        result.map(|()| freed)
    }
}

/// Fills all empty slots or none; also says how many those are.
fn fill_all_from(
    zone: &Zone,
    slots: &mut [Option<Frame>],
    next: impl FnMut(u32) -> Part,
) -> (usize, Result<(), FrameError>) {
    let asked = slots.iter().filter(|slot| slot.is_none()).count();
    let mut parts = Parts::gather(asked, next);
    if parts.len() < asked {
        let missing = asked - parts.len();
        parts.give_back(zone);
        return (asked, Err(FrameError::Short { asked, missing }));
    }
    for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
        *slot = parts.pop();
    }
    (asked, Ok(()))
}

impl<'z> Local<'z> {
    /// As [`Zone::fill`], from the magazine first.
    pub fn fill(&mut self, slots: &mut [Option<Frame>]) -> usize {
        let full = slots.len();
        let (asked, got, left) = fill_from(slots, |want| self.next_part(want));
        self.put_back(left);
        self.tally.bulk(asked, got);
        full - (asked - got)
    }

    /// As [`Zone::fill_all`], from the magazine first.
    ///
    /// # Errors
    /// As there.
    pub fn fill_all(&mut self, slots: &mut [Option<Frame>]) -> Result<(), FrameError> {
        let (asked, result) = fill_all_from(self.zone(), slots, |want| self.take_part(want));
        self.tally.bulk(asked, if result.is_ok() { asked } else { 0 });
        result
    }

    /// As [`Zone::take_list`], from the magazine first.
    pub fn take_list(&mut self, n: usize) -> FrameList<'z> {
        let parts = Parts::gather(n, |want| self.take_part(want));
        self.tally.bulk(n, parts.len());
        FrameList::new(self.zone(), parts)
    }

    /// As [`Zone::free_bulk`], into the magazine.
    ///
    /// # Errors
    /// As there.
    pub fn free_bulk(&mut self, slots: &mut [Option<Frame>]) -> Result<usize, FrameError> {
        let (freed, result) = empty_into(self.zone(), slots, |part| self.keep(part));
        self.tally.frees += freed as u64;
        result.map(|()| freed)
    }
}
