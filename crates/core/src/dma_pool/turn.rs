//! [`Growth`]: the turn to grow a pool, which one owner has at a time, and what its holders have learnt.

use crate::frame::Order;
use crate::sync::{AtomicBool, AtomicU8, Ordering, relax};

/// After a larger chunk was refused, so many are asked for at the size that was available before a larger one is tried again.
const MODEST: u8 = 16;

/// The flag that an owner sets while it grows the pool.
#[derive(Debug)]
pub(super) struct Growth {
    taken: AtomicBool,
    /// The order that was available when a larger one was refused.
    available: AtomicU8,
    /// For how many more chunks that order is asked for first.
    modest: AtomicU8,
}

/// Holds the turn until it is dropped.
pub(super) struct Turn<'g>(&'g Growth);

impl Growth {
    pub(super) fn new() -> Self {
        Self { taken: AtomicBool::new(false), available: AtomicU8::new(0), modest: AtomicU8::new(0) }
    }

    /// Takes the turn, if no other owner has it.
    pub(super) fn turn(&self) -> Option<Turn<'_>> {
        let free = self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        free.then(|| Turn(self))
    }

    /// Waits for the turn and takes it.
    pub(super) fn wait(&self) -> Turn<'_> {
        let mut attempts = 0;
        loop {
            if let Some(turn) = self.turn() {
                return turn;
            }
            relax(attempts);
            attempts = attempts.saturating_add(1);
        }
    }
}

impl Turn<'_> {
    /// The order to ask for first, where `wanted` would be best.
    pub(super) fn first(&self, wanted: Order) -> Order {
        if self.0.modest.load(Ordering::Relaxed) == 0 {
            return wanted;
        }
        Order::new(self.0.available.load(Ordering::Relaxed)).map_or(wanted, |available| available.min(wanted))
    }

    /// Notes which order was available, and which one was asked for first.
    pub(super) fn note(&self, asked: Order, got: Order) {
        let mut left = self.0.modest.load(Ordering::Relaxed).saturating_sub(1);
        if got < asked {
            self.0.available.store(got.get(), Ordering::Relaxed);
            left = MODEST;
        }
        self.0.modest.store(left, Ordering::Relaxed);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}
