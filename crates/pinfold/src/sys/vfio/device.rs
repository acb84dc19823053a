//! A device's descriptor: its regions, its interrupts, its reset.

use super::container;
use super::layout::{self, CAP_SPARSE_MMAP, DeviceInfo, IrqInfo, IrqSet, RegionInfo};
use crate::sys::errno::{Errno, argsz, with_number, with_pointer, with_struct};
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

/// A region of a device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Region {
    /// Bytes; 0 if the device has no such region.
    pub(crate) size: u64,
    /// Its offset in the device's file.
    pub(crate) offset: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// Offset and size of each part that can be mapped.
    pub(crate) mappable: Vec<(u64, u64)>,
}

/// Returns whether the device can be reset alone.
pub(crate) fn can_reset(device: BorrowedFd<'_>) -> Result<bool, Errno> {
    let mut info = DeviceInfo { argsz: argsz::<DeviceInfo>(), ..DeviceInfo::default() };
    // SAFETY: the structure is the one that the call fills in.
    unsafe { with_struct(device, layout::DEVICE_GET_INFO, &mut info) }?;
    Ok(info.flags & layout::DEVICE_RESETS != 0)
}

/// Resets the device. When it returns the device does no DMA and has lost its state.
pub(crate) fn reset(device: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: the call takes no argument.
    unsafe { with_number(device, layout::DEVICE_RESET, 0) }.map(drop)
}

/// Returns the region with this index.
pub(crate) fn region(device: BorrowedFd<'_>, index: u32) -> Result<Region, Errno> {
    let mut head = RegionInfo { argsz: argsz::<RegionInfo>(), index, ..RegionInfo::default() };
    // SAFETY: the structure is the one that the call fills in.
    unsafe { with_struct(device, layout::DEVICE_GET_REGION_INFO, &mut head) }?;
    let mut mappable = Vec::new();
    if head.flags & layout::REGION_MMAP != 0 && head.size > 0 {
        mappable.push((0, head.size));
        if head.flags & layout::REGION_CAPS != 0 {
            let (bytes, filled) =
                container::grown(device, layout::DEVICE_GET_REGION_INFO, head, head.argsz)?;
            if let Some(cap) = layout::find(&bytes, filled.cap_offset, CAP_SPARSE_MMAP) {
                mappable = layout::pairs(cap);
            }
        }
    }
    Ok(Region {
        size: head.size,
        offset: head.offset,
        readable: head.flags & layout::REGION_READ != 0,
        writable: head.flags & layout::REGION_WRITE != 0,
        mappable,
    })
}

/// Returns how many interrupts of this kind can signal an eventfd.
pub(crate) fn irqs(device: BorrowedFd<'_>, index: u32) -> Result<u32, Errno> {
    let mut info = IrqInfo { argsz: argsz::<IrqInfo>(), index, ..IrqInfo::default() };
    // SAFETY: the structure is the one that the call fills in.
    unsafe { with_struct(device, layout::DEVICE_GET_IRQ_INFO, &mut info) }?;
    Ok(if info.flags & layout::IRQ_EVENTFD != 0 { info.count } else { 0 })
}

/// Connects the interrupts of this kind, from 0 on, to `events`; with none, disables them all.
pub(crate) fn set_irqs(
    device: BorrowedFd<'_>,
    index: u32,
    events: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let count = u32::try_from(events.len()).map_err(|_| Errno::new(libc::EINVAL))?;
    let data = if events.is_empty() { layout::IRQ_DATA_NONE } else { layout::IRQ_DATA_EVENTFD };
    let words = size_of::<IrqSet>() / 4;
    let len = u32::try_from((words + events.len()) * 4).map_err(|_| Errno::new(libc::EINVAL))?;
    let mut set: Vec<u32> = Vec::with_capacity(words + events.len());
    // The five words of `IrqSet`, in order, and the descriptors behind them.
    set.extend([len, data | layout::IRQ_ACTION_TRIGGER, index, 0, count]);
    set.extend(events.iter().map(|event| event.as_raw_fd().cast_unsigned()));
    // SAFETY: `set` is a `vfio_irq_set` with `count` descriptors behind it, `len` bytes in all; the
    // call only reads.
    unsafe { with_pointer(device, layout::DEVICE_SET_IRQS, set.as_mut_ptr().cast()) }.map(drop)
}

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
    /// Maps `len` bytes of the device's file from `offset`.
    pub(crate) fn new(device: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Self, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED and with no hint the kernel chooses an unused range.
        let base = unsafe {
            rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, device, offset)
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

    /// Reads a register; `None` if it is not inside or not aligned.
    #[inline]
    pub(crate) fn read<T: Register>(&self, offset: usize) -> Option<T> {
        let at = self.at::<T>(offset)?;
        // SAFETY: inside the mapping and aligned (it begins at a page); any bits are a `T`.
        // Volatile: one access of this width, neither omitted nor repeated.
        Some(unsafe { at.read_volatile() })
    }

    /// Writes a register after all earlier stores of this thread; `None` if it is not inside or not
    /// aligned.
    #[inline]
    pub(crate) fn write<T: Register>(&self, offset: usize, value: T) -> Option<()> {
        let at = self.at::<T>(offset)?;
        store_barrier();
        // SAFETY: as for the read; a device's register is no Rust object.
        unsafe { at.write_volatile(value) };
        Some(())
    }
}

/// Orders earlier stores to memory before later writes to registers, as the device sees them.
///
/// x86 does not reorder them, so there only the compiler must not.
#[inline]
fn store_barrier() {
    use std::sync::atomic::{Ordering, fence};
    fence(if cfg!(target_arch = "x86_64") { Ordering::Release } else { Ordering::SeqCst });
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
