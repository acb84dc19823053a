//! Blocks that free themselves, the baselines' blocks, and the process's allocator.

use super::api::{AllocWritten, Handle, Object, Pool, PoolCell, PoolLocal, handle};
use crate::baseline::Blocks;
use crate::baseline::block::Block as BaselineBlock;
use crate::baseline::malloc::Malloced;
use crate::error::BenchError;
use pinfold::Arena;
use pinfold_core::dma_pool::{Block, LocalBlock};

impl<'a> Object for Block<&'a Arena, &Pool<'a>> {
    #[inline(always)]
    fn address(&self) -> u64 {
        self.iova().raw()
    }
}

/// A pool's `Local`; each block is dropped, which takes the pool's lock.
pub(in crate::suite) struct DroppedBlocks<'p, 'a>(pub(in crate::suite) PoolLocal<'p, 'a>);

handle!(
    ['p, 'a] DroppedBlocks<'p, 'a>, Block<&'a Arena, &'p Pool<'a>>,
    |handle| handle.0.alloc()?, |_handle, block| drop(block),
    write |_handle, block| block.memory().write_u64(0, block.address())?
);

/// A pool's `Local`; each block is freed through the `Local`.
pub(in crate::suite) struct FreedBlocks<'p, 'a>(pub(in crate::suite) PoolLocal<'p, 'a>);

handle!(
    ['p, 'a] FreedBlocks<'p, 'a>, Block<&'a Arena, &'p Pool<'a>>,
    |handle| handle.0.alloc()?, |handle, block| handle.0.free(block),
    write |_handle, block| block.memory().write_u64(0, block.address())?
);

/// The same, and many blocks freed by one call: through the `Local`, or with `BY_POOL` by the pool's own.
pub(in crate::suite) struct ManyBlocks<'p, 'a, const BY_POOL: bool>(
    pub(in crate::suite) FreedBlocks<'p, 'a>,
    pub(in crate::suite) &'p Pool<'a>,
);

impl<'p, 'a, const BY_POOL: bool> Handle for ManyBlocks<'p, 'a, BY_POOL> {
    type Object = Block<&'a Arena, &'p Pool<'a>>;
    #[inline(always)]
    fn alloc(&mut self) -> Result<Self::Object, BenchError> {
        self.0.alloc()
    }
    #[inline(always)]
    fn free(&mut self, block: Self::Object) -> Result<(), BenchError> {
        self.0.free(block)
    }
    #[inline(always)]
    fn free_many(&mut self, blocks: &mut Vec<Self::Object>) -> Result<(), BenchError> {
        if BY_POOL {
            self.1.free_many(blocks.drain(..));
        } else {
            self.0.0.free_many(blocks.drain(..));
        }
        Ok(())
    }
}

impl<const BY_POOL: bool> AllocWritten for ManyBlocks<'_, '_, BY_POOL> {
    #[inline(always)]
    fn alloc_written(&mut self) -> Result<Self::Object, BenchError> {
        self.0.alloc_written()
    }
}

impl<'a> Object for LocalBlock<'_, &'a Arena, &Pool<'a>> {
    #[inline(always)]
    fn address(&self) -> u64 {
        self.iova().raw()
    }
}

/// A pool's `LocalCell`; each block is dropped, and returns to it.
pub(in crate::suite) struct CellBlocks<'c, 'p, 'a>(pub(in crate::suite) &'c PoolCell<'p, 'a>);

handle!(
    ['c, 'p, 'a] CellBlocks<'c, 'p, 'a>, LocalBlock<'c, &'a Arena, &'p Pool<'a>>,
    |handle| handle.0.alloc()?, |_handle, block| drop(block),
    write |_handle, block| block.memory().write_u64(0, block.address())?
);

impl Object for BaselineBlock<'_> {
    #[inline(always)]
    fn address(&self) -> u64 {
        BaselineBlock::address(self)
    }
}

/// A baseline.
pub(in crate::suite) struct Baseline<B>(pub(in crate::suite) B);

impl<B: Blocks<Block: Object>> Handle for Baseline<B> {
    type Object = B::Block;
    #[inline(always)]
    fn alloc(&mut self) -> Result<B::Block, BenchError> {
        Ok(self.0.alloc()?)
    }
    #[inline(always)]
    fn free(&mut self, block: B::Block) -> Result<(), BenchError> {
        Ok(self.0.free(block)?)
    }
}

impl<'m, B: Blocks<Block = BaselineBlock<'m>>> AllocWritten for Baseline<B> {
    #[inline(always)]
    fn alloc_written(&mut self) -> Result<B::Block, BenchError> {
        let mut block = self.0.alloc()?;
        block.write(block.address());
        Ok(block)
    }
}

impl<const N: usize> Object for Malloced<N> {
    #[inline(always)]
    fn address(&self) -> u64 {
        Malloced::address(self) as u64
    }
}

/// The process's allocator.
pub(in crate::suite) struct Malloc<const N: usize>;

impl<const N: usize> Handle for Malloc<N> {
    type Object = Malloced<N>;
    #[inline(always)]
    fn alloc(&mut self) -> Result<Malloced<N>, BenchError> {
        Ok(Malloced::alloc())
    }
    #[inline(always)]
    fn free(&mut self, block: Malloced<N>) -> Result<(), BenchError> {
        drop(block);
        Ok(())
    }
}

impl<const N: usize> AllocWritten for Malloc<N> {
    #[inline(always)]
    fn alloc_written(&mut self) -> Result<Malloced<N>, BenchError> {
        let mut block = Malloced::alloc();
        block.write(Object::address(&block));
        Ok(block)
    }
}
