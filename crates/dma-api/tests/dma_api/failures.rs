//! A free that cannot be carried out, and one that is wrong.

use crate::common::{ANYWHERE, Claims, Rig, iova};
use dma_api::{DmaAllocHandle, DmaDirection, DmaError, DmaOp};
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use pinfold_core::domain::{
    Backend, BackendError, Domain, Properties, Revocation, Wait, WindowToken,
};
use pinfold_core::invalidate::Ticket;
use pinfold_core::iova::IovaSpace;
use pinfold_core::mem::DmaMemory;
use pinfold_soft::SoftConfig;
use std::alloc::Layout;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

fn alloc(rig: &Rig, size: usize) -> DmaAllocHandle {
    let layout = Layout::from_size_align(size, 1).unwrap();
    // SAFETY: each caller frees it at most once, and does not use it afterwards.
    unsafe { rig.platform.alloc_coherent(ANYWHERE, layout) }.unwrap()
}

/// An IOMMU that stops completing flushes, and one that fails.
fn failing() -> [SoftConfig; 2] {
    let timeout = Duration::from_millis(20);
    let config = SoftConfig { timeout, ..SoftConfig::default() };
    [
        SoftConfig { hang_from: Some(2), ..config.clone() },
        SoftConfig { fail_from: Some(2), ..config },
    ]
}

#[test]
fn what_cannot_be_revoked_is_never_used_again() {
    for config in failing() {
        let rig = Rig::new(config);
        let first = alloc(&rig, 4096);
        // SAFETY: allocated above.
        assert_eq!(unsafe { rig.platform.dealloc_coherent(first) }, Ok(()));

        let (coherent, contiguous) = (alloc(&rig, 4096), alloc(&rig, 8192));
        let mut data = vec![1u8; 100];
        let dma = rig.platform.device(ANYWHERE);
        let map = dma.map_streaming_slice(&mut data, 1, DmaDirection::FromDevice).unwrap();
        let used = [coherent.dma_addr(), contiguous.dma_addr(), map.dma_addr()];
        assert_eq!(rig.lent(), 3);
        // SAFETY: allocated above.
        let freed = unsafe { rig.platform.dealloc_coherent(coherent) };
        assert_eq!(freed, Err(DmaError::CoherentReleaseFailed));
        // SAFETY: allocated above.
        unsafe { rig.platform.dealloc_contiguous(contiguous) };
        drop(map);
        let stats = rig.platform.stats();
        assert_eq!((stats.quarantined_bytes, stats.live, stats.invalid), (16384, 0, 0));
        let domain = rig.domain.stats();
        assert_eq!((domain.quarantined, domain.quarantined_bytes), (3, 16384));
        assert_eq!(rig.lent(), 3, "the source does not get the memory back");
        for _ in 0..100 {
            let at = alloc(&rig, 4096).dma_addr().as_u64();
            assert!(used.iter().all(|used| used.as_u64().abs_diff(at) >= 4096), "{at:#x}");
        }
        // The handle was consumed: a second free is an error of the driver.
        // SAFETY: refused.
        assert!(unsafe { rig.platform.dealloc_coherent(coherent) }.is_err());
        assert_eq!(rig.platform.stats().invalid, 1);
    }
}

/// The fault of a backend.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Wrong {
    Nothing,
    MapRefused,
    MapReachable,
    MapPanics,
    RevokePanics,
}

/// A backend that maps nothing, and sees which memory is still lent when it revokes.
struct Faulty {
    wrong: Wrong,
    lent: Arc<AtomicUsize>,
    lent_at_wait: Arc<AtomicUsize>,
}

impl Backend for Faulty {
    fn properties(&self) -> Properties {
        Properties::new("faulty")
    }

    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }

    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }

    fn map(
        &self,
        iova: IovaRange,
        _: DmaMemory,
        _: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        match self.wrong {
            Wrong::MapRefused => Err(BackendError::Unmappable { iova }),
            Wrong::MapReachable => Err(BackendError::NotRevoked),
            Wrong::MapPanics => panic!("a map"),
            Wrong::Nothing | Wrong::RevokePanics => Ok(()),
        }
    }

    fn revoke<'w>(
        &self,
        _: Revocation<'w>,
        _: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        assert!(self.wrong != Wrong::RevokePanics, "a revocation");
        Ok(Ticket::COMPLETED)
    }

    fn wait(&self, _: Ticket, _: Wait<'_>) -> Poll<Result<(), BackendError>> {
        self.lent_at_wait.store(self.lent.load(Ordering::SeqCst), Ordering::SeqCst);
        Poll::Ready(Ok(()))
    }
}

#[test]
fn memory_returns_after_the_wait_and_not_if_it_may_be_reached() {
    for (wrong, lent_after) in [
        (Wrong::Nothing, 0),
        (Wrong::MapRefused, 0),
        (Wrong::MapReachable, 1),
        (Wrong::MapPanics, 1),
        (Wrong::RevokePanics, 1),
    ] {
        let (lent, lent_at_wait) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(7)));
        let backend = Faulty { wrong, lent: lent.clone(), lent_at_wait: lent_at_wait.clone() };
        let (_, bus) = pinfold_soft::domain(SoftConfig::default()).unwrap();
        let domain = Domain::new(Arc::new(backend), IovaSpace::new(39).unwrap());
        let rig = Rig::over(domain, bus, Claims::default(), lent);
        let layout = Layout::from_size_align(4096, 1).unwrap();
        let freed = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: freed once, in the next call.
            let one = unsafe { rig.platform.alloc_coherent(ANYWHERE, layout) };
            // SAFETY: allocated above.
            one.map(|one| unsafe { rig.platform.dealloc_coherent(one) })
        }));
        assert_eq!(rig.lent(), lent_after, "{wrong:?}");
        let (stats, domain) = (rig.platform.stats(), rig.domain.stats());
        assert_eq!((stats.live, stats.invalid), (0, 0), "{wrong:?}");
        match wrong {
            Wrong::Nothing => {
                assert_eq!(freed.unwrap(), Some(Ok(())));
                assert_eq!(lent_at_wait.load(Ordering::SeqCst), 1, "not before the wait");
            }
            Wrong::MapRefused => {
                assert_eq!((freed.unwrap(), stats.refused), (None, 1));
                assert_eq!((stats.quarantined_bytes, domain.quarantined), (0, 0));
            }
            Wrong::MapReachable => {
                assert_eq!((freed.unwrap(), stats.refused), (None, 1));
                assert_eq!((stats.quarantined_bytes, domain.quarantined_bytes), (4096, 4096));
            }
            Wrong::MapPanics | Wrong::RevokePanics => assert!(freed.is_err()),
        }
    }
}

#[test]
fn a_wrong_free_changes_nothing() {
    let rig = Rig::new(SoftConfig::default());
    let (one, other) = (alloc(&rig, 4096), alloc(&rig, 8192));
    let at = |addr: DmaAllocHandle, of: DmaAllocHandle, layout: Layout| {
        // SAFETY: a handle that is refused.
        unsafe { DmaAllocHandle::new(addr.as_ptr(), addr.allocation_ptr(), of.dma_addr(), layout) }
    };
    let mut data = vec![1u8; 4096];
    let dma = rig.platform.device(ANYWHERE);
    let map = dma.map_streaming_slice(&mut data, 1, DmaDirection::ToDevice).unwrap();
    let bounce = map.bounce_ptr().unwrap();
    // SAFETY: a handle that is refused.
    let of_map = unsafe { DmaAllocHandle::new(bounce, bounce, map.dma_addr(), one.layout()) };
    let part = Layout::from_size_align(4095, 1).unwrap();
    for wrong in
        [at(one, other, other.layout()), at(other, one, one.layout()), at(one, one, part), of_map]
    {
        // SAFETY: refused.
        let freed = unsafe { rig.platform.dealloc_coherent(wrong) };
        assert_eq!(freed, Err(DmaError::CoherentReleaseFailed));
    }
    let stats = rig.platform.stats();
    assert_eq!((stats.invalid, stats.live, stats.is_clean()), (4, 3, false));
    for live in [one, other] {
        rig.port.write(iova(live.dma_addr()), &[1]).unwrap();
        // SAFETY: allocated above.
        assert_eq!(unsafe { rig.platform.dealloc_coherent(live) }, Ok(()));
    }
    let addr = map.dma_addr();
    drop(map);
    rig.nothing_is_reachable(&[one.dma_addr(), other.dma_addr(), addr]);
}
