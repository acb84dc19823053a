//! What a DMA pool promises, tested by public calls only.

#![expect(clippy::unwrap_used, reason = "a test")]

mod bounds;
mod frees;
mod heap;
mod layout;
mod life;
mod random;
mod subject;
mod threads;

use heap::Heap;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
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

thread_local!(static ALLOCATED: Cell<isize> = const { Cell::new(0) });

/// Counts the bytes that each thread allocates.
struct Counting;

// SAFETY: every call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(at, layout) }
    }
}

fn count(bytes: isize) {
    // The thread may be ending.
    let _ = ALLOCATED.try_with(|allocated| allocated.set(allocated.get() + bytes));
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How many bytes this thread has allocated and not freed.
fn allocated() -> isize {
    ALLOCATED.get()
}
