//! [`Mapping`], a payload that a device can reach, and its creation: at the static mapping that its
//! memory is in, or at addresses of its own. Also the errors of a map, and bulk revocation.

use super::backend::Revocation;
use super::error::BackendError;
use super::late::Due;
use super::owner::{Anyone, Caller};
use super::revoked::{MappedPayload, Revoked, Unrevoked};
use super::space::{
    Domain, DomainId, PAGE_BYTES, Payload, Pinned, Space, alignment, check_pages, pieces,
};
use super::watch::watch;
use super::window::{Addresses, Origin};
use crate::access::{Access, Direction};
use crate::addr::{Iova, IovaRange, PageSize, Segment};
use crate::drop_guard::{CleanUp, DropGuard};
use crate::iova::IovaError;
use crate::mem::DmaMemory;
use crate::share::Shared;
use crate::table::TableError;
use alloc::vec::Vec;
use core::fmt;
use core::marker::PhantomData;

/// A buffer mapped into a domain: the device can reach it, and no reference into it exists.
///
/// It owns what it refers to: it keeps its domain, and can be stored in a struct beside it.
///
/// Dropping it revokes access, waits, and drops the payload. It waits at most until the deadline of
/// the flush: [`InvalidationQueue::limit`](crate::invalidate::InvalidationQueue::limit) from its
/// submission, by default 5 s on the software IOMMU, and no time where the kernel keeps the table.
/// If the flush is late, the domain holds the payload until it completes; if it never completes,
/// the payload is quarantined. To end one without waiting, [`revoke`](Self::revoke) it and drop the
/// [future](Revoked::quiesced).
#[must_use = "dropping a mapping revokes the device's access"]
pub struct Mapping<P: Pinned, D: Direction>(DropGuard<MappedPayload<P>>, PhantomData<D>);

impl<P: Pinned, D: Direction> Mapping<P, D> {
    #[inline(always)]
    pub(super) fn new(domain: Shared<Space>, payload: P, addresses: Addresses) -> Self {
        Self(DropGuard::new(MappedPayload::new(domain, payload, addresses)), PhantomData)
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
    /// [piece](Unrevoked::piece).
    pub fn memory(&self) -> DmaMemory<'_> {
        self.0.payload.memory()
    }

    /// Yields all [extents](Pinned::extent) of the payload where the device finds them, in order:
    /// what a device is given.
    pub fn segments(&self) -> impl Iterator<Item = Segment> {
        (0..).map_while(|index| self.0.extent(index))
    }

    /// Whether the memory stays mapped for its lifetime: then revoking the mapping does not revoke
    /// access.
    pub fn is_fixed(&self) -> bool {
        self.0.addresses.is_fixed()
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
    /// [`BackendError::Flush`]: a device may still reach the buffer. If the flush is late the
    /// domain holds the buffer until it completes; otherwise, and with
    /// [`BackendError::NotRevoked`], the buffer and its addresses are quarantined.
    pub fn unmap(self) -> Result<P, BackendError> {
        Ok(self.revoke().wait()?)
    }
}

// SAFETY: each segment is part of the mapping's range, which is mapped for `D`, never changes, and
// lasts until the value is dropped, unmapped or revoked; all of these take it by value. The extents
// never change by the contract of `Pinned`.
unsafe impl<P: Pinned, D: Direction> Payload<D> for Mapping<P, D> {
    fn segment(&self, index: usize) -> Option<Segment> {
        self.0.extent(index)
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

impl<P: Pinned, D: Direction> From<Mapping<P, D>> for Unrevoked<P> {
    #[inline(always)]
    fn from(mapping: Mapping<P, D>) -> Self {
        Self(mapping.0)
    }
}

/// A failed map, with the payload.
///
/// `?` converts it to a [`BackendError`] where the payload is not needed.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct MapError<P> {
    /// The payload. `None` where a device may still reach it
    /// ([`BackendError::stays_reachable`]): the domain holds it until the flush completes, or it is
    /// quarantined.
    pub payload: Option<P>,
    /// The reason.
    #[source]
    pub error: BackendError,
}

impl<P> MapError<P> {
    /// Arranges that the domain is woken for a payload that it now holds.
    #[cold]
    pub(super) fn watched(self, domain: impl FnOnce() -> Shared<Space>) -> Self {
        if self.payload.is_none() {
            watch(&domain());
        }
        self
    }
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
    /// The payloads, in their order, without those that a device may still reach
    /// ([`BackendError::stays_reachable`], or a flush of the rollback that is late): the domain
    /// holds these until their flush completes, or they are quarantined.
    pub payloads: Vec<P>,
    /// The number of the refused payload, counted from 0.
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

/// A payload while a backend maps it. If that panics, a device may reach the payload: it is
/// quarantined.
struct Unmapped<'d, P> {
    domain: &'d Space,
    payload: P,
    bytes: u64,
}

impl<P> CleanUp for Unmapped<'_, P> {
    fn clean_up(self) {
        core::mem::forget(self.payload);
        self.domain.count_lost(self.bytes);
    }
}

/// Memory that is mapped at `iova`, a part of `addresses`.
#[derive(Clone, Copy)]
struct Part<'m> {
    addresses: &'m Addresses,
    iova: IovaRange,
    memory: DmaMemory<'m>,
    access: Access,
}

/// Returns how many bytes of addresses the payloads need.
pub(super) fn total_bytes<P: Pinned>(payloads: &[P]) -> u64 {
    let bytes = payloads.iter().flat_map(pieces).map(|piece| piece.len() as u64);
    bytes.fold(0, u64::saturating_add)
}

impl Domain {
    /// Maps `payload` for the device; it moves into the mapping, which keeps the
    /// domain.
    ///
    /// [`DomainLocal::map`](super::DomainLocal::map) does the same without anything that threads
    /// share.
    ///
    /// # Errors
    /// [`MapError`], with the payload if no device can reach it.
    pub fn map<P: Pinned, D: Direction>(
        &self,
        payload: P,
        direction: D,
    ) -> Result<Mapping<P, D>, MapError<P>> {
        let mapped = self.space.map_payload(&mut Anyone, payload, direction, None);
        let (payload, addresses) = mapped.map_err(|error| error.watched(|| self.space.clone()))?;
        Ok(Mapping::new(self.space.clone(), payload, addresses))
    }

    /// Maps as [`map`](Self::map) does, at addresses up to `limit`, inclusive: the DMA mask of a
    /// device that reaches fewer than its domain has, as `0xffff_ffff` for 32 bits.
    ///
    /// Memory that stays mapped for its lifetime above the limit is mapped once more.
    ///
    /// # Errors
    /// As for `map`; [`BackendError::BeyondLimit`] without translation, if the memory is above the
    /// limit.
    pub fn map_up_to<P: Pinned, D: Direction>(
        &self,
        payload: P,
        direction: D,
        limit: Iova,
    ) -> Result<Mapping<P, D>, MapError<P>> {
        let mapped = self.space.map_payload(&mut Anyone, payload, direction, Some(limit));
        let (payload, addresses) = mapped.map_err(|error| error.watched(|| self.space.clone()))?;
        Ok(Mapping::new(self.space.clone(), payload, addresses))
    }
}

impl Space {
    /// Returns the payload with its addresses, which are all up to `limit` if there is one.
    #[inline(always)]
    pub(super) fn map_payload<P: Pinned, D: Direction>(
        &self,
        caller: &mut impl Caller,
        payload: P,
        _: D,
        limit: Option<Iova>,
    ) -> Result<(P, Addresses), MapError<P>> {
        self.release_late();
        if let Some(at) = payload.fixed_iova(self.id())
            && let Some(iova) = caller.static_at(self, at, payload.memory(), D::ACCESS)
            && limit.is_none_or(|limit| iova.last() <= limit)
        {
            caller.counts(self).count_map(true);
            return Ok((payload, Addresses { iova, origin: Origin::Fixed }));
        }
        let bytes = payload.memory().len() as u64;
        let unmapped = DropGuard::new(Unmapped { domain: self, payload, bytes });
        let mapped = match unmapped.payload.piece(1) {
            None => self.map_fresh(caller, unmapped.payload.memory(), D::ACCESS, limit),
            Some(_) => self.map_pieces(caller, &unmapped.payload, D::ACCESS, limit),
        };
        let payload = unmapped.into_inner().payload;
        match mapped {
            Ok(addresses) => {
                caller.counts(self).count_map(false);
                Ok((payload, addresses))
            }
            Err((reachable, error)) => {
                caller.counts(self).count_refused();
                let payload = match reachable {
                    Some(addresses) => {
                        let due = error.late_ticket().map_or(Due::Never, Due::At);
                        self.keep_reachable(payload, addresses, due, false);
                        None
                    }
                    None => Some(payload),
                };
                Err(MapError { payload, error })
            }
        }
    }

    /// Maps memory at addresses of the domain's choice. An error comes with the addresses through
    /// which a device may still reach the memory, if any.
    #[inline(always)]
    pub(super) fn map_fresh(
        &self,
        caller: &mut impl Caller,
        memory: DmaMemory,
        access: Access,
        limit: Option<Iova>,
    ) -> Result<Addresses, (Option<Addresses>, BackendError)> {
        let addresses = self.alloc_for(caller, memory, limit).map_err(|error| (None, error))?;
        let part = Part { addresses: &addresses, iova: addresses.iova, memory, access };
        let Err(error) = self.map_part(caller, part) else { return Ok(addresses) };
        if error.stays_reachable() {
            return Err((Some(addresses), error));
        }
        caller.release(self, addresses);
        Err((None, error))
    }

    /// Maps `part`.
    #[inline(always)]
    fn map_part(&self, caller: &mut impl Caller, part: Part<'_>) -> Result<(), BackendError> {
        match self.try_map_part(part) {
            Ok(()) => Ok(()),
            Err(error) => self.map_with_room(caller, part, error),
        }
    }

    /// Tries again after `error`, if table pages ran out, without those that the caller keeps for
    /// later, and then without those that all owners keep: at the same addresses, since a batch is
    /// contiguous, and a device may have written there.
    #[cold]
    fn map_with_room(
        &self,
        caller: &mut impl Caller,
        part: Part<'_>,
        error: BackendError,
    ) -> Result<(), BackendError> {
        let mut error = error;
        for of_all in [false, true] {
            if !matches!(error, BackendError::Table(TableError::NoPages { .. })) {
                break;
            }
            if if of_all { self.reclaim_idle() } else { caller.give_up_idle(self) } {
                match self.try_map_part(part) {
                    Ok(()) => return Ok(()),
                    Err(again) => error = again,
                }
            }
        }
        Err(error)
    }

    #[inline(always)]
    fn try_map_part(&self, part: Part<'_>) -> Result<(), BackendError> {
        let Part { addresses, iova, memory, access } = part;
        self.call(|backend| backend.map(iova, memory, access, addresses.token()))
    }

    #[inline(always)]
    fn alloc_for(
        &self,
        caller: &mut impl Caller,
        memory: DmaMemory,
        limit: Option<Iova>,
    ) -> Result<Addresses, BackendError> {
        check_pages(memory)?;
        if !self.translates()
            && let Some(iova) = self.call(|backend| backend.required_iova(memory))?
        {
            if let Some(limit) = limit.filter(|limit| iova.last() > *limit) {
                return Err(BackendError::BeyondLimit { iova, limit });
            }
            self.iovas.alloc_at(iova)?;
            return Ok(Addresses { iova, origin: Origin::Space });
        }
        self.alloc_up_to(caller, memory.len() as u64, || alignment(memory), limit)
    }

    /// Allocates as the caller does, or up to `limit` if there is one: not from the windows of an
    /// owner, which are anywhere.
    #[inline(always)]
    pub(super) fn alloc_up_to(
        &self,
        caller: &mut impl Caller,
        len: u64,
        align: impl Fn() -> u64,
        limit: Option<Iova>,
    ) -> Result<Addresses, BackendError> {
        let allocated = match limit {
            None => caller.alloc(self, len, &align),
            Some(_) => self.alloc_in_space(len, align(), limit),
        };
        match allocated {
            Err(error @ BackendError::Iova(IovaError::Exhausted { .. })) => {
                self.alloc_what_is_left(caller, len, align(), limit, error)
            }
            allocated => allocated,
        }
    }

    fn alloc_in_space(
        &self,
        len: u64,
        align: u64,
        limit: Option<Iova>,
    ) -> Result<Addresses, BackendError> {
        let iova = self.alloc_iova(len, align, limit)?;
        Ok(Addresses { iova, origin: Origin::Space })
    }

    /// Retries after `error`: after releasing what the caller keeps for later, and then with the
    /// alignment of smaller leaves, since that of the largest is only faster.
    #[cold]
    fn alloc_what_is_left(
        &self,
        caller: &mut impl Caller,
        len: u64,
        align: u64,
        limit: Option<Iova>,
        mut error: BackendError,
    ) -> Result<Addresses, BackendError> {
        let same = caller.give_up_idle(self).then_some(align);
        let sizes = PageSize::ALL.iter().rev().map(|size| size.bytes());
        // No alignment helps if no range is long enough.
        let is_too_long = |error: &BackendError| match error {
            BackendError::Iova(IovaError::Exhausted { largest_free, .. }) => *largest_free < len,
            _ => false,
        };
        for align in same.into_iter().chain(sizes.filter(|&smaller| smaller < align)) {
            if same != Some(align) && is_too_long(&error) {
                break;
            }
            match self.alloc_in_space(len, align, limit) {
                Err(again @ BackendError::Iova(IovaError::Exhausted { .. })) => error = again,
                allocated => return allocated,
            }
        }
        Err(error)
    }

    /// Maps the pieces of `payload` at one contiguous range. Errors as for
    /// [`map_fresh`](Self::map_fresh).
    fn map_pieces<P: Pinned>(
        &self,
        caller: &mut impl Caller,
        payload: &P,
        access: Access,
        limit: Option<Iova>,
    ) -> Result<Addresses, (Option<Addresses>, BackendError)> {
        let addresses =
            self.alloc_for_pieces(caller, payload, limit).map_err(|error| (None, error))?;
        let (iova, mut mapped) = (addresses.iova, 0);
        for piece in pieces(payload) {
            let len = piece.len() as u64;
            let differs = || BackendError::LengthsDiffer { iova, memory_bytes: piece.len() };
            let part = iova.part(mapped, len).ok_or_else(differs);
            let part = part.map(|iova| Part { addresses: &addresses, iova, memory: piece, access });
            if let Err(error) = part.and_then(|part| self.map_part(caller, part)) {
                let error = self.undo_map(&addresses, mapped, error);
                if error.stays_reachable() {
                    return Err((Some(addresses), error));
                }
                caller.release(self, addresses);
                return Err((None, error));
            }
            mapped += len;
        }
        Ok(addresses)
    }

    /// Revokes the first `len` bytes of `addresses` after `error`, and returns the error that says
    /// whether a device may reach them.
    fn undo_map(&self, addresses: &Addresses, len: u64, error: BackendError) -> BackendError {
        let iova = addresses.iova;
        let Some(range) = iova.part(0, len) else { return error };
        let Ok(ticket) = self.revoke_one(Revocation { range, window: addresses.token() }) else {
            return BackendError::NotRevoked;
        };
        match self.wait(ticket, None) {
            // Memory that cannot be revoked stays reachable, independent of the rest.
            _ if error.stays_reachable() && error.late_ticket().is_none() => error,
            // Tickets complete in order, so this one covers what `error` left reachable too.
            Err(BackendError::Flush(flush)) => BackendError::RollbackIncomplete { iova, flush },
            Err(_) => BackendError::NotRevoked,
            Ok(()) => error,
        }
    }

    fn alloc_for_pieces<P: Pinned>(
        &self,
        caller: &mut impl Caller,
        payload: &P,
        limit: Option<Iova>,
    ) -> Result<Addresses, BackendError> {
        let (mut len, mut align) = (0u64, PAGE_BYTES as u64);
        for piece in pieces(payload) {
            check_pages(piece)?;
            len = len.saturating_add(piece.len() as u64);
            align = align.max(alignment(piece));
        }
        let first = payload.memory();
        if !self.translates() && self.call(|backend| backend.required_iova(first))?.is_some() {
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            return Err(BackendError::NotContiguous { addr: first.addr(), len, run: first.len() });
        }
        self.alloc_up_to(caller, len, || align, limit)
    }
}

impl Domain {
    /// Revokes access and waits, as [`Mapping::unmap`] does. Takes a [`Mapping`], of any direction,
    /// or one without its direction.
    ///
    /// # Errors
    /// As there.
    pub fn unmap<P: Pinned>(&self, mapping: impl Into<Unrevoked<P>>) -> Result<P, BackendError> {
        Ok(mapping.into().revoke().wait()?)
    }

    /// Revokes many mappings with one flush, and appends them to `revoked`. Each item is a
    /// [`Mapping`] or, to mix reads and writes, an [`Unrevoked`].
    ///
    /// Allocates nothing if `revoked` has the capacity.
    pub fn revoke_many<P: Pinned, M: Into<Unrevoked<P>>>(
        &self,
        mappings: impl IntoIterator<Item = M>,
        revoked: &mut Vec<Revoked<P>>,
    ) {
        self.space.revoke_many_by(&mut Anyone, mappings, revoked);
    }
}

/// The mappings of a batch, from `first` on, until they are revoked. If the caller's iterator
/// panics before that, they are dropped, each of which revokes: as a [`Revoked`] that never was,
/// each would be quarantined by its wait.
struct Batch<'r, P: Pinned> {
    revoked: &'r mut Vec<Revoked<P>>,
    first: usize,
}

impl<P: Pinned> Drop for Batch<'_, P> {
    fn drop(&mut self) {
        self.revoked.truncate(self.first);
    }
}

/// Joins ranges that follow each other in one window, or outside of all of them.
fn joined<'w>(
    ranges: impl Iterator<Item = Revocation<'w>>,
) -> impl Iterator<Item = Revocation<'w>> {
    let mut ranges = ranges.peekable();
    core::iter::from_fn(move || {
        let mut one = ranges.next()?;
        let window = one.window.map(core::ptr::from_ref);
        let follows = |range: IovaRange, next: &Revocation<'w>| {
            next.range.start() == range.end() && next.window.map(core::ptr::from_ref) == window
        };
        while let Some(next) = ranges.next_if(|next| follows(one.range, next)) {
            one.range = one.range.merged(&next.range)?;
        }
        Some(one)
    })
}

impl Space {
    /// Revokes as [`Domain::revoke_many`] does, for `caller`.
    pub(super) fn revoke_many_by<P: Pinned, M: Into<Unrevoked<P>>>(
        &self,
        caller: &mut impl Caller,
        mappings: impl IntoIterator<Item = M>,
        revoked: &mut Vec<Revoked<P>>,
    ) {
        self.release_late();
        let mut batch = Batch { first: revoked.len(), revoked };
        for mapping in mappings {
            let mapping = mapping.into();
            // Cleared in the third pass, when it has arrived.
            mapping.prefetch();
            batch.revoked.push(if mapping.belongs_to(self) {
                mapping.into_revoked()
            } else {
                mapping.revoke()
            });
        }
        let new = batch.revoked.get_mut(batch.first..).unwrap_or_default();
        for revoked in new.iter_mut().filter(|new| new.belongs_to(self)) {
            revoked.0.begin_revoke(caller);
        }
        let here = |new: &&Revoked<P>| new.belongs_to(self);
        let mut ranges = joined(new.iter().filter(here).filter_map(|new| new.0.to_revoke()));
        if let Some(first) = ranges.next()
            && let Ok(ticket) = self.call(|backend| backend.revoke(first, &mut ranges))
        {
            drop(ranges);
            let here = |new: &&mut Revoked<P>| new.belongs_to(self) && new.0.to_revoke().is_some();
            for revoked in new.iter_mut().filter(here) {
                revoked.0.set_ticket(ticket);
            }
            self.limit_held(caller, ticket);
        }
        batch.first = usize::MAX;
    }
}
