//! An IOMMU for tests and models: it walks the table by itself and keeps the last table page that
//! it walked through.

use crate::addr::{PhysAddr, PhysRange};
use crate::domain::{BackendError, Generation, Generations, PhysExtent, PhysTranslator};
use crate::invalidate::{Descriptor, FlushCosts, InvalidationQueue, QueueError, Ticket, WaitLimit};
use crate::mem::DmaMemory;
use crate::sync::{AtomicU64, Mutex, Ordering};
use crate::table::{TablePage, TablePages};
use alloc::boxed::Box;
use core::ptr::NonNull;

/// Three levels, and leaves of 4 KiB alone. A flush takes effect and completes when it is
/// submitted.
pub(super) struct Walker {
    pages: &'static [TablePage],
    /// The window of 2 MiB and the page of level 1 that it was walked through.
    held: Mutex<Option<(u64, usize)>>,
    /// The number of entries that leaf-only flushes found present in their ranges when they took
    /// effect: always 0.
    pub(super) found_present: AtomicU64,
    /// The same for flushes of any kind. (A flush of a table page may cover entries mapped since.)
    pub(super) found_present_by_any: AtomicU64,
    submitted: AtomicU64,
    generations: Generations,
}

impl Walker {
    /// Creates one that walks a table in `pages` pages, which are leaked (a table may outlive every
    /// test), and returns it with the pages.
    pub(super) fn new(pages: usize) -> (Self, TablePages) {
        let pages: &'static [TablePage] =
            Box::leak((0..pages).map(|_| TablePage::filled(0)).collect());
        let table =
            TablePages::of_a_test(pages, PhysAddr::new(pages.as_ptr().addr() as u64)).unwrap();
        let zero = || AtomicU64::new(0);
        let (found_present, found_present_by_any, submitted) = (zero(), zero(), zero());
        (
            Self {
                pages,
                held: Mutex::new(None),
                found_present,
                found_present_by_any,
                submitted,
                generations: Generations::new(),
            },
            table,
        )
    }

    /// Returns the physical address for a device's access to `iova`, through the page that it holds
    /// if that is of the same window.
    pub(super) fn walk(&self, iova: u64) -> Option<u64> {
        let mut held = self.held.lock();
        let page = match *held {
            Some((window, page)) if window == iova >> 21 => page,
            _ => {
                let page = self.level_1(iova)?;
                *held = Some((iova >> 21, page));
                page
            }
        };
        self.leaf(page, iova)
    }

    /// The page of level 1 on the way to `iova`; the root is page 0.
    fn level_1(&self, iova: u64) -> Option<usize> {
        let first = self.next(0, iova >> 30 & 511)?;
        self.next(first, iova >> 21 & 511)
    }

    fn next(&self, page: usize, slot: u64) -> Option<usize> {
        let entry = self.entry(page, slot);
        let base = self.pages.as_ptr().addr();
        (entry & 3 != 0).then(|| (usize::try_from(entry & ADDRESS).unwrap() - base) / 4096)
    }

    fn leaf(&self, page: usize, iova: u64) -> Option<u64> {
        let entry = self.entry(page, iova >> 12 & 511);
        (entry & 3 != 0).then_some(entry & ADDRESS)
    }

    fn entry(&self, page: usize, slot: u64) -> u64 {
        self.pages[page].entries()[usize::try_from(slot).unwrap()].load(Ordering::Acquire)
    }

    fn is_present(&self, iova: u64) -> bool {
        self.level_1(iova).and_then(|page| self.leaf(page, iova)).is_some()
    }
}

const ADDRESS: u64 = ((1 << 52) - 1) & !0xfff;

impl InvalidationQueue for Walker {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        let mut held = self.held.lock();
        for descriptor in descriptors {
            let Descriptor::Iotlb { scope, leaf_only } = descriptor else { continue };
            let Some(range) = scope.range() else {
                *held = None;
                continue;
            };
            let (first, last) = (range.start().raw() >> 12, range.last().raw() >> 12);
            let present = (first..=last).filter(|page| self.is_present(page << 12)).count();
            self.found_present_by_any.fetch_add(present as u64, Ordering::Relaxed);
            if *leaf_only {
                self.found_present.fetch_add(present as u64, Ordering::Relaxed);
            } else if held.is_some_and(|(window, _)| (first >> 9..=last >> 9).contains(&window)) {
                *held = None;
            }
        }
        drop(held);
        if let Some(ticket) = wait {
            self.submitted.store(ticket.0, Ordering::Release);
        }
        Ok(())
    }
    fn completed(&self) -> Ticket {
        Ticket(self.submitted.load(Ordering::Acquire))
    }
    /// A flush of leaves covers exactly the requested range, so no other entry is found present.
    fn costs(&self) -> FlushCosts {
        FlushCosts::EXACT
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: u64::MAX }
    }
}

impl PhysTranslator for Walker {
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    /// Memory is where it is, page by page.
    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        let phys = PhysRange::new(PhysAddr::new(memory.addr() as u64), 4096).unwrap();
        Ok(PhysExtent::new(memory.addr(), phys))
    }
    fn generation(&self) -> Generation {
        self.generations.current()
    }
}

/// Memory of which only the address is used: a page for each number.
pub(super) fn page(number: u64) -> DmaMemory<'static> {
    let addr =
        core::num::NonZero::new(0x10_0000 + usize::try_from(number).unwrap() * 4096).unwrap();
    // SAFETY: nothing in these tests touches it.
    unsafe { DmaMemory::from_raw(NonNull::without_provenance(addr), 4096) }
}
