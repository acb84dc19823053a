//! How much of a zone bulk calls leave to the others.

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

    pub(super) fn mark(self, urgency: Urgency) -> u32 {
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
    pub(super) left: u64,
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
