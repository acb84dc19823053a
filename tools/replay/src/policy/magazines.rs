//! `lazy` and `linux-strict`: per-CPU caches of addresses; lazy flushes, or one for each
//! unmap.

use super::api::{Dma, Policy, PolicyError, PolicyStats, PolicyThread};
use super::flush_queue::FlushQueues;
use super::flush_queue::{PerCpu, Timer};
use super::iommu::{BITS, Iommu};
use super::locked::Tree;
use super::memory::Memory;
use crate::lock::KernelLock;
use pinfold::soft::{Port, SoftConfig};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange, PhysRange};
use std::sync::Arc;

const PAGE: u64 = 4096;

/// The policy.
#[derive(Debug)]
pub(super) struct Cached {
    inner: Arc<Inner>,
    /// Flushes the queued ranges, in lazy mode.
    _timer: Option<Timer>,
}

#[derive(Debug)]
struct Inner {
    iommu: Iommu,
    addresses: Magazines,
    /// The queues of lazy mode.
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
        // Ranges that a failed flush leaves queued are flushed again when a queue is full.
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

// The address caches of `lazy`: per CPU and size class, over a locked tree.

/// The number of addresses in a magazine.
const MAGAZINE: usize = 127;
/// The classes: 1, 2, 4 ... 32 pages.
const CLASSES: usize = 6;
/// The number of full magazines of a class in the depot.
const DEPOT: usize = 32;

type Magazine = Vec<u64>;

/// The cache of one class on one CPU: two magazines, so that neither a run of allocations nor one
/// of frees exchanges one with the depot each time.
#[derive(Debug)]
struct Class {
    loaded: Magazine,
    previous: Magazine,
}

impl Class {
    fn new() -> KernelLock<Self> {
        let magazine = || Vec::with_capacity(MAGAZINE);
        KernelLock::new(Self { loaded: magazine(), previous: magazine() })
    }
}

/// Allocates ranges of pages. Sizes up to 32 pages are rounded up to powers of two and cached per
/// CPU.
#[derive(Debug)]
pub(super) struct Magazines {
    cpus: PerCpu<[KernelLock<Class>; CLASSES]>,
    depots: [KernelLock<Vec<Magazine>>; CLASSES],
    tree: KernelLock<Tree>,
}

/// Returns the number of pages that an allocation of `pages` takes, and its class if it is cached.
fn class(pages: u64) -> (u64, Option<usize>) {
    let rounded = pages.next_power_of_two();
    let class = rounded.trailing_zeros() as usize;
    if class < CLASSES { (rounded, Some(class)) } else { (pages, None) }
}

impl Magazines {
    /// Creates empty caches.
    pub(crate) fn new() -> Self {
        Self {
            cpus: PerCpu::new(|| std::array::from_fn(|_| Class::new())),
            depots: std::array::from_fn(|_| KernelLock::new(Vec::new())),
            tree: KernelLock::new(Tree::new(false).giving_up_low()),
        }
    }

    /// Returns the number of entries in the tree: ranges in use, and those in the caches.
    pub(crate) fn entries(&self) -> usize {
        self.tree.lock().entries()
    }

    /// Allocates `pages` pages and returns the first.
    #[inline]
    pub(crate) fn alloc(&self, pages: u64) -> Option<u64> {
        let (pages, class) = class(pages);
        let cached = class.and_then(|class| self.take(class));
        cached.or_else(|| self.tree.lock().alloc(pages)).or_else(|| {
            self.purge();
            self.tree.lock().alloc(pages)
        })
    }

    /// Frees what one call allocated. Returns whether the tree knows it, if it goes there.
    #[inline]
    #[must_use]
    pub(crate) fn free(&self, first: u64, pages: u64) -> bool {
        let (pages, class) = class(pages);
        match class {
            Some(class) => self.put(class, first),
            None => self.tree.lock().free(first, pages),
        }
    }

    #[inline]
    fn take(&self, class: usize) -> Option<u64> {
        let mut cache = self.cpus.here().get(class)?.lock();
        let cache = &mut *cache;
        if let Some(first) = cache.loaded.pop() {
            return Some(first);
        }
        if cache.previous.is_empty() {
            cache.loaded = self.depots.get(class)?.lock().pop()?;
        } else {
            std::mem::swap(&mut cache.loaded, &mut cache.previous);
        }
        cache.loaded.pop()
    }

    #[inline]
    fn put(&self, class: usize, first: u64) -> bool {
        let Some(cache) = self.cpus.here().get(class) else { return false };
        let mut cache = cache.lock();
        let cache = &mut *cache;
        if cache.loaded.len() == MAGAZINE {
            if cache.previous.len() < MAGAZINE {
                std::mem::swap(&mut cache.loaded, &mut cache.previous);
            } else {
                let full = std::mem::replace(&mut cache.loaded, Vec::with_capacity(MAGAZINE));
                if !self.deposit(class, full) {
                    return false;
                }
            }
        }
        cache.loaded.push(first);
        true
    }

    /// Puts a full magazine into the depot or, if that is full, its addresses into the tree.
    fn deposit(&self, class: usize, full: Magazine) -> bool {
        let Some(depot) = self.depots.get(class) else { return false };
        let mut depot = depot.lock();
        if depot.len() < DEPOT {
            depot.push(full);
            return true;
        }
        drop(depot);
        self.return_all(class, full)
    }

    fn return_all(&self, class: usize, addresses: Magazine) -> bool {
        let mut tree = self.tree.lock();
        addresses.into_iter().all(|first| tree.free(first, 1 << class))
    }

    /// Returns all cached addresses to the tree.
    pub(crate) fn purge(&self) {
        for (class, depot) in self.depots.iter().enumerate() {
            let mut magazines = std::mem::take(&mut *depot.lock());
            for cpu in self.cpus.iter() {
                let Some(cache) = cpu.get(class) else { continue };
                let mut cache = cache.lock();
                magazines.push(std::mem::take(&mut cache.loaded));
                magazines.push(std::mem::take(&mut cache.previous));
            }
            for magazine in magazines {
                // The addresses in the caches came from the tree.
                let known = self.return_all(class, magazine);
                debug_assert!(known);
            }
        }
    }
}
