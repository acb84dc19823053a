//! A virtio network device by PCI: as much of a driver as sends and receives one packet at a time
//! ("Virtual I/O Device (VIRTIO) Version 1.2": sections 4.1 for PCI, 2.7 for its queues, 5.1 for the
//! device).

use crate::machine::{At, Pci, say};
use crate::memory::Pages;
use crate::unit::map;
use crate::{Result, check, words};
use pinfold_core::access::Bidirectional;
use pinfold_core::domain::{Domain, Mapping};

/// Its address: the first function behind the first root port.
pub(crate) const PORT: Pci = Pci(pinfold_vtd::SourceId::new(0, 4, 0));
pub(crate) const DEVICE: Pci = Pci(pinfold_vtd::SourceId::new(1, 0, 0));

/// The header of a packet (`virtio_net_hdr`).
const HEADER: u64 = 12;
/// The packet that is sent: an Ethernet frame of the least length.
const FRAME: u64 = 60;
/// The offset of its marker in a page: behind the header, the two addresses and the type.
const MARKER: usize = HEADER as usize + 20;

const QUEUE_SIZE: u16 = 8;
// Parts of the page of a queue.
const AVAILABLE: usize = 0x400;
const USED: usize = 0x800;

/// Registers of the common configuration (4.1.4.3).
mod common {
    pub(super) const DEVICE_FEATURE_SELECT: u64 = 0;
    pub(super) const DEVICE_FEATURE: u64 = 4;
    pub(super) const DRIVER_FEATURE_SELECT: u64 = 8;
    pub(super) const DRIVER_FEATURE: u64 = 12;
    pub(super) const STATUS: u64 = 20;
    pub(super) const QUEUE_SELECT: u64 = 22;
    pub(super) const QUEUE_SIZE: u64 = 24;
    pub(super) const QUEUE_ENABLE: u64 = 28;
    pub(super) const QUEUE_NOTIFY_OFF: u64 = 30;
    pub(super) const QUEUE_ADDRESSES: u64 = 32;
}

/// Status bits (2.1).
const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;

/// VIRTIO_F_VERSION_1 (32) and VIRTIO_F_ACCESS_PLATFORM (33), in the upper half of the features: the
/// device accesses memory through the IOMMU.
const FEATURES: u32 = 1 << 0 | 1 << 1;

/// A queue in a page of its own: descriptors, what is available, what is used.
struct Queue {
    page: Mapping<Pages, Bidirectional>,
    doorbell: At,
    number: u16,
    /// The number of descriptors made available.
    made: u16,
}

impl Queue {
    /// Makes one buffer available. `writable`: the device writes it.
    fn put(&mut self, iova: u64, len: u64, writable: bool) -> Result<()> {
        const WRITE: u64 = 2;
        let (memory, slot) = (self.page.memory(), usize::from(self.made % QUEUE_SIZE));
        let flags = if writable { WRITE } else { 0 };
        memory.write_u64(slot * 16, iova).map_err(words)?;
        memory.write_u64(slot * 16 + 8, len | flags << 32).map_err(words)?;
        memory.write_u16(AVAILABLE + 4 + slot * 2, slot as u16).map_err(words)?;
        self.made = self.made.wrapping_add(1);
        // Flags and index in one word: no interrupts.
        memory.store_release_u32(AVAILABLE, 1 | u32::from(self.made) << 16).map_err(words)?;
        self.doorbell.write(0, self.number);
        Ok(())
    }

    /// Returns whether the device has used all.
    fn is_done(&self) -> Result<bool> {
        let used = self.page.memory().load_acquire_u32(USED).map_err(words)?;
        Ok((used >> 16) as u16 == self.made)
    }
}

pub(crate) struct Net {
    receive: Queue,
    send: Queue,
    /// The page for received packets.
    received: Mapping<Pages, Bidirectional>,
}

impl Net {
    /// Starts the device, which is attached to `domain`.
    pub(crate) fn start(domain: &Domain) -> Result<Self> {
        PORT.enable();
        check(DEVICE.read(0) == 0x1041_1af4, "no virtio network device behind the root port")?;
        DEVICE.enable();
        let (registers, notify, multiplier) = structures().ok_or("no virtio structures")?;
        let status = |bits: u8| registers.write(common::STATUS, bits);
        status(0);
        while registers.read::<u8>(common::STATUS) != 0 {}
        status(ACKNOWLEDGE | DRIVER);
        registers.write(common::DEVICE_FEATURE_SELECT, 1_u32);
        let offered: u32 = registers.read(common::DEVICE_FEATURE);
        check(offered & FEATURES == FEATURES, "the device does not use the IOMMU")?;
        for (half, features) in [(0_u32, 0_u32), (1, FEATURES)] {
            registers.write(common::DRIVER_FEATURE_SELECT, half);
            registers.write(common::DRIVER_FEATURE, features);
        }
        status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        let accepted = registers.read::<u8>(common::STATUS) & FEATURES_OK != 0;
        check(accepted, "the device refuses the features")?;
        let queue = |number: u16| {
            let page = map(domain)?;
            registers.write(common::QUEUE_SELECT, number);
            registers.write(common::QUEUE_SIZE, QUEUE_SIZE);
            let start = page.iova().start().raw();
            for (place, part) in (0..).zip([0, AVAILABLE, USED]) {
                let (at, part) = (common::QUEUE_ADDRESSES + place * 8, start + part as u64);
                registers.write(at, part as u32);
                registers.write(at + 4, (part >> 32) as u32);
            }
            let off: u16 = registers.read(common::QUEUE_NOTIFY_OFF);
            registers.write(common::QUEUE_ENABLE, 1_u16);
            let doorbell = At(notify.0 + u64::from(off) * u64::from(multiplier));
            Ok::<_, alloc::string::String>(Queue { page, doorbell, number, made: 0 })
        };
        let (receive, send, received) = (queue(0)?, queue(1)?, map(domain)?);
        status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        say!("virtio network device {}: started", DEVICE.0);
        let mut net = Self { receive, send, received };
        net.receive.put(net.received.iova().start().raw(), 4096, true)?;
        Ok(net)
    }

    /// Makes the device send the packet in the page at `iova`.
    pub(crate) fn send(&mut self, iova: u64) -> Result<()> {
        self.send.put(iova, HEADER + FRAME, false)
    }

    /// Whether it has sent all.
    pub(crate) fn is_sent(&self) -> Result<bool> {
        self.send.is_done()
    }

    /// Returns the marker of the packet that has come back, if one has.
    pub(crate) fn received(&mut self) -> Result<Option<u64>> {
        if !self.receive.is_done()? {
            return Ok(None);
        }
        let marker = self.received.memory().read_u64(MARKER).map_err(words)?;
        self.receive.put(self.received.iova().start().raw(), 4096, true)?;
        Ok(Some(marker))
    }
}

/// Writes a packet with a marker to a page.
pub(crate) fn packet(memory: pinfold_core::mem::DmaMemory<'_>, marker: u64) -> Result<()> {
    memory.fill(0, MARKER, 0).map_err(words)?;
    // To everyone, of a type for experiments.
    memory.fill(HEADER as usize, 6, 0xff).map_err(words)?;
    memory.write_u16(HEADER as usize + 12, 0xb588).map_err(words)?;
    memory.write_u64(MARKER, marker).map_err(words)
}

/// Finds the common configuration, the doorbells, and how far apart these are (4.1.4).
fn structures() -> Option<(At, At, u32)> {
    let (mut common, mut notify) = (None, None);
    let mut at = (DEVICE.read(0x34) & 0xfc) as u8;
    while at != 0 {
        let head = DEVICE.read(at);
        // "Vendor-specific".
        if head & 0xff == 0x09 {
            let bar = DEVICE.bar((DEVICE.read(at + 4) & 0xff) as u8);
            let place = At(bar.0 + u64::from(DEVICE.read(at + 8)));
            match head >> 24 {
                1 => common = Some(place),
                2 => notify = Some((place, DEVICE.read(at + 16))),
                _ => {}
            }
        }
        at = (head >> 8 & 0xfc) as u8;
    }
    let (notify, multiplier) = notify?;
    Some((common?, notify, multiplier))
}
