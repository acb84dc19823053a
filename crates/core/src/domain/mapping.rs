//! [`Mapping`]: a payload that a device can reach, and why a map is refused.

use super::error::BackendError;
use super::owner::{Anyone, Caller};
use super::payload::{Payload, Pinned};
use super::revoked::{MappedPayload, Revoked};
use super::space::{Domain, DomainId, Space};
use super::window::Addresses;
use crate::access::Direction;
use crate::addr::{IovaRange, Segment};
use crate::drop_guard::DropGuard;
use crate::mem::DmaMemory;
use crate::share::Shared;
use alloc::vec::Vec;
use core::fmt;
use core::marker::PhantomData;

/// A buffer mapped into a domain: the device can reach it, and no reference into it exists.
///
/// It owns what it refers to: it keeps its domain, and can be stored in a struct beside it.
///
/// Dropping it revokes access, waits, and drops the payload. If the flush is late, the domain holds
/// the payload until it completes; if it never completes, the payload is quarantined.
#[must_use = "dropping a mapping revokes the device's access"]
pub struct Mapping<P: Pinned, D: Direction>(DropGuard<MappedPayload<P>>, PhantomData<D>);

impl<P: Pinned, D: Direction> Mapping<P, D> {
    #[inline(always)]
    pub(super) fn new(domain: Shared<Space>, payload: P, addresses: Addresses) -> Self {
        Self(DropGuard::new(MappedPayload::new(domain, payload, addresses)), PhantomData)
    }

    /// Returns a handle of the domain that it is mapped in.
    pub fn domain(&self) -> Domain {
        Domain { space: self.0.domain.clone() }
    }

    /// Returns where the device finds it: one contiguous range, whether the memory is in one piece
    /// or in several.
    pub fn iova(&self) -> IovaRange {
        self.0.addresses.iova
    }

    /// Returns all of it as one segment.
    pub fn segment(&self) -> Segment {
        Segment { iova: self.0.addresses.iova.start(), len: self.0.addresses.iova.len() }
    }

    /// Returns the memory, to be read and written beside the device: the first
    /// [piece](Self::piece).
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

    /// Whether the memory stays mapped for its lifetime: then revoking the mapping does not revoke
    /// access.
    pub fn is_fixed(&self) -> bool {
        self.0.addresses.is_fixed()
    }

    /// Has the processor load what a revocation needs, and does not wait for it: for a program that
    /// knows some time before which mapping it revokes next, as from a list of completions. Among
    /// very many mappings that is memory which is in no cache.
    ///
    /// Nothing changes. It loads the first table entry of a mapping that an owner made in one of
    /// its windows, of at most 1 MiB; for others it does nothing. The mapping itself, and its
    /// window's record, are read at once: where they are in no cache either, a call of
    /// [`mem::prefetch`](crate::mem::prefetch) on the handle comes before.
    /// [`DomainLocal::revoke_many`](super::DomainLocal::revoke_many) does this for its batch by itself.
    #[inline(always)]
    pub fn prefetch(&self) {
        self.0.addresses.prefetch();
    }

    /// Revokes access at once; the buffer is held until the ticket has completed.
    ///
    /// It does not fail: where the backend cannot revoke, the ticket is
    /// [`Ticket::NEVER`](crate::invalidate::Ticket::NEVER).
    pub fn revoke(self) -> Revoked<P> {
        Unrevoked::from(self).revoke()
    }

    /// Revokes access and waits: when this returns, no device can reach the buffer.
    ///
    /// To keep the buffer if the flush is late, use [`revoke`](Self::revoke) and [`Revoked::wait`].
    ///
    /// # Errors
    /// [`BackendError::Flush`]: a device may still reach the buffer. If the flush is late the domain holds the buffer until
    /// it completes; otherwise, and with [`BackendError::NotRevoked`], the buffer and its addresses
    /// are quarantined.
    pub fn unmap(self) -> Result<P, BackendError> {
        Ok(self.revoke().wait()?)
    }
}

// SAFETY: each segment is part of the mapping's range, which is mapped for `D`, never changes, and
// lasts until the value is dropped, unmapped or revoked; all of these take it by value. The extents
// never change by the contract of `Pinned`.
unsafe impl<P: Pinned, D: Direction> Payload<D> for Mapping<P, D> {
    fn segment(&self, index: usize) -> Option<Segment> {
        self.extent(index)
    }

    fn domain(&self) -> Option<DomainId> {
        Some(self.0.domain.id())
    }
}

impl<P: Pinned, D: Direction> fmt::Debug for Mapping<P, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("iova", &self.0.addresses.iova)
            .field("fixed", &self.is_fixed())
            .finish_non_exhaustive()
    }
}

/// A [`Mapping`] without its direction, so that [`Domain::revoke_many`] takes reads and writes in
/// one batch.
#[must_use = "dropping a mapping revokes the device's access"]
pub struct Unrevoked<P: Pinned>(DropGuard<MappedPayload<P>>);

impl<P: Pinned, D: Direction> From<Mapping<P, D>> for Unrevoked<P> {
    #[inline(always)]
    fn from(mapping: Mapping<P, D>) -> Self {
        Self(mapping.0)
    }
}

impl<P: Pinned> Unrevoked<P> {
    /// Returns where the device finds it.
    pub fn iova(&self) -> IovaRange {
        self.0.addresses.iova
    }

    /// Revokes access at once, as [`Mapping::revoke`] does.
    pub fn revoke(self) -> Revoked<P> {
        self.revoke_by(&mut Anyone)
    }

    #[inline(always)]
    pub(super) fn revoke_by(mut self, caller: &mut impl Caller) -> Revoked<P> {
        self.0.revoke(caller);
        Revoked(self.0)
    }

    /// Revokes access and waits, in place: to move what has just been written, as a [`Revoked`],
    /// waits for the stores.
    #[inline(always)]
    pub(super) fn revoke_and_wait(&mut self, caller: &mut impl Caller) -> Result<(), BackendError> {
        self.0.revoke(caller);
        self.0.quiesce(|domain, ticket| domain.call(|backend| backend.wait(ticket, None)))
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

    /// Has the processor load what a revocation needs, as [`Mapping::prefetch`] does.
    #[inline(always)]
    pub fn prefetch(&self) {
        self.0.addresses.prefetch();
    }

    /// Returns the value that waits for the ticket, to be [revoked](Domain::revoke_many) with
    /// others.
    pub(super) fn into_revoked(self) -> Revoked<P> {
        Revoked(self.0)
    }
}

impl<P: Pinned> fmt::Debug for Unrevoked<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unrevoked").field("iova", &self.0.addresses.iova).finish_non_exhaustive()
    }
}

/// A failed map, with the payload.
///
/// `?` converts it to a [`BackendError`] where the payload is not needed.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct MapError<P> {
    /// What was to be mapped. `None` where a device may still reach it
    /// ([`BackendError::stays_reachable`]): the domain holds it until the flush completes, or it is
    /// quarantined.
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

/// A failed [`DomainLocal::map_many`](super::DomainLocal::map_many), with the payloads.
///
/// `?` converts it to a [`BackendError`] where they are not needed.
#[derive(thiserror::Error)]
#[error("payload {index} of a batch: {error}")]
pub struct MapManyError<P> {
    /// What was to be mapped, in its order, without those that a device may still reach
    /// ([`BackendError::stays_reachable`], or a flush of the rollback that is late): the domain
    /// holds these until their flush completes, or they are quarantined.
    pub payloads: Vec<P>,
    /// Which of them was refused, counted from 0.
    pub index: usize,
    /// The reason.
    #[source]
    pub error: BackendError,
}

impl<P> fmt::Debug for MapManyError<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MapManyError")
            .field("index", &self.index)
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

impl<P> From<MapManyError<P>> for BackendError {
    /// Drops the payloads.
    fn from(failed: MapManyError<P>) -> Self {
        failed.error
    }
}
