//! What a command moves.

use pinfold_core::access::Direction;
use pinfold_core::addr::Segment;
use pinfold_core::domain::{Mapped, Pinned};

/// Memory that the device may reach in direction `D` for as long as the value lives.
///
/// It is implemented for mappings ([`Mapped`]). Who implements it for something else owes that the device reaches
/// what it names and nothing that matters to anybody else. It is not an `unsafe` trait: behind an IOMMU a wrong
/// address is a fault or a wrong byte in memory that is mapped, and to mapped memory no reference exists.
///
/// All segments but the first begin at a page (4096 bytes), all but the last end at one, and the first begins at a
/// multiple of 4; a request whose payload does not is rejected.
pub trait Payload<D: Direction> {
    /// The segment with this number, from 0; `None` after the last.
    fn segment(&self, index: usize) -> Option<Segment>;
}

impl<P: Pinned, D: Direction> Payload<D> for Mapped<'_, P, D> {
    fn segment(&self, index: usize) -> Option<Segment> {
        (index == 0).then(|| Mapped::segment(self))
    }
}
