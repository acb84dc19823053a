//! Page frames in bulk: which 4 KiB pages of a zone are free.
//!
//! A [`Zone`] keeps no memory, only the account of it: a frame is a number, and what it stands for is the caller's
//! business. (Skeleton: the face is fixed, the inside is being written.)
#![allow(unused_variables, clippy::todo, missing_debug_implementations)]

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
}

/// The account of a region's frames.
pub struct Zone;

impl Zone {
    /// A zone of `frames` frames, all free.
    pub fn new(frames: u32) -> Result<Self, FrameError> {
        todo!()
    }
    /// One run of 2^order frames, aligned to its size.
    pub fn alloc(&self, order: Order) -> Result<Frame, FrameError> {
        todo!()
    }
    /// Takes a run back, from any owner.
    pub fn free(&self, frame: Frame, order: Order) -> Result<(), FrameError> {
        todo!()
    }
    /// Fills the empty slots only; returns how many slots are full afterwards.
    pub fn fill(&self, slots: &mut [Option<Frame>]) -> usize {
        todo!()
    }
    /// All or nothing.
    pub fn fill_all(&self, slots: &mut [Option<Frame>]) -> Result<(), FrameError> {
        todo!()
    }
    /// An owner's handle.
    pub fn local(&self) -> Local<'_> {
        todo!()
    }
    /// A contiguous run of `frames` frames (any number; for buffers larger than 2 MiB), aligned to `align` frames.
    pub fn alloc_run(&self, frames: u32, align: u32) -> Result<Frame, FrameError> {
        todo!()
    }
    /// Takes back what `alloc_run` gave.
    pub fn free_run(&self, first: Frame, frames: u32) -> Result<(), FrameError> {
        todo!()
    }
}

/// One owner's way to a zone: its magazine and its reserved 2 MiB region.
pub struct Local<'z>(core::marker::PhantomData<&'z Zone>);
