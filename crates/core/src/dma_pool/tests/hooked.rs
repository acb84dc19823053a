//! A source that runs a test's code while it acquires a chunk.

use super::*;
use std::cell::RefCell;

pub(super) type Hook = Box<dyn FnOnce()>;

std::thread_local! {
    /// What the source does in its next `acquire` on this thread.
    pub(super) static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
}

/// A heap that runs the hook before it acquires.
pub(super) struct Hooked(pub(super) Heap);

// SAFETY: every call is forwarded to the heap.
unsafe impl ChunkSource for Hooked {
    fn span(&self) -> NonNull<[u8]> {
        self.0.span()
    }
    fn iova(&self) -> Iova {
        self.0.iova()
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        if let Some(hook) = HOOK.take() {
            hook();
        }
        self.0.acquire(order)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.release(frame, order) };
    }
}
