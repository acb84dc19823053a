//! What all owners of a pool share, and the operations that an owner makes on it.

use super::depot::Depot;
use super::directory::{Chunk, Chunks, Directory};
use super::geometry::Geometry;
use super::growth::Growth;
use super::owner::Owner;
use super::row::{Form, FreeRefusal, RowRef};
use super::spin_lock::{Guard, SpinLock};
use super::watch::{OwnerTag, Watch};
use super::{AllocError, ChunkSource, CreateError, FreeError, RawBlock};
use crate::addr::Iova;
use crate::mem::DmaMemory;
use crate::sync::{CachePadded, Mutex};
use alloc::boxed::Box;
use alloc::string::String;

/// The largest span: more than 32 bits can number the frames of.
const LARGEST_SPAN: u64 = 1 << 48;

/// The inside of a pool. Locks are taken in the order lock, depot and chunks, depot; none is held while the source is
/// at work.
pub(super) struct Shared<S: ChunkSource> {
    /// The source's whole span, of which only blocks of acquired chunks are reached.
    pub(super) memory: DmaMemory<'static>,
    pub(super) iova: Iova,
    pub(super) geometry: Geometry,
    pub(super) directory: Directory,
    /// The owner of calls that are made without a `Local`.
    lock: CachePadded<SpinLock<Owner>>,
    pub(super) depot: CachePadded<Depot>,
    pub(super) chunks: Mutex<Chunks>,
    pub(super) growth: Growth,
    source: S,
    pub(super) name: String,
    /// Debug mode. No quick path looks here: an owner in debug mode never has anything that they could take.
    pub(super) watch: Option<Box<Watch>>,
}

/// A block that was found: its row, its bit there, and its offset in the span.
pub(super) struct Found<'a> {
    pub(super) chunk: &'a Chunk,
    pub(super) row: RowRef,
    pub(super) bit: u32,
    pub(super) offset: u64,
}

/// Where a pool's span is, for the processor and for the device.
#[derive(Clone, Copy)]
pub(super) struct Place<'m> {
    memory: DmaMemory<'m>,
    iova: Iova,
}

impl Place<'_> {
    /// The block at an offset that the pool's own account gave.
    #[inline(always)]
    pub(super) fn block_at(&self, offset: u64) -> RawBlock {
        #[expect(clippy::cast_possible_truncation, reason = "less than the span, which is a usize")]
        let bytes = offset as usize;
        // SAFETY: `offset` is of a block in a chunk, which lies inside the source's memory, one allocation
        // (contract of `DmaMemory::from_raw`, checked against the span in `acquire`).
        let ptr = unsafe { self.memory.as_ptr().add(bytes) };
        RawBlock { ptr, iova: Iova::new(self.iova.raw().wrapping_add(offset)) }
    }

    /// Where in the span the block is, if its two addresses agree.
    #[inline(always)]
    pub(super) fn offset_of(&self, block: RawBlock) -> Option<u64> {
        let offset = block.ptr.as_ptr().addr().wrapping_sub(self.memory.addr()) as u64;
        (block.iova.raw().wrapping_sub(self.iova.raw()) == offset).then_some(offset)
    }
}

impl<S: ChunkSource> Shared<S> {
    pub(super) fn new(
        source: S,
        name: &str,
        size: usize,
        align: usize,
        boundary: usize,
        watch: Option<Box<Watch>>,
    ) -> Result<Self, CreateError> {
        let (base, iova) = (source.span(), source.iova());
        // SAFETY: the source, which `self` owns, keeps its runs valid and gives them to nobody else (contract of
        // `ChunkSource`); of the span only blocks of acquired chunks are ever reached, lent out for borrows of `self`.
        let memory = unsafe { DmaMemory::<'static>::from_raw(base.cast(), base.len()) };
        let span = memory.len() as u64;
        if span == 0 || span > LARGEST_SPAN || iova.checked_add(span).is_none() {
            return Err(CreateError::Span { len: memory.len(), iova, limit: LARGEST_SPAN });
        }
        let geometry = Geometry::new(size, align, boundary, memory.addr(), iova)?;
        let depot = Depot::new();
        let lock = depot.enrol();
        let lock = if watch.is_some() { lock.watched() } else { lock };
        Ok(Self {
            memory,
            iova,
            geometry,
            directory: Directory::new(span),
            lock: CachePadded(SpinLock::new(lock)),
            depot: CachePadded(depot),
            chunks: Mutex::new(Chunks::default()),
            growth: Growth::new(),
            source,
            name: name.into(),
            watch,
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn source(&self) -> &S {
        &self.source
    }

    pub(super) fn block_size(&self) -> usize {
        // Below 2^31.
        usize::try_from(self.geometry.size()).unwrap_or(usize::MAX)
    }

    #[inline(always)]
    pub(super) fn lock(&self) -> Guard<'_, Owner> {
        self.lock.lock()
    }

    pub(super) fn enrol(&self) -> Owner {
        let owner = self.depot.enrol();
        if self.watch.is_some() { owner.watched() } else { owner }
    }

    pub(super) fn dismiss(&self, owner: &mut Owner) {
        self.depot.dismiss(owner);
    }

    #[inline(always)]
    pub(super) fn alloc(&self, owner: &mut Owner, form: Form) -> Result<RawBlock, AllocError> {
        loop {
            if let Some(offset) = owner.pop(&self.geometry, form) {
                return Ok(self.block_at(offset));
            }
            // What comes back says only whether: so the block stays in registers.
            self.stock(owner)?;
        }
    }

    /// Where the span is. Taken once for many blocks, it stays in registers.
    #[inline(always)]
    pub(super) fn place(&self) -> Place<'_> {
        Place { memory: self.memory, iova: self.iova }
    }

    #[inline(always)]
    pub(super) fn block_at(&self, offset: u64) -> RawBlock {
        self.place().block_at(offset)
    }

    /// The memory of a block: that block's bytes and no others. The caller has found it, or knows that it is one.
    ///
    /// # Errors
    /// [`FreeError::Foreign`] where it does not lie in the span.
    pub(super) fn memory_of(&self, block: RawBlock) -> Result<DmaMemory<'_>, FreeError> {
        let offset = block.ptr.as_ptr().addr().wrapping_sub(self.memory.addr());
        self.memory.part(offset, self.block_size()).map_err(|_| self.foreign(block))
    }

    pub(super) fn memory(&self, block: RawBlock) -> Result<DmaMemory<'_>, FreeError> {
        let Found { chunk, row, bit, .. } = self.find(block)?;
        if !row.is_live(bit) {
            return Err(self.refused(chunk, block, FreeRefusal::Free));
        }
        self.memory_of(block)
    }

    pub(super) fn zero(&self, block: RawBlock) {
        // It is a block that was just handed out, so neither is refused.
        let zeroed = self.memory_of(block).map(|memory| memory.fill(0, memory.len(), 0));
        debug_assert!(matches!(zeroed, Ok(Ok(()))));
    }
}

#[cfg(all(test, not(loom)))]
impl<S: ChunkSource> Shared<S> {
    /// Where the chunk of a block starts.
    pub(super) fn chunk_of(&self, block: RawBlock) -> Result<u64, FreeError> {
        self.find(block).map(|found| found.chunk.offset())
    }
}

impl<S: ChunkSource> Drop for Shared<S> {
    fn drop(&mut self) {
        // A device may still write where blocks are out: such chunks are kept for ever.
        self.release_each(|chunk| chunk.rows().all(|row| row.is_idle()));
    }
}

/// Who an owner is, for debug mode's book.
pub(super) fn tag_of(owner: &Owner) -> OwnerTag {
    OwnerTag { number: owner.id, tag: owner.tag }
}
