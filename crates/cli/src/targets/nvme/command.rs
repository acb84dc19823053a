//! A request at the controller. The direction of a mapping is part of its type, so there is a
//! variant for each.

use crate::targets::target::Io;
use pinfold_core::access::{FromDevice, ToDevice};
use pinfold_core::domain::{BackendError, Domain, Local, Mapping, Pinned};
use pinfold_nvme::driver::{self, CommandError, Completion, InFlight, Quarantined};

/// A buffer that is mapped for its command.
pub(super) enum Mapped<'d, B: Pinned> {
    /// The device writes it.
    Read(Mapping<B, FromDevice, &'d Domain>),
    /// The device reads it.
    Write(Mapping<B, ToDevice, &'d Domain>),
    /// Not mapped: the command moves no data.
    Not(B),
}

impl<'d, B: Pinned> Mapped<'d, B> {
    /// Ends the mapping and waits for the flush.
    pub(super) fn unmap(self, domain: &mut Local<&'d Domain>) -> Result<B, BackendError> {
        match self {
            Self::Read(buffer) => domain.unmap(buffer),
            Self::Write(buffer) => domain.unmap(buffer),
            Self::Not(buffer) => Ok(buffer),
        }
    }
}

/// A request at the controller.
pub(super) struct Command<'d, B: Pinned> {
    /// The record.
    pub(super) io: Io,
    /// The driver's handle.
    pub(super) attempt: Attempt<'d, B>,
}

/// The driver's handle of a request.
pub(super) enum Attempt<'d, B: Pinned> {
    Read(InFlight<Mapping<B, FromDevice, &'d Domain>>),
    Write(InFlight<Mapping<B, ToDevice, &'d Domain>>),
    WithoutData(InFlight<()>, B),
}

/// The buffer of a command that did not complete. Held, so that its memory is not reused.
pub(super) enum Quarantine<'d, B: Pinned> {
    Read(Quarantined<Mapping<B, FromDevice, &'d Domain>>),
    Write(Quarantined<Mapping<B, ToDevice, &'d Domain>>),
}

/// The outcome of a request after a completion.
pub(super) enum Outcome<'d, B: Pinned> {
    /// The command has completed.
    Completed(Mapped<'d, B>, Result<(), CommandError>),
    /// It did not complete in time, and its buffer is quarantined, or was not part of it.
    TimedOut(Result<B, Quarantine<'d, B>>),
    /// The completion belongs to another request.
    Foreign(Attempt<'d, B>),
}

impl<'d, B: Pinned> Attempt<'d, B> {
    /// Returns the driver's tag.
    pub(super) fn tag(&self) -> usize {
        match self {
            Self::Read(in_flight) => in_flight.tag(),
            Self::Write(in_flight) => in_flight.tag(),
            Self::WithoutData(in_flight, _) => in_flight.tag(),
        }
    }

    /// Applies `completion`.
    pub(super) fn finish(self, completion: Completion) -> Outcome<'d, B> {
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
