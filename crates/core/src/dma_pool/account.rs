//! The pool's account of itself.

use super::geometry::bytes_of;
use super::shared::Shared;
use super::{ChunkSource, Damage, PoolStats, RawBlock};
use alloc::vec::Vec;

impl<S: ChunkSource> Shared<S> {
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
            damaged: self.watch.as_ref().map_or(0, |watch| watch.book().damaged()),
        };
        self.depot.take_tally(&mut self.lock());
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

    /// What debug mode has found so far.
    pub(super) fn damages(&self) -> Vec<Damage> {
        self.watch.as_ref().map_or_else(Vec::new, |watch| watch.book().damages().to_vec())
    }

    /// Looks at every free block in debug mode. Nobody else may be at work.
    pub(super) fn inspect(&self) {
        let Some(watch) = &self.watch else { return };
        let chunks = self.chunks.lock();
        let mut book = watch.book();
        for chunk in chunks.iter() {
            for index in 0..u64::from(chunk.blocks) {
                let offset = chunk.offset() + self.geometry.offset_of(index);
                let block = self.block_at(offset);
                let is_free = self.find(block).is_ok_and(|found| !found.row.is_live(found.bit));
                if let (true, Ok(memory)) = (is_free, self.memory_of(block)) {
                    book.inspect(offset, block, memory);
                }
            }
        }
    }
}
