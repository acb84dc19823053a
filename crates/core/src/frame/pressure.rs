//! What a zone does when it runs short.

use super::counters::Tally;
use super::error::FrameError;
use super::map::Part;
use super::watermark::{Allowance, Urgency, Watermarks};
use super::zone::Zone;
use crate::sync::Ordering;

impl Zone {
    /// A zone of `frames` frames, all free, with these marks; else as [`new`](Self::new).
    ///
    /// # Errors
    /// [`FrameError::ZoneSize`].
    pub fn with_watermarks(frames: u32, watermarks: Watermarks) -> Result<Self, FrameError> {
        let mut zone = Self::new(frames)?;
        zone.watermarks = watermarks;
        Ok(zone)
    }

    /// The marks.
    pub fn watermarks(&self) -> Watermarks {
        self.watermarks
    }

    /// How many frames are free in the map: not in use and in no magazine. As exact as the counters. O(1).
    pub fn available(&self) -> u64 {
        let stats = self.counters();
        u64::from(self.frames()).saturating_sub(stats.in_use().saturating_add(stats.held()))
    }

    /// Whether the zone has run out, or a bulk call has come to a mark, and there are less than
    /// [`high`](Watermarks::high) frames free since. Then owners keep no frames that they do not use.
    #[inline]
    pub fn pressed(&self) -> bool {
        self.pressed.load(Ordering::Relaxed) != 0
    }

    pub(super) fn press(&self) {
        if !self.pressed() {
            self.pressed.store(1, Ordering::Relaxed);
        }
    }

    #[cold]
    pub(super) fn relieve(&self) {
        if self.available() > self.watermarks.high().into() {
            self.pressed.store(0, Ordering::Relaxed);
        }
    }

    /// What a bulk call may claim, by someone who has claimed `unknown` more than the counters know.
    pub(super) fn allowance(&self, urgency: Urgency, unknown: i64) -> Allowance {
        let mark = self.watermarks.mark(urgency);
        let left = match mark {
            0 => u64::MAX,
            _ => self.available().saturating_add_signed(unknown.saturating_neg()).saturating_sub(mark.into()),
        };
        Allowance { left, fell_back: false }
    }

    /// Claims frames of one word, as far as the marks allow.
    pub(super) fn claim_allowed(&self, want: u32, allowance: &mut Allowance) -> Part {
        match allowance.of(want) {
            0 => Part::NONE,
            n => {
                let part = self.claim_some(n);
                allowance.spend(part.len());
                part
            }
        }
    }

    /// Adds what an owner or a bulk call has counted.
    pub(super) fn fold(&self, tally: Tally) {
        self.counters().fold(tally);
        if tally.exhausted + tally.fell_back > 0 {
            self.press();
        } else if self.pressed() {
            self.relieve();
        }
    }
}
