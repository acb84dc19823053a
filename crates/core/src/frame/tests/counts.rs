//! How far the zone's counts are behind an owner's.

use super::*;

/// The documented lag: about 1/256 of the zone and at most 4,608 frames.
fn lag(zone: &Zone) -> u64 {
    u64::from(zone.frames() / 256).clamp(64, 4096) + 512
}

#[test]
fn frees_into_a_magazine_and_allocs_from_it_are_counted_in_time() {
    for frames in [1 << 17, 1 << 20, 1 << 23] {
        let zone = Zone::new(frames).unwrap();
        let used = (frames / 64).min(30_000);
        let run = zone.alloc_run(used, 1).unwrap();
        let mut local = zone.local();
        let mut in_use = u64::from(used);
        for index in covered(run, used) {
            local.free(frame(index), Order::PAGE).unwrap();
            in_use -= 1;
            let off = (
                zone.stats().in_use.abs_diff(in_use),
                zone.stats().held.abs_diff(local.held().into()),
            );
            assert!(
                off.0.max(off.1) <= lag(&zone),
                "{frames} frames, {in_use} in use: off by {off:?}"
            );
        }
        for _ in 0..2 * used {
            local.alloc(Order::PAGE).unwrap();
            in_use += 1;
            let off = (
                zone.stats().in_use.abs_diff(in_use),
                zone.stats().held.abs_diff(local.held().into()),
            );
            assert!(
                off.0.max(off.1) <= lag(&zone),
                "{frames} frames, {in_use} in use: off by {off:?}"
            );
        }
    }
}

/// Of an owner whose frames never leave its magazine.
#[test]
fn allocs_that_are_freed_again_are_counted_too() {
    let zone = Zone::new(1 << 15).unwrap();
    let mut local = zone.local();
    for _ in 0..1 << 17 {
        let frame = local.alloc(Order::PAGE).unwrap();
        local.free(frame, Order::PAGE).unwrap();
    }
    let stats = zone.stats();
    assert!(stats.allocs >= 1 << 16 && stats.frees >= 1 << 16, "{stats:?}");
}

/// Runs that are allocated through an owner are counted as single frames are.
#[test]
fn runs_through_an_owner_are_counted_in_time() {
    for order in [1, 3, 6, 7, 9] {
        let zone = Zone::new(1 << 17).unwrap();
        let order = super::order(order);
        let (mut local, mut runs) = (zone.local(), Vec::new());
        let most = lag(&zone) + u64::from(order.frames());
        let mut in_use = 0;
        let check = |local: &ZoneLocal, in_use: u64| {
            let (stats, held) = (zone.stats(), u64::from(local.held()));
            let off = (stats.in_use.abs_diff(in_use), stats.held.abs_diff(held));
            assert!(
                off.0.max(off.1) <= most,
                "order {}, {in_use} in use: off by {off:?}",
                order.get()
            );
        };
        while in_use < 1 << 16 {
            runs.push(local.alloc(order).unwrap());
            in_use += u64::from(order.frames());
            check(&local, in_use);
        }
        for run in runs {
            local.free(run, order).unwrap();
            in_use -= u64::from(order.frames());
            check(&local, in_use);
        }
    }
}
