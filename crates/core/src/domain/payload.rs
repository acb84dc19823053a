//! What a driver gives to its device to read or write.

use super::{Domain, Mapping, Pinned};
use crate::access::Direction;
use crate::addr::Segment;
use core::num::NonZeroU64;
use core::ops::Deref;
use core::sync::atomic::{AtomicU64, Ordering};

/// A domain's number, which no other domain of this process has or has had.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DomainId(NonZeroU64);

impl DomainId {
    pub(super) fn next() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        // 2^64 domains are not made.
        Self(NonZeroU64::MIN.saturating_add(LAST.fetch_add(1, Ordering::Relaxed)))
    }
}

/// Memory that the devices of a domain may reach in direction `D` for as long as the value lives.
///
/// A queue that takes one owes: it gives the segments only to a device of [`domain`](Self::domain), and holds the
/// value until the device is done with them; where it cannot know that, it leaks the value.
///
/// # Safety
/// Implementers owe, until the value is dropped, wherever it is moved: `segment` and `domain` do not change what they
/// return, and every segment is part of a live mapping, in that domain and for direction `D`, that the value holds.
pub unsafe trait Payload<D: Direction> {
    /// The segment with this number, from 0; `None` after the last.
    fn segment(&self, index: usize) -> Option<Segment>;

    /// Where the segments are mapped; `None` where that is no [`Domain`](super::Domain). Only a queue whose own memory
    /// is in the same domain takes the value.
    fn domain(&self) -> Option<DomainId>;
}

// SAFETY: each segment is part of the mapping's range, which is mapped for `D`, never changes, and lasts until the value
// is dropped, unmapped or revoked; all of these take it by value. The extents never change by the contract of `Pinned`.
unsafe impl<P: Pinned, D: Direction, H: Deref<Target = Domain>> Payload<D> for Mapping<P, D, H> {
    fn segment(&self, index: usize) -> Option<Segment> {
        self.extent(index)
    }

    fn domain(&self) -> Option<DomainId> {
        Some(Mapping::domain(self).id())
    }
}
