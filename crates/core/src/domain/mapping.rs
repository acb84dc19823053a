//! The life of a mapping, in types: [`Mapped`], [`Revoked`], and the payload again.

use super::{BackendError, Domain, Pinned};
use crate::access::Direction;
use crate::addr::{IovaRange, Segment};
use crate::invalidate::Ticket;
use crate::mem::DmaMemory;
use core::fmt;
use core::marker::PhantomData;

/// A refusal gives the payload back.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct Refused<P> {
    /// What was to be mapped. `None` after [`BackendError::Stuck`]: a device may reach it, so it is in quarantine.
    pub payload: Option<P>,
    /// Why it was not.
    #[source]
    pub error: BackendError,
}

impl<P> fmt::Debug for Refused<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}

/// A buffer in a domain: the device may reach it, and nobody can take a reference into it.
///
/// Dropping it takes access back, waits, and drops the payload; where the wait is given up the payload is leaked.
#[must_use = "dropping a mapping takes the device's access away"]
pub struct Mapped<'d, P: Pinned, D: Direction>(Revoked<'d, P>, PhantomData<D>);

impl<'d, P: Pinned, D: Direction> Mapped<'d, P, D> {
    pub(super) fn new(domain: &'d Domain, payload: P, iova: IovaRange, fixed: bool) -> Self {
        let ticket = if fixed { Ticket::DONE } else { Ticket::NEVER };
        let bytes = payload.memory().len();
        Self(
            Revoked { domain, payload: Some(payload), bytes, iova, ticket, fixed, counted: false },
            PhantomData,
        )
    }

    /// Where the device finds it: one contiguous range.
    pub fn iova(&self) -> IovaRange {
        self.0.iova
    }

    /// The same as a segment.
    pub fn segment(&self) -> Segment {
        Segment { iova: self.0.iova.start(), len: self.0.iova.len() }
    }

    /// The memory, to be read and written beside the device.
    pub fn memory(&self) -> DmaMemory<'_> {
        self.0.payload.as_ref().map_or(DmaMemory::EMPTY, Pinned::memory)
    }

    /// Whether the memory is mapped for as long as it lives: then taking the mapping back takes no access away.
    pub fn is_fixed(&self) -> bool {
        self.0.fixed
    }

    /// Takes access back at once; the buffer is held until the ticket is done.
    ///
    /// It does not fail: where the backend can not take access back, the ticket is [`Ticket::NEVER`].
    pub fn revoke(mut self) -> Revoked<'d, P> {
        self.revoke_now();
        self.into_revoked()
    }

    /// Takes access back and waits: when this returns, no device reaches the buffer.
    ///
    /// # Errors
    /// [`BackendError::Flush`] or [`BackendError::NotRevoked`]: a device may still reach the buffer, so it is in
    /// quarantine (leaked and counted, with its addresses).
    pub fn unmap(self) -> Result<P, BackendError> {
        self.revoke().wait()
    }

    pub(super) fn belongs_to(&self, domain: &Domain) -> bool {
        self.0.belongs_to(domain)
    }

    fn revoke_now(&mut self) {
        if !self.0.fixed {
            let ranges = &mut core::iter::once(self.0.iova);
            self.0.ticket = self.0.domain.backend().revoke(ranges).unwrap_or(Ticket::NEVER);
        }
        self.0.count_revoked();
    }

    /// The same held by the type that waits for its ticket.
    pub(super) fn into_revoked(mut self) -> Revoked<'d, P> {
        let Revoked { domain, bytes, iova, ticket, fixed, counted, .. } = self.0;
        // `self` keeps no payload, so its drop does nothing.
        Revoked { domain, payload: self.0.payload.take(), bytes, iova, ticket, fixed, counted }
    }
}

impl<P: Pinned, D: Direction> Drop for Mapped<'_, P, D> {
    fn drop(&mut self) {
        if self.0.payload.is_some() {
            self.revoke_now(); // and the drop of the `Revoked` inside waits
        }
    }
}

impl<P: Pinned, D: Direction> fmt::Debug for Mapped<'_, P, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped")
            .field("iova", &self.0.iova)
            .field("fixed", &self.0.fixed)
            .finish_non_exhaustive()
    }
}

/// A buffer whose access has been taken back, but which a device may still reach until the ticket is done.
///
/// Dropping it waits and drops the payload; where the wait is given up the payload is leaked.
#[must_use = "the buffer is held until its ticket is done: poll() or wait()"]
pub struct Revoked<'d, P: Pinned> {
    domain: &'d Domain,
    /// `None` once it has been given back or leaked.
    payload: Option<P>,
    bytes: usize,
    iova: IovaRange,
    ticket: Ticket,
    fixed: bool,
    /// Whether the domain has counted the revocation.
    counted: bool,
}

impl<P: Pinned> Revoked<'_, P> {
    /// The point in the sequence at which it is quiesced.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Where the device found it. The addresses are used again once the payload has been given back.
    pub fn iova(&self) -> IovaRange {
        self.iova
    }

    /// Whether the ticket is done: then [`poll`](Self::poll) gives the buffer back.
    pub fn is_quiesced(&self) -> bool {
        self.fixed || self.domain.backend().is_done(self.ticket)
    }

    /// The buffer, if the ticket is done; else itself.
    ///
    /// # Errors
    /// Itself, as long as a device may reach the buffer.
    pub fn poll(mut self) -> Result<P, Self> {
        if !self.is_quiesced() {
            return Err(self);
        }
        self.give_back().ok_or(self)
    }

    /// Waits, and gives the buffer.
    ///
    /// # Errors
    /// As for [`Mapped::unmap`].
    pub fn wait(mut self) -> Result<P, BackendError> {
        self.quiesce()?;
        self.give_back().ok_or(BackendError::NotRevoked)
    }

    pub(super) fn belongs_to(&self, domain: &Domain) -> bool {
        core::ptr::eq(self.domain, domain)
    }

    pub(super) fn set_ticket(&mut self, ticket: Ticket) {
        if !self.fixed {
            self.ticket = ticket;
        }
        self.count_revoked();
    }

    /// What a backend has to take back, if anything.
    pub(super) fn to_revoke(&self) -> Option<IovaRange> {
        (!self.fixed).then_some(self.iova)
    }

    fn count_revoked(&mut self) {
        if !core::mem::replace(&mut self.counted, true) {
            self.domain.count_revoked();
        }
    }

    fn quiesce(&mut self) -> Result<(), BackendError> {
        let result = match self.ticket {
            _ if self.fixed => Ok(()),
            Ticket::NEVER => Err(BackendError::NotRevoked),
            ticket => self.domain.backend().wait(ticket),
        };
        if result.is_err()
            && let Some(payload) = self.payload.take()
        {
            self.domain.quarantine(payload, self.bytes);
        }
        result
    }

    /// Only when quiesced.
    fn give_back(&mut self) -> Option<P> {
        let payload = self.payload.take()?;
        self.domain.forget_mapping(self.iova, self.fixed);
        Some(payload)
    }
}

impl<P: Pinned> Drop for Revoked<'_, P> {
    fn drop(&mut self) {
        if self.payload.is_some() && self.quiesce().is_ok() {
            drop(self.give_back());
        }
    }
}

impl<P: Pinned> fmt::Debug for Revoked<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Revoked")
            .field("iova", &self.iova)
            .field("ticket", &self.ticket)
            .finish_non_exhaustive()
    }
}
