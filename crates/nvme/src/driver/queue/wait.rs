//! Waiting for completions: polling, sleeping until an interrupt, or in the program's own event
//! loop.

use super::pair::Queue;
use crate::driver::clock::Backoff;
use crate::driver::error::PollError;
use crate::driver::in_flight::Completion;
use crate::registers::Registers;
use pinfold_core::dma_pool::ChunkSource;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The longest sleep. A device that is gone raises no interrupt, so this is how often its presence
/// is checked, and what a lost interrupt costs.
const MAX_SLEEP: Duration = Duration::from_millis(100);

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// Waits for a completion; returns `None` where nothing is in flight. With an interrupt it
    /// sleeps; without one it spins, yields, then sleeps for 50 µs at a time. It ends at the latest
    /// when a request times out, or 100 ms after the device is gone.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn wait(&mut self) -> Result<Option<Completion>, PollError> {
        let mut backoff = Backoff::default();
        loop {
            match self.poll()? {
                Some(completion) => return Ok(Some(completion)),
                None if self.in_flight() == 0 => return Ok(None),
                None if self.interrupt.is_some() => self.sleep(MAX_SLEEP),
                None => backoff.pause(),
            }
        }
    }

    /// Whether the queue has an interrupt.
    pub fn has_interrupt(&self) -> bool {
        self.interrupt.is_some()
    }

    /// Returns a descriptor that becomes readable on the queue's interrupt, for `epoll` and
    /// runtimes on it; `None` where the queue is polled. Once nothing is left to poll, call
    /// [`arm_interrupt`](Self::arm_interrupt) and wait for at most the time that it returns.
    pub fn interrupt_fd(&self) -> Option<BorrowedFd<'_>> {
        self.interrupt.as_ref()?.interrupt_fd()
    }

    /// Clears the interrupt and rings the doorbells, so that the next completion raises it. Returns
    /// how long to wait for it before polling again: at most 100 ms, and zero where a poll may
    /// return something now.
    pub fn arm_interrupt(&mut self) -> Duration {
        if let Some(interrupt) = &self.interrupt {
            interrupt.wait(Duration::ZERO);
        }
        self.prepare_sleep()
    }

    /// Sleeps until the queue's interrupt, for at most `limit`, 100 ms, or until the next request
    /// times out or is retried; poll afterwards. Returns at once without an interrupt, or with
    /// nothing in flight. Rings the doorbell first.
    pub fn sleep(&mut self, limit: Duration) {
        let Some(interrupt) = self.interrupt.clone() else { return };
        if self.in_flight() == 0 {
            return;
        }
        let limit = limit.min(self.prepare_sleep());
        if !limit.is_zero() {
            self.stats.sleeps += 1;
            self.stats.interrupts += u64::from(interrupt.wait(limit));
        }
    }

    /// Rings both doorbells and returns how long the owner may sleep.
    fn prepare_sleep(&mut self) -> Duration {
        if !self.completions.is_empty() || self.failed.is_some() || self.is_stale() {
            return Duration::ZERO;
        }
        self.ring_doorbell();
        // A controller that lacks free entries holds interrupts back.
        if let Some(head) = self.cq.take_head() {
            self.write_head(head);
        }
        if self.cq.is_ready() {
            return Duration::ZERO;
        }
        let next_ns = self.next_deadline_ns.min(self.next_retry_ns);
        Duration::from_nanos(next_ns.saturating_sub(self.now_ns)).min(MAX_SLEEP)
    }
}
