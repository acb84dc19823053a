//! `identity`: the address is the physical one, counted per page; a page is flushed when its count
//! reaches 0.
//!
//! The "dynamic 1:1" of 2015, with strict flushes. The count takes the place of a tree: no address
//! is searched for. All access is granted, because mappings of one page may differ in direction.

use super::api::{Dma, Policy, PolicyError, PolicyStats, PolicyThread};
use super::iommu::Iommu;
use super::memory::Memory;
use crate::lock::KernelLock;
use pinfold::soft::{Port, SoftConfig};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange, PhysAddr, PhysRange};
use std::sync::{Arc, OnceLock};

const PAGE: u64 = 4096;
/// The number of pages covered by one lock: those of 2 MiB, whose entries are in one table page.
const GROUP: usize = 512;

type Counts = [u32; GROUP];

/// The policy.
#[derive(Debug)]
pub(super) struct Identity {
    iommu: Iommu,
    /// The number of mappings of each page, by 2 MiB; present once a page of them has been mapped.
    /// The lock is held while an entry changes with its count.
    groups: Box<[OnceLock<Box<KernelLock<Counts>>>]>,
}

impl Identity {
    pub(super) fn new(memory: &Arc<Memory>, config: &SoftConfig) -> Result<Self, PolicyError> {
        let groups = memory.whole().len().div_ceil(GROUP as u64 * PAGE);
        let groups = (0..groups).map(|_| OnceLock::new()).collect();
        Ok(Self { iommu: Iommu::new(memory, config)?, groups })
    }

    /// Calls `change` for the count of each page with the page's range. The lock of its group is
    /// held.
    fn each_page(
        &self,
        memory: PhysRange,
        mut change: impl FnMut(&mut u32, PhysRange) -> Result<(), PolicyError>,
    ) -> Result<(), PolicyError> {
        let base = self.iommu.memory().whole();
        let outside = || PolicyError::Outside { range: memory, memory: base };
        let first = memory.start().checked_offset_from(base.start()).ok_or_else(outside)? / PAGE;
        let mut page = first;
        while page < first + memory.len() / PAGE {
            let group =
                usize::try_from(page / GROUP as u64).ok().and_then(|group| self.groups.get(group));
            let group = group.ok_or_else(outside)?;
            let mut counts = group.get_or_init(|| Box::new(KernelLock::new([0; GROUP]))).lock();
            let end = (first + memory.len() / PAGE).min((page / GROUP as u64 + 1) * GROUP as u64);
            while page < end {
                let count =
                    usize::try_from(page % GROUP as u64).ok().and_then(|at| counts.get_mut(at));
                let at = PhysAddr::new(base.start().raw() + page * PAGE);
                change(count.ok_or_else(outside)?, PhysRange::new(at, PAGE)?)?;
                page += 1;
            }
        }
        Ok(())
    }

    /// Counts one mapping less of each page, and returns whether a page is no longer mapped.
    fn release(&self, memory: PhysRange) -> Result<bool, PolicyError> {
        let mut cleared = false;
        self.each_page(memory, |count, page| {
            let page_number = page.start().raw() / PAGE;
            *count = count.checked_sub(1).ok_or(PolicyError::NotMapped { page: page_number })?;
            if *count == 0 {
                self.iommu.clear(page.start().raw(), PAGE)?;
                cleared = true;
            }
            Ok(())
        })?;
        Ok(cleared)
    }
}

impl Policy for Identity {
    fn thread(&self) -> Box<dyn PolicyThread + '_> {
        Box::new(Thread(self))
    }

    fn port(&self) -> Port {
        self.iommu.port()
    }

    fn stats(&self) -> PolicyStats {
        let mapped = |counts: &Counts| counts.iter().filter(|count| **count > 0).count() as u64;
        let groups = self.groups.iter().filter_map(OnceLock::get);
        let entries = groups.map(|group| mapped(&group.lock())).sum();
        self.iommu.add_to(PolicyStats { entries, ..PolicyStats::default() })
    }
}

struct Thread<'p>(&'p Identity);

impl PolicyThread for Thread<'_> {
    fn map(&mut self, memory: PhysRange, _: Access) -> Result<Dma, PolicyError> {
        let iommu = &self.0.iommu;
        iommu.memory().dma_of(memory)?;
        let iova = IovaRange::new(Iova::new(memory.start().raw()), memory.len())?;
        let mut counted = 0;
        let mapped = self.0.each_page(memory, |count, page| {
            if *count == 0 {
                iommu.map(page.start().raw(), page, Access::READ | Access::WRITE)?;
            }
            *count += 1;
            counted += PAGE;
            Ok(())
        });
        if let Err(error) = mapped {
            if let Some(part) = memory.part(0, counted)
                && self.0.release(part)?
            {
                iommu.flush([iova])?;
            }
            return Err(error);
        }
        Ok(Dma::new(iova, memory))
    }

    fn unmap(&mut self, dma: Dma, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let (iova, memory) = dma.into_parts()?;
        if self.0.release(memory)? {
            self.0.iommu.flush([iova])?;
        }
        freed.push(memory);
        Ok(())
    }

    fn settle(&mut self, _: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        Ok(())
    }
}

// `none`: no protection. All memory is mapped once at its physical address, in leaves of 2 MiB.
//
// Devices still read and write through the model, as with every other policy, so that only the
// policies differ.

/// The policy.
#[derive(Debug)]
pub(super) struct Unprotected(Iommu);

impl Unprotected {
    pub(super) fn new(memory: &Arc<Memory>, config: &SoftConfig) -> Result<Self, PolicyError> {
        let iommu = Iommu::new(memory, config)?;
        iommu.map_identity(Access::READ | Access::WRITE)?;
        Ok(Self(iommu))
    }
}

impl Policy for Unprotected {
    fn thread(&self) -> Box<dyn PolicyThread + '_> {
        Box::new(Ceiling(self.0.memory()))
    }

    fn port(&self) -> Port {
        self.0.port()
    }

    fn stats(&self) -> PolicyStats {
        self.0.add_to(PolicyStats {
            reachable_ns: u64::MAX,
            reused_while_reachable: true,
            ..PolicyStats::default()
        })
    }
}

struct Ceiling<'p>(&'p Memory);

impl PolicyThread for Ceiling<'_> {
    fn map(&mut self, memory: PhysRange, _: Access) -> Result<Dma, PolicyError> {
        self.0.dma_of(memory)?;
        let iova = IovaRange::new(Iova::new(memory.start().raw()), memory.len())?;
        Ok(Dma::new(iova, memory))
    }

    fn unmap(&mut self, dma: Dma, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let (_, memory) = dma.into_parts()?;
        freed.push(memory);
        Ok(())
    }

    fn settle(&mut self, _: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        Ok(())
    }
}
