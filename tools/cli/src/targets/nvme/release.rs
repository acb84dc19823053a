//! A request from its command to the return of its buffer: mapped for the command, revoked when that
//! has completed, held until the flush, returned.

use super::{NvmeTarget, WAIT_LIMIT};
use crate::args::Protect;
use crate::targets::target::{Completion, Io, TargetError};
use pinfold_core::access::{FromDevice, ToDevice};
use pinfold_core::dma_pool::ChunkSource;
use pinfold_core::domain::{
    BackendError, DomainLocal, Mapping, NotQuiesced, Pinned, Revoked, Unrevoked,
};
use pinfold_core::invalidate::{Ticket, WaitLimit};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{self, CommandError, InFlight, Quarantined, Queue};
use std::time::{Duration, Instant};

/// A buffer that is mapped for its command.
pub(super) enum Mapped<B: Pinned> {
    /// The device writes it.
    Read(Mapping<B, FromDevice>),
    /// The device reads it.
    Write(Mapping<B, ToDevice>),
    /// Not mapped: the command moves no data.
    Not(B),
}

impl<B: Pinned> Mapped<B> {
    /// Ends the mapping and waits for the flush.
    pub(super) fn unmap(self, domain: &mut DomainLocal) -> Result<B, BackendError> {
        match self {
            Self::Read(buffer) => domain.unmap(buffer),
            Self::Write(buffer) => domain.unmap(buffer),
            Self::Not(buffer) => Ok(buffer),
        }
    }
}

/// A request at the controller.
pub(super) struct Command<B: Pinned> {
    /// The record.
    pub(super) io: Io,
    /// The driver's handle.
    pub(super) attempt: Attempt<B>,
}

/// The driver's handle of a request.
pub(super) enum Attempt<B: Pinned> {
    Read(InFlight<Mapping<B, FromDevice>>),
    Write(InFlight<Mapping<B, ToDevice>>),
    WithoutData(InFlight<()>, B),
}

/// The buffer of a command that did not complete. Held, so that its memory is not reused.
pub(super) enum Quarantine<B: Pinned> {
    Read(Quarantined<Mapping<B, FromDevice>>),
    Write(Quarantined<Mapping<B, ToDevice>>),
}

/// The outcome of a request after a completion.
pub(super) enum Outcome<B: Pinned> {
    /// The command has completed.
    Completed(Mapped<B>, Result<(), CommandError>),
    /// It did not complete in time, and its buffer is quarantined, or was not part of it.
    TimedOut(Result<B, Quarantine<B>>),
    /// The completion belongs to another request.
    Foreign(Attempt<B>),
}

impl<B: Pinned> Attempt<B> {
    /// Returns the driver's tag.
    pub(super) fn tag(&self) -> usize {
        match self {
            Self::Read(in_flight) => in_flight.tag(),
            Self::Write(in_flight) => in_flight.tag(),
            Self::WithoutData(in_flight, _) => in_flight.tag(),
        }
    }

    /// Has nothing of it sent again.
    pub(super) fn abandon_retries<R: Registers, S: ChunkSource + Clone>(
        &self,
        queue: &mut Queue<R, S>,
    ) {
        match self {
            Self::Read(in_flight) => queue.abandon_retries_of(in_flight),
            Self::Write(in_flight) => queue.abandon_retries_of(in_flight),
            Self::WithoutData(in_flight, _) => queue.abandon_retries_of(in_flight),
        }
    }

    /// Applies `completion`.
    pub(super) fn finish(self, completion: driver::Completion) -> Outcome<B> {
        match self {
            Self::Read(in_flight) => match in_flight.finish(completion) {
                driver::Outcome::Completed { payload, result } => {
                    Outcome::Completed(Mapped::Read(payload), result)
                }
                driver::Outcome::TimedOut(payload) => {
                    Outcome::TimedOut(Err(Quarantine::Read(payload)))
                }
                driver::Outcome::Foreign(in_flight, _) => Outcome::Foreign(Self::Read(in_flight)),
            },
            Self::Write(in_flight) => match in_flight.finish(completion) {
                driver::Outcome::Completed { payload, result } => {
                    Outcome::Completed(Mapped::Write(payload), result)
                }
                driver::Outcome::TimedOut(payload) => {
                    Outcome::TimedOut(Err(Quarantine::Write(payload)))
                }
                driver::Outcome::Foreign(in_flight, _) => Outcome::Foreign(Self::Write(in_flight)),
            },
            Self::WithoutData(in_flight, buffer) => match in_flight.finish(completion) {
                driver::Outcome::Completed { result, .. } => {
                    Outcome::Completed(Mapped::Not(buffer), result)
                }
                driver::Outcome::TimedOut(_) => Outcome::TimedOut(Ok(buffer)),
                driver::Outcome::Foreign(in_flight, _) => {
                    Outcome::Foreign(Self::WithoutData(in_flight, buffer))
                }
            },
        }
    }
}

/// A request whose command has completed, until its mapping is revoked.
pub(super) struct Finished<B: Pinned> {
    pub(super) io: Io,
    pub(super) buffer: Mapped<B>,
    pub(super) result: Result<usize, TargetError>,
}

/// A request whose mapping has been revoked, until the flush has completed.
pub(super) struct Held<B: Pinned> {
    pub(super) io: Io,
    pub(super) since: Instant,
    pub(super) revoked: Revoked<B>,
    pub(super) result: Result<usize, TargetError>,
}

impl<B: Pinned, R: Registers, S: ChunkSource + Clone> NvmeTarget<B, R, S> {
    /// Revokes the device's access to the buffers of all completed commands, with one flush for
    /// each (`revoke`) or for all. `strict` waits for it before this job does anything else, for at
    /// most 50 ms: buffers whose flush takes longer are held, as with `batch`.
    pub(super) fn revoke(&mut self, completed: &mut Vec<Completion<B>>) {
        let mut commands = std::mem::take(&mut self.completed);
        if self.protect == Protect::Revoke {
            for command in commands.drain(..) {
                self.revoke_with_one_flush([command], completed);
            }
        } else if !commands.is_empty() {
            self.revoke_with_one_flush(commands.drain(..), completed);
            if self.protect == Protect::Strict {
                self.quiesce(WAIT_LIMIT, completed);
            }
        }
        self.completed = commands;
    }

    /// Revokes the access to the buffers of `commands`, and holds them until the flush completes.
    fn revoke_with_one_flush(
        &mut self,
        commands: impl IntoIterator<Item = Finished<B>>,
        completed: &mut Vec<Completion<B>>,
    ) {
        let requests = &mut self.requests_of_flush;
        let mappings = commands.into_iter().filter_map(|Finished { io, buffer, result }| {
            let mapping = match buffer {
                Mapped::Read(buffer) => Unrevoked::from(buffer),
                Mapped::Write(buffer) => Unrevoked::from(buffer),
                Mapped::Not(buffer) => {
                    completed.push(Completion { io, buffer: Some(buffer), result });
                    return None;
                }
            };
            requests.push((io, result));
            Some(mapping)
        });
        self.domain.revoke_many(mappings, &mut self.revoked);
        debug_assert_eq!(self.revoked.len(), requests.len());
        let (held, since) = (self.revoked.drain(..).zip(requests.drain(..)), Instant::now());
        self.held.extend(held.map(|(revoked, (io, result))| Held { io, since, revoked, result }));
    }

    /// Returns the buffers whose flush has completed. Flushes complete in the order of their
    /// requests, so one look is enough where the first has not.
    pub(super) fn release(&mut self, completed: &mut Vec<Completion<B>>) {
        // What could not be revoked has no flush to wait for.
        let ended =
            |revoked: &Revoked<B>| revoked.is_quiesced() || revoked.ticket() == Ticket::NEVER;
        while let Some(held) = self.held.pop_front_if(|held| ended(&held.revoked)) {
            let Held { io, revoked, result, .. } = held;
            let buffer = self.domain.wait(revoked).map_err(Into::into);
            completed.push(returned(&self.info.name, io, buffer, result));
        }
    }

    /// Waits up to `limit` for the flushes of the buffers held, and gives up those that are held for
    /// too long: the domain keeps such a buffer until its flush has completed.
    pub(super) fn quiesce(&mut self, limit: Duration, completed: &mut Vec<Completion<B>>) {
        let (revoked, requests): (Vec<_>, Vec<_>) = self
            .held
            .drain(..)
            .map(|Held { io, since, revoked, result }| (revoked, (io, since, result)))
            .unzip();
        let outcomes = self.domain.wait_many_for(revoked, WaitLimit::within(limit));
        for (outcome, (io, since, result)) in outcomes.zip(requests) {
            match outcome {
                Err(NotQuiesced { revoked: Some(revoked), .. })
                    if since.elapsed() < self.flush_limit =>
                {
                    self.held.push_back(Held { io, since, revoked, result });
                }
                outcome => {
                    let buffer = outcome.map_err(Into::into);
                    completed.push(returned(&self.info.name, io, buffer, result));
                }
            }
        }
    }
}

/// The completion of a request whose mapping has ended; an error of the domain means that its
/// buffer is quarantined.
fn returned<B>(
    name: &str,
    io: Io,
    buffer: Result<B, BackendError>,
    result: Result<usize, TargetError>,
) -> Completion<B> {
    match buffer {
        Ok(buffer) => Completion { io, buffer: Some(buffer), result },
        Err(error) => {
            let error = TargetError::Domain { target: name.to_owned(), error };
            Completion { io, buffer: None, result: result.and(Err(error)) }
        }
    }
}
