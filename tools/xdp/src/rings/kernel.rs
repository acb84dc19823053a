//! A socket's rings with the chunks in them: each chunk that the kernel may access is owned here.
//!
//! A chunk is kept as the packet that it becomes: a packet composed of its parts on the way from
//! the slot to its receiver is written in parts and read back whole, which a processor cannot do
//! before the parts have left its store buffer.
//!
//! An entry of a ring is an address in the UMEM. Its owner is in `slots`, by the number of its
//! chunk: the kernel's entries are looked up there, never trusted. So a chunk has one owner at any
//! time: the pool, the rings, or a packet.
// The one unsafe call of the crate (the one `unsafe impl` is in `packet.rs`): opening a socket,
// whose contract is what this file keeps.
#![allow(unsafe_code)]

use super::packet::Packet;
use super::ring::{Consumer, Piece, Producer};
use crate::system::{CallError, RawSocket, RingMemories, RingMemory, RingSizes, Umem};
use pinfold::DmaMemory;
use pinfold_core::dma_pool::ChunkSource;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// The longest wait for packets in transmission when a socket ends.
pub(crate) const DRAIN: Duration = Duration::from_millis(200);
/// `XDP_RING_NEED_WAKEUP`.
const NEED_WAKEUP: u32 = 1;

/// The owner of a chunk of the UMEM.
#[derive(Debug, Default)]
enum Slot {
    /// The pool, or a packet.
    #[default]
    Elsewhere,
    /// The kernel, to write a packet into it.
    Filled(Packet),
    /// The kernel, to send it.
    Sending(Packet),
}

/// A socket, its rings, and the chunks that the kernel has. Dropped in this order: the kernel lets
/// go of the chunks when the socket and the mappings of its rings are gone.
#[derive(Debug)]
pub(crate) struct Rings {
    socket: RawSocket,
    fill: Producer<RingMemory, 1>,
    completion: Consumer<RingMemory, 1>,
    receive: Consumer<RingMemory, 2>,
    transmit: Producer<RingMemory, 2>,
    slots: Box<[Slot]>,
    /// The UMEM's address in this process, and its length.
    base: usize,
    bytes: usize,
    /// log2 of the size of a chunk.
    shift: u32,
    need_wakeup: bool,
    filled: u32,
    sending: u32,
    unknown: u64,
}

impl Rings {
    /// Creates the socket and its rings over all of the UMEM, in chunks of `2^shift` bytes.
    pub(crate) fn open(
        umem: Umem,
        shift: u32,
        sizes: RingSizes,
        need_wakeup: bool,
    ) -> Result<Self, CallError> {
        let span = umem.span();
        let (base, bytes) = (span.cast::<u8>().addr().get(), span.len());
        let slots = bytes >> shift;
        // SAFETY: an address is entered in a ring only together with the `Chunk` it belongs to,
        // which moves into `slots` and stays there until the address comes back (`take`) or this
        // value is dropped: `slots` after the socket and the rings, and what is still being sent
        // never. A chunk is a page or fragment of a pool over this UMEM (`place_of` checks that),
        // which owns its memory and lends no reference into it.
        let (socket, memories) = unsafe { RawSocket::open(umem, 1 << shift, sizes) }?;
        let RingMemories { fill, completion, receive, transmit } = memories;
        Ok(Self {
            socket,
            fill: Producer::new(fill),
            completion: Consumer::new(completion),
            receive: Consumer::new(receive),
            transmit: Producer::new(transmit),
            slots: (0..slots).map(|_| Slot::Elsewhere).collect(),
            base,
            bytes,
            shift,
            need_wakeup,
            filled: 0,
            sending: 0,
            unknown: 0,
        })
    }

    pub(crate) fn socket(&self) -> &RawSocket {
        &self.socket
    }

    /// Returns how many chunks are in the fill ring, or being written to.
    pub(crate) fn filled(&self) -> u32 {
        self.filled
    }

    /// Returns how many packets are being sent.
    pub(crate) fn sending(&self) -> u32 {
        self.sending
    }

    /// Returns how many entries of the kernel named no chunk that it had.
    pub(crate) fn unknown(&self) -> u64 {
        self.unknown
    }

    /// Returns the address of a chunk's memory and the number of its slot, if it is a whole chunk
    /// of this UMEM that is not in a ring.
    #[inline]
    fn place_of(&self, memory: DmaMemory<'_>) -> Option<(u64, usize)> {
        // Below the UMEM it wraps, to beyond the end.
        let address = memory.addr().wrapping_sub(self.base);
        let inside = address < self.bytes && memory.len() <= self.bytes - address;
        let whole = address.trailing_zeros() >= self.shift && memory.len() >> self.shift == 1;
        let at = address >> self.shift;
        let free = inside && whole && matches!(self.slots.get(at), Some(Slot::Elsewhere));
        free.then_some((address as u64, at))
    }

    /// Returns how many places of the fill ring are empty; reads the kernel's index only if fewer
    /// than `wanted` are known to be.
    #[inline]
    pub(crate) fn fill_room(&mut self, wanted: u32) -> u32 {
        self.fill.room(wanted)
    }

    /// Passes chunks to the kernel, which receives into them; returns how many. Chunks that have no
    /// place in the fill ring stay.
    #[inline]
    pub(crate) fn fill<P: Piece>(&mut self, pieces: &mut [Option<P>]) -> u32 {
        for piece in pieces {
            let Some((address, at)) =
                piece.as_ref().and_then(|piece| self.place_of(piece.memory()))
            else {
                continue;
            };
            let Some(slot) = self.slots.get_mut(at) else { continue };
            if self.fill.push([address])
                && let Some(piece) = piece.take()
            {
                *slot = Slot::Filled(Packet::empty(piece.into_chunk()));
            }
        }
        let count = self.fill.publish();
        self.filled += count;
        count
    }

    /// Makes the driver check the fill ring if it asks for that.
    pub(crate) fn wake_receive(&self) {
        if self.need_wakeup && is_set(&self.fill) {
            // It fails where the driver is busy, and is repeated with the next batch.
            let _ = self.socket.kick_receive();
        }
    }

    /// Polls the driver until packets have been received, at least once; returns false after
    /// `limit`.
    pub(crate) fn poll_driver(&mut self, limit: Duration) -> bool {
        let began = Instant::now();
        loop {
            // The kernel's wait does not poll a driver that copies, this call does. Where it fails,
            // that wait says why.
            let polled = self.socket.kick_receive();
            if self.receive.has_next() {
                return true;
            }
            if polled.is_err() || began.elapsed() >= limit {
                return false;
            }
        }
    }

    /// Appends up to `most` packets that were received; returns how many, and their bytes.
    #[inline]
    pub(crate) fn receive(&mut self, packets: &mut Vec<Packet>, most: usize) -> (u32, u64) {
        let (mut count, mut bytes) = (0, 0);
        while (count as usize) < most {
            let Some([address, length]) = self.receive.pop() else { break };
            let Some(packet) = self.take(address, false) else { continue };
            // The length is the first four bytes of the word.
            let [a, b, c, d, ..] = length.to_ne_bytes();
            let len = u32::from_ne_bytes([a, b, c, d]);
            // In its final place only, see above.
            packets.push(packet);
            if let Some(packet) = packets.last_mut() {
                packet.place(self.offset_of(address), len, 1 << self.shift);
            }
            bytes += u64::from(len);
            count += 1;
        }
        self.receive.release();
        self.filled = self.filled.saturating_sub(count);
        (count, bytes)
    }

    /// Returns how many packets can be queued for sending; reads the kernel's index only if fewer
    /// than `wanted` are known to.
    pub(crate) fn transmit_room(&mut self, wanted: u32) -> u32 {
        self.transmit.room(wanted)
    }

    /// Queues a packet for sending.
    ///
    /// # Errors
    /// The packet, if it is not in this UMEM or the ring is full.
    pub(crate) fn transmit(&mut self, packet: Packet) -> Result<(), Packet> {
        let place = self.place_of(packet.chunk().memory()).filter(|_| self.transmit.room(1) > 0);
        let Some((address, at)) = place else { return Err(packet) };
        let Some(slot) = self.slots.get_mut(at) else { return Err(packet) };
        let (offset, len) = packet.placed();
        *slot = Slot::Sending(packet);
        let address = address.wrapping_add(u64::from(offset));
        // The length is the first four bytes of the word.
        let [a, b, c, d] = len.to_ne_bytes();
        self.transmit.push([address, u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0])]);
        self.sending += 1;
        Ok(())
    }

    /// Passes what was queued to the kernel, which sends it.
    ///
    /// # Errors
    /// [`CallError`] if the interface is down or gone. Queued packets stay queued.
    pub(crate) fn flush(&mut self) -> Result<(), CallError> {
        self.transmit.publish();
        // The kernel sends some 32 packets in a call and asks to be called again.
        for _ in 0..1024 {
            // The flag is read after the entries are visible, or a kernel that just went to sleep
            // would be missed.
            fence(Ordering::SeqCst);
            if self.sending == 0 || (self.need_wakeup && !is_set(&self.transmit)) {
                return Ok(());
            }
            match self.socket.kick_transmit() {
                Ok(()) => return Ok(()),
                Err(error) if error.errno.raw() == EAGAIN => {}
                // The driver's ring is full; the next flush goes on.
                Err(error) if [EBUSY, ENOBUFS].contains(&error.errno.raw()) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reclaims the packets that have been sent; returns how many.
    pub(crate) fn complete(&mut self, mut each: impl FnMut(Packet)) -> u32 {
        let mut count = 0;
        while let Some([address]) = self.completion.pop() {
            let Some(packet) = self.take(address, true) else { continue };
            count += 1;
            each(packet);
        }
        self.completion.release();
        self.sending = self.sending.saturating_sub(count);
        count
    }

    /// Makes the kernel send the queued packets, and reclaims those that have been sent, until none
    /// is being sent or `limit` has passed; returns how many packets are still being sent.
    pub(crate) fn drain(&mut self, limit: Duration, mut each: impl FnMut(Packet)) -> u32 {
        let end = Instant::now() + limit;
        while self.sending > 0 {
            let flushed = self.flush();
            if self.complete(&mut each) == 0 && self.sending > 0 {
                if flushed.is_err() || Instant::now() >= end {
                    break;
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        self.sending
    }

    /// Makes the chunks that the kernel has not taken from the transmit ring ordinary ones, which
    /// are freed when the socket is closed: without zero-copy it takes them in calls of this
    /// process alone, of which there is none any more.
    fn give_up_untaken(&mut self) {
        if self.socket.is_zero_copy() {
            return;
        }
        for [address, _] in self.transmit.untaken() {
            let at = usize::try_from(address >> self.shift).ok();
            let Some(slot) = at.and_then(|at| self.slots.get_mut(at)) else { continue };
            match std::mem::take(slot) {
                Slot::Sending(packet) => {
                    *slot = Slot::Filled(packet);
                    self.sending = self.sending.saturating_sub(1);
                }
                other => *slot = other,
            }
        }
    }

    /// Returns the offset of an address in its chunk.
    #[inline]
    fn offset_of(&self, address: u64) -> u32 {
        // Below the size of a chunk, at most 4096.
        u32::try_from(address & ((1 << self.shift) - 1)).unwrap_or(0)
    }

    /// Removes and returns the packet at an address that the kernel returned.
    #[inline]
    fn take(&mut self, address: u64, sent: bool) -> Option<Packet> {
        let slot =
            usize::try_from(address >> self.shift).ok().and_then(|at| self.slots.get_mut(at));
        if let Some(slot) = slot {
            match (std::mem::take(slot), sent) {
                (Slot::Filled(packet), false) | (Slot::Sending(packet), true) => {
                    return Some(packet);
                }
                (other, _) => *slot = other,
            }
        }
        self.unknown += 1;
        None
    }
}

/// `errno(3)`, as the system has them on every architecture that Linux shares them among.
const EAGAIN: i32 = 11;
const EBUSY: i32 = 16;
const ENOBUFS: i32 = 105;

fn is_set<const N: usize>(ring: &Producer<RingMemory, N>) -> bool {
    ring.memory().flags().is_none_or(|flags| flags.load(Ordering::Relaxed) & NEED_WAKEUP != 0)
}

impl Drop for Rings {
    /// Waits for packets that are being sent. Chunks that the kernel has taken and not sent then
    /// are quarantined: the network stack may read it after the socket is closed.
    fn drop(&mut self) {
        if self.drain(DRAIN, drop) > 0 {
            self.give_up_untaken();
        }
        if self.sending == 0 {
            return;
        }
        tracing::error!(
            packets = self.sending,
            "the pages of packets that were not sent are quarantined"
        );
        for slot in &mut self.slots {
            // Chunks in the fill ring stay until the socket is closed.
            if matches!(slot, Slot::Sending(_)) {
                std::mem::forget(std::mem::take(slot));
            }
        }
    }
}
