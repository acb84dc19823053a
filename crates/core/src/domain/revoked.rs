//! A payload from its map to its end: [`MappedPayload`], the state of a mapping before and after it
//! is revoked; [`Unrevoked`], a mapping of any direction, with the calls that end it; [`Revoked`],
//! which holds it until no device can reach it and returns it to a thread that polls or waits; and
//! [`QuiescedFuture`], the same as a future. Buffers that nothing waits for any more are left with
//! the domain (`watch`).

use super::backend::{Revocation, Until, Wait};
use super::error::BackendError;
use super::late::Due;
use super::owner::{Anyone, Caller};
use super::space::{Pinned, Space};
use super::watch::watch;
use super::window::{Addresses, Origin};
use crate::addr::{IovaRange, Segment};
use crate::drop_guard::{CleanUp, DropGuard};
use crate::invalidate::{Ticket, WaitLimit};
use crate::known_bad;
use crate::known_bad::Mistake;
use crate::mem::DmaMemory;
use crate::share::Shared;
use core::fmt;
use core::future::{Future, IntoFuture};
use core::pin::Pin;
use core::task::{Context, Poll, Waker};

/// A payload and its addresses, from its map until it is returned: mapped, or revoked.
///
/// Its clean-up revokes access unless that has happened, waits unless a wait has failed before, and
/// drops the payload.
pub(super) struct MappedPayload<P: Pinned> {
    /// Before `domain`, so that a payload that is dropped is dropped first.
    pub(super) payload: P,
    /// Its share of the domain.
    pub(super) domain: Shared<Space>,
    pub(super) addresses: Addresses,
    /// [`Ticket::NEVER`] until it is revoked, and for good if that fails or panics.
    ticket: Ticket,
    revoked: bool,
    /// Whether a wait has ended before the flush completed.
    late: bool,
}

impl<P: Pinned> MappedPayload<P> {
    #[inline(always)]
    pub(super) fn new(domain: Shared<Space>, payload: P, addresses: Addresses) -> Self {
        let ticket = if addresses.is_fixed() { Ticket::COMPLETED } else { Ticket::NEVER };
        Self { payload, domain, addresses, ticket, revoked: false, late: false }
    }

    /// Clears its entries and requests its flush, unless it is mapped for its lifetime.
    #[inline(always)]
    pub(super) fn revoke(&mut self, caller: &mut impl Caller) {
        self.domain.release_late();
        self.begin_revoke(caller);
        let Some(revocation) = self.to_revoke() else { return };
        if let Ok(ticket) = self.domain.revoke_one(revocation) {
            self.set_ticket(ticket);
            self.domain.limit_held(caller, ticket);
        }
    }

    /// Counts it as revoked, with a ticket that never completes: should the backend panic in the
    /// revocation, the payload is quarantined.
    #[inline(always)]
    pub(super) fn begin_revoke(&mut self, caller: &mut impl Caller) {
        self.revoked = true;
        caller.counts(&self.domain).count_revoked(self.addresses.held_bytes());
    }

    /// Records the ticket, once its entries are cleared.
    #[inline(always)]
    pub(super) fn set_ticket(&mut self, ticket: Ticket) {
        self.ticket = ticket;
        self.domain.release_if_mistaken(&self.addresses);
    }

    #[inline(always)]
    fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Returns the range that the backend has to revoke, if any.
    pub(super) fn to_revoke(&self) -> Option<Revocation<'_>> {
        (!self.addresses.is_fixed()).then(|| self.addresses.revocation())
    }

    #[inline(always)]
    fn is_quiesced(&self, caller: &mut impl Caller) -> bool {
        if self.addresses.is_fixed()
            || known_bad::makes(Mistake::BufferEarly)
            || caller.has_seen(self.ticket)
        {
            return true;
        }
        let completed = self.domain.has_completed(self.ticket);
        if completed {
            caller.note_completed(self.ticket);
        }
        completed
    }

    /// Waits by `wait`, unless the caller has seen the ticket complete.
    #[inline(always)]
    pub(super) fn quiesce(
        &mut self,
        caller: &mut impl Caller,
        wait: impl FnOnce(&Space, Ticket) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        if self.addresses.is_fixed() || known_bad::makes(Mistake::BufferEarly) {
            self.late = false;
            return Ok(());
        }
        let result = match self.ticket {
            Ticket::NEVER => Err(BackendError::NotRevoked),
            ticket if caller.has_seen(ticket) => Ok(()),
            ticket => wait(&self.domain, ticket),
        };
        match result {
            Ok(()) => {
                caller.note_completed(self.ticket);
                self.late = false;
                Ok(())
            }
            Err(error) => {
                self.late = error.late_ticket().is_some();
                Err(error)
            }
        }
    }

    /// Returns extent `index` of the payload where the device finds it.
    pub(super) fn extent(&self, index: usize) -> Option<Segment> {
        let (offset, len) = self.payload.extent(index)?;
        let part = self.addresses.iova.part(offset, len)?;
        Some(Segment { iova: part.start(), len: part.len() })
    }

    /// Never releases the payload, nor its addresses.
    pub(super) fn quarantine(self) {
        self.keep(Due::Never);
    }

    /// Returns the payload. Only when quiesced.
    #[inline(always)]
    pub(super) fn release(self, caller: &mut impl Caller) -> (P, Shared<Space>) {
        let Self { payload, domain, addresses, .. } = self;
        caller.counts(&domain).count_no_longer_held(addresses.held_bytes());
        caller.counts(&domain).count_unmapped();
        domain.finish_unmap(caller, addresses);
        (payload, domain)
    }

    /// Leaves the payload with the domain: until its flush completes if `late`, else for good.
    fn leave(self, late: bool) {
        // No call of the backend: should it panic, the payload would be dropped.
        match self.ticket {
            Ticket::NEVER => self.keep(Due::Never),
            ticket => self.keep(if late { Due::At(ticket) } else { Due::Never }),
        }
    }

    fn keep(self, due: Due) {
        let Self { payload, domain, addresses, revoked, .. } = self;
        if revoked {
            domain.counts().count_no_longer_held(addresses.held_bytes());
        }
        domain.keep_reachable(payload, addresses, due, true);
        watch(&domain);
    }

    /// Drops the payload if it is quiesced, and else leaves it with the domain until its flush
    /// completes. Never waits.
    fn abandon(self) {
        if self.domain.is_unwinding() {
            return self.park();
        }
        let held = DropGuard::new(Unfinished(self));
        let quiesced = held.0.is_quiesced(&mut Anyone);
        let held = held.into_inner().0;
        if quiesced {
            drop(held.release(&mut Anyone));
        } else {
            held.leave(true);
        }
    }

    /// Leaves the payload with the domain, without a call of the backend: the domain revokes
    /// access, or finds that the flush has completed, when it is called next. Quarantined is only
    /// what may have been revoked in part.
    fn park(self) {
        if self.addresses.is_fixed() {
            drop(self.release(&mut Anyone));
            return;
        }
        let due = match (self.revoked, self.ticket) {
            (false, _) => Due::Revocation,
            (true, Ticket::NEVER) => Due::Never,
            (true, ticket) => Due::At(ticket),
        };
        self.keep(due);
    }
}

impl<P: Pinned> CleanUp for MappedPayload<P> {
    fn clean_up(self) {
        if self.domain.is_unwinding() {
            return self.park();
        }
        let mut held = DropGuard::new(Unfinished(self));
        if !held.0.revoked {
            held.0.revoke(&mut Anyone);
        }
        let failed = !held.0.late
            && held.0.quiesce(&mut Anyone, |domain, ticket| domain.wait(ticket, None)).is_err();
        let quiesced = held.0.is_quiesced(&mut Anyone);
        let held = held.into_inner().0;
        if quiesced {
            drop(held.release(&mut Anyone));
        } else {
            let late = held.late || !failed;
            held.leave(late);
        }
    }
}

/// A clean-up that a panic (of a backend, or in the drop of a late payload) has ended before the
/// payload was quiesced: it is left with the domain, not dropped with the rest.
struct Unfinished<P: Pinned>(MappedPayload<P>);

impl<P: Pinned> CleanUp for Unfinished<P> {
    fn clean_up(self) {
        self.0.park();
    }
}

/// A [`Mapping`](super::Mapping) without its direction, so that
/// [`Domain::revoke_many`](super::Domain::revoke_many) takes reads and writes in one batch.
#[must_use = "dropping a mapping revokes the device's access"]
pub struct Unrevoked<P: Pinned>(pub(super) DropGuard<MappedPayload<P>>);

impl<P: Pinned> Unrevoked<P> {
    /// Returns where the device finds it.
    pub fn iova(&self) -> IovaRange {
        self.0.addresses.iova
    }

    /// Returns piece `index` of the memory, as [`Pinned::piece`] does.
    pub fn piece(&self, index: usize) -> Option<DmaMemory<'_>> {
        self.0.payload.piece(index)
    }

    /// Returns [extent](Pinned::extent) `index` of the payload where the device finds it.
    pub fn extent(&self, index: usize) -> Option<Segment> {
        self.0.extent(index)
    }

    /// Whether the memory stays mapped for its lifetime, as
    /// [`Mapping::is_fixed`](super::Mapping::is_fixed) does.
    pub fn is_fixed(&self) -> bool {
        self.0.addresses.is_fixed()
    }

    /// Quarantines the payload, for a device that may work on it and cannot be stopped: it stays
    /// mapped, at addresses that are not used again, and is never released. Counted
    /// ([`DomainStats::quarantined`](super::DomainStats::quarantined)).
    ///
    /// For a request that was lost: were its mapping revoked instead, the device's late access
    /// could reach the next mapping at these addresses. Never waits, and does not call the backend.
    pub fn quarantine(self) {
        self.0.into_inner().quarantine();
    }

    /// Revokes access at once, as [`Mapping::revoke`](super::Mapping::revoke) does.
    pub fn revoke(self) -> Revoked<P> {
        self.revoke_by(&mut Anyone)
    }

    #[inline(always)]
    pub(super) fn revoke_by(mut self, caller: &mut impl Caller) -> Revoked<P> {
        self.0.revoke(caller);
        Revoked(self.0)
    }

    /// Revokes access and waits, in place: moving a value that has just been written, as a
    /// [`Revoked`], waits for the stores.
    #[inline(always)]
    pub(super) fn revoke_and_wait(&mut self, caller: &mut impl Caller) -> Result<(), BackendError> {
        self.0.revoke(caller);
        self.0.quiesce(caller, |domain, ticket| domain.wait(ticket, None))
    }

    /// Returns the payload of one that is quiesced.
    #[inline(always)]
    pub(super) fn into_quiesced(self, caller: &mut impl Caller) -> (P, Shared<Space>) {
        self.0.into_inner().release(caller)
    }

    #[inline(always)]
    pub(super) fn belongs_to(&self, domain: &Space) -> bool {
        core::ptr::eq(&raw const *self.0.domain, domain)
    }

    /// Prefetches the table entry that a revocation clears, which is in no cache among very many
    /// mappings, without waiting for it. Nothing changes. Does nothing for a mapping that is in no
    /// owner's window, or longer than 1 MiB.
    #[inline(always)]
    pub(super) fn prefetch(&self) {
        self.0.addresses.prefetch();
    }

    /// Returns the value that waits for the ticket, to be
    /// [revoked](super::Domain::revoke_many) with others.
    pub(super) fn into_revoked(self) -> Revoked<P> {
        Revoked(self.0)
    }
}

impl<P: Pinned> fmt::Debug for Unrevoked<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unrevoked").field("iova", &self.0.addresses.iova).finish_non_exhaustive()
    }
}

/// A buffer whose access has been revoked, but which a device may reach until the ticket has
/// completed.
///
/// `revoked.await` waits in an `async` function; [`quiesced`](Self::quiesced) is the future itself,
/// for an executor.
///
/// Dropping it waits, unless a wait has failed before, and drops the payload: at most until the
/// deadline of the flush (5 s from its submission by default on the software IOMMU; no time where
/// the kernel keeps the table). If the flush is late, the domain holds the payload until it
/// completes; if it never completes, the payload is quarantined. To drop without waiting, drop its
/// [future](Self::quiesced).
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

    /// Whether the ticket has completed: then [`poll`](Self::poll) returns the buffer. Moves
    /// nothing, so it is the cheap check of the first of a queue.
    #[inline(always)]
    pub fn is_quiesced(&self) -> bool {
        self.0.is_quiesced(&mut Anyone)
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
    /// [`NotQuiesced`]: past the deadline with `self`, to be waited for again; without it where the
    /// flush never completes, and the buffer and its addresses are quarantined.
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
        self.0.domain.release_late();
        if self.0.is_quiesced(caller) { Ok(self.0.into_inner().release(caller)) } else { Err(self) }
    }

    #[inline(always)]
    pub(super) fn wait_by(
        self,
        caller: &mut impl Caller,
        limit: Option<WaitLimit>,
    ) -> Result<(P, Shared<Space>), NotQuiesced<P>> {
        self.quiesce_by(caller, |domain, ticket| domain.wait(ticket, limit))
    }

    #[inline(always)]
    pub(super) fn quiesce_by(
        mut self,
        caller: &mut impl Caller,
        wait: impl FnOnce(&Space, Ticket) -> Result<(), BackendError>,
    ) -> Result<(P, Shared<Space>), NotQuiesced<P>> {
        self.0.domain.release_late();
        match self.0.quiesce(caller, wait) {
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

    /// Returns how a [`wait`](Self::wait) would end if it ended now; `Pending` while the flush is in
    /// flight. Moves nothing and never waits.
    ///
    /// For a program with an event loop of its own, which has [`wake`](Self::wake) write to it.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait), which then returns the same at once.
    pub fn check(&self) -> Poll<Result<(), BackendError>> {
        self.check_by(Wait::Not)
    }

    /// Wakes `waker` once, when [`check`](Self::check) may find more than now, and at once if it
    /// does: so check again after this returns. It may wake early, and then is called again.
    ///
    /// Where a [`wait`](Self::wait) has found the flush late, the deadline wakes no more: only its
    /// end does.
    pub fn wake(&self, waker: &Waker) {
        if self.check_with(waker).is_ready() {
            waker.wake_by_ref();
        }
    }

    /// Returns what its future finds: as [`check`](Self::check), but a flush that is known to be
    /// late is awaited until it ends. Where that is `Pending`, wakes `waker` when there is more.
    fn check_with(&self, waker: &Waker) -> Poll<Result<(), BackendError>> {
        let until = if self.0.late { Until::Completion } else { Until::Deadline };
        self.check_by(Wait::Wake(until, waker))
    }

    /// Returns how a wait would end if it ended now.
    fn check_by(&self, wait: Wait<'_>) -> Poll<Result<(), BackendError>> {
        if self.0.addresses.is_fixed() || known_bad::makes(Mistake::BufferEarly) {
            return Poll::Ready(Ok(()));
        }
        match self.0.ticket() {
            Ticket::NEVER => Poll::Ready(Err(BackendError::NotRevoked)),
            ticket => self.0.domain.call(|backend| backend.wait(ticket, wait)),
        }
    }

    /// Drops the payload if it is quiesced, and else leaves it with the domain, without waiting.
    pub(super) fn abandon(self) {
        self.0.into_inner().abandon();
    }

    #[inline(always)]
    pub(super) fn belongs_to(&self, domain: &Space) -> bool {
        core::ptr::eq(&raw const *self.0.domain, domain)
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

impl Space {
    /// Returns the addresses of a mapping that no device can reach.
    #[inline(always)]
    pub(super) fn finish_unmap(&self, caller: &mut impl Caller, addresses: Addresses) {
        match addresses.origin {
            Origin::Space if known_bad::makes(Mistake::IovaEarly) => {}
            Origin::Window(share) if known_bad::makes(Mistake::WindowEarly) => {
                self.close_window(share.into_shared().into_inner());
            }
            _ => caller.release(self, addresses),
        }
    }

    /// Releases the addresses of a mapping that is not quiesced, if that mistake is switched on.
    pub(super) fn release_if_mistaken(&self, Addresses { iova, origin }: &Addresses) {
        match origin {
            Origin::Space if known_bad::makes(Mistake::IovaEarly) => self.free_iova(*iova),
            Origin::Window(share) if known_bad::makes(Mistake::WindowEarly) => {
                share.window().give_back(*iova)
            }
            _ => {}
        }
    }
}

/// The future of a [`Revoked`]: resolves to the buffer when no device can reach it, or to the error
/// that [`Revoked::wait`] would return.
///
/// It needs no particular executor, and does not keep one busy: between polls it waits for the
/// backend to [wake](super::Wait::Wake) it when the flush has completed or its deadline has
/// passed. Past the deadline it resolves to [`NotQuiesced`] with the buffer, whose next future has
/// no deadline: it waits until the flush has completed or never can, so a program that wants to
/// give up again brings a timer of its own.
///
/// Dropping it early never waits, and drops the buffer: the domain holds it until its flush has
/// completed, and then frees it ([`Domain::release_late`](super::Domain::release_late)), also where
/// this was the last handle of its domain. To keep the buffer, poll the future by reference
/// (`&mut future` in a `select!`) and await it again.
#[must_use = "the buffer is held until its ticket has completed: await it"]
pub struct QuiescedFuture<P: Pinned>(Option<Revoked<P>>);

/// Nothing in it is pinned in place.
impl<P: Pinned> Unpin for QuiescedFuture<P> {}

impl<P: Pinned> Revoked<P> {
    /// Returns the future of the buffer: what `revoked.await` polls, for `block_on`, `select!` and
    /// the like, which take a `Future` and not an `IntoFuture`.
    pub fn quiesced(self) -> QuiescedFuture<P> {
        QuiescedFuture(Some(self))
    }
}

impl<P: Pinned> IntoFuture for Revoked<P> {
    type Output = Result<P, NotQuiesced<P>>;
    type IntoFuture = QuiescedFuture<P>;

    fn into_future(self) -> QuiescedFuture<P> {
        self.quiesced()
    }
}

impl<P: Pinned> Future for QuiescedFuture<P> {
    type Output = Result<P, NotQuiesced<P>>;

    /// After completion it stays pending.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(revoked) = &self.0 else { return Poll::Pending };
        let Poll::Ready(result) = revoked.check_with(context.waker()) else {
            return Poll::Pending;
        };
        let Some(revoked) = self.0.take() else { return Poll::Pending };
        let ended = revoked.quiesce_by(&mut Anyone, |_, _| result);
        Poll::Ready(ended.map(|(payload, _)| payload))
    }
}

impl<P: Pinned> Drop for QuiescedFuture<P> {
    fn drop(&mut self) {
        if let Some(revoked) = self.0.take() {
            revoked.abandon();
        }
    }
}

impl<P: Pinned> fmt::Debug for QuiescedFuture<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("QuiescedFuture").field(&self.0).finish()
    }
}
