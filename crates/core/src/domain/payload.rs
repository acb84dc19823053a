//! What can be mapped, and what a driver gives to its device.

use super::space::DomainId;
use crate::access::Direction;
use crate::addr::{Iova, Segment};
use crate::mem::DmaMemory;

/// Memory that can be mapped: pinned, and owned by the value.
///
/// # Safety
/// The results of all methods never change. Until the value is dropped, all memory that they return
/// stays where it is, valid, and the value's alone (if the value is leaked, for good), except that
/// others may access what lies outside all extents as with a [`DmaMemory`]. While the value is not
/// borrowed, no reference into the memory exists. A value with a `fixed_iova` has one piece.
pub unsafe trait Pinned: Send + 'static {
    /// Returns the memory. Start and length are multiples of 4096.
    fn memory(&self) -> DmaMemory<'_>;

    /// Returns the address at which the memory is mapped in `domain` for as long as the value lives
    /// (an arena mapped as a whole), if it is.
    fn fixed_iova(&self, domain: DomainId) -> Option<Iova>;

    /// Returns piece `index` of memory that is scattered in this process; `None` after the last.
    /// The first is [`memory`](Self::memory).
    ///
    /// The pieces are mapped one behind the other, as one contiguous range of I/O virtual
    /// addresses.
    fn piece(&self, index: usize) -> Option<DmaMemory<'_>> {
        (index == 0).then(|| self.memory())
    }

    /// Returns offset and length, in the mapped range, of extent `index` of the data to be
    /// transferred; `None` after the last. By default one extent: all of the memory.
    ///
    /// For payloads that do not consist of whole pages.
    fn extent(&self, index: usize) -> Option<(u64, u64)> {
        (index == 0).then(|| (0, pieces(self).map(|piece| piece.len() as u64).sum()))
    }
}

pub(super) fn pieces<P: Pinned + ?Sized>(payload: &P) -> impl Iterator<Item = DmaMemory<'_>> {
    (0..).map_while(|index| payload.piece(index))
}

/// Memory that the devices of a domain may reach in direction `D` for as long as the value lives.
///
/// A queue that accepts one gives the segments only to a device of [`domain`](Self::domain), and
/// holds the value until the device no longer uses them; if it cannot know that, it leaks the
/// value.
///
/// # Safety
/// Until the value is dropped, wherever it is moved: `segment` and `domain` return the same, and
/// every segment is part of a live mapping, in that domain and for direction `D`, that the value
/// holds.
pub unsafe trait Payload<D: Direction> {
    /// Returns segment `index`; `None` after the last.
    fn segment(&self, index: usize) -> Option<Segment>;

    /// Returns the domain of the segments; `None` if that is no [`Domain`](super::Domain). Only a
    /// queue whose own memory is in the same domain accepts the value.
    fn domain(&self) -> Option<DomainId>;
}
