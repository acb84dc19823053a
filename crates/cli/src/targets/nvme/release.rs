//! From a completed command to its buffer: revoked, held until the flush, returned.

use super::command::Mapped;
use super::{NvmeTarget, WAIT_LIMIT};
use crate::args::Protect;
use crate::targets::error::TargetError;
use crate::targets::target::{Completion, Io};
use pinfold_core::dma_pool::ChunkSource;
use pinfold_core::domain::{BackendError, Domain, NotQuiesced, Pinned, Revoked, Unrevoked};
use pinfold_core::invalidate::{Ticket, WaitLimit};
use pinfold_nvme::Registers;
use std::time::{Duration, Instant};

/// A request whose command has completed, until its mapping is revoked.
pub(super) struct Finished<'d, B: Pinned> {
    pub(super) io: Io,
    pub(super) buffer: Mapped<'d, B>,
    pub(super) result: Result<usize, TargetError>,
}

/// A request whose mapping has been revoked, until the flush has completed.
pub(super) struct Held<'d, B: Pinned> {
    pub(super) io: Io,
    pub(super) since: Instant,
    pub(super) revoked: Revoked<B, &'d Domain>,
    pub(super) result: Result<usize, TargetError>,
}

impl<'d, B: Pinned, R: Registers, S: ChunkSource + Clone> NvmeTarget<'d, B, R, S> {
    /// Revokes the device's access to the buffers of all completed commands, with one flush for all
    /// (`batch`) or for each. `strict` waits for each flush before this job does anything else, for
    /// at most 50 ms altogether: buffers whose flush takes longer are held, as with `revoke`.
    pub(super) fn revoke(&mut self, completed: &mut Vec<Completion<B>>) {
        let mut commands = std::mem::take(&mut self.completed);
        if self.protect == Protect::Batch {
            self.revoke_with_one_flush(commands.drain(..), completed);
        } else {
            let until = Instant::now() + WAIT_LIMIT;
            for command in commands.drain(..) {
                self.revoke_with_one_flush([command], completed);
                let left = until.saturating_duration_since(Instant::now());
                if self.protect == Protect::Strict && !left.is_zero() {
                    self.quiesce(left, completed);
                }
            }
        }
        self.completed = commands;
    }

    /// Revokes the access to the buffers of `commands`, and holds them until the flush completes.
    fn revoke_with_one_flush(
        &mut self,
        commands: impl IntoIterator<Item = Finished<'d, B>>,
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
        let ended = |revoked: &Revoked<B, &Domain>| {
            revoked.is_quiesced() || revoked.ticket() == Ticket::NEVER
        };
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
