//! Taking a block back: from its address to its row, and what is wrong where there is none.

use super::directory::Chunk;
use super::owner::{Owner, split};
use super::shared::{Found, Shared, tag_of};
use super::watch::Watch;
use super::{ChunkSource, FreeError, RawBlock};
use crate::addr::Iova;

impl<S: ChunkSource> Shared<S> {
    #[inline(always)]
    pub(super) fn free(&self, owner: &mut Owner, block: RawBlock) -> Result<(), FreeError> {
        if self.place().offset_of(block).is_some_and(|offset| owner.push(offset)) {
            return Ok(());
        }
        self.free_found(owner, block)
    }

    /// Frees a block that is not of the owner's current row, or that cannot be freed.
    #[inline(never)]
    fn free_found(&self, owner: &mut Owner, block: RawBlock) -> Result<(), FreeError> {
        let found = self.find(block)?;
        let Found { chunk, row, bit, .. } = found;
        let freed = match &self.watch {
            None => owner.free(&self.geometry, row, bit),
            Some(watch) => self.free_watched(watch, owner, &found, block),
        };
        self.relieve(owner);
        if freed { Ok(()) } else { Err(self.not_live(chunk, block)) }
    }

    /// The same in debug mode: that the block is in use is looked at before it is filled, and nobody else frees it in
    /// between.
    fn free_watched(&self, watch: &Watch, owner: &mut Owner, found: &Found<'_>, block: RawBlock) -> bool {
        let mut book = watch.book();
        if !found.row.is_live(found.bit) {
            return false;
        }
        book.take_back(found.offset, self.memory_of(block), tag_of(owner));
        let freed = owner.free(&self.geometry, found.row, found.bit);
        // No current row stays, so that no quick path finds anything there.
        owner.settle();
        freed
    }

    /// Frees a block without looking whether it is one, or in use.
    ///
    /// # Safety
    /// It is a block of this pool that this owner had by `pop_unmarked` and that was not freed since.
    #[inline(always)]
    pub(super) unsafe fn free_unchecked(&self, owner: &mut Owner, block: RawBlock) {
        let offset = block.ptr.as_ptr().addr().wrapping_sub(self.memory.addr()) as u64;
        if !owner.push_unchecked(offset) {
            self.free_found_unchecked(owner, block);
        }
    }

    #[inline(never)]
    fn free_found_unchecked(&self, owner: &mut Owner, block: RawBlock) {
        let Ok(Found { row, bit, .. }) = self.find(block) else { return };
        owner.free_unchecked(&self.geometry, row, bit);
        self.relieve(owner);
    }

    /// Takes rows from an owner who has too many.
    fn relieve(&self, owner: &mut Owner) {
        if owner.surplus() > 0 {
            self.depot.take_surplus(owner);
        }
    }

    /// Finds a block by its address: a range check, the directory, a multiplication and a shift.
    #[inline(always)]
    pub(super) fn find(&self, block: RawBlock) -> Result<Found<'_>, FreeError> {
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
    pub(super) fn not_live(&self, chunk: &Chunk, block: RawBlock) -> FreeError {
        // Given back between our look into the directory and now.
        if !chunk.is_present() {
            return self.foreign(block);
        }
        FreeError::DoubleFree { addr: block.ptr.as_ptr().addr() }
    }
}
