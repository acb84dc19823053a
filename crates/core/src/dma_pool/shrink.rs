//! Shrinking: releases chunks without allocated blocks, with exclusive access to the pool or beside its owners.

use super::pool::DmaPool;
use super::source::ChunkSource;

impl<S: ChunkSource> DmaPool<S> {
    /// Releases chunks all of whose blocks are in the depot, as far as the [minimum](super::Limits::minimum) allows, and
    /// returns how many bytes those were. What owners hold stays; drop a [`Local`](super::Local) to move what it holds to the
    /// depot.
    ///
    /// Time proportional to the number of rows. Waits for the source. Requires exclusive access to the pool, so that no
    /// [memory](Self::memory) of a freed block is still borrowed.
    pub fn shrink(&mut self) -> u64 {
        self.chunks.lock().iter().for_each(|chunk| chunk.end_loans());
        self.shrink_shared()
    }

    /// As [`shrink`](Self::shrink), while other threads use the pool and hold [`Local`](super::Local)s and blocks. Keeps, besides
    /// what they hold, each chunk of which [`memory`](Self::memory) was called for a block since the last `shrink`: that
    /// memory may still be borrowed. In a pool of which only [`Block`](super::Block)s are used there is none.
    ///
    /// A block in an owner's stash or rows keeps its chunk. To have an owner return all that it holds, replace its handle:
    /// `local = pool.local()`.
    ///
    /// Time proportional to the number of rows. Waits for the source, with no lock held.
    pub fn shrink_shared(&self) -> u64 {
        self.depot.drain(&mut self.lock());
        self.release_each(|chunk| self.depot.remove_if_whole(chunk.rows(), || !chunk.is_lent()))
    }
}
