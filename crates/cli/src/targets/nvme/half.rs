//! The reads, or the writes, of a namespace: what the device may do with a buffer is a type, so each has its own.

use super::Held;
use crate::targets::{Done, SubmitError, TargetError};
use pinfold_core::access::Direction;
use pinfold_core::domain::{BackendError, Domain, Mapping, Pinned, Revoked};
use pinfold_nvme::driver::{CommandError, Completion, InFlight, Outcome, Quarantined, Rejected};

/// How often a command is tried whose status says that trying again may help.
const TRIES: u32 = 4;

/// What was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) slot: usize,
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) blocks: u32,
    pub(super) tries: u32,
}

type Flight<'d, B, D> = InFlight<Mapping<B, D, &'d Domain>>;
type Submitted<'d, B, D> = Result<Flight<'d, B, D>, Rejected<Mapping<B, D, &'d Domain>>>;

/// A mapping whose command is over.
struct Over<'d, B: Pinned, D: Direction> {
    slot: usize,
    mapped: Mapping<B, D, &'d Domain>,
    result: Result<usize, TargetError>,
}

/// What became of a completion.
pub(super) enum Landed {
    /// It was one of these.
    Taken,
    /// So it was, and its buffer is quarantined.
    Lost(usize, TargetError),
    /// It belongs to the others.
    NotMine(Completion),
}

/// The requests of one direction.
pub(super) struct Half<'d, B: Pinned, D: Direction> {
    /// By the driver's tag.
    flying: Vec<Option<(Asked, Flight<'d, B, D>)>>,
    over: Vec<Over<'d, B, D>>,
    quarantined: Vec<Quarantined<Mapping<B, D, &'d Domain>>>,
    requests: u64,
    retries: u64,
    action: &'static str,
}

impl<'d, B: Pinned, D: Direction> Half<'d, B, D> {
    pub(super) fn new(depth: usize) -> Self {
        use pinfold_core::access::Access;
        let action = if D::ACCESS.contains(Access::WRITE) { "reading" } else { "writing" };
        let flying = std::iter::repeat_with(|| None).take(depth).collect();
        Self {
            flying,
            over: Vec::with_capacity(depth),
            quarantined: Vec::new(),
            requests: 0,
            retries: 0,
            action,
        }
    }

    /// How many requests the driver took.
    pub(super) fn requests(&self) -> u64 {
        self.requests
    }

    /// How often a command was tried again.
    pub(super) fn retries(&self) -> u64 {
        self.retries
    }

    /// Maps `buffer` and hands it to the driver by `go`.
    pub(super) fn submit(
        &mut self,
        domain: &'d Domain,
        name: &str,
        buffer: B,
        direction: D,
        asked: Asked,
        go: impl FnOnce(Mapping<B, D, &'d Domain>) -> Submitted<'d, B, D>,
    ) -> Result<(), SubmitError<B>> {
        let target = || name.to_owned();
        let mapped = domain.map(buffer, direction).map_err(|refused| {
            let error = TargetError::Domain { target: target(), error: refused.error };
            SubmitError { buffer: refused.payload, error }
        })?;
        match go(mapped) {
            Ok(flight) => {
                self.requests += 1;
                self.put(asked, flight);
                Ok(())
            }
            Err(Rejected { payload, reason }) => {
                let error = TargetError::Rejected { target: target(), reason };
                Err(SubmitError { buffer: payload.unmap().ok(), error })
            }
        }
    }

    fn put(&mut self, asked: Asked, flight: Flight<'d, B, D>) {
        let tag = flight.tag();
        if let Some(place) = self.flying.get_mut(tag) {
            *place = Some((asked, flight));
        }
    }

    /// Takes a completion. A command that failed and may be tried again goes back by `again`.
    pub(super) fn land(
        &mut self,
        completion: Completion,
        name: &str,
        again: impl FnOnce(Mapping<B, D, &'d Domain>, Asked) -> Submitted<'d, B, D>,
    ) -> Landed {
        let tag = completion.tag();
        let Some((mut asked, flight)) = self.flying.get_mut(tag).and_then(Option::take) else {
            return Landed::NotMine(completion);
        };
        let Asked { slot, offset, len, .. } = asked;
        let target = || name.to_owned();
        let action = self.action;
        let (mapped, result) = match flight.finish(completion) {
            Outcome::Completed { payload, result } => (payload, result),
            Outcome::TimedOut(quarantined) => {
                self.quarantined.push(quarantined);
                return Landed::Lost(slot, TargetError::Silent { target: target(), action, offset, len });
            }
            Outcome::Foreign(flight, completion) => {
                self.put(asked, flight);
                return Landed::NotMine(completion);
            }
        };
        let (mapped, result) = match result {
            Err(CommandError::Status(status)) if status.may_retry() && asked.tries < TRIES => {
                asked.tries += 1;
                self.retries += 1;
                match again(mapped, asked) {
                    Ok(flight) => {
                        self.put(asked, flight);
                        return Landed::Taken;
                    }
                    Err(Rejected { payload, .. }) => (payload, Err(CommandError::Status(status))),
                }
            }
            other => (mapped, other),
        };
        let result = result.map(|()| len).map_err(|error| TargetError::Command {
            target: target(),
            action,
            offset,
            len,
            error,
        });
        self.over.push(Over { slot, mapped, result });
        Landed::Taken
    }

    /// Takes access back from all whose command is over, with one flush.
    pub(super) fn revoke_all(
        &mut self,
        domain: &'d Domain,
        revoked: &mut Vec<Revoked<B, &'d Domain>>,
        held: &mut Vec<Held<'d, B>>,
    ) {
        if self.over.is_empty() {
            return;
        }
        let mut results = Vec::with_capacity(self.over.len());
        let mappings = self.over.drain(..).map(|Over { slot, mapped, result }| {
            results.push((slot, result));
            mapped
        });
        domain.revoke_all(mappings, revoked);
        debug_assert_eq!(revoked.len(), results.len());
        held.extend(revoked.drain(..).zip(results).map(|(revoked, (slot, result))| Held {
            slot,
            revoked,
            result,
        }));
    }

    /// Takes access back from each whose command is over, and waits for each.
    pub(super) fn unmap_each(&mut self, name: &str, done: &mut Vec<Done<B>>) {
        for Over { slot, mapped, result } in self.over.drain(..) {
            done.push(waited(name, slot, mapped.unmap(), result));
        }
    }
}

/// A request that is over, with its buffer if the domain gave it back.
pub(super) fn waited<B>(
    name: &str,
    slot: usize,
    buffer: Result<B, BackendError>,
    result: Result<usize, TargetError>,
) -> Done<B> {
    match buffer {
        Ok(buffer) => Done { slot, buffer: Some(buffer), result },
        Err(error) => {
            let error = TargetError::Domain { target: name.to_owned(), error };
            Done { slot, buffer: None, result: result.and(Err(error)) }
        }
    }
}
