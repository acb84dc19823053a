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
use core::hint::cold_path;

impl<S: ChunkSource> DmaPool<S> {
    #[inline(always)]
    pub(super) fn free_by(&self, owner: &mut Owner, block: RawBlock, form: Form) -> Result<(), FreeError> {
        let freed =
            self.place().offset_of(block).is_some_and(|offset| self.free_settled(owner, offset, form));
        if freed {
            Ok(())
        } else {
            cold_path();
            self.free_slowly(owner, block, form)
        }
    }

    /// The same, short enough to be inlined into calls that take a lock.
    #[inline(always)]
    pub(super) fn free_outlined(
        &self,
        owner: &mut Owner,
        block: RawBlock,
        form: Form,
    ) -> Result<(), FreeError> {
        let freed = self
            .place()
            .offset_of(block)
            .is_some_and(|offset| owner.push_last(offset, form) || self.free_not_last(owner, offset, form));
        if freed { Ok(()) } else { self.free_slowly(owner, block, form) }
    }

    /// Frees the block at `offset`, if its row is this owner's and stays in its list. Otherwise nothing has changed.
    #[inline(always)]
    pub(super) fn free_settled(&self, owner: &mut Owner, offset: u64, form: Form) -> bool {
        if !owner.stash.has_top() {
            return owner.push_last(offset, form)
                || self.site_of(offset).is_some_and(|site| owner.push_first(site, form));
        }
        // The last call was a free too, so this block may be a neighbour, and is not the one that was allocated last.
        owner.push_current(&self.geometry, offset, form)
            || self.site_of(offset).is_some_and(|site| owner.push_next(site, form))
    }

    /// The same as a function of its own, which calls no other and so saves no register.
    #[inline(never)]
    fn free_not_last(&self, owner: &mut Owner, offset: u64, form: Form) -> bool {
        self.free_settled(owner, offset, form)
    }

    /// Frees a block that the fast paths do not free, or refuses it.
    #[inline(always)]
    pub(super) fn free_slowly(
        &self,
        owner: &mut Owner,
        block: RawBlock,
        form: Form,
    ) -> Result<(), FreeError> {
        // Nothing but a refusal makes an error, so the first of the two returns nothing by way of memory.
        if self.free_aside(owner, block, form) { Ok(()) } else { self.free_found(owner, block, form) }
    }

    /// Frees a block whose row moves to another list, or is not this owner's. If it returns false, as in debug mode, the
    /// block is as before; its row may have been adopted.
    #[inline(never)]
    fn free_aside(&self, owner: &mut Owner, block: RawBlock, form: Form) -> bool {
        let site = self.place().offset_of(block).and_then(|offset| self.site_of(offset));
        let freed =
            self.watch.is_none() && site.is_some_and(|site| owner.free(&self.geometry, site, form).is_ok());
        self.relieve(owner);
        freed
    }

    /// Finds the block that starts at `offset`, if blocks are at equal distances. It may be past the last one of its chunk: what is
    /// there is never allocated.
    #[inline(always)]
    pub(super) fn site_of(&self, offset: u64) -> Option<Site> {
        let chunk = self.directory.find(offset)?;
        let (row, bit) = chunk.quick_row(self.geometry.quick_index_of(offset - chunk.offset()))?;
        Some(Site { offset, row, bit })
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
            // Of blocks in groups this is the first attempt.
            None if owner.push(site, form) => return Ok(()),
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

    /// After a row of the owner has moved: announces its remote frees, updates its terms, and takes its surplus of rows.
    #[inline(always)]
    pub(super) fn relieve(&self, owner: &mut Owner) {
        if !core::mem::take(&mut owner.unrelieved) {
            return;
        }
        if owner.remote_frees != 0 {
            self.depot.notify(core::mem::take(&mut owner.remote_frees));
        }
        let news = self.depot.news();
        if owner.is_behind(news) {
            owner.update(news);
        }
        // More than once only if the terms have become stricter.
        while owner.surplus() > 0 {
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
        if index >= u64::from(chunk.blocks) {
            return Err(self.misaligned(chunk, block));
        }
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
