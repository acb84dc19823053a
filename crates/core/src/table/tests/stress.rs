//! Concurrent maps and clears.

use super::*;
use std::collections::VecDeque;

/// Owners whose pages lie between each other's in the same table pages: each table page becomes
/// empty while another owner installs into it, all the time.
#[test]
fn stress_owners_share_table_pages() {
    share_table_pages(&bench(40, 3));
}

fn share_table_pages(b: &Bench) {
    const OWNERS: u64 = 4;
    crate::testing::scope(|scope| {
        for owner in 0..OWNERS {
            scope.spawn(move || {
                let mut random = crate::testing::Random::new(owner + 1);
                let mut random = |n: u64| random.next() % n;
                let mut held: Vec<(u64, u64)> = Vec::new();
                let mut flushing: VecDeque<Retired> = VecDeque::new();
                for step in 0..20_000u64 {
                    // Few at a time, so that the shared pages are empty often.
                    if held.len() < 2 && random(2) == 0 {
                        let region = random(3) * M2;
                        // Now and then a run over the end of a table page, owned alone.
                        let (iova, len) = if random(8) == 0 {
                            (G1 + 4 * owner * M2 + M2 - 2 * K4, 4 * K4)
                        } else {
                            (region + (random(128) * OWNERS + owner) * K4, K4)
                        };
                        if held.iter().any(|&(i, l)| i < iova + len && iova < i + l) {
                            continue;
                        }
                        let phys = ((step << 8) | owner) * K4;
                        match b.map(iova, phys, len) {
                            Ok(()) => {
                                held.push((iova, len));
                                assert_eq!(
                                    b.walk(iova + len - 1).map(|w| w.0),
                                    Some(phys + len - 1)
                                );
                            }
                            Err(e) => assert!(matches!(e, TableError::NoPages { .. }), "{e}"),
                        }
                    } else if let Some((iova, len)) = held.pop() {
                        let mut retired = Retired::new();
                        b.table.clear(range(iova, len), &mut retired).unwrap();
                        assert_eq!(b.table.translate(Iova::new(iova)), None);
                        let twice = b.table.clear(range(iova, len), &mut retired);
                        assert_eq!(twice, Err(TableError::NotMapped { at: Iova::new(iova) }));
                        flushing.push_back(retired);
                    }
                    if flushing.len() as u64 > random(6) {
                        b.table.reclaim(flushing.pop_front().unwrap()).unwrap();
                    }
                }
                let mut retired = Retired::new();
                for (iova, len) in held {
                    b.table.clear(range(iova, len), &mut retired).unwrap();
                }
                flushing.push_back(retired);
                for retired in flushing {
                    b.table.reclaim(retired).unwrap();
                }
            });
        }
    });
    b.is_pristine();
}

/// Two threads clear the same pages all the time, against the contract: each page is cleared by one
/// of them, and a third page beside them stays where it is.
#[test]
fn stress_two_clears_of_one_range_count_it_once() {
    const PAGES: u64 = 400;
    let b: Bench = bench(8, 3);
    b.map(500 * K4, 77 * K4, K4).unwrap();
    let turn = std::sync::Barrier::new(2);
    let cleared = core::sync::atomic::AtomicU64::new(0);
    crate::testing::scope(|scope| {
        for thread in 0..2 {
            let (b, turn, cleared) = (&b, &turn, &cleared);
            scope.spawn(move || {
                for round in 1..=3_000 {
                    if thread == 0 {
                        b.map(0, 0x1000 * K4, PAGES * K4).unwrap();
                    }
                    turn.wait();
                    let mut retired = Retired::new();
                    let ok = b
                        .table
                        .clear(IovaRange::new(Iova::new(0), PAGES * K4).unwrap(), &mut retired)
                        .is_ok();
                    b.table.reclaim(retired).unwrap();
                    cleared.fetch_add(u64::from(ok), core::sync::atomic::Ordering::SeqCst);
                    turn.wait();
                    assert_eq!(
                        cleared.load(core::sync::atomic::Ordering::SeqCst),
                        round,
                        "by one of the two"
                    );
                    let found =
                        b.table.translate(Iova::new(500 * K4)).map(|found| found.phys.raw());
                    assert_eq!(found, Some(77 * K4));
                    turn.wait();
                }
            });
        }
    });
}

/// Each owner pins windows in turn, beside owners that map in windows of the same table page of
/// level 2. While a window is pinned a second thread clears what its owner maps. Table pages are
/// few, so they are retired and reused all the time.
#[test]
fn stress_pins_beside_maps_and_reclaims() {
    let b: Bench = bench(9, 3);
    crate::testing::scope(|scope| {
        for owner in 0..2u64 {
            let b = &b;
            scope.spawn(move || {
                for round in 0..300u64 {
                    let window = (round % 3 * 2 + owner) * M2;
                    let pin = loop {
                        match b.table.pin(Iova::new(window)) {
                            Ok(pin) => break pin,
                            Err(e) => assert!(matches!(e, TableError::NoPages { .. }), "{e}"),
                        }
                        b.settle();
                    };
                    let page = |n: u64| range(window + n * K4, K4);
                    let map =
                        |n| b.table.map_pinned(&pin, page(n), PhysAddr::new((n + window) * K4), RW);
                    (0..8).for_each(|n| map(n).unwrap());
                    crate::testing::scope(|scope| {
                        scope.spawn(|| {
                            (0..8).for_each(|n| b.table.clear_pinned(&pin, page(n)).unwrap())
                        });
                        (8..16).for_each(|n| map(n).unwrap());
                        for n in 8..16 {
                            assert_eq!(
                                b.walk(window + n * K4).map(|w| w.0),
                                Some((n + window) * K4)
                            );
                            b.table.clear_pinned(&pin, page(n)).unwrap();
                        }
                    });
                    let mut retired = Retired::new();
                    b.table.unpin(pin, &mut retired).unwrap();
                    b.table.reclaim(retired).unwrap();
                }
            });
        }
        let b = &b;
        scope.spawn(move || {
            for round in 0..10_000u64 {
                let at = (6 + round % 2) * M2 + round % 512 * K4;
                match b.map(at, round * K4, K4) {
                    Ok(()) => {
                        let mut retired = Retired::new();
                        b.table.clear(range(at, K4), &mut retired).unwrap();
                        b.table.reclaim(retired).unwrap();
                    }
                    Err(e) => assert!(matches!(e, TableError::NoPages { .. }), "{e}"),
                }
            }
        });
    });
    b.is_pristine();
}
