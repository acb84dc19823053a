//! The addresses of a mapping, and where they return to.

use super::window::WindowShare;
use crate::addr::IovaRange;
use crate::table::PinnedLeaf;

/// The addresses of a mapping. Dropping them leaves them in use for good.
#[derive(Debug)]
#[must_use = "what is dropped stays in use"]
pub(super) struct Addresses {
    pub(super) iova: IovaRange,
    pub(super) origin: Origin,
}

/// Where addresses come from.
#[derive(Debug)]
pub(super) enum Origin {
    /// The memory stays mapped there for its lifetime: nothing is returned.
    Fixed,
    /// The domain's address space.
    Space,
    /// An owner's window.
    Window(WindowShare),
}

impl Addresses {
    #[inline(always)]
    pub(super) fn is_fixed(&self) -> bool {
        matches!(self.origin, Origin::Fixed)
    }

    /// Returns the pin of the window that they are in, if there is one.
    #[inline(always)]
    pub(super) fn pin(&self) -> Option<&PinnedLeaf> {
        match &self.origin {
            Origin::Window(share) => share.window().pin(),
            Origin::Fixed | Origin::Space => None,
        }
    }

    /// Has the processor load the table entry of the first of them, if they are in a pinned window.
    #[inline(always)]
    pub(super) fn prefetch(&self) {
        if let Some(pin) = self.pin() {
            pin.prefetch(self.iova.start());
        }
    }

    /// Returns how many bytes a revocation holds: none of memory that stays mapped.
    #[inline(always)]
    pub(super) fn held_bytes(&self) -> u64 {
        if self.is_fixed() { 0 } else { self.iova.len() }
    }
}
