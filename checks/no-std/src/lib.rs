//! Proof that `pinfold-core` needs no standard library: everything it asks of the world is below.
#![no_std]

use core::alloc::{GlobalAlloc, Layout};

struct NoMemory;

// SAFETY: an allocator that always refuses hands out no memory, so there is nothing that it could get wrong.
unsafe impl GlobalAlloc for NoMemory {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        core::ptr::null_mut()
    }
    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[global_allocator]
static ALLOCATOR: NoMemory = NoMemory;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// Uses the core, so that it is linked and not only checked.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_frame_bytes() -> u64 {
    match pinfold_core::frame::Zone::new(512) {
        Ok(_) => pinfold_core::frame::Frame::BYTES,
        Err(_) => 0,
    }
}
