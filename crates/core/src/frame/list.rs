//! A chain of frames that owns them until they are taken from it.

use super::map::Part;
use super::number::Frame;
use super::zone::Zone;
use alloc::vec::Vec;
use core::ops::Deref;

/// How many words frames may come from before memory is allocated: more than enough for 512 frames.
const NEAR: usize = 12;

/// Frames as the parts of words that they were claimed as; not counted.
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
            // They are ours; only a wrong free elsewhere could have made them free, and it was counted there.
            _ = zone.release(self.pop_part());
        }
    }
}

/// A chain of frames: an iterator whose rest is freed on drop.
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
            // They are ours: as for `release_to`.
            _ = self.zone.release(self.current);
        }
        self.parts.release_to(&self.zone);
        if rest > 0 {
            self.zone.count_free(rest);
        }
    }
}
