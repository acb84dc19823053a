//! The I/O page table of the baselines: what Linux does for small ranges.
//!
//! A map walks from the root and writes leaves; a clear walks and clears them. Table pages are
//! linked once and never freed, so nothing is counted. That is the fastest a table can be, and it
//! flatters the baselines: the table of a device that has cycled through its addresses stays as
//! large as they are.

use super::api::PolicyError;
use crate::baseline::lock::KernelLock;
use pinfold_core::access::Access;
use pinfold_core::addr::{PageSize, PhysAddr};
use pinfold_core::mem::prefetch;
use pinfold_core::table::{Entry, Format, TablePage, VtdSecondStage};
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) const LEVELS: u8 = 4;
const PAGE: u64 = 4096;

/// A table that never frees its pages. Page 0 is the root.
#[derive(Debug)]
pub(super) struct Table {
    pages: &'static [TablePage],
    phys: PhysAddr,
    /// How many pages are linked. The lock is held while one is.
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

    /// Has the processor load the entry of `iova`, which is mapped.
    #[inline]
    pub(super) fn prefetch(&self, iova: u64) {
        if let Ok(entry) = self.entry(iova, 1) {
            prefetch(entry);
        }
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

    /// Walks to the table page of `level` for `iova`, and links what is missing.
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
