//! State bytes, the units that have them, and the two tables that find a unit: by address and by
//! number.

use super::layout::Layout;
use super::raw::RawBlock;
use crate::addr::Iova;
use crate::frame::{Frame, Order};
use crate::sync::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, relax};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ptr::{NonNull, null_mut};

/// What a block is, in its state byte.
///
/// The number of a free block is in exactly one place: a magazine, the depot, or the hands of the
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

    /// As [`claim`](Self::claim), if `is_right` says then that it is the block that was meant; if
    /// not, the block stays as it is.
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

/// 2 MiB of the span (1 GiB for blocks of more than 2 MiB) in which the pool has had a chunk: what
/// the hot paths need. Set once, before its number is known to other threads.
#[derive(Debug)]
#[repr(C, align(32))]
pub(super) struct Unit {
    /// The states of its slots.
    states: AtomicPtr<State>,
    base: AtomicPtr<u8>,
    iova: AtomicU64,
    rest: AtomicPtr<Rest>,
}

/// The rest of a unit. Lives as long as the pool.
#[derive(Debug)]
struct Rest {
    lines: Box<[Line]>,
    /// The skew of the chunk that each frame belongs to; empty if all are 0.
    skews: Box<[AtomicU32]>,
}

impl Rest {
    fn new(layout: &Layout) -> Self {
        let line = |_| Line(core::array::from_fn(|_| State::new(State::ABSENT)));
        let frames = if layout.is_skewed() { 1 << (layout.unit_shift() - 12) } else { 0 };
        Self {
            lines: (0..layout.slots().div_ceil(64)).map(line).collect(),
            skews: (0..frames).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    #[inline(always)]
    fn skew(&self, place: u64) -> u64 {
        let frame = usize::try_from(place / Frame::BYTES).unwrap_or(usize::MAX);
        self.skews.get(frame).map_or(0, |skew| skew.load(Ordering::Relaxed).into())
    }
}

impl Unit {
    fn empty() -> Self {
        Self {
            states: AtomicPtr::new(null_mut()),
            base: AtomicPtr::new(null_mut()),
            iova: AtomicU64::new(0),
            rest: AtomicPtr::new(null_mut()),
        }
    }

    fn set(&self, rest: &Arc<Rest>, base: NonNull<u8>, iova: Iova) {
        self.states.store(NonNull::from(&*rest.lines).cast().as_ptr(), Ordering::Relaxed);
        self.base.store(base.as_ptr(), Ordering::Relaxed);
        self.iova.store(iova.raw(), Ordering::Relaxed);
        self.rest.store(Arc::as_ptr(rest).cast_mut(), Ordering::Relaxed);
    }

    fn copy(&self) -> Self {
        let copy = Self::empty();
        copy.states.store(self.states.load(Ordering::Relaxed), Ordering::Relaxed);
        copy.base.store(self.base.load(Ordering::Relaxed), Ordering::Relaxed);
        copy.iova.store(self.iova.load(Ordering::Relaxed), Ordering::Relaxed);
        copy.rest.store(self.rest.load(Ordering::Relaxed), Ordering::Relaxed);
        copy
    }

    fn rest(&self) -> &Rest {
        // SAFETY: a unit is set before another thread can find it, and its rest lives as long as
        // the pool (`Kept`).
        unsafe { &*self.rest.load(Ordering::Relaxed) }
    }

    /// Returns the state of a slot.
    ///
    /// # Safety
    /// The unit has the slot: it is that of an issued number, or less than the layout's number of
    /// slots.
    #[inline(always)]
    pub(super) unsafe fn state_of(&self, slot: u64) -> &State {
        #[expect(clippy::cast_possible_truncation, reason = "at most 2^17")]
        let at = slot as usize;
        // SAFETY: `states` points to the states of all slots, one after the other (`Line` is
        // `repr(C)`).
        let state = unsafe { self.states.load(Ordering::Relaxed).add(at) };
        // SAFETY: as above; they live as long as the pool (`Kept`) and are only accessed by
        // atomics.
        unsafe { &*state }
    }

    /// Returns the slot of the block that starts at `place` bytes in the unit, and its state;
    /// `None` if none can.
    pub(super) fn slot_at(&self, layout: &Layout, place: u64) -> Option<(u32, &State)> {
        let (rest, mut straight) = (self.rest(), place);
        if !rest.skews.is_empty() {
            let skew = rest.skew(place);
            straight = place.checked_sub(skew)?;
            // Behind the last block of a chunk, the slot may be one of the next chunk.
            if rest.skew(straight + layout.size() - 1) != skew {
                return None;
            }
        }
        let slot = layout.slot_at(straight);
        let narrow = u32::try_from(slot).ok().filter(|&slot| slot < layout.slots())?;
        // SAFETY: less than the number of slots.
        Some((narrow, unsafe { self.state_of(slot) }))
    }

    /// Returns where the block with this slot starts, in bytes from the start of the unit.
    pub(super) fn place_of(&self, layout: &Layout, slot: u64) -> u64 {
        let (rest, straight) = (self.rest(), layout.place_of(slot));
        if rest.skews.is_empty() {
            straight
        } else {
            straight + rest.skew(straight + layout.size() - 1)
        }
    }

    /// Returns the block at a place of this unit.
    pub(super) fn block_at(&self, place: u64) -> RawBlock {
        Site { unit: self, place }.raw()
    }

    /// The address of its first byte.
    #[inline(always)]
    pub(super) fn addr(&self) -> usize {
        self.base.load(Ordering::Relaxed).addr()
    }

    /// The address of its first byte for the device.
    #[inline(always)]
    pub(super) fn iova(&self) -> Iova {
        Iova::new(self.iova.load(Ordering::Relaxed))
    }

    fn set_skews(&self, place: u64, bytes: u64, skew: u32) {
        let (first, frames) = (place / Frame::BYTES, bytes.div_ceil(Frame::BYTES));
        let narrow = |value| usize::try_from(value).unwrap_or(usize::MAX);
        for entry in self.rest().skews.iter().skip(narrow(first)).take(narrow(frames)) {
            entry.store(skew, Ordering::Relaxed);
        }
    }
}

/// Where a block of a chunk lies. Its addresses are computed when they are asked for.
#[derive(Clone, Copy)]
pub(super) struct Site<'u> {
    pub(super) unit: &'u Unit,
    pub(super) place: u64,
}

impl Site<'_> {
    #[inline(always)]
    pub(super) fn ptr(self) -> NonNull<u8> {
        #[expect(clippy::cast_possible_truncation, reason = "less than 2^30")]
        let bytes = self.place as usize;
        // SAFETY: the place of a block of a chunk, so it lies in the span (checked when the chunk
        // was added), which is one allocation (contract of `ChunkSource` and of
        // `DmaPool::add_range`).
        let ptr = unsafe { self.unit.base.load(Ordering::Relaxed).add(bytes) };
        // SAFETY: the base is not null, and the block lies in the same allocation.
        unsafe { NonNull::new_unchecked(ptr) }
    }

    #[inline(always)]
    pub(super) fn raw(self) -> RawBlock {
        RawBlock::from_parts(self.ptr(), Iova::new(self.unit.iova().raw().wrapping_add(self.place)))
    }
}

/// A range of addresses that chunks can lie in.
#[derive(Debug)]
pub(super) struct Span {
    base: NonNull<u8>,
    iova: Iova,
    pub(super) addr: usize,
    pub(super) len: usize,
    /// By place: one more than the unit's part of a number; 0 where the pool has had no chunk.
    units: Box<[AtomicU32]>,
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
            units: (0..units).map(|_| AtomicU32::new(0)).collect(),
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
    slot_mask: u32,
    /// By the unit's part of a number. Replaced by a larger table when it is full.
    by_number: AtomicPtr<Unit>,
}

/// What a pool keeps alive until it ends, and how many units it has. Under the turn to grow.
#[derive(Debug)]
pub(super) struct Kept {
    units: Vec<Arc<Rest>>,
    tables: Vec<Arc<[Unit]>>,
    spans: Vec<Arc<Span>>,
}

impl Kept {
    /// The bytes of the tables and states.
    #[cfg(feature = "bench-internals")]
    pub(super) fn metadata_bytes(&self) -> usize {
        let units = self
            .units
            .iter()
            .map(|unit| size_of_val(&*unit.lines) + size_of_val(&*unit.skews) + size_of::<Rest>());
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
        (Self { first, slot_bits, slot_mask: (1 << slot_bits) - 1, by_number }, kept)
    }

    /// How many bytes of chunks have numbers.
    pub(super) fn limit(&self, layout: &Layout) -> u64 {
        ((1 << (32 - self.slot_bits)) - 1) << layout.unit_shift()
    }

    pub(super) fn first_span(&self) -> &Span {
        &self.first
    }

    /// Returns the unit with this part of a number.
    ///
    /// # Safety
    /// The pool has it.
    #[inline(always)]
    unsafe fn by_id(&self, id: u32) -> &Unit {
        // Acquire: with what was copied to the table. A thread that knows of a unit learnt of it
        // after the unit was entered, so it sees that table or a later one.
        let table = self.by_number.load(Ordering::Acquire);
        // A reference to nothing would pass as "no such unit".
        #[cfg(loom)]
        assert!(!table.is_null(), "a unit is known before the table is");
        // SAFETY: this table, like each later one, has an entry for each unit (`unit_of`,
        // contract).
        let unit = unsafe { table.add(id as usize) };
        // SAFETY: as above; tables live as long as the pool (`Kept`), and their entries change by
        // atomics only.
        unsafe { &*unit }
    }

    /// Returns the unit of a number that the pool has issued, and the slot there.
    #[inline(always)]
    pub(super) fn unit(&self, number: u32) -> (&Unit, u64) {
        let slot = number & self.slot_mask;
        // SAFETY: numbers are issued for units that the pool has.
        (unsafe { self.by_id(number >> self.slot_bits) }, slot.into())
    }

    /// Returns the number of slot 0 in the unit of a number.
    pub(super) fn first_of(&self, number: u32) -> u32 {
        number & !self.slot_mask
    }

    /// Returns the state of a number that the pool has issued.
    #[inline(always)]
    pub(super) fn state(&self, number: u32) -> &State {
        let (unit, slot) = self.unit(number);
        // SAFETY: the slot of an issued number.
        unsafe { unit.state_of(slot) }
    }

    /// Returns the unit that an address lies in, its part of a number and the place there; `None`
    /// if the pool never had a chunk there.
    #[inline(always)]
    pub(super) fn at(&self, layout: &Layout, addr: usize) -> Option<(&Unit, u32, u64)> {
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
        let id = entry.load(Ordering::Acquire).checked_sub(1)?;
        // SAFETY: the entry names a unit that the pool has.
        let unit = unsafe { self.by_id(id) };
        Some((unit, id << self.slot_bits, (offset & ((1 << layout.unit_shift()) - 1)) as u64))
    }

    /// Returns the number and the state of a block; `None` if its addresses are not those of a
    /// block that the pool may have.
    #[inline(always)]
    pub(super) fn find(&self, layout: &Layout, block: RawBlock) -> Option<Found<'_>> {
        let (unit, first, place) = self.at(layout, block.addr())?;
        if block.iova().raw().wrapping_sub(unit.iova().raw()) != place {
            return None;
        }
        let (slot, state) = unit.slot_at(layout, place)?;
        Some(Found { number: first | slot, state })
    }

    /// As [`find`](Self::find), in a pool without groups and skews.
    #[inline(always)]
    pub(super) fn find_plain(&self, layout: &Layout, block: RawBlock) -> Option<Found<'_>> {
        let (unit, first, place) = self.at(layout, block.addr())?;
        let slot = layout.plain_slot_at(place);
        if slot >= layout.slots().into()
            || block.iova().raw().wrapping_sub(unit.iova().raw()) != place
        {
            return None;
        }
        // SAFETY: less than the number of slots.
        let state = unsafe { unit.state_of(slot) };
        #[expect(clippy::cast_possible_truncation, reason = "less than the number of slots")]
        let slot = slot as u32;
        Some(Found { number: first | slot, state })
    }

    /// Adds a range of the caller, in which chunks can be entered from now on.
    pub(super) fn add_span(&self, kept: &mut Kept, span: Span) -> Arc<Span> {
        let span = Arc::new(span);
        let last = kept.spans.last().map_or(&self.first, |last| last);
        last.next.store(Arc::as_ptr(&span).cast_mut(), Ordering::Release);
        kept.spans.push(Arc::clone(&span));
        span
    }

    /// Returns the unit at `offset` bytes in a span, a new one if necessary, and its part of a
    /// number; `None` if no numbers are left. Allocates memory.
    fn unit_of(
        &self,
        layout: &Layout,
        kept: &mut Kept,
        span: &Span,
        offset: u64,
    ) -> Option<(&Unit, u32)> {
        let place = offset >> layout.unit_shift() << layout.unit_shift();
        let by_place = span.units.get(usize::try_from(offset >> layout.unit_shift()).ok()?)?;
        if let Some(id) = by_place.load(Ordering::Relaxed).checked_sub(1) {
            // SAFETY: the entry names a unit that the pool has.
            return Some((unsafe { self.by_id(id) }, id << self.slot_bits));
        }
        let id = u32::try_from(kept.units.len()).ok()?;
        // Not the last one either: the number after a chunk's last must be one too.
        if (u64::from(id) + 1) << self.slot_bits > u64::from(u32::MAX) {
            return None;
        }
        // SAFETY: `offset` lies in the span, which is one allocation, and `place` is not larger.
        let base = unsafe { span.base.add(usize::try_from(place).ok()?) };
        let rest = Arc::new(Rest::new(layout));
        let full = kept.tables.last().is_none_or(|table| table.len() == id as usize);
        if full {
            let old = kept.tables.last().map_or(&[][..], |table| table);
            let more = (0..old.len().max(16)).map(|_| Unit::empty());
            let table: Arc<[Unit]> = old.iter().map(Unit::copy).chain(more).collect();
            self.by_number.store(table.as_ptr().cast_mut(), Ordering::Release);
            kept.tables.push(table);
        }
        // SAFETY: the table that is current has an entry for it, which is set before the unit is
        // known to another thread.
        let unit = unsafe { self.by_id(id) };
        unit.set(&rest, base, Iova::new(span.iova.raw().wrapping_add(place)));
        kept.units.push(rest);
        by_place.store(id + 1, Ordering::Release);
        Some((unit, id << self.slot_bits))
    }

    /// Makes all blocks of `bytes` bytes at `offset` in a span free ones of the pool. They lie in
    /// one unit. `None` if no numbers are left; then nothing has changed. Allocates memory.
    pub(super) fn enter(
        &self,
        layout: &Layout,
        kept: &mut Kept,
        span: &Span,
        (offset, bytes): (u64, u64),
        run: Option<(Frame, Order)>,
    ) -> Option<Chunk> {
        let (unit, first) = self.unit_of(layout, kept, span, offset)?;
        let place = offset & ((1 << layout.unit_shift()) - 1);
        let (skew, slot) = layout.chunk_at(place);
        let blocks = layout.blocks_in(bytes);
        unit.set_skews(place, bytes, skew);
        for slot in slot..slot + blocks {
            // SAFETY: a slot of the layout.
            unsafe { unit.state_of(slot.into()) }.set(State::FREE);
        }
        Some(Chunk { first: first | slot, blocks, bytes, place, run })
    }

    /// The states of a chunk's blocks, with their numbers.
    pub(super) fn states(&self, chunk: &Chunk) -> impl Iterator<Item = (u32, &State)> {
        let (unit, slot) = self.unit(chunk.first);
        // SAFETY: slots of issued numbers.
        let states =
            (slot..slot + u64::from(chunk.blocks)).map(|slot| unsafe { unit.state_of(slot) });
        (chunk.first..).zip(states)
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
            let (table, mut kept) =
                Units::new(&layout, Span::new(&layout, base, UNIT, Iova::new(0)));
            assert_eq!(table.limit(&layout), 32_767 * UNIT as u64);
            // As if the pool had so many units already.
            kept.units = core::iter::repeat_n(Arc::new(Rest::new(&layout)), units).collect();
            kept.tables.push((0..units).map(|_| Unit::empty()).collect());
            let chunk = table.enter(&layout, &mut kept, table.first_span(), (0, UNIT as u64), None);
            assert_eq!(chunk.is_some(), is_left);
            let Some(chunk) = chunk else { continue };
            let mut depot = Depot::new(Cap::new(0, 16));
            depot.add(chunk);
            assert_eq!(depot.free(), 1 << 17);
            assert_eq!(table.states(&chunk).count(), 1 << 17);
            let mut magazine = Magazine::new(1);
            assert!(depot.refill(&mut magazine));
            assert_eq!(magazine.pop(), Some(chunk.first));
        }
    }
}
