//! The path from the controller's completions to reports: the loop revokes each request's memory,
//! and reports it when its flush has completed.

use super::transfer::{self, Ended as Finished, Lost};
use super::{PF_LATE, PF_LOST, Pending, pf_completion, pf_queue_t};
use crate::errno::Errno;
use crate::trace::{Site, hook, pf_event_kind};
use libc::{ECANCELED, EINVAL, EIO, ENODEV, ESTALE, ETIMEDOUT};
use pinfold::requests::{End, Ended, Token};
use pinfold_nvme::driver::{CommandError, Completion};
use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// The longest sleep. A device that is gone raises no interrupt.
const SLEEP: Duration = Duration::from_millis(50);

impl pf_queue_t {
    /// Takes the controller's completions, revokes their memory, and collects what can be reported.
    pub(super) fn step(&mut self, site: Site) {
        loop {
            match self.queue.poll() {
                Ok(Some(completion)) => self.take(completion, site),
                Ok(None) => break,
                // Once it has been seen disabled, all that it has completes with an error, and it
                // reaches no memory.
                Err(error) => {
                    self.failed = Some(error.to_string());
                    if self.lease.device.controller.disable().is_err() {
                        self.give_up();
                        break;
                    }
                }
            }
        }
        self.requests.poll(&mut self.ended);
        self.collect();
    }

    fn take(&mut self, completion: Completion, site: Site) {
        let (tag, value) = (completion.tag(), completion.value());
        let Some(place) = self.in_flight.get_mut(tag) else { return };
        let Some(Pending { token, attempt }) = place.take() else { return };
        match attempt.finish(completion) {
            Finished::Foreign(attempt) => *place = Some(Pending { token, attempt }),
            Finished::Lost(lost) => {
                self.lose(token, -ETIMEDOUT, lost.as_ref().map(Lost::is_lent));
                lost.into_iter().for_each(|lost| self.lease.device.keep_lost(lost));
            }
            Finished::Completed(mapped, result) => {
                if let Some(Some(report)) = self.reports.get_mut(token.slot()) {
                    (report.result, report.status) = outcome(result);
                    report.value = value;
                }
                if let (Some(tracer), Some(mapped)) = (hook(), &mapped) {
                    transfer::report(mapped, tracer, pf_event_kind::PF_EVENT_REVOKE, site);
                }
                // The token is of this loop, and was at the controller until now.
                match mapped {
                    Some(mapped) => drop(self.requests.completed_lent(mapped)),
                    None => drop(self.requests.completed(token)),
                }
            }
        }
    }

    /// Reports a request that the controller may still have, with the memory of one that has any:
    /// it `is_lent` by the loop, or stays mapped. Where the loop has lent nothing, its slot is free
    /// with the next poll.
    fn lose(&mut self, token: Token, result: i32, is_lent: Option<bool>) {
        // It was at the controller until now.
        let _ = match is_lent {
            Some(true) => self.requests.lost(token),
            _ => self.requests.completed(token),
        };
        let status = if is_lent.is_some() { PF_LOST } else { 0 };
        if let Some(report) = self.reports.get_mut(token.slot()).and_then(Option::take) {
            self.ready.push_back(pf_completion { result, status, ..report });
        }
    }

    /// Collects requests that the loop has ended. The memory of a request whose flush is late is
    /// the program's when the loop returns it, without another report.
    fn collect(&mut self) {
        for Ended { token, end, .. } in self.ended.drain(..) {
            let Some(report) = self.reports.get_mut(token.slot()).and_then(Option::take) else {
                continue;
            };
            self.ready.push_back(match end {
                End::Quiesced => report,
                End::Late(error) => report.after(error.errno(), PF_LOST | PF_LATE),
                End::Lost(error) => report.after(error.errno(), PF_LOST),
            });
        }
    }

    /// Reports all that the controller has as lost: it cannot be disabled.
    #[cold]
    fn give_up(&mut self) {
        let mut in_flight = std::mem::take(&mut self.in_flight);
        for Pending { token, attempt } in in_flight.iter_mut().filter_map(Option::take) {
            let is_lent = attempt.is_lent();
            // Its memory is quarantined for the life of the process.
            drop(attempt);
            self.lose(token, -ENODEV, is_lent);
        }
        self.in_flight = in_flight;
    }

    /// Waits until something can be reported, for at most `limit`; returns how much.
    pub(super) fn wait(&mut self, limit: Duration, site: Site) -> usize {
        let (since, mut polls) = (Instant::now(), 0u32);
        loop {
            self.step(site);
            if !self.ready.is_empty() || (self.outstanding == 0 && !self.is_blocked()) {
                return self.ready.len();
            }
            let Some(left) = limit.checked_sub(since.elapsed()).filter(|left| !left.is_zero())
            else {
                return 0;
            };
            polls = polls.saturating_add(1);
            let limit = left.min(SLEEP);
            self.queue.pause(polls, limit, &mut self.requests, &mut self.ended);
        }
    }

    /// Whether late requests have all slots, so that nothing can be submitted before one has ended.
    fn is_blocked(&self) -> bool {
        self.requests.late() == self.requests.slots()
    }

    /// Arms the descriptor: it becomes readable with the next completion, or the end of a flush.
    pub(super) fn arm(&mut self) {
        let wait = self.queue.arm_interrupt();
        // The timer exists since the descriptor does.
        let _ = self.requests.arm();
        if self.outstanding > 0 && wait.is_zero() {
            self.signal();
        }
    }

    /// Makes the descriptor readable.
    pub(super) fn signal(&self) {
        let Some(fd) = self.queue.interrupt_fd() else { return };
        let one = 1u64.to_ne_bytes();
        // SAFETY: 8 bytes that are initialized. A full counter is readable already.
        let _ = unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

impl pf_completion {
    pub(super) const NONE: Self =
        Self { user_data: 0, result: 0, status: 0, value: 0, reserved: 0 };

    /// Returns the report of a request whose mapping has not ended.
    fn after(self, errno: c_int, status: u32) -> Self {
        let result = if self.result == 0 { -errno } else { self.result };
        Self { result, status: self.status | status, ..self }
    }
}

/// Returns `result` and `status` of a request that its controller has completed.
fn outcome(result: Result<(), CommandError>) -> (i32, u32) {
    match result {
        Ok(()) => (0, 0),
        Err(CommandError::Status(status)) => (-EIO, status.bits().into()),
        Err(CommandError::Aborted | CommandError::Reset | CommandError::NotSent) => (-ECANCELED, 0),
        Err(CommandError::NamespaceChanged { .. }) => (-ESTALE, 0),
        Err(CommandError::Layout(_)) => (-EINVAL, 0),
        Err(_) => (-EIO, 0),
    }
}
