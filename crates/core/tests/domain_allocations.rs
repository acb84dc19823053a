//! Unmapping allocates nothing, counted at the global allocator.

#![expect(clippy::unwrap_used, reason = "a test")]

use pinfold_core::access::{Access, FromDevice};
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{
    Backend, BackendError, Domain, DomainId, Pinned, Properties, Revocation, Wait, WindowToken,
};
use pinfold_core::invalidate::Ticket;
use pinfold_core::iova::IovaSpace;
use pinfold_core::mem::DmaMemory;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::NonNull;
use std::task::Poll;

struct Counting;

// Of the thread, since the one that runs the tests allocates at any time.
thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A backend without a device: all flushes have completed.
struct NoDevice;

impl Backend for NoDevice {
    fn properties(&self) -> Properties {
        Properties::new("no device")
    }
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn map(
        &self,
        _: IovaRange,
        _: DmaMemory,
        _: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        Ok(())
    }
    fn revoke<'w>(
        &self,
        _: Revocation<'w>,
        _: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        Ok(Ticket::COMPLETED)
    }
    fn wait(&self, _: Ticket, _: Wait<'_>) -> Poll<Result<(), BackendError>> {
        Poll::Ready(Ok(()))
    }
}

const BYTES: usize = 1 << 20;

/// Half a window of memory.
struct Buffer(NonNull<u8>);

impl Buffer {
    fn new() -> Self {
        let layout = Layout::from_size_align(BYTES, 4096).unwrap();
        // SAFETY: the layout is not empty.
        Self(NonNull::new(unsafe { System.alloc_zeroed(layout) }).unwrap())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: from `new`, with this layout.
        unsafe { System.dealloc(self.0.as_ptr(), Layout::from_size_align(BYTES, 4096).unwrap()) }
    }
}

// SAFETY: the memory is the value's own.
unsafe impl Send for Buffer {}
// SAFETY: the memory is the value's own, and no reference into it exists.
unsafe impl Pinned for Buffer {
    fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: from `new`, and valid until the drop.
        unsafe { DmaMemory::from_raw(self.0, BYTES) }
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

/// More windows than an owner keeps: the last ones are closed.
const BUFFERS: usize = 2 * 160;

#[test]
fn unmapping_allocates_nothing_also_where_windows_become_empty() {
    let domain = Domain::new(std::sync::Arc::new(NoDevice), IovaSpace::new(39).unwrap());
    let mut local = domain.local();
    let mapped: Vec<_> =
        (0..BUFFERS).map(|_| local.map(Buffer::new(), FromDevice).unwrap()).collect();
    assert!(domain.stats().windows >= BUFFERS as u64 / 2);
    let before = ALLOCATIONS.get();
    for mapping in mapped {
        drop(local.unmap(mapping).unwrap());
    }
    assert_eq!(ALLOCATIONS.get(), before);
    assert!(domain.stats().windows < BUFFERS as u64 / 2, "windows were closed");
}
