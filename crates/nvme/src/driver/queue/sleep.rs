//! Waiting for completions: awake, or asleep until an interrupt.

use super::Queue;
use crate::driver::clock::Backoff;
use crate::driver::error::PollError;
use crate::driver::request::Completion;
use crate::interrupt::Interrupt;
use crate::registers::Registers;
use pinfold_core::dma_pool::ChunkSource;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The longest sleep. A device that is gone raises no interrupt: so often it is looked whether it is still there, and
/// that is also what a lost interrupt costs.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

/// An interrupt vector of the controller, and where it arrives.
#[derive(Clone)]
pub struct Vector {
    /// Its number: an index into the controller's MSI-X table.
    pub number: u16,
    /// Where it arrives.
    pub interrupt: Arc<dyn Interrupt>,
}

impl fmt::Debug for Vector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vector").field("number", &self.number).finish_non_exhaustive()
    }
}

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// Waits for a completion: asleep, where the queue has an interrupt; else it spins, yields, then sleeps for 50 µs at
    /// a time. It returns at the latest when a request times out, or 100 ms after the device is gone. `None` where
    /// nothing is under way.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn wait(&mut self) -> Result<Option<Completion>, PollError> {
        let mut backoff = Backoff::default();
        loop {
            match self.poll()? {
                Some(completion) => return Ok(Some(completion)),
                None if self.in_flight() == 0 => return Ok(None),
                None if self.interrupt.is_some() => self.sleep(LONGEST_SLEEP),
                None => backoff.pause(),
            }
        }
    }

    /// Whether the queue has an interrupt, so that [`sleep`](Self::sleep) sleeps.
    pub fn has_interrupt(&self) -> bool {
        self.interrupt.is_some()
    }

    /// Sleeps until the queue's interrupt, at most `limit`, 100 ms, or until the next request times out; poll
    /// afterwards. It returns at once where there is no interrupt, or nothing under way. What was submitted is told to
    /// the controller before.
    pub fn sleep(&mut self, limit: Duration) {
        let Some(interrupt) = self.interrupt.clone() else { return };
        if self.in_flight() == 0 || !self.ready.is_empty() || self.failed.is_some() || self.is_stale() {
            return;
        }
        self.ring_doorbell();
        // Told of what was read, the controller has no reason to hold an interrupt back.
        if let Some(head) = self.cq.take_unrung() {
            self.ring_head(head);
        }
        let left = Duration::from_nanos(self.next_deadline_ns.saturating_sub(self.now_ns));
        self.stats.sleeps += 1;
        self.stats.interrupts += u64::from(interrupt.wait(limit.min(LONGEST_SLEEP).min(left)));
    }
}
