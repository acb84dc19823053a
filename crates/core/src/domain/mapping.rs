//! The life of a mapping, in types: [`Mapping`], [`Revoked`], and the payload again.

use super::{BackendError, Domain, Pinned};
use crate::access::Direction;
use crate::addr::{IovaRange, Segment};
use crate::invalidate::{Ticket, WaitLimit};
use crate::known_bad::{self, Mistake};
use crate::mem::DmaMemory;
use core::fmt;
use core::marker::PhantomData;

/// A refusal gives the payload back.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct MapError<P> {
    /// What was to be mapped. `None` where a device may still reach it ([`BackendError::stays_reachable`]): it is held
    /// until the flush completes, or in quarantine.
    pub payload: Option<P>,
    /// Why it was not.
    #[source]
    pub error: BackendError,
}

impl<P> fmt::Debug for MapError<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MapError").field("error", &self.error).finish_non_exhaustive()
    }
}

/// A buffer whose flush has not completed, although it was waited for.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct NotQuiesced<'d, P: Pinned> {
    /// The buffer, to be waited for again. `None` where the flush never completes, or access could not be taken back:
    /// then the buffer is in quarantine.
    pub revoked: Option<Revoked<'d, P>>,
    /// Why the wait ended.
    #[source]
    pub error: BackendError,
}

impl<P: Pinned> fmt::Debug for NotQuiesced<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotQuiesced").field("error", &self.error).finish_non_exhaustive()
    }
}

/// The reason alone. A buffer that was given back is left with the domain, which holds it until its flush completes.
impl<P: Pinned> From<NotQuiesced<'_, P>> for BackendError {
    fn from(refused: NotQuiesced<'_, P>) -> Self {
        refused.error
    }
}

/// A buffer in a domain: the device may reach it, and nobody can take a reference into it.
///
/// Dropping it takes access back, waits, and drops the payload; where the flush is late the domain holds the payload
/// until it completes, and where it never completes the payload is leaked.
#[must_use = "dropping a mapping takes the device's access away"]
pub struct Mapping<'d, P: Pinned, D: Direction>(Revoked<'d, P>, PhantomData<D>);

impl<'d, P: Pinned, D: Direction> Mapping<'d, P, D> {
    pub(super) fn new(domain: &'d Domain, payload: P, iova: IovaRange, fixed: bool) -> Self {
        let ticket = if fixed { Ticket::DONE } else { Ticket::NEVER };
        let bytes = payload.memory().len();
        Self(
            Revoked {
                domain,
                payload: Some(payload),
                bytes,
                iova,
                ticket,
                fixed,
                counted: false,
                late: false,
            },
            PhantomData,
        )
    }

    /// The domain that it is mapped in.
    pub fn domain(&self) -> &'d Domain {
        self.0.domain
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
    /// To keep the buffer at hand where the flush is late: [`revoke`](Self::revoke), then [`Revoked::wait`].
    ///
    /// # Errors
    /// [`BackendError::Flush`]: a device may still reach the buffer. Where the flush is late the domain holds it until it
    /// completes. Otherwise, and with [`BackendError::NotRevoked`], it is in quarantine (leaked and counted, with its
    /// addresses).
    pub fn unmap(self) -> Result<P, BackendError> {
        Ok(self.revoke().wait()?)
    }

    pub(super) fn belongs_to(&self, domain: &Domain) -> bool {
        self.0.belongs_to(domain)
    }

    fn revoke_now(&mut self) {
        self.0.domain.release_late();
        if !self.0.fixed {
            let ranges = &mut core::iter::once(self.0.iova);
            self.0.ticket = self.0.domain.backend().revoke(ranges).unwrap_or(Ticket::NEVER);
        }
        self.0.count_revoked();
    }

    /// The same held by the type that waits for its ticket.
    pub(super) fn into_revoked(mut self) -> Revoked<'d, P> {
        let Revoked { domain, bytes, iova, ticket, fixed, counted, late, .. } = self.0;
        // `self` keeps no payload, so its drop does nothing.
        Revoked { domain, payload: self.0.payload.take(), bytes, iova, ticket, fixed, counted, late }
    }
}

impl<P: Pinned, D: Direction> Drop for Mapping<'_, P, D> {
    fn drop(&mut self) {
        if self.0.payload.is_some() {
            self.revoke_now(); // and the drop of the `Revoked` inside waits
        }
    }
}

impl<P: Pinned, D: Direction> fmt::Debug for Mapping<'_, P, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("iova", &self.0.iova)
            .field("fixed", &self.0.fixed)
            .finish_non_exhaustive()
    }
}

/// A buffer whose access has been taken back, but which a device may still reach until the ticket is done.
///
/// Dropping it waits, unless a wait has failed before, and drops the payload; where the flush is late the domain holds
/// the payload until it completes, and where it never completes the payload is leaked.
#[must_use = "the buffer is held until its ticket is done: poll() or wait()"]
pub struct Revoked<'d, P: Pinned> {
    domain: &'d Domain,
    /// `None` once it has been given back, deferred or leaked.
    payload: Option<P>,
    bytes: usize,
    iova: IovaRange,
    ticket: Ticket,
    fixed: bool,
    /// Whether the domain has counted the revocation.
    counted: bool,
    /// Whether a wait has ended without the flush being over.
    late: bool,
}

impl<'d, P: Pinned> Revoked<'d, P> {
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
        self.fixed
            || known_bad::makes(Mistake::BufferEarly)
            || self.domain.backend().is_completed(self.ticket)
    }

    /// The buffer, if the ticket is done; else itself.
    ///
    /// # Errors
    /// Itself, as long as a device may reach the buffer.
    pub fn poll(mut self) -> Result<P, Self> {
        self.domain.release_late();
        if !self.is_quiesced() {
            return Err(self);
        }
        self.give_back().ok_or(self)
    }

    /// Waits for the deadline of the flush at most, and gives the buffer.
    ///
    /// # Errors
    /// [`NotQuiesced`]: with itself past the deadline, to be waited for again; without where the flush never completes,
    /// and the buffer is in quarantine (leaked and counted, with its addresses).
    pub fn wait(self) -> Result<P, NotQuiesced<'d, P>> {
        self.wait_by(|this| this.domain.backend().wait(this.ticket))
    }

    /// Waits for `limit` at most, counted from now, and gives the buffer: for one whose deadline has passed.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn wait_for(self, limit: WaitLimit) -> Result<P, NotQuiesced<'d, P>> {
        self.wait_by(|this| this.domain.backend().wait_for(this.ticket, limit))
    }

    fn wait_by(
        mut self,
        wait: impl FnOnce(&Self) -> Result<(), BackendError>,
    ) -> Result<P, NotQuiesced<'d, P>> {
        self.domain.release_late();
        let refused = match self.quiesce(wait) {
            Ok(()) => match self.give_back() {
                Some(payload) => return Ok(payload),
                None => BackendError::NotRevoked, // it holds a payload until it is consumed
            },
            Err(error) => error,
        };
        let revoked = self.payload.is_some().then_some(self);
        Err(NotQuiesced { revoked, error: refused })
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
            if known_bad::makes(Mistake::IovaEarly) && !self.fixed {
                let _ = self.domain.release_iova(self.iova);
            }
        }
    }

    /// Waits by `wait`. Where the flush never completes the payload is leaked.
    fn quiesce(&mut self, wait: impl FnOnce(&Self) -> Result<(), BackendError>) -> Result<(), BackendError> {
        let result = match self.ticket {
            _ if self.fixed || known_bad::makes(Mistake::BufferEarly) => Ok(()),
            Ticket::NEVER => Err(BackendError::NotRevoked),
            _ => wait(self),
        };
        self.late = result.as_ref().is_err_and(|error| error.late_ticket().is_some());
        if result.is_err()
            && !self.late
            && let Some(payload) = self.payload.take()
        {
            self.domain.keep(payload, self.bytes, self.iova, None);
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
        if self.payload.is_some() && !self.late {
            // Where this fails for good the payload is leaked by it; where the flush is late it is dealt with below.
            let _ = self.quiesce(|this| this.domain.backend().wait(this.ticket));
        }
        if self.is_quiesced() {
            drop(self.give_back());
        } else if let Some(payload) = self.payload.take() {
            self.domain.keep(payload, self.bytes, self.iova, Some(self.ticket));
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
