//! The interface between a domain and the owner of its table.

use super::error::BackendError;
use super::stats::BackendStats;
use super::table_backend::phys::ExtentCache;
use crate::access::Access;
use crate::addr::IovaRange;
use crate::invalidate::{Ticket, WaitLimit};
use crate::mem::DmaMemory;
use crate::table::{MappedRun, PinnedLeaf};
use alloc::boxed::Box;
use core::task::Poll;

/// The owner of a domain's table: software, the kernel, or none.
///
/// # If a method panics
/// The domain stays usable, and no device reaches what has been dropped. A payload that was being
/// mapped, or whose revocation was being requested, is quarantined and counted
/// ([`DomainStats::quarantined`](super::DomainStats::quarantined)), because a device may reach it:
/// after a panic of `map`, `map_pinned`, `pin`, `required_iova` or a `revoke`. After one of `unpin`
/// the addresses of the window stay in use. After one of any other method nothing is lost: the
/// domain holds the payload until its flush has completed
/// ([`Domain::release_late`](super::Domain::release_late)).
///
/// Once a method has panicked, no clean-up calls one while its thread unwinds (with the feature
/// `std`, which tells): a second panic there would end the process. What was still mapped is
/// revoked by the next map, revocation or wait instead, or when the domain is dropped.
pub trait Backend: Send + Sync {
    /// Returns `soft`, `vfio`, `none` ...
    fn name(&self) -> &'static str;

    /// Allows the memory to be mapped until [`unregister_memory`](Self::unregister_memory).
    ///
    /// # Errors
    /// [`BackendError::AlreadyRegistered`] if part of it is registered.
    ///
    /// # Safety
    /// The caller keeps the memory valid until `unregister_memory` has returned.
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;

    /// Forgets the memory: after this returns, no device reaches it through this backend, whatever
    /// is mapped.
    fn unregister_memory(&self, memory: DmaMemory);

    /// Maps `memory` at `iova` for `access`. When it returns, the device finds it.
    ///
    /// # Errors
    /// Nothing has changed and no device reaches the memory, unless the error
    /// [says so](BackendError::stays_reachable).
    fn map(&self, iova: IovaRange, memory: DmaMemory, access: Access) -> Result<(), BackendError>;

    /// Revokes access to all of `ranges` and requests one flush for them. The device may reach them
    /// until the ticket has completed. Allocates nothing.
    ///
    /// # Errors
    /// A device may reach any of the ranges for good.
    fn revoke(&self, ranges: &mut dyn Iterator<Item = IovaRange>) -> Result<Ticket, BackendError>;

    /// Pins what translates a window of 2 MiB, aligned, that one owner has to itself, so that
    /// mapping there needs no lookup and shares nothing with other owners. `None` from a backend
    /// without such windows.
    ///
    /// # Errors
    /// The window is mapped as any other range.
    fn pin(&self, window: IovaRange) -> Result<Option<PinnedLeaf>, BackendError> {
        let _ = window;
        Ok(None)
    }

    /// Maps `memory` at `iova` in the window of `pin`, as [`map`](Self::map) does. `extents` is the
    /// owner's.
    ///
    /// # Errors
    /// As for `map`.
    fn map_pinned(
        &self,
        pin: &PinnedLeaf,
        extents: &mut ExtentCache,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
    ) -> Result<(), BackendError> {
        let _ = (pin, extents);
        self.map(iova, memory, access)
    }

    /// Revokes access to all of `ranges`, as [`revoke`](Self::revoke) does. Those in a pinned
    /// window come with its pin.
    ///
    /// # Errors
    /// As for `revoke`.
    fn revoke_pinned(
        &self,
        ranges: &mut dyn Iterator<Item = (IovaRange, Option<&PinnedLeaf>)>,
    ) -> Result<Ticket, BackendError> {
        self.revoke(&mut ranges.map(|(range, _)| range))
    }

    /// Revokes access to one range, as [`revoke_pinned`](Self::revoke_pinned) does.
    ///
    /// # Errors
    /// As for `revoke`.
    fn revoke_one(
        &self,
        range: IovaRange,
        pin: Option<&PinnedLeaf>,
    ) -> Result<Ticket, BackendError> {
        self.revoke_pinned(&mut core::iter::once((range, pin)))
    }

    /// Removes a pin, when nothing is mapped in its window.
    fn unpin(&self, pin: PinnedLeaf) {
        drop(pin);
    }

    /// Whether the flush has completed. [`Ticket::NEVER`] never has.
    fn is_completed(&self, ticket: Ticket) -> bool;

    /// Waits until the flush has completed, or its deadline has passed.
    ///
    /// # Errors
    /// [`BackendError::Flush`]: a device may reach what the flush covers until it completes, which may be
    /// [never](crate::invalidate::WaitError::UnitFailed).
    fn wait(&self, ticket: Ticket) -> Result<(), BackendError>;

    /// Waits until the flush has completed, or for `limit` from now: for a ticket past its
    /// deadline.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait), which it is for a backend whose tickets complete before they
    /// are returned.
    fn wait_for(&self, ticket: Ticket, limit: WaitLimit) -> Result<(), BackendError> {
        let _ = limit;
        self.wait(ticket)
    }

    /// Returns how a [`wait`](Self::wait) would end if it ended now, without waiting. By default
    /// deadlines are not noticed.
    fn check(&self, ticket: Ticket) -> Poll<Result<(), BackendError>> {
        if self.is_completed(ticket) || self.has_failed() {
            Poll::Ready(self.wait(ticket))
        } else {
            Poll::Pending
        }
    }

    /// Whether the unit has failed: no ticket that is in flight will complete.
    fn has_failed(&self) -> bool {
        false
    }

    /// Returns what its table maps, as [`Table::mapped`](crate::table::Table::mapped) does; `None`,
    /// the default, if it cannot read its table.
    fn mapped(&self) -> Option<Box<dyn Iterator<Item = MappedRun> + '_>> {
        None
    }

    /// Returns the statistics.
    fn stats(&self) -> BackendStats;

    /// Whether it translates. If not, a device finds memory at its physical address, and all other
    /// memory too. It never changes.
    fn translates(&self) -> bool {
        true
    }

    /// Whether mapping memory pins it, and charges it to the process.
    fn pins(&self) -> bool {
        false
    }

    /// Returns where memory has to be mapped if that cannot be chosen: without translation, at its
    /// physical address. A backend that [translates](Self::translates) is not asked.
    ///
    /// # Errors
    /// [`BackendError::NotContiguous`], [`BackendError::Movable`],
    /// [`BackendError::PhysAddrUnknown`].
    fn required_iova(&self, memory: DmaMemory) -> Result<Option<IovaRange>, BackendError> {
        let _ = memory;
        Ok(None)
    }
}
