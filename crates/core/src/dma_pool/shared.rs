//! What all owners of a pool share, and the operations that an owner makes on it.

use super::depot::Depot;
use super::directory::{Chunk, Chunks, Directory};
use super::geometry::{Geometry, bytes_of};
use super::owner::{Owner, split};
use super::row::RowRef;
use super::{AllocError, BulkFreeError, ChunkSource, CreateError, FreeError, PoolStats, RawBlock};
use crate::addr::Iova;
use crate::mem::DmaMemory;
use crate::sync::{CachePadded, Mutex};
use alloc::string::String;
use core::ops::DerefMut;

/// The largest span: more than 32 bits can number the frames of.
const LARGEST_SPAN: u64 = 1 << 48;

/// The inside of a pool. The locks are taken in the order house, chunks, depot.
pub(super) struct Shared<S: ChunkSource> {
    /// The source's whole span, of which only blocks of acquired chunks are reached.
    memory: DmaMemory<'static>,
    iova: Iova,
    geometry: Geometry,
    directory: Directory,
    /// The owner of calls that are made without a `Local`.
    house: CachePadded<Mutex<Owner>>,
    depot: CachePadded<Depot>,
    /// The growth lock.
    chunks: Mutex<Chunks>,
    source: S,
    name: String,
}

/// A block that was found: its row, its bit there, and its offset in the span.
struct Found<'a> {
    chunk: &'a Chunk,
    row: RowRef,
    bit: u32,
    offset: u64,
}

impl<S: ChunkSource> Shared<S> {
    pub(super) fn new(
        source: S,
        name: &str,
        size: usize,
        align: usize,
        boundary: usize,
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
        Ok(Self {
            memory,
            iova,
            geometry,
            directory: Directory::new(span),
            house: CachePadded(Mutex::new(depot.enrol())),
            depot: CachePadded(depot),
            chunks: Mutex::new(Chunks::default()),
            source,
            name: name.into(),
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

    pub(super) fn house(&self) -> impl DerefMut<Target = Owner> + '_ {
        self.house.lock()
    }

    pub(super) fn enrol(&self) -> Owner {
        self.depot.enrol()
    }

    pub(super) fn dismiss(&self, owner: &mut Owner) {
        self.depot.dismiss(owner);
    }

    #[inline(always)]
    pub(super) fn alloc(&self, owner: &mut Owner) -> Result<RawBlock, AllocError> {
        match owner.pop() {
            Some(offset) => Ok(self.block_at(offset)),
            None => self.alloc_slow(owner),
        }
    }

    #[cold]
    fn alloc_slow(&self, owner: &mut Owner) -> Result<RawBlock, AllocError> {
        loop {
            if let Some(offset) = owner.pop() {
                return Ok(self.block_at(offset));
            }
            if !owner.refill(&self.geometry) && !self.depot.lend(owner) {
                self.grow(owner).or_else(|error| self.ask_house(owner).ok_or(error))?;
            }
        }
    }

    #[inline(always)]
    fn block_at(&self, offset: u64) -> RawBlock {
        #[expect(clippy::cast_possible_truncation, reason = "less than the span, which is a usize")]
        let bytes = offset as usize;
        // SAFETY: `offset` is of a block in a chunk, which lies inside the source's memory, one allocation
        // (contract of `DmaMemory::from_raw`, checked against the span in `acquire`).
        let ptr = unsafe { self.memory.as_ptr().add(bytes) };
        RawBlock { ptr, iova: Iova::new(self.iova.raw().wrapping_add(offset)) }
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
        Ok(chunks.enter(&self.directory, frame, order, self.geometry.blocks_in(order)))
    }

    #[inline(always)]
    pub(super) fn free(&self, owner: &mut Owner, block: RawBlock) -> Result<(), FreeError> {
        let offset = block.ptr.as_ptr().addr().wrapping_sub(self.memory.addr()) as u64;
        let agrees = block.iova.raw().wrapping_sub(self.iova.raw()) == offset;
        if agrees && owner.push_recent(offset) { Ok(()) } else { self.free_found(owner, block) }
    }

    /// Frees a block that is not of the owner's recent row, or that cannot be freed.
    #[inline(never)]
    fn free_found(&self, owner: &mut Owner, block: RawBlock) -> Result<(), FreeError> {
        let Found { chunk, row, bit, offset } = self.find(block)?;
        if owner.is_full() {
            self.make_room(owner);
        }
        if owner.free(&self.geometry, row, bit, offset) { Ok(()) } else { Err(self.not_live(chunk, block)) }
    }

    #[cold]
    fn make_room(&self, owner: &mut Owner) {
        owner.flush();
        if owner.surplus() > 0 {
            self.depot.take_surplus(owner);
        }
    }

    /// Finds a block by its address: a range check, the directory, a multiplication and a shift.
    #[inline(always)]
    fn find(&self, block: RawBlock) -> Result<Found<'_>, FreeError> {
        let addr = block.ptr.as_ptr().addr();
        let offset = addr.wrapping_sub(self.memory.addr()) as u64;
        let Some(chunk) = (offset < self.memory.len() as u64).then(|| self.directory.find(offset)).flatten()
        else {
            return Err(self.foreign(block));
        };
        let index = self.geometry.index_of(offset - chunk.offset());
        let Some(index) = index.filter(|&index| index < u64::from(chunk.blocks)) else {
            return Err(self.misaligned(chunk, block));
        };
        if block.iova.raw().wrapping_sub(self.iova.raw()) != offset {
            return Err(self.wrong_iova(block));
        }
        let (number, bit) = split(index);
        match chunk.row(number) {
            Some(row) => Ok(Found { chunk, row, bit, offset }),
            None => Err(self.misaligned(chunk, block)),
        }
    }

    #[cold]
    fn foreign(&self, block: RawBlock) -> FreeError {
        let start = self.memory.addr();
        FreeError::Foreign { addr: block.ptr.as_ptr().addr(), start, end: start + self.memory.len() }
    }

    #[cold]
    fn misaligned(&self, chunk: &Chunk, block: RawBlock) -> FreeError {
        let at = self.block_at(chunk.offset()).ptr.as_ptr().addr();
        let addr = block.ptr.as_ptr().addr();
        FreeError::Misaligned { addr, chunk: at, blocks: chunk.blocks, size: self.geometry.size() }
    }

    #[cold]
    fn wrong_iova(&self, block: RawBlock) -> FreeError {
        let addr = block.ptr.as_ptr().addr();
        let offset = addr.wrapping_sub(self.memory.addr()) as u64;
        let expected = Iova::new(self.iova.raw().wrapping_add(offset));
        FreeError::WrongIova { addr, iova: block.iova, expected }
    }

    #[cold]
    fn not_live(&self, chunk: &Chunk, block: RawBlock) -> FreeError {
        // Given back between our look into the directory and now.
        if !chunk.is_present() {
            return self.foreign(block);
        }
        FreeError::DoubleFree { addr: block.ptr.as_ptr().addr() }
    }

    #[inline]
    pub(super) fn fill(&self, owner: &mut Owner, slots: &mut [Option<RawBlock>]) -> usize {
        let mut full = 0;
        for slot in slots {
            if slot.is_none() {
                *slot = self.alloc(owner).ok();
            }
            full += usize::from(slot.is_some());
        }
        full
    }

    pub(super) fn fill_zeroed(&self, owner: &mut Owner, slots: &mut [Option<RawBlock>]) -> usize {
        let mut full = 0;
        for slot in slots {
            if slot.is_none() {
                *slot = self.alloc(owner).ok().inspect(|&block| self.zero(block));
            }
            full += usize::from(slot.is_some());
        }
        full
    }

    #[inline]
    pub(super) fn free_bulk(&self, owner: &mut Owner, blocks: &[RawBlock]) -> Result<(), BulkFreeError> {
        for (freed, &block) in blocks.iter().enumerate() {
            self.free(owner, block).map_err(|error| BulkFreeError { freed, error })?;
        }
        Ok(())
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

    /// How many blocks are handed out, and one of them.
    pub(super) fn live(&self) -> (u64, Option<RawBlock>) {
        let (mut live, mut first) = (0, None);
        for chunk in self.chunks.lock().iter() {
            for row in chunk.rows() {
                let census = row.census();
                live += census.live;
                if let (None, Some(bit)) = (first, census.first_live) {
                    let index = row.first_index() + u64::from(bit);
                    first = Some(self.block_at(chunk.offset() + self.geometry.offset_of(index)));
                }
            }
        }
        (live, first)
    }

    pub(super) fn stats(&self) -> PoolStats {
        let mut stats = PoolStats {
            name: self.name.clone(),
            block_bytes: self.geometry.size(),
            in_use: 0,
            high_water: 0,
            blocks: 0,
            in_magazines: 0,
            in_rows: 0,
            in_depot: 0,
            chunks: 0,
            free_chunks: 0,
            bytes: 0,
            late_double_frees: 0,
        };
        self.depot.take_tally(&mut self.house());
        for chunk in self.chunks.lock().iter() {
            let mut free = true;
            for row in chunk.rows() {
                let census = row.census();
                stats.in_use += census.live;
                stats.in_magazines += census.in_magazines;
                stats.late_double_frees += census.late;
                *(if census.in_depot { &mut stats.in_depot } else { &mut stats.in_rows }) += census.in_row;
                free &= row.is_whole_in_depot();
            }
            stats.blocks += u64::from(chunk.blocks);
            stats.chunks += 1;
            stats.free_chunks += u64::from(free);
            stats.bytes += bytes_of(chunk.order);
        }
        let (high_water, late) = self.depot.counts(stats.in_use);
        stats.high_water = high_water;
        stats.late_double_frees += late;
        stats
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
        let idle = |chunk: &Chunk| chunk.rows().all(|row| row.census().live == 0);
        // SAFETY: as in `shrink`; the pool itself goes.
        chunks.leave(&self.directory, idle, |frame, order| unsafe { self.source.release(frame, order) });
    }
}
