//! A page pool's errors, each with the value and the limit. Nothing has changed when one is returned.

use crate::addr::Iova;
use crate::dma_pool::SourceError;
use crate::frame::{Frame, Order};

/// Why a page pool was not created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// A page has at most 2 MiB.
    #[error("pages of order {order}: a page has order {most} (2 MiB) or less", order = order.get(), most = Order::HUGE.get())]
    Order {
        /// The requested value.
        order: Order,
    },
    /// The ring's capacity is a power of two.
    #[error("a ring of {ring} pages: it has a power of two of them, 1 to {limit}")]
    Ring {
        /// The requested value.
        ring: u32,
        /// The most there can be.
        limit: u32,
    },
    /// The range that a device writes lies in a page.
    #[error(
        "a device that writes {max_len} bytes from offset {offset} of a page of {page_bytes} bytes: it must write 1 byte or more, all inside"
    )]
    Range {
        /// Where the device starts to write.
        offset: usize,
        /// How many bytes it may write.
        max_len: usize,
        /// How many bytes a page has.
        page_bytes: usize,
    },
    /// The span must be one that pages can number, and its last address must fit in 64 bits.
    #[error("a span of {len:#x} bytes at {iova}: it must have 1 to {limit:#x} bytes and end within 64 bits")]
    Span {
        /// How many bytes the span has.
        len: usize,
        /// Where it starts for the device.
        iova: Iova,
        /// How many bytes it may have.
        limit: u64,
    },
}

/// Why no page was allocated.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// No page is free and the source has no chunk.
    #[error("no page is free and no chunk is available: {0}")]
    Source(#[from] SourceError),
    /// The source violated its contract: a run of this order cannot start there. It was released.
    #[error("the source returned {frame} as a run of order {order}: it is outside the span or not aligned to its size", order = order.get())]
    Misplaced {
        /// Where the run starts.
        frame: Frame,
        /// The requested value.
        order: Order,
    },
    /// A fragment has at least 1 byte and at most what a device may write of a page.
    #[error("a fragment of {len} bytes: it has 1 to {limit}")]
    Fragment {
        /// The requested value.
        len: usize,
        /// The most that a fragment has.
        limit: usize,
    },
}

/// Why a raw page was not freed, or not found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FreeError {
    /// The address is not in a page of this pool.
    #[error(
        "{addr:#x} is in no page of this pool, whose span is {start:#x}..{end:#x}: free it in the pool that allocated it"
    )]
    Foreign {
        /// The address.
        addr: usize,
        /// Where the pool's span starts.
        start: usize,
        /// Where the pool's span ends.
        end: usize,
    },
    /// The address is in a page of this pool, but not its start.
    #[error("{addr:#x} is inside a page of {page_bytes} bytes, which starts at {page:#x}")]
    Misaligned {
        /// The address.
        addr: usize,
        /// Where the page starts.
        page: usize,
        /// How many bytes a page has.
        page_bytes: usize,
    },
    /// The page is free.
    #[error("the page at {addr:#x} is free: it was freed twice")]
    DoubleFree {
        /// The address.
        addr: usize,
    },
    /// The page is held by a [`Page`](super::Page) or by fragments, which free it themselves.
    #[error("the page at {addr:#x} was freed before and is held by a `Page` or by fragments now")]
    Owned {
        /// The address.
        addr: usize,
    },
    /// The two addresses do not belong to one page.
    #[error("the page at {addr:#x} is {expected} for the device, not {iova}")]
    WrongIova {
        /// The address.
        addr: usize,
        /// The device's address that was given with it.
        iova: Iova,
        /// The device's address that belongs to it.
        expected: Iova,
    },
}

/// Why a list of raw pages was not freed completely.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("after {freed} pages of the list were freed: {error}")]
pub struct BulkFreeError {
    /// How many pages from the start of the list are free now. The next one was refused; it and the rest are unchanged.
    pub freed: usize,
    /// Why it was refused.
    #[source]
    pub error: FreeError,
}

/// A pool has 2^24 names for holders, and no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a pool has at most {limit} names of holders: reuse one")]
pub struct TooManyTags {
    /// The most that there can be.
    pub limit: usize,
}

/// Why a device still reaches a chunk.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RevokeError {
    /// The memory is mapped for as long as it lives.
    #[error(
        "all of the memory is mapped for as long as it lives: expose an arena per use where pages must be taken back"
    )]
    Permanent,
    /// Not requested: the pool was closed, or its source cannot revoke.
    #[error("the pool was closed and not destroyed, so chunks stay mapped until their last page is back")]
    NotAsked,
    /// Revoking failed: the device may reach the chunk forever, so it is quarantined.
    #[error("cannot revoke the device's access to a chunk, which is quarantined: {0}")]
    Unmap(alloc::string::String),
}

impl RevokeError {
    /// Returns whether the chunk is quarantined: the device may reach it forever, so it is never released.
    pub fn is_permanent(&self) -> bool {
        matches!(self, Self::Unmap(_))
    }
}
