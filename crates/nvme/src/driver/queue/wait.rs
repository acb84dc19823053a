//! Waiting for completions: polling, sleeping until an interrupt, or in the program's own event
//! loop.

use super::order::RECHECK_NS;
use super::pair::Queue;
use crate::driver::admin_queue::STATUS_INTERVAL_NS;
use crate::driver::clock::Backoff;
use crate::driver::error::{CommandError, PollError};
use crate::driver::in_flight::{Completion, RequestId, RequestResult};
use crate::driver::slots::{AbortState, CommandState};
use crate::registers::Registers;
use crate::spec::{Cqe, Csts, Status, offset};
use pinfold::requests::{Ended, Requests};
use pinfold_core::dma_pool::ChunkSource;
use pinfold_core::domain::Pinned;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The longest sleep. A device that is gone raises no interrupt, so this is the interval of checks
/// for its presence, and the cost of a lost interrupt.
const MAX_SLEEP: Duration = Duration::from_millis(100);

/// How often a [pause](Queue::pause) yields to other threads before it sleeps for the interrupt. A
/// sleep and its wake-up delay a request by more than these yields together; and what is completed
/// while others run returns as one batch.
const YIELDS: u32 = 4;

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

    /// Returns whether the queue has an interrupt.
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

    /// Pauses between two polls of a wait for what this queue completes, and for the flushes of
    /// `requests`, whose payloads its commands have: for at most `limit`. `polls` counts from 1.
    ///
    /// It spins, or yields if there is an interrupt, then sleeps: for the interrupt while commands
    /// are all that can end, for the flush while those are, else for 50 µs. What a flush has ended
    /// meanwhile is added to `ended`.
    pub fn pause<P: Pinned, const N: usize>(
        &mut self,
        polls: u32,
        limit: Duration,
        requests: &mut Requests<P, N>,
        ended: &mut Vec<Ended<P, N>>,
    ) {
        let flushes_only = requests.in_flight() == 0 && requests.held() + requests.late() > 0;
        if flushes_only && polls >= Backoff::SPINS {
            requests.wait(limit, ended);
        } else if self.interrupt.is_none() && polls < Backoff::SPINS {
            std::hint::spin_loop();
        } else if self.interrupt.is_some() && requests.held() == 0 && polls > YIELDS {
            self.sleep(limit);
        } else {
            // No interrupt reports the end of a flush, which takes about as long as a yield.
            Backoff::pause_after(polls);
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
        let mut next_ns = self.next_deadline_ns.min(self.next_retry_ns);
        if !self.unblocked.is_empty() {
            next_ns = next_ns.min(self.now_ns.saturating_add(RECHECK_NS));
        }
        Duration::from_nanos(next_ns.saturating_sub(self.now_ns)).min(MAX_SLEEP)
    }
}

// The translation of completion entries to completed requests.

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// Returns the next request that has completed or has been given up.
    ///
    /// Never waits, except after a change of a namespace while commands are to be sent (again): it
    /// is then identified again first. Allocates nothing but for that, for aborts of requests that
    /// are overdue, and after [`abandon_retries`](Self::abandon_retries).
    ///
    /// After [`Controller::reset`](crate::driver::Controller::reset) it returns everything that was
    /// in flight.
    ///
    /// # Errors
    /// [`PollError`] where the controller has failed or is gone; requests stay in flight until it
    /// is reset.
    pub fn poll(&mut self) -> Result<Option<Completion>, PollError> {
        if let Some(completion) = self.pop_completion() {
            return Ok(Some(completion));
        }
        if self.is_stale() {
            self.complete_all_after_reset();
            return Ok(self.pop_completion());
        }
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        self.ring_doorbell();
        // Bounds the loop against endless garbage.
        for _ in 0..self.cq.entries() {
            if !self.completions.is_empty() {
                break;
            }
            let Some(cqe) = self.cq.next() else { break };
            self.handle_entry(&cqe);
        }
        let waiting =
            !self.retrying.is_empty() || !self.unsent.is_empty() || !self.unblocked.is_empty();
        if waiting && self.fail_changed() {
            if !self.retrying.is_empty() {
                self.send_retries();
            }
            if !self.unblocked.is_empty() {
                self.send_unblocked();
            }
            if !self.unsent.is_empty() {
                self.send_more();
            }
            self.ring_doorbell();
        }
        if self.completions.is_empty() {
            self.on_idle()?;
        }
        Ok(self.pop_completion())
    }

    fn pop_completion(&mut self) -> Option<Completion> {
        let completion = self.completions.pop_front()?;
        // Only now, so that `completions` never exceeds the queue depth.
        self.free_requests.push(completion.id.tag);
        Some(completion)
    }

    /// Handles a completion entry, whose content is untrusted.
    fn handle_entry(&mut self, cqe: &Cqe) {
        if u32::from(cqe.sq_head.get()) >= self.sq.entries() {
            self.stats.bad_heads += 1;
        }
        let cid = cqe.cid.get();
        let index = self.ids.slot(cid);
        let slot = self.commands.get(usize::from(index)).filter(|slot| {
            let in_flight =
                matches!(slot.state, CommandState::InFlight | CommandState::Quarantined);
            in_flight && cqe.sq_id.get() == self.id && self.ids.encode(slot.uses, index) == cid
        });
        let Some(slot) = slot else {
            self.stats.spurious_completions += 1;
            return;
        };
        let (late, tag) = (slot.state == CommandState::Quarantined, slot.tag);
        if late {
            self.free_command(index);
            self.quarantined -= 1;
            self.stats.late_completions += 1;
            return;
        }
        self.stats.completions += 1;
        let status = cqe.status();
        if !status.is_success() {
            self.stats.errors += 1;
            if self.schedule_retry(index, status) {
                return;
            }
            let aborting =
                self.requests.get(usize::from(tag)).is_some_and(|request| request.aborting);
            let error = match status.code() {
                Status::ABORT_REQUESTED if aborting => CommandError::Aborted,
                _ => CommandError::Status(status),
            };
            self.fail_request(tag, error);
        }
        self.free_command(index);
        if let Some(request) = self.requests.get_mut(usize::from(tag)) {
            request.commands = request.commands.saturating_sub(1);
            request.value = cqe.result.get();
        }
        self.complete_if_idle(tag);
    }

    /// Releases the list pages of a completed command, and its slot unless an abort of it is
    /// outstanding.
    pub(super) fn free_command(&mut self, index: u16) {
        let Some(slot) = self.commands.get_mut(usize::from(index)) else { return };
        if let Some(data) = slot.data.take() {
            data.release(&mut self.lists);
        }
        if slot.abort == AbortState::Outstanding {
            slot.state = CommandState::AwaitingAbort;
        } else {
            slot.state = CommandState::Free;
            self.free_commands.push(index);
        }
    }

    /// Completes a request of which nothing is unsent or in flight.
    pub(super) fn complete_if_idle(&mut self, tag: u16) {
        let Some(request) = self.requests.get_mut(usize::from(tag)) else { return };
        if request.busy && request.unsent == 0 && request.commands == 0 {
            let result = request.error.take().map_or(Ok(()), Err);
            self.stats.aborted += u64::from(result == Err(CommandError::Aborted));
            self.complete(tag, RequestResult::Completed(result));
        }
    }

    pub(super) fn complete(&mut self, tag: u16, result: RequestResult) {
        if let Some(request) = self.requests.get_mut(usize::from(tag)) {
            request.busy = false;
            let id = RequestId { queue: self.serial, tag, sequence: request.sequence };
            self.completions.push_back(Completion { id, result, value: request.value });
            self.end_order(tag);
        }
    }

    /// Checks the controller and the deadlines when there was no completion.
    #[cold]
    fn on_idle(&mut self) -> Result<(), PollError> {
        if self.in_flight() == 0 {
            return Ok(());
        }
        self.now_ns = self.inner.config.clock.now_ns();
        let overdue = self.now_ns >= self.next_deadline_ns;
        if overdue || self.now_ns.saturating_sub(self.last_status_ns) >= STATUS_INTERVAL_NS {
            self.last_status_ns = self.now_ns;
            self.check_status()?;
            self.inner.poll_admin();
        }
        if overdue {
            self.expire_overdue();
        }
        self.abort_overdue();
        Ok(())
    }

    fn check_status(&mut self) -> Result<(), PollError> {
        // Both before and after: a reset that began and ended in between has made this queue stale.
        let shared = &self.inner.shared;
        let in_transition = shared.in_transition();
        let csts = self.inner.registers.read32(offset::CSTS);
        let expected = in_transition || shared.in_transition() || self.is_stale();
        let failed = match csts {
            Csts::GONE => PollError::Gone,
            csts if Csts::from_bits_retain(csts).contains(Csts::FATAL) => PollError::Fatal,
            _ if self.inner.registers.is_removal_requested() => PollError::RemovalRequested,
            csts if !expected && !Csts::from_bits_retain(csts).contains(Csts::READY) => {
                PollError::Stopped
            }
            _ => return Ok(()),
        };
        // A reset makes the queue stale, which is checked before `failed`.
        self.failed = Some(failed);
        Err(failed)
    }

    /// Completes everything in flight: the controller was reset.
    fn complete_all_after_reset(&mut self) {
        for index in (0..).take(self.commands.len()) {
            let slot = self.commands.get_mut(usize::from(index));
            if let Some(slot) = slot.filter(|slot| slot.state != CommandState::Free) {
                slot.abort = AbortState::None;
                self.free_command(index);
            }
        }
        (self.quarantined, self.aborts) = (0, 0);
        // Nothing is sent from now on.
        self.retrying.clear();
        self.count_retry_wait();
        for tag in (0..).take(self.requests.len()) {
            if self.requests.get(usize::from(tag)).is_some_and(|request| request.busy) {
                self.complete(tag, RequestResult::Completed(Err(CommandError::Reset)));
            }
        }
    }
}
