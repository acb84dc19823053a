//! Bulk calls of owners: filling arrays, lists, and freeing arrays.

use super::arrays::{Filled, empty_into, fill_from};
use super::counters::{Allowance, Urgency};
use super::inner::Inner;
use super::map::Part;
use super::number::{Frame, FrameError};
use super::owner::ZoneLocal;
use crate::share::Shared;
use alloc::vec::Vec;

/// Fills all empty slots, of which there are `asked`, or none, from frames of which there are
/// `asked` at most, and which leave `low` free.
fn fill_all_from(
    slots: &mut [Option<Frame>],
    asked: usize,
    parts: &mut Parts,
    low: u32,
) -> Result<(), FrameError> {
    if parts.no_room {
        let bytes = parts.far.len().saturating_add(1).saturating_mul(size_of::<Part>());
        return Err(FrameError::NoMemory { bytes });
    }
    if parts.len() < asked {
        return Err(FrameError::Short { asked, missing: asked - parts.len(), low });
    }
    fill_from(slots, |_| parts.pop_part());
    Ok(())
}

impl ZoneLocal {
    /// Fills the empty slots, never touches the full ones, and returns how many slots are full
    /// afterwards. Fewer than all is normal: the zone has reached
    /// the watermark *low* or has no more free frames. O(slots), about one
    /// compare-and-swap for 64 frames.
    ///
    /// Frames come from the magazine first; the watermarks apply to the rest, as in all bulk calls.
    pub fn fill(&mut self, slots: &mut [Option<Frame>]) -> usize {
        self.fill_by(slots, Urgency::Normal)
    }

    /// Like [`fill`](Self::fill), down to the watermark for `urgency`.
    #[inline]
    pub fn fill_by(&mut self, slots: &mut [Option<Frame>], urgency: Urgency) -> usize {
        let full = slots.len();
        let mut supply = Supply::new(urgency);
        let Filled { asked, got, left } = fill_from(slots, |want| supply.next(self, want));
        if left.mask != 0 {
            self.restore(left);
        }
        self.tally.bulk(asked, got, supply.fell_back());
        self.after_bulk(got < asked || supply.fell_back());
        full - (asked - got)
    }

    /// Fills all empty slots or none. Allocates memory if the frames come from more than 12 words
    /// of the map.
    ///
    /// # Errors
    /// [`FrameError::Short`] if fewer frames are free above the watermark *low*;
    /// [`FrameError::NoMemory`]. No slot has changed then, and no frame is allocated.
    pub fn fill_all(&mut self, slots: &mut [Option<Frame>]) -> Result<(), FrameError> {
        let mut supply = Supply::new(Urgency::Normal);
        let asked = slots.iter().filter(|slot| slot.is_none()).count();
        let mut parts = Parts::gather(asked, |want| supply.next_exactly(self, want));
        let low = self.zone.watermarks.low();
        let result = fill_all_from(slots, asked, &mut parts, low);
        self.tally.claimed.sub(parts.len() as u64);
        parts.release_to(&self.zone);
        self.tally.bulk(asked, if result.is_ok() { asked } else { 0 }, supply.fell_back());
        self.after_bulk(result.is_err() || supply.fell_back());
        result
    }

    /// Allocates a chain of `n` frames, or of as many as [`fill`](Self::fill) would get, or as there
    /// is memory to list. Frames that are not taken from it are freed on drop.
    pub fn take_list(&mut self, n: usize) -> FrameList {
        let mut supply = Supply::new(Urgency::Normal);
        let parts = Parts::gather(n, |want| supply.next_exactly(self, want));
        self.tally.bulk(n, parts.len(), supply.fell_back());
        self.after_bulk(parts.len() < n || supply.fell_back());
        FrameList::new(self.zone.issue(), parts)
    }

    /// Sets the zone under pressure after a call that got less than it asked for, or reached a
    /// watermark.
    fn after_bulk(&self, short: bool) {
        if short {
            self.zone.set_under_pressure();
        }
    }

    /// Frees the frames of all full slots into the magazine, empties the slots, and returns how many
    /// those were. Neighbouring slots with frames of one word are freed together.
    ///
    /// # Errors
    /// [`FrameError::Foreign`], [`FrameError::DoubleFree`]. The slot of the frame that it names and
    /// all after it are unchanged; those before it are freed and empty.
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
    fn next(&mut self, local: &mut ZoneLocal, want: u32) -> Part {
        let held = local.held_part();
        if held.mask != 0 { held } else { self.claim(local, want) }
    }

    /// At most `want` frames.
    fn next_exactly(&mut self, local: &mut ZoneLocal, want: u32) -> Part {
        let mut part = self.next(local, want);
        let some = part.split(want);
        local.restore(part);
        some
    }

    fn claim(&mut self, local: &mut ZoneLocal, want: u32) -> Part {
        let unknown = local.tally.claimed.get().cast_signed();
        let new = || local.zone.allowance(self.urgency, want as usize, unknown);
        let allowance = self.allowance.get_or_insert_with(new);
        let part = match allowance.of(local.batch_for(want)) {
            0 => Part::NONE,
            n => local.claim(n),
        };
        allowance.spend(part.len());
        part
    }
}

/// The number of words stored inline; more need an allocation. Sufficient for 512 frames of a fresh
/// zone.
const NEAR: usize = 12;

/// Claimed frames, as parts of words; not counted in the statistics.
#[derive(Debug)]
pub(super) struct Parts {
    near: [Part; NEAR],
    near_len: usize,
    far: Vec<Part>,
    len: usize,
    /// Whether there was no memory for all that were wanted.
    no_room: bool,
}

impl Parts {
    /// Claims `n` frames by `next`, or as many as it has, or as there is memory to list; `next` never
    /// returns more than requested.
    pub(super) fn gather(n: usize, mut next: impl FnMut(u32) -> Part) -> Self {
        let mut all =
            Self { near: [Part::NONE; NEAR], near_len: 0, far: Vec::new(), len: 0, no_room: false };
        while all.len < n {
            // Before a part is claimed.
            if all.near_len == NEAR && all.far.try_reserve(1).is_err() {
                all.no_room = true;
                break;
            }
            let part = next(u32::try_from(n - all.len).unwrap_or(u32::MAX));
            if part.mask == 0 {
                break;
            }
            all.push(part);
        }
        all
    }

    fn push(&mut self, part: Part) {
        self.len += part.len() as usize;
        match self.near.get_mut(self.near_len) {
            Some(place) => {
                *place = part;
                self.near_len += 1;
            }
            None => self.far.push(part),
        }
    }

    /// Removes the last part.
    pub(super) fn pop_part(&mut self) -> Part {
        let part = self.far.pop().or_else(|| {
            self.near_len = self.near_len.checked_sub(1)?;
            self.near.get(self.near_len).copied()
        });
        let part = part.unwrap_or(Part::NONE);
        self.len -= part.len() as usize;
        part
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn release_to(&mut self, zone: &Inner) {
        while self.len > 0 {
            // Fails only after a wrong free elsewhere, which was not refused there.
            _ = zone.release(self.pop_part());
        }
    }
}

/// A list of frames: an iterator whose rest is freed on drop. It keeps the zone alive.
#[derive(Debug)]
pub struct FrameList {
    zone: Shared<Inner>,
    current: Part,
    parts: Parts,
}

impl FrameList {
    pub(super) fn new(zone: Shared<Inner>, parts: Parts) -> Self {
        Self { zone, current: Part::NONE, parts }
    }

    fn rest(&self) -> usize {
        self.current.len() as usize + self.parts.len()
    }
}

impl Iterator for FrameList {
    type Item = Frame;

    fn next(&mut self) -> Option<Frame> {
        if self.current.mask == 0 {
            self.current = self.parts.pop_part();
        }
        self.current.pop()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.rest(), Some(self.rest()))
    }
}

impl ExactSizeIterator for FrameList {}

impl Drop for FrameList {
    fn drop(&mut self) {
        let rest = self.rest() as u64;
        if self.current.mask != 0 {
            // As for `release_to`.
            _ = self.zone.release(self.current);
        }
        self.parts.release_to(&self.zone);
        if rest > 0 {
            self.zone.count_free(rest);
        }
    }
}
