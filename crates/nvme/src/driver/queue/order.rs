//! The order of conflicting requests, and retries that their owner gives up.
//!
//! A request that conflicts with older ones of its queue is *held*: when the last of them has
//! completed it is *unblocked*, and the next poll sends it, unless it conflicts with a retry of
//! another queue as well. Nothing wakes this queue when that one has ended, so it looks again every
//! millisecond, the shortest delay of a retry.

use super::pair::Queue;
use crate::driver::error::CommandError;
use crate::driver::in_flight::{InFlight, RequestResult};
use crate::driver::overlap::Extent;
use crate::driver::slots::CommandState;
use crate::registers::Registers;
use pinfold_core::dma_pool::ChunkSource;

/// How often a queue looks whether a retry of another queue has ended.
pub(super) const RECHECK_NS: u64 = 1_000_000;

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// Returns whether a new request may be sent. Otherwise it is held, or counts as unblocked.
    pub(super) fn may_send(&mut self, tag: u16, extent: &Extent) -> bool {
        let blockers = self.extents.conflicts(extent);
        if blockers == 0 && !self.inner.shared.retries.conflict(self.retry_key(u64::MAX), extent) {
            return true;
        }
        if blockers == 0 {
            self.add_unblocked(tag);
        } else if let Some(request) = self.requests.get_mut(usize::from(tag)) {
            request.blockers = blockers;
            // It begins when nothing is in its way: the time of others is not its own.
            request.deadline_ns = u64::MAX;
            self.held.push(tag);
        }
        false
    }

    /// Returns this queue, for [`Retries::conflict`](crate::driver::overlap::Retries::conflict)
    /// with those before `age`.
    fn retry_key(&self, age: u64) -> (u64, u64, u64) {
        (self.serial, self.generation, age)
    }

    #[cold]
    fn add_unblocked(&mut self, tag: u16) {
        let now_ns = self.inner.config.clock.now_ns();
        let limit_ns = self.timeout_ns.saturating_add(self.retry_limit_ns);
        if let Some(request) = self.requests.get_mut(usize::from(tag)) {
            request.age = self.inner.shared.retries.next_age();
            request.deadline_ns = now_ns.saturating_add(limit_ns);
            self.next_deadline_ns = self.next_deadline_ns.min(request.deadline_ns);
            self.unblocked.push(tag);
        }
    }

    /// Notes that a request has completed: those that waited for it alone are unblocked.
    pub(super) fn end_order(&mut self, tag: u16) {
        let Some(extent) = self.extents.remove(tag) else { return };
        if self.requests.get(usize::from(tag)).is_some_and(|request| request.retried) {
            self.inner.shared.retries.remove(self.serial, tag);
        }
        if !self.held.is_empty() || !self.unblocked.is_empty() {
            self.unblock(tag, &extent);
        }
    }

    #[cold]
    fn unblock(&mut self, tag: u16, ended: &Extent) {
        self.unblocked.retain(|other| *other != tag);
        // A request that is held completes only by a reset, with all others. Otherwise those that
        // are held are younger: it would have been held behind an older one.
        self.held.retain(|other| *other != tag);
        let mut at = 0;
        while let Some(&held) = self.held.get(at) {
            let waits = self.extents.get(held).is_some_and(|extent| extent.conflicts(ended));
            if let Some(request) = self.requests.get_mut(usize::from(held)).filter(|_| waits) {
                request.blockers = request.blockers.saturating_sub(1);
                if request.blockers == 0 {
                    self.held.remove(at);
                    self.add_unblocked(held);
                    continue;
                }
            }
            at += 1;
        }
    }

    /// Has the unblocked requests sent that conflict with no retry of another queue. After
    /// [`abandon_retries`](Self::abandon_retries) the others fail.
    #[cold]
    pub(super) fn send_unblocked(&mut self) {
        let mut unblocked = std::mem::take(&mut self.unblocked);
        unblocked.retain(|&tag| {
            let waits = self.waits_for_another_queue(tag);
            if waits && self.retries_abandoned {
                self.complete(tag, RequestResult::Completed(Err(CommandError::NotSent)));
            } else if !waits {
                let deadline_ns = self.inner.config.clock.now_ns().saturating_add(self.timeout_ns);
                let extension_ns = self.retry_limit_ns.saturating_add(self.timeout_ns);
                if let Some(request) = self.requests.get_mut(usize::from(tag)) {
                    request.set_deadline(deadline_ns, extension_ns);
                    self.next_deadline_ns = self.next_deadline_ns.min(deadline_ns);
                }
                self.unsent.push_back(tag);
            }
            waits && !self.retries_abandoned
        });
        // Those that such a failure has unblocked.
        unblocked.append(&mut self.unblocked);
        self.unblocked = unblocked;
    }

    /// Returns whether a request conflicts with an older retry of another queue.
    pub(super) fn waits_for_another_queue(&self, tag: u16) -> bool {
        let age = self.requests.get(usize::from(tag)).map_or(0, |request| request.age);
        let key = self.retry_key(age);
        self.extents.get(tag).is_some_and(|extent| self.inner.shared.retries.conflict(key, extent))
    }

    /// Has nothing of a request sent again, for a program that is no longer interested in it. If it
    /// waits for a retry it fails with the status of its last attempt, which the next poll returns;
    /// otherwise it completes with the next result of each of its commands. One that waits for
    /// older requests is still sent when these have completed. A request of another queue, or one
    /// that has completed, is not affected.
    pub fn abandon_retries_of<P>(&mut self, request: &InFlight<P>) {
        let id = request.id();
        let tag = id.tag;
        let Some(slot) = self.requests.get_mut(usize::from(tag)) else { return };
        if (id.queue, id.sequence) != (self.serial, slot.sequence) {
            return;
        }
        slot.given_up = true;
        let waiting = |index: &&u16| {
            self.commands.get(usize::from(**index)).is_some_and(|command| {
                command.tag == tag && command.state == CommandState::AwaitingRetry
            })
        };
        let retrying = self.retrying.iter().find(waiting).copied();
        if let Some(command) = retrying.and_then(|index| self.commands.get(usize::from(index))) {
            let status = command.retry.status;
            self.fail_request(tag, CommandError::Status(status));
            self.complete_if_idle(tag);
        }
    }
}
