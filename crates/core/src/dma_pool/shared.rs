//! What all owners of a pool share, and the operations that an owner makes on it.

use super::depot::Depot;
use super::directory::{Chunk, Chunks, Directory};
use super::geometry::{Geometry, bytes_of};
use super::house::{Guard, House};
use super::owner::Owner;
use super::row::RowRef;
use super::watch::{OwnerTag, Watch};
use super::{AllocError, ChunkSource, CreateError, FreeError, RawBlock};
use crate::addr::Iova;
use crate::frame::{Frame, Order};
use crate::mem::DmaMemory;
use crate::sync::{CachePadded, Mutex};
use alloc::boxed::Box;
use alloc::string::String;

/// The largest span: more than 32 bits can number the frames of.
const LARGEST_SPAN: u64 = 1 << 48;

/// The inside of a pool. The locks are taken in the order house, chunks, depot.
pub(super) struct Shared<S: ChunkSource> {
    /// The source's whole span, of which only blocks of acquired chunks are reached.
    pub(super) memory: DmaMemory<'static>,
    pub(super) iova: Iova,
    pub(super) geometry: Geometry,
    pub(super) directory: Directory,
    /// The owner of calls that are made without a `Local`.
    house: CachePadded<House<Owner>>,
    pub(super) depot: CachePadded<Depot>,
    /// The growth lock.
    pub(super) chunks: Mutex<Chunks>,
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
        let house = depot.enrol();
        let house = if watch.is_some() { house.watched() } else { house };
        Ok(Self {
            memory,
            iova,
            geometry,
            directory: Directory::new(span),
            house: CachePadded(House::new(house)),
            depot: CachePadded(depot),
            chunks: Mutex::new(Chunks::default()),
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
    pub(super) fn house(&self) -> Guard<'_, Owner> {
        self.house.lock()
    }

    pub(super) fn enrol(&self) -> Owner {
        let owner = self.depot.enrol();
        if self.watch.is_some() { owner.watched() } else { owner }
    }

    pub(super) fn dismiss(&self, owner: &mut Owner) {
        self.depot.dismiss(owner);
    }

    #[inline(always)]
    pub(super) fn alloc(&self, owner: &mut Owner) -> Result<RawBlock, AllocError> {
        loop {
            if let Some(offset) = owner.pop(&self.geometry) {
                return Ok(self.block_at(offset));
            }
            // What comes back says only whether: so the block stays in registers.
            self.stock(owner)?;
        }
    }

    /// Brings an owner whose current row has no block one that has (in debug mode one, looked at and filled).
    #[cold]
    #[inline(never)]
    pub(super) fn stock(&self, owner: &mut Owner) -> Result<(), AllocError> {
        while !owner.refill(&self.geometry) {
            self.bring_rows(owner)?;
        }
        if let (Some(watch), Some(offset)) = (&self.watch, owner.next(&self.geometry)) {
            let block = self.block_at(offset);
            watch.book().hand_out(offset, block, self.memory_of(block), tag_of(owner));
        }
        Ok(())
    }

    /// Brings rows to an owner that has nothing to draw.
    fn bring_rows(&self, owner: &mut Owner) -> Result<(), AllocError> {
        if self.depot.lend(owner) {
            return Ok(());
        }
        self.grow(owner).or_else(|error| self.ask_house(owner).ok_or(error))
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

    /// Gets a chunk for the pool and rows for the owner, unless others brought some meanwhile.
    fn grow(&self, owner: &mut Owner) -> Result<(), AllocError> {
        let mut chunks = self.chunks.lock();
        if self.depot.lend(owner) {
            return Ok(());
        }
        let chunk = self.acquire(&mut chunks)?;
        self.depot.add(chunk.rows());
        self.depot.lend(owner);
        Ok(())
    }

    /// The last resort: what the pool's own owner holds.
    fn ask_house(&self, owner: &mut Owner) -> Option<()> {
        if owner.is_house() {
            return None;
        }
        self.depot.take_all(&mut self.house());
        self.depot.lend(owner).then_some(())
    }

    /// A chunk of the size that the pool's use warrants, or the largest smaller one that can be had.
    fn acquire<'c>(&self, chunks: &'c mut Chunks) -> Result<&'c Chunk, AllocError> {
        let mut order = self.geometry.next_order(chunks.bytes());
        let frame = loop {
            match self.source.acquire(order) {
                Ok(frame) => break frame,
                Err(error) => order = self.geometry.smaller(order).ok_or(error)?,
            }
        };
        let inside =
            frame.offset().checked_add(bytes_of(order)).is_some_and(|end| end <= self.memory.len() as u64);
        if !inside || !frame.offset().is_multiple_of(bytes_of(order)) {
            // SAFETY: just acquired with this order, and not used.
            unsafe { self.source.release(frame, order) };
            return Err(AllocError::Misplaced { frame, order });
        }
        if let (Some(watch), Some(memory)) = (&self.watch, self.run(frame, order)) {
            watch.book().enter(frame.offset(), memory);
        }
        Ok(chunks.enter(&self.directory, frame, order, self.geometry.blocks_in(order)))
    }

    fn run(&self, frame: Frame, order: Order) -> Option<DmaMemory<'_>> {
        let offset = usize::try_from(frame.offset()).ok()?;
        self.memory.part(offset, usize::try_from(bytes_of(order)).ok()?).ok()
    }

    /// The memory of a block that is known to be one.
    pub(super) fn memory_of(&self, block: RawBlock) -> DmaMemory<'_> {
        let offset = block.ptr.as_ptr().addr() - self.memory.addr();
        self.memory.part(offset, self.block_size()).unwrap_or(self.memory)
    }

    pub(super) fn memory(&self, block: RawBlock) -> Result<DmaMemory<'_>, FreeError> {
        let Found { chunk, row, bit, .. } = self.find(block)?;
        if row.is_live(bit) { Ok(self.memory_of(block)) } else { Err(self.not_live(chunk, block)) }
    }

    pub(super) fn zero(&self, block: RawBlock) {
        let memory = self.memory_of(block);
        // It cannot be outside: it is all of the memory.
        let _ = memory.fill(0, memory.len(), 0);
    }

    /// Right beside every other operation; it is the pool's face that takes the pool for itself (see there).
    pub(super) fn shrink(&self) -> u64 {
        self.depot.take_all(&mut self.house());
        let mut chunks = self.chunks.lock();
        let whole = |chunk: &Chunk| self.depot.remove_if_whole(chunk.rows());
        // SAFETY: the chunk was acquired with this order, and has left the directory: nobody draws from it any more,
        // and the public `shrink` excludes borrows of blocks' memory.
        chunks.leave(&self.directory, whole, |frame, order| unsafe { self.source.release(frame, order) })
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
        let mut chunks = self.chunks.lock();
        let idle = |chunk: &Chunk| chunk.rows().all(|row| row.is_idle());
        // SAFETY: as in `shrink`; the pool itself goes.
        chunks.leave(&self.directory, idle, |frame, order| unsafe { self.source.release(frame, order) });
    }
}

/// Who an owner is, for debug mode's book.
pub(super) fn tag_of(owner: &Owner) -> OwnerTag {
    OwnerTag { number: owner.id, tag: owner.tag }
}
