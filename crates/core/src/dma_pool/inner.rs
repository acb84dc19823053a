//! [`Inner`]: the state that the handles of a pool share, and what an owner does with it.

use super::debug::Watch;
use super::error::{AllocError, FreeError};
use super::layout::Layout;
use super::magazine::{Depot, Owner};
use super::raw::RawBlock;
use super::source::ChunkSource;
use super::unit::{Chunk, Found, Kept, Site, State, Units};
use crate::frame::Order;
use crate::mem::DmaMemory;
use crate::sync::{AtomicBool, AtomicU32, CachePadded, Mutex, Ordering, SpinLock, relax};
use alloc::boxed::Box;
use alloc::string::String;
use core::hint::cold_path;
use core::ptr::NonNull;

/// See the module. Locks are taken in the order front, depot, watch; none is held while the source
/// runs.
pub(super) struct Inner {
    /// Whether a block's place is its slot times its size, and no debug mode: one check for what
    /// few pools have.
    pub(super) plain: bool,
    pub(super) layout: Layout,
    pub(super) units: Units,
    pub(super) watch: Option<Box<Watch>>,
    pub(super) source: Option<Box<dyn ChunkSource>>,
    pub(super) name: String,
    pub(super) minimum: u64,
    pub(super) maximum: u64,
    /// Rises when an alloc fails: owners that notice return what they cache.
    pub(super) pressure: AtomicU32,
    pub(super) growth: CachePadded<Growth>,
    /// The owner for calls that are made without a `Local`.
    pub(super) front: CachePadded<SpinLock<Owner>>,
    pub(super) depot: CachePadded<Mutex<Depot>>,
}

/// The turn to grow or shrink, and what its holder needs.
pub(super) struct Growth {
    taken: AtomicBool,
    /// Locked by the holder of the turn only.
    pub(super) state: Mutex<GrowthState>,
}

pub(super) struct GrowthState {
    pub(super) kept: Kept,
    /// The order of the last chunk, if the source refused a larger one before: the next one is at
    /// most twice as large, since each refusal of a source that searches costs more than a small
    /// chunk.
    pub(super) scarce: Option<Order>,
}

/// Holds the turn until it is dropped.
pub(super) struct Turn<'g>(pub(super) &'g Growth);

impl Growth {
    pub(super) fn new(kept: Kept) -> Self {
        Self {
            taken: AtomicBool::new(false),
            state: Mutex::new(GrowthState { kept, scarce: None }),
        }
    }

    /// The bytes of the pool's tables and states.
    #[cfg(feature = "bench-internals")]
    pub(super) fn metadata_bytes(&self) -> usize {
        self.state.lock().kept.metadata_bytes()
    }

    /// Takes the turn, if no other thread has it.
    pub(super) fn turn(&self) -> Option<Turn<'_>> {
        let free =
            self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        free.then(|| Turn(self))
    }

    /// Waits for the turn and takes it.
    pub(super) fn wait(&self) -> Turn<'_> {
        let mut attempts = 0;
        loop {
            if let Some(turn) = self.turn() {
                return turn;
            }
            relax(attempts);
            attempts = attempts.saturating_add(1);
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

impl Inner {
    /// Allocates a block in the form `RAW` or `OWNED`; returns its number.
    #[inline(always)]
    pub(super) fn alloc(&self, owner: &mut Owner, form: u8) -> Result<u32, AllocError> {
        loop {
            if let Some(number) = owner.current.pop() {
                self.hand_out(owner, number, form);
                return Ok(number);
            }
            // Once for each magazine.
            cold_path();
            self.restock(owner)?;
        }
    }

    /// Allocates a block through the front, whose lock is not held while the pool grows.
    pub(super) fn alloc_shared(&self, form: u8) -> Result<u32, AllocError> {
        let draw = || {
            let mut front = self.front.lock();
            loop {
                if let Some(number) = front.current.pop() {
                    self.hand_out(&front, number, form);
                    return Some(number);
                }
                if !self.exchange_for_alloc(&mut front) {
                    return None;
                }
            }
        };
        draw().map_or_else(|| self.or_grow(draw), Ok)
    }

    /// Allocates a block whose number was taken from a magazine.
    #[inline(always)]
    pub(super) fn hand_out(&self, owner: &Owner, number: u32, form: u8) {
        if !self.plain {
            self.note_alloc(owner, number);
        }
        self.units.state(number).set(form);
    }

    #[inline(never)]
    fn note_alloc(&self, owner: &Owner, number: u32) {
        if let Some(watch) = &self.watch {
            let block = self.site(number).raw();
            watch.on_alloc(block, self.memory_at(block.as_ptr()), owner.tag);
        }
    }

    /// Where the block with this number lies.
    #[inline(always)]
    pub(super) fn site(&self, number: u32) -> Site<'_> {
        let (unit, slot) = self.units.unit(number);
        let place =
            if self.plain { slot * self.layout.size() } else { unit.place_of(&self.layout, slot) };
        Site { unit, place }
    }

    /// Frees a raw block.
    #[inline(always)]
    pub(super) fn free_raw(&self, owner: &mut Owner, block: RawBlock) -> Result<(), FreeError> {
        let claimed = if self.plain {
            self.units.find_plain(&self.layout, block).filter(|found| found.state.claim())
        } else {
            let is_right = |number| self.site(number).raw() == block;
            let found = self.units.find(&self.layout, block);
            found.filter(|found| found.state.claim_if(|| is_right(found.number)))
        };
        let Some(Found { number, .. }) = claimed else { return Err(self.refusal(block)) };
        self.put(owner, number);
        Ok(())
    }

    /// Frees the block of a `Block`, which the caller gives up.
    #[inline(always)]
    pub(super) fn free_owned(&self, owner: &mut Owner, number: u32) {
        self.units.state(number).set(State::FREE);
        self.put(owner, number);
    }

    /// Adds the number of a block that was just freed.
    #[inline(always)]
    fn put(&self, owner: &mut Owner, number: u32) {
        if !self.plain {
            self.note_free(owner, number);
        }
        while !owner.current.push(number) {
            cold_path();
            self.exchange_for_free(owner);
        }
    }

    #[inline(never)]
    fn note_free(&self, owner: &Owner, number: u32) {
        if let Some(watch) = &self.watch {
            let block = self.site(number).raw();
            watch.on_free(block, self.memory_at(block.as_ptr()), owner.tag);
        }
    }

    /// Gives an owner numbers, from a new chunk if necessary.
    #[cold]
    #[inline(never)]
    pub(super) fn restock(&self, owner: &mut Owner) -> Result<(), AllocError> {
        self.or_grow(|| {
            let stocked = self.exchange_for_alloc(owner)
                || self.drain_front() && self.exchange_for_alloc(owner);
            stocked.then_some(())
        })
    }

    /// Gives an owner whose current magazine is empty the numbers of its other one, or of the
    /// depot. `false` if there are none.
    #[cold]
    #[inline(never)]
    fn exchange_for_alloc(&self, owner: &mut Owner) -> bool {
        owner.turn_over_for_alloc() || self.depot.lock().refill(&mut owner.current)
    }

    /// Makes place in the current magazine, which is full.
    #[cold]
    #[inline(never)]
    fn exchange_for_free(&self, owner: &mut Owner) {
        let pressure = self.pressure.load(Ordering::Relaxed);
        if pressure != owner.pressure {
            owner.pressure = pressure;
            return self.depot.lock().flush(owner);
        }
        if !owner.turn_over_for_free() {
            self.depot.lock().take_all(&mut owner.current);
        }
    }

    /// Moves what the front caches to the depot. Returns `true`.
    pub(super) fn drain_front(&self) -> bool {
        let mut front = self.front.lock();
        self.depot.lock().flush(&mut front);
        true
    }

    /// Has owners return what they cache when they next exchange a magazine.
    pub(super) fn press(&self) {
        self.pressure.fetch_add(1, Ordering::Relaxed);
    }

    /// The memory of a block that the pool has issued: that block's bytes and no others. To be used
    /// while the block is allocated, or its number is the caller's.
    #[inline(always)]
    pub(super) fn memory_at(&self, at: NonNull<u8>) -> DmaMemory<'_> {
        // Below 2^31.
        let bytes = usize::try_from(self.layout.size()).unwrap_or(usize::MAX);
        // SAFETY: the block lies in a chunk, which the source keeps valid and gives to no other
        // caller (contract of `ChunkSource`; of `DmaPool::add_range`) until it is released: not
        // while the block is allocated or taken out.
        unsafe { DmaMemory::from_raw(at, bytes) }
    }

    /// The error of a free that was refused.
    #[cold]
    #[inline(never)]
    fn refusal(&self, block: RawBlock) -> FreeError {
        let addr = block.addr();
        let span = self.units.first_span();
        let foreign =
            FreeError::Foreign { addr, start: span.addr, end: span.addr.saturating_add(span.len) };
        let Some((unit, first, place)) = self.units.at(&self.layout, addr) else { return foreign };
        let covers = |chunk: &&Chunk| {
            self.units.first_of(chunk.first) == first
                && place.wrapping_sub(chunk.place) < chunk.bytes
        };
        let Some(chunk) = self.depot.lock().chunks.iter().find(covers).copied() else {
            return foreign;
        };
        let Some((_, state)) =
            unit.slot_at(&self.layout, place).filter(|(_, state)| state.get() != State::ABSENT)
        else {
            let start = unit.addr().wrapping_add(usize::try_from(chunk.place).unwrap_or(0));
            let (blocks, size) = (chunk.blocks, self.layout.size());
            return FreeError::Misaligned { addr, chunk: start, blocks, size };
        };
        let expected = unit.block_at(place).iova();
        if block.iova() != expected {
            return FreeError::WrongIova { addr, iova: block.iova(), expected };
        }
        match state.get() {
            State::OWNED => FreeError::Owned { addr },
            _ => FreeError::DoubleFree { addr },
        }
    }

    /// Calls `each` with the blocks of a chunk and their states.
    pub(super) fn for_each_block(&self, chunk: &Chunk, mut each: impl FnMut(RawBlock, u8)) {
        let (unit, first) = self.units.unit(chunk.first);
        for (slot, (_, state)) in (first..).zip(self.units.states(chunk)) {
            each(unit.block_at(unit.place_of(&self.layout, slot)), state.get());
        }
    }

    /// The memory of a chunk.
    pub(super) fn chunk_memory(&self, chunk: &Chunk) -> DmaMemory<'_> {
        let (unit, _) = self.units.unit(chunk.first);
        let start: NonNull<u8> = unit.block_at(chunk.place).as_ptr();
        // SAFETY: the pool's, as in `memory_at`: all of its blocks are free, and no owner has one
        // yet.
        unsafe { DmaMemory::from_raw(start, usize::try_from(chunk.bytes).unwrap_or(0)) }
    }
}
