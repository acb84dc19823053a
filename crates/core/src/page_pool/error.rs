//! A page pool's errors, each with the value and the limit. Nothing has changed when one is
//! returned.

use crate::addr::Iova;
use crate::dma_pool::{SourceError, SpanError};
use crate::frame::{Frame, Order};

/// Why a page pool cannot be created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// A page has at most 2 MiB.
    #[error("cannot use pages of order {order}: at most {limit} (2 MiB)", order = order.get(), limit = Order::HUGE.get())]
    Order {
        /// The requested value.
        order: Order,
    },
    /// The ring's capacity is a power of two.
    #[error(
        "cannot use a ring of {ring} pages: its size must be a power of two of at most {limit}"
    )]
    Ring {
        /// The requested value.
        ring: u32,
        /// The largest ring.
        limit: u32,
    },
    /// At least one page may be in use.
    #[error("cannot create a pool of which no page may be in use: `max_in_use` must be at least 1")]
    NoPage,
    /// The range that a device writes is not empty and lies within a page.
    #[error(
        "a device cannot write {max_len} bytes at offset {offset} of a page of {page_bytes} bytes: the range must be non-empty and inside"
    )]
    Range {
        /// Where the device starts to write.
        offset: usize,
        /// How many bytes it may write.
        max_len: usize,
        /// How many bytes a page has.
        page_bytes: usize,
    },
    /// The source's span cannot be used.
    #[error(transparent)]
    Span(#[from] SpanError),
}

/// Why no page can be allocated.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// No page is free and the source has no chunk.
    #[error("no page is free and no chunk is available: {0}")]
    Source(#[from] SourceError),
    /// The source violated its contract: a run of this order cannot start there. It was released.
    #[error("the source returned {frame} for order {order}: outside its span, or not aligned to that size", order = order.get())]
    Misplaced {
        /// Where the run starts.
        frame: Frame,
        /// The requested value.
        order: Order,
    },
    /// As many pages are in use as [`Config::max_in_use`](super::Config::max_in_use) allows.
    #[error(
        "no page is free: {limit} pages are in use, the pool's limit; return some, or raise `max_in_use`"
    )]
    Limit {
        /// The limit.
        limit: u64,
    },
    /// A fragment has at least 1 byte and at most what a device may write of a page.
    #[error("cannot allocate a fragment of {len} bytes: 1 to {limit} are possible")]
    Fragment {
        /// The requested value.
        len: usize,
        /// The longest fragment.
        limit: usize,
    },
}

/// Why a raw page cannot be freed or accessed.
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
        /// The address in this process.
        addr: usize,
        /// The device's address that the caller passed.
        iova: Iova,
        /// The page's device address.
        expected: Iova,
    },
}

/// The pool has the maximum number of holder names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cannot add a holder's name: the pool has {limit}, the maximum; reuse one")]
pub struct TooManyTags {
    /// The maximum.
    pub limit: usize,
}

/// Why a device can still reach a chunk.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RevokeError {
    /// The memory is mapped as a whole for its lifetime.
    #[error(
        "the memory is mapped as a whole for its lifetime: use an arena with the mapping policy `PerUse` where access to pages must be revoked"
    )]
    Permanent,
    /// Not requested: the pool was closed, or its source cannot revoke.
    #[error(
        "the pool was closed, not destroyed: a chunk stays mapped until its last page is returned"
    )]
    NotAsked,
    /// Revoking failed: the device may reach the chunk forever, so it is quarantined.
    #[error("cannot revoke the device's access to a chunk, which is quarantined: {0}")]
    Unmap(alloc::string::String),
}

impl RevokeError {
    /// Returns whether the chunk is quarantined: the device may reach it forever, so it is never
    /// released.
    pub(super) fn is_permanent(&self) -> bool {
        matches!(self, Self::Unmap(_))
    }
}
