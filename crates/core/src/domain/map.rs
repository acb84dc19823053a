//! Mapping payloads, and revoking many mappings at once.

use super::error::BackendError;
use super::mapping::{MapError, Mapping, Revoked, Unrevoked};
use super::payload::{Pinned, pieces};
use super::space::{Domain, PAGE_BYTES, alignment, check_pages};
use crate::access::{Access, Direction};
use crate::addr::IovaRange;
use crate::invalidate::Ticket;
use alloc::vec::Vec;
use core::ops::Deref;

/// The mappings of a batch, from `first` on, until they are revoked. If the caller's iterator panics before that, they are
/// dropped, each of which revokes: as a [`Revoked`] that never was, each would be quarantined by its wait.
struct Batch<'r, P: Pinned, H: Deref<Target = Domain>> {
    revoked: &'r mut Vec<Revoked<P, H>>,
    first: usize,
}

impl<P: Pinned, H: Deref<Target = Domain>> Drop for Batch<'_, P, H> {
    fn drop(&mut self) {
        self.revoked.truncate(self.first);
    }
}

impl Domain {
    /// Maps `payload` for the device; it moves into the mapping, which borrows the domain.
    ///
    /// [`DomainOwner::map`](super::DomainOwner::map) returns a mapping that owns a share of the domain instead.
    ///
    /// # Errors
    /// [`MapError`], with the payload if no device can reach it.
    pub fn map<P: Pinned, D: Direction>(
        &self,
        payload: P,
        direction: D,
    ) -> Result<Mapping<P, D, &Self>, MapError<P>> {
        let (payload, iova, fixed) = self.map_payload(payload, direction)?;
        Ok(Mapping::new(self, payload, iova, fixed))
    }

    /// Returns the payload with its addresses, and whether it stays mapped for its lifetime.
    pub(super) fn map_payload<P: Pinned, D: Direction>(
        &self,
        payload: P,
        _: D,
    ) -> Result<(P, IovaRange, bool), MapError<P>> {
        self.release_late();
        let fixed = payload.fixed_iova(self.id());
        if let Some(iova) = fixed.and_then(|at| self.static_at(at, payload.memory(), D::ACCESS)) {
            self.count_map(true);
            return Ok((payload, iova, true));
        }
        let mapped = match payload.piece(1) {
            None => self.map_fresh(payload.memory(), D::ACCESS),
            Some(_) => self.map_pieces(&payload, D::ACCESS),
        };
        match mapped {
            Ok(iova) => {
                self.count_map(false);
                Ok((payload, iova, false))
            }
            Err((Some(iova), error)) => {
                self.keep_reachable(payload, iova, error.late_ticket());
                Err(MapError { payload: None, error })
            }
            Err((None, error)) => Err(MapError { payload: Some(payload), error }),
        }
    }

    /// Revokes many mappings with one flush, and appends them to `revoked`. Each item is a [`Mapping`] or, to mix
    /// reads and writes, an [`Unrevoked`].
    ///
    /// Allocates nothing if `revoked` has the capacity.
    pub fn revoke_all<P: Pinned, H: Deref<Target = Self>, M: Into<Unrevoked<P, H>>>(
        &self,
        mappings: impl IntoIterator<Item = M>,
        revoked: &mut Vec<Revoked<P, H>>,
    ) {
        self.release_late();
        let mut batch = Batch { first: revoked.len(), revoked };
        for mapping in mappings {
            let mapping = mapping.into();
            batch.revoked.push(if mapping.belongs_to(self) {
                mapping.into_revoked()
            } else {
                mapping.revoke()
            });
        }
        let new = batch.revoked.get_mut(batch.first..).unwrap_or_default();
        let mut ranges = new.iter().filter(|new| !new.is_revoked()).filter_map(Revoked::to_revoke);
        let ticket = self.backend().revoke(&mut ranges).unwrap_or(Ticket::NEVER);
        for revoked in new.iter_mut().filter(|new| !new.is_revoked()) {
            revoked.set_revoked(ticket);
        }
        batch.first = usize::MAX;
    }

    /// Maps the pieces of `payload` at one contiguous range. Errors as for [`map_fresh`](Self::map_fresh).
    fn map_pieces<P: Pinned>(
        &self,
        payload: &P,
        access: Access,
    ) -> Result<IovaRange, (Option<IovaRange>, BackendError)> {
        let iova = self.alloc_for_pieces(payload).map_err(|error| (None, error))?;
        let mut mapped = 0;
        for piece in pieces(payload) {
            let len = piece.len() as u64;
            let differs = || BackendError::LengthsDiffer { iova, memory_bytes: piece.len() };
            let result = iova.part(mapped, len).ok_or_else(differs);
            if let Err(error) = result.and_then(|at| self.backend().map(at, piece, access)) {
                let error = self.undo_map(iova, mapped, error);
                if error.stays_reachable() {
                    return Err((Some(iova), error));
                }
                self.release_iova(iova).map_err(|error| (None, error))?;
                return Err((None, error));
            }
            mapped += len;
        }
        Ok(iova)
    }

    /// Revokes the first `len` bytes of `iova` after `error`, and returns the error that says whether a device may reach
    /// them.
    fn undo_map(&self, iova: IovaRange, len: u64, error: BackendError) -> BackendError {
        let Some(part) = iova.part(0, len) else { return error };
        let Ok(ticket) = self.backend().revoke(&mut core::iter::once(part)) else {
            return BackendError::NotRevoked;
        };
        match self.backend().wait(ticket) {
            // What cannot be revoked stays reachable, whatever becomes of the rest.
            _ if error.stays_reachable() && error.late_ticket().is_none() => error,
            // Tickets complete in order, so this one covers what `error` left reachable too.
            Err(BackendError::Flush(flush)) => BackendError::RollbackIncomplete { iova, flush },
            Err(_) => BackendError::NotRevoked,
            Ok(()) => error,
        }
    }

    fn alloc_for_pieces<P: Pinned>(&self, payload: &P) -> Result<IovaRange, BackendError> {
        let (mut len, mut align) = (0u64, PAGE_BYTES as u64);
        for piece in pieces(payload) {
            check_pages(piece)?;
            len = len.saturating_add(piece.len() as u64);
            align = align.max(alignment(piece));
        }
        let first = payload.memory();
        if self.backend().required_iova(first)?.is_some() {
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            return Err(BackendError::NotContiguous { addr: first.addr(), len, run: first.len() });
        }
        self.alloc_iova(len, align)
    }
}
