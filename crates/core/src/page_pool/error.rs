//! A page pool's own errors, each with the value and the limit. Nothing has changed when one is
//! returned. Those of allocating and freeing are a DMA pool's.

use crate::dma_pool::SpanError;
use crate::frame::Order;

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
        /// The offset in a page at which the device starts to write.
        offset: usize,
        /// The length of that part in bytes.
        max_len: usize,
        /// The size of a page in bytes.
        page_bytes: usize,
    },
    /// The source's span cannot be used.
    #[error(transparent)]
    Span(#[from] SpanError),
    /// The process has no memory for the ring, or for the table of the span: 8 bytes for each page
    /// of the ring, and for each 2 MiB of the span.
    #[error(
        "no memory for {bytes} bytes of a page pool's state: use a smaller ring or span, or raise the limits of the process"
    )]
    NoMemory {
        /// The requested memory in bytes.
        bytes: usize,
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
