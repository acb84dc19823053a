//! The interface between a domain and the owner of its table. Below it: the translation of this
//! process's memory to physical memory (`extent`), and [`TableBackend`], which owns its table
//! (`table`).

use super::error::BackendError;
use super::stats::BackendStats;
use crate::access::Access;
use crate::addr::IovaRange;
use crate::invalidate::{Ticket, WaitLimit};
use crate::mem::DmaMemory;
use crate::table::MappedRun;
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::task::{Poll, Waker};

mod deferred;
mod extent;
#[cfg(all(test, loom))]
mod loom_model;
mod table;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
#[cfg(test)]
mod walker;

pub use extent::{Generation, Generations, PhysExtent, PhysTranslator};
pub use table::{TableBackend, WindowToken};

/// The fixed properties of a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Properties {
    /// `soft`, `vfio`, `none` ...
    pub name: &'static str,
    /// Whether it translates. If not, a device finds memory at its physical address, and all other
    /// memory too.
    pub translates: bool,
    /// Whether mapping memory pins it, and charges it to the process.
    pub pins: bool,
}

impl Properties {
    /// Returns those of a backend that translates, and pins nothing.
    pub const fn new(name: &'static str) -> Self {
        Self { name, translates: true, pins: false }
    }
}

/// The kind of a thread's wait for a ticket.
#[derive(Clone, Copy, Debug)]
pub enum Wait<'w> {
    /// Does not wait.
    Not,
    /// Does not wait; the task is woken when there may be progress.
    Wake(Until, &'w Waker),
    /// Until the ticket has completed, or the deadline of its flush has passed.
    ToDeadline,
    /// Until the ticket has completed, or this limit from now has passed.
    For(WaitLimit),
}

/// The longest sleep of a task whose flush does not end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// Until the deadline of its flush, as [`Wait::ToDeadline`].
    Deadline,
    /// Until the flush has completed, or can never complete: its deadline has passed already, or it
    /// has no waiter.
    Completion,
}

/// A range to be revoked: the union of one or more whole maps.
#[derive(Clone, Copy, Debug)]
pub struct Revocation<'w> {
    /// The range.
    pub range: IovaRange,
    /// The backend's token for the window that the buffer is in, if it keeps one.
    pub window: Option<&'w WindowToken>,
}

/// The owner of a domain's table: software, the kernel, or none.
///
/// # How to implement it
/// Six methods are required. A unit with a register for each window, which caches nothing, needs no
/// more. The example `own_backend` of this crate is such a unit as a whole program, with the buffers
/// of its device: its `unit.rs` is `no_std`, has all its state in static memory, and allocates
/// nothing.
///
/// ```
/// use pinfold_core::access::Access;
/// use pinfold_core::addr::IovaRange;
/// use pinfold_core::domain::{
///     Backend, BackendError, Properties, Revocation, Wait, WindowToken,
/// };
/// use pinfold_core::invalidate::Ticket;
/// use pinfold_core::mem::DmaMemory;
/// use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
/// use core::task::Poll;
/// use std::sync::{Mutex, MutexGuard, PoisonError};
///
/// /// The address registers of sixteen windows of 4 KiB: window `n` is at `n << 12`, and 0 is none.
/// static WINDOWS: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];
///
/// /// The only memory that may be mapped, its address and length. A map holds the lock while it
/// /// stores, so that what is unregistered meanwhile is cleared afterwards.
/// fn registered() -> MutexGuard<'static, Option<(usize, usize)>> {
///     static MEMORY: Mutex<Option<(usize, usize)>> = Mutex::new(None);
///     MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
/// }
///
/// struct Unit;
///
/// impl Backend for Unit {
///     fn properties(&self) -> Properties {
///         Properties::new("sixteen windows")
///     }
///
///     unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
///         let (addr, len) = (memory.addr(), memory.len());
///         let mut registered = registered();
///         if registered.is_some() {
///             return Err(BackendError::AlreadyRegistered { addr, len });
///         }
///         *registered = Some((addr, len));
///         Ok(())
///     }
///
///     fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
///         let (addr, len) = (memory.addr(), memory.len());
///         let mut registered = registered();
///         if *registered != Some((addr, len)) {
///             return Err(BackendError::NotRegistered { addr, len });
///         }
///         WINDOWS.iter().for_each(|window| window.store(0, SeqCst)); // whatever was mapped
///         *registered = None;
///         Ok(())
///     }
///
///     fn map(
///         &self,
///         iova: IovaRange,
///         memory: DmaMemory,
///         _: Access,
///         _: Option<&WindowToken>,
///     ) -> Result<(), BackendError> {
///         let (addr, len) = (memory.addr(), memory.len());
///         let registered = registered();
///         if !registered.is_some_and(|(start, all)| addr >= start && addr + len <= start + all) {
///             return Err(BackendError::NotRegistered { addr, len });
///         }
///         let windows = usize::try_from(iova.start().raw() >> 12).ok();
///         let windows = windows.and_then(|first| WINDOWS.get(first..first + (len >> 12)));
///         let windows = windows.ok_or(BackendError::Unmappable { iova })?; // all of them, or none
///         for (number, window) in windows.iter().enumerate() {
///             window.store((addr + (number << 12)) as u64, SeqCst);
///         }
///         Ok(())
///     }
///
///     fn revoke<'w>(
///         &self,
///         first: Revocation<'w>,
///         rest: &mut dyn Iterator<Item = Revocation<'w>>,
///     ) -> Result<Ticket, BackendError> {
///         for Revocation { range, .. } in core::iter::once(first).chain(rest) {
///             for at in (range.start().raw() >> 12)..=(range.last().raw() >> 12) {
///                 WINDOWS[at as usize].store(0, SeqCst);
///             }
///         }
///         Ok(Ticket::COMPLETED) // it caches nothing, so there is nothing to flush
///     }
///
///     fn wait(&self, ticket: Ticket, _: Wait<'_>) -> Poll<Result<(), BackendError>> {
///         let completed = ticket == Ticket::COMPLETED;
///         Poll::Ready(completed.then_some(()).ok_or(BackendError::NotRevoked))
///     }
/// }
/// # use pinfold_core::{access::FromDevice, domain::Domain, iova::IovaSpace};
/// # use pinfold_core::{addr::Iova, domain::{DomainId, Pinned}};
/// # #[repr(align(4096))]
/// # struct Page([u8; 4096]);
/// # struct Buffer(std::ptr::NonNull<Page>);
/// # unsafe impl Send for Buffer {}
/// # unsafe impl Pinned for Buffer {
/// #     fn memory(&self) -> DmaMemory<'_> { unsafe { DmaMemory::from_raw(self.0.cast(), 4096) } }
/// #     fn fixed_iova(&self, _: DomainId) -> Option<Iova> { None }
/// # }
/// # fn main() -> Result<(), BackendError> {
/// # let page = std::ptr::NonNull::from(Box::leak(Box::new(Page([0; 4096]))));
/// # let buffer = Buffer(page);
/// # let domain = Domain::new(std::sync::Arc::new(Unit), IovaSpace::new(20)?);
/// # let memory = unsafe { DmaMemory::from_raw(page.cast(), 4096) };
/// # let refused = domain.map(buffer, FromDevice).unwrap_err();
/// # assert!(matches!(refused.error, BackendError::NotRegistered { .. }));
/// # unsafe { domain.register_memory(memory) }?;
/// # let mapping = domain.map_up_to(refused.payload.unwrap(), FromDevice, Iova::new(0xffff))?;
/// # let window = (mapping.iova().start().raw() >> 12) as usize;
/// # assert_eq!(WINDOWS[window].load(SeqCst), memory.addr() as u64);
/// # let buffer = domain.unmap(mapping)?;
/// # assert_eq!(WINDOWS[window].load(SeqCst), 0);
/// # let _left = std::mem::ManuallyDrop::new(domain.map_up_to(buffer, FromDevice, Iova::new(0xffff))?);
/// # domain.unregister_memory(memory)?;
/// # assert!(WINDOWS.iter().all(|window| window.load(SeqCst) == 0));
/// # assert!(domain.unregister_memory(memory).is_err());
/// # Ok(())
/// # }
/// ```
///
/// Optional abilities are methods with defaults: an address that cannot be chosen
/// ([`required_iova`](Self::required_iova)), a window whose translation is worth keeping
/// ([`window`](Self::window)), a table that can be read ([`mapped`](Self::mapped)), counters
/// ([`stats`](Self::stats)). A unit whose flushes take time returns a ticket for each from
/// `revoke`, and implements `wait` with a source of wake-ups. A unit whose table is a radix tree in
/// memory needs none of this: [`TableBackend`] implements it for a [`Format`](crate::table::Format)
/// and an [`InvalidationQueue`](crate::invalidate::InvalidationQueue).
///
/// # Guarantees of the domain
/// - **Addresses** are the domain's: it chooses them, within the mask of a device that has one, and
///   asks the backend only where they cannot be chosen ([`required_iova`](Self::required_iova)).
///   Addresses given to [`map`](Self::map) are free: nothing is mapped there, and earlier mappings
///   have been revoked and their flush has completed. They are as long as the memory, and both
///   begin and end at multiples of 4096. The domain's space has as many bits as the
///   [`IovaSpace`](crate::iova::IovaSpace) that it was created with; the backend refuses addresses
///   of it that it cannot translate ([`BackendError::Unmappable`]), or they are excluded when the
///   domain is created ([`Domain::reserve_range`](super::Domain::reserve_range)).
/// - **A range given to [`revoke`](Self::revoke) consists of whole maps, of one or of many**: maps
///   that are adjacent in the domain are joined, from any owner, for one call or for the many of a
///   batch. No range begins or ends inside a range that one `map` mapped, except that the pieces of
///   a payload of several ([`Pinned::piece`](super::Pinned::piece)) are maps of their own. So a
///   backend that records maps, for example by first address, ends *all* maps in the range, and not
///   only the one at that address. Each map is revoked once, and before its addresses are used
///   again.
/// - Methods are called from any thread, several at once, but never two at once for overlapping
///   addresses.
///
/// # Guarantees of the backend
/// - It **refuses memory that is not registered** ([`BackendError::NotRegistered`]): the domain
///   does not track registrations. Memory that is unregistered while it is mapped is out of reach
///   when [`unregister_memory`](Self::unregister_memory) has succeeded. Its range may still be
///   revoked later; a backend that has nothing there any more may refuse that.
/// - A map that fails has changed nothing, unless its error [says
///   so](BackendError::stays_reachable). A reason of the backend's own is a
///   [`BackendError::Refused`].
/// - Tickets ascend, and complete in this order: when one has completed, all before it have. They
///   are not reused. A revocation that needs no flush returns [`Ticket::COMPLETED`].
///   [`wait`](Self::wait) for a ticket that has completed always returns success, also when the
///   unit has failed since; for [`Ticket::NEVER`] it returns an error.
/// - Flushes that a map needs (VT-d: caching mode) have completed when `map` returns.
///
/// # If a method panics
/// The domain stays usable, and no device reaches a dropped payload. A payload that was being
/// mapped, or whose revocation was being requested, is quarantined and counted
/// ([`DomainStats::quarantined`](super::DomainStats::quarantined)), because a device may reach it:
/// after a panic of `map`, `required_iova`, `revoke` or `window`. After a panic while a window is
/// closed, its addresses stay in use. After a panic of any other method nothing is lost: the domain
/// holds the payload until its flush has completed
/// ([`Domain::release_late`](super::Domain::release_late)).
///
/// Once a method has panicked, no clean-up calls one while its thread unwinds (with the feature
/// `std`, which detects that): a second panic there would end the process. Remaining mappings are
/// revoked by the next map, revocation or wait instead, or when the domain is dropped.
pub trait Backend: Send + Sync {
    /// Returns the properties of the backend.
    fn properties(&self) -> Properties;

    /// Allows the memory, whole pages, to be mapped until
    /// [`unregister_memory`](Self::unregister_memory). What is mapped later is any part of it.
    ///
    /// # Errors
    /// [`BackendError::AlreadyRegistered`] if part of it is registered.
    ///
    /// # Safety
    /// The caller keeps the memory valid until `unregister_memory` has succeeded: for good where it
    /// has not.
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;

    /// Unregisters memory, as it was registered: after this succeeds, no device reaches it through
    /// this backend, even if it was mapped.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`] if no memory was registered with this address and length:
    /// nothing has changed. [`BackendError::NotRevoked`] if a device may still reach it: it can be
    /// mapped no more, and must not be reused.
    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;

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

    /// Prepares `window`, 2 MiB, aligned, for one owner that maps there and nowhere else at a time:
    /// the token is given with each map and revocation in it, and closed by the domain when
    /// nothing is mapped there any more. `None`, the default, if it has nothing to prepare: the
    /// window is mapped as any other range.
    fn window(self: Arc<Self>, window: IovaRange) -> Option<WindowToken> {
        let _ = window;
        None
    }

    /// Maps `memory` at `iova` for `access`, in the window of `window` if there is one. When it
    /// returns, the device reaches the memory there, with no other access.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`] if part of the memory is not registered, and others. Nothing
    /// has changed and no device reaches the memory, unless the error
    /// [says so](BackendError::stays_reachable).
    fn map(
        &self,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
        window: Option<&WindowToken>,
    ) -> Result<(), BackendError>;

    /// Revokes access to `first` and to all of `rest`, each of which is the union of one or more
    /// whole maps, and requests one flush for them. The device may reach them until the ticket has
    /// completed; by then all earlier tickets have completed too. Allocates nothing.
    ///
    /// # Errors
    /// A device may reach any of the ranges for good.
    fn revoke<'w>(
        &self,
        first: Revocation<'w>,
        rest: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError>;

    /// Returns whether the flush has completed, after a wait of the requested kind: always success
    /// once it has. [`Ticket::NEVER`] never completes.
    ///
    /// - [`Wait::Not`]: now. `Pending` while the flush is in flight, and an error where
    ///   [`Wait::ToDeadline`] would end with it at once.
    /// - [`Wait::Wake`]: now. If it is `Pending`, the waker is woken when the flush completes or
    ///   fails or, with [`Until::Deadline`], passes its deadline; with [`Until::Completion`] it is
    ///   `Pending` past the deadline too. It may wake early, but not in a loop, and holds no lock
    ///   of its own while it does: the woken task may use the domain. The domain itself waits in
    ///   this way for the buffers that it holds
    ///   ([`Domain::release_late`](super::Domain::release_late)), and releases them on the thread
    ///   that wakes it.
    /// - [`Wait::ToDeadline`], [`Wait::For`]: blocks, and is never `Pending`.
    ///
    /// # Errors
    /// [`BackendError::Flush`]: a device may reach the ranges of the flush until it completes,
    /// which may be [never](crate::invalidate::WaitError::UnitFailed).
    fn wait(&self, ticket: Ticket, wait: Wait<'_>) -> Poll<Result<(), BackendError>>;

    /// Returns what its table maps, as [`Table::mapped`](crate::table::Table::mapped) does; `None`,
    /// the default, if it cannot read its table.
    fn mapped(&self) -> Option<Box<dyn Iterator<Item = MappedRun> + '_>> {
        None
    }

    /// Returns the statistics; those of nothing by default.
    fn stats(&self) -> BackendStats {
        BackendStats::default()
    }
}
