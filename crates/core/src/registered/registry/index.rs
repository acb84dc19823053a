//! The number of a registered buffer.

use core::fmt;

/// The largest table, that of io_uring.
pub(super) const MAX_BUFFERS: usize = 16_384;

/// The number of a buffer in a [`Registry`](super::Registry); the same number names it to a ring.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferIndex(pub(super) u16);

impl BufferIndex {
    /// Creates the index with this number.
    pub const fn new(index: u16) -> Self {
        Self(index)
    }

    /// Returns the number.
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Display for BufferIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "buffer:{}", self.0)
    }
}

impl fmt::Debug for BufferIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
