//! A model of a virtio disk (virtio 1.2 section 5.2), behind the software IOMMU.
//!
//! It accesses memory only through a [`Port`]: memory that a driver does not share faults, and
//! memory that it shares too long is detected by probing. It serves requests in
//! [`notify`](Transport::notify), so they have completed when the driver polls.
//!
//! Like QEMU's disk behind an IOMMU it offers `VIRTIO_F_ACCESS_PLATFORM` and refuses a driver that
//! does not accept it.

pub mod blk;
pub mod queue;

use crate::hal::ACCESS_PLATFORM;
pub use blk::SECTOR;
use pinfold::soft::{Fault, Port};
use pinfold_core::addr::Iova;
use queue::{Piece, Queue, QueueError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{Error, PhysAddr, Result};
use zerocopy::{FromBytes, Immutable, IntoBytes};

const QUEUE_SIZE: u32 = 128;
/// `VIRTIO_BLK_F_FLUSH`, `VIRTIO_F_INDIRECT_DESC`, `VIRTIO_F_VERSION_1`: sections 5.2.3 and 6.
const INDIRECT: u64 = 1 << 28;
const FEATURES: u64 = 1 << 9 | INDIRECT | 1 << 32;

/// A buffer of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Given {
    /// Its address for the device.
    pub iova: Iova,
    /// Its length in bytes.
    pub len: u32,
    /// Whether the device may write it.
    pub writable: bool,
}

/// A handle to a model disk. Clones refer to the same disk, so a test can keep one while a driver
/// owns the transport.
#[derive(Clone, Debug)]
pub struct Disk(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    port: Port,
    media: Vec<u8>,
    status: DeviceStatus,
    driver_features: u64,
    queue: Option<Queue>,
    /// The addresses of the rings, also after the queue is removed.
    rings: [Iova; 3],
    /// The buffers of the last request.
    given: Vec<Given>,
    /// Whether requests wait until [`Disk::serve`].
    held: bool,
    /// The number of bytes left out at the end of each read.
    short: usize,
    /// Whether the features of every driver are refused.
    refuses: bool,
}

impl Disk {
    /// Creates a zeroed disk of at least `bytes` bytes, in whole sectors.
    pub fn new(port: Port, bytes: usize) -> Self {
        Self(Arc::new(Mutex::new(State {
            port,
            media: vec![0; bytes.div_ceil(SECTOR) * SECTOR],
            status: DeviceStatus::empty(),
            driver_features: 0,
            queue: None,
            rings: [Iova::new(0); 3],
            given: Vec::new(),
            held: false,
            short: 0,
            refuses: false,
        })))
    }

    /// Returns the contents of the disk.
    pub fn media(&self) -> Vec<u8> {
        self.state().media.clone()
    }

    /// Returns the buffers of the last request, in order: header, data, status.
    pub fn given(&self) -> Vec<Given> {
        self.state().given.clone()
    }

    /// Returns the addresses of the descriptor table, the available ring and the used ring.
    pub fn rings(&self) -> [Iova; 3] {
        self.state().rings
    }

    /// Makes the device write to an address.
    ///
    /// # Errors
    /// [`Fault`] if the IOMMU blocks the access.
    pub fn attack(&self, iova: Iova, bytes: &[u8]) -> std::result::Result<(), Fault> {
        self.state().port.write(iova, bytes)
    }

    /// Makes the device read from an address.
    ///
    /// # Errors
    /// As [`attack`](Self::attack).
    pub fn spy(&self, iova: Iova, to: &mut [u8]) -> std::result::Result<(), Fault> {
        self.state().port.read(iova, to)
    }

    /// Makes requests wait until [`serve`](Self::serve) from now on.
    pub fn hold(&self) {
        self.state().held = true;
    }

    /// Serves the waiting requests.
    pub fn serve(&self) {
        self.state().serve();
    }

    /// Makes reads leave out their last `bytes` bytes from now on, and report the shorter length in
    /// the used ring.
    pub fn read_short(&self, bytes: usize) {
        self.state().short = bytes;
    }

    /// Makes the device refuse every driver's features from now on.
    pub fn refuse_all(&self) {
        self.state().refuses = true;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn accepts(&self) -> bool {
        let known = self.driver_features & !(FEATURES | ACCESS_PLATFORM) == 0;
        known && self.driver_features & ACCESS_PLATFORM != 0 && !self.refuses
    }

    fn serve(&mut self) {
        let Some(mut queue) = self.queue.take() else { return };
        if self.status.contains(DeviceStatus::DRIVER_OK) && self.serve_all(&mut queue).is_err() {
            // A ring is not reachable, or not valid: section 2.1.2.
            self.status |= DeviceStatus::DEVICE_NEEDS_RESET;
        }
        self.queue = Some(queue);
    }

    fn serve_all(&mut self, queue: &mut Queue) -> std::result::Result<(), QueueError> {
        let has_indirect = self.driver_features & INDIRECT != 0;
        while let Some(head) = queue.next(&self.port)? {
            let chain = queue.chain(&self.port, head, has_indirect)?;
            let given = |piece: &Piece| {
                let (iova, len) = (piece.iova, piece.len);
                Given { iova, len, writable: piece.is_writable() }
            };
            self.given = chain.iter().map(given).collect();
            let (_, written) = blk::serve(&self.port, &mut self.media, &chain, self.short);
            queue.used(&self.port, head, written)?;
        }
        Ok(())
    }
}

impl Transport for Disk {
    fn device_type(&self) -> DeviceType {
        DeviceType::Block
    }

    fn read_device_features(&mut self) -> u64 {
        FEATURES | ACCESS_PLATFORM
    }

    fn write_driver_features(&mut self, driver_features: u64) {
        self.state().driver_features = driver_features;
    }

    fn max_queue_size(&mut self, queue: u16) -> u32 {
        if queue == 0 { QUEUE_SIZE } else { 0 }
    }

    fn notify(&mut self, _queue: u16) {
        let mut state = self.state();
        if !state.held {
            state.serve();
        }
    }

    fn get_status(&self) -> DeviceStatus {
        self.state().status
    }

    fn set_status(&mut self, status: DeviceStatus) {
        let mut state = self.state();
        if status.is_empty() {
            state.queue = None;
            state.driver_features = 0;
        }
        let refused = status.contains(DeviceStatus::FEATURES_OK) && !state.accepts();
        state.status = if refused { status - DeviceStatus::FEATURES_OK } else { status };
    }

    fn set_guest_page_size(&mut self, _guest_page_size: u32) {}

    fn requires_legacy_layout(&self) -> bool {
        false
    }

    fn queue_set(
        &mut self,
        _queue: u16,
        size: u32,
        descriptors: PhysAddr,
        driver_area: PhysAddr,
        device_area: PhysAddr,
    ) {
        let mut state = self.state();
        state.rings = [descriptors, driver_area, device_area].map(Iova::new);
        state.queue = u16::try_from(size).ok().and_then(|size| Queue::new(size, state.rings));
    }

    fn queue_unset(&mut self, _queue: u16) {
        self.state().queue = None;
    }

    fn queue_used(&mut self, _queue: u16) -> bool {
        self.state().queue.is_some()
    }

    fn ack_interrupt(&mut self) -> InterruptStatus {
        InterruptStatus::empty()
    }

    fn read_config_generation(&self) -> u32 {
        0
    }

    fn read_config_space<C: FromBytes + IntoBytes>(&self, offset: usize) -> Result<C> {
        // Section 5.2.4: the capacity in sectors comes first; the rest is 0.
        let mut config = [0; 64];
        let sectors = (self.state().media.len() / SECTOR) as u64;
        config[..8].copy_from_slice(&sectors.to_le_bytes());
        let bytes = config.get(offset..).ok_or(Error::ConfigSpaceTooSmall)?;
        C::read_from_prefix(bytes).map(|(value, _)| value).map_err(|_| Error::ConfigSpaceTooSmall)
    }

    fn write_config_space<C: IntoBytes + Immutable>(
        &mut self,
        _offset: usize,
        _value: C,
    ) -> Result<()> {
        Err(Error::Unsupported)
    }
}
