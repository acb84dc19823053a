//! From completions to requests.

use super::Queue;
use crate::driver::admin::STATUS_EVERY_NS;
use crate::driver::error::{CommandError, PollError};
use crate::driver::request::{CommandState, Completion, RequestId, RequestResult};
use crate::registers::Registers;
use crate::spec::{Cqe, Csts, Doorbell, Status, offset};
use pinfold_core::dma_pool::ChunkSource;

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// The next request that is over or has been given up, if there is one. It never waits and never allocates.
    ///
    /// After [`Controller::reset`](crate::driver::Controller::reset) it hands out everything that was in flight.
    ///
    /// # Errors
    /// [`PollError`] where the controller failed or is gone; what is in flight stays so until it is reset.
    pub fn poll(&mut self) -> Result<Option<Completion>, PollError> {
        if let Some(completion) = self.hand_out() {
            return Ok(Some(completion));
        }
        if self.is_stale() {
            self.end_all();
            return Ok(self.hand_out());
        }
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        self.ring_doorbell();
        // A controller that writes rubbish without end does not keep the caller here.
        for _ in 0..self.cq.entries() {
            if !self.ready.is_empty() {
                break;
            }
            let Some(cqe) = self.cq.next() else { break };
            self.accept(&cqe);
        }
        if !self.unsent.is_empty() {
            self.send_more();
            self.ring_doorbell();
        }
        if self.ready.is_empty() {
            self.idle()?;
        }
        Ok(self.hand_out())
    }

    fn hand_out(&mut self) -> Option<Completion> {
        let completion = self.ready.pop_front()?;
        // Only now, so that `ready` never holds more than the queue is deep.
        self.free_requests.push(completion.id.tag);
        Some(completion)
    }

    pub(super) fn ring_head(&mut self, head: u32) {
        self.core.ring(self.id, Doorbell::CompletionHead, head);
        self.stats.doorbells += 1;
    }

    /// Takes what the controller says, as far as it can be true.
    fn accept(&mut self, cqe: &Cqe) {
        if u32::from(cqe.sq_head.get()) >= self.sq.entries() {
            self.stats.bad_heads += 1;
        }
        let cid = cqe.cid.get();
        let place = self.identifiers.place(cid);
        let slot = self.commands.get_mut(usize::from(place));
        let Some(slot) = slot.filter(|slot| {
            let expected = self.identifiers.encode(slot.generation, place);
            cqe.sq_id.get() == self.id && slot.state != CommandState::Free && expected == cid
        }) else {
            self.stats.spurious_completions += 1;
            return;
        };
        let late = slot.state == CommandState::Quarantined;
        let tag = slot.request;
        self.free_command(place);
        if late {
            self.quarantined -= 1;
            self.stats.late_completions += 1;
            return;
        }
        self.stats.completions += 1;
        let status = cqe.status();
        if !status.is_success() {
            self.stats.errors += 1;
            let aborting = self.requests.get(usize::from(tag)).is_some_and(|request| request.aborting);
            let error = match status.code() {
                Status::ABORT_REQUESTED if aborting => CommandError::Aborted,
                _ => CommandError::Status(status),
            };
            self.refuse_rest(tag, error);
            self.unsent.retain(|unsent| *unsent != tag);
        }
        if let Some(request) = self.requests.get_mut(usize::from(tag)) {
            request.outstanding = request.outstanding.saturating_sub(1);
        }
        self.finish_if_over(tag);
    }

    /// The controller is done with a command: its lists go back, its place is free.
    fn free_command(&mut self, place: u16) {
        let Some(slot) = self.commands.get_mut(usize::from(place)) else { return };
        slot.state = CommandState::Free;
        if let Some(prps) = slot.prps.take()
            && let Err(error) = prps.release(&self.core.lists)
        {
            tracing::error!(%error, "a PRP list page was not taken back");
        }
        if let Some(page) = slot.page.take() {
            self.core.give_page(page);
        }
        self.free_commands.push(place);
    }

    pub(super) fn finish_if_over(&mut self, tag: u16) {
        let Some(request) = self.requests.get_mut(usize::from(tag)) else { return };
        if request.busy && request.left == 0 && request.outstanding == 0 {
            let result = request.error.take().map_or(Ok(()), Err);
            self.stats.aborted += u64::from(result == Err(CommandError::Aborted));
            self.finish(tag, RequestResult::Completed(result));
        }
    }

    pub(super) fn finish(&mut self, tag: u16, outcome: RequestResult) {
        let queue = self.serial;
        if let Some(request) = self.requests.get_mut(usize::from(tag)) {
            request.busy = false;
            let id = RequestId { queue, tag, sequence: request.sequence };
            self.ready.push_back(Completion { id, outcome });
        }
    }

    /// Nothing came: looks whether the controller still works.
    #[cold]
    fn idle(&mut self) -> Result<(), PollError> {
        if self.in_flight() == 0 {
            return Ok(());
        }
        self.now_ns = self.core.config.clock.now_ns();
        let overdue = self.now_ns >= self.next_deadline_ns;
        if overdue || self.now_ns.saturating_sub(self.last_status_ns) >= STATUS_EVERY_NS {
            self.last_status_ns = self.now_ns;
            self.check_status()?;
            self.core.look();
        }
        if overdue {
            self.give_up_overdue();
        }
        self.abort_overdue();
        Ok(())
    }

    fn check_status(&mut self) -> Result<(), PollError> {
        // Looked at before and after: a reset that began and ended in between has made this queue stale.
        let changing = self.core.life.is_changing();
        let csts = self.core.registers.read32(offset::CSTS);
        let ours = changing || self.core.life.is_changing() || self.is_stale();
        let failed = match csts {
            Csts::GONE => PollError::Gone,
            csts if Csts::from_bits_retain(csts).contains(Csts::FATAL) => PollError::Fatal,
            _ if self.core.registers.is_removal_requested() => PollError::RemovalRequested,
            csts if !ours && !Csts::from_bits_retain(csts).contains(Csts::READY) => PollError::Stopped,
            _ => return Ok(()),
        };
        // A reset that begins now clears it; the queue is then stale and its requests end that way.
        self.failed = Some(failed);
        Err(failed)
    }

    /// The controller was reset: nothing of this queue is under way any more.
    fn end_all(&mut self) {
        for place in 0..self.commands.len() {
            let busy = self.commands.get(place).is_some_and(|slot| slot.state != CommandState::Free);
            if let Some(place) = u16::try_from(place).ok().filter(|_| busy) {
                self.free_command(place);
            }
        }
        self.quarantined = 0;
        self.unsent.clear();
        for tag in 0..self.requests.len() {
            let busy = self.requests.get(tag).is_some_and(|request| request.busy);
            if let Some(tag) = u16::try_from(tag).ok().filter(|_| busy) {
                self.finish(tag, RequestResult::Completed(Err(CommandError::Reset)));
            }
        }
    }
}
