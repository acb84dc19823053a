//! The ring: where other threads leave pages for the consumer.
//!
//! Bounded, lock-free, many producers, one consumer. A producer claims slots, as many as it has pages for, by one
//! compare-and-swap of the tail, and fills each by a release store. That store is the *last* that it does to the pool.
//! The consumer takes what is filled, in order, clears it and moves the head on.
//!
//! The tail has a bit that says that the ring is closed. It is set by a read-modify-write, so a page is either claimed a
//! place before that, and found by the closing thread, or its producer learns that it came too late.

use crate::sync::{AtomicU64, CachePadded, Ordering, relax};
use alloc::boxed::Box;

/// A page on its way to the consumer.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Entry(u64);

/// A slot with a page in it has this bit.
const FULL: u64 = 1;
const RAW: u64 = 2;
const FRAME_SHIFT: u32 = 2;
/// How many bits a frame's number has.
pub(super) const FRAME_BITS: u32 = 30;

impl Entry {
    /// A page that its owner frees: there is one such entry per allocation.
    #[inline(always)]
    pub(super) fn owned(frame: u32) -> Self {
        Self(FULL | u64::from(frame) << FRAME_SHIFT)
    }

    /// A raw free, which may be mistaken: the generation tells.
    #[inline(always)]
    pub(super) fn raw(frame: u32, generation: u32) -> Self {
        Self(FULL | RAW | u64::from(frame) << FRAME_SHIFT | u64::from(generation) << 32)
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "30 bits")]
    pub(super) fn frame(self) -> u32 {
        self.0 as u32 >> FRAME_SHIFT
    }

    /// The generation of a raw free; `None` for a page that is freed by its owner.
    #[inline(always)]
    pub(super) fn generation(self) -> Option<u32> {
        (self.0 & RAW != 0).then_some((self.0 >> 32) as u32)
    }
}

/// The pool was taken down: the ring will not be emptied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Closed;

const CLOSED: u64 = 1 << 63;

/// See the module. Positions only increase; a slot is the position modulo the capacity.
#[derive(Debug)]
pub(super) struct Ring {
    /// The next position to be claimed.
    tail: CachePadded<AtomicU64>,
    /// The next position to be taken. Written by the consumer.
    head: CachePadded<AtomicU64>,
    slots: Box<[AtomicU64]>,
}

impl Ring {
    /// `capacity` is a power of two.
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            tail: CachePadded(AtomicU64::new(0)),
            head: CachePadded(AtomicU64::new(0)),
            slots: (0..capacity).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "masked below the number of slots")]
    #[inline(always)]
    fn slot(&self, position: u64) -> Option<&AtomicU64> {
        self.slots.get(position as usize & (self.slots.len() - 1))
    }

    /// Claims as many slots as there is room for, `wanted` at most, by one compare-and-swap. `None`: the ring is full.
    #[inline]
    pub(super) fn claim(&self, wanted: usize) -> Result<Option<Claim<'_>>, Closed> {
        let capacity = self.slots.len() as u64;
        let mut tail = self.tail.load(Ordering::Relaxed);
        loop {
            if tail & CLOSED != 0 {
                return Err(Closed);
            }
            // Acquire: the consumer has emptied the slots before the head.
            let used = tail.wrapping_sub(self.head.load(Ordering::Acquire));
            if used > capacity {
                // The tail that we read is older than the head; the acquire above makes a newer one visible.
                tail = self.tail.load(Ordering::Relaxed);
                continue;
            }
            let count = (wanted as u64).min(capacity - used);
            if count == 0 {
                return Ok(None);
            }
            match self.tail.compare_exchange_weak(tail, tail + count, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(Some(Claim { slots: &self.slots, first: tail, end: tail + count })),
                Err(now) => tail = now,
            }
        }
    }

    /// Takes at most `most` entries out, oldest first. For the consumer alone.
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

    /// Closes the ring and takes everything out. For the consumer alone.
    ///
    /// Waits for producers between their claim and their store, a few instructions each.
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

    /// How many entries were ever put in.
    pub(super) fn pushed(&self) -> u64 {
        self.tail.load(Ordering::Relaxed) & !CLOSED
    }

    /// How many entries are in it, those included that are being put in. A glimpse.
    pub(super) fn len(&self) -> u64 {
        self.pushed().saturating_sub(self.head.load(Ordering::Relaxed))
    }
}

/// Claimed slots of the ring that a producer must fill: the consumer waits for it.
#[derive(Debug)]
pub(super) struct Claim<'r> {
    /// All of the ring's, and nothing but atomics: the ring may be freed as soon as the last one is stored, while this
    /// is still there.
    slots: &'r [AtomicU64],
    first: u64,
    end: u64,
}

impl Claim<'_> {
    /// Fills the slots with the first of `entries`, of which there are as many; returns how many that were. O(their
    /// number). The ring is not reached any more after the last of them was stored.
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
