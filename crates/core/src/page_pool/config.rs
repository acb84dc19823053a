//! A pool's parameters, and the tags that name holders of its pages.

use crate::frame::Order;

/// A page pool's parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// The size of a page: 4 KiB times 2^order, up to 2 MiB.
    pub order: Order,
    /// The capacity of the ring in pages: a power of two, up to 2^20.
    pub ring: u32,
    /// The offset in a page at which the device starts to write, in bytes: headroom for headers.
    pub offset: usize,
    /// How many bytes from there the device may write; 0 for the rest of the page.
    pub max_len: usize,
    /// How many pages may be in use at a time: allocated, not returned. At least 1; `u64::MAX` for
    /// as many as the source has. An alloc beyond it is refused
    /// ([`AllocError::Limit`](super::AllocError::Limit)).
    pub max_in_use: u64,
}

impl Default for Config {
    /// Returns the parameters for pages of 4 KiB, a ring of 1024, a device that may write whole
    /// pages, and no limit.
    fn default() -> Self {
        Self { order: Order::PAGE, ring: 1024, offset: 0, max_len: 0, max_in_use: u64::MAX }
    }
}

/// The name of a page's holder, valid in the pool that returned it. For another pool it is
/// [`NONE`](Self::NONE).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tag {
    /// The number of its pool.
    pub(super) pool: u64,
    /// Which of the pool's names, from 1; 0 for none.
    pub(super) name: u32,
}

impl Tag {
    /// No name (the default).
    pub const NONE: Self = Self { pool: 0, name: 0 };
}
