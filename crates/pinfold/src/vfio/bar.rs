//! A device's registers.

use super::device::{Device, Region};
use crate::backend::error::DeviceError;
use crate::sys::window::Window;
use std::fmt;
use std::ptr::NonNull;

/// The registers of a BAR.
///
/// They are mapped into this process if the kernel allows it, and an access is then one load or
/// store. Parts that cannot be mapped (the page of an interrupt table, in old kernels) are accessed
/// by `pread` and `pwrite`.
///
/// Registers are little-endian on the bus; values here are the host's. An access is volatile, has
/// exactly the width of the call, and is ordered with other accesses of the same thread; a write is
/// ordered after all earlier stores of the thread to memory.
///
/// A device that is unplugged reads as all ones. If a device stops decoding its registers (memory
/// decoding is switched off in configuration space), a mapped access is a `SIGBUS`:
/// [`Device::set_bus_master`] leaves decoding on.
pub struct Bar {
    device: Device,
    region: Region,
    windows: Vec<(u64, Window)>,
}

impl Device {
    /// Returns the registers of a BAR (0 to 5), mapped if the kernel allows it.
    ///
    /// # Errors
    /// [`DeviceError::NoRegion`] if the device has no such BAR; [`DeviceError::Kernel`].
    pub fn bar(&self, index: u8) -> Result<Bar, DeviceError> {
        if index > 5 {
            return Err(DeviceError::NoRegion { bdf: self.address(), index: index.into() });
        }
        Bar::new(self.clone(), index.into())
    }
}

impl Bar {
    fn new(device: Device, index: u32) -> Result<Self, DeviceError> {
        let region = device.0.region(index)?;
        if !(region.region.readable && region.region.writable) {
            return Err(DeviceError::NoRegion { bdf: device.address(), index });
        }
        let mut windows = Vec::new();
        for &(offset, size) in &region.region.mappable {
            let position = region.region.offset.checked_add(offset);
            // A part outside the region, or an empty one, is not mapped; `pread` serves it.
            let inside = offset.checked_add(size).is_some_and(|end| end <= region.region.size);
            let (Some(position), Ok(len), true) =
                (position, usize::try_from(size), inside && size > 0)
            else {
                continue;
            };
            let window = Window::new(device.0.fd(), position, len)
                .map_err(|e| device.0.failed("mmap", e))?;
            windows.push((offset, window));
        }
        Ok(Self { device, region, windows })
    }

    /// Returns its size in bytes.
    #[expect(clippy::len_without_is_empty, reason = "an existing region is not empty")]
    pub fn len(&self) -> u64 {
        self.region.region.size
    }

    /// Returns how many bytes of it are mapped.
    fn mapped_len(&self) -> u64 {
        self.windows.iter().map(|(_, window)| window.len() as u64).sum()
    }

    /// Returns the address of the `len` bytes at `offset` in this process, if they are mapped
    /// contiguously: for drivers with their own register access. Valid as long as `self`.
    pub fn as_ptr(&self, offset: u64, len: usize) -> Option<NonNull<u8>> {
        let (window, at) = self.mapped(offset)?;
        window.part(at, len)
    }

    /// Returns its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Reads the 32 bits at `offset` bytes.
    ///
    /// # Errors
    /// [`DeviceError::Outside`] if they are not inside or not aligned; [`DeviceError::Kernel`] from
    /// `pread`.
    #[inline]
    pub fn read32(&self, offset: u64) -> Result<u32, DeviceError> {
        if let Some(value) = self.mapped(offset).and_then(|(window, at)| window.read::<u32>(at)) {
            return Ok(u32::from_le(value));
        }
        let mut bytes = [0; 4];
        self.slow_read(offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Reads the 64 bits at `offset` bytes.
    ///
    /// # Errors
    /// As for [`read32`](Self::read32).
    #[inline]
    pub fn read64(&self, offset: u64) -> Result<u64, DeviceError> {
        if let Some(value) = self.mapped(offset).and_then(|(window, at)| window.read::<u64>(at)) {
            return Ok(u64::from_le(value));
        }
        let mut bytes = [0; 8];
        self.slow_read(offset, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes the 32 bits at `offset` bytes, after all earlier stores of this thread to memory.
    ///
    /// # Errors
    /// As for [`read32`](Self::read32).
    #[inline]
    pub fn write32(&self, offset: u64, value: u32) -> Result<(), DeviceError> {
        match self.mapped(offset).and_then(|(window, at)| window.write(at, value.to_le())) {
            Some(()) => Ok(()),
            None => self.slow_write(offset, &value.to_le_bytes()),
        }
    }

    /// Writes the 64 bits at `offset` bytes, after all earlier stores of this thread to memory.
    ///
    /// # Errors
    /// As for [`read32`](Self::read32).
    #[inline]
    pub fn write64(&self, offset: u64, value: u64) -> Result<(), DeviceError> {
        match self.mapped(offset).and_then(|(window, at)| window.write(at, value.to_le())) {
            Some(()) => Ok(()),
            None => self.slow_write(offset, &value.to_le_bytes()),
        }
    }

    /// Returns the mapped window that contains `offset`, and the offset in it.
    #[inline]
    fn mapped(&self, offset: u64) -> Option<(&Window, usize)> {
        self.windows.iter().find_map(|(start, window)| {
            let at = usize::try_from(offset.checked_sub(*start)?).ok()?;
            (at < window.len()).then_some((window, at))
        })
    }

    #[cold]
    fn slow_read(&self, offset: u64, to: &mut [u8]) -> Result<(), DeviceError> {
        self.check(offset, to.len())?;
        self.region.read(&self.device.0, offset, to)
    }

    #[cold]
    fn slow_write(&self, offset: u64, from: &[u8]) -> Result<(), DeviceError> {
        self.check(offset, from.len())?;
        // `pwrite` is a system call; no earlier store of this thread is reordered after it.
        self.region.write(&self.device.0, offset, from)
    }

    fn check(&self, offset: u64, len: usize) -> Result<(), DeviceError> {
        if offset.is_multiple_of(len as u64) {
            return Ok(());
        }
        Err(DeviceError::Outside { index: self.region.index, offset, len, size: self.len() })
    }
}

impl fmt::Debug for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bar")
            .field("device", &self.device.address())
            .field("index", &self.region.index)
            .field("len", &self.len())
            .field("mapped", &self.mapped_len())
            .finish()
    }
}
