//! Searches for runs skip regions that have none and miss none that has, and 2 MiB regions stay
//! whole under churn.

use super::*;
use crate::frame::inner::MAX_PARTIAL;
use crate::testing::Random;

/// Regions in more than one group of groups.
const REGIONS: u32 = 64 * 64 + 100;

/// Returns a zone of which about one frame of `one_in` is free.
fn scattered(one_in: usize, random: &mut Random) -> (Zone, Vec<bool>) {
    let zone = Zone::new(REGIONS * 512).unwrap();
    let mut free = vec![false; (REGIONS * 512) as usize];
    while zone.alloc(Order::HUGE).is_ok() {}
    for frame in 0..REGIONS * 512 {
        if random.below(one_in) == 0 {
            zone.free(Frame::inside(frame), Order::PAGE).unwrap();
            free[frame as usize] = true;
        }
    }
    (zone, free)
}

/// Returns how many aligned runs of `order` are free.
fn runs(free: &[bool], order: u8) -> usize {
    free.chunks_exact(1 << order).filter(|run| run.iter().all(|free| *free)).count()
}

#[test]
fn every_run_is_found_and_no_other() {
    let mut random = Random::new(7);
    let (zone, mut free) = scattered(6, &mut random);
    for o in (1..=8).rev() {
        let order = Order::new(o).unwrap();
        let mut found = 0;
        let expected = runs(&free, o);
        while let Ok(first) = zone.alloc(order) {
            let run = &mut free[first.index() as usize..][..1 << o];
            assert!(run.iter().all(|free| *free));
            run.fill(false);
            found += 1;
        }
        assert_eq!(found, expected, "order {o}");
        // Some are freed again: these are found, although all limits were lowered.
        for _ in 0..20 {
            let at = random.below(free.len()) >> o << o;
            let run = &mut free[at..][..1 << o];
            if run.iter().any(|free| *free) {
                continue;
            }
            run.fill(true);
            let first = Frame::inside(u32::try_from(at).unwrap());
            zone.free(first, order).unwrap();
            assert_eq!(zone.alloc(order), Ok(first));
            run.fill(false);
        }
    }
}

#[test]
fn a_refused_run_is_looked_for_again_only_where_frames_were_freed() {
    let mut random = Random::new(8);
    let (zone, free) = scattered(100, &mut random);
    let order = (1..).find(|&order| runs(&free, order) == 0).unwrap();
    let tries = |order: u8| {
        let mut tries = 0;
        assert!(
            zone.0
                .search(order, MAX_PARTIAL, |_| {
                    tries += 1;
                    None::<()>
                })
                .is_none()
        );
        tries
    };
    assert!(tries(order) < 100, "limits are exact where regions were full");
    assert_eq!(tries(order), 0);
    let whole_word = free.chunks_exact(64).position(|word| word.iter().all(|free| !free)).unwrap();
    let first = Frame::inside(u32::try_from(whole_word * 64).unwrap());
    zone.free(first, Order::new(6).unwrap()).unwrap();
    assert_eq!(tries(8), 1, "whether its neighbours are free is not known before");
    assert_eq!(tries(8), 0);
    assert_eq!(zone.alloc(Order::new(6).unwrap()), Ok(first));
}

/// The first run below 2 MiB is asked for when the zone is nearly full.
#[test]
fn a_zone_that_gave_out_runs_of_2_mib_knows_its_limits() {
    let mut random = Random::new(9);
    let zone = Zone::new(REGIONS * 512).unwrap();
    while zone.alloc(Order::HUGE).is_ok() {}
    for region in 0..REGIONS {
        for word in 0..8 {
            let frame = region * 512 + word * 64 + u32::try_from(random.below(64)).unwrap();
            zone.free(Frame::inside(frame), Order::PAGE).unwrap();
        }
    }
    let mut tries = 0;
    let found = zone.0.search(1, MAX_PARTIAL, |_| {
        tries += 1;
        None::<()>
    });
    assert_eq!((found, tries), (None, 0));
    let (first, pair) = (Frame::inside(REGIONS * 512 - 2), Order::new(1).unwrap());
    for frame in [first.index(), first.index() + 1] {
        // One of them may be free already.
        _ = zone.free(Frame::inside(frame), Order::PAGE);
    }
    assert_eq!(zone.alloc(pair), Ok(first));
}

/// Frees every second frame of a full zone, and returns how many regions a search for two
/// neighbours looks at.
fn looks_for_a_pair(zone: &Zone) -> usize {
    let mut local = zone.local();
    let odd = (1..zone.frames()).step_by(2);
    odd.for_each(|frame| local.free(Frame::inside(frame), Order::PAGE).unwrap());
    drop(local);
    let mut looks = 0;
    let found = zone.0.search(1, MAX_PARTIAL, |_| {
        looks += 1;
        None::<()>
    });
    assert_eq!(found, None);
    looks
}

/// No run was ever asked for, so no search has lowered a limit.
#[test]
fn a_zone_that_gave_out_single_frames_knows_its_limits() {
    let allocs: [&dyn Fn(&Zone); 3] = [
        &|zone| while zone.alloc(Order::PAGE).is_ok() {},
        &|zone| {
            let (mut local, mut slots) = (zone.local(), [None; 512]);
            while local.fill_by(&mut slots, Urgency::Urgent) > 0 {
                slots.fill(None);
            }
            while local.alloc(Order::PAGE).is_ok() {}
        },
        // Owners that fill their regions side by side, each at its own pace.
        &|zone| {
            let mut owners: Vec<_> = (1..=60).map(|pace| (zone.local(), pace)).collect();
            while owners
                .iter_mut()
                .any(|(local, pace)| (0..*pace).any(|_| local.alloc(Order::PAGE).is_ok()))
            {
            }
        },
    ];
    for (which, alloc_all) in allocs.into_iter().enumerate() {
        let zone = Zone::new(REGIONS * 512).unwrap();
        alloc_all(&zone);
        assert_eq!(zone.taken(), u64::from(zone.frames()), "{which}");
        let looks = looks_for_a_pair(&zone);
        assert!(looks <= 256, "{which}: {looks} of {REGIONS}");
        // The groups know it too: the search does not skip region by region.
        let skipped = (0..REGIONS / 64)
            .filter(|group| zone.0.limits.skip(group * 64, 1) >= Some(group * 64 + 64))
            .count();
        assert!(skipped >= 60, "{which}: {skipped} of {}", REGIONS / 64);
        let pair = zone.alloc(Order::new(1).unwrap());
        assert!(pair.is_err(), "{which}");
        zone.free(Frame::inside(2000), Order::PAGE).unwrap();
        assert_eq!(zone.alloc(Order::new(1).unwrap()), Ok(Frame::inside(2000)));
    }
}

/// A look at all of its regions takes no longer than a refusal may, and single frames pay for
/// limits.
#[test]
fn a_small_zone_lowers_no_limit_before_it_is_asked_for_a_run() {
    let zone = Zone::new(512 * 512).unwrap();
    while zone.alloc(Order::PAGE).is_ok() {}
    assert_eq!(zone.0.limits.skip(0, 1), None);
    assert!(looks_for_a_pair(&zone) >= 512);
    assert_eq!(zone.0.limits.skip(0, 1), Some(64 * 64));
}

/// Fills a zone to 70 %, then frees and allocates single frames at random, in alternating series of
/// at most `series` calls. Returns how many regions are whole afterwards. `scattered`: the free
/// frames are scattered over the zone at the start.
fn whole_after(steps: usize, series: usize, regions: u32, owner: bool, scattered: bool) -> usize {
    let zone = Zone::new(regions * 512).unwrap();
    let mut local = owner.then(|| zone.local());
    let mut alloc = || match &mut local {
        Some(local) => local.alloc(Order::PAGE).unwrap(),
        None => zone.alloc(Order::PAGE).unwrap(),
    };
    let most = regions * 512 * 7 / 10;
    let mut taken: Vec<_> =
        (0..if scattered { regions * 512 } else { most }).map(|_| alloc()).collect();
    let mut random = Random::new(0x9E37_79B9_7F4A_7C15);
    while taken.len() > most as usize {
        zone.free(taken.swap_remove(random.below(taken.len())), Order::PAGE).unwrap();
    }
    let mut done = 0;
    while done < steps {
        let series = random.below(series) + 1;
        for _ in 0..series {
            let frame = taken.swap_remove(random.below(taken.len()));
            match &mut local {
                Some(local) => local.free(frame, Order::PAGE).unwrap(),
                None => zone.free(frame, Order::PAGE).unwrap(),
            }
        }
        for _ in 0..series {
            taken.push(match &mut local {
                Some(local) => local.alloc(Order::PAGE).unwrap(),
                None => zone.alloc(Order::PAGE).unwrap(),
            });
        }
        done += series * 2;
    }
    drop(local);
    let whole = zone.whole_regions();
    for _ in 0..whole {
        zone.alloc(Order::HUGE).unwrap();
    }
    assert!(zone.alloc(Order::HUGE).is_err(), "exactly as many runs as were counted");
    whole
}

/// With 30 % free, at most 30 % of the regions can be whole: 153 of 512. Allocs use partly free
/// regions first, so whole ones are broken only because of the order of the sets: the test requires
/// nine tenths of the maximum. An allocator that uses any free frame would have none left: a region
/// is free with probability 0.3^512.
///
/// `PINFOLD_CHURN_STEPS` sets the number of steps; the default is 10^6.
#[test]
fn whole_regions_stay_whole_under_churn() {
    let steps =
        std::env::var("PINFOLD_CHURN_STEPS").ok().and_then(|n| n.parse().ok()).unwrap_or(1_000_000);
    for (owner, series) in [(false, 1), (false, 1000), (true, 1), (true, 1000)] {
        let whole = whole_after(steps, series, 512, owner, false);
        println!(
            "{steps} steps, series of {series}, owner {owner}: {whole} of at most 153 runs of 2 MiB"
        );
        assert!(whole >= 138, "{whole} after {steps} steps in series of {series}, owner {owner}");
    }
}

/// Regions become whole again after the free frames were scattered: an owner releases its highest
/// words first, and the zone allocates the lowest. The series exceed a magazine; otherwise it would
/// recycle the same frames.
#[test]
fn regions_become_whole_again() {
    for owner in [false, true] {
        let whole = whole_after(600_000, 4096, 64, owner, true);
        assert!(whole >= 17, "{whole} of at most 19, owner {owner}");
    }
}

/// As a claim leaves it that has changed the map and not yet the hints: a search removes the region
/// from the whole ones, and it stays visible.
#[test]
fn a_region_that_is_no_longer_whole_stays_visible() {
    let zone = Zone::with_watermarks(1024, Watermarks::NONE).unwrap();
    let region = zone.alloc(Order::HUGE).unwrap();
    let other = zone.alloc(Order::HUGE).unwrap();
    // No run of half a region is left, and no limit says so.
    zone.free_run(Frame::inside(other.index() + 1), 255).unwrap();
    zone.free_run(Frame::inside(other.index() + 257), 255).unwrap();
    let number = other.index() / 512;
    assert!(zone.0.partial.take(number));
    zone.0.whole.set(number);
    assert!(zone.alloc(order(8)).is_err());
    assert!(zone.0.partial.has(number) && !zone.0.whole.has(number));
    assert_eq!(zone.alloc(Order::PAGE).map(|frame| frame.index() / 512), Ok(number));
    assert_eq!(region.index() / 512, 0);
}

#[test]
fn a_run_that_cannot_be_claimed_as_a_whole_is_given_back() {
    let zone = Zone::new(4 * 512).unwrap();
    // The run does not begin with the first frame.
    let front = zone.alloc_run(512, 512).unwrap();
    let hold = zone.alloc_run(512, 512).unwrap();
    let taken = zone.alloc(Order::PAGE).unwrap();
    zone.free(hold, Order::HUGE).unwrap();
    assert_eq!([front, hold, taken].map(Frame::index), [0, 512, 1024]);
    // As a thread sees it that searched before another one allocated the frame.
    zone.0.whole.set(taken.index() / 512);
    assert!(zone.alloc_run(1024, 512).is_err());
    let left = std::iter::from_fn(|| zone.alloc(Order::PAGE).ok()).count();
    assert_eq!(left, 3 * 512 - 1);
}

/// No caller looks there without its hint: the region of the last claim is another one.
#[test]
fn the_first_region_is_found_when_it_alone_is_whole() {
    let zone = Zone::with_watermarks(1024, Watermarks::NONE).unwrap();
    let first = zone.alloc(Order::HUGE).unwrap();
    assert_eq!(first.index(), 0);
    let rest = std::iter::from_fn(|| zone.alloc(Order::PAGE).ok()).count();
    assert_eq!(rest, 512);
    zone.free(first, Order::HUGE).unwrap();
    assert_eq!(zone.alloc(Order::PAGE).map(|frame| frame.index() / 512), Ok(0));
}
