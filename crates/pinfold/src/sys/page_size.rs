//! The size of the kernel's pages.

/// Returns the size of the kernel's pages, in bytes, as the C library knows it. (rustix looks for
/// the vDSO on the way, also where a tool such as valgrind has unmapped it.)
pub(crate) fn page_size() -> usize {
    // SAFETY: returns a number, and changes nothing.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // It is known on every system; 4096 is that of x86-64.
    usize::try_from(size).unwrap_or(4096)
}
