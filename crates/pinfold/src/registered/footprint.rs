//! The pages that memory touches: each whole, and each once.

use super::survey::{FrameRun, Inspector, Piece, Survey};
use pinfold_core::addr::PageSize;

/// Pages that are not shared, and those of unknown frame, are identified by their address in this
/// process, in a range of numbers without frames.
const BY_ADDRESS: u64 = 1 << 63;

/// The pages that memory touches, as ranges.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Footprint {
    /// Plain pages: the kernel charges each to every registration.
    pub(super) plain: Vec<(u64, u64)>,
    /// Pages of several frames: the kernel charges each whole, to the first registration that
    /// touches it.
    pub(super) larger: Vec<(u64, u64)>,
}

impl Footprint {
    /// O(mappings and hugepages), and O(pages of 4 KiB) where their frames are visible to the
    /// process.
    pub(super) fn of(inspector: &Inspector, survey: &Survey) -> Self {
        let mut footprint = Self::default();
        for piece in survey.pieces() {
            if piece.page != PageSize::Size4K && !piece.shared {
                footprint.by_address(piece);
                continue;
            }
            let mut found = Self::default();
            let known = FrameRun::each(inspector, piece, |run| found.run(inspector, piece, run));
            if known {
                found.plain.into_iter().for_each(|(start, end)| footprint.add_plain(start, end));
                footprint.larger.append(&mut found.larger);
            } else {
                footprint.by_address(piece);
            }
        }
        footprint
    }

    /// Adds a piece by its addresses.
    fn by_address(&mut self, piece: &Piece) {
        let (start, mask) = (piece.addr as u64, piece.page.mask());
        let (first, last) =
            (start & !mask | BY_ADDRESS, (start + piece.len + mask) & !mask | BY_ADDRESS);
        match piece.page {
            PageSize::Size4K => self.add_plain(first, last),
            _ => self.larger.push((first, last)),
        }
    }

    /// Adds pages of consecutive frames.
    fn run(&mut self, inspector: &Inspector, piece: &Piece, run: FrameRun) {
        let by_address = (run.start as u64 | BY_ADDRESS, run.end as u64 | BY_ADDRESS);
        let length = by_address.1 - by_address.0;
        let Some(frame) = run.frame else {
            return match piece.page {
                PageSize::Size4K => self.add_plain(by_address.0, by_address.1),
                _ => self.larger.push(by_address),
            };
        };
        let first = frame * 4096;
        if piece.page != PageSize::Size4K {
            self.larger.push((first, first + length));
            return;
        }
        // Plain pages may be parts of larger folios that are not mapped as such.
        let folios = inspector.pagemap.folios(frame, length / 4096).unwrap_or_default();
        let mut plain = |from: u64, to: u64| match piece.shared {
            true => self.add_plain(from, to),
            false => self.add_plain(by_address.0 + (from - first), by_address.0 + (to - first)),
        };
        let mut at = first;
        for &(frame, frames) in &folios {
            plain(at, (frame * 4096).max(at));
            at = at.max((frame + frames) * 4096);
        }
        plain(at.min(first + length), first + length);
        let ranges =
            folios.into_iter().map(|(frame, frames)| (frame * 4096, (frame + frames) * 4096));
        self.larger.extend(ranges);
    }

    fn add_plain(&mut self, start: u64, end: u64) {
        match self.plain.last_mut().filter(|last| last.1 == start) {
            Some(last) => last.1 = end,
            None if start < end => self.plain.push((start, end)),
            None => {}
        }
    }

    /// All ranges.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.plain.iter().chain(&self.larger).copied()
    }

    pub(super) fn plain_bytes(&self) -> u64 {
        self.plain.iter().map(|(start, end)| end - start).sum()
    }
}
