//! A domain over a table: an owner's windows are pinned there.

use super::*;
use crate::access::{Bidirectional, FromDevice};
use crate::domain::{Domain, DomainId, DomainLocal, Mapping, Pinned, Unrevoked};
use crate::iova::IovaSpace;

const WINDOW_PAGES: u64 = 512;

/// Memory of which only the addresses are used.
#[derive(Debug)]
pub(super) struct Nowhere(pub(super) usize);
// SAFETY: nothing in these tests touches the memory.
unsafe impl Pinned for Nowhere {
    fn memory(&self) -> DmaMemory<'_> {
        nowhere(self.0)
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

pub(super) type Unit = Arc<TableBackend<VtdSecondStage, Scattered>>;

pub(super) fn domain(pages: usize, queue: Scattered) -> (Unit, Domain) {
    let unit = Arc::new(paged(pages, queue));
    let domain = Domain::new(unit.clone(), IovaSpace::new(unit.bits()).unwrap());
    (unit, domain)
}

pub(super) fn is_mapped(unit: &Unit, at: IovaRange) -> bool {
    unit.table.translate(at.start()).is_some()
}

fn ordinary_map_is_refused(unit: &Unit, window: IovaRange) -> bool {
    let inside = window.part(PAGE, PAGE).unwrap();
    matches!(
        unit.map(inside, nowhere(1), RW, None),
        Err(BackendError::Table(TableError::Pinned { .. }))
    )
}

fn window_of(mapping: &Mapping<Nowhere, FromDevice>) -> IovaRange {
    let start = mapping.iova().start().raw() & !(WINDOW_PAGES * PAGE - 1);
    IovaRange::new(Iova::new(start), WINDOW_PAGES * PAGE).unwrap()
}

#[test]
fn a_window_is_pinned_until_its_owner_and_all_mappings_are_gone() {
    let (unit, domain) = domain(8, Scattered::default());
    let pages = unit.stats().table_pages;
    let mut local = domain.local();
    let mapping = local.map(Nowhere(3), FromDevice).unwrap();
    let window = window_of(&mapping);
    for page in 0..3 {
        let found =
            unit.table.translate(Iova::new(mapping.iova().start().raw() + page * PAGE)).unwrap();
        assert_eq!(found.phys.raw(), (nowhere(3).addr() as u64 + page * PAGE) << 1);
    }
    assert!(ordinary_map_is_refused(&unit, window));
    let other = local.map(Nowhere(1), FromDevice).unwrap();
    let Nowhere(3) = local.unmap(mapping).unwrap() else { panic!("another payload") };
    drop(local);
    assert!(is_mapped(&unit, other.iova()) && ordinary_map_is_refused(&unit, window));
    // Cleared through the pin by another thread, which also unpins the window of the owner that has
    // gone.
    let at = other.iova();
    std::thread::spawn(move || drop(other)).join().unwrap();
    assert!(!is_mapped(&unit, at));
    assert!(!ordinary_map_is_refused(&unit, window));
    revoke(&unit, window.part(PAGE, PAGE).unwrap());
    while unit.wait_for_retired(unit.deferred.reclaimed()) {}
    assert_eq!(unit.stats().table_pages, pages);
    let stats = domain.stats();
    assert_eq!(
        (stats.windows, stats.quarantined, domain.space.iovas.stats().bytes_in_use),
        (0, 0, 0)
    );
}

/// The last page of one window and the first of the next are neighbours: revoked together, each is
/// cleared through the pin of its own window.
#[test]
fn neighbours_in_two_windows_are_revoked_through_their_pins() {
    let (unit, domain) = domain(16, Scattered::default());
    let mut local = domain.local();
    let map = |_| local.map(Nowhere(1), FromDevice).unwrap();
    let mut all: Vec<_> = (0..2 * WINDOW_PAGES).map(map).collect();
    all.sort_by_key(|mapping| mapping.iova().start());
    let (last, first) = (all[511].iova(), all[512].iova());
    assert_eq!(last.end(), first.start());
    assert_ne!(window_of(&all[511]), window_of(&all[512]));
    let mut revoked = Vec::new();
    local.revoke_many(all.drain(511..513), &mut revoked);
    assert!(!is_mapped(&unit, last) && !is_mapped(&unit, first));
    revoked.into_iter().for_each(|one| assert!(local.wait(one).is_ok()));
    assert_eq!(domain.stats().quarantined, 0);
}

/// The mapping is in its owner's window, beside others that are revoked, of an owner that is gone,
/// or in no window.
#[test]
fn a_prefetch_of_a_mapping_changes_nothing() {
    let (unit, domain) = domain(16, Scattered::default());
    let mut local = domain.local();
    let in_window = local.map_many((0..3).map(|_| Nowhere(1)), FromDevice).unwrap();
    let mut in_window: Vec<_> = in_window.into_iter().map(Unrevoked::from).collect();
    let revoked = local.revoke(in_window.swap_remove(1));
    let elsewhere = Unrevoked::from(domain.map(Nowhere(2), FromDevice).unwrap());
    let state = || {
        let listed: Vec<_> =
            domain.mapped().unwrap().map(|run| (run.iova, run.phys, run.access)).collect();
        let flushes = unit.queue().batches.lock().unwrap().clone();
        (listed, flushes, domain.stats().to_string(), unit.stats().table_pages)
    };
    let prefetch_all = || {
        let before = state();
        in_window.iter().for_each(Unrevoked::prefetch);
        elsewhere.prefetch();
        assert_eq!(state(), before);
    };
    prefetch_all();
    let Nowhere(1) = local.wait(revoked).unwrap() else { panic!("another payload") };
    prefetch_all();
    drop(local);
    prefetch_all();
    for mapping in in_window {
        let at = mapping.iova();
        mapping.prefetch();
        assert!(is_mapped(&unit, at));
        assert!(mapping.revoke().wait().is_ok() && !is_mapped(&unit, at));
    }
    drop(elsewhere);
    let stats = domain.stats();
    assert_eq!((stats.live, stats.windows, stats.quarantined, stats.held_bytes), (0, 0, 0, 0));
}

/// Contiguous mappings are one clear and one flush, of leaves alone.
#[test]
fn a_burst_is_one_flush_of_leaves() {
    let (unit, domain) = domain(8, Scattered::default());
    let mut local = domain.local();
    let mappings = local.map_many((0..64).map(|_| Nowhere(1)), FromDevice).unwrap();
    let all = IovaRange::new(mappings[0].iova().start(), 64 * PAGE).unwrap();
    let mut revoked = Vec::new();
    unit.queue().batches.lock().unwrap().clear();
    local.revoke_many(mappings, &mut revoked);
    assert_eq!(*unit.queue().batches.lock().unwrap(), [Flush { range: all, leaf_only: true }]);
    assert!(revoked.into_iter().all(|one| local.wait(one).is_ok()));
}

/// Memory that is not contiguous, and partly not registered: nothing stays mapped in the window.
#[test]
fn a_map_that_fails_in_a_pinned_window_is_taken_back_and_flushed() {
    let (unit, domain) = domain(8, Scattered::default());
    let mut local = domain.local();
    let first = local.map(Nowhere(1), FromDevice).unwrap();
    unit.queue().missing.lock().unwrap().insert(nowhere(3).addr() + 2 * 4096);
    let failed = local.map(Nowhere(3), FromDevice).unwrap_err();
    assert!(failed.payload.is_some() && matches!(failed.error, BackendError::NotRegistered { .. }));
    let behind = IovaRange::new(Iova::new(first.iova().end().raw()), PAGE).unwrap();
    assert!(!is_mapped(&unit, behind));
    assert_eq!(
        unit.queue().batches.lock().unwrap().last().map(|flush| flush.range.start()),
        Some(behind.start())
    );
    unit.queue().missing.lock().unwrap().clear();
    let (one, live) = (local.map(Nowhere(3), Bidirectional).unwrap(), domain.stats().live);
    assert_eq!(live, 2);
    drop((one, first));
}

/// Too few table pages for a pin: the window serves as ordinary addresses, and maps fail where no
/// page is left.
#[test]
fn without_table_pages_an_owner_is_told_so() {
    let (unit, domain) = domain(3, Scattered::default());
    let (mut first, mut second) = (domain.local(), domain.local());
    let kept = first.map(Nowhere(1), FromDevice).unwrap();
    let refused = second.map(Nowhere(1), FromDevice).unwrap_err();
    assert!(matches!(refused.error, BackendError::Table(TableError::NoPages { .. })));
    drop((first, kept));
    while unit.wait_for_retired(unit.deferred.reclaimed()) {}
    drop(second.map(refused.payload.unwrap(), FromDevice).unwrap());
}

/// Its own idle window first: that of another owner only where that is not enough.
#[test]
fn a_map_without_table_pages_closes_idle_windows_of_its_owner_first() {
    // The root, one page of level 2, and one for each window.
    let (unit, domain) = domain(6, Scattered::default());
    let owners = [domain.local(), domain.local()].map(|mut local| {
        let full = [(); 2].map(|()| local.map(Nowhere(256), FromDevice).unwrap());
        let next = local.map(Nowhere(1), FromDevice).unwrap();
        full.into_iter().for_each(|mapping| _ = local.unmap(mapping).unwrap());
        (local, next)
    });
    let idle = |local: &DomainLocal| local.owner.shared.idle.lock().len();
    let [(mut first, _kept), (second, _other)] = owners;
    assert_eq!((idle(&first), idle(&second), unit.stats().table_pages), (1, 1, 6));
    // Too long for a window, so it needs a page of its own.
    let long = first.map(Nowhere(512), FromDevice).unwrap();
    assert_eq!((idle(&first), idle(&second)), (0, 1));
    let longer = first.map(Nowhere(512), FromDevice).unwrap();
    assert_eq!((idle(&first), idle(&second)), (0, 0));
    drop((long, longer));
}

/// A backend that cannot tell when a flush completes wakes at once: the task polls again.
#[test]
fn a_backend_without_a_wake_of_its_own_wakes_at_once() {
    struct Woken(AtomicU64);
    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let (_unit, domain) = domain(8, Scattered { hangs: true.into(), ..Scattered::default() });
    let revoked = domain.map(Nowhere(1), FromDevice).unwrap().revoke();
    let woken = Arc::new(Woken(AtomicU64::new(0)));
    revoked.wake(&Arc::clone(&woken).into());
    assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    drop(revoked.quiesced());
}

/// In caching mode a map through a pin waits for its flush too.
#[test]
fn a_map_through_a_pin_waits_in_caching_mode() {
    let (unit, domain) = domain(8, Scattered { caches_not_present: true, ..Scattered::default() });
    let mut local = domain.local();
    let mapping = local.map(Nowhere(2), FromDevice).unwrap();
    let flushes = unit.queue().batches.lock().unwrap().clone();
    assert!(flushes.iter().any(|flush| flush.range == mapping.iova() && !flush.leaf_only));
}

#[test]
fn what_is_mapped_is_listed_until_it_is_revoked() {
    let (_unit, domain) = domain(16, Scattered::default());
    let list = || {
        domain
            .mapped()
            .unwrap()
            .map(|run| (run.iova, run.phys.raw(), run.access))
            .collect::<Vec<_>>()
    };
    assert_eq!(list(), []);
    let mut local = domain.local();
    let owned = local.map(Nowhere(2), FromDevice).unwrap();
    let shared = domain.map(Nowhere(1), Bidirectional).unwrap();
    // No two pages of this memory lie together, so each is a run.
    let phys = |page: u64| (nowhere(2).addr() as u64 + page * PAGE) << 1;
    let page = |range: IovaRange, page: u64| range.part(page * PAGE, PAGE).unwrap();
    let mut expected = vec![
        (page(owned.iova(), 0), phys(0), Access::WRITE),
        (page(owned.iova(), 1), phys(1), Access::WRITE),
        (shared.iova(), phys(0), RW),
    ];
    expected.sort_by_key(|run| run.0.start());
    assert_eq!(list(), expected);
    let revoked = local.revoke(owned);
    assert_eq!(
        list(),
        [(shared.iova(), phys(0), RW)],
        "revoked, whether the flush has completed or not"
    );
    local.wait(revoked).unwrap();
    shared.unmap().unwrap();
    assert_eq!(list(), []);
}

/// Each idle window of another owner has a table page pinned.
#[test]
fn table_pages_of_idle_owners_are_reclaimed_for_a_map() {
    // The root, a page of level 2, and four windows.
    let (_unit, domain) = domain(6, Scattered::default());
    let mut idle = domain.local();
    let map = |local: &mut crate::domain::DomainLocal| local.map(Nowhere(256), FromDevice);
    let held: Vec<_> = (0..8).map(|_| map(&mut idle).unwrap()).collect();
    let mut owner = domain.local();
    assert!(map(&mut owner).is_err(), "they are in use");
    held.into_iter().for_each(|mapping| assert_eq!(idle.unmap(mapping).unwrap().0, 256));
    assert_eq!(domain.stats().windows, 4 + 1);
    // All but that of the other owner's next map.
    let mine: Vec<_> = (0..5).map(|_| map(&mut owner).unwrap()).collect();
    mine.into_iter().for_each(|mapping| assert_eq!(owner.unmap(mapping).unwrap().0, 256));
}
