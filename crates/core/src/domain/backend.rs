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
use core::task::{Poll, Waker};

/// Properties of a backend. They never change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Properties {
    /// Whether it translates. If not, a device finds memory at its physical address, and all other
    /// memory too.
    pub translates: bool,
    /// Whether mapping memory pins it, and charges it to the process.
    pub pins: bool,
}

impl Default for Properties {
    /// It translates, and pins nothing.
    fn default() -> Self {
        Self { translates: true, pins: false }
    }
}

/// The owner of a domain's table: software, the kernel, or none.
///
/// Addresses are the domain's: it chooses them, within the mask of a device that has one, and asks
/// the backend only where they cannot be chosen ([`required_iova`](Self::required_iova)). Flushes
/// that a map needs (VT-d: caching mode) are the backend's: they have completed when
/// [`map`](Self::map) returns.
///
/// # If a method panics
/// The domain stays usable, and no device reaches what has been dropped. A payload that was being
/// mapped, or whose revocation was being requested, is quarantined and counted
/// ([`DomainStats::quarantined`](super::DomainStats::quarantined)), because a device may reach it:
/// after a panic of `map`, `required_iova`, `revoke`, `map_pinned` or `pin`.
/// After one of `unpin` the addresses of the window stay in use. After one of any other method
/// nothing is lost: the domain holds the payload until its flush has completed
/// ([`Domain::release_late`](super::Domain::release_late)).
///
/// Once a method has panicked, no clean-up calls one while its thread unwinds (with the feature
/// `std`, which tells): a second panic there would end the process. What was still mapped is
/// revoked by the next map, revocation or wait instead, or when the domain is dropped.
pub trait Backend: Send + Sync {
    /// Returns `soft`, `vfio`, `none` ...
    fn name(&self) -> &'static str;

    /// Returns its properties.
    fn properties(&self) -> Properties {
        Properties::default()
    }

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

    /// Returns where memory has to be mapped if that cannot be chosen: without translation, at its
    /// physical address. A backend that [translates](Properties::translates) is not asked.
    ///
    /// # Errors
    /// [`BackendError::NotContiguous`], [`BackendError::Movable`],
    /// [`BackendError::PhysAddrUnknown`].
    fn required_iova(&self, memory: DmaMemory) -> Result<Option<IovaRange>, BackendError> {
        let _ = memory;
        Ok(None)
    }

    /// Maps `memory` at `iova` for `access`. When it returns, the device finds it.
    ///
    /// # Errors
    /// Nothing has changed and no device reaches the memory, unless the error
    /// [says so](BackendError::stays_reachable).
    fn map(&self, iova: IovaRange, memory: DmaMemory, access: Access) -> Result<(), BackendError>;

    /// Revokes access to all of `ranges` and requests one flush for them. The device may reach them
    /// until the ticket has completed. Those in a window of [`windows`](Self::windows) come with
    /// its pin. Allocates nothing.
    ///
    /// # Errors
    /// A device may reach any of the ranges for good.
    fn revoke(
        &self,
        ranges: &mut dyn Iterator<Item = (IovaRange, Option<&PinnedLeaf>)>,
    ) -> Result<Ticket, BackendError>;

    /// Returns whether the flush has completed, without waiting: `Pending` while it is in flight,
    /// else how a [`wait`](Self::wait) without a limit ends. [`Ticket::NEVER`] is never completed.
    fn check(&self, ticket: Ticket) -> Poll<Result<(), BackendError>>;

    /// Waits until the flush has completed: until its deadline has passed, or with a limit for that
    /// long from now.
    ///
    /// # Errors
    /// [`BackendError::Flush`]: a device may reach what the flush covers until it completes, which
    /// may be [never](crate::invalidate::WaitError::UnitFailed).
    fn wait(&self, ticket: Ticket, limit: Option<WaitLimit>) -> Result<(), BackendError>;

    /// Wakes `waker` when [`check`](Self::check) of a pending ticket may have changed: at the latest
    /// when the flush completes, fails or passes its deadline, and at once if it has. The caller
    /// checks again after this returns.
    ///
    /// By default at once, which is right for a backend whose tickets complete before they are
    /// returned. One whose flushes take time overrides it, with a source of its own.
    fn wake(&self, ticket: Ticket, waker: &Waker) {
        let _ = ticket;
        waker.wake_by_ref();
    }

    /// Returns its pinned windows; `None`, the default, if it has none.
    fn windows(&self) -> Option<&dyn PinnedWindows> {
        None
    }

    /// Returns what its table maps, as [`Table::mapped`](crate::table::Table::mapped) does; `None`,
    /// the default, if it cannot read its table.
    fn mapped(&self) -> Option<Box<dyn Iterator<Item = MappedRun> + '_>> {
        None
    }

    /// Returns the statistics.
    fn stats(&self) -> BackendStats;
}

/// Windows of 2 MiB, aligned, that one owner each has to itself: what translates them is pinned, so
/// that mapping there needs no lookup and shares nothing with other owners.
pub trait PinnedWindows {
    /// Pins what translates `window`.
    ///
    /// # Errors
    /// The window is mapped as any other range.
    fn pin(&self, window: IovaRange) -> Result<PinnedLeaf, BackendError>;

    /// Maps `memory` at `iova` in the window of `pin`, as [`Backend::map`] does. `extents` is the
    /// owner's.
    ///
    /// # Errors
    /// As for `map` of the backend.
    fn map_pinned(
        &self,
        pin: &PinnedLeaf,
        extents: &mut ExtentCache,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
    ) -> Result<(), BackendError>;

    /// Removes a pin, when nothing is mapped in its window.
    fn unpin(&self, pin: PinnedLeaf);
}
