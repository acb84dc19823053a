//! A device's descriptor: its regions, its interrupts, its reset.

use super::container;
use super::layout::{self, CAP_SPARSE_MMAP, DeviceInfo, IrqInfo, IrqSet, RegionInfo};
use crate::sys::errno::{Errno, argsz, with_number, with_pointer, with_struct};
use std::os::fd::{AsRawFd, BorrowedFd};

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
