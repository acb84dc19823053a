//! The addresses of a mapping, and where they return to.

use super::window::WindowShare;
use crate::addr::IovaRange;

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
    pub(super) fn is_fixed(&self) -> bool {
        matches!(self.origin, Origin::Fixed)
    }

    /// Returns how many bytes a revocation holds: none of memory that stays mapped.
    pub(super) fn held_bytes(&self) -> u64 {
        if self.is_fixed() { 0 } else { self.iova.len() }
    }
}
