//! Commands whose status permits a retry (DNR clear) are sent again, after the delay that the
//! controller asks for.
//!
//! A flush, and a command of the program's own, is the exception: one that may have been carried
//! out is not repeated, whatever its status. Data that could not be written may be dropped with the
//! error, and the next flush then succeeds without them. It is sent again only if the controller
//! reports that it did not execute the command, by the code "namespace not ready" or "command
//! interrupted". Every other command carries what it needs to be repeated; none is sent with FUA.
//!
//! A waiting command keeps its slot and its list pages, and a poll sends it when it is due: nothing
//! sleeps. If its namespace is formatted or detached meanwhile, it is not sent again.

use super::order::RECHECK_NS;
use super::pair::Queue;
use crate::driver::admin_queue::AbortTarget;
use crate::driver::error::CommandError;
use crate::driver::in_flight::RequestResult;
use crate::driver::slots::{AbortState, CommandState, RetryState};
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
        let lossy = request.request.operation.is_sent_once() && !status.is_not_executed();
        let given_up = self.retries_abandoned
            || request.given_up
            || request.aborting
            || request.error.is_some();
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
        // The timeout applies to each attempt.
        if !request.extend_deadline(due_ns.saturating_add(self.timeout_ns)) {
            return false;
        }
        slot.state = CommandState::AwaitingRetry;
        slot.retry = RetryState { attempts: attempts.saturating_add(1), since_ns, due_ns, status };
        if !request.retried {
            self.stats.retried_requests += 1;
            request.retried = true;
        }
        let tag = slot.tag;
        if self.retrying.is_empty() {
            self.retrying_since_ns = now_ns;
        }
        self.retrying.push(index);
        self.next_retry_ns = self.next_retry_ns.min(due_ns);
        if let Some(extent) = self.extents.get(tag).copied() {
            self.list(tag, &extent);
        }
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
            let slot = self.commands.get(usize::from(index));
            let (mut due_ns, tag) = slot.map_or((0, 0), |slot| (slot.retry.due_ns, slot.tag));
            if due_ns <= self.now_ns && self.waits_for_another_queue(tag) {
                due_ns = self.now_ns.saturating_add(RECHECK_NS);
            }
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
    /// is not mistaken for its own.
    fn send_again(&mut self, index: u16) {
        let Some(slot) = self.commands.get_mut(usize::from(index)) else { return };
        (slot.state, slot.abort) = (CommandState::InFlight, AbortState::None);
        slot.uses = self.ids.next(slot.uses, index);
        slot.command.cid = U16::new(self.ids.encode(slot.uses, index));
        self.sq.push(&slot.command);
        self.stats.commands += 1;
        self.stats.retries += 1;
        if let Some(request) = self.requests.get_mut(usize::from(slot.tag)) {
            // A poll that comes late leaves it less.
            let _ = request.extend_deadline(self.now_ns.saturating_add(self.timeout_ns));
        }
    }

    /// Fails the requests that wait for a retry, with the status of their last attempt, and retries
    /// none from now on: for a program that abandons its requests.
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

    /// Sends nothing of a request again; returns the last status of a command that waited.
    pub(super) fn cancel_retries(&mut self, tag: u16) -> Option<Status> {
        let mut status = None;
        for at in (0..self.retrying.len()).rev() {
            let Some(&index) = self.retrying.get(at) else { continue };
            let slot = self.commands.get(usize::from(index));
            if let Some(slot) = slot.filter(|slot| slot.tag == tag) {
                status = Some(slot.retry.status);
                self.retrying.swap_remove(at);
                self.free_command(index);
                if let Some(request) = self.requests.get_mut(usize::from(tag)) {
                    request.commands = request.commands.saturating_sub(1);
                }
            }
        }
        self.count_retry_wait();
        status
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

// Requests that do not complete in time: their commands are aborted, and what that does not end is
// quarantined.

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// Ends overdue requests: aborts their commands first, then quarantines them. A timeout is not
    /// a completion: memory that the controller may still access is not released.
    pub(super) fn expire_overdue(&mut self) {
        let now_ns = self.now_ns;
        let mut next_ns = u64::MAX;
        // A request that completes may unblock others, whose deadlines then count, too.
        self.next_deadline_ns = u64::MAX;
        for tag in 0..self.requests.len() {
            let Some(request) = self.requests.get_mut(tag).filter(|request| request.busy) else {
                continue;
            };
            if request.deadline_ns > now_ns {
                next_ns = next_ns.min(request.deadline_ns);
                continue;
            }
            let Ok(number) = u16::try_from(tag) else { continue };
            let last = self.cancel_retries(number);
            let Some(request) = self.requests.get_mut(tag) else { continue };
            let (sent, rest, aborting) =
                (request.commands > 0, request.unsent > 0, request.aborting);
            let abort = sent && !aborting && self.abort_timeout_ns > 0;
            if abort {
                request.aborting = true;
                request.deadline_ns = now_ns.saturating_add(self.abort_timeout_ns);
                next_ns = next_ns.min(request.deadline_ns);
            }
            let tag = number;
            self.unsent.retain(|unsent| *unsent != tag);
            self.stats.timeouts += u64::from(!aborting);
            if abort && rest {
                self.cancel_unsent(tag, CommandError::Aborted);
            } else if !sent {
                let error = last.map_or(CommandError::NotSent, CommandError::Status);
                self.complete(tag, RequestResult::Completed(Err(error)));
            } else if !abort {
                self.quarantine(tag);
                self.complete(tag, RequestResult::TimedOut);
            }
        }
        self.next_deadline_ns = self.next_deadline_ns.min(next_ns);
    }

    /// Processes answers to aborts and sends aborts for overdue requests, as many as the controller
    /// allows at a time (ACL). Never waits: while another thread holds the control lock, the next
    /// poll tries again.
    pub(super) fn abort_overdue(&mut self) {
        if self.aborts == 0 && !self.requests.iter().any(|request| request.busy && request.aborting)
        {
            return;
        }
        let inner = self.inner.clone();
        let Some(mut control) = inner.try_control() else { return };
        // No reset begins under the lock. The identifier of a stale queue may be another queue's.
        if self.is_stale() {
            return;
        }
        let Some(admin) = control.admin.as_mut() else { return };
        if admin.is_usable() {
            admin.poll(&inner.registers);
        }
        let now_ns = self.now_ns;
        let mut expired = false;
        for answer in admin.take_abort_answers(self.serial) {
            let index = self.ids.slot(answer.target.cid);
            let Some(slot) = self.commands.get_mut(usize::from(index)) else { continue };
            if slot.abort != AbortState::Outstanding {
                continue;
            }
            slot.abort = AbortState::Answered;
            self.aborts -= 1;
            if slot.state == CommandState::AwaitingAbort {
                slot.state = CommandState::Free;
                self.free_commands.push(index);
            } else if slot.state == CommandState::InFlight
                && !answer.aborted
                && let Some(request) = self.requests.get_mut(usize::from(slot.tag))
            {
                // It may have completed meanwhile: the next poll reads the ring before it gives the
                // request up.
                (request.deadline_ns, expired) = (now_ns, true);
            }
        }
        for (index, slot) in (0..).zip(&mut self.commands) {
            let Some(request) = self.requests.get_mut(usize::from(slot.tag)) else { continue };
            let sent = slot.state == CommandState::InFlight && slot.abort == AbortState::None;
            if !sent || !request.aborting {
                continue;
            }
            let cid = self.ids.encode(slot.uses, index);
            if admin
                .abort(&inner.registers, AbortTarget { serial: self.serial, queue: self.id, cid })
            {
                slot.abort = AbortState::Outstanding;
                self.aborts += 1;
                self.stats.aborts += 1;
            } else if admin.is_usable() {
                break;
            } else {
                (request.deadline_ns, expired) = (now_ns, true);
            }
        }
        if expired {
            self.next_deadline_ns = now_ns;
        }
    }

    fn quarantine(&mut self, tag: u16) {
        for slot in &mut self.commands {
            if slot.state == CommandState::InFlight && slot.tag == tag {
                slot.state = CommandState::Quarantined;
                self.quarantined += 1;
            }
        }
    }
}
