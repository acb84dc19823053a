//! Freeing a block: finds its row by its address, or the reason why there is none.

use super::directory::Chunk;
use super::error::FreeError;
use super::owner::{Owner, split};
use super::pool::{DmaPool, Found, tag_of};
use super::raw::RawBlock;
use super::source::ChunkSource;
use super::stash::Site;
use super::state::{Form, FreeRefusal};
use super::watch::Watch;
use crate::addr::Iova;

impl<S: ChunkSource> DmaPool<S> {
    #[inline(always)]
    pub(super) fn free_by(&self, owner: &mut Owner, block: RawBlock, form: Form) -> Result<(), FreeError> {
        if let Some(offset) = self.place().offset_of(block)
            && (owner.push(offset, form) || self.free_aside(owner, offset, form))
        {
            return Ok(());
        }
        self.free_found(owner, block, form)
    }

    /// Frees the block at `offset` if this owner has its row, and the row needs not move. Otherwise nothing has changed. In
    /// debug mode never.
    #[inline(never)]
    pub(super) fn free_aside(&self, owner: &mut Owner, offset: u64, form: Form) -> bool {
        let Some(chunk) = self.directory.find(offset).filter(|_| self.watch.is_none()) else { return false };
        let Some(index) = self.geometry.index_of(offset - chunk.offset()) else { return false };
        let (number, bit) = split(index);
        // What a last row of fewer than 64 blocks does not have is not allocated.
        chunk.row(number).is_some_and(|row| owner.push_aside(Site { offset, row, bit }, form))
    }

    /// Turns the block of a [`Block`](super::Block) into a raw one.
    pub(super) fn make_raw(&self, block: RawBlock) {
        // Does not fail: the block belongs to a `Block`.
        if let Ok(Found { site, .. }) = self.find(block) {
            site.row.make_raw(site.bit);
        }
    }

    /// Frees a block that no fast path has freed, or refuses it. Rows may move between lists and owners.
    #[cold]
    #[inline(never)]
    pub(super) fn free_found(&self, owner: &mut Owner, block: RawBlock, form: Form) -> Result<(), FreeError> {
        let Found { chunk, site } = self.find(block)?;
        let freed = match &self.watch {
            None => owner.free(&self.geometry, site, form),
            Some(watch) => self.free_watched(watch, owner, site, block, form),
        };
        self.relieve(owner);
        freed.map_err(|why| self.refused(chunk, block, why))
    }

    /// As `free_found` in debug mode: checks the block's state before it fills the block, and excludes other frees meanwhile.
    fn free_watched(
        &self,
        watch: &Watch,
        owner: &mut Owner,
        site: Site,
        block: RawBlock,
        form: Form,
    ) -> Result<(), FreeRefusal> {
        let mut history = watch.history();
        if !site.row.is_allocated_as(site.bit, form) {
            return Err(site.row.refusal(site.bit));
        }
        if let Ok(memory) = self.memory_of(block) {
            history.on_free(site.offset, memory, tag_of(owner));
        }
        let freed = owner.free(&self.geometry, site, form);
        // Without a current row, so that no fast path finds a block.
        owner.leave_current();
        freed
    }

    /// Announces the owner's remote frees, updates its terms, and takes its surplus of rows.
    pub(super) fn relieve(&self, owner: &mut Owner) {
        self.depot.notify(core::mem::take(&mut owner.remote_frees));
        owner.update_terms(self.depot.terms(), self.depot.notices());
        if owner.surplus() > 0 {
            self.depot.take_surplus(owner);
        }
    }

    /// Finds a block by its address, or the reason why there is none.
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
            Some(row) => Ok(Found { chunk, site: Site { offset, row, bit } }),
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
