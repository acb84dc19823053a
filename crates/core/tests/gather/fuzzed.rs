//! The body of the fuzz target: for any buffer, part and profile, PRPs, SGLs and segments cover
//! exactly the input within the profile, and every refusal is justified.

use crate::controller::{seg, walk_prps, walk_sgl};
use crate::pages::Pages;
use pinfold_core::addr::{IovaRange, Segment};
use pinfold_core::folio::Folios;
use pinfold_core::gather::prp::{ControllerPage, Prps};
use pinfold_core::gather::sgl::Sgl;
use pinfold_core::gather::{GatherError, LayoutError, Profile};

/// Reads values from the front of an input; zeroes follow its end.
struct Input<'i>(&'i [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// Reads a number of any size: mostly small ones, powers of two and their neighbours.
    fn number(&mut self) -> u64 {
        let (how, byte) = (self.byte(), self.byte());
        let power = 1u64 << (byte % 64);
        match how % 8 {
            0 => byte.into(),
            1 => power,
            2 => power.wrapping_sub(1),
            3 => power.wrapping_add(1),
            4 => u64::from(byte) << 12,
            5 => u64::from(byte) << 21,
            6 => u64::from(byte) << 12 | u64::from(self.byte()) << 2,
            _ => u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }

    fn segments(&mut self) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        for _ in 0..self.byte() % 40 {
            let beside = self.byte().is_multiple_of(2);
            let next =
                segments.last().and_then(|last| last.iova.checked_add(last.len)).filter(|_| beside);
            let start = next.map_or_else(|| self.number(), |iova| iova.raw());
            segments.push(seg(start, self.number()));
        }
        segments
    }
}

/// Panics if gather is wrong.
pub(crate) fn check(input: &[u8]) {
    let mut input = Input(input);
    let (max_segments, longest) = (self::u32_of(input.number()), input.number());
    let (boundary, align) = (input.number(), input.number());
    let (addr, offset, len) = (input.number(), input.number(), input.number());
    let (mps, room) = (input.byte() % 3, input.byte());
    let segments = input.segments();
    let profile = Profile::new(max_segments, longest, boundary, align).ok();
    if let Some(part) = part(addr, &segments, offset, len) {
        prps(mps, &part);
        profiled(profile, max_segments, room, &part);
    }
    prps(mps, &segments);
    profiled(profile, max_segments, room, &segments);
}

fn u32_of(number: u64) -> u32 {
    u32::try_from(number % (1 << 32)).expect("32 bits")
}

/// Returns the segments of a part of a registered buffer, after checking them.
fn part(addr: u64, segments: &[Segment], offset: u64, len: u64) -> Option<Vec<Segment>> {
    // Longer buffers are possible, but their tables are large and test nothing more.
    segments
        .iter()
        .try_fold(0u64, |sum, s| sum.checked_add(s.len).filter(|sum| *sum <= 1 << 30))?;
    let buffer =
        Folios::from_segments(usize::try_from(addr).ok()?, segments.iter().copied()).ok()?;
    let part: Vec<Segment> = buffer.segments(offset, len).ok()?.collect();
    let mut at = offset;
    for segment in &part {
        assert_eq!(buffer.locate(at).expect("inside").iova, segment.iova);
        at += segment.len;
    }
    assert_eq!(at, offset + len);
    assert_eq!(joined(&part), cut_out(segments, offset, len));
    Some(part)
}

/// The bytes from `offset` on, by going along from the start.
fn cut_out(segments: &[Segment], mut offset: u64, mut len: u64) -> Vec<Segment> {
    let mut out = Vec::new();
    for segment in segments {
        let skipped = offset.min(segment.len);
        let taken = len.min(segment.len - skipped);
        if taken > 0 {
            out.push(seg(segment.iova.raw() + skipped, taken));
        }
        (offset, len) = (offset - skipped, len - taken);
    }
    joined(&out)
}

fn profiled(profile: Option<Profile>, max_segments: u32, room: u8, segments: &[Segment]) {
    let Some(profile) = profile else { return };
    let wild = segments.iter().any(|s| IovaRange::new(s.iova, s.len).is_err());
    // A device that takes millions of pieces is given some: they are lazy.
    let few = profile.gather(segments.iter().copied()).take(100_001).collect::<Result<Vec<_>, _>>();
    if few.as_ref().is_ok_and(|few| few.len() > 100_000) {
        return;
    }
    let count = profile.count(segments.iter().copied());
    match &few {
        Ok(cut) => {
            assert!(!wild);
            assert_eq!(count, Ok(cut.len() as u64));
            assert!(cut.len() as u64 <= u64::from(max_segments));
            cut.iter().for_each(|segment| obeys(profile, segment));
            assert_eq!(joined(cut), joined(segments));
        }
        Err(GatherError::TooMany { needed, limit }) => {
            assert!(*needed > *limit && *limit == u64::from(max_segments));
            assert!(count.is_err() || count == Ok(*needed));
        }
        Err(GatherError::Range(_)) => assert!(wild && count.is_err()),
        Err(error) => assert_eq!(count.as_ref(), Err(error)),
    }
    sgl(profile, room, segments, &few);
}

fn obeys(profile: Profile, segment: &Segment) {
    let range = IovaRange::new(segment.iova, segment.len).expect("a range");
    assert!(range.len() <= profile.max_segment_bytes() && range.is_aligned(profile.align()));
    if profile.boundary() != 0 {
        assert_eq!(
            range.start().raw() / profile.boundary(),
            range.last().raw() / profile.boundary()
        );
    }
}

fn sgl(profile: Profile, room: u8, segments: &[Segment], cut: &Result<Vec<Segment>, GatherError>) {
    let pages = Pages::new(u64::from(room % 16 + 1) * 16, 64);
    let sgl: Result<Sgl<_, 60>, _> = Sgl::new(&profile, segments.iter().copied(), &mut &pages);
    match sgl {
        Ok(sgl) => {
            let (pieces, read) = walk_sgl(sgl.sgl1().words(), |at| pages.read(at));
            assert_eq!((pieces.len() as u64, read), (sgl.data_blocks(), sgl.list_pages()));
            pieces.iter().for_each(|segment| obeys(profile, segment));
            assert_eq!(joined(&pieces), joined(segments));
            sgl.release(&mut &pages);
        }
        Err(LayoutError::Empty) => assert!(segments.is_empty()),
        Err(LayoutError::ListPage { .. }) => assert!(room.is_multiple_of(16)),
        // Pieces of more than 32 bits make more descriptors than segments.
        Err(LayoutError::Gather(GatherError::TooMany { needed, .. })) => {
            assert!(cut.as_ref().is_ok_and(|cut| cut.len() as u64 <= needed) || cut.is_err());
        }
        Err(LayoutError::Gather(_)) => assert!(cut.is_err()),
        Err(LayoutError::TooLong { limit: 60 }) => assert!(
            cut.as_ref().is_ok_and(|cut| cut.len() > 60)
                || segments.len() > 60
                || cut.is_err()
                || profile.max_segment_bytes() > u64::from(u32::MAX)
        ),
        Err(LayoutError::Profile(_)) => assert!(profile.align() > u64::from(u32::MAX)),
        Err(error) => panic!("{error}"),
    }
    assert_eq!(pages.out(), 0);
}

fn prps(mps: u8, segments: &[Segment]) {
    let page = ControllerPage::from_mps(mps).expect("a small page");
    let pages = Pages::new(page.bytes(), 4);
    let prps: Result<Prps<_, 4>, _> = Prps::new(page, segments.iter().copied(), &mut &pages);
    match prps {
        Ok(prps) => {
            let len = segments.iter().map(|s| s.len).sum();
            let (pieces, read) =
                walk_prps(page.bytes(), prps.prp1(), prps.prp2(), len, |at| pages.read(at));
            assert_eq!((pieces.len() as u64, read), (prps.entries(), prps.list_pages()));
            assert_eq!(joined(&pieces), joined(segments));
            prps.release(&mut &pages);
        }
        Err(LayoutError::Empty) => assert!(segments.is_empty()),
        Err(LayoutError::Gather(GatherError::Range(_))) => {
            assert!(segments.iter().any(|s| IovaRange::new(s.iova, s.len).is_err()))
        }
        Err(LayoutError::Offset { iova }) => {
            assert!(iova == segments[0].iova && !iova.is_aligned(4))
        }
        Err(LayoutError::Ragged { iova, .. }) => assert!(!iova.is_aligned(page.bytes())),
        Err(LayoutError::TooLong { limit: 4 }) => {}
        Err(error) => panic!("{error}"),
    }
    assert_eq!(pages.out(), 0);
}

/// The same memory in as few runs as there can be.
fn joined(segments: &[Segment]) -> Vec<Segment> {
    let mut runs: Vec<Segment> = Vec::new();
    for segment in segments {
        match runs.last_mut() {
            Some(last) if last.iova.checked_add(last.len) == Some(segment.iova) => {
                last.len += segment.len
            }
            _ => runs.push(*segment),
        }
    }
    runs
}
