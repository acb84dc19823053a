//! Registers in this process's address space: a BAR behind VFIO or in `/sys`, a unit in `/dev/mem`.

use super::errno::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
#[cfg(not(any(target_arch = "aarch64", target_arch = "riscv64")))]
use std::sync::atomic::{Ordering, fence};

/// Registers of a device in this process's address space.
#[derive(Debug)]
pub(crate) struct Window {
    base: NonNull<c_void>,
    len: usize,
}

// SAFETY: a range of the address space, which all threads share, accessed by volatile accesses of
// whole registers.
unsafe impl Send for Window {}
// SAFETY: as for `Send`: its methods make single accesses, which the device serialises.
unsafe impl Sync for Window {}

impl Window {
    /// Maps `len` bytes of a file of registers from `offset`.
    pub(crate) fn new(file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Self, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED and with no hint the kernel chooses an unused range.
        let base = unsafe {
            rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, file, offset)
        }?;
        let base = NonNull::new(base).ok_or(Errno::from(rustix::io::Errno::NOMEM))?;
        Ok(Self { base, len })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of the `len` bytes at `offset`, if they are inside.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        // SAFETY: `offset` is inside the mapping, which is one allocation of `len` bytes.
        inside.then(|| unsafe { self.base.byte_add(offset) }.cast())
    }

    /// Returns the address of a register at `offset`, if it is inside and aligned.
    fn at<T>(&self, offset: usize) -> Option<NonNull<T>> {
        let at = self.part(offset, size_of::<T>())?;
        offset.is_multiple_of(size_of::<T>()).then_some(at.cast())
    }

    /// Reads a register before all later loads of this thread; `None` if it is not inside or not
    /// aligned.
    #[inline]
    pub(crate) fn read<T: Register>(&self, offset: usize) -> Option<T> {
        let at = self.at::<T>(offset)?;
        // SAFETY: inside the mapping and aligned (it begins at a page); any bits are a `T`.
        // Volatile: one access of this width, neither omitted nor repeated.
        let value = unsafe { at.read_volatile() };
        after_read();
        Some(value)
    }

    /// Writes a register after all earlier stores of this thread; `None` if it is not inside or not
    /// aligned.
    #[inline]
    pub(crate) fn write<T: Register>(&self, offset: usize, value: T) -> Option<()> {
        let at = self.at::<T>(offset)?;
        before_write();
        // SAFETY: as for the read; a device's register is no Rust object.
        unsafe { at.write_volatile(value) };
        Some(())
    }
}

/// Orders earlier stores to memory before later writes to registers, as the device sees them.
///
/// x86 does not reorder them, so there only the compiler must not. Elsewhere a fence between threads
/// is not enough: Arm's need not reach a device, and RISC-V's orders no access to one.
#[inline]
fn before_write() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier, which changes neither memory nor registers nor the stack.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
    #[cfg(target_arch = "riscv64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("fence w, o", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "aarch64", target_arch = "riscv64")))]
    fence(Ordering::Release);
}

/// Orders reads of registers before later loads from memory, which a device has stored before.
#[inline]
fn after_read() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier, which changes neither memory nor registers nor the stack.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags));
    }
    #[cfg(target_arch = "riscv64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("fence i, r", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "aarch64", target_arch = "riscv64")))]
    fence(Ordering::Acquire);
}

/// A type for which any bits are a value.
pub(crate) trait Register: Copy {}
impl Register for u32 {}
impl Register for u64 {}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the range was mapped for this value alone, and readers borrow the value.
        if let Err(errno) = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.len) } {
            tracing::error!(%errno, "cannot unmap registers");
        }
    }
}
