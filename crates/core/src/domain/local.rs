//! [`DomainLocal`]: one owner's handle to a domain.

use super::error::BackendError;
use super::mapping::{MapError, MapManyError, Mapping};
use super::owner::Owner;
use super::revoked::{NotQuiesced, Revoked, Unrevoked};
use super::space::{Domain, Pinned, Space};
use crate::access::Direction;
use crate::addr::Iova;
use crate::invalidate::{Ticket, WaitLimit};
use crate::share::{Shared, Stock};
use alloc::vec::Vec;
use core::fmt;

/// The system's number for what [`BackendError::NoMemory`] is.
const ENOMEM: i32 = 12;

/// One owner's handle to a domain: one for each thread that maps and unmaps.
///
/// A mapping made with it is ended with it, by [`unmap`](Self::unmap), or by
/// [`revoke`](Self::revoke) or [`revoke_many`](Self::revoke_many) and later [`wait`](Self::wait) or
/// [`poll`](Self::poll); see the [module](super) for what each means. The handle keeps its domain,
/// as its mappings do, and can move between threads.
///
/// # Addresses
/// Up to 1 MiB its mappings get addresses from *windows* that are the owner's alone: 2 MiB of
/// address space, allocated in order, so that mappings made one after another are contiguous and
/// share a table page and a flush. A window is used again when all that was mapped in it has been
/// returned. Longer mappings get addresses from the domain.
///
/// An owner holds a bounded reserve: at most twice the addresses that its mappings in windows had
/// at their peak, and 128 MiB, and a table page for each of these windows. Up to 128 windows (256
/// MiB) without a mapping are kept for its next maps. Where a map of any owner finds no addresses
/// or no table page left, those of all owners are closed; an owner that makes no calls then keeps
/// one window, wherever that is, and besides those whose mappings others have ended, until it maps
/// again or is dropped. A handle that is forgotten (`mem::forget`) keeps these for good, and stays
/// counted in [`DomainStats::owners`](super::DomainStats::owners).
///
/// Mappings that end elsewhere (dropped, or waited for by another thread) are returned to their
/// owner's windows, or, when that has been dropped, to the domain with the last of their window.
///
/// Its calls count in counters of their own, take no lock and make no atomic read-modify-write,
/// except where an owner gets or returns a window (once in 512 pages), and in the
/// [`Backend`](super::Backend).
pub struct DomainLocal {
    /// Before `domain`, which it is dropped before: also if its retirement panics.
    pub(super) owner: Owner,
    pub(super) domain: Stock<Space>,
}

impl Domain {
    /// Returns a new owner's handle. Takes a lock.
    pub fn local(&self) -> DomainLocal {
        DomainLocal { owner: self.space.register_owner(), domain: self.space.stock() }
    }
}

impl DomainLocal {
    /// Returns a handle of the domain.
    pub(super) fn domain(&self) -> Domain {
        Domain { space: self.domain.share() }
    }

    /// Maps `payload` for the device, as [`Domain::map`] does.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn map<P: Pinned, D: Direction>(
        &mut self,
        payload: P,
        direction: D,
    ) -> Result<Mapping<P, D>, MapError<P>> {
        let mapped = self.domain.map_payload(&mut self.owner, payload, direction, None);
        let (payload, addresses) = mapped.map_err(|error| error.watched(|| self.domain.share()))?;
        Ok(Mapping::new(self.domain.issue(), payload, addresses))
    }

    /// Maps `payload` at addresses up to `limit`, as [`Domain::map_up_to`] does: from the domain,
    /// not from a window.
    ///
    /// # Errors
    /// As there.
    pub fn map_up_to<P: Pinned, D: Direction>(
        &mut self,
        payload: P,
        direction: D,
        limit: Iova,
    ) -> Result<Mapping<P, D>, MapError<P>> {
        let mapped = self.domain.map_payload(&mut self.owner, payload, direction, Some(limit));
        let (payload, addresses) = mapped.map_err(|error| error.watched(|| self.domain.share()))?;
        Ok(Mapping::new(self.domain.issue(), payload, addresses))
    }

    /// Maps all of `payloads`, or none. Up to 1 MiB altogether they are contiguous, in their order,
    /// unless the address space has no free range as long, or some stay mapped for their lifetime.
    ///
    /// # Errors
    /// [`MapManyError`]: nothing is mapped, and the payloads are returned. If one is refused, those
    /// before it are revoked with one flush, which is waited for.
    pub fn map_many<P: Pinned, D: Direction>(
        &mut self,
        payloads: impl IntoIterator<Item = P>,
        direction: D,
    ) -> Result<Vec<Mapping<P, D>>, MapManyError<P>> {
        let payloads: Vec<P> = payloads.into_iter().collect();
        let mut mappings = Vec::new();
        if mappings.try_reserve_exact(payloads.len()).is_err() {
            let bytes = payloads.len().saturating_mul(size_of::<Mapping<P, D>>());
            let error =
                BackendError::NoMemory { what: "the mappings of a batch", bytes, code: ENOMEM };
            return Err(MapManyError { payloads, index: 0, error });
        }
        self.owner.prepare(&self.domain, super::mapping::total_bytes(&payloads));
        let mut payloads = payloads.into_iter();
        let refused = payloads.find_map(|payload| match self.map(payload, direction) {
            Ok(mapping) => {
                mappings.push(mapping);
                None
            }
            Err(refused) => Some(refused),
        });
        self.owner.end_batch(&self.domain);
        let Some(MapError { payload, error }) = refused else { return Ok(mappings) };
        let index = mappings.len();
        let mut returned = self.undo(mappings);
        returned.extend(payload.into_iter().chain(payloads));
        Err(MapManyError { payloads: returned, index, error })
    }

    /// Revokes the mappings of a batch that is refused, and returns their payloads.
    fn undo<P: Pinned, D: Direction>(&mut self, mappings: Vec<Mapping<P, D>>) -> Vec<P> {
        let mut revoked = Vec::with_capacity(mappings.len());
        self.revoke_many(mappings, &mut revoked);
        revoked.into_iter().filter_map(|one| self.wait(one).ok()).collect()
    }

    /// Revokes access, as [`Mapping::revoke`] does. Takes a [`Mapping`], or one without its
    /// direction.
    ///
    /// The table entries are cleared and the flush is requested when this returns; its request
    /// takes a lock that all owners share, once. [`revoke_many`](Self::revoke_many) requests one
    /// flush for many.
    #[inline(always)]
    pub fn revoke<P: Pinned>(&mut self, mapping: impl Into<Unrevoked<P>>) -> Revoked<P> {
        let unrevoked = mapping.into();
        if !unrevoked.belongs_to(&self.domain) {
            return unrevoked.revoke();
        }
        unrevoked.revoke_by(&mut self.owner)
    }

    /// Revokes many mappings with one flush, and appends them to `revoked`, as
    /// [`Domain::revoke_many`] does. Mappings of different directions are passed as [`Unrevoked`]:
    /// `[Unrevoked::from(received), sent.into()]`.
    ///
    /// Allocates nothing if `revoked` has the capacity.
    pub fn revoke_many<P: Pinned>(
        &mut self,
        mappings: impl IntoIterator<Item: Into<Unrevoked<P>>>,
        revoked: &mut Vec<Revoked<P>>,
    ) {
        self.domain.revoke_many_by(&mut self.owner, mappings, revoked);
    }

    /// Revokes access and waits, as [`Mapping::unmap`] does.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn unmap<P: Pinned>(
        &mut self,
        mapping: impl Into<Unrevoked<P>>,
    ) -> Result<P, BackendError> {
        let mut unrevoked = mapping.into();
        if !unrevoked.belongs_to(&self.domain) {
            return Ok(unrevoked.revoke().wait()?);
        }
        match unrevoked.revoke_and_wait(&mut self.owner) {
            Ok(()) => {
                let held = unrevoked.into_quiesced(&mut self.owner);
                Ok(self.take_back(held))
            }
            Err(error) => Err(unrevoked.into_revoked().keep(error).error),
        }
    }

    /// Returns the buffer if its ticket has completed, as [`Revoked::poll`] does.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn poll<P: Pinned>(&mut self, revoked: Revoked<P>) -> Result<P, Revoked<P>> {
        if !revoked.belongs_to(&self.domain) {
            return revoked.poll();
        }
        revoked.poll_by(&mut self.owner).map(|held| self.take_back(held))
    }

    /// Waits for the buffer, as [`Revoked::wait`] does.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn wait<P: Pinned>(&mut self, revoked: Revoked<P>) -> Result<P, NotQuiesced<P>> {
        self.wait_within(revoked, None)
    }

    /// Waits for at most `limit`, for instance [`WaitLimit::within`] a duration, as
    /// [`Revoked::wait_for`] does.
    ///
    /// # Errors
    /// As there.
    pub fn wait_for<P: Pinned>(
        &mut self,
        revoked: Revoked<P>,
        limit: WaitLimit,
    ) -> Result<P, NotQuiesced<P>> {
        self.wait_within(revoked, Some(limit))
    }

    /// Waits for all of `revoked` at once, for at most `limit` from now altogether, and yields the
    /// outcome of each in its order. One wait, of the last of their tickets; those of another
    /// domain are waited for one by one.
    ///
    /// Buffers that are not taken from the iterator are dropped as any [`Revoked`] is.
    ///
    /// # Errors
    /// As for [`wait_for`](Self::wait_for), for each: those whose flush has not completed are
    /// returned, to be waited for again, or quarantined if it never completes.
    pub fn wait_many_for<P: Pinned>(
        &mut self,
        revoked: Vec<Revoked<P>>,
        limit: WaitLimit,
    ) -> impl Iterator<Item = Result<P, NotQuiesced<P>>> {
        let here = revoked.iter().filter(|one| one.belongs_to(&self.domain));
        let last = here.map(Revoked::ticket).filter(|ticket| *ticket != Ticket::NEVER).max();
        let waited = last.map_or(Ok(()), |last| self.domain.wait(last, Some(limit)));
        revoked.into_iter().map(move |one| {
            if !one.belongs_to(&self.domain) {
                return one.wait_within(Some(limit));
            }
            let outcome = one.quiesce_by(&mut self.owner, |domain, ticket| match &waited {
                Err(error) if !domain.has_completed(ticket) => {
                    Err(error.clone().for_ticket(ticket))
                }
                _ => Ok(()),
            });
            outcome.map(|held| self.take_back(held))
        })
    }

    #[inline(always)]
    fn wait_within<P: Pinned>(
        &mut self,
        revoked: Revoked<P>,
        limit: Option<WaitLimit>,
    ) -> Result<P, NotQuiesced<P>> {
        if !revoked.belongs_to(&self.domain) {
            return revoked.wait_within(limit);
        }
        revoked.wait_by(&mut self.owner, limit).map(|held| self.take_back(held))
    }

    #[inline(always)]
    fn take_back<P>(&mut self, (payload, share): (P, Shared<Space>)) -> P {
        self.domain.take_back(share);
        payload
    }
}

impl Drop for DomainLocal {
    /// O(windows held).
    fn drop(&mut self) {
        self.domain.retire_owner(&mut self.owner);
    }
}

impl fmt::Debug for DomainLocal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DomainLocal").field("domain", &self.domain()).finish_non_exhaustive()
    }
}

/// An owner's addresses without a mapping, for benchmarks of their allocation. Dropping them leaves
/// them in use for good.
#[cfg(feature = "bench-internals")]
#[derive(Debug)]
#[must_use = "what is dropped stays in use"]
pub struct BareAddresses(super::window::Addresses);

#[cfg(feature = "bench-internals")]
impl BareAddresses {
    /// Returns the range.
    pub fn range(&self) -> crate::addr::IovaRange {
        self.0.iova
    }
}

#[cfg(feature = "bench-internals")]
impl DomainLocal {
    /// Allocates `len` bytes of addresses, whole pages, as a map does.
    ///
    /// # Errors
    /// As for an allocation of the domain's address space.
    #[inline(always)]
    pub fn alloc_addresses(&mut self, len: u64) -> Result<BareAddresses, BackendError> {
        let align = || super::space::PAGE_BYTES as u64;
        super::owner::Caller::alloc(&mut self.owner, &self.domain, len, align).map(BareAddresses)
    }

    /// Frees them, as the end of a mapping does.
    #[inline(always)]
    pub fn free_addresses(&mut self, addresses: BareAddresses) {
        super::owner::Caller::release(&mut self.owner, &self.domain, addresses.0);
    }
}
