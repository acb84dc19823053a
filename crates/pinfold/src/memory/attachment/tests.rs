//! Memory in a fake domain, each of whose operations can fail.

use super::fake::{FakeDomain, REACHABLE, REFUSED};
use super::*;
use crate::sys::region::Region;
use pinfold_soft::SoftConfig;

/// Memory that outlives the test, because what a device may reach is never unmapped.
fn memory() -> DmaMemory<'static> {
    let region = Box::leak(Box::new(Region::anonymous(2 << 20, 2 << 20).unwrap()));
    region.memory()
}

#[test]
fn a_chunk_is_unmapped_once() {
    let memory = memory();
    for (fake, first) in [
        (FakeDomain::working(), Ok(())),
        // A failed step is not tried again: nothing would be left to clear.
        (FakeDomain::failing("unmap", REACHABLE), Err(REACHABLE)),
    ] {
        let attachment =
            Attachment::new(Box::new(fake.clone()), memory, None, MappingPolicy::PerUse).unwrap();
        assert_eq!(attachment.unmap_chunk(0), Err(BackendError::NotRevoked), "it was never mapped");
        // SAFETY: the memory is leaked, and no reference into it is made.
        unsafe { attachment.map_chunk(0, memory.part(0, 4096).unwrap(), READ_WRITE) }.unwrap();
        assert_eq!(
            attachment.unmap_chunk(4096),
            Err(BackendError::NotRevoked),
            "another one is mapped"
        );
        assert_eq!(attachment.unmap_chunk(0), first);
        assert_eq!(
            attachment.unmap_chunk(0),
            Err(BackendError::NotRevoked),
            "it is mapped no longer"
        );
        assert_eq!(fake.steps().iter().filter(|&&step| step == "unmap").count(), 1);
    }
}

#[test]
fn chunks_of_memory_that_is_mapped_whole_need_no_unmap() {
    let fake = FakeDomain::failing("unmap", REACHABLE);
    let attachment =
        Attachment::new(Box::new(fake.clone()), memory(), None, MappingPolicy::Whole).unwrap();
    assert_eq!(attachment.unmap_chunk(0), Ok(()));
    assert_eq!(fake.steps(), ["register_memory", "map_static"]);
}

/// The alignment of large leaves is faster, and no condition.
#[test]
fn memory_of_1_gib_needs_no_address_aligned_to_1_gib() {
    const HUGE: u64 = 1 << 30;
    let region = Region::anonymous(1 << 30, 1 << 30).unwrap();
    let soft = Domain::soft_with(SoftConfig { levels: 3, ..SoftConfig::default() }).unwrap();
    let attached = || {
        let memory = region.memory();
        let attachment =
            Attachment::new(Box::new(soft.clone()), memory, None, MappingPolicy::PerUse).unwrap();
        let start = attachment.iova.start().raw();
        assert!(attachment.detach(memory));
        start
    };
    let exclude = |page: Option<IovaRange>| soft.reserve_range(page.unwrap()).unwrap();

    let mut taken: Vec<_> = std::iter::from_fn(|| soft.reserve_iova(HUGE, HUGE).ok()).collect();
    // Two that follow each other become free.
    let follow = |at: usize| taken[at].range().end() == taken[at + 1].range().start();
    let at = (0..taken.len() - 1).find(|&at| follow(at)).expect("neighbours");
    let [first, second] = [at, at + 1].map(|at| taken[at].range());
    drop(taken.drain(at..at + 2));
    let start = first.start().raw();
    exclude(first.part(4096, 4096));
    assert_eq!(attached(), start + HUGE);
    exclude(second.part(HUGE - 4096, 4096));
    assert_eq!(attached(), start + (2 << 20));
    exclude(first.part(2 << 20, 4096));
    exclude(second.part((2 << 20) + 8192, 4096));
    assert_eq!(attached(), start + (2 << 20) + 4096);
    exclude(second.part(0, 4096));
    let refused =
        Attachment::new(Box::new(soft.clone()), region.memory(), None, MappingPolicy::PerUse)
            .map(drop);
    let Err(BackendError::Iova(IovaError::Exhausted { align: HUGE, .. })) = refused else {
        panic!("{refused:?}")
    };
}

#[test]
fn memory_is_detached_unless_a_failed_map_left_it_reachable() {
    let memory = memory();
    for (error, detached) in [(REFUSED, true), (REACHABLE, false)] {
        let mut attachments = Attachments::default();
        let (first, last) = (FakeDomain::working(), FakeDomain::working());
        let refuses = FakeDomain::failing("map_static", error.clone());
        let add = |fake: &FakeDomain| {
            attachments.add(Box::new(fake.clone()), memory, None, MappingPolicy::Whole).map(drop)
        };
        assert_eq!([add(&first), add(&refuses), add(&last)], [Ok(()), Err(error.clone()), Ok(())]);
        assert_eq!(attachments.detach_all(memory), detached, "{error}");
        for fake in [first, last] {
            assert_eq!(fake.steps().last(), Some(&"unregister_memory"), "what can be unmapped is");
        }
    }
}

/// Something was still mapped there (a leaked mapping), and could not be unmapped.
#[test]
fn memory_that_cannot_be_unregistered_is_not_detached() {
    let memory = memory();
    for policy in [MappingPolicy::Whole, MappingPolicy::PerUse] {
        let fake = FakeDomain::failing("unregister_memory", BackendError::NotRevoked);
        let mut attachments = Attachments::default();
        attachments.add(Box::new(fake.clone()), memory, None, policy).unwrap();
        assert!(!attachments.detach_all(memory), "{policy:?}");
        assert_eq!(fake.steps().last(), Some(&"count_quarantined"));
    }
}

/// Returns 14 MiB on hugepages that begin 4 KiB after the start of one; `None` without transparent
/// ones.
fn within_a_hugepage() -> Option<DmaMemory<'static>> {
    let region = Box::leak(Box::new(Region::anonymous(16 << 20, 2 << 20).unwrap()));
    let _ = region.ask_for_hugepages();
    region.memory().fill(0, 16 << 20, 0).unwrap();
    let memory = region.memory().part(4096, 14 << 20).unwrap();
    let survey = folios::Survey::new(memory.addr(), memory.len() as u64).unwrap();
    if survey.pages(PageSize::Size2M) < 8 {
        eprintln!("SKIPPED: no transparent hugepages");
        return None;
    }
    Some(memory)
}

/// Six leaves of 2 MiB, and table pages for the 4 KiB leaves before and behind them only.
#[test]
fn memory_within_hugepages_is_mapped_with_leaves_of_their_size() {
    let Some(memory) = within_a_hugepage() else { return };
    let table_pages = |fake: FakeDomain, steps: &[&str]| {
        let domain = Box::new(fake.clone());
        let attachment = Attachment::new(domain, memory, None, MappingPolicy::Whole).unwrap();
        assert_eq!(fake.steps(), steps);
        let (iova, pages) = (attachment.iova(), fake.domain().stats().backend.table_pages);
        assert!(attachment.detach(memory));
        (iova.start().raw() % (2 << 20), pages)
    };
    let (within, few) =
        table_pages(FakeDomain::working(), &["register_memory", "reserve", "map_static_at"]);
    assert_eq!(within, 4096);
    // Without such addresses: smaller leaves, and no error.
    let (_, many) = table_pages(
        FakeDomain::failing("reserve", REFUSED),
        &["register_memory", "reserve", "map_static"],
    );
    assert!(many >= few + 5, "{many} and {few} table pages: 7 of 512 leaves each, and 2");
}

#[test]
fn a_map_for_large_leaves_that_fails_leaves_nothing_behind() {
    let Some(memory) = within_a_hugepage() else { return };
    for (error, last) in [(REFUSED, "unregister_memory"), (REACHABLE, "count_quarantined")] {
        let fake = FakeDomain::failing("map_static_at", error.clone());
        let refused = Attachment::new(Box::new(fake.clone()), memory, None, MappingPolicy::Whole);
        assert_eq!(refused.map(drop), Err(error));
        assert_eq!(fake.steps().last(), Some(&last));
    }
}

/// Plain pages, and hugepages that the memory begins with: the domain's own choice is as good.
#[test]
fn other_memory_takes_the_addresses_that_the_domain_chooses() {
    let region = Box::leak(Box::new(Region::anonymous(8 << 20, 2 << 20).unwrap()));
    region.ask_for_plain_pages().unwrap();
    let plain = region.memory().part(4096, 6 << 20).unwrap();
    for memory in [plain, memory()] {
        assert_eq!(folios::leaf(memory), None);
        let fake = FakeDomain::working();
        let attachment =
            Attachment::new(Box::new(fake.clone()), memory, None, MappingPolicy::Whole).unwrap();
        assert_eq!(fake.steps(), ["register_memory", "map_static"]);
        assert!(attachment.detach(memory));
    }
}
