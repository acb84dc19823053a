//! A unit: 2 MiB of a span, the states of the blocks that lie there, and their addresses.

use super::layout::Layout;
use super::state::State;
use crate::addr::Iova;
use alloc::boxed::Box;
use alloc::collections::TryReserveError;
use alloc::vec::Vec;
use core::ptr::NonNull;

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

/// The states of neighbouring blocks, apart from those of others.
#[derive(Debug)]
#[repr(C, align(64))]
struct Line([State; 64]);

/// Memory that is read without atomics, by threads that have found it through a pointer. The model
/// checker reports a read that does not come after the memory was made.
#[derive(Debug)]
pub(super) struct Made(#[cfg(loom)] loom::cell::UnsafeCell<()>);

impl Made {
    pub(super) fn new() -> Self {
        Self(
            #[cfg(loom)]
            loom::cell::UnsafeCell::new(()),
        )
    }

    #[inline(always)]
    pub(super) fn read(&self) {
        #[cfg(loom)]
        self.0.with(|_| ());
    }
}

/// Makes a list of exactly `count` values.
pub(crate) fn list<T>(
    count: usize,
    value: impl FnMut(usize) -> T,
) -> Result<Vec<T>, TryReserveError> {
    let mut list = Vec::new();
    list.try_reserve_exact(count)?;
    list.extend((0..count).map(value));
    Ok(list)
}

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
    pub(super) first: u32,
    /// The states of all slots.
    lines: Box<[Line]>,
    pub(super) made: Made,
}

// SAFETY: addresses, which are only passed on, and atomics. The pool is shared by its handles.
unsafe impl Send for Unit {}
// SAFETY: as for `Send`.
unsafe impl Sync for Unit {}

impl Unit {
    pub(super) fn new(
        layout: &Layout,
        pool: NonNull<()>,
        base: NonNull<u8>,
        iova: Iova,
        first: u32,
    ) -> Result<Self, TryReserveError> {
        let line = |_| Line(core::array::from_fn(|_| State::new(State::ABSENT)));
        Ok(Self {
            pool,
            base,
            iova,
            first,
            lines: list(layout.slots().div_ceil(64) as usize, line)?.into(),
            made: Made::new(),
        })
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
        let index = layout.slot_at(place)?;
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

    /// Returns the states of all slots.
    #[inline(always)]
    pub(super) fn states(&self) -> &[State] {
        // SAFETY: a `Line` is 64 states, one after the other (`repr(C)`, and 64 bytes long).
        unsafe { core::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * 64) }
    }

    /// Returns the bytes of its states and of itself.
    #[cfg(any(feature = "bench-internals", all(test, not(loom))))]
    pub(super) fn metadata_bytes(&self) -> usize {
        size_of_val(&*self.lines) + size_of::<Self>()
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

    /// Returns both addresses of the block.
    ///
    /// # Safety
    /// The pool has, or had, a chunk with this block; the layout is the pool's.
    #[inline(always)]
    pub(super) unsafe fn block(self, layout: &Layout) -> RawBlock {
        // SAFETY: where a chunk has, or had, the block.
        unsafe { self.unit.block_at(layout.place_of(self.index().into())) }
    }
}
