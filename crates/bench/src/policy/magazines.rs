//! `magazines` and `magazines-strict`: per-CPU caches of addresses; lazy flushes, or one for each
//! unmap.

use super::api::{Dma, Policy, PolicyError, PolicyThread};
use super::flush_queue::FlushQueues;
use super::iommu::Iommu;
use super::magazine::Magazines;
use super::memory::Memory;
use super::stats::PolicyStats;
use super::timer::Timer;
use super::tree::BITS;
use pinfold::soft::{Port, SoftConfig};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange, PhysRange};
use std::sync::Arc;

const PAGE: u64 = 4096;

/// The policy.
#[derive(Debug)]
pub(super) struct Cached {
    inner: Arc<Inner>,
    /// Flushes what is queued, in lazy mode.
    _timer: Option<Timer>,
}

#[derive(Debug)]
struct Inner {
    iommu: Iommu,
    addresses: Magazines,
    /// In lazy mode.
    queues: Option<FlushQueues>,
}

impl Cached {
    pub(super) fn new(
        memory: &Arc<Memory>,
        config: &SoftConfig,
        lazy: bool,
    ) -> Result<Self, PolicyError> {
        let queues = lazy.then(FlushQueues::new);
        let inner =
            Inner { iommu: Iommu::new(memory, config)?, addresses: Magazines::new(), queues };
        let inner = Arc::new(inner);
        let ticked = Arc::clone(&inner);
        // What a flush that fails leaves queued is flushed again when a queue is full.
        let timer = lazy.then(|| Timer::start(move || drop(ticked.tick()))).transpose()?;
        Ok(Self { inner, _timer: timer })
    }
}

impl Inner {
    fn free(&self, iova: IovaRange) -> Result<(), PolicyError> {
        let page = iova.start().raw() / PAGE;
        let known = self.addresses.free(page, iova.len() / PAGE);
        if known { Ok(()) } else { Err(PolicyError::NotMapped { page }) }
    }

    fn tick(&self) -> Result<(), PolicyError> {
        self.queues
            .as_ref()
            .map_or(Ok(()), |queues| queues.tick(&self.iommu, |iova| self.free(iova)))
    }
}

impl Policy for Cached {
    fn thread(&self) -> Box<dyn PolicyThread + '_> {
        Box::new(Thread(&self.inner))
    }

    fn port(&self) -> Port {
        self.inner.iommu.port()
    }

    fn stats(&self) -> PolicyStats {
        let (held_bytes_peak, reachable_ns) =
            self.inner.queues.as_ref().map_or((0, 0), FlushQueues::peaks);
        self.inner.iommu.add_to(PolicyStats {
            entries: self.inner.addresses.entries() as u64,
            held_bytes_peak,
            reachable_ns,
            reused_while_reachable: self.inner.queues.is_some(),
            ..PolicyStats::default()
        })
    }
}

struct Thread<'p>(&'p Inner);

impl PolicyThread for Thread<'_> {
    fn map(&mut self, memory: PhysRange, access: Access) -> Result<Dma, PolicyError> {
        let Inner { iommu, addresses, .. } = self.0;
        iommu.memory().dma_of(memory)?;
        let pages = memory.len() / PAGE;
        let first = addresses.alloc(pages).ok_or(PolicyError::Exhausted { pages, bits: BITS })?;
        let iova = IovaRange::new(Iova::new(first * PAGE), memory.len())?;
        if let Err(error) = iommu.map(iova.start().raw(), memory, access) {
            self.0.free(iova)?;
            return Err(error);
        }
        Ok(Dma::new(iova, memory))
    }

    fn prefetch(&self, dma: &Dma) {
        self.0.iommu.prefetch(dma);
    }

    fn unmap(&mut self, dma: Dma, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let (iova, memory) = dma.into_parts()?;
        let iommu = &self.0.iommu;
        iommu.clear(iova.start().raw(), iova.len())?;
        if let Some(queues) = &self.0.queues {
            queues.add(iommu, iova, |one| self.0.free(one))?;
        } else {
            iommu.flush([iova])?;
            self.0.free(iova)?;
        }
        freed.push(memory);
        Ok(())
    }

    fn settle(&mut self, _: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        self.0.tick()
    }
}
