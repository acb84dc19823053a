//! Which pages some memory is on, as they count: each whole, and each once.

use super::survey::{Backing, Eyes, Piece, Survey};
use pinfold_core::addr::PageSize;

/// Pages whose frames are not known go by their address in this process instead, in a part of the numbers where there
/// are no frames. The same memory mapped twice then counts twice.
const BY_ADDRESS: u64 = 1 << 63;

/// The pages that some memory touches, as ranges.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Footprint {
    /// On plain pages: the kernel charges each to every registration.
    pub(super) plain: Vec<(u64, u64)>,
    /// On pages of several frames: the kernel charges each whole, to the first registration that touches it.
    pub(super) larger: Vec<(u64, u64)>,
}

impl Footprint {
    pub(super) fn of(eyes: &Eyes, survey: &Survey) -> Self {
        let mut footprint = Self::default();
        for piece in survey.pieces() {
            footprint.piece(eyes, piece);
        }
        footprint
    }

    fn piece(&mut self, eyes: &Eyes, piece: &Piece) {
        let start = piece.phys.map_or(piece.addr as u64 | BY_ADDRESS, |phys| phys.raw());
        // Where a piece's frames are known, it begins as far into its page for the device as for the process.
        let whole = |page: PageSize| {
            (start & !page.mask(), (start + piece.len).saturating_add(page.mask()) & !page.mask())
        };
        let (first, end) = whole(PageSize::Size4K);
        let frames = piece.phys.filter(|_| piece.backing != Backing::Hugetlb);
        let folios = frames.and_then(|_| eyes.pagemap.folios(first / 4096, (end - first) / 4096));
        match folios {
            Some(folios) => {
                let mut at = first;
                for (frame, frames) in folios {
                    let (from, to) = (frame * 4096, (frame + frames) * 4096);
                    self.add_plain(at, from);
                    self.larger.push((from, to));
                    at = at.max(to);
                }
                self.add_plain(at, end);
            }
            None if piece.page == PageSize::Size4K => self.add_plain(first, end),
            None => self.larger.push(whole(piece.page)),
        }
    }

    fn add_plain(&mut self, start: u64, end: u64) {
        if start < end {
            self.plain.push((start, end));
        }
    }

    /// All of the ranges.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.plain.iter().chain(&self.larger).copied()
    }

    pub(super) fn plain_bytes(&self) -> u64 {
        self.plain.iter().map(|(start, end)| end - start).sum()
    }
}
