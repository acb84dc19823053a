//! [`Frame`], the number of a frame; [`Order`], the size of a run; and [`FrameError`], why frames
//! cannot be allocated or freed, with the value and the limit.

use core::fmt;
use core::num::NonZeroU32;

/// The fewest frames that a zone has: 2 MiB.
pub(super) const MIN_ZONE: u32 = 512;
/// The most frames that a zone has: 1 TiB.
pub(super) const MAX_ZONE: u32 = 1 << 28;

/// A 4 KiB page of a zone, or the first of an aligned run of them: its number from the zone's
/// start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frame(NonZeroU32);

impl Frame {
    /// The size of a frame in bytes.
    pub const BYTES: u64 = 4096;

    /// Returns the frame with this number; `None` for `u32::MAX`.
    pub const fn new(index: u32) -> Option<Self> {
        match NonZeroU32::new(index.wrapping_add(1)) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }

    /// Returns the number of the frame.
    pub const fn index(self) -> u32 {
        self.0.get() - 1
    }

    /// The frame with this number, which lies in a zone and so is less than [`MAX_ZONE`].
    #[inline(always)]
    pub(super) fn inside(index: u32) -> Self {
        Self(NonZeroU32::MIN.saturating_add(index))
    }

    /// Returns a slot as a number: 0 if it is empty, else the number of its frame plus 1.
    #[inline(always)]
    pub(super) fn raw(slot: Option<Self>) -> u32 {
        slot.map_or(0, |frame| frame.0.get())
    }

    /// Returns the frame's offset from the zone's start, in bytes.
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

/// The size of a run, as log2 of its frames: 0..=9 (4 KiB to 2 MiB) or 18 (1 GiB).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Order(u8);

impl Order {
    /// One frame, 4 KiB.
    pub const PAGE: Self = Self(0);
    /// 512 frames, 2 MiB.
    pub const HUGE: Self = Self(9);
    /// 2^18 frames, 1 GiB.
    pub const GIANT: Self = Self(18);

    /// Returns the order with this number, if there is one.
    pub const fn new(order: u8) -> Option<Self> {
        if order <= 9 || order == 18 { Some(Self(order)) } else { None }
    }

    /// Returns the number of the order.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// Returns how many frames a run of the order has.
    pub const fn frames(self) -> u32 {
        1 << self.0
    }

    /// Returns the smallest order whose runs have at least `bytes` bytes, if there is one.
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

/// Names the watermark that a call stops at, if the zone has one.
fn above(low: u32) -> impl fmt::Display {
    fmt::from_fn(move |f| match low {
        0 => Ok(()),
        low => write!(f, " above the low watermark, which keeps {low} frames free"),
    })
}

/// Why frames cannot be allocated or freed. Nothing has changed when one is returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The zone has no free run of this order.
    #[error("cannot allocate {} contiguous bytes: no free run is that long", Frame::BYTES << order.get())]
    Exhausted {
        /// The requested order.
        order: Order,
        /// The number of frames in the zone.
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
        /// The number of frames in the zone.
        frames: u32,
    },
    /// Fewer frames are free above the low watermark than there are slots to fill.
    #[error(
        "{missing} of {asked} frames are unavailable{}, and none was allocated: free some, or call `fill`, which takes what \
         there is", above(*low)
    )]
    Short {
        /// The number of requested frames.
        asked: usize,
        /// The number of those that are unavailable.
        missing: usize,
        /// The frames that the call leaves free ([`Watermarks`](super::Watermarks)).
        low: u32,
    },
    /// A zone has at least 512 frames (2 MiB) and at most 2^28 (1 TiB).
    #[error("cannot create a zone of {frames} frames: it has {min} to {max}", min = MIN_ZONE, max = MAX_ZONE)]
    ZoneSize {
        /// The requested size, in frames.
        frames: u32,
    },
    /// There is no memory for the state of a zone, or for the frames of a call that is all or
    /// nothing.
    #[error(
        "no memory for {bytes} bytes of state about frames: end other users of memory, or raise the limit"
    )]
    NoMemory {
        /// The requested memory in bytes.
        bytes: usize,
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
        /// The length of the run in frames.
        run_frames: u32,
        /// The number of frames in the zone.
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
