//! Against a set of frames.

use super::*;
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
        let mut zone = Zone::with_slots(frames, if reserving { 2 } else { 0 }).unwrap();
        zone.watermarks = Watermarks::NONE;
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
                        None => zone.fill(&mut slots),
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
                        None => zone.free_bulk(&mut slots),
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
            let held: u32 = locals.iter().map(Local::held).sum();
            let taken = model.taken.len() as u64 + u64::from(held);
            let exact: u64 = (0..zone.regions()).map(|r| u64::from(zone.map.taken_in(r))).sum();
            prop_assert_eq!((zone.taken(), exact - 435), (taken, taken), "{:?}", (who, verb, o, pick));
        }
        drop(locals);
        prop_assert_eq!(zone.taken(), model.taken.len() as u64);
        prop_assert_eq!(zone.stats().in_use, model.taken.len() as u64);
        prop_assert_eq!(zone.take_list(usize::from(u16::MAX)).len(), frames as usize - model.taken.len());
    }
}
