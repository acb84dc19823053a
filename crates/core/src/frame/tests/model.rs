//! Against a set of frames, and with threads.

use super::*;
use crate::testing::Random;
use proptest::prelude::*;

/// The model: which frames are taken.
#[derive(Default)]
struct Model {
    taken: BTreeSet<u32>,
    runs: Vec<(Frame, u32)>,
}

impl Model {
    fn take(&mut self, first: Frame, frames: u32) -> bool {
        self.runs.push((first, frames));
        covered(first, frames).all(|index| self.taken.insert(index))
    }

    fn has_run(&self, frames: u32, of: u32) -> bool {
        (0..of / frames).any(|i| self.taken.range(i * frames..(i + 1) * frames).next().is_none())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: crate::testing::cases(340), ..ProptestConfig::default() })]

    /// Without magazines the zone is exact: it refuses only what the model cannot give either.
    #[test]
    fn a_zone_agrees_with_a_set(steps in prop::collection::vec((0..8u8, 0..10u8, any::<u16>()), 300)) {
        let frames = 1800;
        let (zone, mut model) = (Zone::new(frames).unwrap(), Model::default());
        for (verb, o, pick) in steps {
            match verb {
                0..4 => match zone.alloc(order(o)) {
                    Ok(first) => {
                        prop_assert!(first.index() % (1 << o) == 0 && first.index() + (1 << o) <= frames);
                        prop_assert!(model.take(first, 1 << o), "allocated twice: {first} order {o}");
                    }
                    Err(_) => prop_assert!(!model.has_run(1 << o, frames), "refused order {o}"),
                },
                4..7 if !model.runs.is_empty() => {
                    let (first, run) = model.runs.swap_remove(usize::from(pick) % model.runs.len());
                    prop_assert_eq!(zone.free_run(first, run), Ok(()));
                    model.taken.retain(|index| !covered(first, run).contains(index));
                    prop_assert!(zone.free_run(first, run).is_err());
                }
                _ => {
                    let run = u32::from(pick) % 1000 + 1;
                    if let Ok(first) = zone.alloc_run(run, 1 << o) {
                        prop_assert!(first.index() % (1 << o) == 0 && first.index() + run <= frames);
                        prop_assert!(model.take(first, run));
                    }
                }
            }
            prop_assert_eq!(zone.taken(), model.taken.len() as u64);
            prop_assert_eq!(zone.stats().in_use, model.taken.len() as u64);
        }
        for (first, run) in model.runs {
            prop_assert_eq!(zone.free_run(first, run), Ok(()));
        }
        for _ in 0..3 {
            prop_assert!(zone.alloc(Order::HUGE).is_ok());
        }
    }

    /// Two owners and a third party that owns nothing, freeing each other's frames.
    #[test]
    fn owners_agree_with_a_set(
        reserving in any::<bool>(),
        regions in prop::sample::select(vec![6_u32, 20, 70]),
        steps in prop::collection::vec((0..3usize, 0..6u8, 0..10u8, any::<u16>()), 300),
    ) {
        let frames = 512 * regions + 77;
        let zone = Zone::with_slots(frames, if reserving { 2 } else { 0 });
        let mut locals = [zone.local(), zone.local()];
        let mut model = Model::default();
        for (who, verb, o, pick) in steps {
            let local = locals.get_mut(who);
            match verb {
                0 => {
                    if let Ok(first) = local.map_or_else(|| zone.alloc(order(o)), |l| l.alloc(order(o))) {
                        prop_assert!(first.index() % (1 << o) == 0 && model.take(first, 1 << o));
                    }
                }
                1 | 2 => {
                    let mut slots = vec![None; usize::from(pick % 200)];
                    let full = match local {
                        Some(local) if verb == 1 => local.fill(&mut slots),
                        Some(local) => local.fill_all(&mut slots).map_or(0, |()| slots.len()),
                        None => zone.local().fill(&mut slots),
                    };
                    prop_assert_eq!(full, slots.iter().flatten().count());
                    for first in slots.into_iter().flatten() {
                        prop_assert!(model.take(first, 1), "{} twice", first);
                    }
                }
                3 if !model.runs.is_empty() => {
                    let keep = usize::from(pick) % model.runs.len();
                    let singles = model.runs.split_off(keep);
                    let (singles, runs): (Vec<_>, Vec<_>) = singles.into_iter().partition(|run| run.1 == 1);
                    model.runs.extend(runs);
                    let mut slots: Vec<_> = singles.iter().map(|run| Some(run.0)).collect();
                    let freed = match local {
                        Some(local) => local.free_bulk(&mut slots),
                        None => zone.local().free_bulk(&mut slots),
                    };
                    prop_assert_eq!(freed, Ok(singles.len()));
                    singles.iter().for_each(|run| _ = model.taken.remove(&run.0.index()));
                }
                _ if !model.runs.is_empty() => {
                    let (first, run) = model.runs.swap_remove(usize::from(pick) % model.runs.len());
                    let order = order(u8::try_from(run.trailing_zeros()).unwrap());
                    covered(first, run).for_each(|index| _ = model.taken.remove(&index));
                    match local {
                        Some(local) => {
                            prop_assert_eq!(local.free(first, order), Ok(()));
                            prop_assert!(local.free(first, order).is_err());
                        }
                        None => prop_assert_eq!(zone.free(first, order), Ok(())),
                    }
                }
                _ => {}
            }
            let held: u32 = locals.iter().map(ZoneLocal::held).sum();
            let taken = model.taken.len() as u64 + u64::from(held);
            let exact: u64 = (0..zone.0.regions()).map(|r| u64::from(zone.0.map.taken_in(r))).sum();
            prop_assert_eq!((zone.taken(), exact - 435), (taken, taken), "{:?}", (who, verb, o, pick));
        }
        drop(locals);
        prop_assert_eq!(zone.taken(), model.taken.len() as u64);
        prop_assert_eq!(zone.stats().in_use, model.taken.len() as u64);
        prop_assert_eq!(zone.local().take_list(usize::from(u16::MAX)).len(), frames as usize - model.taken.len());
    }
}

/// Each frame carries who owns it; an owner that finds another's mark has been given what was not
/// free.
#[test]
fn stress_no_frame_has_two_owners() {
    use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
    let zone = Zone::with_watermarks(512 * 64 + 100, Watermarks::NONE).unwrap();
    let owners: Vec<AtomicU8> = (0..zone.frames()).map(|_| AtomicU8::new(0)).collect();
    let mark = |first: Frame, order: Order, from: u8, to: u8| {
        for index in covered(first, order.frames()) {
            assert_eq!(owners[index as usize].swap(to, Relaxed), from);
        }
    };
    crate::testing::scope(|scope| {
        for me in 1..=8_u8 {
            let (zone, mark) = (&zone, &mark);
            scope.spawn(move || {
                let mut local = zone.local();
                let mut mine: Vec<(Frame, Order)> = Vec::new();
                let mut random = Random::new(me.into());
                for step in 0..20_000 {
                    let order = order([0, 0, 0, 0, 0, 0, 1, 3, 6, 7, 8, 9][random.below(12)]);
                    let shared = me % 2 == 0 && step % 2 == 0;
                    if random.below(5) < 3 && mine.len() < 400 {
                        let got = if shared { zone.alloc(order) } else { local.alloc(order) };
                        if let Ok(frame) = got {
                            mark(frame, order, 0, me);
                            mine.push((frame, order));
                        }
                    } else if !mine.is_empty() {
                        let (frame, order) = mine.swap_remove(random.below(mine.len()));
                        mark(frame, order, me, 0);
                        let freed =
                            if shared { zone.free(frame, order) } else { local.free(frame, order) };
                        freed.unwrap();
                    }
                }
                for (frame, order) in mine {
                    mark(frame, order, me, 0);
                    zone.free(frame, order).unwrap();
                }
            });
        }
    });
    assert_eq!((zone.taken(), zone.stats().in_use), (0, 0));
    for _ in 0..64 {
        zone.alloc(Order::HUGE).unwrap();
    }
    assert_eq!(zone.local().take_list(1000).len(), 100);
}
