//! A mapping that has been revoked: its payload is returned when no device can reach it.

use super::error::BackendError;
use super::held::MappedPayload;
use super::owner::{Anyone, Caller};
use super::payload::Pinned;
use super::space::Space;
use crate::addr::IovaRange;
use crate::drop_guard::DropGuard;
use crate::invalidate::{Ticket, WaitLimit};
use crate::share::Shared;
use crate::table::PinnedLeaf;
use core::fmt;
use core::task::{Poll, Waker};

/// A buffer whose flush had not completed when the wait for it ended.
///
/// `?` converts it to a [`BackendError`]; a buffer in it then stays with the domain until its flush
/// completes.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct NotQuiesced<P: Pinned> {
    /// The buffer, to be waited for again. `None` where the flush never completes, or access could
    /// not be revoked: then the buffer is quarantined.
    pub revoked: Option<Revoked<P>>,
    /// The reason.
    #[source]
    pub error: BackendError,
}

impl<P: Pinned> fmt::Debug for NotQuiesced<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotQuiesced").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<P: Pinned> From<NotQuiesced<P>> for BackendError {
    fn from(failed: NotQuiesced<P>) -> Self {
        failed.error
    }
}

/// A buffer whose access has been revoked, but which a device may reach until the ticket has
/// completed.
///
/// `revoked.await` waits in an `async` function; [`quiesced`](Self::quiesced) is the future itself,
/// for an executor.
///
/// Dropping it waits, unless a wait has failed before, and drops the payload. If the flush is late,
/// the domain holds the payload until it completes; if it never completes, the payload is
/// quarantined.
#[must_use = "the buffer is held until its ticket has completed: poll() or wait()"]
pub struct Revoked<P: Pinned>(pub(super) DropGuard<MappedPayload<P>>);

impl<P: Pinned> Revoked<P> {
    /// Returns the ticket: the point in the sequence of flushes at which it is quiesced.
    pub fn ticket(&self) -> Ticket {
        self.0.ticket()
    }

    /// Returns where the device found it. The addresses are reused only after the payload has been
    /// returned.
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
    pub fn wait(self) -> Result<P, NotQuiesced<P>> {
        self.wait_within(None)
    }

    /// Waits for at most `limit`, counted from now, and returns the buffer: for a deadline of the
    /// caller's own ([`WaitLimit::within`] a duration), before or after that of the flush.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn wait_for(self, limit: WaitLimit) -> Result<P, NotQuiesced<P>> {
        self.wait_within(Some(limit))
    }

    pub(super) fn wait_within(self, limit: Option<WaitLimit>) -> Result<P, NotQuiesced<P>> {
        self.wait_by(&mut Anyone, limit).map(|(payload, _)| payload)
    }

    #[inline(always)]
    pub(super) fn poll_by(self, caller: &mut impl Caller) -> Result<(P, Shared<Space>), Self> {
        if self.has_quiesced() { Ok(self.0.into_inner().release(caller)) } else { Err(self) }
    }

    #[inline(always)]
    pub(super) fn has_quiesced(&self) -> bool {
        self.0.domain.release_late();
        self.0.is_quiesced()
    }

    #[inline(always)]
    pub(super) fn wait_by(
        self,
        caller: &mut impl Caller,
        limit: Option<WaitLimit>,
    ) -> Result<(P, Shared<Space>), NotQuiesced<P>> {
        self.quiesce_by(caller, |domain, ticket| domain.call(|backend| backend.wait(ticket, limit)))
    }

    #[inline(always)]
    pub(super) fn quiesce_by(
        mut self,
        caller: &mut impl Caller,
        wait: impl FnOnce(&Space, Ticket) -> Result<(), BackendError>,
    ) -> Result<(P, Shared<Space>), NotQuiesced<P>> {
        self.0.domain.release_late();
        match self.0.quiesce(wait) {
            Ok(()) => Ok(self.0.into_inner().release(caller)),
            Err(error) => Err(self.keep(error)),
        }
    }

    /// Keeps a buffer that a failed wait has left reachable: to be waited for again if its flush is
    /// late, else quarantined.
    #[cold]
    pub(super) fn keep(self, error: BackendError) -> NotQuiesced<P> {
        if self.0.late {
            return NotQuiesced { revoked: Some(self), error };
        }
        self.0.into_inner().leave(false);
        NotQuiesced { revoked: None, error }
    }

    /// Returns how a wait would end, if it would end now.
    pub(super) fn check(&self) -> Poll<Result<(), BackendError>> {
        if self.is_quiesced() {
            return Poll::Ready(Ok(()));
        }
        match self.0.ticket() {
            Ticket::NEVER => Poll::Ready(Err(BackendError::NotRevoked)),
            ticket => self.0.domain.call(|backend| backend.check(ticket)),
        }
    }

    /// Wakes `waker` when [`check`](Self::check) may find more than now.
    pub(super) fn wake(&self, waker: &Waker) {
        let ticket = self.0.ticket();
        self.0.domain.call(|backend| backend.wake(ticket, waker));
    }

    /// Drops the payload if it is quiesced, and else leaves it with the domain, without waiting.
    pub(super) fn abandon(self) {
        self.0.into_inner().abandon();
    }

    #[inline(always)]
    pub(super) fn belongs_to(&self, domain: &Space) -> bool {
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

impl<P: Pinned> fmt::Debug for Revoked<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Revoked")
            .field("iova", &self.0.addresses.iova)
            .field("ticket", &self.0.ticket())
            .finish_non_exhaustive()
    }
}
