//! What one entry of a ring stands for.

use pinfold::DmaMemory;
use pinfold::page_pool::{Fragment, Page, PagePool};
use pinfold::xdp::Umem;

/// The memory of one packet: a page, or a part of one.
#[derive(Debug)]
pub(crate) enum Chunk {
    Page(Page<Umem>),
    Part(Fragment<Umem>),
}

/// What a [`Chunk`] is made of.
pub(crate) trait Piece {
    fn memory(&self) -> DmaMemory<'_>;
    fn into_chunk(self) -> Chunk;
}

impl Piece for Page<Umem> {
    #[inline]
    fn memory(&self) -> DmaMemory<'_> {
        Page::memory(self)
    }
    #[inline]
    fn into_chunk(self) -> Chunk {
        Chunk::Page(self)
    }
}

impl Piece for Fragment<Umem> {
    #[inline]
    fn memory(&self) -> DmaMemory<'_> {
        Fragment::memory(self)
    }
    #[inline]
    fn into_chunk(self) -> Chunk {
        Chunk::Part(self)
    }
}

impl Chunk {
    #[inline]
    pub(crate) fn memory(&self) -> DmaMemory<'_> {
        match self {
            Self::Page(page) => page.memory(),
            Self::Part(part) => part.memory(),
        }
    }

    /// Returns the chunk to `pool`, by its consumer.
    #[inline]
    pub(crate) fn recycle(self, pool: &mut PagePool<Umem>) {
        match self {
            Self::Page(page) => pool.recycle(page),
            Self::Part(part) => pool.recycle_fragment(part),
        }
    }
}
