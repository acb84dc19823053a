//! The kernel's charge of memory to `RLIMIT_MEMLOCK`.

use super::survey::{FrameRun, MemoryError, Piece, Survey};
use crate::sys::pages::Pagemap;
use pinfold_core::addr::PageSize;
use std::fmt;

/// The bytes that count against `RLIMIT_MEMLOCK` when memory is registered, by the consumer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Forecast {
    /// The charge for a ring's table: plain pages for each place that touches them, larger folios
    /// whole, once per table.
    pub ring: u64,
    /// Mapped behind VFIO or iommufd: its own pages of 4 KiB, for each mapping again.
    pub mapping: u64,
}

impl fmt::Display for Forecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ring, mapping } = self;
        write!(f, "{ring} bytes are charged by a ring, {mapping} by each mapping for a device")
    }
}

impl Survey {
    /// Returns the kernel's charge for the memory. Exact when its pages are resident; if those of a
    /// file are shared and their frames hidden from this process, folios of several plain pages
    /// count as plain pages.
    ///
    /// O(hugepages), and O(pages of 4 KiB) for plain pages if their frames are visible to the
    /// process.
    pub fn forecast(&self) -> Forecast {
        let mut footprint = Footprint::default();
        footprint.add(Pagemap::open().ok().as_ref(), self);
        // A place ends where a page does, so no page of the memory is in two.
        Forecast { ring: footprint.charge(), mapping: self.page_span() }
    }
}

/// Returns the kernel's charge for a table with these places, as [`Forecast::ring`].
///
/// # Errors
/// [`MemoryError`] if some of the memory cannot be examined.
pub(crate) fn ring_charge(
    places: impl IntoIterator<Item = (usize, usize)>,
) -> Result<u64, MemoryError> {
    let pagemap = Pagemap::open().ok();
    let mut footprint = Footprint::default();
    for (addr, len) in places {
        footprint.add(pagemap.as_ref(), &Survey::new(addr, len as u64)?);
    }
    Ok(footprint.charge())
}

/// Pages that are not shared, and those of unknown frame, are identified by their address in this
/// process, in a range of numbers without frames.
const BY_ADDRESS: u64 = 1 << 63;

/// The pages that the places of a table touch.
#[derive(Default)]
struct Footprint {
    /// Bytes of plain pages: the kernel charges each for every place.
    plain: u64,
    /// The ranges of pages of several frames: the kernel charges each whole, to the first place
    /// that touches it.
    larger: Vec<(u64, u64)>,
}

impl Footprint {
    /// Adds the pages of one place.
    fn add(&mut self, pagemap: Option<&Pagemap>, survey: &Survey) {
        for piece in survey.pieces() {
            let by_frame = piece.page == PageSize::Size4K || piece.shared;
            let mut found = Self::default();
            let known = pagemap.filter(|_| by_frame).is_some_and(|pagemap| {
                FrameRun::each(pagemap, piece, |run| found.run(pagemap, piece, run))
            });
            if !known {
                found = Self::of_addresses(piece);
            }
            self.plain += found.plain;
            self.larger.append(&mut found.larger);
        }
    }

    /// Returns the pages of a piece by its addresses.
    fn of_addresses(piece: &Piece) -> Self {
        let (start, mask) = (piece.addr as u64, piece.page.mask());
        let (first, last) = (start & !mask, (start + piece.len + mask) & !mask);
        match piece.page {
            PageSize::Size4K => Self { plain: last - first, larger: Vec::new() },
            _ => Self { plain: 0, larger: vec![(first | BY_ADDRESS, last | BY_ADDRESS)] },
        }
    }

    /// Adds pages of consecutive frames.
    fn run(&mut self, pagemap: &Pagemap, piece: &Piece, run: FrameRun) {
        let len = (run.end - run.start) as u64;
        let start = run.frame.map_or(run.start as u64 | BY_ADDRESS, |frame| frame * 4096);
        if piece.page != PageSize::Size4K {
            self.larger.push((start, start + len));
            return;
        }
        // Plain pages may be parts of larger folios that are not mapped as such.
        let folios = run.frame.and_then(|frame| pagemap.folios(frame, len / 4096));
        self.plain += len;
        for (frame, frames) in folios.unwrap_or_default() {
            let (from, to) = (frame * 4096, (frame + frames) * 4096);
            self.plain -= to.min(start + len) - from.max(start);
            self.larger.push((from, to));
        }
    }

    fn charge(mut self) -> u64 {
        self.larger.sort_unstable();
        let mut seen = 0;
        let mut larger = 0;
        for (start, end) in self.larger {
            larger += end.saturating_sub(start.max(seen));
            seen = seen.max(end);
        }
        self.plain + larger
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_byte_of_larger_folios_is_charged_once(
            ranges in proptest::collection::vec((0u64..60, 1u64..20), 0..40), plain in 0u64..9,
        ) {
            let mut model = [false; 80];
            for &(start, len) in &ranges {
                (start..start + len).for_each(|byte| model[usize::try_from(byte).unwrap()] = true);
            }
            let larger = ranges.into_iter().map(|(start, len)| (start, start + len)).collect();
            let covered = model.iter().filter(|covered| **covered).count() as u64;
            prop_assert_eq!(Footprint { plain, larger }.charge(), plain + covered);
        }
    }
}
