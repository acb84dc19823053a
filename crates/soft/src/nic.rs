//! A model of a network card with rings.

use crate::config::Fault;
use crate::port::Port;
use pinfold_core::addr::Iova;
use std::fmt;

/// A network card with a receive and a transmit ring in memory that it finds through its [`Port`].
///
/// A ring is an array of descriptors of [`DESCRIPTOR_BYTES`](Self::DESCRIPTOR_BYTES) bytes,
/// little-endian:
///
/// | offset | bytes | meaning |
/// | --- | --- | --- |
/// | 0 | 8 | the I/O virtual address of the buffer |
/// | 8 | 4 | its length; what the card has written there, once a receive buffer is the driver's again |
/// | 12 | 4 | [`OWNED`](Self::OWNED) while the descriptor is the card's; [`FAULTED`](Self::FAULTED) if the card could not reach the buffer |
///
/// The card takes the descriptors in their order and stops at the first that is not its own. It
/// clears `OWNED` last, with release ordering. Like any device it trusts the ring: only the IOMMU
/// keeps it from memory that is not its own.
///
/// ```
/// use pinfold_core::access::{Bidirectional, FromDevice};
/// use pinfold_soft::{Nic, NicEvent, SoftConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (domain, bus) = pinfold_soft::domain(SoftConfig::default())?;
/// let ring = domain.map(bus.alloc_pages(1)?, Bidirectional)?;
/// let buffer = domain.map(bus.alloc_pages(1)?, FromDevice)?;
/// // One descriptor in each ring; that for receiving is the card's.
/// let (receive, transmit) = (ring.iova().start(), ring.iova().part(2048, 16).ok_or("a page")?.start());
/// ring.memory().write_u64(0, buffer.iova().start().raw().to_le())?;
/// ring.memory().write_u32(8, 4096u32.to_le())?;
/// ring.memory().store_release_u32(12, Nic::OWNED.to_le())?;
///
/// let mut card = Nic::new(bus.port()).receive_ring(receive, 1).transmit_ring(transmit, 1);
/// assert_eq!(card.receive(b"a frame")?, NicEvent::Moved(7));
/// assert_eq!(card.receive(b"another")?, NicEvent::NoDescriptor);
/// assert_eq!(ring.memory().load_acquire_u32(12)?, 0, "the driver's again");
/// let buffer = buffer.unmap()?;
/// let mut frame = [0; 7];
/// buffer.memory().copy_to_slice(0, &mut frame)?;
/// assert_eq!(&frame, b"a frame");
/// # Ok(()) }
/// ```
pub struct Nic {
    port: Port,
    receive: Option<Ring>,
    transmit: Option<Ring>,
    frame: Vec<u8>,
}

/// The outcome of a card's attempt to move a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NicEvent {
    /// The number of bytes moved.
    Moved(usize),
    /// The next descriptor is the driver's, or there is no ring: a received frame is dropped.
    NoDescriptor,
    /// It could not reach the buffer, or the frame does not fit: the descriptor is marked, and the
    /// frame is dropped.
    Faulted,
}

/// A ring, and where the card is in it.
#[derive(Clone, Copy, Debug)]
struct Ring {
    base: Iova,
    entries: u32,
    next: u32,
}

/// A descriptor that is the card's.
#[derive(Clone, Copy)]
struct Descriptor {
    at: Iova,
    buffer: Iova,
    len: usize,
}

impl Ring {
    fn offset(at: Iova, bytes: u64) -> Result<Iova, Fault> {
        at.checked_add(bytes).ok_or(Fault { iova: at, kind: crate::FaultKind::TooWide })
    }

    /// Returns the next descriptor if it is the card's.
    fn take(&self, port: &Port) -> Result<Option<Descriptor>, Fault> {
        let at = Self::offset(self.base, u64::from(self.next) * Nic::DESCRIPTOR_BYTES)?;
        let flags = u32::from_le(port.read_u32_acquire(Self::offset(at, 12)?)?);
        if flags & Nic::OWNED == 0 {
            return Ok(None);
        }
        let (mut buffer, mut len) = ([0; 8], [0; 4]);
        port.read(at, &mut buffer)?;
        port.read(Self::offset(at, 8)?, &mut len)?;
        let len = usize::try_from(u32::from_le_bytes(len)).unwrap_or(usize::MAX);
        Ok(Some(Descriptor { at, buffer: Iova::new(u64::from_le_bytes(buffer)), len }))
    }

    /// Returns a descriptor to the driver, and advances to the next one.
    fn finish(
        &mut self,
        port: &Port,
        descriptor: Descriptor,
        moved: Option<usize>,
    ) -> Result<(), Fault> {
        let len = u32::try_from(moved.unwrap_or(0)).unwrap_or(u32::MAX);
        port.write(Self::offset(descriptor.at, 8)?, &len.to_le_bytes())?;
        let flags = if moved.is_some() { 0 } else { Nic::FAULTED };
        port.write_u32_release(Self::offset(descriptor.at, 12)?, flags.to_le())?;
        self.next = if self.next + 1 < self.entries { self.next + 1 } else { 0 };
        Ok(())
    }
}

impl Nic {
    /// The bytes of a descriptor.
    pub const DESCRIPTOR_BYTES: u64 = 16;
    /// The descriptor is the card's.
    pub const OWNED: u32 = 1;
    /// The card could not reach the buffer.
    pub const FAULTED: u32 = 2;
    /// The longest frame that it sends, in bytes.
    pub const LONGEST: usize = 9216;

    /// Creates a card without rings: it moves nothing.
    pub fn new(port: Port) -> Self {
        Self { port, receive: None, transmit: None, frame: Vec::new() }
    }

    /// Sets the receive ring: `entries` descriptors at `at`, a multiple of 16.
    #[must_use]
    pub fn receive_ring(mut self, at: Iova, entries: u32) -> Self {
        self.receive = Some(Ring { base: at, entries, next: 0 });
        self
    }

    /// Sets the transmit ring, as [`receive_ring`](Self::receive_ring).
    #[must_use]
    pub fn transmit_ring(mut self, at: Iova, entries: u32) -> Self {
        self.transmit = Some(Ring { base: at, entries, next: 0 });
        self
    }

    /// Receives a frame from the wire into the next receive buffer.
    ///
    /// # Errors
    /// [`Fault`] if the card cannot reach its ring.
    pub fn receive(&mut self, frame: &[u8]) -> Result<NicEvent, Fault> {
        let Some(ring) = &mut self.receive else { return Ok(NicEvent::NoDescriptor) };
        let Some(descriptor) = ring.take(&self.port)? else {
            return Ok(NicEvent::NoDescriptor);
        };
        let fits = frame.len() <= descriptor.len;
        let moved =
            (fits && self.port.write(descriptor.buffer, frame).is_ok()).then_some(frame.len());
        ring.finish(&self.port, descriptor, moved)?;
        Ok(moved.map_or(NicEvent::Faulted, NicEvent::Moved))
    }

    /// Sends the frame of the next transmit buffer to the wire: it is then in [`sent`](Self::sent).
    ///
    /// # Errors
    /// [`Fault`] if the card cannot reach its ring.
    pub fn transmit(&mut self) -> Result<NicEvent, Fault> {
        self.frame.clear();
        let Some(ring) = &mut self.transmit else { return Ok(NicEvent::NoDescriptor) };
        let Some(descriptor) = ring.take(&self.port)? else {
            return Ok(NicEvent::NoDescriptor);
        };
        let mut moved = None;
        if descriptor.len <= Self::LONGEST {
            self.frame.resize(descriptor.len, 0);
            moved = self
                .port
                .read(descriptor.buffer, &mut self.frame)
                .is_ok()
                .then_some(descriptor.len);
        }
        if moved.is_none() {
            self.frame.clear();
        }
        ring.finish(&self.port, descriptor, moved)?;
        Ok(moved.map_or(NicEvent::Faulted, NicEvent::Moved))
    }

    /// Returns the frame that [`transmit`](Self::transmit) has sent last; empty if it sent none.
    pub fn sent(&self) -> &[u8] {
        &self.frame
    }
}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nic")
            .field("receive", &self.receive)
            .field("transmit", &self.transmit)
            .finish_non_exhaustive()
    }
}
