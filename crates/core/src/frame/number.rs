//! [`Frame`], the number of a frame, and [`Order`], the size of a run.

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
    /// How many bytes a frame has.
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
