//! Allocs and frees proceed while the source acquires or releases a chunk.

use super::*;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// A heap whose calls report that they have begun, and wait until the test lets them continue.
struct Slow<'h> {
    heap: &'h Heap,
    began: Mutex<Sender<()>>,
    go_on: Mutex<Receiver<()>>,
    /// Whether calls of `acquire` and of `release` wait.
    waits: [std::sync::atomic::AtomicBool; 2],
}

impl Slow<'_> {
    fn call(&self, which: usize) {
        if self.waits[which].load(Ordering::Relaxed) {
            self.began.lock().send(()).unwrap();
            // With a limit, so that a held lock fails the test instead of hanging it.
            let waited = self.go_on.lock().recv_timeout(Duration::from_secs(20));
            assert_eq!(waited, Ok(()), "the others could not go on meanwhile");
        }
    }
}

// SAFETY: every call is forwarded to the heap.
unsafe impl ChunkSource for Slow<'_> {
    fn span(&self) -> NonNull<[u8]> {
        (&self.heap).span()
    }
    fn iova(&self) -> Iova {
        (&self.heap).iova()
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        self.call(0);
        (&self.heap).acquire(order)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        self.call(1);
        // SAFETY: the caller upholds the same contract.
        unsafe { (&self.heap).release(frame, order) };
    }
}

#[test]
fn others_allocate_and_free_while_the_source_acquires() {
    let heap = Heap::new(4 << 20);
    let (began, begun) = channel();
    let (go, go_on) = channel();
    let no = || std::sync::atomic::AtomicBool::new(false);
    let slow = Slow { heap: &heap, began: Mutex::new(began), go_on: Mutex::new(go_on), waits: [no(), no()] };
    // Through the pool's single and bulk calls, and through a `Local`.
    for grower in 0..3 {
        let pool = DmaPool::new(&slow, "slow", 64, 0, 0).unwrap();
        let mut local = pool.local();
        let held = local.alloc_raw().unwrap();
        let free = local.alloc_raw().unwrap();
        local.free_raw(free).unwrap();
        let block = local.alloc().unwrap();
        slow.waits[0].store(true, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let growing = scope.spawn(|| match grower {
                0 => pool.alloc_raw().is_ok(),
                1 => pool.fill(&mut [None; 64]) == 64,
                _ => pool.local().alloc_raw().is_ok(),
            });
            begun.recv().unwrap();
            // The only row belongs to its owner, so all others need a chunk.
            local.free_raw(held).unwrap();
            let again = local.alloc_raw().unwrap();
            pool.free_raw(again).unwrap();
            drop(block);
            assert!(pool.stats().blocks > 0);
            assert!(pool.memory(again).is_err());
            // Another owner that needs a chunk uses a block that is freed meanwhile, without a call of its own.
            let waiting = scope.spawn(|| pool.alloc_raw().is_ok());
            slow.waits[0].store(false, Ordering::Relaxed);
            drop(local);
            assert!(waiting.join().unwrap());
            go.send(()).unwrap();
            assert!(growing.join().unwrap());
        });
    }
}

#[test]
fn others_allocate_and_free_while_chunks_are_released() {
    let heap = Heap::new(4 << 20);
    let (began, begun) = channel();
    let (go, go_on) = channel();
    let no = || std::sync::atomic::AtomicBool::new(false);
    let slow = Slow { heap: &heap, began: Mutex::new(began), go_on: Mutex::new(go_on), waits: [no(), no()] };
    let pool = DmaPool::new(&slow, "slow", 64, 0, 0).unwrap();
    let blocks: Vec<_> = (0..500).map(|_| pool.alloc_raw().unwrap()).collect();
    let (kept, rest) = blocks.split_first().unwrap();
    pool.free_bulk(rest).unwrap();
    slow.waits[1].store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let shrinking = scope.spawn(|| pool.shrink_shared());
        begun.recv().unwrap();
        slow.waits[1].store(false, Ordering::Relaxed);
        assert_eq!(pool.stats().in_use, 1);
        let block = pool.alloc_raw().unwrap();
        pool.free_raw(block).unwrap();
        // Growing changes the list of chunks.
        let many: Vec<_> = (0..500).map(|_| pool.alloc_raw().unwrap()).collect();
        pool.free_bulk(&many).unwrap();
        go.send(()).unwrap();
        assert!(shrinking.join().unwrap() > 0);
    });
    pool.free_raw(*kept).unwrap();
}

#[test]
fn the_memory_of_a_block_is_in_the_span_or_an_error() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 100);
    let block = pool.alloc_raw().unwrap();
    assert_eq!(pool.memory_of(block).unwrap().len(), 100);
    for bytes in [-1, (2 << 20) - 99, 2 << 20, isize::MAX] {
        let error = pool.memory_of(moved(block, bytes)).map(|memory| memory.len());
        assert!(matches!(error, Err(FreeError::Foreign { .. })), "{bytes}: {error:?}");
    }
}
