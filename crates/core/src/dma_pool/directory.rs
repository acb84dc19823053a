//! From an address to its chunk: a table that the pool owns, never a header in the memory.
//!
//! Three levels, each filled in where a chunk is first entered: a pointer for each GiB of the span, below it one for each
//! 2 MiB, and where a 2 MiB piece has smaller chunks, one for each 4 KiB. A span of 1 TiB costs 8 KiB plus 8 KiB for
//! each GiB in which the pool has chunks. Lookups are lock-free; entries are made under the lock of the chunks.

use super::geometry::bytes_of;
use super::row::{ROW_BLOCKS, Row};
use super::row_ref::RowRef;
use crate::frame::{Frame, Order};
use crate::sync::{AtomicBool, AtomicPtr, Ordering};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use core::ops::Bound;
use core::ptr::{NonNull, null_mut};

/// A run of frames and the state of its blocks. It stays until the pool is dropped, although the run may be released: a
/// late and mistaken free then finds rows in which nothing is allocated.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) frame: Frame,
    pub(super) order: Order,
    pub(super) blocks: u32,
    /// Whether the run is acquired now. Written under the lock of the chunks.
    present: AtomicBool,
    rows: Box<[Row]>,
}

impl Chunk {
    pub(super) fn new(frame: Frame, order: Order, blocks: u32) -> Self {
        let row =
            |number: u32| Row::new(frame.offset(), number, (blocks - number * ROW_BLOCKS).min(ROW_BLOCKS));
        let rows = (0..blocks.div_ceil(ROW_BLOCKS)).map(row).collect();
        Self { frame, order, blocks, present: AtomicBool::new(false), rows }
    }

    /// Where it starts, in bytes from the start of the span.
    #[inline(always)]
    pub(super) fn offset(&self) -> u64 {
        self.frame.offset()
    }

    pub(super) fn is_present(&self) -> bool {
        self.present.load(Ordering::Relaxed)
    }

    /// Its rows, in ascending order.
    pub(super) fn rows(&self) -> impl Iterator<Item = RowRef> + Clone + '_ {
        // SAFETY: rows live as long as their chunk, and chunks as long as the pool (`Directory::drop`), which
        // outlives its owners and its depot, which hold the references.
        self.rows.iter().map(|row| unsafe { RowRef::new(row) })
    }

    /// One of its rows.
    #[inline(always)]
    pub(super) fn row(&self, number: usize) -> Option<RowRef> {
        // SAFETY: as for `rows`.
        self.rows.get(number).map(|row| unsafe { RowRef::new(row) })
    }
}

/// Entries of a level. A model checker has one page, and looks at every entry.
const FAN: usize = if cfg!(loom) { 1 } else { 512 };
const HUGE_SHIFT: u32 = 21;
const ROOT_SHIFT: u32 = 30;

/// The chunks of one 2 MiB piece, by 4 KiB.
struct Pieces([AtomicPtr<Chunk>; FAN]);

/// The chunks of one GiB, by 2 MiB.
struct Leaf {
    huge: [AtomicPtr<Chunk>; FAN],
    pieces: [AtomicPtr<Pieces>; FAN],
}

fn nulls<T>() -> [AtomicPtr<T>; FAN] {
    core::array::from_fn(|_| AtomicPtr::new(null_mut()))
}

/// See the module.
pub(super) struct Directory {
    root: Box<[AtomicPtr<Leaf>]>,
}

/// The bits of an offset that say which entry of a level.
#[inline(always)]
fn entry(offset: u64, shift: u32) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "nine bits")]
    ((offset >> shift) as usize & (FAN - 1))
}

/// What a pointer of the directory points to.
#[inline(always)]
fn follow<T>(at: &AtomicPtr<T>) -> Option<&T> {
    // SAFETY: null, or a pointer from `Box::into_raw` that is freed only by the directory's drop, which excludes the
    // borrow; after it is published the content is reached only by shared references. Acquire pairs with the release
    // of the publication.
    unsafe { at.load(Ordering::Acquire).as_ref() }
}

/// The same, created if there is none. Under the lock of the chunks, so no other thread creates it.
fn follow_or_make<T>(at: &AtomicPtr<T>, make: impl FnOnce() -> T) -> &T {
    if follow(at).is_none() {
        at.store(Box::into_raw(Box::new(make())), Ordering::Release);
    }
    // SAFETY: as for `follow`; it is not null now.
    unsafe { &*at.load(Ordering::Relaxed) }
}

impl Directory {
    /// For offsets below `span` bytes.
    pub(super) fn new(span: u64) -> Self {
        let root = (0..span.div_ceil(1 << ROOT_SHIFT)).map(|_| AtomicPtr::new(null_mut())).collect();
        Self { root }
    }

    /// The chunk in which the byte at `offset` lies. Lock-free.
    #[inline(always)]
    pub(super) fn find(&self, offset: u64) -> Option<&Chunk> {
        let leaf = follow(self.root.get(usize::try_from(offset >> ROOT_SHIFT).ok()?)?)?;
        let at = entry(offset, HUGE_SHIFT);
        if let Some(chunk) = follow(&leaf.huge[at]) {
            return Some(chunk);
        }
        let pieces = follow(&leaf.pieces[at])?;
        follow(&pieces.0[entry(offset, Frame::BYTES.trailing_zeros())])
    }

    /// Sets every entry that the bytes of a chunk lead to; null removes it. Under the lock of the chunks.
    fn set(&self, offset: u64, order: Order, chunk: *mut Chunk) {
        let huge = order >= Order::HUGE;
        let step = if huge { 1 << HUGE_SHIFT } else { Frame::BYTES };
        for piece in 0..bytes_of(order) / step {
            let at = offset + piece * step;
            let Some(root) = usize::try_from(at >> ROOT_SHIFT).ok().and_then(|gib| self.root.get(gib)) else {
                return;
            };
            let leaf = follow_or_make(root, || Leaf { huge: nulls(), pieces: nulls() });
            let region = entry(at, HUGE_SHIFT);
            let slot = if huge {
                &leaf.huge[region]
            } else {
                let pieces = follow_or_make(&leaf.pieces[region], || Pieces(nulls()));
                &pieces.0[entry(at, Frame::BYTES.trailing_zeros())]
            };
            slot.store(chunk, Ordering::Release);
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        for root in &self.root {
            let Some(leaf) = NonNull::new(root.load(Ordering::Relaxed)) else { continue };
            // SAFETY: made by `Box::into_raw` in `follow_or_make`, and not borrowed: `self` is borrowed mutably.
            let leaf = unsafe { Box::from_raw(leaf.as_ptr()) };
            for pieces in &leaf.pieces {
                let Some(pieces) = NonNull::new(pieces.load(Ordering::Relaxed)) else { continue };
                // SAFETY: as above.
                drop(unsafe { Box::from_raw(pieces.as_ptr()) });
            }
        }
    }
}

/// A chunk's frame and order.
pub(super) type Key = (u32, u8);

/// All chunks that a pool ever had, by frame and order. Changed under the lock of the chunks.
#[derive(Default)]
pub(super) struct Chunks {
    all: BTreeMap<Key, NonNull<Chunk>>,
    bytes: u64,
}

// SAFETY: it owns the chunks, which are `Send` and `Sync`.
unsafe impl Send for Chunks {}

impl Chunks {
    /// The chunks that the pool has now.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Chunk> {
        // SAFETY: made by `Box::leak` in `enter`, freed only by `drop`.
        self.all.values().map(|chunk| unsafe { chunk.as_ref() }).filter(|chunk| chunk.is_present())
    }

    /// How many bytes of chunks the pool has now.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a run of frames to the directory. A run that the pool had before gets its old chunk again, so that their number
    /// is bounded.
    pub(super) fn enter(&mut self, directory: &Directory, frame: Frame, order: Order, blocks: u32) -> &Chunk {
        let chunk = *self
            .all
            .entry((frame.index(), order.get()))
            .or_insert_with(|| NonNull::from(Box::leak(Box::new(Chunk::new(frame, order, blocks)))));
        directory.set(frame.offset(), order, chunk.as_ptr());
        self.bytes += bytes_of(order);
        // SAFETY: as in `iter`.
        let chunk = unsafe { chunk.as_ref() };
        chunk.present.store(true, Ordering::Relaxed);
        chunk
    }

    /// Removes the first chunk after `after` that `may_leave` accepts from the directory; its rows stay. The caller releases
    /// the run, after the lock. Time proportional to the chunks in between.
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
        let chunk = present.find(|chunk| may_leave(chunk))?;
        directory.set(chunk.offset(), chunk.order, null_mut());
        chunk.present.store(false, Ordering::Relaxed);
        self.bytes -= bytes_of(chunk.order);
        Some((chunk.frame, chunk.order))
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        for chunk in self.all.values() {
            // SAFETY: made by `Box::leak` in `enter`; the pool drops this after everything that refers to rows.
            drop(unsafe { Box::from_raw(chunk.as_ptr()) });
        }
    }
}
