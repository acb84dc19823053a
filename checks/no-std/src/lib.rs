//! Proof that `pinfold-core` and `pinfold-vtd` need no standard library: everything they need is
//! below. The program is the examples `no_std_pool` and `own_backend`, and the units of an ACPI
//! table.
#![no_std]

extern crate alloc;

#[path = "../../../crates/core/examples/no_std_pool/pool.rs"]
mod pool;
#[path = "../../../crates/core/examples/own_backend/unit.rs"]
mod unit;

use alloc::sync::Arc;
use core::alloc::{GlobalAlloc, Layout};
use pinfold_core::access::FromDevice;
use pinfold_core::addr::Iova;
use pinfold_core::domain::Domain;
use pinfold_core::iova::IovaSpace;

struct NoMemory;

// SAFETY: it never returns memory.
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

/// Uses the example, so that the core is linked and not only checked. Returns where the descriptor
/// is for the device.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_submit_one(payload: u64, len: u64) -> u64 {
    let source = pool::StaticSource::take().ok().flatten();
    let mut driver = source.and_then(|source| pool::Driver::new(source).ok());
    let submitted = driver.as_mut().and_then(|driver| driver.submit(Iova::new(payload), len).ok());
    driver.as_mut().map(pool::Driver::complete);
    submitted.map_or(0, Iova::raw)
}

/// Returns whether a device has written into a page that was mapped for it, and is quiesced.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_receive() -> bool {
    let Ok(iovas) = IovaSpace::new(unit::BITS) else { return false };
    let domain = Domain::new(Arc::new(unit::Unit), iovas);
    // SAFETY: the memory is static.
    let registered = unsafe { domain.register_memory(unit::memory()) };
    let page = registered.ok().and_then(|()| unit::Page::take());
    let mapping = page.and_then(|page| domain.map(page, FromDevice).ok());
    mapping.is_some_and(|mapping| {
        let written = unit::device_writes(mapping.iova().start(), 1);
        domain.unmap(mapping).is_ok() && written
    })
}

/// Returns how many units an ACPI table describes.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_units(table: &[u8; 4096]) -> usize {
    pinfold_vtd::dmar::Dmar::parse(table).map_or(0, |dmar| dmar.units.len())
}
