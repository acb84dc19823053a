//! How much of a zone bulk calls leave to the others.

use super::FrameError;
use super::map::Part;
use super::stats::Tally;
use super::zone::Zone;
use crate::sync::Ordering;

/// The marks of a zone, in frames that are free.
///
/// A bulk call stops at `low`, an urgent one at `min`, and then takes one ordinary frame, so that even it gets
/// something while memory remains. Calls for a single frame or run know no marks. Once the zone has run short, owners
/// give back what lies in their magazines as they come by, until `high` is reached.
///
/// How many frames are free is told by the counters, which may be behind: see [`FrameStats`](super::FrameStats).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Watermarks {
    min: u32,
    low: u32,
    high: u32,
}

impl Watermarks {
    /// No marks: bulk calls may take all.
    pub const NONE: Self = Self { min: 0, low: 0, high: 0 };

    /// These marks, in frames, if `min <= low <= high`.
    pub const fn new(min: u32, low: u32, high: u32) -> Option<Self> {
        if min <= low && low <= high { Some(Self { min, low, high }) } else { None }
    }

    /// What [`Zone::new`] takes for so many frames: `min` is 1/1024 of them, at most 16,384 (64 MiB); `low` is 5/4
    /// and `high` 3/2 of that. Zones under 64 MiB have no marks: what they would keep back is too little for anyone.
    pub const fn for_frames(frames: u32) -> Self {
        if frames < 16_384 {
            return Self::NONE;
        }
        let min = if frames / 1024 < 16_384 { frames / 1024 } else { 16_384 };
        Self { min, low: min + min / 4, high: min + min / 2 }
    }

    /// Where urgent bulk calls stop.
    pub const fn min(self) -> u32 {
        self.min
    }

    /// Where ordinary bulk calls stop.
    pub const fn low(self) -> u32 {
        self.low
    }

    /// From where on the zone is out of need.
    pub const fn high(self) -> u32 {
        self.high
    }

    fn mark(self, urgency: Urgency) -> u32 {
        match urgency {
            Urgency::Normal => self.low,
            Urgency::Urgent => self.min,
        }
    }
}

/// How far down a bulk call may go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Urgency {
    /// To [`Watermarks::low`].
    #[default]
    Normal,
    /// To [`Watermarks::min`]: for whoever frees more than it takes, such as the path that writes memory out.
    Urgent,
}

/// What the marks leave to one bulk call.
#[derive(Clone, Copy)]
pub(super) struct Allowance {
    /// How many frames it may claim.
    left: u64,
    /// Whether it came to the mark and took its one ordinary frame.
    pub(super) fell_back: bool,
}

impl Allowance {
    /// How many frames may be claimed, of `want`; at the mark one, and only once.
    pub(super) fn of(&mut self, want: u32) -> u32 {
        if self.left == 0 {
            return u32::from(!core::mem::replace(&mut self.fell_back, true));
        }
        u32::try_from(self.left).unwrap_or(u32::MAX).min(want)
    }

    pub(super) fn spend(&mut self, frames: u32) {
        self.left = self.left.saturating_sub(frames.into());
    }
}

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
        if self.available() > self.watermarks.high.into() {
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
