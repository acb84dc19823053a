//! [`FrameError`]: why frames cannot be allocated or freed, with the value and the limit.

use super::number::{Frame, MAX_ZONE, MIN_ZONE, Order};

/// The frame of a free that is already free. Small enough to be returned in a register, as
/// [`FrameError`] is not.
#[derive(Clone, Copy, Debug)]
pub(super) struct AlreadyFree(pub(super) Frame);

impl From<AlreadyFree> for FrameError {
    #[cold]
    fn from(AlreadyFree(frame): AlreadyFree) -> Self {
        Self::DoubleFree { frame }
    }
}

/// Why frames cannot be allocated or freed. Nothing has changed when one is returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The zone has no free run of this order.
    #[error("no free run of order {order} in a zone of {frames} frames", order = order.get())]
    Exhausted {
        /// The requested order.
        order: Order,
        /// How many frames the zone has.
        frames: u32,
    },
    /// The zone has no free run of this length.
    #[error(
        "no free run of {run_frames} frames, aligned to {align_frames}, in a zone of {frames} frames"
    )]
    NoRun {
        /// The requested length, in frames.
        run_frames: u32,
        /// The requested alignment, in frames.
        align_frames: u32,
        /// How many frames the zone has.
        frames: u32,
    },
    /// Fewer frames are free than there are slots to fill.
    #[error("{missing} of {asked} frames are unavailable, and none was allocated")]
    Short {
        /// How many frames were requested.
        asked: usize,
        /// How many of them are unavailable.
        missing: usize,
    },
    /// A zone has at least 512 frames (2 MiB) and at most 2^28 (1 TiB).
    #[error("cannot create a zone of {frames} frames: it has {min} to {max}", min = MIN_ZONE, max = MAX_ZONE)]
    ZoneSize {
        /// The requested size, in frames.
        frames: u32,
    },
    /// A run has at least one frame.
    #[error("cannot use a run of 0 frames at {frame:?}: a run has at least 1")]
    Empty {
        /// The start of the run, if it was given.
        frame: Option<Frame>,
    },
    /// An alignment is a power of two.
    #[error("alignment to {align_frames} frames is invalid: it must be a power of two")]
    Alignment {
        /// The requested alignment, in frames.
        align_frames: u32,
    },
    /// The run does not lie in this zone.
    #[error("{run_frames} frames at {frame} do not lie in a zone of {frames} frames")]
    Foreign {
        /// The first frame of the run.
        frame: Frame,
        /// How many frames the run has.
        run_frames: u32,
        /// How many frames the zone has.
        frames: u32,
    },
    /// No run of this order starts there: the frame or the order is wrong.
    #[error("{frame} is not aligned to order {order}", order = order.get())]
    Misaligned {
        /// The first frame of the run.
        frame: Frame,
        /// The order.
        order: Order,
    },
    /// The frame is free: it was freed twice, or with another order than it was allocated with. One
    /// in the magazine of another [`ZoneLocal`](super::ZoneLocal) is not found to be free.
    #[error("{frame} is free: it was freed twice, or with the wrong order")]
    DoubleFree {
        /// The first frame of the run that is free.
        frame: Frame,
    },
}
