//! A chain of frames that owns them until they are taken from it.

use super::Frame;
use super::map::Part;
use super::zone::Zone;
use alloc::vec::Vec;

/// Frames, kept as the parts of words that they were claimed as; nothing is counted here.
#[derive(Debug, Default)]
pub(super) struct Parts {
    parts: Vec<Part>,
    len: usize,
}

impl Parts {
    /// Gets `n` frames from `next`, or as many as it has; `next` never gives more than it is asked for.
    pub(super) fn gather(n: usize, mut next: impl FnMut(u32) -> Part) -> Self {
        let mut all = Self::default();
        while all.len < n {
            let part = next(u32::try_from(n - all.len).unwrap_or(u32::MAX));
            if part.mask == 0 {
                break;
            }
            all.len += part.len() as usize;
            all.parts.push(part);
        }
        all
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn pop(&mut self) -> Option<Frame> {
        let part = self.parts.last_mut()?;
        let frame = part.pop()?;
        if part.mask == 0 {
            self.parts.pop();
        }
        self.len -= 1;
        Some(frame)
    }

    pub(super) fn give_back(&mut self, zone: &Zone) {
        for part in self.parts.drain(..) {
            // They are ours; only a wrong free by another could have made them free, and it was counted there.
            _ = zone.release(part);
        }
        self.len = 0;
    }
}

/// A chain of frames: an iterator whose rest goes back to the zone on drop.
#[derive(Debug)]
pub struct FrameList<'z> {
    zone: &'z Zone,
    parts: Parts,
}

impl<'z> FrameList<'z> {
    pub(super) fn new(zone: &'z Zone, parts: Parts) -> Self {
        Self { zone, parts }
    }
}

impl Iterator for FrameList<'_> {
    type Item = Frame;

    fn next(&mut self) -> Option<Frame> {
        self.parts.pop()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.parts.len(), Some(self.parts.len()))
    }
}

impl ExactSizeIterator for FrameList<'_> {}

impl Drop for FrameList<'_> {
    fn drop(&mut self) {
        self.zone.counters().free(self.parts.len() as u64);
        self.parts.give_back(self.zone);
    }
}
