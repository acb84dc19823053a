//! Which parts of a source hold data, and the requests that move them. Holes of a file are skipped,
//! or written as zeroes where the destination may hold something else.

use rustix::fs::{SeekFrom, seek};
use std::fs::File;
use std::ops::Range;

/// The unit of ranges: the block of most file systems, and a multiple of every target's.
const GRAIN: u64 = 4096;
/// The most ranges that are told apart: beyond that, short holes become data.
const MAX_RANGES: usize = 1 << 16;

/// The parts of a source that hold data, ascending and apart.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Ranges {
    data: Vec<Range<u64>>,
    total: u64,
}

impl Ranges {
    /// Creates the ranges of a source without holes.
    pub(crate) fn whole(total: u64) -> Self {
        let data = if total == 0 { Vec::new() } else { std::iter::once(0..total).collect() };
        Self { data, total }
    }

    /// Asks the file system for the data of the first `total` bytes of `file` (SEEK_DATA,
    /// SEEK_HOLE; Linux 3.1). Where it does not know, all is data.
    pub(crate) fn of_file(file: &File, total: u64) -> Self {
        let data = |at| seek(file, SeekFrom::Data(at));
        let hole = |at| seek(file, SeekFrom::Hole(at));
        let extents = std::iter::successors(Some(Ok(0..0)), |last: &Result<Range<u64>, _>| {
            let at = last.as_ref().ok()?.end;
            match data(at) {
                Ok(start) if start < total => Some(hole(start).map(|end| start..end.min(total))),
                // No data is left.
                Ok(_) | Err(rustix::io::Errno::NXIO) => None,
                Err(errno) => Some(Err(errno)),
            }
        });
        // `collect` stops at the first error.
        Self::of_extents(extents.skip(1), total, MAX_RANGES).unwrap_or_else(|_| Self::whole(total))
    }

    /// Merges extents to at most `most` ranges of whole grains, which become larger as long as
    /// there are more.
    fn of_extents<E>(
        extents: impl Iterator<Item = Result<Range<u64>, E>>,
        total: u64,
        most: usize,
    ) -> Result<Self, E> {
        let (mut data, mut grain): (Vec<Range<u64>>, _) = (Vec::new(), GRAIN);
        for extent in extents {
            append(&mut data, extent?, grain, total);
            while data.len() > most {
                grain *= 2;
                let finer = std::mem::take(&mut data);
                finer.into_iter().for_each(|range| append(&mut data, range, grain, total));
            }
        }
        Ok(Self { data, total })
    }

    /// Returns the ranges with data.
    pub(crate) fn data(&self) -> &[Range<u64>] {
        &self.data
    }

    /// Returns all bytes, with the holes.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Returns the bytes of the ranges with data.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.data.iter().map(|range| range.end - range.start).sum()
    }

    /// Returns the requests of at most `block` bytes that move the data, and with `holes` those
    /// that write the holes.
    pub(crate) fn pieces(&self, block: usize, holes: bool) -> impl Iterator<Item = Piece> + '_ {
        let gaps = std::iter::once(0).chain(self.data.iter().map(|range| range.end));
        let starts = self.data.iter().map(|range| range.start).chain(std::iter::once(self.total));
        let gaps =
            gaps.zip(starts).map(move |(from, to)| (if holes { from..to } else { to..to }, true));
        let data = self
            .data
            .iter()
            .map(|range| (range.clone(), false))
            .chain(std::iter::once((0..0, false)));
        gaps.zip(data).flat_map(|(gap, data)| [gap, data]).flat_map(move |(range, is_hole)| {
            let step = (block as u64).max(1);
            let starts = std::iter::successors(Some(range.start), move |at| at.checked_add(step));
            starts.take_while(move |at| *at < range.end).map(move |offset| Piece {
                offset,
                len: usize::try_from(range.end - offset).unwrap_or(usize::MAX).min(block),
                is_hole,
            })
        })
    }
}

/// One request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    /// The first byte.
    pub(crate) offset: u64,
    /// The number of bytes.
    pub(crate) len: usize,
    /// Whether it is zeroes that are not read.
    pub(crate) is_hole: bool,
}

/// Appends a range, extended to whole grains within `total`, and merges it with the last one.
fn append(data: &mut Vec<Range<u64>>, range: Range<u64>, grain: u64, total: u64) {
    let start = range.start / grain * grain;
    let end = range.end.checked_next_multiple_of(grain).unwrap_or(total).min(total);
    match data.last_mut() {
        Some(last) if start <= last.end => last.end = last.end.max(end),
        _ => data.push(start..end),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use std::os::unix::fs::FileExt;

    fn of(extents: &[Range<u64>], total: u64, most: usize) -> Ranges {
        let extents = extents.iter().map(|range| Ok::<_, ()>(range.clone()));
        Ranges::of_extents(extents, total, most).unwrap()
    }

    #[test]
    fn the_data_of_a_file_is_found() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        assert_eq!(Ranges::of_file(&file, 0), Ranges::whole(0));
        file.set_len(10 << 20).unwrap();
        file.write_all_at(b"data", (4 << 20) + 5).unwrap();
        let ranges = Ranges::of_file(&file, 10 << 20);
        // A file system without holes has one range.
        assert!(ranges.data_bytes() == 4096 || ranges == Ranges::whole(10 << 20), "{ranges:?}");
        if ranges.data_bytes() == 4096 {
            let [data] = ranges.data() else { panic!("{ranges:?}") };
            assert_eq!((data.start, data.end), (4 << 20, (4 << 20) + 4096));
            assert_eq!(Ranges::of_file(&file, (4 << 20) + 9).data_bytes(), 9);
            assert_eq!(Ranges::of_file(&file, 4 << 20).data_bytes(), 0);
        }
        // A pipe cannot say.
        let (reader, _writer) = std::io::pipe().unwrap();
        let reader: std::os::fd::OwnedFd = reader.into();
        assert_eq!(Ranges::of_file(&reader.into(), 77), Ranges::whole(77));
    }

    #[test]
    fn a_file_in_very_many_parts_has_few_ranges() {
        let extents: Vec<_> = (0..1000u64).map(|part| part * 8192..part * 8192 + 1).collect();
        let ranges = of(&extents, 1000 * 8192, 10);
        assert!(ranges.data().len() <= 10, "{}", ranges.data().len());
        assert_eq!(of(&extents, 1000 * 8192, 1000).data_bytes(), 1000 * 4096);
    }

    #[test]
    fn pieces_cover_the_data_once_and_nothing_else() {
        let mut random = Random::new(1);
        for _ in 0..300 {
            let mut below = |limit: u64| random.below(limit);
            let (block, most) = (
                512 * (1 + usize::try_from(below(100)).unwrap()),
                1 + usize::try_from(below(8)).unwrap(),
            );
            let mut at = 0;
            let extents: Vec<_> = (0..below(12))
                .map(|_| {
                    let start = at + below(40_000);
                    at = start + 1 + below(40_000);
                    start..at
                })
                .collect();
            let total = at + below(10_000);
            let ranges = of(&extents, total, most);
            assert!(ranges.data().len() <= most);
            let mut kinds = vec![None; usize::try_from(total).unwrap()];
            for Piece { offset, len, is_hole } in ranges.pieces(block, true) {
                assert!((1..=block).contains(&len) && offset % 512 == 0);
                for kind in &mut kinds[usize::try_from(offset).unwrap()..][..len] {
                    assert_eq!(kind.replace(is_hole), None, "twice");
                }
            }
            assert!(kinds.iter().all(Option::is_some));
            for Range { start, end } in extents {
                let extent = usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
                assert!(kinds[extent].iter().all(|kind| *kind == Some(false)));
            }
            let data: Vec<_> = ranges.pieces(block, true).filter(|piece| !piece.is_hole).collect();
            assert_eq!(data.iter().map(|piece| piece.len as u64).sum::<u64>(), ranges.data_bytes());
            assert_eq!(ranges.pieces(block, false).collect::<Vec<_>>(), data);
        }
    }
}
