//! The life of a mapping, in types: [`Mapping`], [`Revoked`], and the payload again.

use super::addresses::Addresses;
use super::error::BackendError;
use super::id::DomainId;
use super::owner::{Anyone, Caller};
use super::payload::{Payload, Pinned};
use super::space::Domain;
use crate::access::Direction;
use crate::addr::{IovaRange, Segment};
use crate::drop_guard::{CleanUp, DropGuard};
use crate::invalidate::{Ticket, WaitLimit};
use crate::known_bad::{self, Mistake};
use crate::mem::DmaMemory;
use crate::share::Shared;
use crate::table::PinnedLeaf;
use core::fmt;
use core::marker::PhantomData;
use core::ops::Deref;
use core::task::Poll;

/// A failed map, with the payload.
///
/// `?` converts it to a [`BackendError`] where the payload is not needed.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct MapError<P> {
    /// What was to be mapped. `None` where a device may still reach it ([`BackendError::stays_reachable`]): the domain
    /// holds it until the flush completes, or it is quarantined.
    pub payload: Option<P>,
    /// The reason.
    #[source]
    pub error: BackendError,
}

impl<P> fmt::Debug for MapError<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MapError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<P> From<MapError<P>> for BackendError {
    /// Drops the payload, if there is one.
    fn from(failed: MapError<P>) -> Self {
        failed.error
    }
}

/// A buffer whose flush had not completed when the wait for it ended.
///
/// `?` converts it to a [`BackendError`]; a buffer in it then stays with the domain until its flush completes.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct NotQuiesced<P: Pinned, H: Deref<Target = Domain> = Shared<Domain>> {
    /// The buffer, to be waited for again. `None` where the flush never completes, or access could not be revoked: then
    /// the buffer is quarantined.
    pub revoked: Option<Revoked<P, H>>,
    /// The reason.
    #[source]
    pub error: BackendError,
}

impl<P: Pinned, H: Deref<Target = Domain>> fmt::Debug for NotQuiesced<P, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotQuiesced").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<P: Pinned, H: Deref<Target = Domain>> From<NotQuiesced<P, H>> for BackendError {
    fn from(failed: NotQuiesced<P, H>) -> Self {
        failed.error
    }
}

/// A payload in a domain, with what the domain knows about it.
///
/// Its clean-up revokes access unless that has happened, waits unless a wait has failed before, and drops the payload.
struct Held<P: Pinned, H: Deref<Target = Domain>> {
    /// Before `domain`, so that a payload that is dropped is dropped first.
    payload: P,
    /// Always a `&Domain` or a `Shared<Domain>`: only these are constructed, so it always refers to the same domain.
    domain: H,
    addresses: Addresses,
    /// [`Ticket::NEVER`] until it is revoked, and for good if that fails or panics.
    ticket: Ticket,
    revoked: bool,
    /// Whether a wait has ended before the flush completed.
    late: bool,
}

impl<P: Pinned, H: Deref<Target = Domain>> Held<P, H> {
    #[inline(always)]
    fn revoke(&mut self, caller: &mut impl Caller) {
        self.domain.release_late();
        self.begin_revoke(caller);
        if self.addresses.is_fixed() {
            return;
        }
        let revoked = self.domain.backend().revoke_one(self.addresses.iova, self.addresses.pin());
        if let Ok(ticket) = revoked {
            self.set_ticket(ticket);
            self.domain.limit_held(caller, ticket);
        }
    }

    /// Counts it as revoked, with a ticket that never completes: should the backend panic, the payload is quarantined.
    #[inline(always)]
    fn begin_revoke(&mut self, caller: &mut impl Caller) {
        self.revoked = true;
        caller.counts(&self.domain).count_revoked(self.addresses.held_bytes());
    }

    #[inline(always)]
    fn set_ticket(&mut self, ticket: Ticket) {
        self.ticket = ticket;
        self.domain.release_if_mistaken(&self.addresses);
    }

    /// Returns the range that the backend has to revoke, if any, with the pin of its window.
    fn to_revoke(&self) -> Option<(IovaRange, Option<&PinnedLeaf>)> {
        (!self.addresses.is_fixed()).then(|| (self.addresses.iova, self.addresses.pin()))
    }

    #[inline(always)]
    fn is_quiesced(&self) -> bool {
        self.addresses.is_fixed()
            || known_bad::makes(Mistake::BufferEarly)
            || self.domain.backend().is_completed(self.ticket)
    }

    /// Waits by `wait`.
    #[inline(always)]
    fn quiesce(
        &mut self,
        wait: impl FnOnce(&Domain, Ticket) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let result = match self.ticket {
            _ if self.addresses.is_fixed() || known_bad::makes(Mistake::BufferEarly) => Ok(()),
            Ticket::NEVER => Err(BackendError::NotRevoked),
            ticket => wait(&self.domain, ticket),
        };
        self.late = result.as_ref().is_err_and(|error| error.late_ticket().is_some());
        result
    }

    /// Returns the payload. Only when quiesced.
    #[inline(always)]
    fn release(self, caller: &mut impl Caller) -> (P, H) {
        let Self { payload, domain, addresses, .. } = self;
        caller.counts(&domain).count_no_longer_held(addresses.held_bytes());
        domain.finish_unmap(caller, addresses);
        (payload, domain)
    }

    /// Leaves the payload with the domain: until its flush completes if `late`, else for good.
    fn leave(self, late: bool) {
        let Self { payload, domain, addresses, ticket, revoked, .. } = self;
        if revoked {
            domain.counts().count_no_longer_held(addresses.held_bytes());
        }
        domain.keep_reachable(payload, addresses, late.then_some(ticket));
    }
}

impl<P: Pinned, H: Deref<Target = Domain>> CleanUp for Held<P, H> {
    fn clean_up(self) {
        let mut held = DropGuard::new(Unfinished(self));
        if !held.0.revoked {
            held.0.revoke(&mut Anyone);
        }
        let failed = !held.0.late && held.0.quiesce(|domain, ticket| domain.backend().wait(ticket)).is_err();
        let held = held.into_inner().0;
        if held.is_quiesced() {
            drop(held.release(&mut Anyone));
        } else {
            let late = held.late || !failed;
            held.leave(late);
        }
    }
}

/// A clean-up that a panic (of a backend, or in the drop of a late payload) has ended before the payload was quiesced: it
/// is quarantined, not dropped with the rest.
struct Unfinished<P: Pinned, H: Deref<Target = Domain>>(Held<P, H>);

impl<P: Pinned, H: Deref<Target = Domain>> CleanUp for Unfinished<P, H> {
    fn clean_up(self) {
        self.0.leave(false);
    }
}

/// A buffer mapped into a domain: the device can reach it, and no reference into it exists.
///
/// `H` is how it holds its domain: a borrow (`&Domain`, from [`Domain::map`]), or a share of it (`Shared<Domain>`, from
/// [`Local::map`](super::Local::map) of a [`Shared`] domain), which makes the mapping independent of any borrow.
///
/// Dropping it revokes access, waits, and drops the payload. If the flush is late, the domain holds the payload until it
/// completes; if it never completes, the payload is quarantined.
#[must_use = "dropping a mapping revokes the device's access"]
pub struct Mapping<P: Pinned, D: Direction, H: Deref<Target = Domain> = Shared<Domain>>(
    DropGuard<Held<P, H>>,
    PhantomData<D>,
);

impl<P: Pinned, D: Direction, H: Deref<Target = Domain>> Mapping<P, D, H> {
    #[inline(always)]
    pub(super) fn new(domain: H, payload: P, addresses: Addresses) -> Self {
        let ticket = if addresses.is_fixed() { Ticket::COMPLETED } else { Ticket::NEVER };
        let (revoked, late) = (false, false);
        Self(DropGuard::new(Held { payload, domain, addresses, ticket, revoked, late }), PhantomData)
    }

    /// Returns the domain that it is mapped in.
    pub fn domain(&self) -> &Domain {
        &self.0.domain
    }

    /// Returns where the device finds it: one contiguous range, whether the memory is in one piece or in several.
    pub fn iova(&self) -> IovaRange {
        self.0.addresses.iova
    }

    /// Returns all of it as one segment.
    pub fn segment(&self) -> Segment {
        Segment { iova: self.0.addresses.iova.start(), len: self.0.addresses.iova.len() }
    }

    /// Returns the memory, to be read and written beside the device: the first [piece](Self::piece).
    pub fn memory(&self) -> DmaMemory<'_> {
        self.0.payload.memory()
    }

    /// Returns piece `index` of the memory, as [`Pinned::piece`] does.
    pub fn piece(&self, index: usize) -> Option<DmaMemory<'_>> {
        self.0.payload.piece(index)
    }

    /// Returns [extent](Pinned::extent) `index` of the payload where the device finds it.
    pub fn extent(&self, index: usize) -> Option<Segment> {
        let (offset, len) = self.0.payload.extent(index)?;
        let part = self.0.addresses.iova.part(offset, len)?;
        Some(Segment { iova: part.start(), len: part.len() })
    }

    /// Yields all extents of the payload, in order: what a device is given.
    pub fn segments(&self) -> impl Iterator<Item = Segment> {
        (0..).map_while(|index| self.extent(index))
    }

    /// Whether the memory stays mapped for its lifetime: then revoking the mapping does not revoke access.
    pub fn is_fixed(&self) -> bool {
        self.0.addresses.is_fixed()
    }

    /// Revokes access at once; the buffer is held until the ticket has completed.
    ///
    /// It does not fail: where the backend cannot revoke, the ticket is [`Ticket::NEVER`].
    pub fn revoke(self) -> Revoked<P, H> {
        Unrevoked::from(self).revoke()
    }

    /// Revokes access and waits: when this returns, no device can reach the buffer.
    ///
    /// To keep the buffer if the flush is late, use [`revoke`](Self::revoke) and [`Revoked::wait`].
    ///
    /// # Errors
    /// [`BackendError::Flush`]: a device may still reach the buffer. If the flush is late the domain holds the buffer until
    /// it completes; otherwise, and with [`BackendError::NotRevoked`], the buffer and its addresses are quarantined.
    pub fn unmap(self) -> Result<P, BackendError> {
        Ok(self.revoke().wait()?)
    }
}

// SAFETY: each segment is part of the mapping's range, which is mapped for `D`, never changes, and lasts until the value
// is dropped, unmapped or revoked; all of these take it by value. The extents never change by the contract of `Pinned`.
unsafe impl<P: Pinned, D: Direction, H: Deref<Target = Domain>> Payload<D> for Mapping<P, D, H> {
    fn segment(&self, index: usize) -> Option<Segment> {
        self.extent(index)
    }

    fn domain(&self) -> Option<DomainId> {
        Some(Mapping::domain(self).id())
    }
}

impl<P: Pinned, D: Direction, H: Deref<Target = Domain>> fmt::Debug for Mapping<P, D, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("iova", &self.0.addresses.iova)
            .field("fixed", &self.is_fixed())
            .finish_non_exhaustive()
    }
}

/// A [`Mapping`] without its direction, so that [`Domain::revoke_all`] takes reads and writes in one batch.
#[must_use = "dropping a mapping revokes the device's access"]
pub struct Unrevoked<P: Pinned, H: Deref<Target = Domain> = Shared<Domain>>(DropGuard<Held<P, H>>);

impl<P: Pinned, D: Direction, H: Deref<Target = Domain>> From<Mapping<P, D, H>> for Unrevoked<P, H> {
    #[inline(always)]
    fn from(mapping: Mapping<P, D, H>) -> Self {
        Self(mapping.0)
    }
}

impl<P: Pinned, H: Deref<Target = Domain>> Unrevoked<P, H> {
    /// Revokes access at once, as [`Mapping::revoke`] does.
    pub fn revoke(self) -> Revoked<P, H> {
        self.revoke_by(&mut Anyone)
    }

    #[inline(always)]
    pub(super) fn revoke_by(mut self, caller: &mut impl Caller) -> Revoked<P, H> {
        self.0.revoke(caller);
        Revoked(self.0)
    }

    #[inline(always)]
    pub(super) fn belongs_to(&self, domain: &Domain) -> bool {
        core::ptr::eq(&raw const *self.0.domain, domain)
    }

    /// Returns the value that waits for the ticket, to be [revoked](Domain::revoke_all) with others.
    pub(super) fn into_revoked(self) -> Revoked<P, H> {
        Revoked(self.0)
    }
}

impl<P: Pinned, H: Deref<Target = Domain>> fmt::Debug for Unrevoked<P, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unrevoked").field("iova", &self.0.addresses.iova).finish_non_exhaustive()
    }
}

/// A buffer whose access has been revoked, but which a device may reach until the ticket has completed.
///
/// `revoked.await` waits in an `async` function; [`quiesced`](Self::quiesced) is the future itself, for an executor.
///
/// Dropping it waits, unless a wait has failed before, and drops the payload. If the flush is late, the domain holds the
/// payload until it completes; if it never completes, the payload is quarantined.
#[must_use = "the buffer is held until its ticket has completed: poll() or wait()"]
pub struct Revoked<P: Pinned, H: Deref<Target = Domain> = Shared<Domain>>(DropGuard<Held<P, H>>);

impl<P: Pinned, H: Deref<Target = Domain>> Revoked<P, H> {
    /// Returns the ticket: the point in the sequence at which it is quiesced.
    pub fn ticket(&self) -> Ticket {
        self.0.ticket
    }

    /// Returns where the device found it. The addresses are reused only after the payload has been returned.
    pub fn iova(&self) -> IovaRange {
        self.0.addresses.iova
    }

    /// Whether the ticket has completed: then [`poll`](Self::poll) returns the buffer.
    pub fn is_quiesced(&self) -> bool {
        self.0.is_quiesced()
    }

    /// Returns the buffer if the ticket has completed, without waiting.
    ///
    /// # Errors
    /// `self`, as long as a device may reach the buffer.
    pub fn poll(self) -> Result<P, Self> {
        self.poll_by(&mut Anyone).map(|(payload, _)| payload)
    }

    /// Waits, at most until the deadline of the flush, and returns the buffer.
    ///
    /// # Errors
    /// [`NotQuiesced`]: past the deadline with `self`, to be waited for again; without it where the flush never completes,
    /// and the buffer and its addresses are quarantined.
    pub fn wait(self) -> Result<P, NotQuiesced<P, H>> {
        self.wait_within(None)
    }

    /// Waits for at most `limit`, counted from now, and returns the buffer: for a deadline of the caller's own
    /// ([`WaitLimit::within`] a duration), before or after that of the flush.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn wait_for(self, limit: WaitLimit) -> Result<P, NotQuiesced<P, H>> {
        self.wait_within(Some(limit))
    }

    pub(super) fn wait_within(self, limit: Option<WaitLimit>) -> Result<P, NotQuiesced<P, H>> {
        self.wait_by(&mut Anyone, limit).map(|(payload, _)| payload)
    }

    #[inline(always)]
    pub(super) fn poll_by(self, caller: &mut impl Caller) -> Result<(P, H), Self> {
        self.0.domain.release_late();
        if self.is_quiesced() { Ok(self.0.into_inner().release(caller)) } else { Err(self) }
    }

    #[inline(always)]
    pub(super) fn wait_by(
        self,
        caller: &mut impl Caller,
        limit: Option<WaitLimit>,
    ) -> Result<(P, H), NotQuiesced<P, H>> {
        self.quiesce_by(caller, |domain, ticket| match limit {
            None => domain.backend().wait(ticket),
            Some(limit) => domain.backend().wait_for(ticket, limit),
        })
    }

    #[inline(always)]
    pub(super) fn quiesce_by(
        mut self,
        caller: &mut impl Caller,
        wait: impl FnOnce(&Domain, Ticket) -> Result<(), BackendError>,
    ) -> Result<(P, H), NotQuiesced<P, H>> {
        self.0.domain.release_late();
        let Err(error) = self.0.quiesce(wait) else { return Ok(self.0.into_inner().release(caller)) };
        if self.0.late {
            return Err(NotQuiesced { revoked: Some(self), error });
        }
        self.0.into_inner().leave(false);
        Err(NotQuiesced { revoked: None, error })
    }

    /// Returns how a wait would end, if it would end now.
    pub(super) fn check(&self) -> Poll<Result<(), BackendError>> {
        match self.0.ticket {
            _ if self.is_quiesced() => Poll::Ready(Ok(())),
            Ticket::NEVER => Poll::Ready(Err(BackendError::NotRevoked)),
            ticket => self.0.domain.backend().check(ticket),
        }
    }

    #[inline(always)]
    pub(super) fn belongs_to(&self, domain: &Domain) -> bool {
        core::ptr::eq(&raw const *self.0.domain, domain)
    }

    pub(super) fn begin_revoke(&mut self, caller: &mut impl Caller) {
        self.0.begin_revoke(caller);
    }

    pub(super) fn set_ticket(&mut self, ticket: Ticket) {
        self.0.set_ticket(ticket);
    }

    /// Returns the range that the backend has to revoke, if any, with the pin of its window.
    pub(super) fn to_revoke(&self) -> Option<(IovaRange, Option<&PinnedLeaf>)> {
        self.0.to_revoke()
    }
}

impl<P: Pinned, H: Deref<Target = Domain>> fmt::Debug for Revoked<P, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Revoked")
            .field("iova", &self.0.addresses.iova)
            .field("ticket", &self.0.ticket)
            .finish_non_exhaustive()
    }
}
