//! How many frames a magazine holds.

use super::*;

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

/// What an owner held after each of its calls.
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

/// A run that the owner keeps is the last of an exhausted zone: an alloc of one frame moves it to
/// the magazine. Returns the most that the magazine holds while `more` frames are freed.
fn most_with_a_broken_run(zone: &Zone, local: &mut Local<&Zone>, more: usize) -> u32 {
    let run = local.alloc(Order::HUGE).unwrap();
    local.free(run, Order::HUGE).unwrap();
    assert_eq!(local.held(), 512);
    // All others, without a failure.
    let left = zone.frames() - u32::try_from(zone.taken()).unwrap();
    let mut others: Vec<_> = (0..left).map(|_| zone.alloc(Order::PAGE).unwrap()).collect();
    assert!(!zone.under_pressure());
    local.alloc(Order::PAGE).unwrap();
    assert_eq!((local.held(), local.kept.frames()), (511, 0));
    others.sort_unstable_by_key(|frame| frame.index());
    let mut most = 0;
    for frame in others.drain(..more) {
        local.free(frame, Order::PAGE).unwrap();
        assert!(local.check_at <= local.trim_at);
        most = most.max(local.held());
    }
    most
}

#[test]
fn a_magazine_with_a_broken_run_holds_no_more_than_its_limit() {
    for regions in [33, 100] {
        let zone = Zone::new(regions * 512).unwrap();
        let most = most_with_a_broken_run(&zone, &mut zone.local(), 3000);
        assert_eq!(most, limit(&zone), "{regions} regions");
    }
}

/// As above, of an owner that has checked its magazine before: from then on it expects `slack` more
/// frames at most.
#[test]
fn a_run_that_is_broken_later_is_counted_too() {
    for regions in [33, 40, 100] {
        let zone = Zone::new(regions * 512).unwrap();
        let mut local = zone.local();
        for _ in 0..4000 {
            let frame = local.alloc(Order::PAGE).unwrap();
            local.free(frame, Order::PAGE).unwrap();
        }
        while local.held() > 0 {
            local.alloc(Order::PAGE).unwrap();
        }
        let most = most_with_a_broken_run(&zone, &mut local, 3000);
        let limit = limit(&zone);
        assert!(
            (limit - slack(limit)..=limit).contains(&most),
            "{regions} regions: {most} of {limit}"
        );
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
                let left = local.check_at - local.tally.frees;
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
