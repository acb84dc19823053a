//! Blocks that free themselves, the baselines' blocks, and the process's allocator.

use super::api::{AllocWritten, Handle, Object, PoolLocal, handle};
use crate::baseline::Blocks;
use crate::baseline::block::Block as BaselineBlock;
use crate::baseline::malloc::Malloced;
use crate::error::BenchError;
use pinfold_core::dma_pool::Block;

impl Object for Block {
    #[inline(always)]
    fn address(&self) -> u64 {
        self.iova().raw()
    }
}

/// A pool's `Local`; each block is freed through it.
pub(in crate::suite) struct OwnedBlocks(pub(in crate::suite) PoolLocal);

handle!(
    [] OwnedBlocks, Block,
    |handle| handle.0.alloc()?, |handle, block| handle.0.free(block),
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
