//! Requests that do not complete in time: their commands are aborted, and what that does not end is quarantined.

use super::Queue;
use crate::driver::error::CommandError;
use crate::driver::request::{CommandState, RequestResult};
use crate::registers::Registers;
use pinfold_core::dma_pool::ChunkSource;

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// Gives up the requests whose time is over: first they are aborted, then quarantined. "Timed out" is not
    /// "completed": what the controller may still reach stays where it is.
    pub(super) fn give_up_overdue(&mut self) {
        let now_ns = self.now_ns;
        let mut next_ns = u64::MAX;
        for tag in 0..self.requests.len() {
            let Some(request) = self.requests.get_mut(tag).filter(|request| request.busy) else { continue };
            let aborting = request.aborting;
            if request.deadline_ns > now_ns {
                next_ns = next_ns.min(request.deadline_ns);
                continue;
            }
            let sent = request.outstanding > 0;
            let rest = request.left > 0;
            let abort = sent && !aborting && self.abort_timeout_ns > 0;
            if abort {
                request.aborting = true;
                request.deadline_ns = now_ns.saturating_add(self.abort_timeout_ns);
                next_ns = next_ns.min(request.deadline_ns);
            }
            let Ok(tag) = u16::try_from(tag) else { continue };
            self.unsent.retain(|unsent| *unsent != tag);
            self.stats.timeouts += u64::from(!aborting);
            if abort && rest {
                self.refuse_rest(tag, CommandError::Aborted);
            } else if !sent {
                self.finish(tag, RequestResult::Completed(Err(CommandError::NotSent)));
            } else if !abort {
                self.quarantine(tag);
                self.finish(tag, RequestResult::TimedOut);
            }
        }
        self.next_deadline_ns = next_ns;
    }

    /// Sends aborts for requests whose time is over, as many as the controller takes at a time (ACL), and looks at the
    /// answers. It never waits: where another thread has the admin queue, the next poll tries again.
    pub(super) fn abort_overdue(&mut self) {
        if !self.requests.iter().any(|request| request.busy && request.aborting) {
            return;
        }
        let core = self.core.clone();
        let Some(mut control) = core.try_control() else { return };
        // Under the lock no reset begins. A stale queue's identifier may be another queue's.
        if self.is_stale() {
            return;
        }
        let Some(admin) = control.admin.as_mut() else { return };
        if admin.is_usable() {
            admin.reap(&core.registers, core.cap);
        }
        let now_ns = self.now_ns;
        let mut over = false;
        for cid in admin.take_refused(self.serial) {
            let place = self.identifiers.place(cid);
            let slot = self.commands.get(usize::from(place));
            let slot = slot.filter(|slot| {
                slot.state == CommandState::Busy && self.identifiers.encode(slot.generation, place) == cid
            });
            let request = slot.and_then(|slot| self.requests.get_mut(usize::from(slot.request)));
            if let Some(request) = request {
                // Its completion may have come meanwhile: the next poll looks before it gives it up.
                (request.deadline_ns, over) = (now_ns, true);
            }
        }
        for (place, slot) in (0..).zip(&mut self.commands) {
            let busy = slot.state == CommandState::Busy && !slot.aborted;
            let Some(request) = self.requests.get_mut(usize::from(slot.request)) else { continue };
            if !busy || !request.aborting {
                continue;
            }
            let cid = self.identifiers.encode(slot.generation, place);
            if admin.abort(&core.registers, core.cap, (self.id, cid), Some(self.serial)) {
                slot.aborted = true;
                self.stats.aborts += 1;
            } else if admin.is_usable() {
                break;
            } else {
                (request.deadline_ns, over) = (now_ns, true);
            }
        }
        if over {
            self.next_deadline_ns = now_ns;
        }
    }

    fn quarantine(&mut self, tag: u16) {
        for slot in &mut self.commands {
            if slot.state == CommandState::Busy && slot.request == tag {
                slot.state = CommandState::Quarantined;
                self.quarantined += 1;
            }
        }
    }
}
