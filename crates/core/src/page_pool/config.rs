//! What a pool is made with, and tags for its pages.

use crate::frame::Order;

/// What a page pool is like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// How large a page is: 4 KiB times 2^order, up to 2 MiB.
    pub order: Order,
    /// How many pages the ring holds: a power of two, up to 2^20.
    pub ring: u32,
    /// Where in a page the device starts to write, in bytes: before it there is room for headers.
    pub offset: usize,
    /// How many bytes from there the device may write; 0: all of the rest.
    pub max_len: usize,
}

impl Default for Config {
    /// Pages of 4 KiB, a ring of 1024, and the device may write all of a page.
    fn default() -> Self {
        Self { order: Order::PAGE, ring: 1024, offset: 0, max_len: 0 }
    }
}

/// A name for who holds a page, in one pool. In another pool it stands for another name, or for none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tag(pub(super) u32);

impl Tag {
    /// Nobody in particular: what a page has if nothing is said.
    pub const NONE: Self = Self(0);
}
