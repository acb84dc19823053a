//! A registration cache: buffers that stay mapped although nobody uses them, because somebody will again.
//!
//! Where the kernel keeps the table a map and its unmap are two system calls and the pinning of every page. A
//! [`RegistrationCache`] maps a buffer when it is first [held](RegistrationCache::hold) and leaves it mapped when it is
//! let go; the next time there is nothing to do. What nobody holds is taken back, longest unused first, when the
//! [`Budget`] or the kernel's limits are reached.
//!
//! The price is the one of [`MappingPolicy::Whole`](crate::MappingPolicy): the device can reach a cached buffer at any time. That is
//! why the cache holds a share of each buffer: it is not freed, and (a slice needs the buffer for itself) no reference
//! to its bytes can be had, until it has been taken back.

use crate::buffer::Buffer;
use crate::domain::Domain;
pub use held::Held;
use pinfold_core::access::Access;
use pinfold_core::domain::{BackendError, Pinned, StaticMapping};
use pinfold_core::mem::DmaMemory;
use slots::{Entry, Slots};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

mod held;
mod slots;
#[cfg(test)]
mod tests;

/// How much a cache may keep mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Budget {
    /// Entries of the domain's table.
    pub entries: usize,
    /// Bytes, which a kernel pins and charges.
    pub bytes: u64,
}

/// Why a buffer could not be held. Nothing is held that was not before; where a device may reach the buffer all the same
/// ([`BackendError::stays_reachable`]) the cache keeps a share of it for ever, and the domain counts it as quarantined.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// All that is cached is held, and there is no room for more.
    #[error(
        "{entries} entries with {bytes} bytes are held, so there is no room for {asked} bytes more in a budget of \
         {} entries and {} bytes: let some go, or make the budget larger", budget.entries, budget.bytes
    )]
    Full {
        /// How many bytes were to be mapped.
        asked: u64,
        /// Entries that are mapped.
        entries: usize,
        /// Bytes of these.
        bytes: u64,
        /// What may be.
        budget: Budget,
    },
    /// The domain refused, with nothing left in the cache that could make room.
    #[error(transparent)]
    Domain(#[from] BackendError),
}

/// What a cache has done so far, and what it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct CacheStats {
    /// Buffers that were mapped already when they were asked for.
    pub hits: u64,
    /// Buffers that were not.
    pub misses: u64,
    /// Maps that were made; neighbours that were asked for together share one.
    pub maps: u64,
    /// Entries that were taken back to make room, or because they were to be forgotten.
    pub evictions: u64,
    /// Entries that are mapped.
    pub entries: usize,
    /// Of these, ones that somebody holds.
    pub held: usize,
    /// Bytes that are mapped.
    pub bytes: u64,
}

/// Keeps buffers mapped in a domain. A handle: a clone is the same cache. When the last handle and the last [`Held`] are
/// gone, everything is taken back.
#[derive(Clone)]
pub struct RegistrationCache(Arc<Inner>);

struct Inner {
    domain: Domain,
    budget: Budget,
    state: Mutex<State>,
    /// Held by whoever maps or takes back, so that no buffer is mapped twice; hits do not wait for it.
    changes: Mutex<()>,
}

#[derive(Default)]
struct State {
    slots: Slots,
    stats: CacheStats,
}

const BOTH: Access = Access::READ.union(Access::WRITE);

impl RegistrationCache {
    /// An empty one for `domain`.
    pub fn new(domain: &Domain, budget: Budget) -> Self {
        let (state, changes) = (Mutex::default(), Mutex::new(()));
        Self(Arc::new(Inner { domain: domain.clone(), budget, state, changes }))
    }

    /// Maps the buffer, if it is not mapped yet, and keeps it so as long as the value lives. A hit is O(log entries).
    ///
    /// A buffer of an arena of another domain can be held, too.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn hold(&self, buffer: &Arc<Buffer>) -> Result<Held, CacheError> {
        if let Some(held) = Inner::hit(&self.0, buffer) {
            return Ok(held);
        }
        let changes = self.0.changes();
        // Another thread may have mapped it meanwhile.
        if let Some(held) = Inner::hit(&self.0, buffer) {
            return Ok(held);
        }
        let mut held = Vec::with_capacity(1);
        Inner::miss(&self.0, std::slice::from_ref(buffer), &mut held)?;
        drop(changes);
        held.pop().ok_or(CacheError::Domain(BackendError::NotRevoked))
    }

    /// The same for many: those that are not mapped yet and lie side by side in an arena are mapped as one entry, which is
    /// taken back only when none of them is held. All or none. The result is in the order of `buffers`.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn hold_all(&self, buffers: &[Arc<Buffer>]) -> Result<Vec<Held>, CacheError> {
        let _changes = self.0.changes();
        let mut order: Vec<usize> = (0..buffers.len()).collect();
        let addr = |i: usize| buffers.get(i).map_or(0, |buffer| buffer.memory().addr());
        order.sort_by_key(|&i| addr(i));
        let mut places: Vec<Option<Held>> = (0..buffers.len()).map(|_| None).collect();
        let mut run: Vec<(usize, Arc<Buffer>)> = Vec::new();
        for i in order {
            let Some(buffer) = buffers.get(i) else { continue };
            let hit = Inner::hit(&self.0, buffer);
            let joins = run.last().is_some_and(|(_, last)| neighbours(last, buffer));
            if hit.is_some() || !joins {
                Inner::miss_run(&self.0, &mut run, &mut places)?;
            }
            match hit {
                Some(held) => places[i] = Some(held),
                None => run.push((i, Arc::clone(buffer))),
            }
        }
        Inner::miss_run(&self.0, &mut run, &mut places)?;
        Ok(places.into_iter().flatten().collect())
    }

    /// Takes everything back that nobody holds; how many entries that were.
    pub fn clear(&self) -> usize {
        let _changes = self.0.changes();
        let mut count = 0;
        while self.0.evict_oldest() {
            count += 1;
        }
        count
    }

    /// Takes the buffer back, with what it was mapped with, if nobody holds it; whether the cache is without it now.
    pub fn forget(&self, buffer: &Arc<Buffer>) -> bool {
        let _changes = self.0.changes();
        let taken = {
            let mut state = self.0.state();
            match state.slots.find(buffer.memory().addr(), buffer.len()) {
                None => return true,
                Some(slot) => state.take(slot),
            }
        };
        taken.is_some_and(|entry| {
            self.0.take_back(entry);
            true
        })
    }

    /// What it has done so far, and what it holds. O(1).
    pub fn stats(&self) -> CacheStats {
        let state = self.0.state();
        let (entries, held, bytes) = state.slots.counts();
        CacheStats { entries, held, bytes, ..state.stats }
    }
}

/// Whether `second` begins where `first` ends, in the same arena.
fn neighbours(first: &Buffer, second: &Buffer) -> bool {
    let same = std::ptr::eq(first.arena().inner(), second.arena().inner());
    same && first.memory().addr().checked_add(first.len()) == Some(second.memory().addr())
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changes(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hit(this: &Arc<Self>, buffer: &Arc<Buffer>) -> Option<Held> {
        let len = buffer.len() as u64;
        // An arena that is exposed whole, in this domain: there is nothing to do, ever. In this one only: at the same address
        // of this domain there may be an entry of the cache.
        let fixed = Pinned::fixed_iova(&**buffer).filter(|(domain, _)| *domain == this.domain.id());
        let known = |(_, at)| this.domain.static_at(at, buffer.memory(), BOTH);
        if let Some(range) = fixed.and_then(known) {
            this.state().stats.hits += 1;
            return Some(Held {
                cache: Arc::clone(this),
                owner: Arc::clone(buffer),
                slot: None,
                iova: range,
            });
        }
        let mut state = this.state();
        let slot = state.slots.find(buffer.memory().addr(), buffer.len())?;
        let iova = state.slots.hold(slot, buffer.memory().addr(), len)?;
        state.stats.hits += 1;
        drop(state);
        Some(Held { cache: Arc::clone(this), owner: Arc::clone(buffer), slot: Some(slot), iova })
    }

    /// Maps a run of neighbours that are not mapped, and puts each into its place.
    fn miss_run(
        this: &Arc<Self>,
        run: &mut Vec<(usize, Arc<Buffer>)>,
        places: &mut [Option<Held>],
    ) -> Result<(), CacheError> {
        if run.is_empty() {
            return Ok(());
        }
        let (at, owners): (Vec<usize>, Vec<Arc<Buffer>>) = run.drain(..).unzip();
        let mut held = Vec::with_capacity(owners.len());
        Self::miss(this, &owners, &mut held)?;
        for (i, one) in at.into_iter().zip(held) {
            if let Some(place) = places.get_mut(i) {
                *place = Some(one);
            }
        }
        Ok(())
    }

    /// Maps neighbours by one entry. `changes` is held by the caller.
    fn miss(this: &Arc<Self>, owners: &[Arc<Buffer>], held: &mut Vec<Held>) -> Result<(), CacheError> {
        let Some(first) = owners.first() else { return Ok(()) };
        let len = owners.iter().map(|owner| owner.len()).sum();
        let memory = first.memory();
        // SAFETY: `owners` are neighbours of one arena, so the run lies in its region, which is one mapping; each is kept by
        // the entry until it has been taken back, and as long as a second owner is there nobody gets a reference
        // into a buffer.
        let run = unsafe { DmaMemory::from_raw(memory.as_ptr(), len) };
        let (mapping, foreign) = match this.map_with_room(run) {
            Ok(mapped) => mapped,
            Err(error) => {
                this.keep_reachable(owners, len, &error);
                return Err(error);
            }
        };
        let iova = mapping.iova();
        let mut entry = Entry::new(run.addr(), len, mapping, foreign, owners.to_vec());
        entry.holds = owners.len();
        let mut state = this.state();
        let slot = state.slots.insert(entry);
        state.stats.misses += owners.len() as u64;
        state.stats.maps += 1;
        drop(state);
        let mut offset = 0;
        for owner in owners {
            let bytes = owner.len() as u64;
            let part = iova.part(offset, bytes).unwrap_or(iova);
            offset += bytes;
            let (cache, owner) = (Arc::clone(this), Arc::clone(owner));
            held.push(Held { cache, owner, slot: Some(slot), iova: part });
        }
        Ok(())
    }

    /// Keeps the buffers for ever where a device may still reach them, although they were not mapped.
    fn keep_reachable(&self, owners: &[Arc<Buffer>], len: usize, error: &CacheError) {
        let reachable = matches!(error, CacheError::Domain(error) if error.stays_reachable());
        if reachable {
            tracing::error!(bytes = len, %error, "buffers that were not cached are kept for ever");
            self.domain.count_quarantined(len as u64);
            owners.iter().for_each(|owner| std::mem::forget(Arc::clone(owner)));
        }
    }

    /// Maps, after making as much room as is needed.
    fn map_with_room(&self, run: DmaMemory) -> Result<(StaticMapping, bool), CacheError> {
        let asked = run.len() as u64;
        loop {
            let (entries, _, bytes) = self.state().slots.counts();
            let fits = entries < self.budget.entries && bytes.saturating_add(asked) <= self.budget.bytes;
            if fits {
                break;
            }
            if !self.evict_oldest() {
                return Err(CacheError::Full { asked, entries, bytes, budget: self.budget });
            }
        }
        loop {
            let error = match self.map(run) {
                Ok(mapped) => return Ok(mapped),
                Err(error) => error,
            };
            let limit = matches!(error, BackendError::NoEntries { .. } | BackendError::LockedMemory { .. });
            if !limit || !self.evict_oldest() {
                return Err(error.into());
            }
        }
    }

    /// Maps; memory of another domain's arena is made known here first, which is the second of the two.
    fn map(&self, run: DmaMemory) -> Result<(StaticMapping, bool), BackendError> {
        // SAFETY: the entry keeps the owners until it has been unmapped, or for ever; nobody gets a reference (`miss`).
        match unsafe { self.domain.map_static(run, BOTH) } {
            Err(BackendError::NotRegistered { .. }) => {}
            other => return other.map(|iova| (iova, false)),
        }
        // SAFETY: as above; it is expelled with the entry.
        unsafe { self.domain.register_memory(run) }?;
        // SAFETY: as above.
        let mapped = unsafe { self.domain.map_static(run, BOTH) };
        match mapped {
            Ok(iova) => Ok((iova, true)),
            // What a device may still reach stays known: its owners are kept.
            Err(error) if error.stays_reachable() => Err(error),
            Err(error) => {
                self.domain.unregister_memory(run);
                Err(error)
            }
        }
    }

    /// Takes the longest unused entry back, if there is one that nobody holds.
    fn evict_oldest(&self) -> bool {
        let entry = {
            let mut state = self.state();
            let oldest = state.slots.oldest();
            oldest.and_then(|slot| state.take(slot))
        };
        let evicted = entry.is_some();
        if let Some(entry) = entry {
            self.take_back(entry);
        }
        evicted
    }

    /// Unmaps what is in no slot any more, and lets its owners go.
    fn take_back(&self, entry: Entry) {
        let Entry { mapping, owners, len, foreign, .. } = entry;
        let iova = mapping.iova();
        if let Err(error) = self.domain.unmap_static(mapping) {
            tracing::error!(%iova, %error, "a cached buffer is kept for ever");
            self.domain.count_quarantined(len as u64);
            std::mem::forget(owners);
            return;
        }
        if let (true, Some(first)) = (foreign, owners.first()) {
            // SAFETY: as in `miss`: the owners are still there.
            self.domain.unregister_memory(unsafe { DmaMemory::from_raw(first.memory().as_ptr(), len) });
        }
    }
}

impl State {
    /// Takes the entry out, if nobody holds it.
    fn take(&mut self, slot: usize) -> Option<Entry> {
        let entry = self.slots.remove(slot)?;
        self.stats.evictions += 1;
        Some(entry)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Each `Held` has a handle, so nothing is held any more.
        while self.evict_oldest() {}
    }
}

impl fmt::Debug for RegistrationCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegistrationCache")
            .field("budget", &self.0.budget)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
