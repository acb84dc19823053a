//! The caches of a device.

use crate::config::PortStats;
use crate::memory::inside;
use crate::tlb::{Iotlb, Leaf, WalkCache};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, PageSize};
use pinfold_core::domain::Generation;
use pinfold_core::invalidate::{Descriptor, Scope};
use pinfold_core::mem::DmaMemory;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// A device. The lock is held during DMA and during an invalidation: a completed flush has
/// therefore waited for the accesses that used the dropped entries, and no cache fill races with
/// it. A long access releases it between bursts, as a device makes requests of some length.
#[derive(Debug)]
pub(super) struct Device {
    /// Its bus, device and function, which its requests carry.
    pub(super) source_id: u16,
    state: Mutex<State>,
    /// Whether an invalidation waits for `state`, which a long access would take again and again
    /// before a sleeping thread wakes.
    flush_waits: AtomicBool,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) tlb: Iotlb,
    pub(super) walks: WalkCache,
    /// The device's own TLB (ATS), which only its own descriptor flushes.
    pub(super) device_tlb: Option<Iotlb>,
    pub(super) stats: PortStats,
    /// The part of the time of its walks that is on the timeline, and the end of the last of them.
    walks_placed_ns: u64,
    walks_end_ns: u64,
    /// The registered memory found last, and the generation of the registry at that time.
    pub(super) last: Option<(Generation, DmaMemory<'static>)>,
}

impl State {
    /// Returns the registered memory found last, if it contains `addr..addr + len` and the registry
    /// is unchanged.
    pub(super) fn last_found(
        &self,
        generation: Generation,
        addr: usize,
        len: usize,
    ) -> Option<DmaMemory<'static>> {
        let (then, memory) = self.last?;
        (then == generation && inside(memory, addr, len).is_some()).then_some(memory)
    }

    /// Counts an entry that a walk has read, which takes `ns` of the device's time.
    pub(super) fn count_walk_read(&mut self, ns: u64) {
        self.stats.walk_reads += 1;
        self.stats.walk_ns = self.stats.walk_ns.saturating_add(ns);
    }

    /// Places the walks that are not on the timeline yet, one after another from `now_ns` on, and
    /// returns when the last ends.
    pub(super) fn place_walks(&mut self, now_ns: u64) -> u64 {
        let more = self.stats.walk_ns.saturating_sub(self.walks_placed_ns);
        if more > 0 {
            self.walks_placed_ns = self.stats.walk_ns;
            self.walks_end_ns = self.walks_end_ns.max(now_ns).saturating_add(more);
        }
        self.walks_end_ns
    }

    fn flush_iotlb(&mut self, scope: &Scope, leaf_only: bool) {
        let Some(range) = scope.range() else {
            self.tlb.drop_all();
            return self.walks.drop_all();
        };
        self.tlb.drop_range(&range);
        if !leaf_only {
            self.walks.drop_range(&range);
        }
    }

    fn flush_device_tlb(&mut self, scope: &Scope) {
        if let Some(tlb) = &mut self.device_tlb {
            match scope.range() {
                Some(range) => tlb.drop_range(&range),
                None => tlb.drop_all(),
            }
        }
    }

    /// Drops all translations and table pages, also from the device's own TLB.
    pub(super) fn drop_all(&mut self) {
        self.flush_iotlb(&Scope::Domain, false);
        self.flush_device_tlb(&Scope::Domain);
    }

    /// Drops the translations to memory for which `removed` is true.
    pub(super) fn drop_memory(&mut self, removed: impl Fn(&DmaMemory<'_>) -> bool) {
        self.tlb.drop_memory(&removed);
        if let Some(tlb) = &mut self.device_tlb {
            tlb.drop_memory(&removed);
        }
    }

    /// Caches that the entry for `iova` at `level` is not present.
    pub(super) fn put_absent(&mut self, level: u8, iova: Iova) {
        if level == 1 {
            let nothing = Leaf { memory: None, access: Access::empty(), size: PageSize::Size4K };
            self.tlb.put(iova, nothing);
        } else {
            self.walks.put(level - 1, iova, None);
        }
    }
}

impl Device {
    /// The number of yields of a thread to another before it continues, or sleeps.
    const TURNS: u32 = 1000;

    pub(super) fn new(
        source_id: u16,
        iotlb_entries: usize,
        device_tlb_entries: Option<usize>,
    ) -> Self {
        let state = State {
            tlb: Iotlb::new(iotlb_entries),
            walks: WalkCache::new(),
            device_tlb: device_tlb_entries.map(Iotlb::new),
            stats: PortStats::default(),
            walks_placed_ns: 0,
            walks_end_ns: 0,
            last: None,
        };
        Self { source_id, state: Mutex::new(state), flush_waits: AtomicBool::new(false) }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets an invalidation that waits go first: called between the parts of a long access, without
    /// the lock.
    pub(super) fn let_flush_go_first(&self) {
        // No promise depends on it, so nothing is ordered and it ends: the invalidating thread may
        // not run.
        for _ in 0..Self::TURNS {
            if !self.flush_waits.load(Ordering::Relaxed) {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Locks the state for an invalidation, of which there is one at a time: its unit's queue is
    /// locked.
    fn state_for_flush(&self) -> MutexGuard<'_, State> {
        if let Some(state) = self.try_state() {
            return state;
        }
        self.flush_waits.store(true, Ordering::Relaxed);
        let state = (0..Self::TURNS).find_map(|_| {
            std::thread::yield_now();
            self.try_state()
        });
        let state = state.unwrap_or_else(|| self.state());
        self.flush_waits.store(false, Ordering::Relaxed);
        state
    }

    fn try_state(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Drops what `due` invalidates.
    pub(super) fn flush(&self, due: &[Descriptor]) {
        let mut state = self.state_for_flush();
        for what in due {
            match what {
                Descriptor::Iotlb { scope, leaf_only } => state.flush_iotlb(scope, *leaf_only),
                Descriptor::DeviceTlb(scope) => state.flush_device_tlb(scope),
                // The timeline keeps the order.
                Descriptor::Fence => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::{Duration, Instant};

    /// A flush that finds the device accessing memory is next, before a thread that accesses memory
    /// again at once.
    #[test]
    fn a_flush_that_waits_goes_before_the_rest_of_an_access() {
        let device = Device::new(0, 16, None);
        let rounds = 20;
        let first = (0..rounds).filter(|_| {
            let burst = device.state();
            thread::scope(|threads| {
                let flush = threads.spawn(|| device.flush(&[]));
                let deadline = Instant::now() + Duration::from_secs(10);
                while !device.flush_waits.load(Ordering::Relaxed) && Instant::now() < deadline {
                    thread::yield_now();
                }
                let waited = device.flush_waits.load(Ordering::Relaxed);
                drop(burst);
                device.let_flush_go_first();
                let next_burst = device.state();
                let was_first = waited && !device.flush_waits.load(Ordering::Relaxed);
                drop(next_burst);
                flush.join().is_ok() && was_first
            })
        });
        // Not all: a thread that does not get to run in time is passed.
        let first = first.count();
        assert!(first > rounds / 2, "{first} of {rounds}");
    }
}
