//! State bytes, the units that have them, and the two tables that find a unit: by address and by number.

use super::layout::Layout;
use super::raw::RawBlock;
use crate::addr::Iova;
use crate::frame::{Frame, Order};
use crate::sync::{AtomicPtr, AtomicU8, AtomicU32, Ordering};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ptr::{NonNull, null_mut};

/// What a block is, in its state byte.
///
/// The number of a free block is in exactly one place: a magazine, the depot, or the hands of the thread that has just taken
/// it out or claimed it. That thread changes the byte by a plain store, as does the holder of a [`Block`](super::Block). A raw
/// free holds nothing but an address, so it must [claim](Self::claim) the block.
///
/// All accesses are relaxed: a number moves between threads through the depot's lock, which orders them; the program
/// orders its own alloc and free of a block.
#[derive(Debug)]
pub(super) struct State(AtomicU8);

impl State {
    /// No chunk has such a block.
    pub(super) const ABSENT: u8 = 0;
    pub(super) const FREE: u8 = 1;
    /// Freed by address.
    pub(super) const RAW: u8 = 2;
    /// Freed by its [`Block`](super::Block).
    pub(super) const OWNED: u8 = 3;
    /// Free, and its number is in the depot. Only while the pool is being shrunk.
    pub(super) const LISTED: u8 = 4;

    pub(super) fn new(state: u8) -> Self {
        Self(AtomicU8::new(state))
    }

    #[inline(always)]
    pub(super) fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }

    /// Changes the state of a block that the caller holds exclusively.
    #[inline(always)]
    pub(super) fn set(&self, state: u8) {
        self.0.store(state, Ordering::Relaxed);
    }

    /// Frees a raw block; `false` if it is not one. Of several callers for one allocation exactly one succeeds, and holds the
    /// block's number from then on.
    ///
    /// A load and a store would not do: a thread that is preempted between the two would free the block under its next owner.
    #[inline(always)]
    pub(super) fn claim(&self) -> bool {
        self.0.compare_exchange(Self::RAW, Self::FREE, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// The states of neighbouring blocks, apart from those of others.
#[derive(Debug)]
#[repr(align(64))]
struct Line([State; 64]);

/// 2 MiB of the span (1 GiB for blocks of more than 2 MiB) in which the pool has had a chunk. Lives as long as the pool.
#[derive(Debug)]
pub(super) struct Unit {
    /// The number of its slot 0.
    pub(super) first: u32,
    base: NonNull<u8>,
    pub(super) iova: Iova,
    lines: Box<[Line]>,
    /// The skew of the chunk that each frame belongs to; empty if all are 0.
    skews: Box<[AtomicU32]>,
}

// SAFETY: an address, which is only passed on, and atomics.
unsafe impl Send for Unit {}
// SAFETY: as for `Send`.
unsafe impl Sync for Unit {}

impl Unit {
    fn new(layout: &Layout, first: u32, base: NonNull<u8>, iova: Iova) -> Self {
        let line = |_| Line(core::array::from_fn(|_| State::new(State::ABSENT)));
        let frames = if layout.is_skewed() { 1 << (layout.unit_shift() - 12) } else { 0 };
        Self {
            first,
            base,
            iova,
            lines: (0..layout.slots().div_ceil(64)).map(line).collect(),
            skews: (0..frames).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// Returns the state of a slot; `None` beyond the last line.
    #[inline(always)]
    pub(super) fn state(&self, slot: u64) -> Option<&State> {
        let line = usize::try_from(slot >> 6).ok().and_then(|line| self.lines.get(line))?;
        line.0.get((slot & 63) as usize)
    }

    #[inline(always)]
    fn skew(&self, place: u64) -> u64 {
        let frame = usize::try_from(place / Frame::BYTES).unwrap_or(usize::MAX);
        self.skews.get(frame).map_or(0, |skew| skew.load(Ordering::Relaxed).into())
    }

    /// Returns the slot of the block that starts at `place` bytes in the unit, and its state; `None` if none can.
    #[inline(always)]
    pub(super) fn slot_at(&self, layout: &Layout, place: u64) -> Option<(u32, &State)> {
        let mut straight = place;
        if !self.skews.is_empty() {
            let skew = self.skew(place);
            straight = place.checked_sub(skew)?;
            // Behind the last block of a chunk, the slot may be one of the next chunk.
            if self.skew(straight + layout.size() - 1) != skew {
                return None;
            }
        }
        let slot = layout.slot_at(straight);
        let state = self.state(slot)?;
        u32::try_from(slot).ok().map(|slot| (slot, state))
    }

    /// Returns where the block with this slot starts, in bytes from the start of the unit.
    #[inline(always)]
    pub(super) fn place_of(&self, layout: &Layout, slot: u64) -> u64 {
        let straight = layout.place_of(slot);
        if self.skews.is_empty() { straight } else { straight + self.skew(straight + layout.size() - 1) }
    }

    /// Returns the block at a place of this unit.
    #[inline(always)]
    pub(super) fn block_at(&self, place: u64) -> RawBlock {
        #[expect(clippy::cast_possible_truncation, reason = "less than 2^30")]
        let bytes = place as usize;
        // SAFETY: the place of a block of a chunk, so it lies in the span (checked when the chunk was added), which is one
        // allocation (contract of `ChunkSource` and of `DmaPool::add_range`).
        let ptr = unsafe { self.base.add(bytes) };
        RawBlock::from_parts(ptr, Iova::new(self.iova.raw().wrapping_add(place)))
    }

    /// The address of its first byte.
    pub(super) fn addr(&self) -> usize {
        self.base.as_ptr().addr()
    }

    fn set_skews(&self, place: u64, bytes: u64, skew: u32) {
        let (first, frames) = (place / Frame::BYTES, bytes.div_ceil(Frame::BYTES));
        let narrow = |value| usize::try_from(value).unwrap_or(usize::MAX);
        for entry in self.skews.iter().skip(narrow(first)).take(narrow(frames)) {
            entry.store(skew, Ordering::Relaxed);
        }
    }
}

/// A range of addresses that chunks can lie in.
#[derive(Debug)]
pub(super) struct Span {
    base: NonNull<u8>,
    iova: Iova,
    pub(super) addr: usize,
    pub(super) len: usize,
    /// By place; null where the pool has had no chunk.
    units: Box<[AtomicPtr<Unit>]>,
    /// The next span of the pool.
    next: AtomicPtr<Span>,
}

// SAFETY: an address, which is only passed on, and atomics.
unsafe impl Send for Span {}
// SAFETY: as for `Send`.
unsafe impl Sync for Span {}

impl Span {
    pub(super) fn new(layout: &Layout, base: NonNull<u8>, len: usize, iova: Iova) -> Self {
        let units = (len as u64).div_ceil(1 << layout.unit_shift());
        Self {
            base,
            iova,
            addr: base.as_ptr().addr(),
            len,
            units: (0..units).map(|_| AtomicPtr::new(null_mut())).collect(),
            next: AtomicPtr::new(null_mut()),
        }
    }
}

/// A chunk of the pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// The numbers of its blocks start here.
    pub(super) first: u32,
    pub(super) blocks: u32,
    pub(super) bytes: u64,
    /// Where it starts in its unit.
    pub(super) place: u64,
    /// What is returned to the source; `None` for a range of the caller.
    pub(super) run: Option<(Frame, Order)>,
}

/// What a block's address leads to.
pub(super) struct Found<'u> {
    pub(super) number: u32,
    pub(super) state: &'u State,
}

/// All units of a pool.
#[derive(Debug)]
pub(super) struct Units {
    first: Span,
    /// How many bits of a number are the slot; the others are the unit.
    slot_bits: u32,
    /// By the unit's part of a number. Replaced by a larger table when it is full.
    by_number: AtomicPtr<AtomicPtr<Unit>>,
}

/// What a pool keeps alive until it ends, and how many units it has. Under the turn to grow.
#[derive(Debug)]
pub(super) struct Kept {
    units: Vec<Arc<Unit>>,
    tables: Vec<Arc<[AtomicPtr<Unit>]>>,
    spans: Vec<Arc<Span>>,
}

impl Kept {
    /// The bytes of the tables and states.
    #[cfg(feature = "bench-internals")]
    pub(super) fn metadata_bytes(&self) -> usize {
        let units = self
            .units
            .iter()
            .map(|unit| size_of_val(&*unit.lines) + size_of_val(&*unit.skews) + size_of::<Unit>());
        let tables = self.tables.iter().map(|table| size_of_val(&**table));
        let spans = self.spans.iter().map(|span| size_of_val(&*span.units));
        units.chain(tables).chain(spans).sum()
    }
}

impl Units {
    pub(super) fn new(layout: &Layout, first: Span) -> (Self, Kept) {
        let slot_bits = layout.slots().next_power_of_two().trailing_zeros();
        let by_number = AtomicPtr::new(null_mut());
        let kept = Kept { units: Vec::new(), tables: Vec::new(), spans: Vec::new() };
        (Self { first, slot_bits, by_number }, kept)
    }

    /// How many bytes of chunks have numbers.
    pub(super) fn limit(&self, layout: &Layout) -> u64 {
        (1 << layout.unit_shift()) << (32 - self.slot_bits)
    }

    pub(super) fn first_span(&self) -> &Span {
        &self.first
    }

    /// Returns the unit of a number that the pool has issued, and the slot there.
    #[inline(always)]
    pub(super) fn unit(&self, number: u32) -> (&Unit, u64) {
        let slot = number & ((1 << self.slot_bits) - 1);
        // Acquire: with the entries that were copied to it. A thread that has a number got it after its unit was entered, so
        // it sees this table or a later one.
        let table = self.by_number.load(Ordering::Acquire);
        // SAFETY: this table, like each later one, has an entry for the unit of each number issued until now (`enter`), and
        // lives as long as the pool (`Kept`).
        let entry = unsafe { &*table.add((number >> self.slot_bits) as usize) };
        // SAFETY: the entry was set before the number was issued; units live as long as the pool (`Kept`).
        let unit = unsafe { &*entry.load(Ordering::Acquire) };
        (unit, slot.into())
    }

    /// Returns the unit that an address lies in, and the place there; `None` if the pool never had a chunk there.
    #[inline(always)]
    pub(super) fn at(&self, layout: &Layout, addr: usize) -> Option<(&Unit, u64)> {
        let mut span = &self.first;
        let mut offset = addr.wrapping_sub(span.addr);
        while offset >= span.len {
            core::hint::cold_path();
            let next = span.next.load(Ordering::Acquire);
            if next.is_null() {
                return None;
            }
            // SAFETY: spans live as long as the pool (`Kept`).
            span = unsafe { &*next };
            offset = addr.wrapping_sub(span.addr);
        }
        let unit = span.units.get(offset >> layout.unit_shift())?.load(Ordering::Acquire);
        if unit.is_null() {
            return None;
        }
        // SAFETY: units live as long as the pool (`Kept`).
        Some((unsafe { &*unit }, (offset & ((1 << layout.unit_shift()) - 1)) as u64))
    }

    /// Returns the number and the state of a block; `None` if its addresses are not those of a block that the pool may have.
    #[inline(always)]
    pub(super) fn find(&self, layout: &Layout, block: RawBlock) -> Option<Found<'_>> {
        let (unit, place) = self.at(layout, block.addr())?;
        if block.iova().raw().wrapping_sub(unit.iova.raw()) != place {
            return None;
        }
        let (slot, state) = unit.slot_at(layout, place)?;
        Some(Found { number: unit.first | slot, state })
    }

    /// Adds a range of the caller, in which chunks can be entered from now on.
    pub(super) fn add_span(&self, kept: &mut Kept, span: Span) -> Arc<Span> {
        let span = Arc::new(span);
        let last = kept.spans.last().map_or(&self.first, |last| last);
        last.next.store(Arc::as_ptr(&span).cast_mut(), Ordering::Release);
        kept.spans.push(Arc::clone(&span));
        span
    }

    /// Returns the unit at `offset` bytes in a span, a new one if necessary; `None` if no numbers are left. Allocates memory.
    fn unit_of(&self, layout: &Layout, kept: &mut Kept, span: &Span, offset: u64) -> Option<Arc<Unit>> {
        let place = offset >> layout.unit_shift() << layout.unit_shift();
        let at = usize::try_from(offset >> layout.unit_shift()).ok()?;
        let by_place = span.units.get(at)?;
        let known = by_place.load(Ordering::Relaxed);
        if !known.is_null() {
            // SAFETY: units live as long as the pool (`Kept`).
            let id = unsafe { &*known }.first >> self.slot_bits;
            return kept.units.get(id as usize).cloned();
        }
        let id = u32::try_from(kept.units.len())
            .ok()
            .filter(|id| u64::from(*id) << self.slot_bits <= u64::from(u32::MAX))?;
        // SAFETY: `offset` lies in the span, which is one allocation, and `place` is not larger.
        let base = unsafe { span.base.add(usize::try_from(place).ok()?) };
        let iova = Iova::new(span.iova.raw().wrapping_add(place));
        let unit = Arc::new(Unit::new(layout, id << self.slot_bits, base, iova));
        let ptr = Arc::as_ptr(&unit).cast_mut();
        let len = kept.tables.last().map_or(0, |table| table.len());
        if id as usize == len {
            let address = |unit: &Arc<Unit>| Arc::as_ptr(unit).cast_mut();
            let copied = |at: usize| kept.units.get(at).map_or(null_mut(), address);
            let table: Arc<[_]> = (0..(2 * len).max(16)).map(|at| AtomicPtr::new(copied(at))).collect();
            self.by_number.store(table.as_ptr().cast_mut(), Ordering::Release);
            kept.tables.push(table);
        }
        if let Some(entry) = kept.tables.last().and_then(|table| table.get(id as usize)) {
            entry.store(ptr, Ordering::Release);
        }
        kept.units.push(Arc::clone(&unit));
        by_place.store(ptr, Ordering::Release);
        Some(unit)
    }

    /// Makes all blocks of `bytes` bytes at `offset` in a span free ones of the pool. They lie in one unit. `None` if no numbers are
    /// left; then nothing has changed. Allocates memory.
    pub(super) fn enter(
        &self,
        layout: &Layout,
        kept: &mut Kept,
        span: &Span,
        (offset, bytes): (u64, u64),
        run: Option<(Frame, Order)>,
    ) -> Option<Chunk> {
        let unit = self.unit_of(layout, kept, span, offset)?;
        let place = offset & ((1 << layout.unit_shift()) - 1);
        let (skew, slot) = layout.chunk_at(place);
        let blocks = layout.blocks_in(bytes);
        unit.set_skews(place, bytes, skew);
        for slot in slot..slot + blocks {
            if let Some(state) = unit.state(slot.into()) {
                state.set(State::FREE);
            }
        }
        Some(Chunk { first: unit.first | slot, blocks, bytes, place, run })
    }

    /// The states of a chunk's blocks, with their numbers.
    pub(super) fn states(&self, chunk: &Chunk) -> impl Iterator<Item = (u32, &State)> {
        let (unit, slot) = self.unit(chunk.first);
        let blocks = u64::from(chunk.blocks);
        (chunk.first..).zip((slot..slot + blocks).filter_map(|slot| unit.state(slot)))
    }
}
