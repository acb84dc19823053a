//! Mapping a payload: at the static mapping that it is in, or at addresses of its own.

use super::error::BackendError;
use super::late::Due;
use super::mapping::{MapError, Mapping, Unrevoked};
use super::owner::{Anyone, Caller};
use super::payload::{Pinned, pieces};
use super::revoked::Revoked;
use super::space::{Domain, PAGE_BYTES, Space, alignment, check_pages};
use super::window::{Addresses, Origin};
use crate::access::{Access, Direction};
use crate::addr::{Iova, IovaRange};
use crate::drop_guard::{CleanUp, DropGuard};
use crate::iova::IovaError;
use crate::mem::DmaMemory;
use crate::table::{PinnedLeaf, TableError};
use alloc::vec::Vec;

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
        self.domain.count_quarantined(self.bytes);
    }
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
        let (payload, addresses) = self.space.map_payload(&mut Anyone, payload, direction, None)?;
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
        let (payload, addresses) =
            self.space.map_payload(&mut Anyone, payload, direction, Some(limit))?;
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
        let mapped = self.map_part(caller, &addresses, addresses.iova, memory, access);
        let Err(error) = mapped else { return Ok(addresses) };
        if error.stays_reachable() {
            return Err((Some(addresses), error));
        }
        caller.release(self, addresses);
        Err((None, error))
    }

    /// Maps `memory` at `iova`, part of `addresses`.
    #[inline(always)]
    fn map_part(
        &self,
        caller: &mut impl Caller,
        addresses: &Addresses,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
    ) -> Result<(), BackendError> {
        match self.try_map_part(caller, addresses, iova, memory, access) {
            Ok(()) => Ok(()),
            Err(error) => self.map_with_room(caller, addresses, iova, memory, access, error),
        }
    }

    /// Tries again after `error`, if table pages ran out, without those that the caller keeps for
    /// later, and then without those that all owners keep: at the same addresses, since a batch is
    /// contiguous, and a device may have written there.
    #[cold]
    fn map_with_room(
        &self,
        caller: &mut impl Caller,
        addresses: &Addresses,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
        error: BackendError,
    ) -> Result<(), BackendError> {
        let mut error = error;
        for of_all in [false, true] {
            if !matches!(error, BackendError::Table(TableError::NoPages { .. })) {
                break;
            }
            if if of_all { self.reclaim_idle() } else { caller.give_up_idle(self) } {
                match self.try_map_part(caller, addresses, iova, memory, access) {
                    Ok(()) => return Ok(()),
                    Err(again) => error = again,
                }
            }
        }
        Err(error)
    }

    #[inline(always)]
    fn try_map_part(
        &self,
        caller: &mut impl Caller,
        addresses: &Addresses,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
    ) -> Result<(), BackendError> {
        match (addresses.pin(), caller.extents()) {
            (Some(pin), Some(extents)) => self.call(|backend| match backend.windows() {
                Some(windows) => windows.map_pinned(pin, extents, iova, memory, access),
                None => backend.map(iova, memory, access),
            }),
            _ => self.call(|backend| backend.map(iova, memory, access)),
        }
    }

    #[inline(always)]
    fn alloc_for(
        &self,
        caller: &mut impl Caller,
        memory: DmaMemory,
        limit: Option<Iova>,
    ) -> Result<Addresses, BackendError> {
        check_pages(memory)?;
        if !self.translates
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

    /// Allocates as the caller does, and up to `limit` if there is one. Tries again without what
    /// the caller keeps for later.
    #[inline(always)]
    fn alloc_up_to(
        &self,
        caller: &mut impl Caller,
        len: u64,
        align: impl Fn() -> u64,
        limit: Option<Iova>,
    ) -> Result<Addresses, BackendError> {
        let alloc = |caller: &mut _| match limit {
            None => Caller::alloc(caller, self, len, &align),
            // Not from the windows of an owner, which are anywhere.
            Some(_) => {
                Ok(Addresses { iova: self.alloc_iova(len, align(), limit)?, origin: Origin::Space })
            }
        };
        match alloc(caller) {
            Err(BackendError::Iova(IovaError::Exhausted { .. })) if caller.give_up_idle(self) => {
                alloc(caller)
            }
            allocated => allocated,
        }
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
            let result = iova.part(mapped, len).ok_or_else(differs);
            if let Err(error) =
                result.and_then(|at| self.map_part(caller, &addresses, at, piece, access))
            {
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
        let Some(part) = iova.part(0, len) else { return error };
        let Ok(ticket) =
            self.call(|backend| backend.revoke(&mut core::iter::once((part, addresses.pin()))))
        else {
            return BackendError::NotRevoked;
        };
        match self.call(|backend| backend.wait(ticket, None)) {
            // What cannot be revoked stays reachable, whatever becomes of the rest.
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
        if !self.translates && self.call(|backend| backend.required_iova(first))?.is_some() {
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            return Err(BackendError::NotContiguous { addr: first.addr(), len, run: first.len() });
        }
        self.alloc_up_to(caller, len, || align, limit)
    }
}

impl Domain {
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

/// Joins ranges that follow each other in one window, or outside of all pinned ones.
fn joined<'p>(
    ranges: impl Iterator<Item = (IovaRange, Option<&'p PinnedLeaf>)>,
) -> impl Iterator<Item = (IovaRange, Option<&'p PinnedLeaf>)> {
    let mut ranges = ranges.peekable();
    core::iter::from_fn(move || {
        let (mut range, pin) = ranges.next()?;
        let address = |pin: Option<&'p PinnedLeaf>| pin.map(core::ptr::from_ref);
        let follows = |range: IovaRange, next: &(IovaRange, Option<&'p PinnedLeaf>)| {
            next.0.start() == range.end() && address(next.1) == address(pin)
        };
        while let Some((next, _)) = ranges.next_if(|next| follows(range, next)) {
            range = range.merged(&next)?;
        }
        Some((range, pin))
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
        let mut any = false;
        for revoked in new.iter_mut().filter(|new| new.belongs_to(self)) {
            revoked.0.begin_revoke(caller);
            any |= revoked.0.to_revoke().is_some();
        }
        let here = |new: &&Revoked<P>| new.belongs_to(self);
        let mut ranges = joined(new.iter().filter(here).filter_map(|new| new.0.to_revoke()));
        if any && let Ok(ticket) = self.call(|backend| backend.revoke(&mut ranges)) {
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
