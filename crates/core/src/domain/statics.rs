//! Memory that stays mapped for its lifetime, by its addresses.

use crate::access::Access;
use crate::addr::{Iova, IovaRange};
use crate::mem::DmaMemory;
use crate::sync::{AtomicU64, Mutex, Ordering};
use alloc::collections::BTreeMap;

/// Memory that stays mapped for its lifetime.
#[derive(Clone, Copy)]
struct Static {
    iova: IovaRange,
    addr: usize,
    access: Access,
}

impl Static {
    /// Returns where it has `memory` mapped for `access`, if that is at `start`.
    fn find(&self, start: Iova, memory: DmaMemory, access: Access) -> Option<IovaRange> {
        let iova = IovaRange::new(start, memory.len() as u64).ok()?;
        let offset = memory.addr().checked_sub(self.addr)?;
        let here = self.access.contains(access)
            && self.iova.covers(&iova)
            && iova.start().checked_offset_from(self.iova.start()) == Some(offset as u64);
        here.then_some(iova)
    }
}

/// A static mapping that an owner found, valid while the generation is the same.
pub(super) struct Hit {
    found: Static,
    generation: u64,
}

/// The static mappings of a domain.
pub(super) struct Statics {
    /// By their first address.
    all: Mutex<BTreeMap<Iova, Static>>,
    /// How many have been removed.
    generation: AtomicU64,
}

impl Statics {
    pub(super) fn new() -> Self {
        Self { all: Mutex::new(BTreeMap::new()), generation: AtomicU64::new(0) }
    }

    pub(super) fn insert(&self, iova: IovaRange, memory: DmaMemory, access: Access) {
        self.all.lock().insert(iova.start(), Static { iova, addr: memory.addr(), access });
    }

    /// Removes the mapping of exactly `iova`, if there is one: afterwards no lookup finds it.
    pub(super) fn remove(&self, iova: IovaRange) {
        let mut all = self.all.lock();
        if all.get(&iova.start()).is_some_and(|found| found.iova == iova) {
            all.remove(&iova.start());
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.lock().len()
    }

    /// Returns where `memory` is mapped for `access`, if that is at `start`. O(log mappings), with
    /// a lock.
    pub(super) fn find(&self, start: Iova, memory: DmaMemory, access: Access) -> Option<IovaRange> {
        let (_, nearest) =
            self.all.lock().range(..=start).next_back().map(|(at, found)| (*at, *found))?;
        nearest.find(start, memory, access)
    }

    /// Returns the same, from `hit` if that contains it. Then one load.
    pub(super) fn find_cached(
        &self,
        start: Iova,
        memory: DmaMemory,
        access: Access,
        hit: &mut Option<Hit>,
    ) -> Option<IovaRange> {
        // Before the lookup: what is removed after it makes the hit stale.
        let generation = self.generation.load(Ordering::Acquire);
        if let Some(hit) = hit
            && hit.generation == generation
            && let Some(iova) = hit.found.find(start, memory, access)
        {
            return Some(iova);
        }
        let (_, nearest) =
            self.all.lock().range(..=start).next_back().map(|(at, found)| (*at, *found))?;
        let iova = nearest.find(start, memory, access)?;
        *hit = Some(Hit { found: nearest, generation });
        Some(iova)
    }
}
