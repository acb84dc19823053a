//! Table pages that are retired, flushed and reclaimed.

use super::*;

#[test]
fn table_pages_come_back_however_many_windows_come_and_go() {
    // Room for the root, one page of level 2, and two of level 1: each window of 2 MiB needs one of
    // these.
    let paged = paged(4, Scattered::default());
    for window in 1..1000 {
        let range = at(window % 512 * 512, 1);
        paged.map(range, nowhere(1), RW, None).unwrap();
        revoke(&paged, range); // without waiting for it
    }
    let stats = paged.stats();
    assert!(stats.table_pages <= 4, "{stats:?}");
}

#[test]
fn pages_that_a_failed_map_retired_come_back_to_the_next_map() {
    // Room for the root, one page of level 2 and one of level 1; nothing is ever revoked, so no
    // ticket is in flight.
    let paged = paged(3, Scattered::default());
    // Two windows of 2 MiB need two pages of level 1: the map makes one, fails, and retires what it
    // made.
    let error = paged.map(at(512 - 1, 2), nowhere(2), RW, None).unwrap_err();
    assert!(matches!(error, BackendError::Table(TableError::NoPages { .. })), "{error}");
    // Elsewhere, below another page of level 2: only what was retired can serve it.
    paged.map(at(512 * 512 * 3, 1), nowhere(1), RW, None).unwrap();
    assert_eq!(paged.stats().table_pages, 3);
}

#[test]
fn a_map_gets_the_pages_of_all_levels_that_were_revoked() {
    let paged = paged(3, Scattered::default());
    for gib in 0..20 {
        let range = at(gib * 512 * 512, 1);
        paged.map(range, nowhere(1), RW, None).unwrap();
        revoke(&paged, range); // without waiting for it
    }
}

#[test]
fn without_a_flush_table_pages_run_out_and_say_so() {
    let paged = paged(4, Scattered { hangs: true.into(), ..Scattered::default() });
    let map = |window| paged.map(at(window * 512, 1), nowhere(1), RW, None);
    for window in 1..3 {
        map(window).unwrap();
        revoke(&paged, at(window * 512, 1));
    }
    let error = map(3).unwrap_err();
    assert!(matches!(error, BackendError::Table(TableError::NoPages { .. })), "{error}");
}

/// A table page that was retired stays retired until its flush has completed, however many
/// revocations come after.
#[test]
pub(super) fn table_pages_are_reclaimed_after_their_flush_and_not_before() {
    let paged = paged(5, Scattered { hangs: true.into(), ..Scattered::default() });
    for window in 1..4 {
        paged.map(at(window * 512, 1), nowhere(1), RW, None).unwrap();
    }
    for window in 1..4 {
        revoke(&paged, at(window * 512, 1));
        assert_eq!(paged.stats().table_pages_retired, window);
    }
    let error = paged.map(at(4 * 512, 1), nowhere(1), RW, None).unwrap_err();
    assert!(matches!(error, BackendError::Table(TableError::NoPages { .. })), "{error}");
    paged.queue().hangs.store(false, Ordering::SeqCst);
    paged.map(at(4 * 512, 1), nowhere(1), RW, None).unwrap();
}

/// The flush of a retired table page drops links too, of all addresses that went through it; that
/// of leaves does not.
#[test]
pub(super) fn links_are_flushed_where_a_table_page_was_retired() {
    let paged = paged(8, Scattered::default());
    paged.map(at(512, 2), nowhere(2), RW, None).unwrap();
    revoke(&paged, at(512, 1));
    assert_eq!(
        *paged.queue().batches.lock().unwrap(),
        [Flush { range: at(512, 1), leaf_only: true }]
    );
    revoke(&paged, at(513, 1));
    let last = *paged.queue().batches.lock().unwrap().last().unwrap();
    assert_eq!(last, Flush { range: at(512, 512), leaf_only: false });
    assert_eq!(paged.stats().invalidations.requested_tables, 1);
}

/// Table pages far from each other are flushed each by itself, and not with everything between
/// them; neighbours together.
#[test]
fn retired_table_pages_are_flushed_one_by_one() {
    let paged = paged(15, Scattered::default());
    let windows = [0, 1, 1000, 200_000, 200_001];
    for window in windows {
        paged.map(at(window * 512, 1), nowhere(1), RW, None).unwrap();
    }
    let ticket = revoke_all(&paged, windows.into_iter().map(|window| at(window * 512, 1))).unwrap();
    wait(&paged, ticket).unwrap();
    let tables = |flushes: &[Flush]| {
        flushes.iter().filter(|flush| !flush.leaf_only).map(|flush| flush.range).collect::<Vec<_>>()
    };
    let window = |first: u64, count: u64| at(first * 512, count * 512);
    let flushed = tables(&paged.queue().batches.lock().unwrap());
    assert_eq!(flushed, [window(0, 2), window(1000, 1), window(200_000, 2)]);
}

/// After 4 KiB use of a range all of it gets superpages again, once the flush of its table pages
/// has completed.
#[test]
fn superpages_return_after_4_kib_use_of_their_range() {
    let paged = walked(64);
    let region = at(0, 4 * 512);
    let phys = PhysAddr::new(1 << 30);
    for window in 0..4 {
        paged.map(at(window * 512 + 3, 1), walker::page(window), RW, None).unwrap();
    }
    // Far away, so that the page of level 2 stays.
    paged.map(at(500 * 512, 1), walker::page(9), RW, None).unwrap();
    for window in 0..4 {
        revoke_all(&paged, [at(window * 512 + 3, 1)]).unwrap();
    }
    for _ in 0..2 {
        paged.make_room(region, phys);
        paged.map_run(region, phys, RW).unwrap();
        for window in 0..4 {
            let size = paged.table.translate(Iova::new(window << 21)).unwrap().size;
            assert_eq!(size, crate::addr::PageSize::Size2M);
        }
        let ticket = revoke_all(&paged, [region]).unwrap();
        wait(&paged, ticket).unwrap();
    }
}

/// A page that came back and was taken by another owner is progress: the map tries again instead of
/// failing while pages are only on their way back.
#[test]
fn a_reclaimed_page_counts_although_another_owner_took_it() {
    let paged = walked(4); // the root, one of level 2, two of level 1
    let window = |n: u64| at(n * 512, 1);
    paged.map(window(0), walker::page(0), RW, None).unwrap();
    paged.map(window(1), walker::page(1), RW, None).unwrap();
    let before = paged.deferred.reclaimed();
    let ticket = revoke_all(&paged, [window(0)]).unwrap();
    wait(&paged, ticket).unwrap();
    paged.map(window(2), walker::page(2), RW, None).unwrap(); // takes the page that was retired
    assert_eq!(paged.table.stats().retired, 0);
    assert!(paged.wait_for_retired(before));
    assert!(!paged.wait_for_retired(paged.deferred.reclaimed()), "none is on its way back");
    let full = paged.map(window(3), walker::page(3), RW, None).unwrap_err();
    assert!(matches!(full, BackendError::Table(TableError::NoPages { capacity: 4, .. })), "{full}");
}

/// Between the check without the lock and the one under it, another thread reclaims what was due,
/// and pages of a later flush take its place.
#[test]
fn pages_are_reclaimed_by_what_is_due_under_the_lock() {
    let paged = paged(6, Scattered::default());
    for window in 1..4 {
        paged.map(at(window * 512, 1), nowhere(1), RW, None).unwrap();
    }
    let retire = |window: u64| {
        let mut retired = Retired::new();
        paged.table.clear(at(window * 512, 1), &mut retired).unwrap();
        assert!(!retired.is_empty());
        paged.deferred.add(&paged.table, retired, Ticket(window));
    };
    retire(1);
    let completed = |ticket: Ticket| ticket <= Ticket(1);
    let first = core::cell::Cell::new(true);
    paged.deferred.reclaim(&paged.table, |ticket| {
        if first.replace(false) {
            // Another thread.
            paged.deferred.reclaim(&paged.table, completed);
            retire(2);
            return true;
        }
        completed(ticket)
    });
    assert_eq!(
        (paged.deferred.reclaimed(), paged.stats().table_pages_retired),
        (1, 1),
        "a walker may hold the second"
    );
    paged.deferred.reclaim(&paged.table, |_| true);
    assert_eq!(paged.deferred.reclaimed(), 2);
}

/// A queue that panics at each of its calls, while windows of 2 MiB come and go.
#[test]
fn a_queue_that_panics_loses_no_table_page() {
    let mut panics_in = 0;
    loop {
        panics_in += 1;
        let paged = paged(4, Scattered { panics_in: panics_in.into(), ..Scattered::default() });
        let mut panicked = 0;
        for window in 1..6 {
            let range = at(window * 512, 1);
            let mut try_each = |call: &dyn Fn()| {
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
                panicked += u32::from(outcome.is_err());
            };
            try_each(&|| paged.map(range, nowhere(1), RW, None).unwrap());
            try_each(&|| drop(revoke_all(&paged, [range])));
        }
        if panicked == 0 {
            break;
        }
        // The ranges of a map that panicked stay mapped; all others are free again, so that two
        // windows have room.
        let mapped = paged.table.mapped().count() as u64;
        for window in 10..12 - mapped {
            paged
                .map(at(window * 512, 1), nowhere(1), RW, None)
                .unwrap_or_else(|error| panic!("{panics_in}: {error}"));
        }
    }
    assert!(panics_in > 10, "{panics_in}");
}
