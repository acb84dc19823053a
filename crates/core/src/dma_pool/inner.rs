//! [`Inner`]: a pool's state, what an owner does with it, and [`Handle`], which keeps it alive.

use super::debug::History;
use super::directory::{Chunk, Kept, Units};
use super::error::{AllocError, FreeError};
use super::layout::Layout;
use super::magazine::{Depot, Owner};
use super::source::ChunkSource;
use super::state::State;
use super::unit::{RawBlock, Slot, Unit};
use crate::frame::Order;
use crate::mem::DmaMemory;
use crate::sync::{AtomicBool, AtomicU64, CachePadded, Mutex, Ordering, SpinLock, relax};
use alloc::boxed::Box;
use alloc::string::String;
use core::hint::cold_path;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;

/// See the module. Locks are taken in the order front, depot, history; none is held while the
/// source runs.
pub(super) struct Inner {
    pub(super) layout: Layout,
    pub(super) units: Units,
    /// The history of debug mode.
    pub(super) history: Option<Box<History>>,
    pub(super) source: Option<Box<dyn ChunkSource>>,
    pub(super) name: String,
    pub(super) minimum: u64,
    pub(super) maximum: u64,
    /// Rises when an alloc fails: owners that notice return their cached blocks.
    pub(super) pressure: AtomicU64,
    /// The number of [`Handle`]s.
    pub(super) handles: AtomicU64,
    pub(super) growth: CachePadded<Growth>,
    pub(super) front: CachePadded<SpinLock<Front>>,
    pub(super) depot: CachePadded<Mutex<Depot>>,
}

/// The owner for calls that are made without a `PoolLocal`.
pub(super) struct Front {
    pub(super) owner: Owner,
    /// The number of `Block`s that keep the pool alive after its last handle; 0 while a handle
    /// exists.
    blocks_left: u64,
    /// The last handle, for the last of those blocks: its pointer may free the pool, and those of
    /// units may not.
    last: Option<ManuallyDrop<Handle>>,
}

impl Front {
    pub(super) fn new(owner: Owner) -> Self {
        Self { owner, blocks_left: 0, last: None }
    }
}

/// The permit to grow or shrink, and the state that belongs to its holder.
pub(super) struct Growth {
    taken: AtomicBool,
    /// Locked by the holder of the permit only.
    state: Mutex<GrowthState>,
}

#[derive(Default)]
pub(super) struct GrowthState {
    pub(super) kept: Kept,
    /// The order of the last chunk, if the source refused a larger one before: the next one is at
    /// most twice as large, since each refusal of a source that searches costs more than a small
    /// chunk.
    pub(super) scarce: Option<Order>,
}

/// Holds the permit until it is dropped.
pub(super) struct Permit<'g>(&'g Growth);

impl Growth {
    pub(super) fn new() -> Self {
        Self { taken: AtomicBool::new(false), state: Mutex::default() }
    }

    /// The bytes of the pool's tables and states.
    #[cfg(any(feature = "bench-internals", all(test, not(loom))))]
    pub(super) fn metadata_bytes(&self) -> usize {
        self.state.lock().kept.metadata_bytes()
    }

    /// Takes the permit, if no other thread has it.
    pub(super) fn try_permit(&self) -> Option<Permit<'_>> {
        let free =
            self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        free.then(|| Permit(self))
    }

    /// Waits for the permit and takes it.
    pub(super) fn permit(&self) -> Permit<'_> {
        let mut attempts = 0;
        loop {
            if let Some(permit) = self.try_permit() {
                return permit;
            }
            relax(attempts);
            attempts = attempts.saturating_add(1);
        }
    }
}

impl Permit<'_> {
    /// Returns the state, whose lock no other thread waits for.
    pub(super) fn state(&self) -> impl DerefMut<Target = GrowthState> + '_ {
        self.0.state.lock()
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

/// Keeps a pool alive: each `DmaPool` and each `PoolLocal` has one.
///
/// A `Block` has none, so that its alloc and free count nothing. Instead the last handle counts the
/// states of all blocks, under the front's lock. Without a `PoolLocal`, a block is freed under that
/// lock only, and without any handle none is allocated, so the count is exact; the last of those
/// blocks ends the pool.
pub(super) struct Handle(NonNull<Inner>);

const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<Inner>();
};

// SAFETY: as for `Arc`: a handle gives `&Inner` to its thread, and the last one may drop it there;
// `Inner` is `Send` and `Sync`.
unsafe impl Send for Handle {}
// SAFETY: as for `Send`; a shared reference to a handle can be cloned elsewhere.
unsafe impl Sync for Handle {}

impl Handle {
    /// Moves a pool to the heap; `inner.handles` is 1.
    pub(super) fn new(inner: Inner) -> Self {
        Self(NonNull::from(Box::leak(Box::new(inner))))
    }

    /// Whether a unit is one of this pool.
    #[inline(always)]
    pub(super) fn has(&self, unit: &Unit) -> bool {
        Inner::of(unit) == self.0
    }
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        // Relaxed: this handle keeps the pool meanwhile. 2^64 handles do not fit into memory, and
        // forgetting so many takes centuries.
        self.handles.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.handles.fetch_sub(1, Ordering::Release) == 1 {
            // Acquire: all uses by other handles come before the end. (A load, because
            // ThreadSanitizer does not see fences.)
            self.handles.load(Ordering::Acquire);
            // SAFETY: this is the last handle, and is not used again.
            unsafe { Inner::last_handle(self.0) };
        }
    }
}

impl Deref for Handle {
    type Target = Inner;

    #[inline(always)]
    fn deref(&self) -> &Inner {
        // SAFETY: from `Box::leak`, and freed after the last handle.
        unsafe { self.0.as_ref() }
    }
}

impl Inner {
    /// Ends a pool that no `Block` keeps alive; the last of those that do ends it otherwise.
    ///
    /// # Safety
    /// The caller's was the last handle, and is not used again.
    unsafe fn last_handle(this: NonNull<Self>) {
        // SAFETY: nothing has ended the pool before.
        let inner = unsafe { this.as_ref() };
        let mut front = inner.front.lock();
        front.blocks_left = inner.count(|state| state == State::OWNED);
        let ends = front.blocks_left == 0;
        front.last = Some(ManuallyDrop::new(Handle(this)));
        drop(front);
        if ends {
            // SAFETY: from `Handle::new`; no handle and no `Block` is left that could use it.
            drop(unsafe { Box::from_raw(this.as_ptr()) });
        }
    }

    /// Returns the pool of a unit.
    #[inline(always)]
    pub(super) fn of(unit: &Unit) -> NonNull<Self> {
        unit.pool().cast()
    }

    /// Frees the block of a `Block` through the front, or makes it raw, and ends the pool if that
    /// was the last to keep it alive.
    ///
    /// # Safety
    /// The unit and the number are those of a `Block`, which is not used again.
    pub(super) unsafe fn give_up(unit: NonNull<Unit>, number: u32, to: u8) {
        // SAFETY: the block has kept the pool and its units alive until here.
        let unit = unsafe { unit.as_ref() };
        let this = Self::of(unit);
        // SAFETY: as above.
        let inner = unsafe { this.as_ref() };
        let mut front = inner.front.lock();
        // SAFETY: the block's number is one of its unit.
        let slot = unsafe { unit.slot(number) };
        match to {
            State::FREE => inner.free_owned(&mut front.owner, slot),
            other => slot.state().set(other),
        }
        let last = if front.blocks_left == 1 { front.last.take() } else { None };
        front.blocks_left = front.blocks_left.saturating_sub(1);
        drop(front);
        if let Some(last) = last {
            // SAFETY: from `Handle::new`; there is no handle, and this was the last `Block`.
            drop(unsafe { Box::from_raw(last.0.as_ptr()) });
        }
    }

    /// Returns how many blocks have such a state. Takes the depot's lock.
    pub(super) fn count(&self, is_such: impl Fn(u8) -> bool) -> u64 {
        let depot = self.depot.lock();
        let states = depot.chunks.iter().flat_map(Chunk::states);
        states.filter(|state| is_such(state.get())).count() as u64
    }

    /// Calls `each` with every chunk, without a lock. Returns whether no chunk was removed meanwhile:
    /// else as many as were removed may have been left out. Allocates nothing.
    pub(super) fn each_chunk(&self, mut each: impl FnMut(&Chunk)) -> bool {
        const AT_ONCE: usize = 32;
        let (mut next, mut removals, mut all) = (0, None, true);
        loop {
            let mut some = [const { None }; AT_ONCE];
            let depot = self.depot.lock();
            all &= *removals.get_or_insert(depot.removals) == depot.removals;
            for (place, chunk) in some.iter_mut().zip(depot.chunks.iter().skip(next)) {
                *place = Some(chunk.clone());
            }
            drop(depot);
            some.iter().flatten().for_each(&mut each);
            next += AT_ONCE;
            if some.last().is_none_or(Option::is_none) {
                return all;
            }
        }
    }

    /// Allocates a block in the form `RAW` or `OWNED`.
    #[inline(always)]
    pub(super) fn alloc(&self, owner: &mut Owner, form: u8) -> Result<Slot<'_>, AllocError> {
        loop {
            if let Some(number) = owner.current.pop() {
                // SAFETY: just taken from the magazine.
                return Ok(unsafe { self.issue(owner, number, form) });
            }
            // Once for each magazine.
            cold_path();
            self.refill(owner)?;
        }
    }

    /// Allocates a block through the front, whose lock is not held while the pool grows.
    pub(super) fn alloc_shared(&self, form: u8) -> Result<Slot<'_>, AllocError> {
        let attempt = || {
            let owner = &mut self.front.lock().owner;
            loop {
                if let Some(number) = owner.current.pop() {
                    // SAFETY: just taken from the magazine.
                    return Some(unsafe { self.issue(owner, number, form) });
                }
                if !self.exchange_for_alloc(owner) {
                    return None;
                }
            }
        };
        attempt().map_or_else(|| self.or_grow(attempt), Ok)
    }

    /// Allocates the block with a number.
    ///
    /// # Safety
    /// The number was taken from a magazine of the owner, or is going to be before anything else
    /// is taken from it.
    #[inline(always)]
    pub(super) unsafe fn issue(&self, owner: &Owner, number: u32, form: u8) -> Slot<'_> {
        // SAFETY: magazines have numbers of the depot's.
        let slot = unsafe { self.units.slot(number) };
        if let Some(history) = &self.history {
            cold_path();
            // Before its state says that it is allocated: a wrong free waits for no fill.
            // SAFETY: the number of a block that the pool has.
            let (block, memory) = unsafe { self.place(slot) };
            history.on_alloc(block, memory, owner.number);
        }
        slot.state().set(form);
        slot
    }

    /// Frees a raw block.
    #[inline(always)]
    pub(super) fn free_raw(&self, owner: &mut Owner, block: RawBlock) -> Result<(), FreeError> {
        let found = self.units.find(&self.layout, block);
        let Some(slot) = found.filter(|slot| slot.state().claim()) else {
            return Err(self.refusal(block));
        };
        self.put(owner, slot);
        Ok(())
    }

    /// Frees the block of a `Block`, which the caller consumes.
    #[inline(always)]
    pub(super) fn free_owned(&self, owner: &mut Owner, slot: Slot<'_>) {
        slot.state().set(State::FREE);
        self.put(owner, slot);
    }

    /// Adds the number of a block that was just freed.
    #[inline(always)]
    fn put(&self, owner: &mut Owner, slot: Slot<'_>) {
        self.record_free(owner.number, slot);
        while !owner.current.push(slot.number()) {
            cold_path();
            self.exchange_for_free(owner);
        }
    }

    /// Tells debug mode of a free, before another owner can have the block.
    #[inline(always)]
    fn record_free(&self, owner: u32, slot: Slot<'_>) {
        if let Some(history) = &self.history {
            cold_path();
            // SAFETY: the caller has just freed the block, and its number is in no magazine yet.
            let (block, memory) = unsafe { self.place(slot) };
            history.on_free(block, memory, owner);
        }
    }

    /// Refills an owner's current magazine, from a new chunk if necessary.
    #[cold]
    #[inline(never)]
    pub(super) fn refill(&self, owner: &mut Owner) -> Result<(), AllocError> {
        self.or_grow(|| {
            if !self.exchange_for_alloc(owner) {
                self.drain_front();
                if !self.exchange_for_alloc(owner) {
                    return None;
                }
            }
            Some(())
        })
    }

    /// Refills an owner's empty current magazine from its other one, or from the depot. `false` if
    /// there are no numbers.
    #[cold]
    #[inline(never)]
    fn exchange_for_alloc(&self, owner: &mut Owner) -> bool {
        owner.swap_for_alloc() || self.depot.lock().refill(&mut owner.current)
    }

    /// Makes room in the current magazine, which is full.
    #[cold]
    #[inline(never)]
    fn exchange_for_free(&self, owner: &mut Owner) {
        let pressure = self.pressure.load(Ordering::Relaxed);
        if pressure != owner.pressure {
            owner.pressure = pressure;
            return self.depot.lock().flush(owner);
        }
        if !owner.swap_for_free() {
            self.depot.lock().take_all(&mut owner.current);
        }
    }

    /// Moves the front's cached blocks to the depot.
    pub(super) fn drain_front(&self) {
        let owner = &mut self.front.lock().owner;
        self.depot.lock().flush(owner);
    }

    /// Makes owners return their cached blocks when they next exchange a magazine.
    pub(super) fn raise_pressure(&self) {
        self.pressure.fetch_add(1, Ordering::Relaxed);
    }

    /// The memory of a block: its bytes and no others.
    ///
    /// # Safety
    /// A block of the pool starts there. As long as the memory is used, the block is allocated, or
    /// its number is the caller's, or the caller keeps its chunk from being released.
    #[inline(always)]
    pub(super) unsafe fn memory_at(&self, at: NonNull<u8>) -> DmaMemory<'_> {
        // Below 2^31.
        let bytes = usize::try_from(self.layout.size()).unwrap_or(usize::MAX);
        // SAFETY: the block lies in a chunk, which the source keeps valid and gives to no other
        // caller (contract of `ChunkSource`; of `DmaPool::add_range`) until it is released: not
        // while the block is allocated, taken out or kept (contract).
        unsafe { DmaMemory::from_raw(at, bytes) }
    }

    /// Both addresses of a block, and its memory.
    ///
    /// # Safety
    /// A chunk of the pool has the block; as for [`memory_at`](Self::memory_at).
    pub(super) unsafe fn place(&self, slot: Slot<'_>) -> (RawBlock, DmaMemory<'_>) {
        // SAFETY: of this pool, which has its chunk (contract).
        let block = unsafe { slot.block(&self.layout) };
        // SAFETY: contract.
        (block, unsafe { self.memory_at(block.as_ptr()) })
    }

    /// The error of a free that was refused.
    #[cold]
    #[inline(never)]
    fn refusal(&self, block: RawBlock) -> FreeError {
        let (addr, span) = (block.addr(), self.units.first_span());
        let foreign =
            FreeError::Foreign { addr, start: span.addr, end: span.addr.saturating_add(span.len) };
        let Some((unit, place)) = self.units.at(&self.layout, addr) else { return foreign };
        let chunk = self.depot.lock().chunks.iter().find(|chunk| chunk.covers(addr)).cloned();
        let Some(chunk) = chunk else { return foreign };
        let slot = unit.slot_at(&self.layout, place);
        let Some(state) = slot.map(|slot| slot.state().get()).filter(|&s| s != State::ABSENT)
        else {
            let (count, size) = (chunk.blocks(), self.layout.size());
            return FreeError::Misaligned { addr, start: chunk.addr(), count, size };
        };
        let expected = unit.iova_at(place);
        if block.iova() != expected {
            return FreeError::WrongIova { addr, iova: block.iova(), expected };
        }
        match state {
            State::OWNED => FreeError::Owned { addr },
            _ => FreeError::DoubleFree { addr },
        }
    }
}
