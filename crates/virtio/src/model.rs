//! A model of a virtio disk (virtio 1.2 section 5.2), behind the software IOMMU.
//!
//! It accesses memory only through a [`Port`]: memory that a driver does not share faults, and
//! memory that it shares too long is detected by probing. It serves requests in
//! [`notify`](Transport::notify), so they have completed when the driver polls.
//!
//! Like QEMU's disk behind an IOMMU it offers `VIRTIO_F_ACCESS_PLATFORM` and refuses a driver that
//! does not accept it.

use crate::hal::ACCESS_PLATFORM;
use pinfold::soft::{Fault, Port};
use pinfold_core::addr::Iova;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{Error, PhysAddr, Result};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Bytes of a sector.
pub const SECTOR: usize = 512;
const QUEUE_SIZE: u32 = 128;
/// `VIRTIO_BLK_F_FLUSH`, `VIRTIO_F_INDIRECT_DESC`, `VIRTIO_F_VERSION_1`: sections 5.2.3 and 6.
const FEATURES: u64 = 1 << 9 | 1 << 28 | 1 << 32;

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
    /// How many bytes are left out at the end of each read.
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
            // A ring is not reachable: section 2.1.2.
            self.status |= DeviceStatus::DEVICE_NEEDS_RESET;
        }
        self.queue = Some(queue);
    }

    fn serve_all(&mut self, queue: &mut Queue) -> std::result::Result<(), Fault> {
        while let Some(head) = queue.next(&self.port)? {
            let chain = queue.chain(&self.port, head)?;
            self.given = chain.iter().map(Piece::given).collect();
            let written = serve(&self.port, &mut self.media, &chain, self.short);
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

// The device's side of a split virtqueue (virtio 1.2 section 2.7).

const DESCRIPTOR: usize = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A buffer of a descriptor chain.
#[derive(Clone, Copy, Debug)]
struct Piece {
    iova: Iova,
    len: u32,
    flags: u16,
    next: u16,
}

impl Piece {
    fn read(port: &Port, table: Iova, index: u16) -> std::result::Result<Self, Fault> {
        let mut bytes = [0; DESCRIPTOR];
        port.read(after(table, usize::from(index) * DESCRIPTOR), &mut bytes)?;
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
        Ok(Self {
            iova: Iova::new(u64::from_le_bytes([a, b, c, d, e, f, g, h])),
            len: u32::from_le_bytes([i, j, k, l]),
            flags: u16::from_le_bytes([m, n]),
            next: u16::from_le_bytes([o, p]),
        })
    }

    fn is_writable(&self) -> bool {
        self.flags & WRITE != 0
    }

    fn given(&self) -> Given {
        Given { iova: self.iova, len: self.len, writable: self.is_writable() }
    }
}

/// The queue as the driver configured it, and the device's positions in its rings.
#[derive(Debug)]
struct Queue {
    size: u16,
    descriptors: Iova,
    driver: Iova,
    device: Iova,
    seen: u16,
    used: u16,
}

impl Queue {
    fn new(size: u16, [descriptors, driver, device]: [Iova; 3]) -> Option<Self> {
        size.is_power_of_two().then_some(Self {
            size,
            descriptors,
            driver,
            device,
            seen: 0,
            used: 0,
        })
    }

    /// Returns the head of the next available chain.
    fn next(&mut self, port: &Port) -> std::result::Result<Option<u16>, Fault> {
        // Flags and index are one word; the acquire makes what was written before the index
        // visible.
        let [_, _, low, high] = port.read_u32_acquire(self.driver)?.to_le_bytes();
        if u16::from_le_bytes([low, high]) == self.seen {
            return Ok(None);
        }
        let mut head = [0; 2];
        port.read(after(self.driver, 4 + 2 * self.slot(self.seen)), &mut head)?;
        self.seen = self.seen.wrapping_add(1);
        Ok(Some(u16::from_le_bytes(head)))
    }

    /// Returns the buffers of a chain; never more than the queue has descriptors.
    fn chain(&self, port: &Port, head: u16) -> std::result::Result<Vec<Piece>, Fault> {
        let first = Piece::read(port, self.descriptors, head)?;
        let (table, mut piece) = match first.flags & INDIRECT {
            0 => (self.descriptors, first),
            _ => (first.iova, Piece::read(port, first.iova, 0)?),
        };
        let mut chain = vec![piece];
        while piece.flags & NEXT != 0 && chain.len() < usize::from(self.size) {
            piece = Piece::read(port, table, piece.next)?;
            chain.push(piece);
        }
        Ok(chain)
    }

    /// Adds the chain to the used ring, with the number of bytes written.
    fn used(&mut self, port: &Port, head: u16, written: u32) -> std::result::Result<(), Fault> {
        let at = after(self.device, 4 + 8 * self.slot(self.used));
        port.write(at, &u32::from(head).to_le_bytes())?;
        port.write(after(at, 4), &written.to_le_bytes())?;
        self.used = self.used.wrapping_add(1);
        let [low, high] = self.used.to_le_bytes();
        port.write_u32_release(self.device, u32::from_le_bytes([0, 0, low, high]))
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
    }
}

/// Adds an offset to an address. It may wrap: nothing is mapped there, so the access faults.
fn after(iova: Iova, bytes: usize) -> Iova {
    Iova::new(iova.raw().wrapping_add(bytes as u64))
}

// Serves the disk's requests (virtio 1.2 section 5.2.6).

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

const ID: [u8; 20] = *b"pinfold-model-disk\0\0";

/// Serves a chain of a header, data, and a status byte; returns how many bytes were written.
fn serve(port: &Port, media: &mut [u8], chain: &[Piece], short: usize) -> u32 {
    let Some((status, rest)) = chain.split_last() else { return 0 };
    let Some((header, data)) = rest.split_first() else { return 0 };
    let (outcome, written) = match serve_data(port, media, header, data, short) {
        Ok(outcome) => outcome,
        Err(_) => (IO_ERROR, 0),
    };
    // If even the status cannot be written, the failure cannot be reported.
    written + u32::from(port.write(status.iova, &[outcome]).is_ok())
}

fn serve_data(
    port: &Port,
    media: &mut [u8],
    header: &Piece,
    data: &[Piece],
    short: usize,
) -> std::result::Result<(u8, u32), Fault> {
    let mut bytes = [0; 16];
    port.read(header.iova, &mut bytes)?;
    let [a, b, c, d, _, _, _, _, sector @ ..] = bytes;
    let sector = usize::try_from(u64::from_le_bytes(sector)).unwrap_or(usize::MAX);
    let kind = u32::from_le_bytes([a, b, c, d]);
    let start = sector.saturating_mul(SECTOR);
    let mut at = start;
    match kind {
        IN | OUT => {
            for piece in data {
                let end = at.saturating_add(piece.len as usize);
                let Some(part) = media.get_mut(at..end) else { return Ok((IO_ERROR, 0)) };
                if kind == OUT {
                    port.read(piece.iova, part)?;
                } else {
                    let sent = part.len().saturating_sub(short);
                    port.write(piece.iova, part.get(..sent).unwrap_or_default())?;
                }
                at = end;
            }
            let moved = u32::try_from(at - start).unwrap_or(u32::MAX);
            Ok((OK, if kind == IN { moved } else { 0 }))
        }
        FLUSH => Ok((OK, 0)),
        GET_ID => {
            let Some(piece) = data.first() else { return Ok((IO_ERROR, 0)) };
            let n = ID.len().min(piece.len as usize);
            port.write(piece.iova, ID.get(..n).unwrap_or_default())?;
            Ok((OK, u32::try_from(n).unwrap_or(0)))
        }
        _ => Ok((UNSUPPORTED, 0)),
    }
}
