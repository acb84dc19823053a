//! Any profile, any segments: what comes out obeys the profile and is what went in, and every refusal is deserved.
//!
//! `cargo +nightly fuzz run gather`
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use pinfold_core::addr::{Iova, IovaRange, Segment};
use pinfold_core::gather::{GatherError, Profile};
use pinfold_core::registered::Registered;

#[derive(Arbitrary, Debug)]
struct Input {
    max_segments: u16,
    max_segment_bytes: u64,
    boundary: u64,
    boundary_shift: Option<u8>,
    align: u64,
    align_shift: Option<u8>,
    addr: usize,
    offset: u64,
    len: u64,
    segments: Vec<(u64, u64, bool)>,
}

fuzz_target!(|input: Input| {
    let boundary = input.boundary_shift.map_or(input.boundary, |shift| 1 << (shift % 64));
    let align = input.align_shift.map_or(input.align, |shift| 1 << (shift % 16));
    let mut segments: Vec<Segment> = Vec::new();
    for &(start, len, beside) in &input.segments {
        let next = segments.last().and_then(|s| s.iova.checked_add(s.len)).filter(|_| beside);
        segments.push(Segment { iova: next.unwrap_or(Iova::new(start)), len });
    }
    // Longer ones are possible, but their tables are large and say no more.
    let bytes = segments.iter().fold(0u64, |sum, s| sum.saturating_add(s.len));
    if bytes <= 1 << 32
        && let Ok(buffer) = Registered::from_segments(input.addr, segments.iter().copied())
        && let Ok(part) = buffer.segments(input.offset, input.len)
    {
        let mut offset = input.offset;
        for segment in part {
            assert_eq!(buffer.locate(offset).expect("inside").iova, segment.iova);
            offset += segment.len;
        }
        assert_eq!(offset, input.offset + input.len);
    }
    let Ok(profile) = Profile::new(input.max_segments.into(), input.max_segment_bytes, boundary, align)
    else {
        return;
    };
    check(profile, &segments);
});

fn check(profile: Profile, segments: &[Segment]) {
    let wild = segments.iter().any(|s| IovaRange::new(s.iova, s.len).is_err());
    let cut: Result<Vec<Segment>, _> = profile.gather(segments.iter().copied()).collect();
    let count = profile.count(segments.iter().copied());
    match cut {
        Ok(cut) => {
            assert!(!wild);
            assert_eq!(count, Ok(cut.len() as u64));
            assert!(cut.len() as u64 <= u64::from(profile.max_segments()));
            cut.iter().for_each(|segment| obeys(profile, segment));
            assert_eq!(joined(&cut), joined(segments));
        }
        Err(GatherError::TooMany { needed, limit }) => {
            assert!(needed > limit && limit == u64::from(profile.max_segments()));
            assert!(count.is_err() || count == Ok(needed));
        }
        Err(GatherError::Range(_)) => assert!(wild && count.is_err()),
        Err(error) => assert_eq!(count, Err(error)),
    }
}

fn obeys(profile: Profile, segment: &Segment) {
    let range = IovaRange::new(segment.iova, segment.len).expect("a range");
    assert!(range.len() <= profile.max_segment_bytes() && range.is_aligned(profile.align()));
    if profile.boundary() != 0 {
        assert_eq!(range.start().raw() / profile.boundary(), range.last().raw() / profile.boundary());
    }
}

/// The same memory in as few runs as there can be.
fn joined(segments: &[Segment]) -> Vec<Segment> {
    let mut runs: Vec<Segment> = Vec::new();
    for segment in segments {
        match runs.last_mut() {
            Some(last) if last.iova.checked_add(last.len) == Some(segment.iova) => last.len += segment.len,
            _ => runs.push(*segment),
        }
    }
    runs
}
