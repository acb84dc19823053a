//! Watermarks, pressure, and exhaustion at every step.

use super::*;
use proptest::prelude::*;

fn zone_with(frames: u32, min: u32, low: u32, high: u32) -> Zone {
    Zone::with_watermarks(frames, Watermarks::new(min, low, high).unwrap()).unwrap()
}

#[test]
fn default_watermarks_depend_on_the_size() {
    assert_eq!(Zone::new(16_383).unwrap().watermarks(), Watermarks::NONE);
    let marks = |min, low, high| Watermarks::new(min, low, high).unwrap();
    assert_eq!(Zone::new(1 << 18).unwrap().watermarks(), marks(256, 320, 384));
    let most = Watermarks::for_frames(Zone::MAX_FRAMES);
    assert_eq!(most, marks(16_384, 20_480, 24_576));
    assert_eq!((Watermarks::new(2, 1, 3), Watermarks::new(1, 3, 2)), (None, None));
}

#[test]
fn bulk_calls_stop_at_low_and_take_one_more() {
    let zone = zone_with(1000, 50, 100, 150);
    let mut slots = vec![None; 1000];
    assert_eq!(zone.local().fill(&mut slots), 901);
    assert!(zone.under_pressure());
    assert_eq!((zone.available(), zone.stats().fell_back, zone.stats().bulk_partial), (99, 1, 1));
    let mut more = vec![None; 1000];
    assert_eq!(zone.local().fill(&mut more), 1, "a call below the watermark gets one frame");
    assert_eq!(zone.local().fill_by(&mut more, Urgency::Urgent), 50, "98 - 50, and one more");
    assert_eq!(zone.available(), 49);
    assert_eq!(
        zone.local().fill_all(&mut [None; 2]),
        Err(FrameError::Short { asked: 2, missing: 1, low: 100 }),
        "fill_all respects the watermarks"
    );
    assert_eq!(zone.local().fill_all(&mut [None; 1]), Ok(()));
    assert_eq!(zone.local().take_list(9).len(), 1);
    // `fill_all` has kept its frame, and the list has freed its own.
    assert_eq!(zone.available(), 48);
    for _ in 0..48 {
        zone.alloc(Order::PAGE).unwrap();
    }
    assert_eq!(zone.local().fill_by(&mut [None; 3], Urgency::Urgent), 0);
    assert_eq!(
        (zone.taken(), zone.stats().exhausted),
        (1000, 2),
        "the failed fill_all counts as one"
    );
    assert_eq!(zone.local().free_bulk(&mut more), Ok(50));
    assert!(zone.under_pressure(), "50 is not 150");
    assert_eq!(zone.local().free_bulk(&mut slots), Ok(901));
    assert!(!zone.under_pressure());
}

#[test]
fn an_owner_respects_the_watermarks_and_frees_under_pressure() {
    let zone = zone_with(512 * 20, 200, 300, 400);
    let mut hoarder = zone.local();
    let mut slots = vec![None; 500];
    assert_eq!(hoarder.fill(&mut slots), 500);
    assert_eq!(hoarder.free_bulk(&mut slots), Ok(500));
    assert_eq!(hoarder.held(), 512);
    let mut taker = zone.local();
    let mut all = vec![None; 512 * 20];
    let got = taker.fill(&mut all);
    // The counters do not include the hoarder's frames before it adds its counts.
    assert!((9428..=9493).contains(&got), "{got}");
    assert!(zone.under_pressure());
    let other = all[0].take().unwrap();
    hoarder.free(other, Order::PAGE).unwrap();
    assert_eq!(hoarder.held(), 0, "all freed, as the zone is under pressure");
    drop((hoarder, taker));
    assert_eq!(zone.stats().held, 0);
    assert_eq!(zone.taken(), zone.stats().in_use);
    assert_eq!(zone.local().free_bulk(&mut all), Ok(got - 1));
    assert!(!zone.under_pressure());
    assert_eq!(zone.taken(), 0);
}

/// An owner whose frees and allocs all stay in its magazine detects that the zone has run short,
/// and frees its frames.
#[test]
fn an_owner_that_uses_only_its_magazine_frees_it_under_pressure() {
    let frees = |hoarder: &mut ZoneLocal| {
        for _ in 0..300 {
            let frame = hoarder.alloc(Order::PAGE).unwrap();
            hoarder.free(frame, Order::PAGE).unwrap();
        }
    };
    let allocs = |hoarder: &mut ZoneLocal| {
        for _ in 0..65 {
            hoarder.alloc(Order::PAGE).unwrap();
        }
    };
    type Works<'a> = &'a dyn Fn(&mut ZoneLocal);
    for (works, frames) in [(&frees as Works<'_>, 1 << 18), (&allocs, 1 << 18), (&frees, 512 * 20)]
    {
        let zone = zone_with(frames, 200, 300, 400);
        let mut hoarder = zone.local();
        let mut slots = vec![None; 500];
        assert_eq!(hoarder.fill(&mut slots), 500);
        assert_eq!(hoarder.free_bulk(&mut slots), Ok(500));
        let held = hoarder.held();
        assert!(held >= 500);
        let rest = std::iter::from_fn(|| zone.alloc(Order::PAGE).ok()).count();
        assert!(zone.under_pressure());
        assert_eq!(u32::try_from(rest).unwrap() + held, frames);
        works(&mut hoarder);
        // Its frees end the pressure, and it may have claimed one batch since.
        assert!(hoarder.held() <= 64, "{} held", hoarder.held());
        assert!(zone.alloc(Order::PAGE).is_ok());
    }
}

#[test]
fn an_owner_claims_no_more_than_it_needs_under_pressure() {
    let zone = zone_with(512 * 40, 0, 0, 20_000);
    let last: Vec<_> = std::iter::from_fn(|| zone.alloc(Order::PAGE).ok()).collect();
    for frame in last.into_iter().take(1000) {
        zone.free(frame, Order::PAGE).unwrap();
    }
    let mut local = zone.local();
    local.alloc(Order::PAGE).unwrap();
    assert_eq!((zone.under_pressure(), local.held()), (true, 0));
    assert_eq!(local.fill(&mut [None; 5]), 5);
    assert_eq!((zone.under_pressure(), local.held()), (true, 0));
}

#[test]
fn a_refusal_names_the_watermark_that_it_keeps() {
    let text = |low| FrameError::Short { asked: 9, missing: 2, low }.to_string();
    let with = text(256);
    assert!(with.contains("above the low watermark, which keeps 256 frames free"), "{with}");
    let without = text(0);
    assert!(without.contains("unavailable, and none") && !without.contains("mark"), "{without}");
    // An owner's call names it as the zone's does.
    let zone = zone_with(1000, 50, 100, 150);
    let refused = zone.local().fill_all(&mut vec![None; 1000]);
    assert!(matches!(refused, Err(FrameError::Short { low: 100, .. })), "{refused:?}");
}

/// With n frames left, for each n: a call that needs one more fails and changes nothing.
#[test]
fn exhaustion_at_every_step_rolls_back() {
    let zone = Zone::with_watermarks(512 * 20, Watermarks::NONE).unwrap();
    let first = zone.alloc_run(512 * 20, 1).unwrap();
    // Not in order, so that the remaining frames are in many words.
    let mut left: Vec<Frame> = Vec::new();
    for n in 0..=1000_u32 {
        let missing = |asked| Err(FrameError::Short { asked, missing: asked - n as usize, low: 0 });
        let taken = zone.taken();
        let mut slots = vec![None; n as usize + 2];
        slots[1] = Some(first);
        assert_eq!(zone.local().fill_all(&mut slots), missing(n as usize + 1));
        assert_eq!((zone.taken(), slots.iter().flatten().count()), (taken, 1));
        {
            let mut local = zone.local();
            assert_eq!(local.fill_all(&mut slots), missing(n as usize + 1));
            assert_eq!(slots.iter().flatten().count(), 1);
        }
        assert_eq!(zone.local().take_list(n as usize + 1).len(), n as usize);
        assert_eq!((zone.taken(), zone.stats().held), (taken, 0));
        assert_eq!(zone.stats().in_use, taken);
        assert_eq!(
            zone.alloc(Order::HUGE),
            Err(FrameError::Exhausted { order: Order::HUGE, frames: 10_240 })
        );
        assert_eq!(zone.taken(), taken);
        let next = frame((n * 7919) % 10_240);
        zone.free(next, Order::PAGE).unwrap();
        left.push(next);
    }
    assert_eq!(zone.local().take_list(2000).collect::<BTreeSet<_>>(), left.into_iter().collect());
}

#[test]
fn an_owner_flushes_its_magazine_before_a_run_fails() {
    let zone = Zone::new(512 * 4).unwrap();
    let mut local = zone.local();
    let all: Vec<_> = (0..512 * 4).map(|_| local.alloc(Order::PAGE).unwrap()).collect();
    for &frame in &all {
        if frame.index() % 8 < 4 {
            local.free(frame, Order::PAGE).unwrap();
        }
    }
    assert!(local.held() > 0);
    let runs = (0..256).map(|_| local.alloc(order(2)).unwrap()).collect::<BTreeSet<_>>();
    assert_eq!(runs.len(), 256);
    assert_eq!(local.alloc(order(2)).ok(), None);
}

/// Eight owners fill and empty arrays of slots down to the watermarks, each freeing in a different
/// order.
#[test]
fn stress_bulk_down_to_the_watermarks() {
    use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
    let zone = zone_with(512 * 32, 256, 512, 1024);
    let owners: Vec<AtomicU8> = (0..zone.frames()).map(|_| AtomicU8::new(0)).collect();
    let mark = |frame: Frame, from: u8, to: u8| {
        assert_eq!(owners[frame.index() as usize].swap(to, Relaxed), from, "{frame}");
    };
    crate::testing::scope(|scope| {
        for me in 1..=8_u8 {
            let (zone, mark) = (&zone, &mark);
            scope.spawn(move || {
                let mut local = zone.local();
                let mut slots = vec![None; 3000];
                for round in 0..60_usize {
                    let (start, step) = (round * 37 % 1000, 2 * round + 1);
                    let table = slots.get_mut(start..).unwrap();
                    let held: Vec<_> = table.iter().copied().flatten().collect();
                    if me % 2 == 0 {
                        local.fill(table)
                    } else {
                        zone.local().fill(table)
                    };
                    // `held` is in order of the slots, and so is what comes after it.
                    let mut old = held.into_iter().peekable();
                    for frame in table.iter().flatten() {
                        if old.next_if_eq(frame).is_none() {
                            mark(*frame, 0, me);
                        }
                    }
                    assert!(old.next().is_none(), "full slots are unchanged");
                    // 3000 = 2^3 * 3 * 5^3: some steps reach all slots, others leave holes between
                    // full ones.
                    for i in 0..3000 {
                        if let Some(frame) = slots[i * step % 3000].take() {
                            mark(frame, me, 0);
                            local.free(frame, Order::PAGE).unwrap();
                        }
                    }
                }
                for frame in slots.into_iter().flatten() {
                    mark(frame, me, 0);
                    zone.free(frame, Order::PAGE).unwrap();
                }
            });
        }
    });
    assert_eq!((zone.taken(), zone.stats().in_use, zone.stats().held), (0, 0, 0));
    assert_eq!(zone.whole_regions(), 32);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: crate::testing::cases(340), ..ProptestConfig::default() })]

    /// Bulk calls get exactly what the watermarks leave, and one more frame.
    #[test]
    fn watermarks_agree_with_arithmetic(
        marks in prop::array::uniform3(0..700_u32),
        steps in prop::collection::vec((0..6u8, 0..500usize), 300),
    ) {
        let mut marks = marks;
        marks.sort_unstable();
        let zone = zone_with(1500, marks[0], marks[1], marks[2]);
        let (mut taken, mut free) = (BTreeSet::new(), 1500_usize);
        for (verb, n) in steps {
            let urgency = if verb == 1 { Urgency::Urgent } else { Urgency::Normal };
            let mark = marks[if verb == 1 { 0 } else { 1 }] as usize;
            let left = free.saturating_sub(mark).min(n);
            let expected = if left < n { (left + 1).min(free) } else { n };
            match verb {
                0..=1 => {
                    let mut slots = vec![None; n];
                    prop_assert_eq!(zone.local().fill_by(&mut slots, urgency), expected);
                    taken.extend(slots.into_iter().flatten());
                    free -= expected;
                }
                2 => {
                    let mut slots = vec![None; n];
                    let done = zone.local().fill_all(&mut slots).is_ok();
                    prop_assert_eq!(done, expected == n);
                    taken.extend(slots.into_iter().flatten());
                    free -= if done { n } else { 0 };
                }
                3 => {
                    let keep = n / 2;
                    taken.extend(zone.local().take_list(n).take(keep));
                    free -= keep.min(expected);
                }
                _ => {
                    let mut back: Vec<_> = taken.iter().copied().step_by(n % 7 + 1).take(n).map(Some).collect();
                    back.iter().flatten().for_each(|frame| _ = taken.remove(frame));
                    free += back.len();
                    let len = back.len();
                    prop_assert_eq!(zone.local().free_bulk(&mut back), Ok(len));
                }
            }
            prop_assert_eq!(zone.available(), free as u64);
            prop_assert_eq!(zone.taken(), taken.len() as u64);
        }
    }
}
