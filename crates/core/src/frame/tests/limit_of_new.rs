//! A new owner's magazine: its first claim leaves there what the call has not used of a word.

use super::magazine::limit;
use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

/// Claims some frames in each way that leaves 63 frames of a word in the magazine.
fn claims(way: usize, local: &mut Local<&Zone>) -> Vec<Frame> {
    match way {
        0 => vec![local.alloc(Order::PAGE).unwrap()],
        // All of these frees, in order, come before the first trim.
        1 => (0..64 * 6 + 1).map(|_| local.alloc(Order::PAGE).unwrap()).collect(),
        2 => {
            let mut slots = [None; 1];
            assert_eq!(local.fill(&mut slots), 1);
            slots.into_iter().flatten().collect()
        }
        3 => {
            let mut slots = vec![None; 64 * 12 + 1];
            assert_eq!(local.fill_all(&mut slots), Ok(()));
            slots.into_iter().flatten().collect()
        }
        _ => local.take_list(65).collect(),
    }
}

/// What the owner holds is what the map has taken and nobody uses: others cannot get it.
#[test]
fn a_new_owner_holds_no_more_than_its_limit_after_a_claim() {
    for regions in [17_u32, 40, 100, 257] {
        for way in 0..5 {
            let zone = Zone::new(regions * 512).unwrap();
            let others = zone.frames() / 2;
            let run = zone.alloc_run(others, 1).unwrap();
            let mut local = zone.local();
            let mut frees = claims(way, &mut local);
            let mut in_use = u64::from(others) + frees.len() as u64;
            assert_eq!(zone.taken() - in_use, 63, "the rest of a word");
            frees.extend(covered(run, others).map(frame));
            let mut most = 0;
            for frame in frees {
                local.free(frame, Order::PAGE).unwrap();
                in_use -= 1;
                most = most.max(zone.taken() - in_use);
            }
            let limit = limit(&zone).into();
            assert!(most <= limit, "{regions} regions, way {way}: {most} of {limit}");
            assert!(
                most + 1 >= limit,
                "{regions} regions, way {way}: {most} of {limit} are of use"
            );
        }
    }
}

/// One owner after another, and frames that others have allocated.
struct World<'z> {
    zone: &'z Zone,
    local: Local<&'z Zone>,
    singles: VecDeque<Frame>,
    runs: Vec<Frame>,
}

impl<'z> World<'z> {
    /// Others have allocated all but `left` frames.
    fn new(zone: &'z Zone, left: u32) -> Self {
        let others = zone.frames() - left.min(zone.frames() / 2);
        let run = zone.alloc_run(others, 1).unwrap();
        let singles = covered(run, others).map(frame).collect();
        Self { zone, local: zone.local(), singles, runs: Vec::new() }
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let magazine = self.local.held() - self.local.kept.frames();
        prop_assert!(magazine <= limit(self.zone), "{} of {}", magazine, limit(self.zone));
        prop_assert!(self.local.check_at <= self.local.trim_at);
        Ok(())
    }

    /// Takes one of the frames in use: the oldest, the newest or any.
    fn used(&mut self, pick: u16) -> Option<Frame> {
        match pick % 4 {
            0 | 1 => self.singles.pop_front(),
            2 => self.singles.pop_back(),
            _ => self.singles.swap_remove_back(usize::from(pick) % self.singles.len().max(1)),
        }
    }

    fn fill(&mut self, n: usize, all: bool) {
        let mut slots = vec![None; n];
        match all {
            true => _ = self.local.fill_all(&mut slots),
            false => _ = self.local.fill(&mut slots),
        }
        self.singles.extend(slots.into_iter().flatten());
    }

    fn step(&mut self, verb: u8, n: u16, pick: u16) -> Result<(), TestCaseError> {
        match verb {
            0 => {
                for _ in 0..n {
                    self.singles.extend(self.local.alloc(Order::PAGE).ok());
                    self.check()?;
                }
            }
            1 => self.fill(n.into(), false),
            2 => self.fill(n.into(), true),
            3 => {
                let taken = self.local.take_list(n.into()).take(usize::from(pick % 600));
                self.singles.extend(taken);
            }
            4 | 5 => {
                for _ in 0..n {
                    if let Some(frame) = self.used(pick) {
                        prop_assert_eq!(self.local.free(frame, Order::PAGE), Ok(()));
                    }
                    self.check()?;
                }
            }
            6 => {
                let mut slots: Vec<_> = (0..n).map(|_| self.used(pick)).collect();
                let full = slots.iter().flatten().count();
                prop_assert_eq!(self.local.free_bulk(&mut slots), Ok(full));
            }
            7 => self.runs.extend(self.local.alloc(Order::HUGE).ok()),
            8 => {
                if let Some(run) = self.runs.pop() {
                    prop_assert_eq!(self.local.free(run, Order::HUGE), Ok(()));
                }
            }
            9 => {
                for _ in 0..n {
                    if let Ok(frame) = self.local.alloc(Order::PAGE) {
                        prop_assert_eq!(self.local.free(frame, Order::PAGE), Ok(()));
                    }
                    self.check()?;
                }
            }
            10 => {
                let order = order((pick % 8) as u8 + 1);
                if let Ok(run) = self.local.alloc(order) {
                    self.singles.extend(covered(run, order.frames()).map(frame));
                }
            }
            _ => self.local = self.zone.local(),
        }
        self.check()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: crate::testing::cases(340), ..ProptestConfig::default() })]

    /// Whatever the order of the calls, no call leaves more than the limit in the magazine.
    #[test]
    fn no_order_of_calls_exceeds_the_limit(
        regions in prop::sample::select(vec![1_u32, 7, 17, 33, 70, 130]),
        left in prop::sample::select(vec![700_u32, 1500, 6000]),
        steps in prop::collection::vec((0..12u8, prop_oneof![1..3_u16, 1..70_u16, 1..700_u16], any::<u16>()), 60),
    ) {
        let zone = Zone::new(512 * regions + 77).unwrap();
        let mut world = World::new(&zone, left);
        for (verb, n, pick) in steps {
            world.step(verb, n, pick)?;
            let in_use = world.singles.len() + 512 * world.runs.len();
            prop_assert_eq!(zone.taken(), in_use as u64 + u64::from(world.local.held()));
        }
    }
}
