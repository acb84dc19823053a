//! The software IOMMU below the baselines, driven as a kernel does: each caller submits its own
//! flush and spins.
#![expect(
    unsafe_code,
    reason = "the memory of the table and the registered memory are kept valid by hand"
)]

use super::api::PolicyError;
use super::api::PolicyStats;
use super::memory::Memory;
use crate::lock::KernelLock;
use pinfold::soft::{Port, PortStats, SoftConfig, SoftIommu, SoftQueue};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange, PageSize, PhysAddr, PhysRange};
use pinfold_core::domain::PhysTranslator;
use pinfold_core::invalidate::{
    Descriptor, Flush, InvalidationQueue, Invalidator, MAX_IN_FLIGHT, QueueError, Ticket, WaitLimit,
};
use pinfold_core::table::{Entry, Format, TableMemory, TablePage, VtdSecondStage};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The width of an address in bits.
pub(super) const BITS: u32 = 48;

/// The queue as a kernel waits for it: spinning, with interrupts off.
#[derive(Debug)]
struct Spinning(SoftQueue);

impl InvalidationQueue for Spinning {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        self.0.submit(descriptors, wait)
    }

    fn accepts(&self) -> usize {
        self.0.accepts()
    }

    fn completed(&self) -> Ticket {
        self.0.completed()
    }

    fn relax(&self, _: u64) {
        std::hint::spin_loop();
    }

    fn now_ns(&self) -> Option<u64> {
        self.0.now_ns()
    }

    fn limit(&self) -> WaitLimit {
        self.0.limit()
    }

    fn queue_depth(&self) -> u64 {
        self.0.queue_depth()
    }
}

/// An IOMMU with a table that never frees its pages.
#[derive(Debug)]
pub(super) struct Iommu {
    iommu: SoftIommu,
    table: Table,
    invalidator: Invalidator<Spinning>,
    /// Held while flushes are submitted, so that each caller's have a wait of their own.
    submission: KernelLock<()>,
    memory: Arc<Memory>,
}

impl Iommu {
    pub(super) fn new(memory: &Arc<Memory>, config: &SoftConfig) -> Result<Self, PolicyError> {
        let config = SoftConfig { queue_depth: MAX_IN_FLIGHT, levels: LEVELS, ..config.clone() };
        let reserves = config.table_reserved > 0;
        let iommu = SoftIommu::new(config)?;
        // SAFETY: `Self` keeps the IOMMU. The pages form the one table attached here, and only this
        // invalidator submits.
        let memory_of_table = unsafe { iommu.table_memory() };
        // The reserved part; or the rest in one piece, which takes memory as it is used: the
        // baselines' table does not grow. A small limit has been given out with the first piece.
        let rest = if reserves { None } else { memory_of_table.grow(u32::MAX) };
        let (pages, phys) = match rest {
            Some(rest) => (rest.pages(), rest.phys()),
            // SAFETY: as above; no other piece was given out.
            None => (unsafe { iommu.table_pages() }, iommu.table_phys()),
        };
        let table = Table::new(pages, phys);
        iommu.attach(phys, LEVELS);
        let queue = iommu.queue();
        // SAFETY: `drop` unregisters it, and `Self` keeps it until then.
        unsafe { queue.register_memory(memory.dma()) }?;
        let invalidator = Invalidator::new(Spinning(queue));
        Ok(Self {
            iommu,
            table,
            invalidator,
            submission: KernelLock::new(()),
            memory: Arc::clone(memory),
        })
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(super) fn port(&self) -> Port {
        self.iommu.port()
    }

    pub(super) fn map(
        &self,
        iova: u64,
        memory: PhysRange,
        access: Access,
    ) -> Result<(), PolicyError> {
        self.table.map(iova, memory.start().raw(), memory.len(), access)
    }

    /// Maps all memory at its physical address for its lifetime.
    pub(super) fn map_identity(&self, access: Access) -> Result<(), PolicyError> {
        let memory = self.memory.whole();
        self.table.map_identity(memory.start().raw(), memory.len(), access)
    }

    pub(super) fn clear(&self, iova: u64, len: u64) -> Result<(), PolicyError> {
        self.table.clear(iova, len)
    }

    /// Flushes ranges that have been cleared, by one submission of the caller's own, and waits.
    pub(super) fn flush(
        &self,
        ranges: impl IntoIterator<Item = IovaRange>,
    ) -> Result<(), PolicyError> {
        let submission = self.submission.lock();
        let ticket = self.invalidator.request(ranges.into_iter().map(Flush::from));
        self.invalidator.submit();
        drop(submission);
        Ok(self.invalidator.wait(ticket)?)
    }

    /// Flushes everything, links included, and waits.
    pub(super) fn flush_all(&self) -> Result<(), PolicyError> {
        let range = IovaRange::new(Iova::new(0), 1 << BITS)?;
        let submission = self.submission.lock();
        let ticket = self.invalidator.request([Flush { range, leaf_only: false }]);
        self.invalidator.submit();
        drop(submission);
        Ok(self.invalidator.wait(ticket)?)
    }

    /// Returns `stats` with the IOMMU's counts.
    pub(super) fn add_to(&self, stats: PolicyStats) -> PolicyStats {
        let PortStats { walk_reads, walk_ns, .. } = self.iommu.stats();
        let table_pages = self.table.pages_used() as u64;
        PolicyStats { walk_reads, walk_ns, table_pages, ..stats }.with(self.invalidator.stats())
    }
}

impl Drop for Iommu {
    fn drop(&mut self) {
        if self.invalidator.queue().0.unregister_memory(self.memory.dma()).is_err() {
            // A device may reach it.
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

// The I/O page table of the baselines: what Linux does for small ranges.
//
// A map walks from the root and writes leaves; a clear walks and clears them. Table pages are
// linked once and never freed, so nothing is counted. That is the fastest a table can be, and it
// flatters the baselines: the table of a device that has cycled through its addresses stays as
// large as they are.

pub(super) const LEVELS: u8 = 4;
const PAGE: u64 = 4096;

/// A table that never frees its pages. Page 0 is the root.
#[derive(Debug)]
pub(super) struct Table {
    pages: &'static [TablePage],
    phys: PhysAddr,
    /// The number of linked pages. The lock is held while one is linked.
    linked: KernelLock<usize>,
}

impl Table {
    /// Creates an empty table in `pages`, which are zero and at `phys`.
    pub(super) fn new(pages: &'static [TablePage], phys: PhysAddr) -> Self {
        Self { pages, phys, linked: KernelLock::new(1) }
    }

    pub(super) fn pages_used(&self) -> usize {
        *self.linked.lock()
    }

    /// Maps `len` bytes at `iova` to the memory from `phys`, in leaves of 4 KiB.
    #[inline]
    pub(super) fn map(
        &self,
        iova: u64,
        phys: u64,
        len: u64,
        access: Access,
    ) -> Result<(), PolicyError> {
        self.each_run(iova, len, |done, entries| {
            for (i, entry) in (0..).zip(entries) {
                let leaf = VtdSecondStage::leaf(PhysAddr::new(phys + done + i * PAGE), access, 1);
                entry.store(leaf, Ordering::Release);
            }
        })
    }

    /// Maps `len` bytes, a multiple of 2 MiB, to the memory at the same physical address in leaves
    /// of 2 MiB.
    pub(super) fn map_identity(
        &self,
        start: u64,
        len: u64,
        access: Access,
    ) -> Result<(), PolicyError> {
        let size = PageSize::Size2M.bytes();
        for at in (start..start + len).step_by(2 << 20).take_while(|at| *at + size <= start + len) {
            let entry = self.entry(at, 2)?;
            entry.store(VtdSecondStage::leaf(PhysAddr::new(at), access, 2), Ordering::Release);
        }
        Ok(())
    }

    /// Clears `len` bytes at `iova`.
    #[inline]
    pub(super) fn clear(&self, iova: u64, len: u64) -> Result<(), PolicyError> {
        self.each_run(iova, len, |_, entries| {
            entries.iter().for_each(|entry| entry.store(0, Ordering::Release))
        })
    }

    /// Calls `act` for each table page of a range, with the offset in the range and the entries.
    #[inline]
    fn each_run(
        &self,
        iova: u64,
        len: u64,
        mut act: impl FnMut(u64, &[AtomicU64]),
    ) -> Result<(), PolicyError> {
        let mut done = 0;
        while done < len {
            let first = slot(iova + done, 1);
            let count = (512 - first).min(usize::try_from((len - done) / PAGE).unwrap_or(0)).max(1);
            let page = self.page(iova + done, 1)?;
            act(done, page.entries().get(first..first + count).unwrap_or_default());
            done += count as u64 * PAGE;
        }
        Ok(())
    }

    fn entry(&self, iova: u64, level: u8) -> Result<&AtomicU64, PolicyError> {
        let page = self.page(iova, level)?;
        page.entries().get(slot(iova, level)).ok_or(self.no_pages())
    }

    /// Walks to the table page of `level` for `iova`, and links missing pages.
    #[inline]
    fn page(&self, iova: u64, level: u8) -> Result<&TablePage, PolicyError> {
        let mut page = self.pages.first().ok_or(self.no_pages())?;
        for above in (level + 1..=LEVELS).rev() {
            let entry = page.entries().get(slot(iova, above)).ok_or(self.no_pages())?;
            let at = match VtdSecondStage::parse(entry.load(Ordering::Acquire), above) {
                Entry::Link(phys) => phys.raw().saturating_sub(self.phys.raw()) / PAGE,
                _ => self.link(entry, above)?,
            };
            page = usize::try_from(at)
                .ok()
                .and_then(|at| self.pages.get(at))
                .ok_or(self.no_pages())?;
        }
        Ok(page)
    }

    #[cold]
    fn link(&self, entry: &AtomicU64, level: u8) -> Result<u64, PolicyError> {
        let mut linked = self.linked.lock();
        if let Entry::Link(phys) = VtdSecondStage::parse(entry.load(Ordering::Acquire), level) {
            return Ok(phys.raw().saturating_sub(self.phys.raw()) / PAGE); // another thread was faster
        }
        if *linked == self.pages.len() {
            return Err(self.no_pages());
        }
        let at = *linked as u64;
        *linked += 1;
        let link = VtdSecondStage::link(PhysAddr::new(self.phys.raw() + at * PAGE));
        entry.store(link, Ordering::Release);
        Ok(at)
    }

    fn no_pages(&self) -> PolicyError {
        PolicyError::NoTablePages { pages: self.pages.len() }
    }
}

fn slot(iova: u64, level: u8) -> usize {
    // Nine bits, which every `usize` holds.
    usize::try_from(iova >> (3 + 9 * u32::from(level)) & 511).unwrap_or(0)
}
