//! State bytes, the units that have them, and the two tables that find a unit: by address, of a
//! [`RawBlock`], and by number.

use super::layout::Layout;
use crate::addr::Iova;
use crate::frame::{Frame, Order};
use crate::sync::{AtomicPtr, AtomicU8, AtomicU32, Ordering, relax};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ptr::{NonNull, null_mut};

/// The addresses of a block, for the processor and for the device. `Copy`, so the pool checks what
/// is freed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawBlock {
    ptr: NonNull<u8>,
    iova: Iova,
}

// SAFETY: two addresses; accessing the memory through them is `unsafe` or goes through `DmaMemory`.
unsafe impl Send for RawBlock {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawBlock {}

impl RawBlock {
    /// Returns the block with these two addresses, for callers that store them elsewhere. Checked
    /// when it is used.
    #[inline(always)]
    pub const fn from_parts(ptr: NonNull<u8>, iova: Iova) -> Self {
        Self { ptr, iova }
    }

    /// Returns the block's address in this process.
    #[inline(always)]
    pub const fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Returns the block's address for the device.
    #[inline(always)]
    pub const fn iova(&self) -> Iova {
        self.iova
    }

    #[inline(always)]
    pub(super) fn addr(&self) -> usize {
        self.ptr.as_ptr().addr()
    }
}

/// The state byte of a block.
///
/// The number of a free block is in exactly one place: a magazine, the depot, or with the
/// thread that has just taken it out or claimed it. That thread changes the byte by a plain store,
/// as does the holder of a [`Block`](super::Block). A raw free holds nothing but an address, so it
/// must [claim](Self::claim) the block.
///
/// A number moves between threads through the depot's lock, which orders the accesses; the program
/// orders its own alloc and free of a block. So they are relaxed, but for what
/// [`claim_if`](Self::claim_if) needs.
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
    /// Raw, and a free of it looks whether it is the block that was meant.
    const CLAIMED: u8 = 5;

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
        // Release: with the skew of the block's chunk, for `claim_if`.
        self.0.store(state, Ordering::Release);
    }

    /// Frees a raw block; `false` if it is not one. Of several callers for one allocation exactly
    /// one succeeds, and holds the block's number from then on.
    ///
    /// A load and a store would not do: a thread that is preempted between the two would free the
    /// block under its next owner.
    #[inline(always)]
    pub(super) fn claim(&self) -> bool {
        self.0.compare_exchange(Self::RAW, Self::FREE, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// As [`claim`](Self::claim), if `is_right` then returns true: it is the block that the caller
    /// means. Otherwise the block stays as it is.
    ///
    /// For layouts in which the block of a slot starts elsewhere in another chunk: while a late
    /// free looked its block up, that chunk may have been released, and another one acquired there.
    pub(super) fn claim_if(&self, is_right: impl FnOnce() -> bool) -> bool {
        let mut attempts = 0;
        // Acquire: with the skew of the chunk that has the block now. The state keeps that chunk.
        while let Err(other) =
            self.0.compare_exchange(Self::RAW, Self::CLAIMED, Ordering::Acquire, Ordering::Relaxed)
        {
            if other != Self::CLAIMED {
                return false;
            }
            relax(attempts);
            attempts = attempts.saturating_add(1);
        }
        let right = is_right();
        self.set(if right { Self::FREE } else { Self::RAW });
        right
    }
}

/// The states of neighbouring blocks, apart from those of others.
#[derive(Debug)]
#[repr(C, align(64))]
struct Line([State; 64]);

/// 2 MiB of the span (1 GiB for blocks of more than 2 MiB) in which the pool has had a chunk. It
/// stays where it is, as long as the pool.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Unit {
    /// The pool, whose type is not known here.
    pool: NonNull<()>,
    base: NonNull<u8>,
    iova: Iova,
    /// The number of slot 0.
    first: u32,
    /// The states of all slots.
    lines: Box<[Line]>,
    /// The skew of the chunk that each frame belongs to; empty if all are 0.
    skews: Box<[AtomicU32]>,
}

// SAFETY: addresses, which are only passed on, and atomics. The pool is shared by its handles.
unsafe impl Send for Unit {}
// SAFETY: as for `Send`.
unsafe impl Sync for Unit {}

impl Unit {
    fn new(layout: &Layout, pool: NonNull<()>, base: NonNull<u8>, iova: Iova, first: u32) -> Self {
        let line = |_| Line(core::array::from_fn(|_| State::new(State::ABSENT)));
        let frames = if layout.is_skewed() { 1 << (layout.unit_shift() - 12) } else { 0 };
        Self {
            pool,
            base,
            iova,
            first,
            lines: (0..layout.slots().div_ceil(64)).map(line).collect(),
            skews: (0..frames).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// Returns the address of the pool that has the unit.
    #[inline(always)]
    pub(super) fn pool(&self) -> NonNull<()> {
        self.pool
    }

    /// Returns the slot with this number.
    ///
    /// # Safety
    /// It is a number of this unit: less than the layout's number of slots above its first.
    #[inline(always)]
    pub(super) unsafe fn slot(&self, number: u32) -> Slot<'_> {
        Slot { unit: self, number }
    }

    /// Returns the slot of the block that starts at `place` bytes in the unit; `None` if none can.
    #[inline(always)]
    pub(super) fn slot_at(&self, layout: &Layout, place: u64) -> Option<Slot<'_>> {
        let mut straight = place;
        if layout.is_skewed() {
            let skew = self.skew(place);
            straight = place.checked_sub(skew)?;
            // Behind the last block of a chunk, the slot may be one of the next chunk.
            if self.skew(straight + layout.size() - 1) != skew {
                return None;
            }
        }
        let index = layout.slot_at(straight)?;
        // SAFETY: `Layout::slot_at` returns indices of the layout only.
        Some(unsafe { self.slot(self.first | index) })
    }

    /// Returns the block at a place of this unit.
    ///
    /// # Safety
    /// The place is in a chunk.
    #[inline(always)]
    pub(super) unsafe fn block_at(&self, place: u64) -> RawBlock {
        #[expect(clippy::cast_possible_truncation, reason = "less than 2^30")]
        let bytes = place as usize;
        // SAFETY: in a chunk (contract), so it lies in the span (checked when the chunk was added),
        // which is one allocation (contract of `ChunkSource` and of `DmaPool::add_range`).
        let ptr = unsafe { self.base.add(bytes) };
        RawBlock::from_parts(ptr, self.iova_at(place))
    }

    /// Returns the device's address of a place.
    #[inline(always)]
    pub(super) fn iova_at(&self, place: u64) -> Iova {
        Iova::new(self.iova.raw().wrapping_add(place))
    }

    /// Returns the address of its first byte.
    pub(super) fn addr(&self) -> usize {
        self.base.as_ptr().addr()
    }

    /// Returns the states of all slots.
    #[inline(always)]
    fn states(&self) -> &[State] {
        // SAFETY: a `Line` is 64 states, one after the other (`repr(C)`, and 64 bytes long).
        unsafe { core::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * 64) }
    }

    fn skew(&self, place: u64) -> u64 {
        let frame = usize::try_from(place / Frame::BYTES).unwrap_or(usize::MAX);
        self.skews.get(frame).map_or(0, |skew| skew.load(Ordering::Relaxed).into())
    }

    fn set_skews(&self, place: u64, bytes: u64, skew: u32) {
        let (first, frames) = (place / Frame::BYTES, bytes.div_ceil(Frame::BYTES));
        let narrow = |value| usize::try_from(value).unwrap_or(usize::MAX);
        for entry in self.skews.iter().skip(narrow(first)).take(narrow(frames)) {
            entry.store(skew, Ordering::Relaxed);
        }
    }
}

/// A slot of a unit: a block that the pool has issued, or may have.
///
/// It carries the number, not the index: so the next alloc, which takes the number out of the
/// magazine, does not wait for the unit.
#[derive(Clone, Copy)]
pub(super) struct Slot<'u> {
    pub(super) unit: &'u Unit,
    number: u32,
}

impl<'u> Slot<'u> {
    /// Returns the number of the block.
    #[inline(always)]
    pub(super) fn number(self) -> u32 {
        self.number
    }

    /// Returns which of the unit's slots it is: less than the layout's number of slots.
    #[inline(always)]
    fn index(self) -> u32 {
        self.number ^ self.unit.first
    }

    /// Returns the state of the block.
    #[inline(always)]
    pub(super) fn state(self) -> &'u State {
        // SAFETY: a unit has states for all slots of the layout, and the number is that of a slot.
        unsafe { self.unit.states().get_unchecked(self.index() as usize) }
    }

    /// Returns where the block starts, in bytes from the start of the unit.
    #[inline(always)]
    pub(super) fn place(self, layout: &Layout) -> u64 {
        if layout.is_plain() {
            return u64::from(self.index()) * layout.size();
        }
        let straight = layout.place_of(self.index().into());
        straight + self.unit.skew(straight + layout.size() - 1)
    }

    /// Returns both addresses of the block.
    #[inline(always)]
    pub(super) fn block(self, layout: &Layout) -> RawBlock {
        // SAFETY: slots of blocks are in chunks.
        unsafe { self.unit.block_at(self.place(layout)) }
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
    /// The run to return to the source; `None` for a range of the caller.
    pub(super) run: Option<(Frame, Order)>,
}

/// All units of a pool.
#[derive(Debug)]
pub(super) struct Units {
    first: Span,
    /// How many bits of a number are the slot; the others are the unit, in the order of first use.
    slot_bits: u32,
    /// The units by number. Replaced by a larger table when it is full.
    by_number: AtomicPtr<AtomicPtr<Unit>>,
}

/// The memory of units, tables and spans, which a pool keeps until it ends. Under the permit
/// to grow.
#[derive(Debug, Default)]
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
        self.most().saturating_sub(kept.units.len() as u64)
    }

    pub(super) fn first_span(&self) -> &Span {
        &self.first
    }

    /// Returns the slot with a number that the pool has issued.
    #[inline(always)]
    pub(super) fn slot(&self, number: u32) -> Slot<'_> {
        // Acquire: with the entries that were copied to the table. The number came from the depot,
        // after its unit was entered, so this is that table or a later one.
        let table = self.by_number.load(Ordering::Acquire);
        #[cfg(loom)]
        assert!(!table.is_null(), "a unit is known before the table is");
        // SAFETY: this table, like each later one, has an entry for each unit (`unit_of`).
        let entry = unsafe { table.add((number >> self.slot_bits) as usize) };
        // SAFETY: as above; tables live as long as the pool (`Kept`), and their entries change by
        // atomics only.
        let unit = unsafe { &*entry }.load(Ordering::Relaxed);
        // SAFETY: set before the number was issued; units live as long as the pool (`Kept`).
        let unit = unsafe { &*unit };
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
            offset = addr.wrapping_sub(span.addr);
        };
        let unit = NonNull::new(entry.load(Ordering::Acquire))?;
        // SAFETY: entries point to units, which live as long as the pool (`Kept`).
        let unit = unsafe { unit.as_ref() };
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

    /// Adds a range of the caller, in which chunks can be entered from now on.
    pub(super) fn add_span(&self, kept: &mut Kept, span: Span) -> Arc<Span> {
        let span = Arc::new(span);
        let last = kept.spans.last().map_or(&self.first, |last| last);
        last.next.store(Arc::as_ptr(&span).cast_mut(), Ordering::Release);
        kept.spans.push(Arc::clone(&span));
        span
    }

    /// Returns the unit at `offset` bytes in a span, a new one if necessary; `None` if no numbers
    /// are left. Allocates memory.
    fn unit_of<'k>(
        &self,
        layout: &Layout,
        pool: NonNull<()>,
        kept: &'k mut Kept,
        span: &'k Span,
        offset: u64,
    ) -> Option<&'k Unit> {
        let place = offset >> layout.unit_shift() << layout.unit_shift();
        let by_place = span.units.get(usize::try_from(offset >> layout.unit_shift()).ok()?)?;
        if let Some(unit) = NonNull::new(by_place.load(Ordering::Relaxed)) {
            // SAFETY: entries point to units of `kept`.
            return Some(unsafe { unit.as_ref() });
        }
        if self.left(kept) == 0 {
            return None;
        }
        let id = kept.units.len();
        let first = u32::try_from((id as u64) << self.slot_bits).ok()?;
        if kept.tables.last().is_none_or(|table| table.len() == id) {
            let old = kept.tables.last().map_or(&[][..], |table| table);
            let copies = old.iter().map(|entry| AtomicPtr::new(entry.load(Ordering::Relaxed)));
            let more = (0..old.len().max(16)).map(|_| AtomicPtr::new(null_mut()));
            let table: Arc<[_]> = copies.chain(more).collect();
            self.by_number.store(table.as_ptr().cast_mut(), Ordering::Release);
            kept.tables.push(table);
        }
        // SAFETY: `offset` lies in the span, which is one allocation, and `place` is not larger.
        let base = unsafe { span.base.add(usize::try_from(place).ok()?) };
        let iova = Iova::new(span.iova.raw().wrapping_add(place));
        let unit = Arc::new(Unit::new(layout, pool, base, iova, first));
        let address = Arc::as_ptr(&unit).cast_mut();
        kept.tables.last()?.get(id)?.store(address, Ordering::Relaxed);
        // Release: with the unit, for a free that guesses the address.
        by_place.store(address, Ordering::Release);
        kept.units.push(unit);
        kept.units.last().map(|unit| &**unit)
    }

    /// Makes all blocks of `bytes` bytes at `offset` in a span free ones of the pool. They lie in
    /// one unit. `None` if no numbers are left; then nothing has changed. Allocates memory.
    pub(super) fn enter(
        &self,
        layout: &Layout,
        pool: NonNull<()>,
        kept: &mut Kept,
        span: &Span,
        (offset, bytes): (u64, u64),
        run: Option<(Frame, Order)>,
    ) -> Option<Chunk> {
        let unit = self.unit_of(layout, pool, kept, span, offset)?;
        let place = offset & ((1 << layout.unit_shift()) - 1);
        let (skew, slot) = layout.chunk_at(place);
        let blocks = layout.blocks_in(bytes);
        unit.set_skews(place, bytes, skew);
        let chunk = Chunk { first: unit.first | slot, blocks, bytes, place, run };
        self.states(&chunk).iter().for_each(|state| state.set(State::FREE));
        Some(chunk)
    }

    /// Returns the states of a chunk's blocks.
    pub(super) fn states(&self, chunk: &Chunk) -> &[State] {
        let first = self.slot(chunk.first);
        let (start, blocks) = (first.index() as usize, chunk.blocks as usize);
        first.unit.states().get(start..start + blocks).unwrap_or_default()
    }

    /// Returns the slots of a chunk's blocks.
    pub(super) fn slots(&self, chunk: &Chunk) -> impl Iterator<Item = Slot<'_>> {
        let unit = self.slot(chunk.first).unit;
        // SAFETY: the numbers of a chunk's blocks follow each other, in one unit.
        (chunk.first..chunk.first + chunk.blocks).map(move |number| unsafe { unit.slot(number) })
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::super::magazine::{Cap, Depot, Magazine};
    use super::*;

    /// 64 GiB of blocks of 16 bytes have all the numbers of 32 bits. The last of them would be
    /// followed by none.
    #[test]
    fn the_last_unit_with_numbers_is_handed_out_whole() {
        const UNIT: usize = 2 << 20;
        let layout = Layout::new(16, 0, 0, (0, Iova::new(0))).unwrap();
        let base = NonNull::dangling();
        for (units, is_left) in [(32_766, true), (32_767, false)] {
            let table = Units::new(&layout, Span::new(&layout, base, UNIT, Iova::new(0)));
            let (mut kept, pool) = (Kept::default(), NonNull::dangling());
            assert_eq!(table.limit(&layout), 32_767 * UNIT as u64);
            // As if the pool had so many units already.
            let unit = Arc::new(Unit::new(&layout, pool, base, Iova::new(0), 0));
            kept.units = core::iter::repeat_n(unit, units).collect();
            kept.tables.push((0..units).map(|_| AtomicPtr::new(null_mut())).collect());
            assert_eq!(table.left(&kept), u64::from(is_left));
            let whole = (0, UNIT as u64);
            let chunk = table.enter(&layout, pool, &mut kept, table.first_span(), whole, None);
            assert_eq!(chunk.is_some(), is_left);
            let Some(chunk) = chunk else { continue };
            let mut depot = Depot::new(Cap::new(0, 16));
            depot.add(chunk);
            assert_eq!(depot.free(), 1 << 17);
            assert_eq!(table.states(&chunk).len(), 1 << 17);
            let mut magazine = Magazine::new(1);
            assert!(depot.refill(&mut magazine));
            assert_eq!(magazine.pop(), Some(chunk.first));
        }
    }
}
