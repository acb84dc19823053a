//! A cached buffer that somebody uses.

use super::Inner;
use crate::buffer::Buffer;
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{DomainId, Pinned};
use pinfold_core::mem::DmaMemory;
use std::fmt;
use std::sync::Arc;

/// A buffer that is mapped, and stays so at least until this is dropped. The device's access is both ways.
///
/// As it is [`Pinned`] with a fixed address, [`Domain::map`](pinfold_core::domain::Domain::map) takes it where a driver
/// wants a mapping, at the cost of a look-up.
pub struct Held {
    pub(super) cache: Arc<Inner>,
    pub(super) owner: Arc<Buffer>,
    /// `None` where the buffer is mapped as long as it lives, without the cache.
    pub(super) slot: Option<usize>,
    pub(super) iova: IovaRange,
}

impl Held {
    /// Where the device finds it.
    pub fn iova(&self) -> IovaRange {
        self.iova
    }

    /// The buffer.
    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.owner
    }
}

// SAFETY: the memory is a buffer's, which the value has a share of, so that it stays where it is; who has a share of a
// buffer can not have it for himself, which a reference into it takes. The range is mapped as long as the entry is held.
unsafe impl Pinned for Held {
    fn memory(&self) -> DmaMemory<'_> {
        self.owner.memory()
    }
    fn fixed_iova(&self) -> Option<(DomainId, Iova)> {
        Some((self.cache.domain.id(), self.iova.start()))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.cache.state().slots.release(slot);
        }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("iova", &self.iova).finish_non_exhaustive()
    }
}
