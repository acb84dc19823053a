//! Operations of several threads, in an order that no single thread sees.

use super::*;
use crate::table::Retired;

/// Threads add pages in any order: those that gather wait for the latest of their tickets.
#[test]
fn gathered_pages_wait_for_the_latest_of_their_tickets() {
    let backend = paged(16, Scattered::default());
    let (table, deferred) = (&backend.table, DeferredReclaim::default());
    for (window, ticket) in [(0, 5), (1, 8), (2, 7)] {
        let mut retired = Retired::new();
        table.map(at(window * 512, 1), PhysAddr::new(0), RW).unwrap();
        table.clear(at(window * 512, 1), &mut retired).unwrap();
        assert_eq!(retired.len(), 1);
        deferred.add(table, retired, Ticket(ticket));
    }
    assert_eq!(deferred.last(), Ticket(8), "of those gathered, too");
    for (completed, reclaimed) in [(4, 0), (5, 1), (7, 1), (8, 3)] {
        deferred.reclaim(table, |ticket| ticket.0 <= completed);
        assert_eq!(deferred.progress().reclaimed, reclaimed, "after {completed}");
    }
}

/// Two translators know different memory: what one has found is nothing to the other.
#[test]
fn an_extent_of_another_translator_is_not_taken() {
    let (here, there, cache) = (Scattered::default(), Scattered::default(), LastExtent::new());
    cache.run(&here, nowhere(1)).unwrap();
    there.missing.lock().unwrap().insert(nowhere(1).addr());
    let refused = cache.run(&there, nowhere(1));
    assert!(matches!(refused, Err(BackendError::NotRegistered { .. })), "{refused:?}");
    cache.run(&here, nowhere(1)).unwrap();
    assert_eq!(here.looked_up.load(Ordering::SeqCst), 1, "and the first is still known");
}

/// Memory that is unregistered while its extent is looked up is looked up again.
#[test]
fn an_extent_found_while_memory_is_unregistered_is_not_kept() {
    struct Unregisters(Scattered);
    impl PhysTranslator for Unregisters {
        unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
            Ok(())
        }
        fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
            Ok(())
        }
        fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
            let found = self.0.extent(memory);
            self.0.generations.advance();
            found
        }
        fn generation(&self) -> Generation {
            self.0.generation()
        }
    }
    let (translator, cache) = (Unregisters(Scattered::default()), LastExtent::new());
    cache.run(&translator, nowhere(1)).unwrap();
    cache.run(&translator, nowhere(1)).unwrap();
    assert_eq!(translator.0.looked_up.load(Ordering::SeqCst), 2);
}

/// Ranges that were cleared before the refused one may be cached: nothing else requests their
/// flush.
#[test]
fn what_a_refused_revocation_has_cleared_is_flushed() {
    for many in [1, 100] {
        let paged = paged(40, Scattered::default());
        let mapped: Vec<_> = (0..many).map(|at_page| at(2 * at_page, 1)).collect();
        mapped.iter().for_each(|range| paged.map(*range, nowhere(1), RW, None).unwrap());
        let refused = revoke_all(&paged, mapped.iter().copied().chain([at(9000, 1), at(0, 1)]));
        assert!(
            matches!(refused, Err(BackendError::Table(TableError::NotMapped { .. }))),
            "{refused:?}"
        );
        // The next caller submits it.
        paged.map(at(5000, 1), nowhere(1), RW, None).unwrap();
        let ticket = revoke(&paged, at(5000, 1));
        wait(&paged, ticket).unwrap();
        let flushed = paged.queue().batches.lock().unwrap();
        let covered = |range: &IovaRange| flushed.iter().any(|flush| flush.range.covers(range));
        assert!(mapped.iter().all(covered), "{many}: {flushed:?}");
    }
}

/// If the rollback of a failed map is refused, a device may reach the memory for good.
#[test]
fn a_rollback_that_is_refused_leaves_the_memory_reachable() {
    let paged = paged(8, Scattered::default());
    let reason = || BackendError::NotRegistered { addr: 0, len: 4096 };
    assert_eq!(paged.roll_back(at(16, 4), None, 0, reason()), reason(), "nothing was mapped");
    paged.map(at(16, 2), nowhere(2), RW, None).unwrap();
    assert_eq!(paged.roll_back(at(16, 4), None, 2 * PAGE, reason()), reason());
    // As if another thread had revoked it.
    assert_eq!(paged.roll_back(at(16, 4), None, 2 * PAGE, reason()), BackendError::NotRevoked);
}
