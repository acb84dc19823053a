//! Hints that memory is about to be written.

/// Asks the processor to load the cache line at `addr` for writing. A hint: it accesses nothing, whatever is there, and is ignored
/// where the processor has no such instruction.
#[inline(always)]
pub(crate) fn prefetch_for_write(addr: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch neither faults nor changes memory (AMD64 Architecture Programmer's Manual, volume 3, PREFETCH); a processor
    // without PREFETCHW executes it as a no-op, as all with 64 bits do.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) addr, options(nostack, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = addr;
}
