//! Profiles: refused ones, merging, cutting, and agreement with a model that goes byte by byte.

use super::*;
use crate::addr::{Iova, RangeError, Segment};
use proptest::prelude::*;

fn seg(iova: u64, len: u64) -> Segment {
    Segment { iova: Iova::new(iova), len }
}

fn all(profile: Profile, segments: &[Segment]) -> Result<Vec<Segment>, GatherError> {
    profile.gather(segments.iter().copied()).collect()
}

#[test]
fn impossible_profiles_are_refused() {
    assert_eq!(Profile::new(0, 1, 0, 1), Err(ProfileError::NoSegments));
    assert_eq!(Profile::new(1, 1, 0, 0), Err(ProfileError::Align { align: 0 }));
    assert_eq!(Profile::new(1, 8, 0, 6), Err(ProfileError::Align { align: 6 }));
    assert_eq!(Profile::new(1, 8, 2, 4), Err(ProfileError::Boundary { boundary: 2, align: 4 }));
    assert_eq!(Profile::new(1, 8, 12, 4), Err(ProfileError::Boundary { boundary: 12, align: 4 }));
    assert_eq!(
        Profile::new(1, 3, 0, 4),
        Err(ProfileError::SegmentBytes { max_segment_bytes: 3, align: 4 })
    );
    assert_eq!(
        Profile::new(1, 0, 0, 1),
        Err(ProfileError::SegmentBytes { max_segment_bytes: 0, align: 1 })
    );
}

#[test]
fn neighbours_are_merged_before_they_are_cut() {
    let profile = Profile::new(8, 0x3000, 0, 1).unwrap();
    let cut = all(profile, &[seg(0x1000, 0x1000), seg(0x2000, 0x3000), seg(0x4000, 0x10)]).unwrap();
    assert_eq!(cut, [seg(0x1000, 0x3000), seg(0x4000, 0x1000), seg(0x4000, 0x10)]);
    // In the other order they are not adjacent.
    assert_eq!(all(profile, &[seg(0x2000, 0x10), seg(0x1000, 0x1000)]).unwrap().len(), 2);
}

#[test]
fn a_boundary_is_never_crossed() {
    let profile = Profile::new(8, 1 << 40, 0x1_0000, 1).unwrap();
    let cut = all(profile, &[seg(0xffff, 0x1_0002)]).unwrap();
    assert_eq!(cut, [seg(0xffff, 1), seg(0x1_0000, 0x1_0000), seg(0x2_0000, 1)]);
}

#[test]
fn too_many_segments_are_counted_without_iterating_over_them() {
    let profile = Profile::new(2, 1, 0, 1).unwrap();
    let mut gather = profile.gather([seg(0, 1 << 50), seg(1 << 60, 3)]);
    assert_eq!(gather.by_ref().take(2).filter(Result::is_ok).count(), 2);
    assert_eq!(gather.next(), Some(Err(GatherError::TooMany { needed: (1 << 50) + 3, limit: 2 })));
    assert_eq!(gather.next(), None);
    let mut slots = [seg(0, 0); 1];
    let few = profile.gather_into([seg(0, 2)], &mut slots);
    assert_eq!(few, Err(GatherError::TooMany { needed: 2, limit: 1 }));
    assert_eq!(profile.gather_into([seg(9, 1)], &mut slots).unwrap(), [seg(9, 1)]);
}

#[test]
fn misaligned_and_wrapping_segments_are_refused() {
    let profile = Profile::new(8, 0x1000, 0, 4).unwrap();
    let misaligned = |iova, len| GatherError::Misaligned { iova: Iova::new(iova), len, align: 4 };
    assert_eq!(all(profile, &[seg(2, 4)]), Err(misaligned(2, 4)));
    assert_eq!(all(profile, &[seg(4, 5)]), Err(misaligned(4, 5)));
    // Two misaligned halves of an aligned run are merged before the check.
    assert_eq!(all(profile, &[seg(4, 5), seg(9, 3)]).unwrap(), [seg(4, 8)]);
    let wraps = RangeError::Wraps { kind: "iova", start: 8, len: u64::MAX };
    assert_eq!(all(profile, &[seg(8, u64::MAX)]), Err(wraps.into()));
    let empty = RangeError::Empty { kind: "iova", start: 8 };
    assert_eq!(all(profile, &[seg(0, 8), seg(8, 0)]), Err(empty.into()));
}

proptest! {
    #[test]
    fn gather_agrees_with_single_bytes(
        pieces in prop::collection::vec((0u64..3, 0u64..64, 1u64..40), 1..10),
        max in 1u64..40, boundary in 0u32..8, align in 0u32..4, limit in 1u32..40,
    ) {
        let (align, boundary) = (1u64 << align, if boundary == 0 { 0 } else { 1 << boundary });
        let Ok(profile) = Profile::new(limit, max, boundary, align) else {
            prop_assert!(max < align || (boundary != 0 && boundary < align));
            return Ok(());
        };
        let mut segments = Vec::new();
        let mut end = 0;
        for (kind, place, len) in pieces {
            let start = if kind == 0 { place } else { end };
            end = start + len;
            segments.push(seg(start, len));
        }
        let bytes: Vec<u64> = segments.iter().flat_map(|s| s.iova.raw()..s.iova.raw() + s.len).collect();
        // The model goes byte by byte, and begins a new segment only where one must.
        let mut runs = 1;
        let mut model = vec![seg(bytes[0], 1)];
        let mut edges = vec![bytes[0]];
        for pair in bytes.windows(2) {
            let last = model.last_mut().unwrap();
            let jump = pair[1] != pair[0] + 1;
            let full = last.len == max / align * align || (boundary != 0 && pair[1] % boundary == 0);
            if jump {
                runs += 1;
                edges.extend([pair[0] + 1, pair[1]]);
            }
            if jump || full { model.push(seg(pair[1], 1)) } else { last.len += 1 }
        }
        edges.push(bytes.last().unwrap() + 1);
        let aligned = edges.iter().all(|edge| edge % align == 0);
        prop_assert_eq!(edges.len(), 2 * runs);

        let mut slots = [seg(0, 0); 512];
        let into = profile.gather_into(segments.iter().copied(), &mut slots).map(|full| full.to_vec());
        let lazily = all(profile, &segments);
        prop_assert_eq!(&into, &lazily);
        prop_assert_eq!(profile.count(segments.iter().copied()).ok(), aligned.then_some(model.len() as u64));
        match lazily {
            Ok(cut) => prop_assert!(aligned && cut == model && model.len() <= limit as usize),
            Err(GatherError::TooMany { needed, limit: at }) => {
                prop_assert_eq!(at, u64::from(limit));
                prop_assert!(model.len() as u64 > at && (!aligned || needed == model.len() as u64));
            }
            Err(GatherError::Misaligned { .. }) => prop_assert!(!aligned),
            Err(error) => prop_assert!(false, "{}", error),
        }
    }
}
