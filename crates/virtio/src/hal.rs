//! The implementation of `Hal`, through which `virtio-drivers` allocates and shares memory, and the
//! transport over translated addresses.

use crate::slot::{Place, Process};
use crate::stack::ShareError;
use std::io::Write;
use std::marker::PhantomData;
use std::ptr::NonNull;
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{BufferDirection, Hal, PhysAddr, Result};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The platform of a driver whose memory is in the place `P`:
/// `VirtIOBlk::<PinfoldHal, _>::new(..)`. The [crate] documentation describes the memory that a
/// device can access, and the behaviour on failure.
#[derive(Debug)]
pub struct PinfoldHal<P: Place = Process>(PhantomData<fn() -> P>);

// SAFETY: `dma_alloc` returns zeroed frames at multiples of 4096 that only the driver and its
// device access until `dma_dealloc`. `share` and `unshare` access the payload only during the call;
// a device accesses a payload in place only until `unshare` returns. `mmio_phys_to_virt` does not
// return.
unsafe impl<P: Place> Hal for PinfoldHal<P> {
    fn dma_alloc(pages: usize, direction: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        let allocated = P::SLOT.with_owned(|stack| stack.dma_alloc(pages, direction));
        allocated.unwrap_or(Err(ShareError::NotInstalled)).unwrap_or_else(|error| {
            tracing::error!(pages, %error, "cannot allocate a ring");
            (0, NonNull::dangling()) // the driver treats 0 as a failure
        })
    }

    unsafe fn dma_dealloc(paddr: PhysAddr, vaddr: NonNull<u8>, pages: usize) -> i32 {
        let freed = P::SLOT.with_last(|stack| stack.dma_dealloc(paddr, vaddr, pages));
        if freed == Some(true) { 0 } else { -1 }
    }

    unsafe fn mmio_phys_to_virt(paddr: PhysAddr, size: usize) -> NonNull<u8> {
        refuse(format_args!(
            "cannot map {size} bytes of registers at {paddr:#x}: user space has no physical addresses; open the transport with pinfold_virtio::pci"
        ))
    }

    unsafe fn share(buffer: NonNull<[u8]>, direction: BufferDirection) -> PhysAddr {
        // SAFETY: the caller guarantees that it is valid and exclusive during the call.
        // `VirtQueue::add`, which calls this, requires of its callers that nothing accesses it
        // until it is unshared.
        let shared = P::SLOT.with(|stack| unsafe { stack.share(buffer, direction) });
        shared.unwrap_or(Err(ShareError::NotInstalled)).unwrap_or_else(|error| fail(&error))
    }

    unsafe fn unshare(paddr: PhysAddr, buffer: NonNull<[u8]>, direction: BufferDirection) {
        // SAFETY: the caller guarantees that it is the payload shared at `paddr`, valid and
        // exclusive during the call.
        let unshared =
            P::SLOT.with_last(|stack| unsafe { stack.unshare(paddr, buffer, direction) });
        unshared.unwrap_or(Err(ShareError::NotInstalled)).unwrap_or_else(|error| fail(&error));
    }
}

/// Panics, or aborts the process where a device may still access the payload: unwinding would
/// return it to its owner, who may free it.
fn fail(error: &ShareError) -> ! {
    if error.stays_reachable() {
        tracing::error!(%error, "the process is aborted");
        // Printed too, in case there is no tracing subscriber. An error of stderr cannot be
        // reported.
        let _ = writeln!(std::io::stderr(), "pinfold-virtio: {error}");
        std::process::abort()
    }
    refuse(format_args!("{error}"))
}

#[expect(
    clippy::panic,
    reason = "the trait cannot report errors, and continuing would hang or expose memory"
)]
fn refuse(why: std::fmt::Arguments<'_>) -> ! {
    panic!("{why}")
}

// [`Translated`]: a transport that accepts `VIRTIO_F_ACCESS_PLATFORM`.

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
    /// Like [`new`](Self::new), for a transport that needs `keep` for as long as it lives.
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
