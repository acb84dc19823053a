//! A device's registers.

use super::device::{Device, Region};
use super::error::DeviceError;
use crate::sys::vfio::device::Window;
use std::fmt;
use std::ptr::NonNull;

/// The registers behind a BAR.
///
/// Where the kernel allows it they are mapped into this process, and an access is one load or store. What can not be
/// mapped (the page of an interrupt table, for old kernels) is reached by `pread` and `pwrite`.
///
/// Registers are little-endian on the bus and so are the values here. An access is volatile, of exactly the width asked
/// for, and in order with other accesses of the same thread; a write comes after all that the thread stored to memory
/// before.
///
/// A device that is gone reads as all ones. If the device stops decoding its registers (its memory is switched off
/// in configuration space) a mapped access is a `SIGBUS`: [`Device::set_bus_master`] leaves decoding on.
pub struct Bar {
    device: Device,
    region: Region,
    windows: Vec<(u64, Window)>,
}

impl Bar {
    pub(super) fn new(device: Device, index: u32) -> Result<Self, DeviceError> {
        let region = device.0.region(index)?;
        if !(region.region.readable && region.region.writable) {
            return Err(DeviceError::NoRegion { bdf: device.address(), index });
        }
        let mut windows = Vec::new();
        for &(offset, size) in &region.region.mappable {
            let place = region.region.offset.checked_add(offset);
            // A part that is no part of the region, or is empty, is not mapped; `pread` serves it.
            let inside = offset.checked_add(size).is_some_and(|end| end <= region.region.size);
            let (Some(place), Ok(len), true) = (place, usize::try_from(size), inside && size > 0) else {
                continue;
            };
            let window = Window::new(device.0.fd(), place, len).map_err(|e| device.0.failed("mmap", e))?;
            windows.push((offset, window));
        }
        Ok(Self { device, region, windows })
    }

    /// How many bytes.
    #[expect(clippy::len_without_is_empty, reason = "a region that is there is not empty")]
    pub fn len(&self) -> u64 {
        self.region.region.size
    }

    /// How many of them are mapped.
    pub fn mapped_len(&self) -> u64 {
        self.windows.iter().map(|(_, window)| window.len() as u64).sum()
    }

    /// Where the `len` bytes at `offset` are in this process, if they are mapped in one piece: for drivers that bring
    /// their own way to registers. It is valid as long as this value lives.
    pub fn as_ptr(&self, offset: u64, len: usize) -> Option<NonNull<u8>> {
        let (window, at) = self.mapped(offset)?;
        window.part(at, len)
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Reads the 32 bits at `offset` bytes.
    ///
    /// # Errors
    /// [`DeviceError::Outside`] where they are not inside or not aligned; [`DeviceError::Kernel`] by `pread`.
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

    /// Writes the 32 bits at `offset` bytes, after everything that this thread stored to memory before.
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

    /// Writes the 64 bits at `offset` bytes, after everything that this thread stored to memory before.
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

    /// The mapped part that `offset` lies in, and where in it.
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
        // `pwrite` is a call into the kernel, which no store of this thread overtakes.
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
