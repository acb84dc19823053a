//! Maps memory for a device, and owns frames for as long as they are mapped.

use pinfold::{Buffer, Domain};
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use pinfold_core::domain::{BackendError, StaticMapping};
use pinfold_core::mem::DmaMemory;
use virtio_drivers::BufferDirection;

const PAGE: u64 = 4096;

/// Returns the device's access for a direction.
pub(crate) fn access(direction: BufferDirection) -> Access {
    match direction {
        BufferDirection::DriverToDevice => Access::READ,
        BufferDirection::DeviceToDriver => Access::WRITE,
        BufferDirection::Both => Access::READ | Access::WRITE,
    }
}

/// Maps memory at an address other than 0, which `virtio-drivers` treats as a failure.
///
/// # Safety
/// Until [`Domain::unmap_static`](pinfold_core::domain::Domain::unmap_static) has returned `Ok`, or
/// permanently after an error that [stays reachable](BackendError::stays_reachable), the caller
/// keeps the memory valid, and no reference to it exists.
pub(crate) unsafe fn map(
    domain: &Domain,
    memory: DmaMemory<'_>,
    direction: BufferDirection,
) -> Result<StaticMapping, BackendError> {
    let reserve = || domain.reserve_iova(memory.len() as u64, PAGE);
    let mut place = reserve()?;
    if place.range().start().raw() == 0 {
        // The first reservation is released only after the second has been made.
        place = reserve()?;
    }
    // SAFETY: the caller upholds the contract of `map_at`.
    unsafe { domain.map_at(&place, place.range(), memory, access(direction)) }
}

/// Frames mapped for a device. Only [`unmap`](Self::unmap) frees them; otherwise they are leaked,
/// because a device may reach them.
#[derive(Debug)]
pub(crate) struct MappedFrames {
    buffer: std::mem::ManuallyDrop<Buffer>,
    mapping: StaticMapping,
}

impl MappedFrames {
    /// Maps the buffer. An error consumes it; its second value is how many bytes are quarantined.
    pub(crate) fn new(
        domain: &Domain,
        buffer: Buffer,
        direction: BufferDirection,
    ) -> Result<Self, (BackendError, u64)> {
        let mut buffer = std::mem::ManuallyDrop::new(buffer);
        let bytes = buffer.len() as u64;
        // SAFETY: the buffer is freed only after `unmap` has unmapped it, and accessed only through
        // `memory`.
        match unsafe { map(domain, buffer.memory(), direction) } {
            Ok(mapping) => Ok(Self { buffer, mapping }),
            Err(error) if error.stays_reachable() => {
                domain.count_quarantined(bytes);
                Err((error, bytes))
            }
            Err(error) => {
                // SAFETY: dropped once and not used afterwards; no device reaches it.
                unsafe { std::mem::ManuallyDrop::drop(&mut buffer) };
                Err((error, 0))
            }
        }
    }

    pub(crate) fn iova(&self) -> IovaRange {
        self.mapping.iova()
    }

    pub(crate) fn memory(&self) -> DmaMemory<'_> {
        self.buffer.memory()
    }

    /// Unmaps the frames, passes their contents to `read`, and frees them. If they cannot be
    /// unmapped they are quarantined; returns how many bytes.
    pub(crate) fn unmap(
        mut self,
        domain: &Domain,
        read: impl FnOnce(DmaMemory<'_>),
    ) -> Result<(), u64> {
        let iova = self.mapping.iova();
        let unmapped = domain.unmap_static(self.mapping);
        read(self.buffer.memory());
        match unmapped {
            Ok(()) => {
                // SAFETY: dropped once, as `self` is consumed; no device reaches it.
                unsafe { std::mem::ManuallyDrop::drop(&mut self.buffer) };
                Ok(())
            }
            Err(error) => {
                let bytes = self.buffer.len() as u64;
                tracing::error!(%iova, bytes, %error, "frames are quarantined: a device may reach them");
                domain.count_quarantined(bytes);
                Err(bytes)
            }
        }
    }
}
