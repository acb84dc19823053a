//! What can go wrong with frames, each with the value and the limit.

use super::number::{Frame, MAX_ZONE, MIN_ZONE, Order};

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
    #[error("a zone of {frames} frames: it has between {min} and {max}", min = MIN_ZONE, max = MAX_ZONE)]
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
