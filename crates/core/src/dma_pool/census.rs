//! The calls that visit all rows of a pool: its statistics, debug mode's inspection, and its destruction.

use super::geometry::bytes_of;
use super::pool::DmaPool;
use super::raw::RawBlock;
use super::source::ChunkSource;
use super::stats::PoolStats;
use super::watch::Damage;
use crate::mem::DmaMemory;
use alloc::vec::Vec;
use core::fmt;

/// A pool that cannot be destroyed because blocks are still allocated. It is unchanged.
pub struct Busy<S: ChunkSource> {
    /// The pool.
    pub pool: DmaPool<S>,
    /// How many blocks are allocated.
    pub blocks: u64,
    /// One of them.
    pub first: RawBlock,
}

impl<S: ChunkSource> fmt::Debug for Busy<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Busy")
            .field("blocks", &self.blocks)
            .field("first", &self.first)
            .finish_non_exhaustive()
    }
}

impl<S: ChunkSource> fmt::Display for Busy<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, blocks, at) = (self.pool.name(), self.blocks, self.first.as_ptr());
        write!(
            f,
            "cannot destroy pool {name:?}: {blocks} blocks are allocated, one of them at {at:p}; free them first"
        )
    }
}

impl<S: ChunkSource> core::error::Error for Busy<S> {}

impl<S: ChunkSource> DmaPool<S> {
    /// Releases all chunks.
    ///
    /// # Errors
    /// [`Busy`] if raw blocks are still allocated: it contains the unchanged pool, their number, and one of them.
    #[expect(clippy::result_large_err, reason = "the error returns the pool")]
    pub fn destroy(self) -> Result<(), Busy<S>> {
        match self.live() {
            (_, None) => Ok(()),
            (blocks, Some(first)) => Err(Busy { pool: self, blocks, first }),
        }
    }

    /// Returns how many blocks are allocated, and one of them.
    fn live(&self) -> (u64, Option<RawBlock>) {
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

    /// Returns the pool's counters; they are displayed as the kernel's report. Time proportional to the number of blocks.
    pub fn stats(&self) -> PoolStats {
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
            damaged: self.watch.as_ref().map_or(0, |watch| watch.history().damaged()),
        };
        self.depot.record(&mut self.lock());
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

    /// Returns how many bytes the pool's own state takes: the state of its blocks, the directory of its chunks, and itself. O(chunks).
    #[cfg(feature = "bench-internals")]
    pub fn metadata_bytes(&self) -> usize {
        size_of::<Self>() + self.directory.metadata_bytes() + self.chunks.lock().metadata_bytes()
    }

    /// Calls `each` with every block of the pool, allocated or free, and its memory, in ascending order: to register the blocks
    /// with hardware, or to write what stays the same while they are allocated and freed. The pool does not write to blocks
    /// except in [`alloc_zeroed`](Self::alloc_zeroed) and in debug mode, in which what is written to a free block is lost.
    /// Blocks of chunks that are acquired later are not seen: with [equal limits](Self::set_limits) there are none.
    ///
    /// A block is not allocated by being seen: a free of it is refused, unless it is allocated as a raw one. A device may be
    /// writing to those that are allocated. Time proportional to the number of blocks. Requires exclusive access to the
    /// pool, so that no chunk is acquired or released meanwhile.
    pub fn for_each_block(&mut self, mut each: impl FnMut(RawBlock, DmaMemory<'_>)) {
        for chunk in self.chunks.lock().iter() {
            for index in 0..u64::from(chunk.blocks) {
                let block = self.block_at(chunk.offset() + self.geometry.offset_of(index));
                let Ok(memory) = self.memory_of(block) else { continue };
                each(block, memory);
                if let (Some(watch), Ok(found)) = (&self.watch, self.find(block))
                    && !found.site.row.is_live(found.site.bit)
                {
                    watch.history().refill(memory);
                }
            }
        }
    }

    /// Checks every free block now, in debug mode, and returns all reports as [`damages`](Self::damages) does. Time
    /// proportional to the bytes of the pool.
    pub fn inspect(&mut self) -> Vec<Damage> {
        let Some(watch) = &self.watch else { return Vec::new() };
        let chunks = self.chunks.lock();
        let mut history = watch.history();
        for chunk in chunks.iter() {
            for index in 0..u64::from(chunk.blocks) {
                let offset = chunk.offset() + self.geometry.offset_of(index);
                let block = self.block_at(offset);
                let is_free = self.find(block).is_ok_and(|found| !found.site.row.is_live(found.site.bit));
                if let (true, Ok(memory)) = (is_free, self.memory_of(block)) {
                    history.inspect(offset, block, memory);
                }
            }
        }
        history.damages().to_vec()
    }
}
