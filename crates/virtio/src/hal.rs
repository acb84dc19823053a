//! The implementation of `Hal`, through which `virtio-drivers` allocates and shares memory.

use crate::slot::{Place, Process};
use crate::stack::ShareError;
use std::io::Write;
use std::marker::PhantomData;
use std::ptr::NonNull;
use virtio_drivers::{BufferDirection, Hal, PhysAddr};

/// The platform of a driver whose memory is in the place `P`:
/// `VirtIOBlk::<PinfoldHal, _>::new(..)`.
///
/// What a device can access, and what happens on failure, is described in the [crate]
/// documentation.
#[derive(Debug)]
pub struct PinfoldHal<P: Place = Process>(PhantomData<fn() -> P>);

// SAFETY: `dma_alloc` returns zeroed frames at multiples of 4096 that only the driver and its
// device access until `dma_dealloc`. `share` and `unshare` access the payload only during the call;
// a device accesses a payload in place only until `unshare` returns. `mmio_phys_to_virt` does not
// return.
unsafe impl<P: Place> Hal for PinfoldHal<P> {
    fn dma_alloc(pages: usize, direction: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        let allocated = P::slot().with_owned(|stack| stack.dma_alloc(pages, direction));
        allocated.unwrap_or(Err(ShareError::NotInstalled)).unwrap_or_else(|error| {
            tracing::error!(pages, %error, "cannot allocate a ring");
            (0, NonNull::dangling()) // the driver treats 0 as a failure
        })
    }

    unsafe fn dma_dealloc(paddr: PhysAddr, vaddr: NonNull<u8>, pages: usize) -> i32 {
        let freed = P::slot().with_last(|stack| stack.dma_dealloc(paddr, vaddr, pages));
        if freed == Some(true) { 0 } else { -1 }
    }

    unsafe fn mmio_phys_to_virt(paddr: PhysAddr, size: usize) -> NonNull<u8> {
        refuse(format_args!(
            "cannot map {size} bytes of registers at {paddr:#x}: user space has no physical addresses; open the transport with pinfold_virtio::pci"
        ))
    }

    unsafe fn share(buffer: NonNull<[u8]>, direction: BufferDirection) -> PhysAddr {
        // SAFETY: the caller guarantees that it is valid and exclusive during the call.
        // `VirtQueue::add`, which calls this, requires of its callers that nothing accesses it
        // until it is unshared.
        let shared = P::slot().with(|stack| unsafe { stack.share(buffer, direction) });
        shared.unwrap_or(Err(ShareError::NotInstalled)).unwrap_or_else(|error| fail(&error))
    }

    unsafe fn unshare(paddr: PhysAddr, buffer: NonNull<[u8]>, direction: BufferDirection) {
        // SAFETY: the caller guarantees that it is the payload shared at `paddr`, valid and
        // exclusive during the call.
        let unshared =
            P::slot().with_last(|stack| unsafe { stack.unshare(paddr, buffer, direction) });
        unshared.unwrap_or(Err(ShareError::NotInstalled)).unwrap_or_else(|error| fail(&error));
    }
}

/// Panics, or aborts the process where a device may still access the payload: unwinding would
/// return it to its owner, who may free it.
fn fail(error: &ShareError) -> ! {
    if error.stays_reachable() {
        tracing::error!(%error, "the process is aborted");
        // Printed too, in case there is no tracing subscriber. An error of stderr cannot be
        // reported.
        let _ = writeln!(std::io::stderr(), "pinfold-virtio: {error}");
        std::process::abort()
    }
    refuse(format_args!("{error}"))
}

#[expect(
    clippy::panic,
    reason = "the trait cannot report errors, and continuing would hang or expose memory"
)]
fn refuse(why: std::fmt::Arguments<'_>) -> ! {
    panic!("{why}")
}
