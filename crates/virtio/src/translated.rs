//! [`Translated`]: a transport that accepts `VIRTIO_F_ACCESS_PLATFORM`.

use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{PhysAddr, Result};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// `VIRTIO_F_ACCESS_PLATFORM`, virtio 1.2 section 6: the platform, here an IOMMU, translates the
/// device's accesses.
pub const ACCESS_PLATFORM: u64 = 1 << 33;

/// A transport for a device behind an IOMMU.
///
/// The drivers of `virtio-drivers` do not support `VIRTIO_F_ACCESS_PLATFORM`, and a device behind
/// an IOMMU (QEMU: `iommu_platform=on`) refuses a driver that does not accept it. The `Hal`
/// translates addresses, not the driver, so this transport accepts the feature if the device offers
/// it.
///
/// If the device nevertheless refuses the features (it clears
/// [`FEATURES_OK`](DeviceStatus::FEATURES_OK), virtio 1.2 section 3.1.1), the transport reports
/// that it has no queues: a driver's `new` then fails with
/// [`InvalidParam`](virtio_drivers::Error::InvalidParam) instead of using a device that ignores it.
#[derive(Debug)]
pub struct Translated<T: Transport, K = ()> {
    /// Dropped first: the drop of a transport may access registers that `_keep` maps.
    transport: T,
    refused: bool,
    _keep: K,
}

impl<T: Transport> Translated<T> {
    /// Wraps the transport of a device whose addresses are translated.
    pub fn new(transport: T) -> Self {
        Self::keeping(transport, ())
    }
}

impl<T: Transport, K> Translated<T, K> {
    /// As [`new`](Self::new), for a transport that needs `keep` for as long as it lives.
    pub(crate) fn keeping(transport: T, keep: K) -> Self {
        Self { transport, refused: false, _keep: keep }
    }
}

impl<T: Transport, K> Transport for Translated<T, K> {
    fn device_type(&self) -> DeviceType {
        self.transport.device_type()
    }

    fn read_device_features(&mut self) -> u64 {
        self.transport.read_device_features()
    }

    fn write_driver_features(&mut self, driver_features: u64) {
        let offered = self.transport.read_device_features() & ACCESS_PLATFORM;
        self.transport.write_driver_features(driver_features | offered);
    }

    fn max_queue_size(&mut self, queue: u16) -> u32 {
        if self.refused { 0 } else { self.transport.max_queue_size(queue) }
    }

    fn notify(&mut self, queue: u16) {
        self.transport.notify(queue);
    }

    fn get_status(&self) -> DeviceStatus {
        self.transport.get_status()
    }

    fn set_status(&mut self, status: DeviceStatus) {
        self.transport.set_status(status);
        let asked = status.contains(DeviceStatus::FEATURES_OK);
        self.refused = asked && !self.transport.get_status().contains(DeviceStatus::FEATURES_OK);
        if self.refused {
            tracing::error!("the device refuses the driver's features");
        }
    }

    fn set_guest_page_size(&mut self, guest_page_size: u32) {
        self.transport.set_guest_page_size(guest_page_size);
    }

    fn requires_legacy_layout(&self) -> bool {
        self.transport.requires_legacy_layout()
    }

    fn queue_set(
        &mut self,
        queue: u16,
        size: u32,
        descriptors: PhysAddr,
        driver_area: PhysAddr,
        device_area: PhysAddr,
    ) {
        self.transport.queue_set(queue, size, descriptors, driver_area, device_area);
    }

    fn queue_unset(&mut self, queue: u16) {
        self.transport.queue_unset(queue);
    }

    fn queue_used(&mut self, queue: u16) -> bool {
        self.transport.queue_used(queue)
    }

    fn ack_interrupt(&mut self) -> InterruptStatus {
        self.transport.ack_interrupt()
    }

    fn read_config_generation(&self) -> u32 {
        self.transport.read_config_generation()
    }

    fn read_config_space<C: FromBytes + IntoBytes>(&self, offset: usize) -> Result<C> {
        self.transport.read_config_space(offset)
    }

    fn write_config_space<C: IntoBytes + Immutable>(
        &mut self,
        offset: usize,
        value: C,
    ) -> Result<()> {
        self.transport.write_config_space(offset, value)
    }
}
