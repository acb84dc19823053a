//! Several pieces as one payload.

use super::OwnedPiece;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{DomainId, Pinned};
use pinfold_core::mem::DmaMemory;

/// Several pieces, of the same memory or of different ones, as one payload: a scattered transfer.
///
/// They are mapped at consecutive addresses; their extents are transferred in order.
#[derive(Debug)]
pub struct OwnedPieces(Vec<OwnedPiece>);

impl OwnedPieces {
    /// Joins the pieces. Returns `None` if there is none.
    pub fn new(pieces: Vec<OwnedPiece>) -> Option<Self> {
        (!pieces.is_empty()).then_some(Self(pieces))
    }

    /// Returns the pieces.
    pub fn into_pieces(self) -> Vec<OwnedPiece> {
        self.0
    }
}

// SAFETY: as for each of the pieces; they are not lent for changes.
unsafe impl Pinned for OwnedPieces {
    fn memory(&self) -> DmaMemory<'_> {
        self.0.first().map_or(DmaMemory::EMPTY, OwnedPiece::memory)
    }
    fn fixed_iova(&self, domain: DomainId) -> Option<Iova> {
        match &*self.0 {
            [one] => one.fixed_iova(domain),
            _ => None,
        }
    }
    fn piece(&self, index: usize) -> Option<DmaMemory<'_>> {
        self.0.get(index).map(OwnedPiece::memory)
    }
    fn extent(&self, index: usize) -> Option<(u64, u64)> {
        let (before, rest) = self.0.split_at_checked(index)?;
        let start: usize = before.iter().map(OwnedPiece::len).sum();
        let (offset, len) = rest.first()?.extent;
        Some(((start + offset) as u64, len as u64))
    }
}
