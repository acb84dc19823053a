//! The promises of a pool, tested by public calls only, but for `debug` and `ranges` with a source
//! over the heap.

mod bounds;
mod caches;
mod debug;
mod frees;
mod heap;
mod layout;
mod life;
mod panics;
mod random;
mod ranges;
mod subject;
mod threads;

use heap::Heap;
use std::sync::Arc;
use subject::{Pool, build};

/// A heap of so many MiB.
fn heap(mebibytes: usize) -> Arc<Heap> {
    Arc::new(Heap::new(mebibytes << 20))
}

/// A pool of blocks of `size` bytes.
fn pool(heap: &Arc<Heap>, size: usize) -> Pool {
    build(heap, size, 0, 0).unwrap()
}
