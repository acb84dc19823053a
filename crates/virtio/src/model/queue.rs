//! The device's side of a split virtqueue (virtio 1.2 section 2.7).

use pinfold::soft::Port;
use pinfold_core::addr::Iova;

/// A device's access to memory was blocked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the device cannot access this memory")]
pub struct Unreachable;

/// A device's access to memory: the port of a software IOMMU, or another bus.
pub trait Bus {
    /// Reads memory into `to`.
    ///
    /// # Errors
    /// [`Unreachable`]: a part of it may have been read.
    fn read(&self, at: Iova, to: &mut [u8]) -> Result<(), Unreachable>;
    /// Reads a word before later reads.
    ///
    /// # Errors
    /// [`Unreachable`].
    fn read_u32_acquire(&self, at: Iova) -> Result<u32, Unreachable>;
    /// Writes `from` to memory.
    ///
    /// # Errors
    /// [`Unreachable`]: a part of it may have been written.
    fn write(&self, at: Iova, from: &[u8]) -> Result<(), Unreachable>;
    /// Writes a word by one access, after earlier writes.
    ///
    /// # Errors
    /// [`Unreachable`].
    fn write_u32_release(&self, at: Iova, value: u32) -> Result<(), Unreachable>;
}

impl Bus for Port {
    fn read(&self, at: Iova, to: &mut [u8]) -> Result<(), Unreachable> {
        Port::read(self, at, to).map_err(|_| Unreachable)
    }
    fn read_u32_acquire(&self, at: Iova) -> Result<u32, Unreachable> {
        Port::read_u32_acquire(self, at).map_err(|_| Unreachable)
    }
    fn write(&self, at: Iova, from: &[u8]) -> Result<(), Unreachable> {
        Port::write(self, at, from).map_err(|_| Unreachable)
    }
    fn write_u32_release(&self, at: Iova, value: u32) -> Result<(), Unreachable> {
        Port::write_u32_release(self, at, value).map_err(|_| Unreachable)
    }
}

/// Why a device cannot go on with a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// A ring or a table is not reachable.
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    /// The driver broke a rule of the rings.
    #[error("{0}")]
    Invalid(&'static str),
}

const DESCRIPTOR: u64 = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A buffer of a descriptor chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The address of its descriptor.
    pub at: Iova,
    /// The buffer's address.
    pub iova: Iova,
    /// The buffer's length.
    pub len: u32,
    flags: u16,
    next: u16,
}

impl Piece {
    fn read(bus: &impl Bus, table: Iova, index: u16) -> Result<Self, Unreachable> {
        let mut bytes = [0; 16];
        let at = after(table, u64::from(index) * DESCRIPTOR);
        bus.read(at, &mut bytes)?;
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
        Ok(Self {
            at,
            iova: Iova::new(u64::from_le_bytes([a, b, c, d, e, f, g, h])),
            len: u32::from_le_bytes([i, j, k, l]),
            flags: u16::from_le_bytes([m, n]),
            next: u16::from_le_bytes([o, p]),
        })
    }

    /// Returns whether the device writes the buffer; otherwise it reads it.
    pub fn is_writable(&self) -> bool {
        self.flags & WRITE != 0
    }

    /// Returns the descriptor as it was read.
    pub fn descriptor(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        let (address, rest) = bytes.split_at_mut(8);
        address.copy_from_slice(&self.iova.raw().to_le_bytes());
        let (len, rest) = rest.split_at_mut(4);
        len.copy_from_slice(&self.len.to_le_bytes());
        let (flags, next) = rest.split_at_mut(2);
        flags.copy_from_slice(&self.flags.to_le_bytes());
        next.copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// A queue as the driver configured it, and the device's positions in its rings.
#[derive(Debug)]
pub struct Queue {
    size: u16,
    descriptors: Iova,
    driver: Iova,
    device: Iova,
    seen: u16,
    used: u16,
}

impl Queue {
    /// Creates the device's side of a queue of `size` entries, whose descriptor table, available
    /// ring and used ring are at `rings`; `None` where `size` is no power of two.
    pub fn new(size: u16, rings: [Iova; 3]) -> Option<Self> {
        let [descriptors, driver, device] = rings;
        let queue = Self { size, descriptors, driver, device, seen: 0, used: 0 };
        size.is_power_of_two().then_some(queue)
    }

    /// Returns the descriptor table, the available ring and the used ring: address and length.
    pub fn areas(&self) -> [(Iova, u64); 3] {
        let size = u64::from(self.size);
        let (available, used) = (4 + 2 * size, 4 + 8 * size);
        [(self.descriptors, DESCRIPTOR * size), (self.driver, available), (self.device, used)]
    }

    /// Returns how many chains are available that [`next`](Self::next) has not returned.
    ///
    /// # Errors
    /// [`QueueError`]: the device cannot go on.
    pub fn waiting(&self, bus: &impl Bus) -> Result<u16, QueueError> {
        // Flags and index are one word; the acquire makes writes before the index visible.
        let [_, _, low, high] = bus.read_u32_acquire(self.driver)?.to_le_bytes();
        let ahead = u16::from_le_bytes([low, high]).wrapping_sub(self.seen);
        if ahead > self.size {
            let text = "the available index is further ahead than the queue has entries";
            return Err(QueueError::Invalid(text));
        }
        Ok(ahead)
    }

    /// Returns the head of the next available chain.
    ///
    /// # Errors
    /// [`QueueError`]: the device cannot go on.
    pub fn next(&mut self, bus: &impl Bus) -> Result<Option<u16>, QueueError> {
        if self.waiting(bus)? == 0 {
            return Ok(None);
        }
        let mut head = [0; 2];
        bus.read(after(self.driver, 4 + 2 * self.slot(self.seen)), &mut head)?;
        self.seen = self.seen.wrapping_add(1);
        Ok(Some(u16::from_le_bytes(head)))
    }

    /// Returns the buffers of a chain (virtio 1.2 section 2.7.5). `has_indirect`: the driver has
    /// accepted indirect tables.
    ///
    /// # Errors
    /// [`QueueError`]: the device cannot go on.
    pub fn chain(
        &self,
        bus: &impl Bus,
        head: u16,
        has_indirect: bool,
    ) -> Result<Vec<Piece>, QueueError> {
        let invalid = |text| Err(QueueError::Invalid(text));
        if head >= self.size {
            return invalid("a descriptor's index is not below the size of the queue");
        }
        let first = Piece::read(bus, self.descriptors, head)?;
        let (table, entries, mut piece) = match first.flags & INDIRECT {
            0 => (self.descriptors, u32::from(self.size), first),
            _ if !has_indirect => return invalid("an indirect table was not negotiated"),
            _ if first.flags & NEXT != 0 => {
                return invalid("an indirect descriptor has a next one");
            }
            _ if first.len == 0 || !u64::from(first.len).is_multiple_of(DESCRIPTOR) => {
                return invalid("an indirect table has no whole number of descriptors");
            }
            _ => (first.iova, first.len / 16, Piece::read(bus, first.iova, 0)?),
        };
        let mut chain = vec![piece];
        while piece.flags & NEXT != 0 {
            if chain.len() >= usize::from(self.size) {
                return invalid("a chain has more descriptors than the queue: it is a loop");
            }
            if u32::from(piece.next) >= entries {
                return invalid("a descriptor's index is not below the size of its table");
            }
            let was_writable = piece.is_writable();
            piece = Piece::read(bus, table, piece.next)?;
            if piece.flags & INDIRECT != 0 {
                return invalid("an indirect descriptor is not the first of its chain");
            }
            if was_writable && !piece.is_writable() {
                return invalid("a buffer for the device to read is behind one for it to write");
            }
            chain.push(piece);
        }
        Ok(chain)
    }

    /// Returns whether the driver asks for no interrupt (`VIRTQ_AVAIL_F_NO_INTERRUPT`).
    ///
    /// # Errors
    /// [`Unreachable`]: the device cannot go on.
    pub fn is_quiet(&self, bus: &impl Bus) -> Result<bool, Unreachable> {
        Ok(bus.read_u32_acquire(self.driver)? & 1 != 0)
    }

    /// Adds the chain to the used ring, with the number of bytes written.
    ///
    /// # Errors
    /// [`Unreachable`]: the device cannot go on.
    pub fn used(&mut self, bus: &impl Bus, head: u16, written: u32) -> Result<(), Unreachable> {
        let at = after(self.device, 4 + 8 * self.slot(self.used));
        bus.write(at, &u32::from(head).to_le_bytes())?;
        bus.write(after(at, 4), &written.to_le_bytes())?;
        self.used = self.used.wrapping_add(1);
        let [low, high] = self.used.to_le_bytes();
        bus.write_u32_release(self.device, u32::from_le_bytes([0, 0, low, high]))
    }

    fn slot(&self, index: u16) -> u64 {
        u64::from(index & (self.size - 1))
    }
}

/// Adds an offset to an address. It may wrap: nothing is mapped there, so the access faults.
fn after(iova: Iova, bytes: u64) -> Iova {
    Iova::new(iova.raw().wrapping_add(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// Memory from address 0 on.
    struct Memory(RefCell<Vec<u8>>);

    impl Bus for Memory {
        fn read(&self, at: Iova, to: &mut [u8]) -> Result<(), Unreachable> {
            let at = usize::try_from(at.raw()).map_err(|_| Unreachable)?;
            let memory = self.0.borrow();
            let from = at.checked_add(to.len()).and_then(|end| memory.get(at..end));
            to.copy_from_slice(from.ok_or(Unreachable)?);
            Ok(())
        }
        fn read_u32_acquire(&self, at: Iova) -> Result<u32, Unreachable> {
            let mut bytes = [0; 4];
            self.read(at, &mut bytes)?;
            Ok(u32::from_le_bytes(bytes))
        }
        fn write(&self, at: Iova, from: &[u8]) -> Result<(), Unreachable> {
            let at = usize::try_from(at.raw()).map_err(|_| Unreachable)?;
            let mut memory = self.0.borrow_mut();
            let to = at.checked_add(from.len()).and_then(|end| memory.get_mut(at..end));
            to.ok_or(Unreachable)?.copy_from_slice(from);
            Ok(())
        }
        fn write_u32_release(&self, at: Iova, value: u32) -> Result<(), Unreachable> {
            self.write(at, &value.to_le_bytes())
        }
    }

    const RINGS: [u64; 3] = [0, 256, 512];
    const TABLE: u64 = 1024;

    fn queue() -> (Queue, Memory) {
        let queue = Queue::new(4, RINGS.map(Iova::new)).unwrap();
        (queue, Memory(RefCell::new(vec![0; 4096])))
    }

    fn put(memory: &Memory, at: u64, iova: u64, len: u32, flags: u16, next: u16) {
        let (iova, at) = (Iova::new(iova), Iova::new(at));
        let bytes = Piece { at, iova, len, flags, next }.descriptor();
        memory.write(at, &bytes).unwrap();
    }

    fn error(queue: &Queue, memory: &Memory, has_indirect: bool) -> String {
        queue.chain(memory, 0, has_indirect).unwrap_err().to_string()
    }

    #[test]
    fn a_chain_has_its_buffers_in_order() {
        let (queue, memory) = queue();
        put(&memory, 0, 0x100, 16, NEXT, 3);
        put(&memory, 48, 0x200, 512, NEXT | WRITE, 1);
        put(&memory, 16, 0x300, 1, WRITE, 0);
        let chain = queue.chain(&memory, 0, false).unwrap();
        let places: Vec<_> = chain.iter().map(|p| (p.at.raw(), p.len, p.is_writable())).collect();
        assert_eq!(places, [(0, 16, false), (48, 512, true), (16, 1, true)]);
        assert_eq!(
            queue.chain(&memory, 4, false),
            Err(QueueError::Invalid("a descriptor's index is not below the size of the queue"))
        );
    }

    #[test]
    fn chains_that_break_a_rule_are_refused() {
        let (queue, memory) = queue();
        put(&memory, 0, 0x100, 16, NEXT, 0);
        assert!(error(&queue, &memory, false).contains("a loop"));
        put(&memory, 0, 0x100, 16, NEXT, 4);
        assert!(error(&queue, &memory, false).contains("the size of its table"));
        put(&memory, 0, 0x100, 16, NEXT | WRITE, 1);
        put(&memory, 16, 0x100, 16, 0, 0);
        assert!(error(&queue, &memory, false).contains("behind one for it to write"));
        put(&memory, 0, 0x100, 16, NEXT, 1);
        put(&memory, 16, TABLE, 16, INDIRECT, 0);
        assert!(error(&queue, &memory, true).contains("not the first"));
        let far = Queue::new(4, [1 << 20, 256, 512].map(Iova::new)).unwrap();
        assert_eq!(far.chain(&memory, 0, true), Err(Unreachable.into()));
    }

    #[test]
    fn indirect_tables_are_whole_and_negotiated() {
        let (queue, memory) = queue();
        put(&memory, TABLE, 0x100, 16, NEXT, 1);
        put(&memory, TABLE + 16, 0x200, 1, WRITE, 0);
        put(&memory, 0, TABLE, 32, INDIRECT, 0);
        assert_eq!(queue.chain(&memory, 0, true).unwrap().len(), 2);
        assert!(error(&queue, &memory, false).contains("not negotiated"));
        put(&memory, 0, TABLE, 16, INDIRECT, 0);
        assert!(error(&queue, &memory, true).contains("the size of its table"));
        for len in [0, 40] {
            put(&memory, 0, TABLE, len, INDIRECT, 0);
            assert!(error(&queue, &memory, true).contains("whole number"));
        }
        put(&memory, 0, TABLE, 32, INDIRECT | NEXT, 1);
        assert!(error(&queue, &memory, true).contains("has a next one"));
    }

    #[test]
    fn an_index_too_far_ahead_is_refused() {
        let (mut queue, memory) = queue();
        assert_eq!(queue.next(&memory), Ok(None));
        memory.write(Iova::new(256), &[0, 0, 4, 0, 2, 0, 1, 0]).unwrap();
        assert_eq!(queue.waiting(&memory), Ok(4));
        assert_eq!(queue.next(&memory), Ok(Some(2)));
        assert_eq!(queue.waiting(&memory), Ok(3));
        assert_eq!(queue.next(&memory), Ok(Some(1)));
        memory.write(Iova::new(258), &[7, 0]).unwrap();
        assert!(matches!(queue.next(&memory), Err(QueueError::Invalid(_))));
        assert!(matches!(queue.waiting(&memory), Err(QueueError::Invalid(_))));
        assert_eq!(queue.is_quiet(&memory), Ok(false));
        memory.write(Iova::new(256), &[1]).unwrap();
        assert_eq!(queue.is_quiet(&memory), Ok(true));
        queue.used(&memory, 2, 9).unwrap();
        let mut used = [0; 12];
        memory.read(Iova::new(512), &mut used).unwrap();
        assert_eq!(used, [0, 0, 1, 0, 2, 0, 0, 0, 9, 0, 0, 0]);
    }
}
