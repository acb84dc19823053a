//! The ring by which other threads return pages to the consumer.
//!
//! Bounded, without a lock, multiple producers, one consumer. A producer claims a slot for each of
//! its pages by one compare-and-swap of the tail, and fills each by a release store. That store is
//! its *last* access to the pool. The consumer takes filled slots in order, clears them and
//! advances the head. It stops at a slot that is claimed but not filled: a producer that stalls in
//! between delays the entries behind its own, but neither other producers nor the consumer, which
//! takes pages elsewhere. Only closing the ring waits for it.
//!
//! A bit of the tail marks the ring as closed. It is set by a read-modify-write, so every claim is
//! either made before that, and the closing thread collects its pages, or refused.

use crate::dma_pool::list;
use crate::sync::{AtomicU64, CachePadded, Ordering, relax};
use alloc::boxed::Box;
use alloc::collections::TryReserveError;

/// The number of pages moved at a time: half a magazine of the consumer.
pub(super) const BULK: usize = 64;
/// `BULK` as a number of pages.
pub(super) const BULK_PAGES: u32 = 64;

/// A page on its way to the consumer.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Entry(u64);

/// Set in a slot that holds an entry.
const FULL: u64 = 1;
const RAW: u64 = 2;
const FRAME_SHIFT: u32 = 2;
/// The number of bits of a frame's number.
pub(super) const FRAME_BITS: u32 = 30;

impl Entry {
    /// Creates the entry of a page freed by its owner: one per allocation.
    #[inline(always)]
    pub(super) fn owned(frame: u32) -> Self {
        Self(FULL | u64::from(frame) << FRAME_SHIFT)
    }

    /// Creates the entry of a raw free. It may be a second free, which the generation shows.
    #[inline(always)]
    pub(super) fn raw(frame: u32, generation: u32) -> Self {
        Self(FULL | RAW | u64::from(frame) << FRAME_SHIFT | u64::from(generation) << 32)
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "30 bits")]
    pub(super) fn frame(self) -> u32 {
        self.0 as u32 >> FRAME_SHIFT
    }

    /// Returns the generation of a raw free; `None` for a page freed by its owner.
    #[inline(always)]
    pub(super) fn generation(self) -> Option<u32> {
        (self.0 & RAW != 0).then_some((self.0 >> 32) as u32)
    }
}

/// The pool has been taken down: the ring accepts no more entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Closed;

const CLOSED: u64 = 1 << 63;

/// See the [module](self). Positions only increase; a slot's index is the position modulo the
/// capacity.
#[derive(Debug)]
pub(super) struct Ring {
    /// The next position to be claimed.
    tail: CachePadded<AtomicU64>,
    /// The next position to be taken. Written by the consumer.
    head: CachePadded<AtomicU64>,
    slots: Box<[AtomicU64]>,
}

impl Ring {
    /// Creates a ring, unless there is no memory for it. `capacity` is a power of two.
    pub(super) fn new(capacity: u32) -> Result<Self, TryReserveError> {
        Ok(Self {
            tail: CachePadded(AtomicU64::new(0)),
            head: CachePadded(AtomicU64::new(0)),
            slots: list(capacity as usize, |_| AtomicU64::new(0))?.into(),
        })
    }

    #[expect(clippy::cast_possible_truncation, reason = "masked below the number of slots")]
    #[inline(always)]
    fn slot(&self, position: u64) -> Option<&AtomicU64> {
        self.slots.get(position as usize & (self.slots.len() - 1))
    }

    /// Claims up to `wanted` slots by one compare-and-swap; returns `None` if the ring is full.
    #[inline]
    pub(super) fn claim(&self, wanted: usize) -> Result<Option<Claim<'_>>, Closed> {
        let capacity = self.slots.len() as u64;
        let mut tail = self.tail.load(Ordering::Relaxed);
        loop {
            if tail & CLOSED != 0 {
                return Err(Closed);
            }
            // Acquire: the consumer has cleared the slots before the head.
            let used = tail.wrapping_sub(self.head.load(Ordering::Acquire));
            if used > capacity {
                // The tail is older than the head; the acquire above makes a newer one visible.
                tail = self.tail.load(Ordering::Relaxed);
                continue;
            }
            let count = (wanted as u64).min(capacity - used);
            if count == 0 {
                return Ok(None);
            }
            match self.tail.compare_exchange_weak(
                tail,
                tail + count,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    return Ok(Some(Claim { slots: &self.slots, first: tail, end: tail + count }));
                }
                Err(now) => tail = now,
            }
        }
    }

    /// Takes at most `most` entries, oldest first. For the consumer alone.
    #[inline]
    pub(super) fn drain(&self, most: u64, mut each: impl FnMut(Entry)) {
        let head = self.head.load(Ordering::Relaxed);
        let mut position = head;
        while position < head + most {
            let Some(slot) = self.slot(position) else { break };
            let entry = slot.load(Ordering::Acquire);
            if entry == 0 {
                break;
            }
            slot.store(0, Ordering::Relaxed);
            each(Entry(entry));
            position += 1;
        }
        if position != head {
            self.head.store(position, Ordering::Release);
        }
    }

    /// Calls `each` with the entries that are in the ring, and takes none. For the consumer alone.
    pub(super) fn each(&self, each: impl FnMut(Entry)) {
        let head = self.head.load(Ordering::Relaxed);
        let slots = (head..self.pushed()).filter_map(|position| self.slot(position));
        // One that is claimed and not filled yet is 0.
        let entries = slots.map(|slot| slot.load(Ordering::Acquire)).filter(|entry| *entry != 0);
        entries.map(Entry).for_each(each);
    }

    /// Closes the ring and takes all entries. For the consumer alone.
    ///
    /// Waits for producers that have claimed slots and not filled them: a few instructions each.
    pub(super) fn close(&self, mut each: impl FnMut(Entry)) {
        let tail = self.tail.fetch_or(CLOSED, Ordering::AcqRel) & !CLOSED;
        let mut position = self.head.load(Ordering::Relaxed);
        let mut attempts = 0;
        while position < tail {
            self.drain(tail - position, &mut each);
            let now = self.head.load(Ordering::Relaxed);
            attempts = if now == position { attempts + 1 } else { 0 };
            if attempts != 0 {
                relax(attempts);
            }
            position = now;
        }
    }

    /// Returns how many entries have ever been put in.
    pub(super) fn pushed(&self) -> u64 {
        self.tail.load(Ordering::Relaxed) & !CLOSED
    }

    /// Returns the current number of entries, claimed ones included. Approximate while other
    /// threads use the ring.
    pub(super) fn len(&self) -> u64 {
        self.pushed().saturating_sub(self.head.load(Ordering::Relaxed))
    }
}

/// Claimed slots, which the producer must fill: the consumer waits for them.
#[derive(Debug)]
pub(super) struct Claim<'r> {
    /// All slots of the ring. Nothing else is referenced: the ring may be freed as soon as the last
    /// claimed slot is filled, while this value still exists.
    slots: &'r [AtomicU64],
    first: u64,
    end: u64,
}

impl Claim<'_> {
    /// Fills the claimed slots from the start of `entries`, which has at least as many; returns
    /// their number. The ring is not accessed after the last slot is filled.
    #[expect(clippy::cast_possible_truncation, reason = "masked below the number of slots")]
    #[inline]
    pub(super) fn fill(self, entries: &[Entry]) -> usize {
        let mask = self.slots.len() - 1;
        for (position, entry) in (self.first..self.end).zip(entries) {
            if let Some(slot) = self.slots.get(position as usize & mask) {
                slot.store(entry.0, Ordering::Release);
            }
        }
        (self.end - self.first) as usize
    }
}
