//! The order of conflicting requests, and retries that their owner abandons.
//!
//! A request that conflicts with older ones of its queue is *held*: when the last of them has
//! completed it is *unblocked*, and the next poll sends it, unless it conflicts with a retry of
//! another queue as well. Nothing wakes this queue when that retry has ended, so it checks again
//! every millisecond, the shortest delay of a retry.

use super::pair::Queue;
use crate::driver::error::CommandError;
use crate::driver::in_flight::{InFlight, RequestResult};
use crate::driver::overlap::Extent;
use crate::driver::slots::CommandState;
use crate::registers::Registers;
use pinfold_core::dma_pool::ChunkSource;

/// The interval at which a queue checks whether a retry of another queue has ended.
pub(super) const RECHECK_NS: u64 = 1_000_000;

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// Returns whether a new request may be sent. Otherwise it is held, or counts as unblocked.
    pub(super) fn may_send(&mut self, tag: u16, extent: &Extent) -> bool {
        let blockers = self.extents.conflicts(extent);
        if blockers == 0 && !self.inner.shared.retries.conflict(self.retry_key(u64::MAX), extent) {
            return true;
        }
        if blockers == 0 {
            self.add_unblocked(tag, extent);
        } else if let Some(request) = self.requests.get_mut(usize::from(tag)) {
            request.blockers = blockers;
            // It begins when nothing is in its way: the time of others is not its own.
            request.deadline_ns = u64::MAX;
            self.held.push(tag);
            if self.listed > 0 {
                self.list_if_behind(tag, extent);
            }
        }
        false
    }

    /// Makes other queues wait for a request that waits for a retry or for another queue, and for
    /// all that are held behind it: each could be carried out long after requests that they submit
    /// later.
    ///
    /// None of those behind it is older, or two queues would wait for each other.
    #[cold]
    pub(super) fn list(&mut self, tag: u16, extent: &Extent) {
        if self.requests.get(usize::from(tag)).is_none_or(|request| request.listed) {
            return;
        }
        let mut behind = std::mem::take(&mut self.behind);
        let mut age = None;
        for &held in &self.held {
            let Some(other) = self.extents.get(held) else { continue };
            if extent.conflicts(other)
                || behind.iter().any(|behind: &Extent| behind.conflicts(other))
            {
                behind.push(*other);
                let request = self.requests.get(usize::from(held));
                let listed = request.filter(|request| request.listed).map(|request| request.age);
                age = age.into_iter().chain(listed).min();
            }
        }
        behind.clear();
        self.behind = behind;
        self.insert_retry(tag, *extent, age);
        for at in 0..self.held.len() {
            let held = self.held.get(at).and_then(|&held| Some((held, *self.extents.get(held)?)));
            if let Some((held, extent)) = held {
                self.list_if_behind(held, &extent);
            }
        }
    }

    /// Makes other queues wait for a held request if they wait for a request that it is behind. It
    /// is not older than any of these.
    #[cold]
    fn list_if_behind(&mut self, tag: u16, extent: &Extent) {
        if self.requests.get(usize::from(tag)).is_none_or(|request| request.listed) {
            return;
        }
        // Requests that are held after it were submitted later.
        let place = self.held.iter().position(|held| *held == tag).unwrap_or(0);
        let later = self.held.get(place..).unwrap_or_default();
        let before = self.extents.conflicting(extent).filter(|other| !later.contains(other));
        let listed = before.filter_map(|other| self.requests.get(usize::from(other)));
        let age = listed.filter(|other| other.listed).map(|other| other.age).max();
        if age.is_some() {
            self.insert_retry(tag, *extent, age);
        }
    }

    fn insert_retry(&mut self, tag: u16, extent: Extent, age: Option<u64>) {
        let key = (self.serial, tag, self.generation);
        if let Some(request) = self.requests.get_mut(usize::from(tag)) {
            request.age = self.inner.shared.retries.insert(key, extent, age);
            request.listed = true;
            self.listed += 1;
        }
    }

    /// Returns this queue, for [`Retries::conflict`](crate::driver::overlap::Retries::conflict)
    /// with those before `age`.
    fn retry_key(&self, age: u64) -> (u64, u64, u64) {
        (self.serial, self.generation, age)
    }

    #[cold]
    fn add_unblocked(&mut self, tag: u16, extent: &Extent) {
        let now_ns = self.inner.config.clock.now_ns();
        let limit_ns = self.timeout_ns.saturating_add(self.retry_limit_ns);
        let Some(request) = self.requests.get_mut(usize::from(tag)) else { return };
        if !request.listed {
            request.age = self.inner.shared.retries.next_age();
        }
        request.deadline_ns = now_ns.saturating_add(limit_ns);
        self.next_deadline_ns = self.next_deadline_ns.min(request.deadline_ns);
        self.unblocked.push(tag);
        let age = request.age;
        if self.inner.shared.retries.conflict(self.retry_key(age), extent) {
            self.list(tag, extent);
        }
    }

    /// Records that a request has completed: those that waited for it alone are unblocked.
    pub(super) fn end_order(&mut self, tag: u16) {
        let Some(extent) = self.extents.remove(tag) else { return };
        let request = self.requests.get_mut(usize::from(tag));
        if request.is_some_and(|request| std::mem::take(&mut request.listed)) {
            self.inner.shared.retries.remove(self.serial, tag);
            self.listed -= 1;
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
            let extent = self.extents.get(held).copied().filter(|extent| extent.conflicts(ended));
            if let (Some(extent), Some(request)) =
                (extent, self.requests.get_mut(usize::from(held)))
            {
                request.blockers = request.blockers.saturating_sub(1);
                if request.blockers == 0 {
                    self.held.remove(at);
                    self.add_unblocked(held, &extent);
                    continue;
                }
            }
            at += 1;
        }
    }

    /// Sends the unblocked requests that conflict with no retry of another queue. After
    /// [`abandon_retries`](Self::abandon_retries) the others fail.
    #[cold]
    pub(super) fn send_unblocked(&mut self) {
        let mut unblocked = std::mem::take(&mut self.unblocked);
        unblocked.retain(|&tag| {
            let waits = self.waits_for_another_queue(tag);
            if waits && let Some(extent) = self.extents.get(tag).copied() {
                self.list(tag, &extent);
            }
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
        // Requests that such a failure has unblocked.
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
