//! [`FrameList`]: an iterator that owns its frames until they are taken.

use super::map::Part;
use super::number::Frame;
use super::zone::Zone;
use alloc::vec::Vec;
use core::ops::Deref;

/// How many words are stored inline; more need an allocation. Sufficient for 512 frames of a fresh
/// zone.
const NEAR: usize = 12;

/// Claimed frames, as parts of words; not counted in the statistics.
#[derive(Debug)]
pub(super) struct Parts {
    near: [Part; NEAR],
    near_len: usize,
    far: Vec<Part>,
    len: usize,
}

impl Parts {
    /// Claims `n` frames by `next`, or as many as it has; `next` never returns more than requested.
    pub(super) fn gather(n: usize, mut next: impl FnMut(u32) -> Part) -> Self {
        let mut all = Self { near: [Part::NONE; NEAR], near_len: 0, far: Vec::new(), len: 0 };
        while all.len < n {
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

    pub(super) fn release_to(&mut self, zone: &Zone) {
        while self.len > 0 {
            // Fails only after a wrong free elsewhere, which was not refused there.
            _ = zone.release(self.pop_part());
        }
    }
}

/// A list of frames: an iterator whose rest is freed on drop.
#[derive(Debug)]
pub struct FrameList<H: Deref<Target = Zone>> {
    zone: H,
    current: Part,
    parts: Parts,
}

impl<H: Deref<Target = Zone>> FrameList<H> {
    pub(super) fn new(zone: H, parts: Parts) -> Self {
        Self { zone, current: Part::NONE, parts }
    }

    fn rest(&self) -> usize {
        self.current.len() as usize + self.parts.len()
    }
}

impl<H: Deref<Target = Zone>> Iterator for FrameList<H> {
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

impl<H: Deref<Target = Zone>> ExactSizeIterator for FrameList<H> {}

impl<H: Deref<Target = Zone>> Drop for FrameList<H> {
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
