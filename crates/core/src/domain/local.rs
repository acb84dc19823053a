//! One owner's handle to a domain.

use super::error::BackendError;
use super::map::MapManyError;
use super::mapping::{MapError, Mapping, Unrevoked};
use super::owner::Owner;
use super::payload::Pinned;
use super::revoked::{NotQuiesced, Revoked};
use super::space::Domain;
use crate::access::Direction;
use crate::addr::Iova;
use crate::invalidate::{Ticket, WaitLimit};
use crate::share::{Hold, Shared, Stock};
use alloc::vec::Vec;
use core::fmt;
use core::ops::Deref;

/// One owner's handle to a domain: one for each thread that maps and unmaps. It can move between
/// threads.
///
/// `H` is how it holds its domain: a [`Stock`] of shares of a [`Shared`] domain (the default), or a
/// borrow (`&Domain`). Its mappings do the same.
///
/// Up to 1 MiB its mappings get addresses from *windows* that are the owner's alone: 2 MiB of
/// address space, handed out in order, so that mappings made one after another are contiguous and
/// share a table page and a flush. A window is used again when all that was mapped in it has been
/// returned. Longer mappings get addresses from the domain.
///
/// What an owner holds back is bounded: at most twice the addresses that its mappings in windows
/// had at their peak, and 128 MiB, and a table page for each of these windows. Up to 16 windows (32
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
/// except where windows change hands (once in 512 pages), and in the [`Backend`](super::Backend).
///
/// Everything else that a [`Domain`] offers is available through `Deref`.
///
/// ```
/// # use pinfold_core::access::Access;
/// # use pinfold_core::addr::{Iova, IovaRange};
/// # use pinfold_core::domain::{Backend, BackendError, BackendStats, DomainId, Pinned};
/// # use pinfold_core::invalidate::{Ticket, WaitLimit};
/// # use pinfold_core::mem::DmaMemory;
/// # use pinfold_core::table::PinnedLeaf;
/// # use std::task::Poll;
/// use pinfold_core::access::FromDevice;
/// use pinfold_core::domain::Domain;
/// use pinfold_core::iova::IovaSpace;
/// use pinfold_core::share::Shared;
/// # struct Toy;
/// # impl Backend for Toy {
/// #     fn name(&self) -> &'static str { "toy" }
/// #     unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> { Ok(()) }
/// #     fn unregister_memory(&self, _: DmaMemory) {}
/// #     fn map(&self, _: IovaRange, _: DmaMemory, _: Access) -> Result<(), BackendError> { Ok(()) }
/// #     fn revoke(&self, _: &mut dyn Iterator<Item = (IovaRange, Option<&PinnedLeaf>)>) -> Result<Ticket, BackendError> { Ok(Ticket::COMPLETED) }
/// #     fn check(&self, _: Ticket) -> Poll<Result<(), BackendError>> { Poll::Ready(Ok(())) }
/// #     fn wait(&self, _: Ticket, _: Option<WaitLimit>) -> Result<(), BackendError> { Ok(()) }
/// #     fn stats(&self) -> BackendStats { BackendStats::default() }
/// # }
/// # #[repr(align(4096))]
/// # struct Page([u8; 4096]);
/// # struct Buffer(std::ptr::NonNull<Page>);
/// # impl Buffer { fn new() -> Self { Self(std::ptr::NonNull::from(Box::leak(Box::new(Page([0; 4096]))))) } }
/// # unsafe impl Send for Buffer {}
/// # unsafe impl Pinned for Buffer {
/// #     fn memory(&self) -> DmaMemory<'_> { unsafe { DmaMemory::from_raw(self.0.cast(), 4096) } }
/// #     fn fixed_iova(&self, _: DomainId) -> Option<Iova> { None }
/// # }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
///
/// // `Toy` is a `Backend` and `Buffer` is `Pinned`; `pinfold` has real ones.
/// let domain = Shared::new(Domain::new(Box::new(Toy), IovaSpace::new(39)?));
/// let mut local = domain.local(); // one per thread
///
/// // One at a time: `revoke` returns at once, and `wait` returns the buffer when no device can reach it.
/// let mapping = local.map(Buffer::new(), FromDevice)?;
/// let revoked = local.revoke(mapping);
/// let buffer = local.wait(revoked)?;
///
/// // Many, with one flush: so the first wait is the only long one.
/// let mappings = local.map_many([buffer, Buffer::new()], FromDevice)?;
/// let mut revoked = Vec::with_capacity(mappings.len());
/// local.revoke_many(mappings, &mut revoked);
/// println!("the flush is done: {}", local.has_quiesced(&revoked[0])); // never waits
/// let buffers: Result<Vec<_>, _> = revoked.into_iter().map(|one| local.wait(one)).collect();
/// assert_eq!(buffers?.len(), 2);
/// # Ok(())
/// # }
/// ```
pub struct Local<H: Hold<Target = Domain> = Stock<Domain>> {
    /// Before `domain`, which it is dropped before: also if its retirement panics.
    pub(super) owner: Owner,
    pub(super) domain: H,
}

impl Domain {
    /// Returns a new owner's handle that borrows the domain, as its mappings do. Takes a lock.
    pub fn local(&self) -> Local<&Self> {
        Local::new(self)
    }
}

impl Shared<Domain> {
    /// Returns a new owner's handle that keeps the domain alive, as its mappings do. Takes a lock.
    pub fn local(&self) -> Local {
        Local::new(self.stock())
    }
}

impl<H: Hold<Target = Domain>> Local<H> {
    fn new(domain: H) -> Self {
        Self { owner: domain.register_owner(), domain }
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
    ) -> Result<Mapping<P, D, H::Item>, MapError<P>> {
        let (payload, addresses) =
            self.domain.map_payload(&mut self.owner, payload, direction, None)?;
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
    ) -> Result<Mapping<P, D, H::Item>, MapError<P>> {
        let (payload, addresses) =
            self.domain.map_payload(&mut self.owner, payload, direction, Some(limit))?;
        Ok(Mapping::new(self.domain.issue(), payload, addresses))
    }

    /// Maps all of `payloads`, or none. Up to 1 MiB altogether they are contiguous, in their order,
    /// unless the address space has no free range as long, or some stay mapped for their lifetime.
    ///
    /// # Errors
    /// [`MapManyError`]: nothing is mapped, and the payloads are returned. If one is refused, those before it are revoked
    /// with one flush, which is waited for.
    #[expect(clippy::type_complexity, reason = "the types are those of `map`, in a `Vec`")]
    pub fn map_many<P: Pinned, D: Direction>(
        &mut self,
        payloads: impl IntoIterator<Item = P>,
        direction: D,
    ) -> Result<Vec<Mapping<P, D, H::Item>>, MapManyError<P>> {
        let payloads: Vec<P> = payloads.into_iter().collect();
        self.owner.prepare(&self.domain, super::map::total_bytes(&payloads));
        let mut mappings = Vec::with_capacity(payloads.len());
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

    /// Ends mappings that were made for nothing, and returns their payloads.
    fn undo<P: Pinned, D: Direction>(&mut self, mappings: Vec<Mapping<P, D, H::Item>>) -> Vec<P> {
        let mut revoked = Vec::with_capacity(mappings.len());
        self.revoke_many(mappings, &mut revoked);
        revoked.into_iter().filter_map(|one| self.wait(one).ok()).collect()
    }

    /// Revokes access, as [`Mapping::revoke`] does. Takes a [`Mapping`], or one without its
    /// direction.
    ///
    /// The table entries are cleared and the flush is requested when this returns; its request takes
    /// a lock that all owners share, once. [`revoke_many`](Self::revoke_many) requests one flush for
    /// many.
    #[inline(always)]
    pub fn revoke<P: Pinned>(
        &mut self,
        mapping: impl Into<Unrevoked<P, H::Item>>,
    ) -> Revoked<P, H::Item> {
        let unrevoked = mapping.into();
        if !unrevoked.belongs_to(&self.domain) {
            return unrevoked.revoke();
        }
        unrevoked.revoke_by(&mut self.owner)
    }

    /// Revokes many mappings with one flush, and appends them to `revoked`, as
    /// [`Domain::revoke_all`] does. Mappings of different directions are passed as [`Unrevoked`]:
    /// `[Unrevoked::from(received), sent.into()]`.
    ///
    /// Allocates nothing if `revoked` has the capacity.
    pub fn revoke_many<P: Pinned>(
        &mut self,
        mappings: impl IntoIterator<Item: Into<Unrevoked<P, H::Item>>>,
        revoked: &mut Vec<Revoked<P, H::Item>>,
    ) {
        self.domain.revoke_all_by(&mut self.owner, mappings, revoked);
    }

    /// Revokes access and waits, as [`Mapping::unmap`] does.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn unmap<P: Pinned>(
        &mut self,
        mapping: impl Into<Unrevoked<P, H::Item>>,
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
    pub fn poll<P: Pinned>(
        &mut self,
        revoked: Revoked<P, H::Item>,
    ) -> Result<P, Revoked<P, H::Item>> {
        if !revoked.belongs_to(&self.domain) {
            return revoked.poll();
        }
        revoked.poll_by(&mut self.owner).map(|held| self.take_back(held))
    }

    /// Returns whether [`poll`](Self::poll) would return the buffer, without moving the value: ask
    /// it of the first of a queue, and take that one out and [wait](Self::wait) for it when it is
    /// true.
    #[inline(always)]
    pub fn has_quiesced<P: Pinned>(&mut self, revoked: &Revoked<P, H::Item>) -> bool {
        revoked.has_quiesced()
    }

    /// Waits for the buffer, as [`Revoked::wait`] does.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn wait<P: Pinned>(
        &mut self,
        revoked: Revoked<P, H::Item>,
    ) -> Result<P, NotQuiesced<P, H::Item>> {
        self.wait_within(revoked, None)
    }

    /// Waits for at most `limit`, for instance [`WaitLimit::within`] a duration, as
    /// [`Revoked::wait_for`] does.
    ///
    /// # Errors
    /// As there.
    pub fn wait_for<P: Pinned>(
        &mut self,
        revoked: Revoked<P, H::Item>,
        limit: WaitLimit,
    ) -> Result<P, NotQuiesced<P, H::Item>> {
        self.wait_within(revoked, Some(limit))
    }

    /// Waits for all of `revoked` at once, for at most `limit` from now altogether, and yields the
    /// outcome of each in its order. One wait, of the last of their tickets; those of another
    /// domain are waited for one by one.
    ///
    /// What the iterator is not asked for is dropped as any [`Revoked`] is.
    ///
    /// # Errors
    /// As for [`wait_for`](Self::wait_for), for each: those whose flush has not completed are
    /// returned, to be waited for again, or quarantined if it never completes.
    pub fn wait_many_for<P: Pinned>(
        &mut self,
        revoked: Vec<Revoked<P, H::Item>>,
        limit: WaitLimit,
    ) -> impl Iterator<Item = Result<P, NotQuiesced<P, H::Item>>> {
        let here = revoked.iter().filter(|one| one.belongs_to(&self.domain));
        let last = here.map(Revoked::ticket).filter(|ticket| *ticket != Ticket::NEVER).max();
        let waited =
            last.map_or(Ok(()), |last| self.domain.call(|backend| backend.wait(last, Some(limit))));
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
        revoked: Revoked<P, H::Item>,
        limit: Option<WaitLimit>,
    ) -> Result<P, NotQuiesced<P, H::Item>> {
        if !revoked.belongs_to(&self.domain) {
            return revoked.wait_within(limit);
        }
        revoked.wait_by(&mut self.owner, limit).map(|held| self.take_back(held))
    }

    #[inline(always)]
    fn take_back<P>(&mut self, (payload, share): (P, H::Item)) -> P {
        self.domain.take_back(share);
        payload
    }
}

impl<H: Hold<Target = Domain>> Deref for Local<H> {
    type Target = Domain;

    fn deref(&self) -> &Domain {
        &self.domain
    }
}

impl<H: Hold<Target = Domain>> Drop for Local<H> {
    /// O(windows held).
    fn drop(&mut self) {
        self.domain.retire_owner(&mut self.owner);
    }
}

impl<H: Hold<Target = Domain>> fmt::Debug for Local<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Local").field("domain", &*self.domain).finish_non_exhaustive()
    }
}
