//! [`Watermarks`]: how many frames bulk calls leave free.

/// A zone's watermarks, in free frames.
///
/// A bulk call stops at `low`, an urgent one at `min`, and then takes one ordinary frame, so that
/// even it gets something while memory remains. Calls for a single frame or run ignore them. Under
/// pressure, owners flush their magazines with their next calls, until `high` is reached.
///
/// The number of free frames comes from the counters, which may be behind: see
/// [`FrameStats`](super::FrameStats).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Watermarks {
    min: u32,
    low: u32,
    high: u32,
}

impl Watermarks {
    /// No watermarks: bulk calls may take all frames.
    pub const NONE: Self = Self { min: 0, low: 0, high: 0 };

    /// Returns these watermarks, if `min <= low <= high`.
    pub const fn new(min: u32, low: u32, high: u32) -> Option<Self> {
        if min <= low && low <= high { Some(Self { min, low, high }) } else { None }
    }

    /// Returns the watermarks that [`Zone::new`](super::Zone::new) uses: `min` is 1/1024 of the
    /// frames, at most 16,384 (64 MiB); `low` is 5/4 and `high` 3/2 of that. Zones under 64 MiB
    /// have none.
    pub const fn for_frames(frames: u32) -> Self {
        if frames < 16_384 {
            return Self::NONE;
        }
        let min = if frames / 1024 < 16_384 { frames / 1024 } else { 16_384 };
        Self { min, low: min + min / 4, high: min + min / 2 }
    }

    /// Returns the number of free frames at which urgent bulk calls stop.
    pub const fn min(self) -> u32 {
        self.min
    }

    /// Returns the number of free frames at which other bulk calls stop.
    pub const fn low(self) -> u32 {
        self.low
    }

    /// Returns the number of free frames above which the pressure ends.
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

/// How far down a bulk call may take frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Urgency {
    /// To [`Watermarks::low`].
    #[default]
    Normal,
    /// To [`Watermarks::min`]: for callers that free more than they allocate, such as a path that
    /// writes memory out.
    Urgent,
}

/// The frames that the watermarks leave to one bulk call.
#[derive(Clone, Copy)]
pub(super) struct Allowance {
    /// How many frames it may claim.
    pub(super) left: u64,
    /// Whether it reached the watermark and took its one ordinary frame.
    pub(super) fell_back: bool,
}

impl Allowance {
    /// How many of `want` frames may be claimed; at the watermark one, and only once.
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
