//! What a pool is made with, and tags for its pages.

use crate::frame::Order;

/// A page pool's parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// The size of a page: 4 KiB times 2^order, up to 2 MiB.
    pub order: Order,
    /// How many pages the ring holds: a power of two, up to 2^20.
    pub ring: u32,
    /// Where in a page the device starts to write, in bytes; headers go before it.
    pub offset: usize,
    /// How many bytes from there the device may write; 0: all the rest.
    pub max_len: usize,
}

impl Default for Config {
    /// Pages of 4 KiB, a ring of 1024, and the device may write all of a page.
    fn default() -> Self {
        Self { order: Order::PAGE, ring: 1024, offset: 0, max_len: 0 }
    }
}

/// A name for the holder of a page, valid in one pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tag(pub(super) u32);

impl Tag {
    /// No name: the default.
    pub const NONE: Self = Self(0);
}
