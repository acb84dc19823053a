//! A zone's counts are exact while no call is being made, whatever its owners have done.

use super::*;

/// Compares the report with the owners and with `in_use`.
fn check(zone: &Zone, owners: &[&ZoneLocal], in_use: u64, after: &str) {
    let held: u64 = owners.iter().map(|owner| u64::from(owner.held())).sum();
    let stats = zone.stats();
    assert_eq!((stats.in_use, stats.held), (in_use, held), "after {after}");
    assert_eq!(zone.taken(), in_use + held, "after {after}");
    assert_eq!(stats.allocs - stats.frees, in_use, "after {after}");
}

#[test]
fn frees_into_a_magazine_and_allocs_from_it_are_counted_at_once() {
    for frames in [1 << 17, 1 << 20, 1 << 23] {
        let zone = Zone::new(frames).unwrap();
        let used = (frames / 64).min(30_000);
        let run = zone.alloc_run(used, 1).unwrap();
        let mut local = zone.local();
        let mut in_use = u64::from(used);
        let exact = |local: &ZoneLocal, in_use| {
            let stats = zone.stats();
            assert_eq!((stats.in_use, stats.held), (in_use, local.held().into()), "{frames}");
        };
        for index in covered(run, used) {
            local.free(frame(index), Order::PAGE).unwrap();
            in_use -= 1;
            exact(&local, in_use);
        }
        for _ in 0..2 * used {
            local.alloc(Order::PAGE).unwrap();
            in_use += 1;
            exact(&local, in_use);
        }
    }
}

/// The owner's frames never leave its magazine.
#[test]
fn allocs_that_are_freed_again_are_counted_too() {
    let zone = Zone::new(1 << 15).unwrap();
    let mut local = zone.local();
    for _ in 0..1 << 10 {
        let frame = local.alloc(Order::PAGE).unwrap();
        local.free(frame, Order::PAGE).unwrap();
    }
    let stats = zone.stats();
    assert_eq!((stats.allocs, stats.frees), (1 << 10, 1 << 10));
}

/// Runs that are allocated through an owner are counted as single frames are.
#[test]
fn runs_through_an_owner_are_counted_at_once() {
    for order in [1, 3, 6, 7, 9] {
        let zone = Zone::new(1 << 14).unwrap();
        let order = super::order(order);
        let (mut local, mut runs) = (zone.local(), Vec::new());
        let mut in_use = 0;
        while in_use < 1 << 13 {
            runs.push(local.alloc(order).unwrap());
            in_use += u64::from(order.frames());
            check(&zone, &[&local], in_use, "an alloc");
        }
        for run in runs {
            local.free(run, order).unwrap();
            in_use -= u64::from(order.frames());
            check(&zone, &[&local], in_use, "a free");
        }
    }
}

/// Counts that an owner has not yet added to the zone's must not be lost when another caller adds
/// the opposite: a list is counted by its owner, and its drop by the zone.
#[test]
fn a_list_that_is_dropped_leaves_exact_counts_and_the_watermark() {
    for lists in [1, 5] {
        let zone = zone_with_low(20_480, 256);
        let mut local = zone.local();
        let mut kept = vec![None; 522];
        assert_eq!(local.fill(&mut kept), 522);
        for _ in 0..lists {
            let list = local.take_list(3000);
            check(&zone, &[&local], 522 + 3000, "a list");
            drop(list);
            check(&zone, &[&local], 522, "its drop");
        }
        let mut rest = vec![None; 20_480];
        let got = local.fill(&mut rest);
        assert_eq!((got, zone.available()), (20_480 - 522 - 256 + 1, 255), "{lists} lists");
        assert!(zone.under_pressure());
        check(&zone, &[&local], (522 + got) as u64, "a fill");
    }
}

fn zone_with_low(frames: u32, low: u32) -> Zone {
    Zone::with_watermarks(frames, Watermarks::new(low / 2, low, low * 2).unwrap()).unwrap()
}

/// A bulk call stops where it should, whatever other owners have freed or taken since they last
/// added their counts; the zone's own calls too.
#[test]
fn the_watermark_is_exact_beside_owners_that_have_not_added_their_counts() {
    for through_owner in [false, true] {
        let zone = zone_with_low(512 * 100, 256);
        let first = zone.alloc_run(1000, 1).unwrap();
        let mut idle = zone.local();
        // Not enough to be added: an owner adds them at about 1/256 of the zone.
        for index in covered(first, 150) {
            idle.free(frame(index), Order::PAGE).unwrap();
        }
        idle.flush();
        let mut local = zone.local();
        let mut rest = vec![None; 512 * 100];
        if through_owner {
            local.fill(&mut rest)
        } else {
            zone.local().fill(&mut rest)
        };
        assert_eq!(zone.available(), 255, "through an owner: {through_owner}");
        assert!(zone.under_pressure());
    }
}

/// However an owner allocates, the zone knows what it has taken, but for about 1/256 of the frames
/// and what it has claimed at once: the watermarks rely on that.
#[test]
fn an_owner_that_only_allocates_adds_its_counts() {
    for order in [Order::PAGE, order(3), Order::HUGE] {
        let zone = zone_with_low(512 * 100, 256);
        let mut local = zone.local();
        for taken in (1..=30_000).step_by(order.frames() as usize) {
            local.alloc(order).unwrap();
            let known = 512 * 100 - zone.0.available();
            assert!(known.abs_diff(taken) < 1_000, "{order:?}: {known} of {taken}");
        }
    }
}

/// Pressure begins with the call that reaches a watermark, and not later, when its counts are
/// added, after others have freed enough.
#[test]
fn counts_that_are_added_late_begin_no_pressure() {
    let zone = zone_with_low(512 * 20, 256);
    let mut local = zone.local();
    let mut all = vec![None; 512 * 20];
    local.fill(&mut all);
    assert!(zone.under_pressure());
    zone.local().free_bulk(&mut all).unwrap();
    assert!(!zone.under_pressure());
    local.fold();
    assert!(!zone.under_pressure(), "there are enough free frames");
    // One that got all it asked for, the last from below the watermark.
    let mut most = vec![None; 512 * 20 - 256 + 1];
    assert_eq!(local.fill(&mut most), most.len());
    assert!(zone.under_pressure());
}

/// Every call of two owners and of the zone itself, in a random order, down to where they fail.
#[test]
fn counts_are_exact_after_every_call() {
    for (frames, low) in [(512 * 3, 0), (512 * 20, 0), (512 * 20, 256), (512 * 40, 2000)] {
        let zone = zone_with_low(frames, low);
        let mut owners = [zone.local(), zone.local()];
        let mut runs: Vec<(Frame, Order)> = Vec::new();
        let mut seed = 1_u64;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as usize % below
        };
        let mut lists: Vec<FrameList> = Vec::new();
        let (mut failed, mut asked, mut filled) = (0, 0, 0);
        for step in 0..6000 {
            let who = random(3);
            let owner = owners.get_mut(who);
            let wanted = random(if step % 100 < 50 { 600 } else { 40 }) + 1;
            let verb = random(10);
            match verb {
                0 | 1 => {
                    let order = super::order([0, 0, 0, 1, 3, 6, 7, 8, 9][random(9)]);
                    let got = match owner {
                        Some(owner) => owner.alloc(order),
                        None => zone.alloc(order),
                    };
                    failed += u64::from(got.is_err());
                    runs.extend(got.map(|first| (first, order)));
                }
                2 | 3 => {
                    let mut slots = vec![None; wanted];
                    let all = verb == 3;
                    let got = match owner {
                        Some(owner) if all => owner.fill_all(&mut slots).map_or(0, |()| wanted),
                        Some(owner) => owner.fill(&mut slots),
                        None if all => zone.local().fill_all(&mut slots).map_or(0, |()| wanted),
                        None => zone.local().fill_by(&mut slots, Urgency::Urgent),
                    };
                    assert_eq!(slots.iter().flatten().count(), got);
                    (asked, filled, failed) =
                        (asked + wanted, filled + got, failed + u64::from(got == 0));
                    runs.extend(slots.into_iter().flatten().map(|frame| (frame, Order::PAGE)));
                }
                4 => {
                    let list = match owner {
                        Some(owner) => owner.take_list(wanted),
                        None => zone.local().take_list(wanted),
                    };
                    (asked, filled) = (asked + wanted, filled + list.len());
                    failed += u64::from(list.len() == 0);
                    lists.push(list);
                }
                5 => drop(lists.pop()),
                6 if who < 2 && step % 8 == 0 => owners[who] = zone.local(),
                _ => {
                    let mut some: Vec<_> = (0..wanted.min(runs.len()))
                        .map(|_| runs.swap_remove(random(runs.len())))
                        .collect();
                    let mut pages: Vec<_> = some
                        .extract_if(.., |run| verb == 9 && run.1 == Order::PAGE)
                        .map(|run| Some(run.0))
                        .collect();
                    match owner {
                        Some(owner) => {
                            assert_eq!(owner.free_bulk(&mut pages), Ok(pages.len()));
                            some.into_iter().for_each(|run| owner.free(run.0, run.1).unwrap());
                        }
                        None => {
                            assert_eq!(zone.local().free_bulk(&mut pages), Ok(pages.len()));
                            some.into_iter().for_each(|run| zone.free(run.0, run.1).unwrap());
                        }
                    }
                }
            }
            let out: u64 = runs.iter().map(|run| u64::from(run.1.frames())).sum::<u64>()
                + lists.iter().map(|list| list.len() as u64).sum::<u64>();
            let [a, b] = &owners;
            check(&zone, &[a, b], out, &format!("verb {verb} of {who}, step {step}"));
            let stats = zone.stats();
            assert_eq!(
                (stats.bulk_asked, stats.bulk_filled, stats.exhausted),
                (asked as u64, filled as u64, failed)
            );
        }
    }
}
