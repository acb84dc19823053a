//! Commands whose status permits a retry (DNR clear) are sent again, after the delay that the
//! controller asks for.
//!
//! A flush is the exception: one that may have been carried out is not repeated, whatever its
//! status says. What could not be written may be dropped with the error, and the next flush then
//! succeeds without it. Only a controller that says that it did not get to it, by the code
//! "namespace not ready" or "command interrupted", is asked again. Every other command carries what
//! it needs to be repeated; none is sent with FUA.
//!
//! A waiting command keeps its slot and its list pages, and a poll sends it when it is due: nothing
//! sleeps. If its namespace is formatted or detached meanwhile, it is not sent again.

use super::pair::Queue;
use crate::driver::error::CommandError;
use crate::driver::slots::{AbortState, CommandState, Operation, RetryState};
use crate::registers::Registers;
use crate::spec::Status;
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::little_endian::U16;

/// The number of retries after a media error: a bad block is rarely readable later.
const MEDIA_RETRIES: u32 = 4;

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// Schedules a completed command to be sent again, if its status and the time limit permit it;
    /// returns whether it did.
    #[cold]
    pub(super) fn schedule_retry(&mut self, index: u16, status: Status) -> bool {
        let Some(slot) = self.commands.get_mut(usize::from(index)) else { return false };
        let Some(request) = self.requests.get_mut(usize::from(slot.tag)) else { return false };
        let RetryState { attempts, since_ns, .. } = slot.retry;
        let spent = status.is_media_error() && attempts >= MEDIA_RETRIES;
        let lossy = request.request.operation == Operation::Flush && !status.is_not_executed();
        let given_up = self.retries_abandoned || request.aborting || request.error.is_some();
        if !status.may_retry() || spent || lossy || given_up {
            return false;
        }
        let now_ns = self.inner.config.clock.now_ns();
        let since_ns = if attempts == 0 { now_ns } else { since_ns };
        let left_ns = self.retry_limit_ns.saturating_sub(now_ns.saturating_sub(since_ns));
        let Some(delay_ns) = self.retry_delays.delay_ns(status, attempts, left_ns) else {
            return false;
        };
        let due_ns = now_ns.saturating_add(delay_ns);
        slot.state = CommandState::AwaitingRetry;
        slot.retry = RetryState { attempts: attempts.saturating_add(1), since_ns, due_ns, status };
        // The timeout applies to each attempt.
        request.deadline_ns = request.deadline_ns.max(due_ns.saturating_add(self.timeout_ns));
        self.stats.retried_requests += u64::from(!request.retried);
        request.retried = true;
        if self.retrying.is_empty() {
            self.retrying_since_ns = now_ns;
        }
        self.retrying.push(index);
        self.next_retry_ns = self.next_retry_ns.min(due_ns);
        true
    }

    /// Sends the waiting commands that are due.
    #[cold]
    pub(super) fn send_retries(&mut self) {
        self.now_ns = self.inner.config.clock.now_ns();
        if self.now_ns < self.next_retry_ns {
            return;
        }
        self.next_retry_ns = u64::MAX;
        let mut at = 0;
        while let Some(&index) = self.retrying.get(at) {
            let due_ns = self.commands.get(usize::from(index)).map_or(0, |slot| slot.retry.due_ns);
            if due_ns > self.now_ns {
                self.next_retry_ns = self.next_retry_ns.min(due_ns);
                at += 1;
                continue;
            }
            self.retrying.swap_remove(at);
            self.send_again(index);
        }
        self.count_retry_wait();
    }

    /// Sends a command again, under another identifier: a second completion of the earlier attempt
    /// is not taken for its own.
    fn send_again(&mut self, index: u16) {
        let Some(slot) = self.commands.get_mut(usize::from(index)) else { return };
        (slot.state, slot.abort) = (CommandState::InFlight, AbortState::None);
        slot.uses = self.ids.next(slot.uses, index);
        slot.command.cid = U16::new(self.ids.encode(slot.uses, index));
        self.sq.push(&slot.command);
        self.stats.commands += 1;
        self.stats.retries += 1;
        if let Some(request) = self.requests.get_mut(usize::from(slot.tag)) {
            request.deadline_ns =
                request.deadline_ns.max(self.now_ns.saturating_add(self.timeout_ns));
        }
    }

    /// Fails the requests that wait for a retry, with the status of their last attempt, and retries
    /// none from now on: for a program that gives up.
    pub fn abandon_retries(&mut self) {
        self.retries_abandoned = true;
        while let Some(&index) = self.retrying.first() {
            let Some(slot) = self.commands.get(usize::from(index)) else { return };
            let (tag, status) = (slot.tag, slot.retry.status);
            self.fail_request(tag, CommandError::Status(status));
            self.complete_if_idle(tag);
        }
    }

    /// Fails a request with `error`: sends nothing more of it, and nothing of it again.
    pub(super) fn fail_request(&mut self, tag: u16, error: CommandError) {
        self.cancel_unsent(tag, error);
        self.unsent.retain(|unsent| *unsent != tag);
        self.cancel_retries(tag);
    }

    /// Sends nothing of a request again.
    pub(super) fn cancel_retries(&mut self, tag: u16) {
        for at in (0..self.retrying.len()).rev() {
            let Some(&index) = self.retrying.get(at) else { continue };
            if self.commands.get(usize::from(index)).is_some_and(|slot| slot.tag == tag) {
                self.retrying.swap_remove(at);
                self.free_command(index);
                if let Some(request) = self.requests.get_mut(usize::from(tag)) {
                    request.commands = request.commands.saturating_sub(1);
                }
            }
        }
        self.count_retry_wait();
    }

    /// Adds the time for which commands waited, if none waits any more.
    pub(super) fn count_retry_wait(&mut self) {
        if self.retrying.is_empty() {
            self.next_retry_ns = u64::MAX;
            let since_ns = std::mem::replace(&mut self.retrying_since_ns, u64::MAX);
            self.stats.retry_wait_ns += self.now_ns.saturating_sub(since_ns);
        }
    }
}
