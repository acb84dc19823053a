//! From the controller's completions to reports: each request's memory is revoked, and it is held
//! until the flush has completed.

use super::transfer::{Attempt, Data, Ended, Scattered};
use super::{Held, PF_LOST, Pending, Protection, pf_completion, pf_queue_t};
use crate::errno::Errno;
use crate::trace::{Site, hook, pf_event_kind};
use libc::{ECANCELED, EINVAL, EIO, ENODEV, ESTALE, ETIMEDOUT};
use pinfold::core::domain::{NotQuiesced, Unrevoked};
use pinfold::core::invalidate::{Ticket, WaitLimit};
use pinfold_nvme::driver::{CommandError, Completion};
use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// The longest sleep. A device that is gone raises no interrupt.
const SLEEP: Duration = Duration::from_millis(50);
/// A wait without an interrupt spins for so many polls, then yields to other threads for so many,
/// and then pauses between two polls.
const SPINS: u32 = 64;
const YIELDS: u32 = 10_000;
/// One with an interrupt yields so often before it sleeps: a sleep and its wake-up take longer, and
/// what completes meanwhile is found together.
const YIELDS_BEFORE_SLEEP: u32 = 4;
const PAUSE: Duration = Duration::from_micros(50);

impl pf_queue_t {
    /// Takes the controller's completions, revokes their memory, and collects what can be reported.
    pub(super) fn step(&mut self, site: Site) {
        // Of what this call finds.
        let mut since = None;
        loop {
            match self.queue.poll() {
                Ok(Some(completion)) => self.take(completion, &mut since, site),
                Ok(None) => break,
                // Once it has been seen disabled, all that it has completes with an error, and it
                // reaches no memory.
                Err(error) => {
                    self.failed = Some(error.to_string());
                    if self.lease.device.controller.disable().is_err() {
                        self.give_up();
                        break;
                    }
                    // Disabling may take a minute: flushes that begin now get all of their time.
                    since = None;
                }
            }
        }
        self.revoke_batch();
        self.release();
    }

    fn take(&mut self, completion: Completion, since: &mut Option<Instant>, site: Site) {
        let tag = completion.tag();
        let Some(place) = self.in_flight.get_mut(tag) else { return };
        let Some(Pending { attempt, user_data }) = place.take() else { return };
        match attempt.finish(completion) {
            Ended::Foreign(attempt) => *place = Some(Pending { attempt, user_data }),
            Ended::Lost(data) => {
                let status = if data.is_some() { PF_LOST } else { 0 };
                if let Some(data) = data {
                    self.lease.device.keep_lost(data);
                }
                self.ready.push_back(pf_completion { user_data, result: -ETIMEDOUT, status });
            }
            Ended::Completed(data, result) => {
                let (result, status) = outcome(result);
                let completion = pf_completion { user_data, result, status };
                if let (Some(tracer), Some(data)) = (hook(), &data) {
                    data.report(tracer, pf_event_kind::PF_EVENT_REVOKE, site);
                }
                match data.and_then(Data::into_unrevoked) {
                    None => self.ready.push_back(completion),
                    Some(mapped) => self.revoke(mapped, completion, since),
                }
            }
        }
    }

    /// Begins the end of a mapping. `since` is when the first was begun by this call, which reads the
    /// clock once.
    fn revoke(
        &mut self,
        mapped: Unrevoked<Scattered>,
        completion: pf_completion,
        since: &mut Option<Instant>,
    ) {
        match &mut self.protection {
            // Nothing is mapped for a request.
            Protection::Static => self.ready.push_back(completion),
            Protection::Revoke(domain) => {
                let revoked = domain.revoke(mapped);
                let since = *since.get_or_insert_with(Instant::now);
                self.held.push_back(Held { revoked, completion, since });
            }
            Protection::Strict(_, found) | Protection::Batch(_, found) => {
                found.mapped.push(mapped);
                found.completions.push(completion);
            }
        }
    }

    /// Revokes what this call has found, with one flush, for which a strict queue waits.
    fn revoke_batch(&mut self) {
        let (domain, found, waits) = match &mut self.protection {
            Protection::Strict(domain, found) => (domain, found, true),
            Protection::Batch(domain, found) => (domain, found, false),
            Protection::Static | Protection::Revoke(_) => return,
        };
        if found.mapped.is_empty() {
            return;
        }
        domain.revoke_many(found.mapped.drain(..), &mut found.revoked);
        let since = Instant::now();
        for (revoked, completion) in found.revoked.drain(..).zip(found.completions.drain(..)) {
            if waits {
                // What does not complete in time stays with the domain.
                let ended = domain.wait(revoked).map(drop);
                let ended = ended.map_err(|failed| failed.error.errno());
                self.ready.push_back(completion.after(ended));
            } else {
                self.held.push_back(Held { revoked, completion, since });
            }
        }
    }

    /// Collects what no device can reach any more. Flushes complete in the order of their requests.
    fn release(&mut self) {
        let Some(domain) = self.protection.domain() else { return };
        // What could not be revoked has no flush to wait for.
        let ended =
            |held: &mut Held| held.revoked.is_quiesced() || held.revoked.ticket() == Ticket::NEVER;
        while let Some(Held { revoked, completion, .. }) = self.held.pop_front_if(ended) {
            let ended = domain.wait(revoked).map(drop);
            self.ready.push_back(completion.after(ended.map_err(|failed| failed.error.errno())));
        }
        if self.ready.is_empty() && !self.held.is_empty() {
            self.wait_for_flush(Duration::ZERO);
        }
    }

    /// Waits for the first flush, and gives up what has waited for too long: the domain keeps that
    /// memory until its flush has completed.
    fn wait_for_flush(&mut self, limit: Duration) {
        let Some(domain) = self.protection.domain() else { return };
        let late = |held: &Held| held.since.elapsed() >= self.flush_limit;
        if limit.is_zero() && !self.held.front().is_some_and(late) {
            return;
        }
        let Some(Held { revoked, completion, since }) = self.held.pop_front() else { return };
        let ended = match domain.wait_for(revoked, WaitLimit::within(limit)) {
            Ok(memory) => {
                drop(memory);
                Ok(())
            }
            Err(NotQuiesced { revoked: Some(revoked), .. })
                if since.elapsed() < self.flush_limit =>
            {
                self.held.push_front(Held { revoked, completion, since });
                return;
            }
            Err(failed) => Err(failed.error.errno()),
        };
        self.ready.push_back(completion.after(ended));
    }

    /// Reports all that the controller has as lost: it cannot be disabled.
    #[cold]
    fn give_up(&mut self) {
        for Pending { attempt, user_data } in self.in_flight.iter_mut().filter_map(Option::take) {
            let status = if matches!(attempt, Attempt::Data(_)) { PF_LOST } else { 0 };
            // Its memory is quarantined for the life of the process.
            drop(attempt);
            self.ready.push_back(pf_completion { user_data, result: -ENODEV, status });
        }
    }

    /// Waits until something can be reported, for at most `limit`; returns how much.
    pub(super) fn wait(&mut self, limit: Duration, site: Site) -> usize {
        let (since, mut polls) = (Instant::now(), 0u32);
        loop {
            self.step(site);
            if !self.ready.is_empty() || self.outstanding == 0 {
                return self.ready.len();
            }
            let Some(left) = limit.checked_sub(since.elapsed()).filter(|left| !left.is_zero())
            else {
                return 0;
            };
            polls = polls.saturating_add(1);
            self.pause(polls, left.min(SLEEP));
        }
    }

    /// Pauses between two polls of a wait; `polls` counts from 1. No interrupt reports the end of a
    /// flush.
    fn pause(&mut self, polls: u32, limit: Duration) {
        let flushing = !self.held.is_empty();
        if self.queue.has_interrupt() && !flushing && polls > YIELDS_BEFORE_SLEEP {
            self.queue.sleep(limit);
        } else if flushing && polls > SPINS && self.queue.in_flight() == 0 {
            self.wait_for_flush(limit);
        } else if polls <= SPINS && (flushing || !self.queue.has_interrupt()) {
            std::hint::spin_loop();
        } else if polls <= SPINS + YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(PAUSE.min(limit));
        }
    }

    /// Has the descriptor become readable with the next completion.
    pub(super) fn arm(&mut self) {
        let wait = self.queue.arm_interrupt();
        // No interrupt reports the end of a flush, which takes microseconds.
        if self.outstanding > 0 && (wait.is_zero() || !self.held.is_empty()) {
            self.signal();
        }
    }

    /// Has the descriptor be readable now.
    pub(super) fn signal(&self) {
        let Some(fd) = self.queue.interrupt_fd() else { return };
        let one = 1u64.to_ne_bytes();
        // SAFETY: 8 bytes that are initialized. A full counter is readable already.
        let _ = unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

impl pf_completion {
    /// Returns the report of a request whose mapping has ended so.
    fn after(self, ended: Result<(), c_int>) -> Self {
        match ended {
            Ok(()) => self,
            Err(errno) => {
                let result = if self.result == 0 { -errno } else { self.result };
                Self { result, status: self.status | PF_LOST, ..self }
            }
        }
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
