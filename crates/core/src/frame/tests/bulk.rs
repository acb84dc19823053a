//! Arrays that are filled and freed word by word.

use super::*;
use proptest::prelude::*;

/// Fills `count` slots of a new zone: with its first frames, in order.
fn filled(zone: &Zone, count: usize) -> Vec<Option<Frame>> {
    let mut slots = vec![None; count];
    assert_eq!(zone.local().fill(&mut slots), count);
    assert!(slots.iter().flatten().map(|frame| frame.index()).eq(0..u32::try_from(count).unwrap()));
    slots
}

/// Frees `slots`, of which that at `wrong` cannot be freed, and compares what is left.
fn frees_up_to(
    zone: &Zone,
    owner: bool,
    slots: &[Option<Frame>],
    wrong: usize,
    expected: FrameError,
) {
    let mut rest = slots.to_vec();
    let mut local = zone.local();
    let freed = if owner { local.free_bulk(&mut rest) } else { zone.local().free_bulk(&mut rest) };
    assert_eq!(freed, Err(expected), "slot {wrong}");
    assert!(rest[..wrong].iter().all(Option::is_none), "slot {wrong}");
    assert_eq!(rest[wrong..], slots[wrong..], "slot {wrong}");
    drop(local);
    let free = zone.frames() - u32::try_from(zone.taken()).unwrap();
    assert!(free as usize >= wrong, "slot {wrong}");
}

#[test]
fn a_wrong_free_in_a_whole_word_is_found_at_its_slot() {
    for owner in [false, true] {
        for wrong in [0, 1, 31, 63, 64, 100, 127, 190, 199] {
            let zone = Zone::new(512 * 3).unwrap();
            let slots = filled(&zone, 200);
            let twice = slots[wrong].unwrap();
            zone.free(twice, Order::PAGE).unwrap();
            frees_up_to(&zone, owner, &slots, wrong, FrameError::DoubleFree { frame: twice });
        }
    }
}

#[test]
fn a_frame_that_the_owner_holds_is_found_in_a_whole_word() {
    for wrong in [0, 17, 63, 64, 127] {
        let zone = Zone::new(512 * 64).unwrap();
        let slots = filled(&zone, 128);
        let twice = slots[wrong].unwrap();
        let (mut local, mut rest) = (zone.local(), slots.clone());
        local.free(twice, Order::PAGE).unwrap();
        assert_eq!(local.free_bulk(&mut rest), Err(FrameError::DoubleFree { frame: twice }));
        assert_eq!(rest.iter().filter(|slot| slot.is_none()).count(), wrong);
        assert_eq!(local.held() as usize, wrong + 1);
    }
}

#[test]
fn a_word_that_ends_behind_the_zone_is_foreign() {
    let zone = Zone::new(512 + 40).unwrap();
    let mut slots: Vec<_> = (512..512 + 64).map(Frame::new).collect();
    let mut all = vec![None; 552];
    assert_eq!(zone.local().fill(&mut all), 552);
    let foreign = FrameError::Foreign { frame: frame(552), run_frames: 1, frames: 552 };
    assert_eq!(zone.local().free_bulk(&mut slots), Err(foreign));
    assert_eq!(slots.iter().position(Option::is_some), Some(40));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: crate::testing::cases(340), ..ProptestConfig::default() })]

    /// Arrays of which some slots are full, filled from a zone with holes, and freed after slots
    /// were swapped.
    #[test]
    fn arrays_are_filled_and_freed(
        owner in any::<bool>(),
        holes in prop::collection::vec(0..1536_u32, 0..40),
        full in prop::collection::vec(0..300_usize, 0..6),
        swaps in prop::collection::vec((0..300_usize, 0..300_usize), 0..6),
        len in 0..300_usize,
    ) {
        let zone = Zone::with_watermarks(1536, Watermarks::NONE).unwrap();
        let holes: BTreeSet<_> = holes.into_iter().collect();
        for &hole in &holes {
            prop_assert!(zone.0.map.claim_exactly(map::Part::of(frame(hole))).mask != 0);
        }
        let mut local = zone.local();
        let mut slots = vec![None; len];
        // Frames that are not the zone's mark the slots that must not change.
        let mark = |slot: usize| frame(1_000_000 + u32::try_from(slot).unwrap());
        let marked: BTreeSet<_> = full.into_iter().filter(|&slot| slot < len).collect();
        marked.iter().for_each(|&slot| slots[slot] = Some(mark(slot)));
        let got = if owner { local.fill(&mut slots) } else { zone.local().fill(&mut slots) };
        prop_assert_eq!(got, len);
        for &slot in &marked {
            prop_assert_eq!(slots[slot].take(), Some(mark(slot)));
        }
        let frames: BTreeSet<_> = slots.iter().flatten().map(|frame| frame.index()).collect();
        prop_assert_eq!(frames.len(), len - marked.len());
        prop_assert!(frames.is_disjoint(&holes) && frames.iter().all(|&index| index < 1536));
        for (a, b) in swaps {
            if a.max(b) < len {
                slots.swap(a, b);
            }
        }
        let freed = if owner { local.free_bulk(&mut slots) } else { zone.local().free_bulk(&mut slots) };
        prop_assert_eq!(freed, Ok(frames.len()));
        prop_assert!(slots.iter().all(Option::is_none));
        drop(local);
        let taken: u32 = (0..3).map(|region| zone.0.map.taken_in(region)).sum();
        prop_assert_eq!(taken as usize, holes.len());
    }
}
