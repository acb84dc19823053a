//! Why memory cannot be laid out for a controller, by PRP entries or by an SGL.

use super::{GatherError, ProfileError};
use crate::addr::{Iova, RangeError};
use crate::mem::AccessError;

/// Why a transfer cannot be laid out, by [`Prps`](super::prp::Prps) or by an
/// [`Sgl`](super::sgl::Sgl). No list page is held when one is returned.
///
/// `E` is the error of the [source](super::prp::ListPages) of list pages.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError<E> {
    /// There is nothing to transfer.
    #[error("a transfer of 0 bytes has neither PRP entries nor SGL descriptors")]
    Empty,
    /// SGL: no descriptor can satisfy the profile, because its length has 32 bits.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// A segment is not a range of addresses, or, of an SGL, the controller does not accept the
    /// memory.
    #[error(transparent)]
    Gather(#[from] GatherError),
    /// PRP1 begins at a multiple of 4 bytes.
    #[error("cannot describe a transfer at {iova}: PRP1 must be a multiple of 4")]
    Offset {
        /// The address of its first byte.
        iova: Iova,
    },
    /// PRP entries: only the first piece may begin within a page, and only the last may end within
    /// one.
    #[error(
        "cannot describe a transfer with a gap at {iova}, which is not a multiple of the controller's page of {page} bytes"
    )]
    Ragged {
        /// The end of one segment or the start of the next, within a page.
        iova: Iova,
        /// The controller's page size in bytes.
        page: u64,
    },
    /// The capacity for list pages is too small.
    #[error("more than {limit} list pages: split the transfer")]
    TooLong {
        /// The capacity.
        limit: usize,
    },
    /// The pool's blocks cannot be list pages.
    #[error(
        "cannot use {bytes} bytes at {iova} as a list page: the pool must have blocks of {needed} bytes or more, aligned to \
         {align}"
    )]
    ListPage {
        /// Its address.
        iova: Iova,
        /// Its size in bytes.
        bytes: usize,
        /// The size that it must have: a page of the controller for PRP entries, two descriptors
        /// for an SGL.
        needed: u64,
        /// Its address must be a multiple of this.
        align: u64,
    },
    /// No list page is available.
    #[error("cannot allocate a list page: {0}")]
    Take(E),
    /// A list page cannot be written.
    #[error("cannot write a list page: {0}")]
    Memory(AccessError),
}

impl<E> LayoutError<E> {
    /// Returns where the memory has the gap or the misaligned part that cannot be described, if
    /// that is the reason.
    pub fn iova(&self) -> Option<Iova> {
        match self {
            Self::Offset { iova }
            | Self::Ragged { iova, .. }
            | Self::Gather(GatherError::Misaligned { iova, .. }) => Some(*iova),
            _ => None,
        }
    }

    /// Returns whether no list page was free: the same request may succeed later.
    pub fn is_out_of_pages(&self) -> bool {
        matches!(self, Self::Take(_))
    }
}

impl<E> From<RangeError> for LayoutError<E> {
    fn from(error: RangeError) -> Self {
        Self::Gather(error.into())
    }
}
