//! [`MappedPayload`]: a payload in a domain, from its map until it is returned.

use super::addresses::Addresses;
use super::error::BackendError;
use super::owner::{Anyone, Caller};
use super::payload::Pinned;
use super::pending::Due;
use super::space::Space;
use crate::addr::IovaRange;
use crate::drop_guard::{CleanUp, DropGuard};
use crate::invalidate::Ticket;
use crate::known_bad::{self, Mistake};
use crate::share::Shared;
use crate::table::PinnedLeaf;

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
    pub(super) late: bool,
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
        let Some(range) = self.to_revoke() else { return };
        let revoked = self.domain.call(|backend| backend.revoke(&mut core::iter::once(range)));
        if let Ok(ticket) = revoked {
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

    /// Notes the ticket, once its entries are cleared.
    #[inline(always)]
    pub(super) fn set_ticket(&mut self, ticket: Ticket) {
        self.ticket = ticket;
        self.domain.release_if_mistaken(&self.addresses);
    }

    #[inline(always)]
    pub(super) fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Returns the range that the backend has to revoke, if any, with the pin of its window.
    pub(super) fn to_revoke(&self) -> Option<(IovaRange, Option<&PinnedLeaf>)> {
        (!self.addresses.is_fixed()).then(|| (self.addresses.iova, self.addresses.pin()))
    }

    #[inline(always)]
    pub(super) fn is_quiesced(&self) -> bool {
        self.addresses.is_fixed()
            || known_bad::makes(Mistake::BufferEarly)
            || self.domain.has_completed(self.ticket)
    }

    /// Waits by `wait`.
    #[inline(always)]
    pub(super) fn quiesce(
        &mut self,
        wait: impl FnOnce(&Space, Ticket) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        if self.addresses.is_fixed() || known_bad::makes(Mistake::BufferEarly) {
            self.late = false;
            return Ok(());
        }
        let result = match self.ticket {
            Ticket::NEVER => Err(BackendError::NotRevoked),
            ticket => wait(&self.domain, ticket),
        };
        match result {
            Ok(()) => {
                self.late = false;
                Ok(())
            }
            Err(error) => {
                self.late = error.late_ticket().is_some();
                Err(error)
            }
        }
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
    pub(super) fn leave(self, late: bool) {
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
    }

    /// Drops the payload if it is quiesced, and else leaves it with the domain until its flush
    /// completes. Never waits.
    pub(super) fn abandon(self) {
        if self.domain.is_unwinding() {
            return self.park();
        }
        let held = DropGuard::new(Unfinished(self));
        let quiesced = held.0.is_quiesced();
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
            && held
                .0
                .quiesce(|domain, ticket| domain.call(|backend| backend.wait(ticket, None)))
                .is_err();
        let quiesced = held.0.is_quiesced();
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
