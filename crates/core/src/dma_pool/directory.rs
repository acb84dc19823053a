//! [`Directory`]: finds the chunk of an address in a table that the pool owns; there are no headers in the memory.
//!
//! A word for each 2 MiB of the span: the chunk that covers it, or a table of the smaller chunks there, with a word for each
//! 4 KiB; the lowest bit tells which. So a free finds its chunk by one load, or by two where chunks are small. The words are
//! allocated zeroed, which reserves 4 MiB for a span of 1 TiB and, where the allocator gets zeroed memory from the system, uses
//! 4 KiB for each GiB that has chunks. Look-ups are lock-free; entries change under the lock of the chunks.

use super::geometry::bytes_of;
use super::limits::Limits;
use super::owner::split;
use super::row::{ROW, ROW_BLOCKS, Row};
use super::row_ref::RowRef;
use crate::frame::{Frame, Order};
use crate::sync::{AtomicBool, AtomicPtr, Ordering};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use core::hint::assert_unchecked;
use core::ops::Bound;
use core::ptr::{NonNull, null_mut};

/// A run of frames and the state of its blocks. It is freed with the pool, even if the run is released before: a late, wrong
/// free then finds rows in which nothing is allocated.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Chunk {
    // What a free reads, in one cache line.
    rows: Box<[Row]>,
    /// Its offset in the span, in bytes.
    offset: u64,
    /// The blocks that the fast paths find by a division alone: all that its rows have room for, or none if they are in groups.
    quick: u64,
    pub(super) frame: Frame,
    pub(super) order: Order,
    pub(super) blocks: u32,
    /// Whether the run is acquired now. Written under the lock of the chunks.
    present: AtomicBool,
    /// Whether memory of the chunk may be borrowed without the pool knowing until when. Set by any thread; cleared with
    /// exclusive access to the pool.
    lent: AtomicBool,
}

impl Chunk {
    pub(super) fn new(frame: Frame, order: Order, blocks: u32, even: bool) -> Self {
        let offset = frame.offset();
        let row = |number: u32| Row::new(offset, number, (blocks - number * ROW_BLOCKS).min(ROW_BLOCKS));
        let rows: Box<[Row]> = (0..blocks.div_ceil(ROW_BLOCKS)).map(row).collect();
        let quick = if even { (rows.len() * ROW) as u64 } else { 0 };
        let (present, lent) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { rows, offset, quick, frame, order, blocks, present, lent }
    }

    /// Returns its offset in the span, in bytes.
    #[inline(always)]
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the row of block `index`, and its bit there, if the blocks are at equal distances. It may be past the last one, in
    /// the last row: what is there is never allocated.
    #[inline(always)]
    pub(super) fn quick_row(&self, index: u64) -> Option<(RowRef, u32)> {
        if index >= self.quick {
            return None;
        }
        let (number, bit) = split(index);
        // SAFETY: `index` is below `quick`, at most the rows times the blocks of each, so the row is one of them.
        let row = unsafe { self.rows.get_unchecked(number) };
        // SAFETY: as for `rows`.
        Some((unsafe { RowRef::new(row) }, bit))
    }

    pub(super) fn is_present(&self) -> bool {
        self.present.load(Ordering::Relaxed)
    }

    /// Returns whether a block is allocated, so that its memory can be lent to the caller for longer than that: the chunk
    /// counts as lent from now on.
    pub(super) fn lend(&self, row: RowRef, bit: u32) -> bool {
        // A read-modify-write, so that it has one order with that of `is_lent`: if it comes second, it sees that all blocks are
        // free. Who finds the mark made by another thread has synchronized with that one's read-modify-write.
        if !self.lent.load(Ordering::Acquire) {
            self.lent.swap(true, Ordering::AcqRel);
        }
        row.is_live(bit)
    }

    /// Returns whether memory of the chunk may be borrowed, after all its blocks were seen to be free, in the depot's lock.
    pub(super) fn is_lent(&self) -> bool {
        self.lent.fetch_or(false, Ordering::AcqRel)
    }

    /// Forgets that memory was lent. Requires exclusive access to the pool, which ends all borrows.
    pub(super) fn end_loans(&self) {
        self.lent.store(false, Ordering::Relaxed);
    }

    /// Returns its rows, in ascending order.
    pub(super) fn rows(&self) -> impl Iterator<Item = RowRef> + Clone + '_ {
        // SAFETY: rows live as long as their chunk, and chunks as long as the pool (`Directory::drop`), which
        // outlives its owners and its depot, which hold the references.
        self.rows.iter().map(|row| unsafe { RowRef::new(row) })
    }

    /// Returns one of its rows.
    pub(super) fn row(&self, number: usize) -> Option<RowRef> {
        // SAFETY: as for `rows`.
        self.rows.get(number).map(|row| unsafe { RowRef::new(row) })
    }
}

/// Entries of a level. The models have one page, and loom tracks every entry.
const FAN: usize = if cfg!(loom) { 1 } else { 512 };
const HUGE_SHIFT: u32 = 21;

/// The chunks of one 2 MiB piece, by 4 KiB.
struct Pieces([AtomicPtr<Chunk>; FAN]);

/// A word of the directory: no chunk if it is null, a chunk that covers the 2 MiB if [`COVERS`] is added to the pointer, otherwise
/// the smaller ones.
type Word = AtomicPtr<u8>;
const COVERS: usize = 1;

/// See the module.
pub(super) struct Directory {
    words: Box<[Word]>,
}

/// Returns as many null pointers, without writing them where zeroed memory needs no writing.
fn nulls(count: usize) -> Box<[Word]> {
    #[cfg(loom)]
    return (0..count).map(|_| AtomicPtr::new(null_mut())).collect();
    // SAFETY: an `AtomicPtr` has the representation of a pointer, and a pointer of zero bytes is null.
    #[cfg(not(loom))]
    unsafe {
        Box::new_zeroed_slice(count).assume_init()
    }
}

/// Returns the index of the 2 MiB piece that an offset is in.
#[inline(always)]
fn piece(offset: u64) -> Option<usize> {
    usize::try_from(offset >> HUGE_SHIFT).ok()
}

/// Returns the index of an offset's 4 KiB in its piece.
#[inline(always)]
fn entry(offset: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "nine bits")]
    ((offset >> Frame::BYTES.trailing_zeros()) as usize & (FAN - 1))
}

impl Pieces {
    fn new() -> Self {
        Self(core::array::from_fn(|_| AtomicPtr::new(null_mut())))
    }

    /// Returns the chunk that contains the byte at `offset`.
    #[inline(always)]
    fn find(&self, offset: u64) -> Option<&Chunk> {
        // SAFETY: null, or a chunk's address from `Box::leak` in `Chunks::enter`. Chunks are freed after the last look-up (see
        // `Chunks`), and shared references access them until then. Acquire pairs with the release of the publication.
        unsafe { self.0[entry(offset)].load(Ordering::Acquire).as_ref() }
    }
}

impl Directory {
    /// Creates the directory of a span of `span` bytes.
    pub(super) fn new(span: u64) -> Self {
        // Fits: the span is memory of this process.
        Self { words: nulls(usize::try_from(span.div_ceil(1 << HUGE_SHIFT)).unwrap_or(0)) }
    }

    /// Returns the chunk that contains the byte at `offset`. Lock-free.
    #[inline(always)]
    pub(super) fn find(&self, offset: u64) -> Option<&Chunk> {
        let word = self.words.get(piece(offset)?)?.load(Ordering::Acquire);
        if word.addr() & COVERS != 0 {
            let chunk = word.wrapping_sub(COVERS).cast::<Chunk>();
            // SAFETY: a chunk's address, to which `Chunks::set` added as much. Said here, it is not tested below.
            unsafe { assert_unchecked(!chunk.is_null()) };
            // SAFETY: the same; otherwise as in `Pieces::find`.
            return unsafe { chunk.as_ref() };
        }
        // SAFETY: null, or a table's address from `Box::leak` in `Chunks::pieces_at`; otherwise as for chunks.
        unsafe { word.cast::<Pieces>().as_ref() }?.find(offset)
    }

    /// Returns how many bytes it takes.
    #[cfg(feature = "bench-internals")]
    pub(super) fn metadata_bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    fn set(&self, at: usize, word: *mut u8) {
        // A chunk lies in the span, which has as many words.
        if let Some(slot) = self.words.get(at) {
            slot.store(word, Ordering::Release);
        }
    }
}

/// A chunk's frame and order.
pub(super) type Key = (u32, u8);

/// All chunks that a pool ever had, by frame and order, and the directory's tables of small ones. Changed under the lock of the
/// chunks, and freed with the pool: a look-up in the directory may hold an entry that has been replaced.
#[derive(Default)]
pub(super) struct Chunks {
    all: BTreeMap<Key, NonNull<Chunk>>,
    pieces: BTreeMap<usize, NonNull<Pieces>>,
    bytes: u64,
    blocks: u64,
    pub(super) limits: Limits,
}

// SAFETY: it owns the chunks and tables, which are `Send` and `Sync`.
unsafe impl Send for Chunks {}

impl Chunks {
    /// Returns the chunks that are present.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Chunk> {
        // SAFETY: made by `Box::leak` in `enter`, freed only by `drop`.
        self.all.values().map(|chunk| unsafe { chunk.as_ref() }).filter(|chunk| chunk.is_present())
    }

    /// Returns the size of the chunks that are present, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns how many blocks the chunks have that are present.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns how many bytes the state of all chunks takes, present or not.
    #[cfg(feature = "bench-internals")]
    pub(super) fn metadata_bytes(&self) -> usize {
        // The nodes of the map are at least half full.
        let listed = 2 * self.all.len() * size_of::<(Key, NonNull<Chunk>)>();
        // SAFETY: as in `iter`.
        let chunks = self.all.values().map(|chunk| unsafe { chunk.as_ref() });
        let tables = self.pieces.len() * (size_of::<Pieces>() + 2 * size_of::<(usize, NonNull<Pieces>)>());
        listed + tables + chunks.map(|chunk| size_of_val(chunk) + size_of_val(&*chunk.rows)).sum::<usize>()
    }

    /// Adds a run of frames to the directory. A run that the pool had before reuses its `Chunk`, so their number is bounded.
    pub(super) fn enter(
        &mut self,
        directory: &Directory,
        (frame, order): (Frame, Order),
        blocks: u32,
        even: bool,
    ) -> &Chunk {
        let chunk = *self
            .all
            .entry((frame.index(), order.get()))
            .or_insert_with(|| NonNull::from(Box::leak(Box::new(Chunk::new(frame, order, blocks, even)))));
        self.set(directory, (frame.offset(), order), chunk.as_ptr());
        self.bytes += bytes_of(order);
        self.blocks += u64::from(blocks);
        // SAFETY: as in `iter`.
        let chunk = unsafe { chunk.as_ref() };
        chunk.present.store(true, Ordering::Relaxed);
        chunk
    }

    /// Removes the first chunk after `after` that `may_leave` accepts from the directory; its rows remain. At least
    /// the pool's minimum of blocks stays. The caller releases the run after unlocking. Time proportional to the number of chunks in between.
    pub(super) fn leave_next(
        &mut self,
        directory: &Directory,
        after: Option<Key>,
        may_leave: impl Fn(&Chunk) -> bool,
    ) -> Option<(Frame, Order)> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let all = self.all.range((from, Bound::Unbounded));
        // SAFETY: as in `iter`.
        let mut present = all.map(|(_, chunk)| unsafe { chunk.as_ref() }).filter(|chunk| chunk.is_present());
        let spare = self.blocks.saturating_sub(self.limits.minimum);
        // `may_leave` is second: it takes the rows of the chunk that it accepts.
        let chunk = present.find(|chunk| u64::from(chunk.blocks) <= spare && may_leave(chunk))?;
        let (frame, order, blocks) = (chunk.frame, chunk.order, chunk.blocks);
        chunk.present.store(false, Ordering::Relaxed);
        self.set(directory, (frame.offset(), order), null_mut());
        self.bytes -= bytes_of(order);
        self.blocks -= u64::from(blocks);
        Some((frame, order))
    }

    /// Sets every entry of the directory that covers a run; null removes it.
    fn set(&mut self, directory: &Directory, (offset, order): (u64, Order), chunk: *mut Chunk) {
        let Some(at) = piece(offset) else { return };
        if order < Order::HUGE {
            let pieces = self.pieces_at(directory, at);
            for part in 0..order.frames() {
                pieces.0[entry(offset + u64::from(part) * Frame::BYTES)].store(chunk, Ordering::Release);
            }
            return;
        }
        // A run of 1 GiB covers many words.
        let word = if chunk.is_null() { null_mut() } else { chunk.cast::<u8>().wrapping_add(COVERS) };
        for part in 0..order.frames() / Order::HUGE.frames() {
            directory.set(at + part as usize, word);
        }
    }

    /// Returns the table of the small chunks of 2 MiB, which the directory refers to from now on.
    fn pieces_at(&mut self, directory: &Directory, at: usize) -> &Pieces {
        let pieces =
            *self.pieces.entry(at).or_insert_with(|| NonNull::from(Box::leak(Box::new(Pieces::new()))));
        directory.set(at, pieces.as_ptr().cast());
        // SAFETY: made by `Box::leak` above, freed only by `drop`.
        unsafe { pieces.as_ref() }
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        for chunk in self.all.values() {
            // SAFETY: made by `Box::leak` in `enter`; the pool drops this after everything that refers to rows.
            drop(unsafe { Box::from_raw(chunk.as_ptr()) });
        }
        for pieces in self.pieces.values() {
            // SAFETY: made by `Box::leak` in `pieces_at`; no look-up runs any more.
            drop(unsafe { Box::from_raw(pieces.as_ptr()) });
        }
    }
}
