//! Freeing a block: finds its row by its address, or the reason why there is none.

use super::directory::Chunk;
use super::error::FreeError;
use super::owner::{Owner, split};
use super::pool::{DmaPool, Found, tag_of};
use super::raw::RawBlock;
use super::row::{Form, FreeRefusal};
use super::source::ChunkSource;
use super::watch::Watch;
use crate::addr::Iova;

impl<S: ChunkSource> DmaPool<S> {
    #[inline(always)]
    pub(super) fn free_by(&self, owner: &mut Owner, block: RawBlock, form: Form) -> Result<(), FreeError> {
        if self.place().offset_of(block).is_some_and(|offset| owner.push(offset, form)) {
            return Ok(());
        }
        self.free_found(owner, block, form)
    }

    /// Turns the block of a [`Block`](super::Block) into a raw one.
    pub(super) fn make_raw(&self, block: RawBlock) {
        // Does not fail: the block belongs to a `Block`.
        if let Ok(Found { row, bit, .. }) = self.find(block) {
            row.make_raw(bit);
        }
    }

    /// Frees a block that is not in the owner's current row, or refuses it.
    #[inline(never)]
    fn free_found(&self, owner: &mut Owner, block: RawBlock, form: Form) -> Result<(), FreeError> {
        let found = self.find(block)?;
        let Found { chunk, row, bit, .. } = found;
        let freed = match &self.watch {
            None => owner.free(&self.geometry, row, bit, form),
            Some(watch) => self.free_watched(watch, owner, &found, block, form),
        };
        self.relieve(owner);
        freed.map_err(|why| self.refused(chunk, block, why))
    }

    /// As `free_found` in debug mode: checks the block's state before it fills the block, and excludes other frees meanwhile.
    fn free_watched(
        &self,
        watch: &Watch,
        owner: &mut Owner,
        found: &Found<'_>,
        block: RawBlock,
        form: Form,
    ) -> Result<(), FreeRefusal> {
        let mut history = watch.history();
        if !found.row.is_allocated_as(found.bit, form) {
            return Err(found.row.refusal(found.bit));
        }
        if let Ok(memory) = self.memory_of(block) {
            history.on_free(found.offset, memory, tag_of(owner));
        }
        let freed = owner.free(&self.geometry, found.row, found.bit, form);
        // Without a current row, so that no fast path finds a block.
        owner.leave_current();
        freed
    }

    /// Announces the owner's remote frees, updates its terms, and takes its surplus of rows.
    pub(super) fn relieve(&self, owner: &mut Owner) {
        let remote_frees = core::mem::take(&mut owner.remote_frees);
        if remote_frees != 0 {
            self.depot.notify(remote_frees);
        }
        owner.update_terms(self.depot.terms(), self.depot.notices());
        if owner.surplus() > 0 {
            self.depot.take_surplus(owner);
        }
    }

    /// Finds a block by its address: a range check, the directory, a multiplication and a shift.
    #[inline(always)]
    pub(super) fn find(&self, block: RawBlock) -> Result<Found<'_>, FreeError> {
        let addr = block.addr();
        let offset = addr.wrapping_sub(self.memory.addr()) as u64;
        let Some(chunk) = (offset < self.memory.len() as u64).then(|| self.directory.find(offset)).flatten()
        else {
            return Err(self.foreign(block));
        };
        let index = self.geometry.index_of(offset - chunk.offset());
        let Some(index) = index.filter(|&index| index < u64::from(chunk.blocks)) else {
            return Err(self.misaligned(chunk, block));
        };
        if block.iova().raw().wrapping_sub(self.iova.raw()) != offset {
            return Err(self.wrong_iova(block));
        }
        let (number, bit) = split(index);
        match chunk.row(number) {
            Some(row) => Ok(Found { chunk, row, bit, offset }),
            None => Err(self.misaligned(chunk, block)),
        }
    }

    #[cold]
    pub(super) fn foreign(&self, block: RawBlock) -> FreeError {
        let start = self.memory.addr();
        FreeError::Foreign { addr: block.addr(), start, end: start + self.memory.len() }
    }

    #[cold]
    fn misaligned(&self, chunk: &Chunk, block: RawBlock) -> FreeError {
        let at = self.block_at(chunk.offset()).addr();
        let addr = block.addr();
        FreeError::Misaligned { addr, chunk: at, blocks: chunk.blocks, size: self.geometry.size() }
    }

    #[cold]
    fn wrong_iova(&self, block: RawBlock) -> FreeError {
        let addr = block.addr();
        let offset = addr.wrapping_sub(self.memory.addr()) as u64;
        let expected = Iova::new(self.iova.raw().wrapping_add(offset));
        FreeError::WrongIova { addr, iova: block.iova(), expected }
    }

    #[cold]
    pub(super) fn refused(&self, chunk: &Chunk, block: RawBlock, why: FreeRefusal) -> FreeError {
        let addr = block.addr();
        match why {
            FreeRefusal::Owned => FreeError::Owned { addr },
            // The chunk was released after the look-up in the directory.
            FreeRefusal::Free if !chunk.is_present() => self.foreign(block),
            FreeRefusal::Free => FreeError::DoubleFree { addr },
        }
    }
}
