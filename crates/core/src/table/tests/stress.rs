//! With threads.

use super::*;
use std::collections::VecDeque;

/// Owners whose pages lie between each other's in the same table pages: each table page becomes empty while another
/// owner installs into it, all the time.
#[test]
fn stress_owners_share_table_pages() {
    const OWNERS: u64 = 4;
    let b = bench(40, 3);
    crate::threads::scope(|scope| {
        for owner in 0..OWNERS {
            let b = &b;
            scope.spawn(move || {
                let mut seed = owner + 1;
                let mut random = |n: u64| {
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    seed % n
                };
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
                                assert_eq!(b.walk(iova + len - 1).map(|w| w.0), Some(phys + len - 1));
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
