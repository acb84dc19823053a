//! The capacity of a magazine, also for a new owner, and scattered frees, which bypass it.

use super::*;
use crate::testing::Random;
use proptest::prelude::*;
use std::collections::VecDeque;

/// The documented limit: 1/32 of the zone, 512 to 32,768; less in small zones.
pub(super) fn limit(zone: &Zone) -> u32 {
    match zone.frames().div_ceil(512) {
        1..=2 => 64,
        3..=4 => 128,
        5..=8 => 256,
        _ => (zone.frames() / 32).clamp(512, 32_768),
    }
}

/// The documented room of a magazine that is full enough to be trimmed: less than a quarter or 256
/// frames, or 1/16.
fn slack(limit: u32) -> u32 {
    (limit / 4).min(256).max(limit / 16)
}

/// The frames that an owner held after each of its calls.
struct Fills {
    most: u32,
    /// Before and after each trim.
    trims: Vec<(u32, u32)>,
}

/// Frees all frames of a zone in order, one at a time or several, and looks at what the owner holds
/// after each call.
fn fills(zone: &Zone, at_once: usize) -> Fills {
    let mut all: Vec<_> =
        (0..zone.frames()).map(|_| Some(zone.alloc(Order::PAGE).unwrap())).collect();
    let mut local = zone.local();
    let (mut most, mut trims, mut before) = (0, vec![], 0);
    for some in all.chunks_mut(at_once) {
        match some {
            [one] => local.free(one.take().unwrap(), Order::PAGE).unwrap(),
            many => assert_eq!(local.free_bulk(many), Ok(at_once)),
        }
        let held = local.held();
        if held < before {
            trims.push((before, held));
        }
        most = most.max(held);
        before = held;
    }
    Fills { most, trims }
}

#[test]
fn a_magazine_holds_no_more_than_its_limit() {
    for regions in [17_u32, 40, 64, 100, 200, 257, 300, 312, 333, 400, 512, 600] {
        for at_once in [1_usize, 8] {
            let zone = Zone::new(regions * 512).unwrap();
            let (limit, most) = (limit(&zone), fills(&zone, at_once).most);
            assert!(most <= limit, "{regions} regions, {at_once} at once: {most} of {limit}");
        }
    }
}

#[test]
fn a_magazine_of_a_large_zone_holds_128_mib() {
    let zone = Zone::new(1 << 21).unwrap();
    let run = zone.alloc_run(100_000, 1).unwrap();
    let mut local = zone.local();
    let mut most = 0;
    for index in covered(run, 100_000) {
        local.free(frame(index), Order::PAGE).unwrap();
        most = most.max(local.held());
    }
    assert_eq!(most, 32_768);
}

/// At most an eighth of the zone.
#[test]
fn small_zones_have_small_magazines() {
    for regions in 1..=16 {
        let zone = Zone::new(regions * 512).unwrap();
        let (limit, most) = (limit(&zone), fills(&zone, 1).most);
        assert!(
            limit * 8 <= zone.frames() && most <= limit,
            "{regions} regions: {most} of {limit}"
        );
        assert_eq!(most, limit - 1, "{regions} regions: trimmed when it is full");
    }
}

/// It is used: frees in order fill it to within the documented sixteenth (in small zones a quarter)
/// before it is trimmed, and a trim makes room for a quarter more, to a word.
#[test]
fn a_magazine_is_nearly_full_before_it_is_trimmed() {
    // In zones of up to 512 regions no two words share a way.
    for regions in [17_u32, 64, 100, 257, 333, 512] {
        let zone = Zone::new(regions * 512).unwrap();
        let limit = limit(&zone);
        let slack = slack(limit);
        let Fills { most, trims } = fills(&zone, 1);
        assert_eq!(most, limit, "{regions} regions");
        assert!(trims.len() > 30);
        let keep = limit - slack - limit / 4;
        for (before, after) in trims {
            assert!(
                before + 1 > limit - slack,
                "{regions} regions: trimmed with {before} of {limit}"
            );
            assert!(
                (keep - 63..=keep).contains(&after),
                "{regions} regions: {after} of {keep} left"
            );
        }
    }
}

/// An owner whose magazine stays nearly full checks it, and the pressure, after so many frees, and
/// not after each.
#[test]
fn a_full_magazine_is_seldom_checked() {
    for regions in [17_u32, 100, 600] {
        for missing in [0, 1, 63, 64, 65, 200] {
            let zone = Zone::new(regions * 512).unwrap();
            let (limit, run) = (limit(&zone), zone.alloc_run(zone.frames() / 2, 1).unwrap());
            let mut local = zone.local();
            for index in covered(run, limit - missing) {
                local.free(frame(index), Order::PAGE).unwrap();
            }
            assert_eq!(local.held(), limit - missing);
            let (mut checks, mut next) = (0, u64::MAX);
            for _ in 0..20_000 {
                let frame = local.alloc(Order::PAGE).unwrap();
                local.free(frame, Order::PAGE).unwrap();
                let left = local.check_at - local.tally.frees.get();
                checks += u32::from(left > next);
                next = left;
            }
            // The fill after `slack` frees, the pressure after 256 since the last check.
            let expected = 20_000 * slack(limit).div_ceil(256) / slack(limit);
            assert!(
                (expected - 1..=expected + 2).contains(&checks),
                "{regions}, {missing}: {checks} checks"
            );
        }
    }
}

/// A region that an owner has reserved is in no set of hints: dropping the handle puts it back, if
/// it has free frames.
#[test]
fn the_region_of_a_dropped_owner_is_found_again() {
    for regions in [1, 2, 16, 40] {
        let zone = Zone::new(512 * regions).unwrap();
        let mut kept = Vec::new();
        for _ in 0..8 {
            let mut owner = zone.local();
            // Until its magazine is empty, so that it returns no frame of the region.
            kept.push(owner.alloc(Order::PAGE).unwrap());
            while owner.held() > 0 {
                kept.push(owner.alloc(Order::PAGE).unwrap());
            }
        }
        let others = core::iter::from_fn(|| zone.alloc(Order::PAGE).ok()).count();
        assert_eq!(others + kept.len(), 512 * regions as usize, "{regions} regions");
    }
}

// A new owner: its first claim leaves in the magazine what the call has not used of a word.

/// Claims some frames in each way that leaves 63 frames of a word in the magazine.
fn claims(way: usize, local: &mut ZoneLocal) -> Vec<Frame> {
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

/// The owner holds the frames that are taken in the map and not in use: others cannot get them.
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
    local: ZoneLocal,
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
        let magazine = self.local.held();
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

    /// In any order of the calls, none leaves more than the limit in the magazine.
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

// Frees that are far apart.

/// Allocates `count` frames and frees them in random order; calls `step` after each free.
fn free_at_random(
    zone: &Zone,
    local: &mut ZoneLocal,
    count: usize,
    mut step: impl FnMut(&ZoneLocal),
) {
    let mut frames: Vec<_> = (0..count).map(|_| local.alloc(Order::PAGE).unwrap()).collect();
    let mut random = Random::new(1);
    while !frames.is_empty() {
        let freed = frames.swap_remove(random.below(frames.len()));
        local.free(freed, Order::PAGE).unwrap();
        let refused = Err(FrameError::DoubleFree { frame: freed });
        assert_eq!(local.free(freed, Order::PAGE), refused);
        step(local);
    }
    assert_eq!(zone.taken(), local.held().into());
}

#[test]
fn a_random_order_bypasses_the_magazine_and_an_ordered_one_returns_to_it() {
    let zone = Zone::new(64 * 512).unwrap();
    let mut local = zone.local();
    let mut held = 0;
    free_at_random(&zone, &mut local, zone.frames() as usize, |local| {
        held = held.max(local.held())
    });
    assert!(local.held() < held / 4, "{} of {held}", local.held());
    // An ordered free of a word is cached from its third frame on.
    let frames: Vec<_> = (0..640).map(|_| local.alloc(Order::PAGE).unwrap()).collect();
    let before = local.held();
    frames.into_iter().for_each(|frame| local.free(frame, Order::PAGE).unwrap());
    assert!(local.held() >= before + 600, "{} after {before}", local.held());
    drop(local);
    assert_eq!((zone.taken(), zone.stats().in_use, zone.whole_regions()), (0, 0, 64));
}

#[test]
fn words_that_share_a_way_end_in_the_zone_too() {
    // More words than ways: frees evict each other's words before the magazine is full.
    let zone = Zone::new(2048 * 512).unwrap();
    let mut local = zone.local();
    let mut frames: Vec<_> = (0..zone.frames()).map(|_| zone.alloc(Order::PAGE).unwrap()).collect();
    let mut random = Random::new(2);
    for freed in 0..60_000_u32 {
        let frame = frames.swap_remove(random.below(frames.len()));
        local.free(frame, Order::PAGE).unwrap();
        assert!(local.held() <= 8192, "{} held after {freed} frees", local.held());
    }
    assert!(local.held() < 2048, "{} held", local.held());
    assert_eq!(zone.taken(), frames.len() as u64 + u64::from(local.held()));
}

/// Frees three frames of each of `words` words, one word after another, into the empty magazine of
/// a new owner with a limit of 1,600 frames. Returns the owner and the first frame behind the
/// words, which are all allocated.
fn owner_after_scattered_frees(zone: &Zone, words: u32) -> (ZoneLocal, u32) {
    assert_eq!(zone.frames() / 32, 1600);
    let first = zone.alloc_run(200 * 64, 64).unwrap().index();
    let mut local = zone.local();
    for index in (0..3).flat_map(|i| (0..words).map(move |word| first + 64 * word + i)) {
        local.free(frame(index), Order::PAGE).unwrap();
    }
    (local, first + 64 * words)
}

#[test]
fn a_magazine_with_sixteen_frames_a_word_when_full_is_used() {
    let zone = Zone::new(100 * 512).unwrap();
    let (local, _) = owner_after_scattered_frees(&zone, 100);
    assert_eq!(local.held(), 300);
    drop(local);
    let zone = Zone::new(100 * 512).unwrap();
    let (local, _) = owner_after_scattered_frees(&zone, 101);
    assert_eq!(local.held(), 0);
}

#[test]
fn the_third_of_neighbouring_frees_ends_the_bypass() {
    let zone = Zone::new(100 * 512).unwrap();
    let (mut local, next) = owner_after_scattered_frees(&zone, 101);
    let free = |local: &mut ZoneLocal, index| {
        local.free(frame(index), Order::PAGE).unwrap();
        local.held()
    };
    // Two of a word do not end it, however often.
    for word in 1..40 {
        assert_eq!([0, 1].map(|i| free(&mut local, next + 64 * word + i)), [0; 2], "word {word}");
    }
    assert_eq!([0, 1, 2, 3, 4].map(|i| free(&mut local, next + i)), [0, 0, 0, 1, 2]);
}

#[test]
fn sixteen_frames_of_a_word_freed_by_one_call_end_the_bypass() {
    let zone = Zone::new(100 * 512).unwrap();
    let (mut local, next) = owner_after_scattered_frees(&zone, 101);
    for (index, count, held) in [(next, 2, 0), (next + 64, 15, 0), (next + 128, 16, 16)] {
        let mut slots: Vec<_> = covered(frame(index), count).map(Frame::new).collect();
        assert_eq!(local.free_bulk(&mut slots), Ok(count as usize));
        assert_eq!(local.held(), held, "{count} frames");
    }
}

/// Words that share a way with those freed before evict 1, 2 or 3 frames each.
#[test]
fn the_64th_eviction_of_two_frames_or_fewer_begins_the_bypass() {
    for (evicted, dense, bypasses) in
        [(1, None, true), (2, None, true), (3, None, false), (2, Some(40), false)]
    {
        let zone = Zone::new(1024 * 512).unwrap();
        let first = zone.alloc_run(5000 * 64, 64).unwrap().index();
        let mut local = zone.local();
        for word in 0..100 {
            let count = if Some(word) == dense { 3 } else { evicted };
            for index in covered(frame(first + 64 * word), count) {
                local.free(frame(index), Order::PAGE).unwrap();
            }
        }
        for word in 0..64 {
            assert!(local.held() > 64, "before eviction {word} of {evicted}");
            local.free(frame(first + 64 * (4096 + word)), Order::PAGE).unwrap();
        }
        assert_eq!(local.held() == 0, bypasses, "{evicted} evicted, {dense:?}");
    }
}
