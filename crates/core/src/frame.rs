//! Page frames in bulk: which 4 KiB pages of a zone are free.
//!
//! A [`Zone`] keeps no memory, only the account of it: a frame is a number, and what it stands for is the caller's
//! business. An owner works through its [`Local`], whose common path has no atomic read-modify-write.
//!
//! # How it is kept
//!
//! One bit a frame says whether it is taken, and nothing else decides who owns it. The 512 bits of a *region*
//! (2 MiB) are eight words on one cache line, so that one compare-and-swap claims up to 64 frames. Above the map
//! stand two sets of hints, each a bit a region and a bit above 64 of those: regions that are partly free and
//! regions that are wholly free. A search reads at most 128 words to find a region in 1 TiB, and takes partly free
//! regions first, so that whole 2 MiB stay whole. A hint may be stale, never missing: whoever clears one looks at
//! the map afterwards, whoever frees looks at the hints afterwards.
//!
//! The idea of a map per 2 MiB, a level above it and regions reserved by owners is LLFree's (Wrenger et al.,
//! "LLFree: Scalable and Optionally-Persistent Page-Frame Allocation", USENIX ATC 2023).
//!
//! # How far it may be emptied
//!
//! Single calls take what there is. Bulk calls stop at the [`Watermarks`] and then take one ordinary frame. A zone that
//! has run short is *pressed* ([`Zone::pressed`]) until enough is free again; owners then keep nothing back. One zone stands
//! for one NUMA node: [`Nodes`] is a set of them.
//!
//! # What wrong frees are caught
//!
//! Frames outside the zone, runs that are not aligned to their size, and every frame whose bit says that it is free
//! already. A frame that lies in the magazine of the *same* [`Local`] is caught too. A frame that lies in the
//! magazine of *another* `Local` is not: its bit says taken, as if a third party owned it. Nor is a free of a run
//! in other pieces than those in which it was handed out: that is allowed.

mod bulk;
mod hints;
mod list;
mod local;
mod magazine;
mod map;
mod nodes;
mod reserve;
mod run;
mod stats;
mod watermark;
mod zeroed;
mod zone;

#[cfg(test)]
#[cfg(loom)]
mod loom_models;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use list::FrameList;
pub use local::Local;
pub use nodes::{NodeStats, Nodes, NodesError, Origin, Preference};
pub use stats::FrameStats;
pub use watermark::{Urgency, Watermarks};
pub use zeroed::ZeroError;
pub use zone::Zone;

use core::fmt;
use core::num::NonZeroU32;

/// A 4 KiB page of a zone, or the first of an aligned run of them: its number from the zone's start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frame(NonZeroU32);

impl Frame {
    /// How many bytes a frame has.
    pub const BYTES: u64 = 4096;

    /// The frame with this number, or `None` for `u32::MAX`, which is none.
    pub const fn new(index: u32) -> Option<Self> {
        match NonZeroU32::new(index.wrapping_add(1)) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }

    /// The number of the frame.
    pub const fn index(self) -> u32 {
        self.0.get() - 1
    }

    /// The frame with this number, which lies in a zone and so is less than [`Zone::MAX_FRAMES`].
    #[inline(always)]
    fn inside(index: u32) -> Self {
        Self(NonZeroU32::MIN.saturating_add(index))
    }

    /// How many bytes the frame lies after the zone's start.
    pub const fn offset(self) -> u64 {
        self.index() as u64 * Self::BYTES
    }
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "frame:{}", self.index())
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// log2 of how many frames a run has: 0..=9 (4 KiB to 2 MiB) or 18 (1 GiB).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Order(u8);

impl Order {
    /// One frame, 4 KiB.
    pub const PAGE: Self = Self(0);
    /// 512 frames, 2 MiB.
    pub const HUGE: Self = Self(9);
    /// 2^18 frames, 1 GiB.
    pub const GIANT: Self = Self(18);

    /// The order with this number, if there is one.
    pub const fn new(order: u8) -> Option<Self> {
        if order <= 9 || order == 18 { Some(Self(order)) } else { None }
    }

    /// The number of the order.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// How many frames a run of the order has.
    pub const fn frames(self) -> u32 {
        1 << self.0
    }

    /// The smallest order whose runs have at least `bytes` bytes, if there is one.
    pub const fn for_bytes(bytes: u64) -> Option<Self> {
        let frames = bytes.div_ceil(Frame::BYTES);
        let mut order = 0;
        while order <= 18 {
            if (1 << order) >= frames && Self::new(order).is_some() {
                return Self::new(order);
            }
            order += 1;
        }
        None
    }
}

/// Why frames were not handed out or not taken back. Nothing has changed when one is returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The zone has no free run of this order.
    #[error("no free run of order {order} left among {frames} frames", order = order.get())]
    Exhausted {
        /// What was asked for.
        order: Order,
        /// How many frames the zone has.
        frames: u32,
    },
    /// The zone has no free run of so many frames.
    #[error("no free run of {run_frames} frames, aligned to {align_frames}, left among {frames} frames")]
    NoRun {
        /// How many were asked for.
        run_frames: u32,
        /// The alignment that was asked for, in frames.
        align_frames: u32,
        /// How many frames the zone has.
        frames: u32,
    },
    /// Fewer frames are free than slots were to be filled.
    #[error("{missing} of {asked} frames were not to be had, and none was taken")]
    Short {
        /// How many frames were asked for.
        asked: usize,
        /// How many of them were not there.
        missing: usize,
    },
    /// A zone has at least 512 frames (2 MiB) and at most 2^28 (1 TiB).
    #[error("a zone of {frames} frames: it has between {min} and {max}", min = Zone::MIN_FRAMES, max = Zone::MAX_FRAMES)]
    ZoneSize {
        /// How many it was to have.
        frames: u32,
    },
    /// A run has at least one frame.
    #[error("a run of 0 frames at {frame:?}: a run has at least 1")]
    Empty {
        /// Where the run was to start, if that was said.
        frame: Option<Frame>,
    },
    /// An alignment is a power of two.
    #[error("an alignment of {align_frames} frames: it must be a power of two")]
    Alignment {
        /// The alignment that was asked for, in frames.
        align_frames: u32,
    },
    /// The run does not lie in this zone: it was handed out by another.
    #[error("{run_frames} frames at {frame} do not lie in a zone of {frames} frames")]
    Foreign {
        /// The first frame of the run.
        frame: Frame,
        /// How many frames the run has.
        run_frames: u32,
        /// How many frames the zone has.
        frames: u32,
    },
    /// The run does not start where a run of its order can start: the frame or the order is wrong.
    #[error("{frame} is not aligned to order {order}", order = order.get())]
    Misaligned {
        /// The first frame of the run.
        frame: Frame,
        /// The order that was named.
        order: Order,
    },
    /// The frame is free already: it was freed twice, or by another order than it was handed out with.
    #[error("{frame} is free already")]
    DoubleFree {
        /// The first frame of the run that is free already.
        frame: Frame,
    },
}
