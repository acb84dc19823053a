//! Several page sizes in one buffer: one small page does not divide all folios.

use super::*;

const KIB: u64 = 1024;
const GIB: u64 = 1 << 30;

/// Segments of these sizes, none adjacent to the one before.
fn scattered(sizes: impl IntoIterator<Item = u64>) -> Vec<Segment> {
    let mut iova = GIB;
    let mut place = |len: u64| {
        iova = (iova + GIB).next_multiple_of(len);
        let segment = seg(iova, len);
        iova += len;
        segment
    };
    sizes.into_iter().map(&mut place).collect()
}

/// Describes the segments and checks the device address of each 4 KiB and the list of segments.
fn check(addr: usize, segments: &[Segment]) -> Folios {
    let buffer = Folios::from_segments(addr, segments.iter().copied()).unwrap();
    let mut offset = 0;
    for segment in segments {
        for at in (0..segment.len).step_by(4096).chain([segment.len - 1]) {
            let found = buffer.locate(offset + at).unwrap();
            assert_eq!(found.iova.raw(), segment.iova.raw() + at, "offset {}", offset + at);
        }
        offset += segment.len;
    }
    let listed: Vec<_> = buffer.segments(0, buffer.len()).unwrap().collect();
    assert_eq!(listed, segments, "nothing is split or joined");
    buffer
}

#[test]
fn one_plain_page_before_hugepages_leaves_them_whole() {
    let segments = scattered([4 * KIB, HUGE, HUGE, HUGE]);
    let buffer = check(0x7000_0000_0000 - 4096, &segments);
    assert_eq!((buffer.folios(), buffer.folio_shift(), buffer.divided()), (4, 21, 0));
    assert_eq!(buffer.table_bytes(), 32);
}

#[test]
fn plain_pages_among_hugepages_divide_their_own_folio_only() {
    // A hugepage, 2 MiB of plain pages, a hundred hugepages.
    let sizes = core::iter::once(HUGE).chain([4 * KIB; 512]).chain([HUGE; 100]);
    let buffer = check(0x7000_0000_0000, &scattered(sizes));
    assert_eq!((buffer.folios(), buffer.folio_shift(), buffer.divided()), (101 + 512, 21, 1));
    assert!(buffer.table_bytes() <= 8 * (102 + 512 + 2));
    // Adjacent plain pages: the divided folio has as few parts as possible.
    let sizes = core::iter::once(HUGE).chain([512 * KIB; 4]).chain([HUGE; 100]);
    let buffer = check(0x7000_0000_0000, &scattered(sizes));
    assert_eq!((buffer.folios(), buffer.divided()), (101 + 4, 1));
}

#[test]
fn a_first_and_a_last_folio_are_divided_where_the_buffer_begins_and_ends_in_them() {
    let plain = |pages| core::iter::repeat_n(4 * KIB, pages);
    let sizes = plain(3).chain([HUGE; 9]).chain(plain(5));
    let buffer = check(0x7000_0000_0000 - 3 * 4096, &scattered(sizes));
    assert_eq!((buffer.folios(), buffer.divided()), (3 + 9 + 5, 2));
    assert!(buffer.table_bytes() <= 8 * (11 + 8 + 1));
}

#[test]
fn all_three_page_sizes_at_once() {
    let sizes =
        [GIB, GIB].into_iter().chain([HUGE; 512]).chain([4 * KIB; 700]).chain([64 * KIB; 20]);
    let buffer = check(0x7f00_0000_0000 >> 30 << 30, &scattered(sizes));
    assert!(buffer.folios() < 4 * 1024, "{}", buffer.folios());
    assert!(buffer.table_bytes() <= 16 * buffer.folios());
}

#[test]
fn a_tebibyte_of_hugepages_with_one_plain_page_has_a_table_of_four_mebibytes() {
    let pages = (1 << 40) / HUGE - 1;
    let first = scattered([4 * KIB]);
    let rest = (0..pages).map(|i| seg((i + 2) * 2 * HUGE, HUGE));
    let buffer =
        Folios::from_segments(0x7000_0000_0000 - 4096, first.into_iter().chain(rest)).unwrap();
    assert_eq!(buffer.folios() as u64, pages + 1);
    assert_eq!(buffer.table_bytes() as u64, 8 * (pages + 1));
    assert_eq!(
        buffer.locate(4096 + HUGE * (pages - 1) + 7),
        Ok(seg((pages + 1) * 2 * HUGE + 7, HUGE - 7))
    );
}

/// Runs of pieces of all sizes, each at a multiple of its size in the process, some adjacent for
/// the device. The first and the last piece may be partial.
fn mixtures() -> impl Strategy<Value = (usize, Vec<Segment>)> {
    let sizes = prop_oneof![
        4 => (Just(4 * KIB), 1usize..40),
        1 => (Just(4 * KIB), 500usize..530),
        2 => (Just(16 * KIB), 1usize..8),
        2 => (Just(64 * KIB), 1usize..40),
        4 => (Just(HUGE), 1usize..6),
        1 => (Just(GIB), 1usize..3),
    ];
    let runs = prop::collection::vec((sizes, any::<u64>(), any::<bool>()), 1..8);
    (runs, 0u64..600, any::<[u16; 2]>()).prop_map(|(runs, base, [cut, short])| {
        let start = 0x7000_0000_0000 + base * 4096;
        let mut at = start;
        let mut iova = 1 << 40;
        let mut segments = Vec::new();
        for ((size, count), seed, near) in runs {
            // Increasing pieces fill up to the alignment of the next ones.
            let begin = at.next_multiple_of(size);
            let mut from = at;
            let fill = core::iter::from_fn(|| {
                let piece = (1 << from.trailing_zeros()).min(size);
                from += piece;
                (from <= begin).then_some(piece)
            });
            let pieces: Vec<_> = fill.chain(core::iter::repeat_n(size, count)).collect();
            for (i, len) in pieces.into_iter().enumerate() {
                let jump = (seed >> (i % 64)) & 3;
                iova = if near && jump != 0 {
                    iova
                } else {
                    (iova + (jump + 1) * GIB).next_multiple_of(len)
                };
                segments.push(seg(iova, len));
                iova += len;
                at += len;
            }
        }
        let last = segments.len() - 1;
        let short = segments[last].len * u64::from(short) / 65536;
        segments[last].len -= short;
        let cut = (segments[0].len - 1) * u64::from(cut) / 65536;
        segments[0].iova = Iova::new(segments[0].iova.raw() + cut);
        segments[0].len -= cut;
        (usize::try_from(start + cut).unwrap(), segments)
    })
}

/// The model: runs that are contiguous for the device, as offset, device address and length.
fn runs(segments: &[Segment]) -> Vec<(u64, u64, u64)> {
    let mut runs: Vec<(u64, u64, u64)> = Vec::new();
    let mut offset = 0;
    for segment in segments {
        match runs.last_mut().filter(|(_, iova, len)| iova + len == segment.iova.raw()) {
            Some((_, _, len)) => *len += segment.len,
            None => runs.push((offset, segment.iova.raw(), segment.len)),
        }
        offset += segment.len;
    }
    runs
}

/// Locates a byte by a walk: its device address, and how many bytes are contiguous from there.
fn walk(runs: &[(u64, u64, u64)], offset: u64) -> (u64, u64) {
    let (first, iova, len) = runs.iter().rev().find(|run| run.0 <= offset).unwrap();
    (iova + (offset - first), len - (offset - first))
}

proptest! {
    #[test]
    fn locate_agrees_with_a_walk((addr, segments) in mixtures(), picks in prop::collection::vec(any::<u64>(), 60)) {
        let buffer = Folios::from_segments(addr, segments.iter().copied()).unwrap();
        let runs = runs(&segments);
        let len: u64 = segments.iter().map(|segment| segment.len).sum();
        prop_assert_eq!(buffer.len(), len);
        // Around every segment boundary, and at random.
        let mut edges = Vec::from([0, len - 1]);
        let mut end = 0;
        for segment in &segments {
            end += segment.len;
            edges.extend([end - 1, end.min(len - 1)]);
        }
        for offset in edges.into_iter().chain(picks.into_iter().map(|pick| pick % len)) {
            let found = buffer.locate(offset).unwrap();
            let (iova, run) = walk(&runs, offset);
            prop_assert_eq!(found.iova.raw(), iova, "offset {}", offset);
            prop_assert!(found.len >= 1 && found.len <= run && offset + found.len <= len);
        }
        prop_assert!(buffer.locate(len).is_err());
        prop_assert!(buffer.table_bytes() <= 16 * buffer.folios());
        let pages: u64 = segments.iter().map(|segment| segment.len.div_ceil(4096)).sum();
        prop_assert!(buffer.table_bytes() as u64 <= 16 * pages);
    }

    #[test]
    fn segments_are_the_runs_of_the_walk((addr, segments) in mixtures(), a in any::<u64>(), b in any::<u64>()) {
        let buffer = Folios::from_segments(addr, segments.iter().copied()).unwrap();
        let offset = a % buffer.len();
        let len = 1 + b % (buffer.len() - offset);
        let runs = runs(&segments);
        let mut at = offset;
        for segment in buffer.segments(offset, len).unwrap() {
            let (iova, run) = walk(&runs, at);
            prop_assert_eq!(segment, seg(iova, run.min(offset + len - at)), "at {}", at);
            at += segment.len;
        }
        prop_assert_eq!(at, offset + len);
    }
}
