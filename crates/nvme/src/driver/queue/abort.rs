//! Requests that do not complete in time: their commands are aborted, and what that does not end is
//! quarantined.

use super::pair::Queue;
use crate::driver::admin_queue::AbortTarget;
use crate::driver::error::CommandError;
use crate::driver::in_flight::RequestResult;
use crate::driver::slots::{AbortState, CommandState};
use crate::registers::Registers;
use pinfold_core::dma_pool::ChunkSource;

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// Gives up overdue requests: aborts their commands first, then quarantines them. A timeout is
    /// not a completion: what the controller may still access is not released.
    pub(super) fn expire_overdue(&mut self) {
        let now_ns = self.now_ns;
        let mut next_ns = u64::MAX;
        for tag in 0..self.requests.len() {
            let Some(request) = self.requests.get_mut(tag).filter(|request| request.busy) else {
                continue;
            };
            if request.deadline_ns > now_ns {
                next_ns = next_ns.min(request.deadline_ns);
                continue;
            }
            let Ok(number) = u16::try_from(tag) else { continue };
            self.cancel_retries(number);
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
                self.complete(tag, RequestResult::Completed(Err(CommandError::NotSent)));
            } else if !abort {
                self.quarantine(tag);
                self.complete(tag, RequestResult::TimedOut);
            }
        }
        self.next_deadline_ns = next_ns;
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
