//! What all suites do with a subject: take and give back, one at a time.
//!
//! The loops are generic, so that each subject's calls are inlined into a loop of its own; what is handed out is kept
//! from the optimiser by the number that a device would be told, which adds one store.

mod frames;
mod loops;
mod raw;
mod unchecked;

pub(super) use frames::Huge;
pub(super) use loops::{
    OUT, Rng, TWO, WARM, alone, beside, give_all, pairs, scattered, slots, take_all, together,
};
pub(super) use raw::{Raw, Unowned, bulks};
pub(super) use unchecked::pairs as unchecked_pairs;

use super::BenchError;
use crate::baseline::Blocks;
use crate::baseline::block::Block as BaselineBlock;
use crate::baseline::malloc::Malloced;
use pinfold::Arena;
use pinfold_core::dma_pool::{self, Block, DmaPool};
use pinfold_core::mem::DmaMemory;

/// A pool as the suites make it.
pub(super) type Pool<'a> = DmaPool<&'a Arena>;

/// One owner's way to what hands out and takes back.
pub(super) trait Hand {
    /// What is handed out.
    type Thing;
    /// One.
    fn get(&mut self) -> Result<Self::Thing, BenchError>;
    /// Takes one back.
    fn put(&mut self, thing: Self::Thing) -> Result<(), BenchError>;
    /// What a device would be told.
    fn number(thing: &Self::Thing) -> u64;
}

/// A hand whose things are memory.
pub(super) trait Writing: Hand {
    /// One, of which one word was written.
    fn get_written(&mut self) -> Result<Self::Thing, BenchError>;
}

/// The same hand, each thing written when it is handed out: a block that nobody writes is no block, and an allocator that
/// has not touched it leaves the cache miss to its user.
pub(super) struct Written<H>(pub(super) H);

impl<H: Writing> Hand for Written<H> {
    type Thing = H::Thing;
    #[inline(always)]
    fn get(&mut self) -> Result<H::Thing, BenchError> {
        self.0.get_written()
    }
    #[inline(always)]
    fn put(&mut self, thing: H::Thing) -> Result<(), BenchError> {
        self.0.put(thing)
    }
    #[inline(always)]
    fn number(thing: &H::Thing) -> u64 {
        H::number(thing)
    }
}

/// A hand whose things are offsets, and memory to write at them.
pub(super) struct InMemory<'m, H>(pub(super) H, pub(super) DmaMemory<'m>);

impl<H: Hand> Hand for InMemory<'_, H> {
    type Thing = H::Thing;
    #[inline(always)]
    fn get(&mut self) -> Result<H::Thing, BenchError> {
        self.0.get()
    }
    #[inline(always)]
    fn put(&mut self, thing: H::Thing) -> Result<(), BenchError> {
        self.0.put(thing)
    }
    #[inline(always)]
    fn number(thing: &H::Thing) -> u64 {
        H::number(thing)
    }
}

impl<H: Hand> Writing for InMemory<'_, H> {
    #[inline(always)]
    fn get_written(&mut self) -> Result<H::Thing, BenchError> {
        let thing = self.0.get()?;
        let at = H::number(&thing);
        // The memory's size is a power of two, and may be less than what the offsets cover.
        self.1.write_u64(usize::try_from(at).unwrap_or(usize::MAX) & (self.1.len() - 1), at)?;
        Ok(thing)
    }
}

/// A pool's `Local`, blocks that free themselves: each is dropped.
pub(super) struct Safe<'p, 'a>(pub(super) dma_pool::Local<&'a Arena, &'p Pool<'a>>);

impl<'p, 'a> Hand for Safe<'p, 'a> {
    type Thing = Block<&'a Arena, &'p Pool<'a>>;
    #[inline(always)]
    fn get(&mut self) -> Result<Self::Thing, BenchError> {
        Ok(self.0.alloc()?)
    }
    #[inline(always)]
    fn put(&mut self, block: Self::Thing) -> Result<(), BenchError> {
        drop(block);
        Ok(())
    }
    #[inline(always)]
    fn number(block: &Self::Thing) -> u64 {
        block.iova().raw()
    }
}

impl<'p, 'a> Writing for Safe<'p, 'a> {
    #[inline(always)]
    fn get_written(&mut self) -> Result<Self::Thing, BenchError> {
        let block = self.0.alloc()?;
        block.memory().write_u64(0, block.iova().raw())?;
        Ok(block)
    }
}

/// The same, given back to the `Local`.
pub(super) struct Returned<'p, 'a>(pub(super) dma_pool::Local<&'a Arena, &'p Pool<'a>>);

impl<'p, 'a> Hand for Returned<'p, 'a> {
    type Thing = Block<&'a Arena, &'p Pool<'a>>;
    #[inline(always)]
    fn get(&mut self) -> Result<Self::Thing, BenchError> {
        Ok(self.0.alloc()?)
    }
    #[inline(always)]
    fn put(&mut self, block: Self::Thing) -> Result<(), BenchError> {
        self.0.free(block);
        Ok(())
    }
    #[inline(always)]
    fn number(block: &Self::Thing) -> u64 {
        block.iova().raw()
    }
}

impl<'p, 'a> Writing for Returned<'p, 'a> {
    #[inline(always)]
    fn get_written(&mut self) -> Result<Self::Thing, BenchError> {
        let block = self.0.alloc()?;
        block.memory().write_u64(0, block.iova().raw())?;
        Ok(block)
    }
}

/// A baseline.
pub(super) struct Baseline<B>(pub(super) B);

impl<B: Blocks<Block: Numbered>> Hand for Baseline<B> {
    type Thing = B::Block;
    #[inline(always)]
    fn get(&mut self) -> Result<B::Block, BenchError> {
        Ok(self.0.alloc()?)
    }
    #[inline(always)]
    fn put(&mut self, block: B::Block) -> Result<(), BenchError> {
        Ok(self.0.free(block)?)
    }
    #[inline(always)]
    fn number(block: &B::Block) -> u64 {
        block.number()
    }
}

impl<'m, B: Blocks<Block = BaselineBlock<'m>>> Writing for Baseline<B> {
    #[inline(always)]
    fn get_written(&mut self) -> Result<B::Block, BenchError> {
        let mut block = self.0.alloc()?;
        block.write(block.number());
        Ok(block)
    }
}

/// What a baseline hands out.
pub(super) trait Numbered {
    /// What a device would be told.
    fn number(&self) -> u64;
}

impl Numbered for BaselineBlock<'_> {
    #[inline(always)]
    fn number(&self) -> u64 {
        BaselineBlock::number(self)
    }
}

/// An offset.
impl Numbered for u64 {
    #[inline(always)]
    fn number(&self) -> u64 {
        *self
    }
}

/// The process's allocator.
pub(super) struct Malloc<const N: usize>;

impl<const N: usize> Hand for Malloc<N> {
    type Thing = Malloced<N>;
    #[inline(always)]
    fn get(&mut self) -> Result<Malloced<N>, BenchError> {
        Ok(Malloced::alloc())
    }
    #[inline(always)]
    fn put(&mut self, block: Malloced<N>) -> Result<(), BenchError> {
        drop(block);
        Ok(())
    }
    #[inline(always)]
    fn number(block: &Malloced<N>) -> u64 {
        block.address() as u64
    }
}

impl<const N: usize> Writing for Malloc<N> {
    #[inline(always)]
    fn get_written(&mut self) -> Result<Malloced<N>, BenchError> {
        let mut block = Malloced::alloc();
        block.write(block.address() as u64);
        Ok(block)
    }
}
