//! Commands whose status permits a retry (DNR clear) are sent again, after the delay that the controller asks for.
//!
//! The delay is CRDT1 to CRDT3 of the identify data, as the status selects by CRD (Base 3.3.3.2.1); without one, a back-off
//! that doubles. A waiting command keeps its slot and its list pages, and a poll sends it when it is due: nothing sleeps.

use super::pair::Queue;
use crate::driver::error::CommandError;
use crate::driver::slots::{AbortState, CommandState, RetryState};
use crate::registers::Registers;
use crate::spec::{ControllerData, Status};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::little_endian::U16;

/// The first delay where the controller asks for none; each further one is twice as long.
const FIRST_DELAY_NS: u64 = 1_000_000;
const MAX_DELAY_NS: u64 = 1_000_000_000;
/// The number of retries after a media error: a bad block is rarely readable later.
const MEDIA_RETRIES: u32 = 4;

/// CRDT1 to CRDT3 of a controller, in nanoseconds; 0 means that it reports none.
#[derive(Clone, Copy, Default, Debug)]
pub(in crate::driver) struct RetryDelays([u64; 3]);

impl RetryDelays {
    pub(in crate::driver) fn new(data: &ControllerData) -> Self {
        Self(data.retry_delays.map(|units| u64::from(units.get()) * ControllerData::RETRY_DELAY_UNIT_NS))
    }

    /// Whether the controller reports any delay.
    pub(in crate::driver) fn any(self) -> bool {
        self.0.iter().any(|ns| *ns > 0)
    }

    /// Returns how long to wait after `status`, when the command has been retried `attempts` times and `left_ns` are left; `None`
    /// if that is too short. A back-off ends with a last attempt at the limit.
    pub(in crate::driver) fn delay_ns(self, status: Status, attempts: u32, left_ns: u64) -> Option<u64> {
        let reported = usize::from(status.retry_delay()).checked_sub(1).and_then(|index| self.0.get(index));
        match reported {
            Some(&ns @ 1..) => (ns <= left_ns).then_some(ns),
            _ if left_ns == 0 => None,
            _ => Some((FIRST_DELAY_NS << attempts.min(16)).min(MAX_DELAY_NS).min(left_ns)),
        }
    }
}

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// Schedules a completed command to be sent again, if its status and the time limit permit it; returns whether it did.
    #[cold]
    pub(super) fn schedule_retry(&mut self, index: u16, status: Status) -> bool {
        let Some(slot) = self.commands.get_mut(usize::from(index)) else { return false };
        let Some(request) = self.requests.get_mut(usize::from(slot.tag)) else { return false };
        let RetryState { attempts, since_ns, .. } = slot.retry;
        let spent = status.is_media_error() && attempts >= MEDIA_RETRIES;
        if !status.may_retry() || spent || request.aborting || request.error.is_some() {
            return false;
        }
        let now_ns = self.inner.config.clock.now_ns();
        let since_ns = if attempts == 0 { now_ns } else { since_ns };
        let left_ns = self.retry_limit_ns.saturating_sub(now_ns.saturating_sub(since_ns));
        let Some(delay_ns) = self.retry_delays.delay_ns(status, attempts, left_ns) else { return false };
        let due_ns = now_ns.saturating_add(delay_ns);
        slot.state = CommandState::AwaitingRetry;
        slot.retry = RetryState { attempts: attempts.saturating_add(1), since_ns, due_ns };
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

    /// Sends a command again, under another identifier: a second completion of the earlier attempt is not taken for its own.
    fn send_again(&mut self, index: u16) {
        let Some(slot) = self.commands.get_mut(usize::from(index)) else { return };
        (slot.state, slot.abort) = (CommandState::InFlight, AbortState::None);
        slot.uses = self.ids.next(slot.uses, index);
        slot.command.cid = U16::new(self.ids.encode(slot.uses, index));
        self.sq.push(&slot.command);
        self.stats.commands += 1;
        self.stats.retries += 1;
        if let Some(request) = self.requests.get_mut(usize::from(slot.tag)) {
            request.deadline_ns = request.deadline_ns.max(self.now_ns.saturating_add(self.timeout_ns));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_is_the_controllers_or_a_back_off() {
        let mut data = ControllerData::zeroed();
        assert!(!RetryDelays::new(&data).any());
        data.retry_delays = [20, 0, 65_535].map(U16::new);
        let delays = RetryDelays::new(&data);
        let status = |crd| Status::NAMESPACE_NOT_READY.with_retry_delay(crd);
        let second = 1_000_000_000;
        assert_eq!(delays.delay_ns(status(1), 9, 2 * second), Some(2 * second));
        assert_eq!(delays.delay_ns(status(1), 0, 2 * second - 1), None);
        assert_eq!(delays.delay_ns(status(3), 0, u64::MAX), Some(6_553_500_000_000));
        // CRD 2 selects a delay that is not reported, and CRD 0 none.
        for crd in [0, 2] {
            let after = |attempts, left_ns| delays.delay_ns(status(crd), attempts, left_ns);
            let long: Vec<_> =
                [0, 1, 2, 9, 10, u32::MAX].map(|n| after(n, u64::MAX).unwrap() / 1_000_000).into();
            assert_eq!(long, [1, 2, 4, 512, 1000, 1000]);
            assert_eq!((after(9, 5), after(9, 0)), (Some(5), None));
        }
    }
}
