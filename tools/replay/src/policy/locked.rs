//! The tree of addresses of `tree-2015` and `tree-merged`, and below the caches of `lazy`.
//!
//! Ranges in use are in a tree, and free addresses are what is between them. An allocation searches
//! downward from a cached position, the lowest range allocated last or what a free left above it;
//! if it reaches the bottom it starts once more at the top. So it is fast while addresses are freed
//! in the order of their allocation, and linear otherwise. Addresses below 4 GiB are tried first:
//! on each call, as in 2015, or until that fails for the first time, as Linux 6.12 does for a
//! device that reaches all of them. A range is aligned to its size, rounded up to a power of two.
//!
//! The tree is the standard library's B-tree instead of a red-black tree. It is shallower, which
//! flatters the baseline beside many entries; each call descends from its root, where the original
//! begins at a cached node, which hurts it beside few.

use super::api::{Dma, Policy, PolicyError, PolicyStats, PolicyThread};
use super::flush_queue::Timer;
use super::iommu::{BITS, Iommu};
use super::memory::Memory;
use crate::lock::KernelLock;
use pinfold::soft::{Port, SoftConfig};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange, PhysRange};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// One more than the last page below 4 GiB.
const LOW_END: u64 = 1 << (32 - 12);
/// One more than the last page.
const END: u64 = 1 << (BITS - 12);

/// Allocates ranges of pages. Page 0 is never allocated.
#[derive(Debug)]
pub(super) struct Tree {
    /// First page and the page behind the last, of each range in use.
    used: BTreeMap<u64, u64>,
    merges: bool,
    /// Whether addresses below 4 GiB are tried no more once there were none.
    gives_up_low: bool,
    tries_low: bool,
    low: Cached,
    all: Cached,
}

/// The start of the next search for addresses below `end`.
#[derive(Clone, Copy, Debug)]
struct Cached {
    end: u64,
    from: u64,
}

impl Tree {
    /// Creates a tree with an entry for each allocation or, if it `merges`, for each run of
    /// allocations that abut.
    pub(crate) fn new(merges: bool) -> Self {
        let cached = |end| Cached { end, from: end };
        let (low, all) = (cached(LOW_END), cached(END));
        Self { used: BTreeMap::new(), merges, gives_up_low: false, tries_low: true, low, all }
    }

    /// Tries addresses below 4 GiB no more once there were none.
    pub(crate) fn giving_up_low(self) -> Self {
        Self { gives_up_low: true, ..self }
    }

    /// Returns the number of entries.
    pub(crate) fn entries(&self) -> usize {
        self.used.len()
    }

    /// Allocates `pages` pages and returns the first; `None` if there is no such range. Linear in
    /// the worst case.
    pub(crate) fn alloc(&mut self, pages: u64) -> Option<u64> {
        if self.tries_low {
            if let Some(first) = self.alloc_low(pages) {
                return Some(first);
            }
            self.tries_low = !self.gives_up_low;
        }
        let first = self.search(self.all, pages)?;
        self.all.from = first;
        Some(self.insert(first, pages))
    }

    /// Allocates `pages` pages below 4 GiB.
    pub(crate) fn alloc_low(&mut self, pages: u64) -> Option<u64> {
        let first = self.search(self.low, pages)?;
        self.low.from = first;
        Some(self.insert(first, pages))
    }

    fn search(&self, cached: Cached, pages: u64) -> Option<u64> {
        let below = |from| self.search_below(from, pages);
        below(cached.from).or_else(|| below(cached.end).filter(|_| cached.from < cached.end))
    }

    /// Finds the highest gap below `from`.
    fn search_below(&self, from: u64, pages: u64) -> Option<u64> {
        let mask = !(pages.checked_next_power_of_two()? - 1);
        let fits = |end: u64| Some(end.checked_sub(pages)? & mask);
        let mut end = from;
        for (first, behind) in self.used.range(..from).rev() {
            if let Some(at) = fits(end).filter(|at| at >= behind) {
                return Some(at);
            }
            end = *first;
        }
        fits(end).filter(|at| *at > 0)
    }

    fn insert(&mut self, first: u64, pages: u64) -> u64 {
        let (mut start, mut behind) = (first, first + pages);
        if self.merges {
            if let Some(end) = self.used.remove(&behind) {
                behind = end;
            }
            if let Some((below, end)) = self.used.range(..first).next_back()
                && *end == first
            {
                start = *below;
            }
        }
        self.used.insert(start, behind);
        first
    }

    /// Frees `pages` pages from `first`, all of which were allocated by one call. Returns whether
    /// they were.
    ///
    /// O(log n); a run of a tree that merges is split, and needs memory then.
    #[must_use]
    pub(crate) fn free(&mut self, first: u64, pages: u64) -> bool {
        let behind = first + pages;
        let Some((&start, &end)) = self.used.range(..=first).next_back() else { return false };
        if end < behind || !self.merges && (start, end) != (first, behind) {
            return false;
        }
        if start < first {
            self.used.insert(start, first);
        } else {
            self.used.remove(&first);
        }
        if behind < end {
            self.used.insert(behind, end);
        }
        let next = self.used.range(behind..).next().map(|(next, _)| *next);
        for cached in [&mut self.low, &mut self.all] {
            if (cached.from..cached.end).contains(&first) {
                cached.from = next.unwrap_or(cached.end).min(cached.end);
            }
        }
        true
    }
}

// `tree-2015` and `tree-merged`: one tree of addresses per device, under one lock that is held
// across invalidations.
//
// From the description of 2015: every map and unmap takes the lock. An unmap clears the entries
// and appends its range to a queue of 250; when the queue is full, every range in it is
// invalidated and their addresses are freed, with the lock held until the flush has completed. The
// queue does not invalidate more than it was given (no flush of the whole domain). All of it is
// submitted at once here, with one wait, which flatters the baseline.

const PAGE: u64 = 4096;
/// The number of unmapped ranges that the queue holds.
const QUEUE: usize = 250;

/// The policy.
#[derive(Debug)]
pub(super) struct Locked {
    inner: Arc<Inner>,
    /// Flushes the queued ranges while no thread unmaps.
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
            // Ranges that a failed flush leaves queued are flushed again by the next one.
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
