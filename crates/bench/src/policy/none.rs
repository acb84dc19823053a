//! `none`: no protection. All memory is mapped once at its physical address, in leaves of 2 MiB.
//!
//! Devices still read and write through the model, as with every other policy, so that only the
//! policies differ.

use super::api::{Dma, Policy, PolicyError, PolicyThread};
use super::iommu::Iommu;
use super::memory::Memory;
use super::stats::PolicyStats;
use pinfold::soft::{Port, SoftConfig};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange, PhysRange};
use std::sync::Arc;

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
        Box::new(Thread(self.0.memory()))
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

struct Thread<'p>(&'p Memory);

impl PolicyThread for Thread<'_> {
    fn map(&mut self, memory: PhysRange, _: Access) -> Result<Dma, PolicyError> {
        self.0.dma_of(memory)?;
        let iova = IovaRange::new(Iova::new(memory.start().raw()), memory.len())?;
        Ok(Dma::new(iova, memory))
    }

    fn prefetch(&self, _: &Dma) {}

    fn unmap(&mut self, dma: Dma, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let (_, memory) = dma.into_parts()?;
        freed.push(memory);
        Ok(())
    }

    fn settle(&mut self, _: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        Ok(())
    }
}
