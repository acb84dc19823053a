//! Maps of scattered memory, and up to a limit.

use super::*;
use crate::iova::IovaError;
use crate::mem::DmaMemory;
use proptest::prelude::*;

/// Two buffers, of which bytes 100 to 4196 and 5000 to 6000 are the data.
struct Scattered([Buf; 2]);

// SAFETY: as for `Buf`; the pieces do not change.
unsafe impl Pinned for Scattered {
    fn memory(&self) -> DmaMemory<'_> {
        self.0[0].memory()
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
    fn piece(&self, index: usize) -> Option<DmaMemory<'_>> {
        self.0.get(index).map(Pinned::memory)
    }
    fn extent(&self, index: usize) -> Option<(u64, u64)> {
        [(100, 4096), (5000, 1000)].get(index).copied()
    }
}

fn scattered(pages: [usize; 2], drops: &Arc<AtomicUsize>) -> Scattered {
    Scattered(pages.map(|pages| Buf::new(pages, drops)))
}

#[test]
fn scattered_memory_is_contiguous_for_the_device() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let memory = scattered([1, 2], &drops);
    let pieces = [0, 1].map(|index| memory.piece(index).unwrap().addr());
    let of = |index: usize, page| pieces[index] + page * PAGE;
    let mapping = domain.map(memory, FromDevice).unwrap();
    let iova = mapping.iova();
    let found: Vec<_> = mock.pages.lock().iter().map(|(page, (addr, _))| (*page, *addr)).collect();
    let first = iova.start().raw() / 4096;
    assert_eq!(found, [(first, of(0, 0)), (first + 1, of(1, 0)), (first + 2, of(1, 1))]);
    let segments: Vec<_> =
        mapping.segments().map(|s| (s.iova.raw() - iova.start().raw(), s.len)).collect();
    assert_eq!(segments, [(100, 4096), (5000, 1000)]);
    assert_eq!(Payload::<FromDevice>::segment(&mapping, 1).map(|s| s.len), Some(1000));
    assert_eq!(Payload::<FromDevice>::segment(&mapping, 2), None);
    drop(mapping.unmap().unwrap());
    assert!(mock.pages.lock().is_empty());
    assert_eq!((drops.load(Ordering::SeqCst), mock.flushes.load(Ordering::SeqCst)), (2, 1));
}

/// Memory at an address, of which nothing is used.
struct Nowhere(usize, usize);

// SAFETY: nothing touches the memory.
unsafe impl Pinned for Nowhere {
    fn memory(&self) -> DmaMemory<'_> {
        let base = core::ptr::NonNull::without_provenance(self.0.try_into().unwrap());
        // SAFETY: as above.
        unsafe { DmaMemory::from_raw(base, self.1) }
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

#[test]
fn memory_that_is_not_whole_pages_is_refused() {
    for (addr, len) in [(4096, 0), (4096, 4095), (4096, 4097), (4097, 4096), (8191, 8192)] {
        let (mock, domain, _) = domain();
        let refused = domain.map(Nowhere(addr, len), FromDevice).unwrap_err();
        assert_eq!(refused.error, BackendError::NotPages { addr, len });
        assert!(refused.payload.is_some() && mock.pages.lock().is_empty());
    }
}

#[test]
fn a_buffer_is_one_extent() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let mapping = domain.map(Buf::new(2, &drops), FromDevice).unwrap();
    assert_eq!(mapping.segments().collect::<Vec<_>>(), [mapping.segment()]);
}

#[test]
fn a_map_that_fails_at_a_later_piece_is_undone() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let empty = domain.space.iovas.stats();
    let failed = domain.map(scattered([2, 9], &drops), Bidirectional).map(drop).unwrap_err();
    assert!(matches!(failed.error, BackendError::NotRegistered { .. }) && failed.payload.is_some());
    assert!(mock.pages.lock().is_empty());
    assert_eq!((mock.flushes.load(Ordering::SeqCst), domain.space.iovas.stats()), (1, empty));
}

#[test]
fn pieces_that_may_be_reached_after_a_failed_map_are_held_or_quarantined() {
    let (mock, domain, drops) = domain();
    let late = domain.map(scattered([2, 9], &drops), Bidirectional).map(drop).unwrap_err();
    assert!(late.payload.is_none() && late.error.late_ticket().is_some());
    assert_eq!((domain.stats().deferred, domain.stats().deferred_bytes), (1, 11 * 4096));
    complete(&mock, Ticket(1));
    assert_eq!((domain.release_late(), drops.load(Ordering::SeqCst)), (0, 2));
    set(&mock.refuse_revoke);
    let stuck = domain.map(scattered([2, 9], &drops), Bidirectional).map(drop).unwrap_err();
    assert!(stuck.payload.is_none() && stuck.error == BackendError::NotRevoked);
    assert_eq!((domain.stats().quarantined, drops.load(Ordering::SeqCst)), (1, 2));
}

/// A later piece that stays reachable for good decides, however the revocation of those before it
/// ends: in time, late, or not at all.
#[test]
fn pieces_with_one_that_cannot_be_revoked_are_quarantined() {
    for how in 0..3 {
        let (mock, domain, drops) = domain();
        set(&mock.sticks_for_good);
        match how {
            0 => set(&mock.obliging),
            1 => {}
            _ => set(&mock.failed),
        }
        let stuck = domain.map(scattered([2, 9], &drops), Bidirectional).map(drop).unwrap_err();
        assert_eq!(stuck.error, BackendError::NotRevoked, "{how}");
        assert!(stuck.payload.is_none());
        complete(&mock, Ticket(1));
        let stats = domain.stats();
        assert_eq!((stats.deferred, stats.quarantined, stats.quarantined_bytes), (0, 1, 11 * 4096));
        assert_eq!((domain.release_late(), drops.load(Ordering::SeqCst)), (0, 0), "{how}");
    }
}

/// The revocation of the first piece fails for good, though nothing else does.
#[test]
fn pieces_whose_unit_fails_in_the_rollback_are_quarantined() {
    let (mock, domain, drops) = domain();
    set(&mock.failed);
    let stuck = domain.map(scattered([2, 9], &drops), Bidirectional).map(drop).unwrap_err();
    assert!(stuck.payload.is_none() && stuck.error.late_ticket().is_none());
    assert!(matches!(stuck.error, BackendError::RollbackIncomplete { .. }), "{}", stuck.error);
    assert_eq!((domain.stats().deferred, domain.stats().quarantined), (0, 1));
}

/// The wait for it fails, and does not say that the flush is late: it may never complete.
#[test]
fn pieces_whose_rollback_cannot_be_awaited_are_quarantined() {
    let (mock, domain, drops) = domain();
    set(&mock.wait_breaks);
    let stuck = domain.map(scattered([2, 9], &drops), Bidirectional).map(drop).unwrap_err();
    assert!(stuck.payload.is_none() && stuck.error == BackendError::NotRevoked, "{}", stuck.error);
    complete(&mock, Ticket(1));
    assert_eq!((domain.stats().deferred, domain.stats().quarantined), (0, 1));
    assert_eq!((domain.release_late(), drops.load(Ordering::SeqCst)), (0, 0));
}

fn limit(bits: u32) -> Iova {
    Iova::new((1 << bits) - 1)
}

proptest! {
    /// Devices of 13 to 47 bits in one domain, with owners and without: each reaches what is mapped
    /// for it, and nothing else is.
    #[test]
    fn a_map_is_within_its_limit(maps in prop::collection::vec((1usize..9, 13u32..48, any::<bool>(), any::<bool>()), 1..40)) {
        let (mock, domain, drops) = domain();
        set(&mock.obliging);
        let mut local = domain.local();
        let mut held = Vec::new();
        for (pages, bits, by_owner, ends) in maps {
            let payload = Buf::new(pages, &drops);
            let mapped = if by_owner {
                local.map_up_to(payload, FromDevice, limit(bits))
            } else {
                domain.map_up_to(payload, FromDevice, limit(bits))
            };
            match mapped {
                Ok(mapping) => {
                    prop_assert!(mapping.iova().last() <= limit(bits));
                    held.push(mapping);
                }
                Err(refused) => {
                    // Only few pages are below the smallest limits, and the first is never used.
                    prop_assert!(bits < 22, "{refused}");
                    let BackendError::Iova(IovaError::Exhausted { limit: named, largest_free, .. }) = refused.error else {
                        panic!("{refused}");
                    };
                    prop_assert!(named == limit(bits) && largest_free < (pages * PAGE) as u64, "{refused}");
                    prop_assert!(refused.payload.is_some());
                }
            }
            // Others are above 4 GiB, where they leave the lower addresses alone.
            let other = local.map(Buf::new(1, &drops), FromDevice).unwrap();
            prop_assert!(other.iova().start().raw() >= 1 << 32);
            if ends && !held.is_empty() {
                local.unmap(held.swap_remove(held.len() / 2)).unwrap();
            }
            local.unmap(other).unwrap();
        }
        drop((held, local));
        prop_assert!(mock.pages.lock().is_empty());
        prop_assert_eq!((domain.stats().windows, domain.space.iovas.stats().bytes_in_use), (0, 0));
    }
}

#[test]
fn memory_that_stays_mapped_above_the_limit_is_mapped_again() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let mut payload = Buf::new(1, &drops);
    // SAFETY: the payload is kept until it is unmapped, and nothing refers into it.
    let fixed = unsafe { domain.map_static(payload.memory(), Access::WRITE) }.unwrap();
    payload.fixed = Some((domain.id(), fixed.iova().start()));
    assert!(fixed.iova().start() > limit(32));
    let mapping = domain.map_up_to(payload, FromDevice, fixed.iova().last()).unwrap();
    assert!(mapping.is_fixed() && mapping.iova() == fixed.iova());
    let mapping = domain.map_up_to(mapping.unmap().unwrap(), FromDevice, limit(32)).unwrap();
    assert!(!mapping.is_fixed() && mapping.iova().last() <= limit(32));
    let payload = mapping.unmap().unwrap();
    assert_eq!(mock.pages.lock().len(), 1, "the other one stays mapped");
    domain.unmap_static(fixed).unwrap();
    drop(payload);
}

/// The windows of idle owners are below the limit in a domain of 32 bits.
#[test]
fn idle_windows_are_reclaimed_for_a_limit() {
    let mock = Arc::new(Mock::default());
    let domain = Domain::new(mock.clone(), IovaSpace::new(32).unwrap());
    set(&mock.obliging);
    let (mut idle, drops) = (domain.local(), Arc::default());
    let held: Vec<_> =
        (0..512).map(|_| idle.map(Buf::new(8, &drops), FromDevice).unwrap()).collect();
    let last = held.iter().map(|mapping| mapping.iova().last()).max().unwrap();
    held.into_iter().for_each(|mapping| drop(idle.unmap(mapping).unwrap()));
    // Below the window of the next map, which stays.
    let limit = Iova::new(last.raw() - (2 << 20));
    assert!(domain.stats().windows > 4);
    let mapping = domain.map_up_to(Buf::new(8, &drops), FromDevice, limit).unwrap();
    assert!(mapping.iova().last() <= limit);
}

/// A backend without translation, as if all memory were at 5 GiB.
struct Untranslated;

impl Backend for Untranslated {
    fn properties(&self) -> Properties {
        Properties { name: "none", translates: false, pins: false }
    }
    unsafe fn register_memory(&self, _: crate::mem::DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: crate::mem::DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn map(
        &self,
        _: IovaRange,
        _: crate::mem::DmaMemory,
        _: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        Ok(())
    }
    fn revoke<'w>(
        &self,
        _: Revocation<'w>,
        _: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        Ok(Ticket::COMPLETED)
    }
    fn wait(&self, _: Ticket, _: Wait<'_>) -> Poll<Result<(), BackendError>> {
        Poll::Ready(Ok(()))
    }
    fn required_iova(
        &self,
        memory: crate::mem::DmaMemory,
    ) -> Result<Option<IovaRange>, BackendError> {
        Ok(Some(IovaRange::clamped(Iova::new(5 << 30), memory.len() as u64)))
    }
}

#[test]
fn without_translation_memory_above_the_limit_is_refused() {
    let domain = Domain::new(Arc::new(Untranslated), IovaSpace::new(39).unwrap());
    let drops = Arc::default();
    let iova = IovaRange::clamped(Iova::new(5 << 30), PAGE as u64);
    let refused = domain.map_up_to(Buf::new(1, &drops), FromDevice, limit(32)).unwrap_err();
    assert_eq!(refused.error, BackendError::BeyondLimit { iova, limit: limit(32) });
    assert!(refused.error.to_string().contains("iova:0xffffffff"), "{}", refused.error);
    let mapping = domain.map_up_to(refused.payload.unwrap(), FromDevice, iova.last()).unwrap();
    assert_eq!(mapping.iova(), iova);
}
