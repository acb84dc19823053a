//! How many frames a magazine holds.

use super::*;

/// The documented limit: 1/32 of the zone, 512 to 32,768.
fn limit(zone: &Zone) -> u32 {
    (zone.frames() / 32).clamp(512, 32_768)
}

/// Frees all frames of a zone in order, one at a time or several, and looks at what the owner holds after each call.
fn most_held(zone: &Zone, at_once: usize) -> (u32, u32) {
    let mut all: Vec<_> = (0..zone.frames()).map(|_| Some(zone.alloc(Order::PAGE).unwrap())).collect();
    let mut local = zone.local();
    let (mut most, mut least_after_trim) = (0, u32::MAX);
    let mut before = 0;
    for some in all.chunks_mut(at_once) {
        match some {
            [one] => local.free(one.take().unwrap(), Order::PAGE).unwrap(),
            many => assert_eq!(local.free_bulk(many), Ok(at_once)),
        }
        let held = local.held();
        if held < before {
            least_after_trim = least_after_trim.min(held);
        }
        most = most.max(held);
        before = held;
    }
    (most, least_after_trim)
}

#[test]
fn a_magazine_holds_no_more_than_its_limit() {
    let mut over = vec![];
    for regions in [17u32, 40, 64, 100, 200, 257, 300, 312, 333, 400, 512, 600] {
        for at_once in [1usize, 8] {
            let zone = Zone::new(regions * 512).unwrap();
            let limit = limit(&zone);
            let (most, least) = most_held(&zone, at_once);
            println!(
                "{regions} regions, {at_once} at once: limit {limit}, most {most}, least after trim {least}"
            );
            if most > limit {
                over.push((regions, at_once, limit, most));
            }
        }
    }
    assert!(over.is_empty(), "{over:?}");
}

/// The last frames of an exhausted zone are those of a run that the owner keeps: they move to its magazine.
#[test]
fn a_magazine_with_a_broken_run_holds_no_more_than_its_limit() {
    let zone = Zone::new(33 * 512).unwrap();
    let mut local = zone.local();
    let run = local.alloc(Order::HUGE).unwrap();
    local.free(run, Order::HUGE).unwrap();
    assert_eq!(local.held(), 512);
    // All others, without a failure.
    let mut others: Vec<_> = (0..32 * 512).map(|_| zone.alloc(Order::PAGE).unwrap()).collect();
    assert!(!zone.under_pressure());
    local.alloc(Order::PAGE).unwrap();
    assert_eq!(local.held(), 511);
    others.sort_unstable_by_key(|frame| frame.index());
    let mut most = 0;
    for frame in others.drain(..2048) {
        local.free(frame, Order::PAGE).unwrap();
        most = most.max(local.held());
    }
    assert!(most <= limit(&zone), "{most} of {}", limit(&zone));
}

/// It is used: frees in order fill it to within the documented sixteenth (in small zones a quarter) before it is trimmed, and
/// a trim leaves a good part.
#[test]
fn a_magazine_is_nearly_full_before_it_is_trimmed() {
    for regions in [17u32, 64, 100, 257, 333, 512, 600] {
        let zone = Zone::new(regions * 512).unwrap();
        let limit = limit(&zone);
        let slack = (limit / 4).min(256).max(limit / 16);
        let (most, least) = most_held(&zone, 1);
        assert!(most + slack >= limit, "{regions} regions: {most} of {limit}");
        assert!(least + slack + limit / 4 + 64 >= limit, "{regions} regions: {least} of {limit}");
    }
}
