//! The device's side of a split virtqueue (virtio 1.2 section 2.7).

use super::Given;
use pinfold::soft::{Fault, Port};
use pinfold_core::addr::Iova;

const DESCRIPTOR: usize = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A buffer of a descriptor chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) iova: Iova,
    pub(super) len: u32,
    flags: u16,
    next: u16,
}

impl Piece {
    fn read(port: &Port, table: Iova, index: u16) -> Result<Self, Fault> {
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

    pub(super) fn is_writable(&self) -> bool {
        self.flags & WRITE != 0
    }

    pub(super) fn given(&self) -> Given {
        Given { iova: self.iova, len: self.len, writable: self.is_writable() }
    }
}

/// The queue as the driver configured it, and the device's positions in its rings.
#[derive(Debug)]
pub(super) struct Queue {
    size: u16,
    descriptors: Iova,
    driver: Iova,
    device: Iova,
    seen: u16,
    used: u16,
}

impl Queue {
    pub(super) fn new(size: u16, [descriptors, driver, device]: [Iova; 3]) -> Option<Self> {
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
    pub(super) fn next(&mut self, port: &Port) -> Result<Option<u16>, Fault> {
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
    pub(super) fn chain(&self, port: &Port, head: u16) -> Result<Vec<Piece>, Fault> {
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
    pub(super) fn used(&mut self, port: &Port, head: u16, written: u32) -> Result<(), Fault> {
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
