//! Pinning by io_uring: tables of registered buffers in private rings.
//!
//! The kernel pins each page of such a buffer (`FOLL_LONGTERM`): it keeps its frame until it leaves
//! the table, whatever the process does to its addresses.

use super::footprint::{Coverage, Footprint};
use crate::sys::Errno;
use io_uring::IoUring;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The most that one place of a ring's table holds. Pieces end at multiples of it, so that no page
/// is in two.
const PIECE: usize = 1 << 30;
/// The most places of a ring: enough for 15 buffers of the largest size.
const MAX_PLACES: u32 = 16_384;
/// The number of places that the largest buffer (1 TiB) needs.
const LARGEST: u32 = 1025;

/// A place in a ring's table of buffers, and its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingPlace {
    /// Its number in requests.
    pub index: u32,
    /// The address of the memory.
    pub addr: usize,
    /// Its length in bytes.
    pub len: usize,
}

/// Pinned memory: its ring, its places there, and its charge.
#[derive(Debug)]
pub(super) struct Pins {
    ring: usize,
    places: Vec<RingPlace>,
    pub(super) charged: u64,
}

impl Pins {
    /// Returns its ring, and its places there.
    pub(super) fn places(&self) -> (usize, &[RingPlace]) {
        (self.ring, &self.places)
    }
}

/// Rings that only pin.
pub(super) struct PinRings {
    rings: Vec<PinRing>,
    capacity: u32,
}

struct PinRing {
    ring: IoUring,
    vacant: Vec<u32>,
    /// The pages of several frames that the kernel charges to this ring's table.
    larger: Coverage,
    charged: u64,
}

impl Drop for PinRing {
    fn drop(&mut self) {
        // Closing the ring unpins as well, but later.
        if let Err(error) = self.ring.submitter().unregister_buffers() {
            tracing::debug!(%error, "buffers are unregistered when their ring is closed");
        }
    }
}

impl std::fmt::Debug for PinRings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PinRings").field("rings", &self.rings.len()).finish_non_exhaustive()
    }
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::new(error.raw_os_error().unwrap_or(libc::EIO))
}

impl PinRing {
    fn new(places: u32) -> Result<Self, Errno> {
        let ring = IoUring::builder().dontfork().build(1).map_err(|error| errno_of(&error))?;
        ring.submitter().register_buffers_sparse(places).map_err(|error| errno_of(&error))?;
        Ok(Self {
            ring,
            vacant: (0..places).rev().collect(),
            larger: Coverage::default(),
            charged: 0,
        })
    }

    /// Sets the memory of a place, or vacates it (`len` 0).
    fn set(&self, place: u32, addr: usize, len: usize) -> Result<(), Errno> {
        let iov_base = std::ptr::with_exposed_provenance_mut(if len == 0 { 0 } else { addr });
        let vector = libc::iovec { iov_base, iov_len: len };
        // SAFETY: the kernel pins the pages, and accesses them only for requests, of which this
        // ring has none. A program that clones the ring's buffers is responsible for the requests
        // there.
        let set = unsafe { self.ring.submitter().register_buffers_update(place, &[vector], None) };
        set.map_err(|error| errno_of(&error))
    }
}

impl PinRings {
    /// Creates a ring for `buffers` small buffers and a large one. Sparse tables: since Linux 5.19.
    pub(super) fn new(buffers: usize) -> Result<Self, Errno> {
        let capacity =
            u32::try_from(buffers).unwrap_or(MAX_PLACES).saturating_add(LARGEST).min(MAX_PLACES);
        Ok(Self { rings: vec![PinRing::new(capacity)?], capacity })
    }

    /// Returns the descriptor of a ring, whose buffers may be cloned to others.
    pub(super) fn fd(&self, ring: usize) -> Option<BorrowedFd<'_>> {
        let fd = self.rings.get(ring)?.ring.as_raw_fd();
        // SAFETY: the descriptor is open as long as the ring, which `self` owns.
        Some(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Returns whether the rings are still open.
    pub(super) fn alive(&self) -> bool {
        self.rings
            .iter()
            .all(|ring| ring.vacant.last().is_none_or(|&place| ring.set(place, 0, 0).is_ok()))
    }

    /// Returns what the kernel charges in total.
    pub(super) fn charged(&self) -> u64 {
        self.rings.iter().map(|ring| ring.charged).sum()
    }

    /// Returns what the kernel would charge for memory on these pages.
    pub(super) fn charge(&self, footprint: &Footprint, places: usize) -> u64 {
        let ring = self.rings.iter().find(|ring| ring.vacant.len() >= places);
        let none = Coverage::default();
        charge(ring.map_or(&none, |ring| &ring.larger), footprint)
    }

    /// Pins all of the memory, or nothing, and faults its pages in.
    pub(super) fn pin(&mut self, addr: usize, len: usize) -> Result<Pins, Errno> {
        let pieces: Vec<_> = pieces(addr, len).collect();
        let at = match self.rings.iter().position(|ring| ring.vacant.len() >= pieces.len()) {
            Some(at) => at,
            None => {
                self.rings.push(PinRing::new(self.capacity)?);
                self.rings.len() - 1
            }
        };
        let Some(ring) = self.rings.get_mut(at) else { return Err(Errno::new(libc::ENOMEM)) };
        let mut pins = Pins { ring: at, places: Vec::with_capacity(pieces.len()), charged: 0 };
        for (addr, len) in pieces {
            let Some(index) = ring.vacant.pop() else { break };
            if let Err(errno) = ring.set(index, addr, len) {
                ring.vacant.push(index);
                self.release(&pins);
                return Err(errno);
            }
            pins.places.push(RingPlace { index, addr, len });
        }
        Ok(pins)
    }

    /// Accounts for the pages of pinned memory.
    pub(super) fn account(&mut self, pins: &mut Pins, footprint: &Footprint) {
        if let Some(ring) = self.rings.get_mut(pins.ring) {
            pins.charged = charge(&ring.larger, footprint);
            ring.charged += pins.charged;
            footprint.larger.iter().for_each(|&(start, end)| ring.larger.add(start, end));
        }
    }

    /// Unpins memory that was accounted for.
    pub(super) fn unpin(&mut self, pins: &Pins, footprint: &Footprint) {
        self.release(pins);
        if let Some(ring) = self.rings.get_mut(pins.ring) {
            ring.charged -= pins.charged;
            for &(start, end) in &footprint.larger {
                ring.larger.remove(start, end);
            }
        }
    }

    /// Unpins memory that was not accounted for.
    pub(super) fn release(&mut self, pins: &Pins) {
        let Some(ring) = self.rings.get_mut(pins.ring) else { return };
        for &RingPlace { index, addr, len } in &pins.places {
            match ring.set(index, 0, 0) {
                Ok(()) => ring.vacant.push(index),
                // The place stays in use, and the memory pinned until the ring is closed.
                Err(errno) => tracing::error!(addr, len, %errno, "memory could not be unpinned"),
            }
        }
    }
}

/// Returns what the kernel charges: every plain page, and each larger one that is not in the table
/// yet.
fn charge(larger: &Coverage, footprint: &Footprint) -> u64 {
    let mut seen = Coverage::default();
    let new = footprint.larger.iter().map(|&(start, end)| {
        // A page may be in a footprint twice; it is missing completely or not at all.
        let missing = larger.missing(start, end).min(seen.missing(start, end));
        seen.add(start, end);
        missing
    });
    new.sum::<u64>() + footprint.plain_bytes()
}

/// Cuts memory into the parts of one place each.
pub(super) fn pieces(addr: usize, len: usize) -> impl Iterator<Item = (usize, usize)> {
    let end = addr.saturating_add(len);
    let mut at = addr;
    std::iter::from_fn(move || {
        let start = at;
        at = (start / PIECE).saturating_add(1).saturating_mul(PIECE).min(end);
        (start < end).then(|| (start, at - start))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_are_at_most_a_gib_and_split_no_page(addr in 0usize..1 << 47, len in 1usize..=1 << 40) {
            let mut at = addr;
            let mut count = 0;
            for (start, bytes) in pieces(addr, len) {
                prop_assert_eq!(start, at);
                prop_assert!((1..=PIECE).contains(&bytes));
                at = start + bytes;
                prop_assert!(at == addr + len || at.is_multiple_of(PIECE));
                count += 1;
            }
            prop_assert_eq!(at, addr + len);
            prop_assert!(count <= LARGEST);
        }
    }
}
