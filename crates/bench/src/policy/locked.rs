//! `tree-2015` and `tree-merged`: one tree of addresses per device, under one lock that is held
//! across invalidations.
//!
//! From the description of 2015: every map and unmap takes the lock. An unmap clears the entries
//! and appends its range to a queue of 250; when the queue is full, every range in it is
//! invalidated and their addresses are freed, with the lock held until the flush has completed. The
//! queue does not invalidate more than it was given (no flush of the whole domain). All of it is
//! submitted at once here, with one wait, which flatters the baseline.

use super::api::{Dma, Policy, PolicyError, PolicyThread};
use super::iommu::Iommu;
use super::memory::Memory;
use super::stats::PolicyStats;
use super::timer::Timer;
use super::tree::{BITS, Tree};
use crate::baseline::lock::KernelLock;
use pinfold::soft::{Port, SoftConfig};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange, PhysRange};
use std::sync::Arc;
use std::time::Instant;

const PAGE: u64 = 4096;
/// How many unmapped ranges the queue holds.
const QUEUE: usize = 250;

/// The policy.
#[derive(Debug)]
pub(super) struct Locked {
    inner: Arc<Inner>,
    /// Flushes what is queued while no thread unmaps.
    _timer: Timer,
}

#[derive(Debug)]
struct Inner {
    iommu: Iommu,
    state: KernelLock<State>,
}

#[derive(Debug)]
struct State {
    tree: Tree,
    unmapped: Vec<IovaRange>,
    /// When the first range of the queue was unmapped.
    since: Option<Instant>,
    held_bytes: u64,
    stats: PolicyStats,
}

impl Locked {
    pub(super) fn new(
        memory: &Arc<Memory>,
        config: &SoftConfig,
        merges: bool,
    ) -> Result<Self, PolicyError> {
        let state = State {
            tree: Tree::new(merges),
            unmapped: Vec::with_capacity(QUEUE),
            since: None,
            held_bytes: 0,
            stats: PolicyStats { reused_while_reachable: true, ..PolicyStats::default() },
        };
        let inner =
            Arc::new(Inner { iommu: Iommu::new(memory, config)?, state: KernelLock::new(state) });
        let ticked = Arc::clone(&inner);
        let timer = Timer::start(move || {
            // What a flush that fails leaves queued is flushed again by the next one.
            let _ = ticked.flush(&mut ticked.state.lock());
        })?;
        Ok(Self { inner, _timer: timer })
    }
}

impl Inner {
    /// Invalidates what is queued and frees its addresses. The caller holds the lock until the
    /// flush has completed.
    fn flush(&self, state: &mut State) -> Result<(), PolicyError> {
        if state.unmapped.is_empty() {
            return Ok(());
        }
        self.iommu.flush(state.unmapped.iter().copied())?;
        let reachable = state.since.take().map_or(0, |since| since.elapsed().as_nanos());
        state.stats.reachable_ns =
            state.stats.reachable_ns.max(u64::try_from(reachable).unwrap_or(u64::MAX));
        state.held_bytes = 0;
        for range in state.unmapped.drain(..) {
            free(&mut state.tree, range)?;
        }
        Ok(())
    }
}

fn free(tree: &mut Tree, range: IovaRange) -> Result<(), PolicyError> {
    let page = range.start().raw() / PAGE;
    if tree.free(page, range.len() / PAGE) { Ok(()) } else { Err(PolicyError::NotMapped { page }) }
}

impl Policy for Locked {
    fn thread(&self) -> Box<dyn PolicyThread + '_> {
        Box::new(Thread(&self.inner))
    }

    fn port(&self) -> Port {
        self.inner.iommu.port()
    }

    fn stats(&self) -> PolicyStats {
        let state = self.inner.state.lock();
        let stats = PolicyStats { entries: state.tree.entries() as u64, ..state.stats };
        drop(state);
        self.inner.iommu.add_to(stats)
    }
}

struct Thread<'p>(&'p Inner);

impl PolicyThread for Thread<'_> {
    fn map(&mut self, memory: PhysRange, access: Access) -> Result<Dma, PolicyError> {
        self.0.iommu.memory().dma_of(memory)?;
        let pages = memory.len() / PAGE;
        let allocated = self.0.state.lock().tree.alloc(pages);
        let first = allocated.ok_or(PolicyError::Exhausted { pages, bits: BITS })?;
        let iova = IovaRange::new(Iova::new(first * PAGE), memory.len())?;
        if let Err(error) = self.0.iommu.map(iova.start().raw(), memory, access) {
            free(&mut self.0.state.lock().tree, iova)?;
            return Err(error);
        }
        Ok(Dma::new(iova, memory))
    }

    fn prefetch(&self, dma: &Dma) {
        self.0.iommu.prefetch(dma);
    }

    fn unmap(&mut self, dma: Dma, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let (iova, memory) = dma.into_parts()?;
        self.0.iommu.clear(iova.start().raw(), iova.len())?;
        let mut state = self.0.state.lock();
        let state = &mut *state;
        if state.since.is_none() {
            state.since = Some(Instant::now());
        }
        state.unmapped.push(iova);
        state.held_bytes += iova.len();
        state.stats.held_bytes_peak = state.stats.held_bytes_peak.max(state.held_bytes);
        if state.unmapped.len() >= QUEUE {
            self.0.flush(state)?;
        }
        freed.push(memory);
        Ok(())
    }

    fn settle(&mut self, _: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        self.0.flush(&mut self.0.state.lock())
    }
}
