//! The chunks of a pool, and the two tables that find a unit: by address, of a [`RawBlock`], and by
//! number.

use super::layout::Layout;
use super::state::State;
use super::unit::{Made, RawBlock, Slot, Unit, list};
use crate::addr::Iova;
use crate::frame::{Frame, Order};
use crate::mem::DmaMemory;
use crate::sync::{AtomicPtr, Ordering};
use alloc::boxed::Box;
use alloc::collections::TryReserveError;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ptr::{NonNull, null_mut};

/// A range of addresses that chunks can lie in.
#[derive(Debug)]
pub(super) struct Span {
    base: NonNull<u8>,
    iova: Iova,
    pub(super) addr: usize,
    pub(super) len: usize,
    /// Indexed by place; null where the pool has had no chunk.
    units: Box<[AtomicPtr<Unit>]>,
    /// The next span of the pool.
    next: AtomicPtr<Span>,
    made: Made,
}

// SAFETY: an address, which is only passed on, and atomics.
unsafe impl Send for Span {}
// SAFETY: as for `Send`.
unsafe impl Sync for Span {}

impl Span {
    /// # Safety
    /// The `len` bytes at `base` are one allocation, as long as the pool.
    pub(super) unsafe fn new(
        layout: &Layout,
        base: NonNull<u8>,
        len: usize,
        iova: Iova,
    ) -> Result<Self, TryReserveError> {
        let units = len.div_ceil(1 << layout.unit_shift());
        Ok(Self {
            base,
            iova,
            addr: base.as_ptr().addr(),
            len,
            units: list(units, |_| AtomicPtr::new(null_mut()))?.into(),
            next: AtomicPtr::new(null_mut()),
            made: Made::new(),
        })
    }

    /// Returns the unit at this place in the list; `None` if the pool has had no chunk there.
    fn unit(&self, place: usize) -> Option<NonNull<Unit>> {
        // Relaxed: for the holder of the permit, under which it was stored.
        NonNull::new(self.units.get(place)?.load(Ordering::Relaxed))
    }
}

/// Units that were made together, for a chunk or a range of the caller. Their numbers follow each
/// other.
#[derive(Debug)]
struct Batch {
    /// The number of units created before this batch.
    before: usize,
    units: Vec<Unit>,
}

/// A chunk of the pool.
#[derive(Clone, Debug)]
pub(super) struct Chunk {
    /// Its unit, and the others that were made with that.
    batch: Arc<Batch>,
    /// The index of its unit in the batch.
    unit: usize,
    /// The numbers of its blocks start here.
    first: u32,
    blocks: u32,
    bytes: u64,
    /// Its memory starts here.
    start: NonNull<u8>,
    /// The run to return to the source; `None` for a range of the caller.
    run: Option<(Frame, Order)>,
}

// SAFETY: an address, which is only passed on, and values that are `Send`.
unsafe impl Send for Chunk {}

impl Chunk {
    /// Returns the number of its first block; those of the others follow.
    pub(super) fn first(&self) -> u32 {
        self.first
    }

    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the address of its first byte.
    pub(super) fn addr(&self) -> usize {
        self.start.as_ptr().addr()
    }

    /// Returns the run to return to the source; `None` for a range of the caller.
    pub(super) fn run(&self) -> Option<(Frame, Order)> {
        self.run
    }

    /// Returns whether an address lies in the chunk.
    pub(super) fn covers(&self, addr: usize) -> bool {
        (addr.wrapping_sub(self.addr()) as u64) < self.bytes
    }

    /// Returns the slots of its blocks.
    pub(super) fn slots(&self) -> impl Iterator<Item = Slot<'_>> {
        let unit = self.batch.units.get(self.unit);
        let slot = |unit, number| {
            // SAFETY: the numbers of a chunk's blocks are those of slots of its unit (`enter`,
            // which alone makes chunks).
            unsafe { Unit::slot(unit, number) }
        };
        let numbers = self.first..self.first + self.blocks;
        unit.into_iter().flat_map(move |unit| numbers.clone().map(move |number| slot(unit, number)))
    }

    /// Returns the states of its blocks.
    pub(super) fn states(&self) -> &[State] {
        let of_unit = |unit: &'_ Unit| (self.first ^ unit.first) as usize;
        let Some(unit) = self.batch.units.get(self.unit) else { return &[] };
        let start = of_unit(unit);
        unit.states().get(start..start + self.blocks as usize).unwrap_or_default()
    }

    /// Returns its memory.
    ///
    /// # Safety
    /// As long as it is used, the chunk is the pool's, and no owner has a block of it.
    pub(super) unsafe fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: the source keeps the run valid and gives it to no other caller while it is the
        // pool's (contract of `ChunkSource`; of `DmaPool::add_range`), and nothing else of the pool
        // uses it (contract).
        unsafe { DmaMemory::from_raw(self.start, usize::try_from(self.bytes).unwrap_or(0)) }
    }
}

/// An entry of the table of units by number.
#[derive(Debug)]
struct Entry {
    unit: AtomicPtr<Unit>,
    made: Made,
}

impl Entry {
    fn new(unit: *mut Unit) -> Self {
        Self { unit: AtomicPtr::new(unit), made: Made::new() }
    }
}

/// The length of the first table by number: one under the model checker, so that it is replaced.
const FIRST_TABLE: usize = if cfg!(loom) { 1 } else { 16 };

/// All units of a pool.
#[derive(Debug)]
pub(super) struct Units {
    first: Span,
    /// The number of low bits that hold the slot; the others are the unit, in the order of first
    /// use.
    slot_bits: u32,
    /// The units by number. Replaced by a larger table when it is full.
    by_number: AtomicPtr<Entry>,
}

/// The memory of units, tables and spans, which a pool keeps until it ends. Under the permit
/// to grow.
#[derive(Debug, Default)]
pub(super) struct Kept {
    batches: Vec<Arc<Batch>>,
    tables: Vec<Vec<Entry>>,
    spans: Vec<Arc<Span>>,
    /// The number of units.
    units: usize,
}

impl Kept {
    /// The bytes of the tables and states.
    #[cfg(any(feature = "bench-internals", all(test, not(loom))))]
    pub(super) fn metadata_bytes(&self) -> usize {
        let units = self.batches.iter().flat_map(|batch| &batch.units);
        let units = units.map(Unit::metadata_bytes);
        let tables = self.tables.iter().map(|table| size_of_val(&**table));
        let spans = self.spans.iter().map(|span| size_of_val(&*span.units));
        units.chain(tables).chain(spans).sum()
    }

    /// Returns the batch with the unit of this number.
    fn batch(&self, unit: usize) -> Option<&Arc<Batch>> {
        let after = self.batches.partition_point(|batch| batch.before <= unit);
        self.batches.get(after.checked_sub(1)?)
    }
}

/// Why blocks were not entered: nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EnterError {
    /// Too few numbers are left.
    Numbers,
    /// There is no memory for their states, or for the tables that lead to them.
    NoMemory,
}

impl From<TryReserveError> for EnterError {
    fn from(_: TryReserveError) -> Self {
        Self::NoMemory
    }
}

impl Units {
    pub(super) fn new(layout: &Layout, first: Span) -> Self {
        let slot_bits = layout.slots().next_power_of_two().trailing_zeros();
        let by_number = AtomicPtr::new(null_mut());
        Self { first, slot_bits, by_number }
    }

    /// Returns how many bytes of chunks have numbers.
    pub(super) fn limit(&self, layout: &Layout) -> u64 {
        self.most() << layout.unit_shift()
    }

    /// Returns how many units have numbers: one less than there are, as the number after a chunk's
    /// last must be one too.
    fn most(&self) -> u64 {
        (1 << (32 - self.slot_bits)) - 1
    }

    /// Returns how many more units there can be.
    pub(super) fn left(&self, kept: &Kept) -> u64 {
        self.most().saturating_sub(kept.units as u64)
    }

    pub(super) fn first_span(&self) -> &Span {
        &self.first
    }

    /// Returns the slot with a number.
    ///
    /// # Safety
    /// The number was [entered](Self::enter), and the caller took it from the depot, or from a
    /// holder that did.
    #[inline(always)]
    pub(super) unsafe fn slot(&self, number: u32) -> Slot<'_> {
        // Acquire: with the entries that were copied to the table. The number came from the depot,
        // after its unit was entered, so this is that table or a later one.
        let table = self.by_number.load(Ordering::Acquire);
        // SAFETY: this table, like each later one, has an entry for each unit (`enter`).
        let entry = unsafe { table.add((number >> self.slot_bits) as usize) };
        // SAFETY: as above; tables live as long as the pool (`Kept`), and their entries change by
        // atomics only.
        let entry = unsafe { &*entry };
        entry.made.read();
        // SAFETY: set before the number was issued; units live as long as the pool (`Kept`).
        let unit = unsafe { &*entry.unit.load(Ordering::Relaxed) };
        unit.made.read();
        // SAFETY: the number was issued for a slot of this unit.
        unsafe { unit.slot(number) }
    }

    /// Returns the unit that an address lies in and the place there; `None` if the pool never had a
    /// chunk there.
    #[inline(always)]
    pub(super) fn at(&self, layout: &Layout, addr: usize) -> Option<(&Unit, u64)> {
        let mut span = &self.first;
        let mut offset = addr.wrapping_sub(span.addr);
        let entry = loop {
            if offset < span.len
                && let Some(entry) = span.units.get(offset >> layout.unit_shift())
            {
                break entry;
            }
            core::hint::cold_path();
            let next = span.next.load(Ordering::Acquire);
            if next.is_null() {
                return None;
            }
            // SAFETY: spans live as long as the pool (`Kept`).
            span = unsafe { &*next };
            span.made.read();
            offset = addr.wrapping_sub(span.addr);
        };
        let unit = NonNull::new(entry.load(Ordering::Acquire))?;
        // SAFETY: entries point to units, which live as long as the pool (`Kept`).
        let unit = unsafe { unit.as_ref() };
        unit.made.read();
        Some((unit, (offset & ((1 << layout.unit_shift()) - 1)) as u64))
    }

    /// Returns the slot of a block; `None` if its addresses are not those of a block that the pool
    /// may have.
    #[inline(always)]
    pub(super) fn find(&self, layout: &Layout, block: RawBlock) -> Option<Slot<'_>> {
        let (unit, place) = self.at(layout, block.addr())?;
        if block.iova() != unit.iova_at(place) {
            return None;
        }
        unit.slot_at(layout, place)
    }

    /// Turns all blocks of `bytes` bytes at `offset` in a span other than the first into free
    /// blocks of the pool: one chunk for each unit that they lie in, of which all but the first
    /// have none yet. All or nothing.
    fn enter_in(
        &self,
        layout: &Layout,
        pool: NonNull<()>,
        kept: &mut Kept,
        span: &Span,
        (offset, bytes): (u64, u64),
        run: Option<(Frame, Order)>,
    ) -> Result<Vec<Chunk>, EnterError> {
        let (shift, unit_bytes) = (layout.unit_shift(), 1u64 << layout.unit_shift());
        let narrow = |value: u64| usize::try_from(value).map_err(|_| EnterError::Numbers);
        let (first, last) = (narrow(offset >> shift)?, narrow((offset + bytes - 1) >> shift)?);
        let count = last - first + 1;
        let mut chunks = Vec::new();
        chunks.try_reserve_exact(count)?;
        let known = span.unit(first);
        let (batch, skip) = match known {
            Some(unit) => {
                // SAFETY: entries point to units of `kept`.
                let unit = unsafe { unit.as_ref() };
                let id = (unit.first >> self.slot_bits) as usize;
                let batch = kept.batch(id).ok_or(EnterError::Numbers)?;
                (Arc::clone(batch), id - batch.before)
            }
            None => (self.make_units(layout, pool, kept, span, (first, count))?, 0),
        };
        for (at, unit) in batch.units.iter().enumerate().skip(skip).take(count) {
            let start = offset.max(((first + at - skip) as u64) << shift);
            let place = start & (unit_bytes - 1);
            let bytes = (offset + bytes - start).min(unit_bytes - place);
            let (slot, blocks) = layout.chunk_at(place, bytes);
            // SAFETY: in the span.
            let memory = unsafe { unit.block_at(place) }.as_ptr();
            chunks.push(Chunk {
                batch: Arc::clone(&batch),
                unit: at,
                first: unit.first | slot,
                blocks,
                bytes,
                start: memory,
                run,
            });
        }
        chunks
            .iter()
            .flat_map(|chunk: &Chunk| chunk.states())
            .for_each(|state| state.set(State::FREE));
        Ok(chunks)
    }

    /// Creates `count` units of a span, from `first` on, where it has none, and enters them in the
    /// tables. All or nothing.
    fn make_units(
        &self,
        layout: &Layout,
        pool: NonNull<()>,
        kept: &mut Kept,
        span: &Span,
        (first, count): (usize, usize),
    ) -> Result<Arc<Batch>, EnterError> {
        if count as u64 > self.left(kept) {
            return Err(EnterError::Numbers);
        }
        // First as a whole: what cannot be had in one piece is refused before any of it is written.
        let states = size_of::<Unit>() + layout.slots() as usize;
        Vec::<u8>::new().try_reserve_exact(count.saturating_mul(states))?;
        let mut units = Vec::new();
        units.try_reserve_exact(count)?;
        for at in 0..count {
            let place = (first + at) << layout.unit_shift();
            // SAFETY: in the span, which is one allocation.
            let base = unsafe { span.base.add(place) };
            let iova = Iova::new(span.iova.raw().wrapping_add(place as u64));
            let id = ((kept.units + at) as u64) << self.slot_bits;
            let number = u32::try_from(id).map_err(|_| EnterError::Numbers)?;
            units.push(Unit::new(layout, pool, base, iova, number)?);
        }
        let needed = kept.units + count;
        let old = kept.tables.last().map_or(&[][..], |table| table);
        let larger = if old.len() < needed {
            let len = needed.next_power_of_two().max(FIRST_TABLE);
            let copy =
                |at| old.get(at).map_or(null_mut(), |e: &Entry| e.unit.load(Ordering::Relaxed));
            Some(list(len, |at| Entry::new(copy(at)))?)
        } else {
            None
        };
        kept.tables.try_reserve(1)?;
        kept.batches.try_reserve(1)?;
        // Nothing fails from here on.
        let batch = Arc::new(Batch { before: kept.units, units });
        if let Some(table) = larger {
            self.by_number.store(table.as_ptr().cast_mut(), Ordering::Release);
            kept.tables.push(table);
        }
        let table = kept.tables.last().map_or(&[][..], |table| table);
        let by_number = table.iter().skip(kept.units);
        let by_place = span.units.iter().skip(first);
        for (unit, (number, place)) in batch.units.iter().zip(by_number.zip(by_place)) {
            let unit = core::ptr::from_ref(unit).cast_mut();
            number.unit.store(unit, Ordering::Relaxed);
            // Release: with the unit, for a free that guesses the address.
            place.store(unit, Ordering::Release);
        }
        kept.batches.push(Arc::clone(&batch));
        kept.units = needed;
        Ok(batch)
    }

    /// Turns all blocks of `bytes` bytes at `offset` in the first span, which lie in one unit, into
    /// free blocks of the pool. All or nothing.
    pub(super) fn enter(
        &self,
        layout: &Layout,
        pool: NonNull<()>,
        kept: &mut Kept,
        place: (u64, u64),
        run: (Frame, Order),
    ) -> Result<Option<Chunk>, EnterError> {
        let chunks = self.enter_in(layout, pool, kept, &self.first, place, Some(run))?;
        Ok(chunks.into_iter().next())
    }

    /// Adds a range of the caller, all of whose first `bytes` bytes, not 0, become blocks. All or
    /// nothing.
    pub(super) fn enter_range(
        &self,
        layout: &Layout,
        pool: NonNull<()>,
        kept: &mut Kept,
        span: Span,
        bytes: u64,
    ) -> Result<Vec<Chunk>, EnterError> {
        kept.spans.try_reserve(1)?;
        let span = Arc::new(span);
        let chunks = self.enter_in(layout, pool, kept, &span, (0, bytes), None)?;
        let last = kept.spans.last().map_or(&self.first, |last| last);
        last.next.store(Arc::as_ptr(&span).cast_mut(), Ordering::Release);
        kept.spans.push(span);
        Ok(chunks)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::super::magazine::{Cap, Depot, magazine};
    use super::*;

    /// 64 GiB of blocks of 16 bytes have all the numbers of 32 bits. The last of them would be
    /// followed by none.
    #[test]
    fn the_last_unit_with_numbers_is_handed_out_whole() {
        const UNIT: usize = 2 << 20;
        let layout = Layout::new(16, 0, 0, (0, Iova::new(0))).unwrap();
        let base = NonNull::dangling();
        for (units, is_left) in [(32_766, true), (32_767, false)] {
            // SAFETY: nothing uses the memory.
            let span = unsafe { Span::new(&layout, base, UNIT, Iova::new(0)) };
            let table = Units::new(&layout, span.unwrap());
            let (mut kept, pool) = (Kept::default(), NonNull::dangling());
            assert_eq!(table.limit(&layout), 32_767 * UNIT as u64);
            // As if the pool had so many units already.
            kept.units = units;
            kept.tables.push((0..units).map(|_| Entry::new(null_mut())).collect());
            assert_eq!(table.left(&kept), u64::from(is_left));
            let run = (Frame::new(0).unwrap(), Order::HUGE);
            let chunk = table.enter(&layout, pool, &mut kept, (0, UNIT as u64), run);
            assert_eq!(chunk.is_ok(), is_left);
            let Ok(Some(chunk)) = chunk else { continue };
            let mut depot = Depot::new(Cap::new(0, 16));
            depot.add(chunk.clone());
            assert_eq!(depot.free(), 1 << 17);
            assert_eq!(chunk.states().len(), 1 << 17);
            let mut magazine = magazine(1);
            assert!(depot.refill(&mut magazine));
            assert_eq!(magazine.pop(), Some(chunk.first()));
            // SAFETY: entered above.
            let slot = unsafe { table.slot(chunk.first()) };
            assert_eq!((slot.number(), slot.state().get()), (chunk.first(), State::FREE));
        }
    }
}
