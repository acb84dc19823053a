//! The runs that a table reports as mapped.

use super::*;
use core::sync::atomic::AtomicBool;

/// Runs as numbers: address, bytes, memory, access, size of a leaf.
pub(super) type Runs = Vec<(u64, u64, u64, u64, u64)>;

pub(super) fn runs<F: Format>(table: &Table<F>) -> Runs {
    let run = |run: MappedRun| {
        let access = u64::from(run.access.bits());
        (run.iova.start().raw(), run.iova.len(), run.phys.raw(), access, run.page_size.bytes())
    };
    table.mapped().map(run).collect()
}

fn one_leaf_of_each_size<F: Decode>(levels: u8) {
    let b: Bench<F> = bench(64, levels);
    assert_eq!(runs(&b.table), []);
    // The first address and the last one, and one of each size between.
    let last = (1 << b.table.bits()) - K4;
    for (iova, phys, len) in
        [(0, 5 * K4, K4), (M2, 8 * M2, M2), (G1, 3 * G1, G1), (last, 7 * K4, K4)]
    {
        b.map(iova, phys, len).unwrap();
    }
    let expected = [
        (0, K4, 5 * K4, 3, K4),
        (M2, M2, 8 * M2, 3, M2),
        (G1, G1, 3 * G1, 3, G1),
        (last, K4, 7 * K4, 3, K4),
    ];
    assert_eq!(runs(&b.table), expected, "{levels} levels");
    let mut retired = Retired::new();
    b.table.clear(range(M2, M2), &mut retired).unwrap();
    b.table.clear(range(last, K4), &mut retired).unwrap();
    assert!(!retired.is_empty(), "a retired link is in the way");
    assert_eq!(runs(&b.table), [expected[0], expected[2]]);
}

#[test]
fn a_leaf_of_each_level_is_a_run() {
    (3..=5).for_each(one_leaf_of_each_size::<VtdSecondStage>);
    (4..=5).for_each(one_leaf_of_each_size::<VtdFirstStage>);
}

fn neighbours_are_merged<F: Decode>() {
    let b: Bench<F> = bench(64, 4);
    // Over the end of a table page, in two calls.
    b.map(M2 - 2 * K4, 16 * K4, 3 * K4).unwrap();
    b.map(M2 + K4, 19 * K4, K4).unwrap();
    // Adjacent addresses of memory that lies elsewhere; the reverse; and another access.
    b.map(M2 + 2 * K4, 99 * K4, K4).unwrap();
    b.map(M2 + 4 * K4, 100 * K4, K4).unwrap();
    b.table.map(range(M2 + 5 * K4, K4), PhysAddr::new(101 * K4), Access::READ).unwrap();
    // Two superpages behind small leaves: another size.
    b.map(G1 - K4, 4 * G1 - K4, K4 + 2 * M2).unwrap();
    let expected = [
        (M2 - 2 * K4, 4 * K4, 16 * K4, 3, K4),
        (M2 + 2 * K4, K4, 99 * K4, 3, K4),
        (M2 + 4 * K4, K4, 100 * K4, 3, K4),
        (M2 + 5 * K4, K4, 101 * K4, 1, K4),
        (G1 - K4, K4, 4 * G1 - K4, 3, K4),
        (G1, 2 * M2, 4 * G1, 3, M2),
    ];
    assert_eq!(runs(&b.table), expected);
}

#[test]
fn runs_are_as_long_as_addresses_memory_access_and_size_allow() {
    neighbours_are_merged::<VtdSecondStage>();
    neighbours_are_merged::<VtdFirstStage>();
}

#[test]
fn a_run_is_longer_than_one_holding_of_the_lock() {
    let b: Bench = bench(64, 3);
    // 4 KiB leaves, because the addresses differ within 2 MiB.
    b.map(K4, G1, 20 * M2).unwrap();
    assert_eq!(runs(&b.table), [(K4, 20 * M2, G1, 3, K4)]);
}

#[test]
fn pinned_pages_are_read() {
    let b: Bench = bench(64, 3);
    let pin = b.table.pin(Iova::new(M2)).unwrap();
    b.table.map_pinned(&pin, range(M2 + K4, K4), PhysAddr::new(9 * K4), RW).unwrap();
    b.map(4 * M2, 3 * K4, K4).unwrap();
    assert_eq!(runs(&b.table), [(M2 + K4, K4, 9 * K4, 3, K4), (4 * M2, K4, 3 * K4, 3, K4)]);
    b.table.clear(range(4 * M2, K4), &mut Retired::new()).unwrap();
    b.table.clear_pinned(&pin, range(M2 + K4, K4)).unwrap();
    assert_eq!(runs(&b.table), []);
    b.table.unpin(pin, &mut Retired::new()).unwrap();
}

#[test]
fn a_superpage_that_replaces_what_was_read_appears_from_there_on() {
    let b: Bench = bench(64, 3);
    b.map(0, 8 * M2, K4).unwrap();
    b.map(K4, 64 * M2, K4).unwrap();
    b.map(2 * K4, 8 * M2, K4).unwrap();
    let mut all = b.table.mapped();
    assert_eq!(all.next().map(|run| run.iova), Some(range(0, K4)));
    // The second leaf has been read.
    let mut retired = Retired::new();
    b.table.clear(range(0, 3 * K4), &mut retired).unwrap();
    b.table.reclaim(retired).unwrap();
    b.map(0, 8 * M2, M2).unwrap();
    assert_eq!(all.next().map(|run| run.iova), Some(range(K4, K4)));
    let rest = all.next().unwrap();
    assert_eq!((rest.iova, rest.phys.raw()), (range(2 * K4, M2 - 2 * K4), 8 * M2 + 2 * K4));
    assert_eq!(rest.page_size, PageSize::Size2M);
    assert_eq!((all.next(), all.next()), (None, None));
}

#[test]
fn a_damaged_link_hides_what_is_below_and_nothing_else() {
    let b: Bench = bench(64, 3);
    b.map(0, 5 * K4, K4).unwrap();
    b.map(G1, 6 * K4, K4).unwrap();
    // The root links itself, and a page that is not the table's.
    for damaged in [TABLES.raw() | 3, (1 << 45) | 3] {
        b.pages[0].entries()[7].store(damaged, Ordering::SeqCst);
        assert_eq!(runs(&b.table), [(0, K4, 5 * K4, 3, K4), (G1, K4, 6 * K4, 3, K4)]);
    }
    b.pages[0].entries()[7].store(0, Ordering::SeqCst);
}

/// Mappings that stay are found by each of many dumps, while others around them in the same table
/// pages come and go, and table pages with them.
#[test]
fn stress_dumps_beside_maps_clears_and_reclaims() {
    let b: Bench = bench(40, 3);
    let phys_of = |iova: u64| iova + 3 * G1 + K4; // never a superpage
    let stays = [M2 + 7 * K4, 3 * M2, G1 + 511 * K4];
    for iova in stays {
        b.map(iova, phys_of(iova), K4).unwrap();
    }
    let done = AtomicBool::new(false);
    let dumps = AtomicUsize::new(0);
    crate::testing::scope(|scope| {
        let (b, done, dumps) = (&b, &done, &dumps);
        scope.spawn(move || {
            while !done.load(Ordering::SeqCst) || dumps.load(Ordering::SeqCst) < 100 {
                let (mut end, mut found) = (0, 0);
                for run in b.table.mapped() {
                    let start = run.iova.start().raw();
                    assert!(start >= end, "no address twice, in order");
                    assert_eq!((run.phys.raw(), run.access), (phys_of(start), RW));
                    assert_eq!(run.page_size, PageSize::Size4K);
                    end = run.iova.end().raw();
                    found +=
                        stays.iter().filter(|iova| run.iova.contains(Iova::new(**iova))).count();
                }
                assert_eq!(found, stays.len(), "what is mapped throughout");
                dumps.fetch_add(1, Ordering::SeqCst);
            }
        });
        scope.spawn(move || {
            let mut random = crate::testing::Random::new(11);
            for _ in 0..20_000 {
                // Beside what stays, and in table pages of their own.
                let window = [M2, 3 * M2, 5 * M2, G1, 2 * G1][random.below(5)];
                let first = window + 8 * K4 + random.next() % 400 * K4;
                let len = (1 + random.next() % 90) * K4;
                b.map(first, phys_of(first), len).unwrap();
                let mut retired = Retired::new();
                b.table.clear(range(first, len), &mut retired).unwrap();
                b.table.reclaim(retired).unwrap();
            }
            done.store(true, Ordering::SeqCst);
        });
    });
    let mut retired = Retired::new();
    for iova in stays {
        b.table.clear(range(iova, K4), &mut retired).unwrap();
    }
    b.table.reclaim(retired).unwrap();
    assert_eq!(runs(&b.table), []);
    b.is_pristine();
}
