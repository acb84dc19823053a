//! [`Growth`]: the turn to grow a pool, which one owner has at a time.

use crate::sync::{AtomicBool, Ordering};

/// The flag that an owner sets while it grows the pool.
#[derive(Debug)]
pub(super) struct Growth(AtomicBool);

/// Holds the turn until it is dropped.
pub(super) struct Turn<'g>(&'g Growth);

impl Growth {
    pub(super) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Takes the turn, if no other owner has it.
    pub(super) fn turn(&self) -> Option<Turn<'_>> {
        let free = self.0.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        free.then(|| Turn(self))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Release);
    }
}
