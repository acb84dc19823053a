//! Watermarks of a zone, and whether it is under pressure.

use super::counters::Tally;
use super::error::FrameError;
use super::map::Part;
use super::watermark::{Allowance, Urgency, Watermarks};
use super::zone::Zone;
use crate::sync::Ordering;

impl Zone {
    /// Creates a zone as [`new`](Self::new) does, with these watermarks.
    ///
    /// # Errors
    /// [`FrameError::ZoneSize`].
    pub fn with_watermarks(frames: u32, watermarks: Watermarks) -> Result<Self, FrameError> {
        let mut zone = Self::new(frames)?;
        zone.watermarks = watermarks;
        Ok(zone)
    }

    /// Returns the watermarks.
    pub fn watermarks(&self) -> Watermarks {
        self.watermarks
    }

    /// Returns how many frames are free in the map: not in use and in no magazine. As exact as the
    /// counters. O(1).
    pub fn available(&self) -> u64 {
        let stats = self.counters();
        u64::from(self.frames()).saturating_sub(stats.in_use().saturating_add(stats.held()))
    }

    /// Returns whether the zone has run out of frames or a bulk call has reached a watermark, and
    /// at most [`high`](Watermarks::high) frames have been free since. Then owners hold no cached
    /// frames.
    #[inline]
    pub fn under_pressure(&self) -> bool {
        self.under_pressure.load(Ordering::Relaxed) != 0
    }

    pub(super) fn set_under_pressure(&self) {
        if !self.under_pressure() {
            self.under_pressure.store(1, Ordering::Relaxed);
        }
    }

    #[cold]
    pub(super) fn update_pressure(&self) {
        if self.available() > self.watermarks.high().into() {
            self.under_pressure.store(0, Ordering::Relaxed);
        }
    }

    /// Returns what a bulk call may claim, for a caller that has claimed `unknown` more frames than
    /// are counted.
    pub(super) fn allowance(&self, urgency: Urgency, unknown: i64) -> Allowance {
        let mark = self.watermarks.mark(urgency);
        let left = match mark {
            0 => u64::MAX,
            _ => self
                .available()
                .saturating_add_signed(unknown.saturating_neg())
                .saturating_sub(mark.into()),
        };
        Allowance { left, fell_back: false }
    }

    /// Claims frames of one word, as far as the watermarks allow.
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

    /// Adds the counts of an owner or a bulk call.
    pub(super) fn fold(&self, tally: Tally) {
        self.counters().fold(tally);
        if tally.exhausted + tally.fell_back > 0 {
            self.set_under_pressure();
        } else if self.under_pressure() {
            self.update_pressure();
        }
    }
}
