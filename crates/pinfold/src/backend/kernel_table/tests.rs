//! Domains over a fake kernel: entries, limits, rollback, and a proptest against its table.

use super::*;
use crate::backend::fake::{Call, Fake, domain_of};
use crate::{Arena, Domain, MappingPolicy, Source};
use pinfold_core::access::{Bidirectional, FromDevice};
use pinfold_core::dma_pool::DmaPool;
use proptest::prelude::*;
use std::ptr::NonNull;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn domain() -> (Arc<Fake>, Domain) {
    let kernel = Arc::new(Fake { entries: Some(65_535), ..Fake::default() });
    let domain = domain_of(&kernel);
    (kernel, domain)
}

fn arena(domain: &Domain, bytes: u64, mapping_policy: MappingPolicy) -> Arena {
    Arena::builder()
        .size(bytes)
        .source(Source::Plain)
        .mapping_policy(mapping_policy)
        .build(domain)
        .unwrap()
}

#[test]
fn an_arena_is_one_entry_whatever_its_size() {
    let (kernel, domain) = domain();
    // 64 GiB in one piece, then 64 GiB in 64: they are not touched, so they take no memory.
    let whole = arena(&domain, 64 * GIB, MappingPolicy::Whole);
    assert_eq!(kernel.entries(), 1);
    let set: Vec<Arena> = (0..64).map(|_| arena(&domain, GIB, MappingPolicy::Whole)).collect();
    assert_eq!(kernel.entries(), 1 + 64);
    assert_eq!(domain.stats().backend.entries, 65);
    assert_eq!(domain.stats().backend.pinned_bytes, 128 * GIB);
    drop((whole, set));
    assert_eq!((kernel.entries(), domain.stats().backend.pinned_bytes), (0, 0));
}

#[test]
fn memory_pinned_by_its_mapping_is_not_locked() {
    let (_, domain) = domain();
    let (whole, per_use) =
        (arena(&domain, MIB, MappingPolicy::Whole), arena(&domain, MIB, MappingPolicy::PerUse));
    assert_eq!(whole.report().residency, crate::arena::Residency::ByMapping);
    assert_eq!((whole.stats().pinned_bytes, per_use.stats().pinned_bytes), (MIB, 0));
}

#[test]
fn a_buffer_of_small_pages_is_one_entry() {
    let (kernel, domain) = domain();
    let arena = arena(&domain, 8 * GIB, MappingPolicy::PerUse);
    let buffers: Vec<_> = (0..8).map(|_| arena.alloc(1 << 30).unwrap()).collect();
    let mapped: Vec<_> =
        buffers.into_iter().map(|b| domain.map(b, Bidirectional).unwrap()).collect();
    assert_eq!(kernel.entries(), 8, "8 GiB in 8 buffers of 262,144 pages each");
    let mut revoked = Vec::new();
    domain.revoke_many(mapped, &mut revoked);
    assert!(
        revoked.iter().all(|r| r.is_quiesced()),
        "the kernel's unmap has completed when it returns"
    );
    assert_eq!(kernel.entries(), 0);
    let unmaps = kernel.calls().iter().filter(|call| matches!(call, Call::Unmap { .. })).count();
    assert_eq!(unmaps, 1, "adjacent mappings are unmapped by one call");
}

#[test]
fn a_mapping_is_strict_and_its_addresses_are_reused() {
    let (kernel, domain) = domain();
    let arena = arena(&domain, 4 * MIB, MappingPolicy::PerUse);
    let mapped = domain.map(arena.alloc(8192).unwrap(), FromDevice).unwrap();
    let iova = mapped.iova();
    assert_eq!(kernel.mapped(), [(iova.start().raw(), 8192)]);
    let revoked = mapped.revoke();
    assert!(revoked.is_quiesced());
    assert_eq!(kernel.entries(), 0);
    drop(revoked.wait().unwrap());
    assert_eq!(domain.map(arena.alloc(8192).unwrap(), FromDevice).unwrap().iova(), iova);
}

#[test]
fn pools_leave_nothing_behind() {
    let (kernel, domain) = domain();
    for mapping_policy in [MappingPolicy::Whole, MappingPolicy::PerUse] {
        let arena = arena(&domain, 4 * MIB, mapping_policy);
        let pool = DmaPool::builder("descriptors").block(128).align(128).build(&arena).unwrap();
        let block = pool.alloc().unwrap();
        assert_eq!(kernel.entries(), 1);
        drop(block);
        pool.destroy().unwrap();
        drop(arena);
        assert_eq!(kernel.entries(), 0);
    }
}

#[test]
fn an_exhausted_entry_limit_is_reported_without_a_system_call() {
    let kernel = Arc::new(Fake { entries: Some(2), ..Fake::default() });
    let domain = domain_of(&kernel);
    let arena = arena(&domain, 4 * MIB, MappingPolicy::PerUse);
    let buffer = || arena.alloc(4096).unwrap();
    let held = [
        domain.map(buffer(), Bidirectional).unwrap(),
        domain.map(buffer(), Bidirectional).unwrap(),
    ];
    let calls = kernel.calls().len();
    let refused = domain.map(buffer(), Bidirectional).unwrap_err();
    assert_eq!(refused.error, BackendError::NoEntries { limit: 2, remedy: "more".into() });
    assert!(refused.payload.is_some());
    assert_eq!(kernel.calls().len(), calls, "the kernel was not asked");
    drop(held);
    drop(domain.map(buffer(), Bidirectional).unwrap());
    assert_eq!(domain.stats().live, 0);
}

#[test]
fn a_refused_map_changes_nothing() {
    let kernel = Arc::new(Fake { bytes: Some(8192), ..Fake::default() });
    let domain = domain_of(&kernel);
    let arena = arena(&domain, 4 * MIB, MappingPolicy::PerUse);
    let before = domain.stats();
    let refused = domain.map(arena.alloc(12288).unwrap(), Bidirectional).unwrap_err();
    // The error names the limit of locked memory only if this process has one.
    assert!(
        matches!(
            refused.error,
            BackendError::System { code: libc::ENOMEM, .. } | BackendError::LockedMemory { .. }
        ),
        "{}",
        refused.error
    );
    let mut after = domain.stats();
    after.backend.entries_peak = before.backend.entries_peak;
    // But that it is counted.
    assert_eq!(std::mem::take(&mut after.refused), 1);
    assert_eq!(after, before);
    drop(domain.map(arena.alloc(8192).unwrap(), Bidirectional).unwrap());
    let failed = Arena::builder()
        .size(4 * MIB)
        .source(Source::Plain)
        .mapping_policy(MappingPolicy::Whole)
        .build(&domain);
    assert!(failed.is_err());
    assert_eq!(kernel.entries(), 0);
}

#[test]
fn exceeding_the_limit_of_locked_memory_names_the_command() {
    let limit = |soft, lifted| MemlockLimit { soft, hard: soft, used: Some(64 << 10), lifted };
    let refused = memlock_error(&limit(Some(8 * MIB), false), 8 * MIB, 0).unwrap();
    let text = refused.to_string();
    assert!(
        text.contains("RLIMIT_MEMLOCK allows 8388608, of which 65536") && text.contains("memlock"),
        "{text}"
    );
    assert_eq!(
        memlock_error(&limit(Some(8 * MIB), true), GIB, 0),
        None,
        "with CAP_IPC_LOCK there is none"
    );
    assert_eq!(memlock_error(&limit(None, false), GIB, 0), None);
    assert_eq!(memlock_error(&limit(Some(8 * MIB), false), MIB, MIB), None);
}

#[test]
fn memory_that_the_kernel_fails_to_unmap_is_quarantined() {
    let (kernel, domain) = domain();
    let arena = arena(&domain, 4 * MIB, MappingPolicy::PerUse);
    let mapped = domain.map(arena.alloc(8192).unwrap(), Bidirectional).unwrap();
    *kernel.unmap_fails.lock().unwrap() = Some(libc::EIO);
    assert_eq!(mapped.unmap().unwrap_err(), BackendError::NotRevoked);
    let stats = domain.stats();
    assert_eq!((stats.quarantined, stats.quarantined_bytes, stats.backend.entries), (1, 8192, 1));
    assert_eq!(arena.stats().frames_in_use, 2, "its frames are never allocated again");
    *kernel.unmap_fails.lock().unwrap() = None;
}

#[test]
fn a_leaked_mapping_is_unmapped_with_its_memory() {
    let (kernel, domain) = domain();
    let mut memory = vec![0u64; 1024];
    let base = NonNull::new(memory.as_mut_ptr()).unwrap().cast::<u8>();
    let base = base.map_addr(|at| (at.get().next_multiple_of(4096)).try_into().unwrap());
    // SAFETY: the vector has 8192 bytes, of which the first whole page is used, by nothing else,
    // until the end.
    let page = unsafe { DmaMemory::from_raw(base, 4096) };
    // SAFETY: as above; it is expelled below.
    unsafe { domain.register_memory(page) }.unwrap();
    // SAFETY: as above.
    let mapping = unsafe { domain.map_static(page, Access::READ) }.unwrap();
    assert_eq!(kernel.mapped(), [(mapping.iova().start().raw(), 4096)]);
    domain.unregister_memory(page).unwrap();
    assert_eq!(kernel.entries(), 0);
    // SAFETY: as above; it is refused.
    let again = unsafe { domain.map_static(page, Access::READ) };
    assert_eq!(again.unwrap_err(), BackendError::NotRegistered { addr: page.addr(), len: 4096 });
}

/// Without an IOMMU the memory is pinned when it is registered.
#[test]
fn memory_that_cannot_be_pinned_is_not_registered() {
    let kernel = Arc::new(Fake::default());
    let table = KernelTable::new(Arc::clone(&kernel) as Arc<dyn IommuContext>, None);
    let mut memory = vec![0u64; 2048];
    let base = NonNull::new(memory.as_mut_ptr()).unwrap().cast::<u8>();
    let base = base.map_addr(|at| (at.get().next_multiple_of(4096)).try_into().unwrap());
    // SAFETY: the vector has three whole pages, of which two are used, and outlives the table; the
    // fake touches none.
    let pages = unsafe { DmaMemory::from_raw(base, 8192) };
    let first = pages.part(0, 4096).unwrap();
    let (addr, len) = (pages.addr(), pages.len());
    *kernel.pins_nothing.lock().unwrap() = true;
    // SAFETY: as above.
    let refused = unsafe { table.register_memory(pages) };
    assert_eq!(refused, Err(BackendError::Movable { addr, len }));
    let iova = IovaRange::new(Iova::new(0x10_0000), 4096).unwrap();
    let unknown = BackendError::NotRegistered { addr, len: 4096 };
    assert_eq!(table.map(iova, first, Access::READ, None), Err(unknown));
    *kernel.pins_nothing.lock().unwrap() = false;
    // SAFETY: as above.
    unsafe { table.register_memory(pages) }.unwrap();
    table.map(iova, first, Access::READ, None).unwrap();
    // Memory that is not registered as such: nothing is unmapped or unpinned.
    let unknown = BackendError::NotRegistered { addr, len: 4096 };
    assert_eq!(table.unregister_memory(first), Err(unknown));
    assert_eq!(*kernel.registered.lock().unwrap(), [addr]);
    let used = table.map(iova, first, Access::READ, None);
    assert_eq!(used, Err(BackendError::Unmappable { iova }), "still mapped");
    table.unregister_memory(pages).unwrap();
    assert!(kernel.registered.lock().unwrap().is_empty());
    assert_eq!(*kernel.left.lock().unwrap(), [0], "unmapped before it is unpinned");
}

/// The kernel refuses to unmap what was leaked: its memory is not to be reused, nor mapped again.
#[test]
fn memory_that_cannot_be_unmapped_is_unregistered_with_an_error() {
    let kernel = Arc::new(Fake::default());
    let table = KernelTable::new(Arc::clone(&kernel) as Arc<dyn IommuContext>, None);
    let mut memory = vec![0u64; 1024];
    let base = NonNull::new(memory.as_mut_ptr()).unwrap().cast::<u8>();
    let base = base.map_addr(|at| (at.get().next_multiple_of(4096)).try_into().unwrap());
    // SAFETY: the vector has a whole page, and outlives the table; the fake does not touch it.
    let page = unsafe { DmaMemory::from_raw(base, 4096) };
    let unknown = || Err(BackendError::NotRegistered { addr: page.addr(), len: 4096 });
    assert_eq!(table.unregister_memory(page), unknown());
    // SAFETY: as above.
    unsafe { table.register_memory(page) }.unwrap();
    let iova = IovaRange::new(Iova::new(0x10_0000), 4096).unwrap();
    table.map(iova, page, Access::READ, None).unwrap();
    *kernel.unmap_fails.lock().unwrap() = Some(libc::EIO);
    assert_eq!(table.unregister_memory(page), Err(BackendError::NotRevoked));
    assert_eq!(*kernel.registered.lock().unwrap(), [page.addr()], "stays pinned");
    assert_eq!(table.map(iova, page, Access::READ, None), unknown());
    assert_eq!(table.unregister_memory(page), unknown());
}

/// The steps of a proptest: maps of pieces of pages in a small window of addresses.
#[derive(Clone, Debug)]
enum Step {
    Map(u64, u64),
    Revoke(Vec<(u64, u64)>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = || (0u64..24, 1u64..5);
    let step = prop_oneof![
        3 => range().prop_map(|(at, len)| Step::Map(at, len)),
        2 => proptest::collection::vec(range(), 1..4).prop_map(Step::Revoke),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    /// After any sequence of operations the record equals the kernel's table.
    #[test]
    fn the_record_equals_the_kernels_table(steps in steps(), entries in 1usize..8) {
        let kernel = Arc::new(Fake { entries: Some(entries), ..Fake::default() });
        let table = KernelTable::new(Arc::clone(&kernel) as Arc<dyn IommuContext>, Some(entries as u64));
        let mut memory = vec![0u64; 40 * 512];
        let base = NonNull::new(memory.as_mut_ptr()).unwrap().cast::<u8>();
        let base = base.map_addr(|at| (at.get().next_multiple_of(4096)).try_into().unwrap());
        // SAFETY: the vector has 40 pages, so 32 whole ones, and outlives the table; the fake
        // touches none.
        let memory = unsafe { DmaMemory::from_raw(base, 32 * 4096) };
        // SAFETY: as above.
        unsafe { table.register_memory(memory) }.unwrap();
        let range = |(at, len): (u64, u64)| IovaRange::new(Iova::new(at * 4096), len * 4096).unwrap();
        for step in steps {
            match step {
                Step::Map(at, len) => {
                    let page = |n: u64| usize::try_from(n * 4096).unwrap();
                    let part = memory.part(page(at), page(len)).unwrap();
                    let room = kernel.entries() < entries;
                    let mapped = table.map(range((at, len)), part, Access::READ, None);
                    prop_assert!(mapped.is_err() || room);
                }
                Step::Revoke(ranges) => {
                    let whole = ranges.iter().all(|r| kernel.mapped().contains(&(r.0 * 4096, r.1 * 4096)));
                    let distinct = ranges.iter().enumerate().all(|(i, r)| !ranges[..i].contains(r));
                    let mut all = ranges.iter().map(|r| Revocation { range: range(*r), window: None });
                    if let Some(first) = all.next() {
                        let revoked = table.revoke(first, &mut all);
                        prop_assert!(revoked.is_ok() || !(whole && distinct));
                    }
                }
            }
            let stats = table.stats();
            let mapped = kernel.mapped();
            let live: Vec<(u64, u64)> = table.lock().mapped.iter().map(|(s, e)| (*s, e.len)).collect();
            prop_assert_eq!(&live, &mapped);
            prop_assert_eq!(stats.pinned_bytes, mapped.iter().map(|(_, len)| len).sum::<u64>());
            prop_assert!(stats.entries <= entries as u64);
        }
        table.unregister_memory(memory).unwrap();
        prop_assert_eq!(kernel.entries(), 0);
    }
}
