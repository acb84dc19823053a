//! The interface between a domain and the owner of its table: the trait, the translation of memory
//! to the physical addresses that a table holds, and [`TableBackend`], which owns its table: it
//! maps by writing the [`Table`], and revokes by clearing it and requesting a flush of an
//! [`Invalidator`].

use super::error::BackendError;
use super::late::DeferredReclaim;
use super::stats::BackendStats;
use crate::access::Access;
use crate::addr::{IovaRange, PageSize, PhysAddr, PhysRange};
use crate::drop_guard::{CleanUp, DropGuard};
use crate::invalidate::{
    Flush, FlushList, InvalidationQueue, Invalidator, Ticket, WaitError, WaitLimit,
};
use crate::known_bad::{self, Mistake};
use crate::mem::DmaMemory;
use crate::sync::{AtomicU64, Ordering, unique_number};
use crate::table::{Format, MappedRun, PinnedLeaf, Retired, Table, TableError};
use alloc::boxed::Box;
use core::fmt;
use core::task::{Poll, Waker};

#[cfg(all(test, loom))]
mod loom_model;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
#[cfg(test)]
mod walker;

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

/// How long a task sleeps at most whose flush does not end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// Until the deadline of its flush, as a [`wait`](Backend::wait) without a limit.
    Deadline,
    /// Until the flush has completed, or never can: it is past its deadline already, or nobody
    /// waits for one.
    Completion,
}

/// The owner of a domain's table: software, the kernel, or none.
///
/// The example `own_backend` of this crate is one in a hundred lines, with its table in static
/// memory.
///
/// # What the domain keeps
/// - **Addresses** are the domain's: it chooses them, within the mask of a device that has one, and
///   asks the backend only where they cannot be chosen ([`required_iova`](Self::required_iova)).
///   Those given to [`map`](Self::map) are free: nothing is mapped there, and what was has been
///   revoked and its flush has completed. They are as long as the memory, and both begin and end at
///   multiples of 4096. The domain's space has as many bits as the
///   [`IovaSpace`](crate::iova::IovaSpace) that it was
///   created with; what the backend cannot translate of these it refuses
///   ([`BackendError::Unmappable`]), or the domain is created without
///   ([`Domain::reserve_range`](super::Domain::reserve_range)).
/// - **A range given to [`revoke`](Self::revoke) consists of whole maps, of one or of many**: those
///   that are adjacent in the domain are joined, whoever mapped them, for one call or for the many
///   of a batch. No range begins or ends inside of what one `map` mapped, except that the pieces of
///   a payload of several ([`Pinned::piece`](super::Pinned::piece)) are maps of their own. So a
///   backend that keeps what was mapped, as by its first address, ends *all* that lies in the range,
///   and not the entry of that address. Each map is revoked once, and before its addresses are used
///   again.
/// - Methods are called from any thread, several at once, but never two at once for overlapping
///   addresses.
///
/// # What the backend keeps
/// - It **refuses memory that is not registered** ([`BackendError::NotRegistered`]): the domain does
///   not know what is. Memory that is unregistered while it is mapped is out of reach when
///   [`unregister_memory`](Self::unregister_memory) returns. Its range may be revoked later all the
///   same; a backend that has nothing there any more may refuse that.
/// - A map that fails has changed nothing, unless its error [says so](BackendError::stays_reachable).
///   In words of its own it refuses by [`BackendError::Refused`].
/// - Tickets ascend, and complete in this order: when one has completed, all before it have. They
///   are not reused. [`Ticket::COMPLETED`] is what a revocation returns that needs no flush.
///   [`check`](Self::check) and [`wait`](Self::wait) of a ticket that has completed return success,
///   then and ever after, also when the unit has failed since; of [`Ticket::NEVER`] they return an
///   error.
/// - Flushes that a map needs (VT-d: caching mode) have completed when `map` returns.
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

    /// Allows the memory, whole pages, to be mapped until
    /// [`unregister_memory`](Self::unregister_memory). What is mapped later is any part of it.
    ///
    /// # Errors
    /// [`BackendError::AlreadyRegistered`] if part of it is registered.
    ///
    /// # Safety
    /// The caller keeps the memory valid until `unregister_memory` has returned.
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;

    /// Forgets memory, as it was registered: after this returns, no device reaches it through this
    /// backend, whatever is mapped. Memory that is not registered is none of its.
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

    /// Maps `memory` at `iova` for `access`. When it returns, the device finds it, and has no other
    /// access there.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`] if part of the memory is not registered, and others. Nothing
    /// has changed and no device reaches the memory, unless the error
    /// [says so](BackendError::stays_reachable).
    fn map(&self, iova: IovaRange, memory: DmaMemory, access: Access) -> Result<(), BackendError>;

    /// Revokes access to all of `ranges`, each of which is the union of one or more whole maps, and
    /// requests one flush for them. The device may reach them until the ticket has completed; by
    /// then all earlier tickets have completed too. Those in a window of
    /// [`windows`](Self::windows) come with its pin. Without any range nothing is to be flushed, as
    /// [`Ticket::COMPLETED`] says. Allocates nothing.
    ///
    /// # Errors
    /// A device may reach any of the ranges for good.
    fn revoke(
        &self,
        ranges: &mut dyn Iterator<Item = (IovaRange, Option<&PinnedLeaf>)>,
    ) -> Result<Ticket, BackendError>;

    /// Revokes access to one range, as [`revoke`](Self::revoke) does.
    ///
    /// # Errors
    /// As there.
    #[inline]
    fn revoke_one(
        &self,
        range: IovaRange,
        pin: Option<&PinnedLeaf>,
    ) -> Result<Ticket, BackendError> {
        self.revoke(&mut core::iter::once((range, pin)))
    }

    /// Returns whether the flush has completed, without waiting: `Pending` while it is in flight,
    /// else how a [`wait`](Self::wait) without a limit ends; success for good once it has completed.
    /// [`Ticket::NEVER`] is never completed.
    fn check(&self, ticket: Ticket) -> Poll<Result<(), BackendError>>;

    /// Waits until the flush has completed: until its deadline has passed, or with a limit for that
    /// long from now.
    ///
    /// # Errors
    /// [`BackendError::Flush`]: a device may reach what the flush covers until it completes, which
    /// may be [never](crate::invalidate::WaitError::UnitFailed).
    fn wait(&self, ticket: Ticket, limit: Option<WaitLimit>) -> Result<(), BackendError>;

    /// Wakes `waker` when [`check`](Self::check) of a pending ticket may have changed: at the
    /// latest when the flush completes or fails or, with [`Until::Deadline`], passes its deadline,
    /// and at once if it has. The caller checks again after this returns.
    ///
    /// It may wake early, but not in a loop, and holds no lock of its own while it does: the woken
    /// task may use the domain. The domain itself waits so for what it holds
    /// ([`Domain::release_late`](super::Domain::release_late)), and releases it where it is woken.
    ///
    /// By default at once, which is right for a backend whose tickets complete before they are
    /// returned. One whose flushes take time overrides it, with a source of its own.
    fn wake(&self, ticket: Ticket, until: Until, waker: &Waker) {
        let _ = (ticket, until);
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

/// Translates memory of this process to physical addresses.
///
/// The addresses are believed: they become leaves of a table, and what is there is what a device
/// reaches. So they are those of the memory asked for, and stay so while it is registered.
pub trait PhysTranslator: Send + Sync {
    /// Allows the memory to be given to devices.
    ///
    /// # Errors
    /// As for [`Backend::register_memory`].
    ///
    /// # Safety
    /// The caller keeps the memory valid until [`unregister_memory`](Self::unregister_memory) has
    /// returned.
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;

    /// Forgets the memory: after this returns, no device reaches it, whatever the table contains,
    /// and [`generation`](Self::generation) has changed.
    fn unregister_memory(&self, memory: DmaMemory);

    /// Returns the largest registered, physically contiguous extent that contains the start of
    /// `memory`. It may begin before `memory`, and end before or after it.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`] if any part of `memory` is not registered.
    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError>;

    /// Returns what changes when memory is unregistered, the [current](Generations::current) one of
    /// its own [`Generations`]. An extent that was found after it was read is valid for as long as
    /// it stays the same: [`ExtentCache`] relies on that.
    fn generation(&self) -> Generation;

    /// Returns the physically contiguous run at the start of `memory`: a multiple of 4096 bytes, at
    /// most its length.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`].
    fn run(&self, memory: DmaMemory) -> Result<PhysRange, BackendError> {
        run_in(self.extent(memory)?, memory)
    }
}

/// What one [`PhysTranslator`] has registered at one time: no other translator, and no other time,
/// has the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Generation(u64);

/// The generations of one [`PhysTranslator`].
#[derive(Debug)]
pub struct Generations(AtomicU64);

impl Generations {
    /// Begins with one that no other has had.
    pub fn new() -> Self {
        Self(AtomicU64::new(unique_number()))
    }

    /// Returns the current one.
    #[inline(always)]
    pub fn current(&self) -> Generation {
        Generation(self.0.load(Ordering::Acquire))
    }

    /// Begins the next one, when memory has been unregistered.
    pub fn advance(&self) {
        self.0.store(unique_number(), Ordering::Release);
    }
}

impl Default for Generations {
    fn default() -> Self {
        Self::new()
    }
}

/// Registered memory of this process that is physically contiguous: whole pages of 4096 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PhysExtent {
    addr: usize,
    phys: PhysRange,
}

impl PhysExtent {
    /// Creates the extent of the process addresses `addr..addr + phys.len()`, whose physical
    /// addresses are `phys`.
    pub const fn new(addr: usize, phys: PhysRange) -> Self {
        Self { addr, phys }
    }

    /// Returns the part of the extent at the start of `memory`, at most its length; `None` if the
    /// extent does not contain that address.
    #[inline]
    fn run(&self, memory: DmaMemory) -> Option<PhysRange> {
        let offset = memory.addr().checked_sub(self.addr)? as u64;
        let rest = self.phys.len().checked_sub(offset)?;
        self.phys.part(offset, rest.min(memory.len() as u64))
    }
}

/// One owner's copy of the extent that it found last: translates memory in it by one load, without
/// a lock.
///
/// ```
/// use pinfold_core::domain::{BackendError, ExtentCache, PhysTranslator};
/// # use pinfold_core::addr::PhysRange;
/// # use pinfold_core::mem::DmaMemory;
///
/// fn phys(
///     cache: &mut ExtentCache,
///     iommu: &impl PhysTranslator,
///     memory: DmaMemory,
/// ) -> Result<PhysRange, BackendError> {
///     cache.run(iommu, memory) // asks the IOMMU only where the last answer does not hold
/// }
/// ```
#[derive(Clone, Debug, Default)]
pub struct ExtentCache {
    last: Option<(Generation, PhysExtent)>,
}

impl ExtentCache {
    /// Creates an empty cache.
    pub const fn new() -> Self {
        Self { last: None }
    }

    /// Returns what [`PhysTranslator::run`] returns for `memory`, from the extent found last if
    /// that contains it, was found by the same translator, and nothing has been unregistered since.
    ///
    /// The caller keeps `memory` registered during the call: if it is unregistered meanwhile, this
    /// may return the physical addresses that it had.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`].
    #[inline]
    pub fn run(
        &mut self,
        translator: &(impl PhysTranslator + ?Sized),
        memory: DmaMemory,
    ) -> Result<PhysRange, BackendError> {
        // Read before the extent is looked up: one that is unregistered in between is then not used
        // again.
        let generation = translator.generation();
        let cached = self.last.filter(|(then, _)| *then == generation);
        if let Some(run) = cached.and_then(|(_, extent)| extent.run(memory)) {
            return Ok(run);
        }
        let extent = translator.extent(memory)?;
        self.last = Some((generation, extent));
        run_in(extent, memory)
    }
}

fn run_in(extent: PhysExtent, memory: DmaMemory) -> Result<PhysRange, BackendError> {
    extent.run(memory).ok_or(BackendError::NotRegistered { addr: memory.addr(), len: memory.len() })
}

/// How often a map is attempted while table pages are reclaimed: other owners may take them first
/// each time.
const MAP_ATTEMPTS: u32 = 64;
/// How often a map that needs table pages polls for those that another thread is retiring.
const RETIRING_POLLS: u64 = 10_000;

/// A range to be cleared, with the pin of its window if there is one.
type Cleared<'r> = (IovaRange, Option<&'r PinnedLeaf>);

/// Retired pages whose flush is being requested. If the queue panics, they are flushed with the
/// next that are retired.
struct Unflushed<'t, F: Format> {
    table: &'t Table<F>,
    retired: Retired,
}

impl<F: Format> CleanUp for Unflushed<'_, F> {
    fn clean_up(self) {
        // Refused only if the pages belong to another table, which does not happen; they would stay
        // retired.
        let _ = self.table.put_back_retired(self.retired);
    }
}

/// A [`Backend`] that owns a table of format `F` and flushes through `Q`.
pub struct TableBackend<F: Format, Q: InvalidationQueue + PhysTranslator> {
    name: &'static str,
    table: Table<F>,
    invalidator: Invalidator<Q>,
    deferred: DeferredReclaim,
}

impl<F: Format, Q: InvalidationQueue + PhysTranslator> TableBackend<F, Q> {
    /// Creates a backend over an empty `table`, which is flushed through `queue`.
    pub fn new(name: &'static str, queue: Q, table: Table<F>) -> Self {
        Self {
            name,
            table,
            invalidator: Invalidator::new(queue),
            deferred: DeferredReclaim::default(),
        }
    }

    /// Returns where the hardware begins to walk.
    pub fn root(&self) -> PhysAddr {
        self.table.root()
    }

    /// Returns how many bits of address the table translates.
    pub fn bits(&self) -> u32 {
        self.table.bits()
    }

    /// Returns the invalidation queue.
    pub fn queue(&self) -> &Q {
        self.invalidator.queue()
    }

    /// Maps one physical run. If no table page is free but some are retired, waits for these and
    /// tries again.
    ///
    /// Another owner may take the reclaimed pages first, and a parent is retired only after its
    /// last child has been reclaimed, so one attempt is not enough.
    fn map_run(&self, iova: IovaRange, phys: PhysAddr, access: Access) -> Result<(), TableError> {
        self.with_pages(|| self.table.map(iova, phys, access))
    }

    /// Attempts `change` again while it lacks table pages and some are retired.
    fn with_pages<T>(&self, change: impl Fn() -> Result<T, TableError>) -> Result<T, TableError> {
        let mut attempts = 0;
        loop {
            let reclaimed = self.deferred.reclaimed(); // before the attempt, or progress made during it would be missed
            let result = change();
            attempts += 1;
            let exhausted = matches!(result, Err(TableError::NoPages { .. }));
            if !exhausted || attempts == MAP_ATTEMPTS || !self.wait_for_retired(reclaimed) {
                return result;
            }
        }
    }

    /// Waits until retired table pages have been reclaimed, by any thread, since `reclaimed` was
    /// read. Returns false if none are retired, or their flush fails.
    fn wait_for_retired(&self, reclaimed: u64) -> bool {
        for polls in 0..RETIRING_POLLS {
            // Pages that failed maps and earlier reclaims have retired have no ticket yet.
            let mut pending = Retired::new();
            if self.table.collect_retired(&mut pending).is_err() {
                return false;
            }
            self.flush_retired(pending);
            if self.invalidator.wait(self.deferred.last()).is_err() {
                return false;
            }
            self.reclaim_all();
            // In this order: a page stops being retired before it counts as reclaimed.
            let retired = self.table.stats().retired;
            let progress = self.deferred.progress();
            if progress.reclaimed != reclaimed {
                return true;
            }
            if retired == 0 && !progress.goes_on {
                return false;
            }
            // Another thread has retired them and has not yet deferred them, or is reclaiming them.
            self.queue().relax(polls);
        }
        false
    }

    /// Waits for the retired table pages in the place of superpages of a mapping: once for a range
    /// that was used with 4 KiB leaves before. If their flush does not complete, the mapping gets
    /// these leaves again.
    fn make_room(&self, iova: IovaRange, phys: PhysAddr) {
        // An error is found by the map, too.
        if self.table.awaits_room(iova, phys) == Ok(true) {
            self.wait_for_retired(self.deferred.reclaimed());
        }
    }

    /// Requests the flushes of retired table pages, of links as well as leaves, and defers their
    /// reclaim until then.
    fn flush_retired(&self, retired: Retired) -> Ticket {
        if retired.is_empty() {
            return Ticket::COMPLETED;
        }
        let retired = DropGuard::new(Unflushed { table: &self.table, retired });
        let ticket = match self.table.retired_ranges(&retired.retired) {
            Ok(ranges) => self
                .invalidator
                .request_and_submit(ranges.map(|range| Flush { range, leaf_only: false })),
            // Pages of another table, which does not happen; they would stay retired.
            Err(_) => return Ticket::COMPLETED,
        };
        self.deferred.add(&self.table, retired.into_inner().retired, ticket);
        ticket
    }

    /// Reclaims retired table pages whose flush has completed: no walker can hold them.
    fn reclaim(&self) {
        let is_completed = |ticket| {
            known_bad::makes(Mistake::TablePageEarly) || self.invalidator.completed() >= ticket
        };
        self.deferred.reclaim(&self.table, is_completed);
    }

    /// Reclaims all retired table pages whose flush has completed: those that waited for it, and
    /// then those gathered meanwhile.
    fn reclaim_all(&self) {
        self.reclaim();
        self.reclaim();
    }

    /// Clears, then requests the flush and submits it if the queue is not full: in this order, or a
    /// walk between the two would stay cached. Takes no lock while it clears.
    fn clear<'r>(
        &self,
        ranges: &mut dyn Iterator<Item = Cleared<'r>>,
    ) -> Result<Ticket, TableError> {
        #[cfg(any(test, feature = "known-bad"))]
        if known_bad::makes(Mistake::FlushBeforeClear) {
            return self.flush_then_clear(ranges);
        }
        let Some((first, pin)) = ranges.next() else { return Ok(Ticket::COMPLETED) };
        self.clear_from(first, pin, ranges)
    }

    /// Clears `first`, and the ranges behind it.
    #[inline(always)]
    fn clear_from<'r>(
        &self,
        first: IovaRange,
        pin: Option<&PinnedLeaf>,
        mut ranges: impl Iterator<Item = Cleared<'r>>,
    ) -> Result<Ticket, TableError> {
        self.reclaim();
        let mut retired = Retired::new();
        self.clear_one(first, pin, &mut retired)?;
        match ranges.next() {
            // One range, which needs no list.
            None if retired.is_empty() => Ok(self.invalidator.request_one(Flush::from(first))),
            second => self.clear_rest(first, &mut second.into_iter().chain(ranges), retired),
        }
    }

    /// Clears the ranges behind the `first` one.
    fn clear_rest<'r>(
        &self,
        first: IovaRange,
        ranges: &mut dyn Iterator<Item = Cleared<'r>>,
        mut retired: Retired,
    ) -> Result<Ticket, TableError> {
        let mut list = FlushList::new();
        let (mut ticket, mut failed) = (Ticket::COMPLETED, None);
        // There is room.
        let _ = list.push(Flush::from(first));
        for (range, pin) in ranges {
            if let Err(error) = self.clear_one(range, pin, &mut retired) {
                failed = Some(error);
                break;
            }
            let mut flush = Flush::from(range);
            while let Err(full) = list.push(flush) {
                ticket = ticket.max(self.invalidator.request_list(&mut list, false));
                flush = full;
            }
        }
        ticket = ticket.max(self.invalidator.request_list(&mut list, retired.is_empty()));
        ticket = ticket.max(self.flush_retired(retired));
        failed.map_or(Ok(ticket), Err)
    }

    #[inline]
    fn clear_one(
        &self,
        range: IovaRange,
        pin: Option<&PinnedLeaf>,
        retired: &mut Retired,
    ) -> Result<(), TableError> {
        match pin {
            Some(pin) => self.table.clear_pinned(pin, range),
            None => self.table.clear(range, retired),
        }
    }

    /// Does what [`clear`](Self::clear) does, in the wrong order.
    #[cfg(any(test, feature = "known-bad"))]
    fn flush_then_clear<'r>(
        &self,
        ranges: &mut dyn Iterator<Item = Cleared<'r>>,
    ) -> Result<Ticket, TableError> {
        let ranges: alloc::vec::Vec<_> = ranges.collect();
        self.reclaim();
        let flushes = ranges.iter().map(|(range, _)| Flush { range: *range, leaf_only: false });
        let ticket = self.invalidator.request(flushes);
        self.invalidator.submit();
        let mut retired = Retired::new();
        ranges.into_iter().try_for_each(|(range, pin)| self.clear_one(range, pin, &mut retired))?;
        self.deferred.add(&self.table, retired, ticket);
        Ok(ticket)
    }

    /// Whether the unit caches entries that are not present, so that a map has to flush them.
    #[inline]
    fn caches_not_present(&self) -> bool {
        self.queue().caches_not_present()
    }

    /// Flushes what a device may have cached as not present, at any level.
    fn flush_not_present(&self, iova: IovaRange) -> Result<(), WaitError> {
        if !self.caches_not_present() {
            return Ok(());
        }
        self.invalidator.wait(self.invalidator.request([Flush { range: iova, leaf_only: false }]))
    }

    /// Undoes the first `mapped` bytes of a map that failed with `error`.
    fn roll_back(
        &self,
        iova: IovaRange,
        pin: Option<&PinnedLeaf>,
        mapped: u64,
        error: BackendError,
    ) -> BackendError {
        let Some(part) = iova.part(0, mapped) else { return error };
        let incomplete = |flush| BackendError::RollbackIncomplete { iova, flush };
        match self.clear(&mut core::iter::once((part, pin))) {
            Ok(_) if known_bad::makes(Mistake::RollbackNotAwaited) => error,
            Ok(ticket) => self.invalidator.wait(ticket).map_or_else(incomplete, |()| error),
            Err(_) => BackendError::NotRevoked,
        }
    }

    /// Maps `memory` run by run: `run` translates the start of what is left, in the window of `pin`
    /// if there is one.
    fn map_runs(
        &self,
        iova: IovaRange,
        pin: Option<&PinnedLeaf>,
        memory: DmaMemory,
        access: Access,
        mut run: impl FnMut(DmaMemory) -> Result<PhysRange, BackendError>,
    ) -> Result<(), BackendError> {
        let len = memory.len() as u64;
        let not_registered =
            || BackendError::NotRegistered { addr: memory.addr(), len: memory.len() };
        if iova.len() != len {
            return Err(BackendError::LengthsDiffer { iova, memory_bytes: memory.len() });
        }
        let mut mapped = 0;
        while mapped < len {
            let mut step = || {
                let at = usize::try_from(mapped).map_err(|_| not_registered())?;
                let rest = memory.part(at, memory.len() - at).map_err(|_| not_registered())?;
                let run = run(rest)?;
                let piece = iova.part(mapped, run.len()).ok_or_else(not_registered)?;
                match pin {
                    Some(pin) => self.table.map_pinned(pin, piece, run.start(), access)?,
                    None => {
                        if run.len() >= PageSize::Size2M.bytes() {
                            self.make_room(piece, run.start());
                        }
                        self.map_run(piece, run.start(), access)?;
                    }
                }
                Ok(run.len())
            };
            mapped += match step() {
                Ok(bytes) => bytes,
                Err(error) => return Err(self.roll_back(iova, pin, mapped, error)),
            };
        }
        self.flush_not_present(iova).map_err(|flush| {
            let error = BackendError::MapNotFlushed { iova, flush };
            self.roll_back(iova, pin, len, error)
        })
    }
}

impl<F: Format, Q: InvalidationQueue + PhysTranslator> Backend for TableBackend<F, Q> {
    fn name(&self) -> &'static str {
        self.name
    }

    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise is the one that `register_memory` requires.
        unsafe { self.queue().register_memory(memory) }
    }

    fn unregister_memory(&self, memory: DmaMemory) {
        self.queue().unregister_memory(memory);
    }

    fn map(&self, iova: IovaRange, memory: DmaMemory, access: Access) -> Result<(), BackendError> {
        self.reclaim();
        self.map_runs(iova, None, memory, access, |rest| self.queue().run(rest))
    }

    fn revoke(
        &self,
        ranges: &mut dyn Iterator<Item = Cleared<'_>>,
    ) -> Result<Ticket, BackendError> {
        Ok(self.clear(ranges)?)
    }

    #[inline]
    fn revoke_one(
        &self,
        range: IovaRange,
        pin: Option<&PinnedLeaf>,
    ) -> Result<Ticket, BackendError> {
        #[cfg(any(test, feature = "known-bad"))]
        if known_bad::makes(Mistake::FlushBeforeClear) {
            return Ok(self.flush_then_clear(&mut core::iter::once((range, pin)))?);
        }
        Ok(self.clear_from(range, pin, core::iter::empty())?)
    }

    fn check(&self, ticket: Ticket) -> Poll<Result<(), BackendError>> {
        self.invalidator.check(ticket).map_err(Into::into)
    }

    fn wait(&self, ticket: Ticket, limit: Option<WaitLimit>) -> Result<(), BackendError> {
        let waited = match limit {
            None => self.invalidator.wait(ticket),
            Some(limit) => self.invalidator.wait_for(ticket, limit),
        };
        Ok(waited?)
    }

    fn wake(&self, ticket: Ticket, until: Until, waker: &Waker) {
        self.invalidator.wake(ticket, until == Until::Deadline, waker);
    }

    fn windows(&self) -> Option<&dyn PinnedWindows> {
        Some(self)
    }

    fn mapped(&self) -> Option<Box<dyn Iterator<Item = MappedRun> + '_>> {
        Some(Box::new(self.table.mapped()))
    }

    fn stats(&self) -> BackendStats {
        let table = self.table.stats();
        BackendStats {
            invalidations: self.invalidator.stats(),
            table_pages: table.in_use.into(),
            table_pages_retired: table.retired.into(),
            ..BackendStats::default()
        }
    }
}

impl<F: Format, Q: InvalidationQueue + PhysTranslator> PinnedWindows for TableBackend<F, Q> {
    fn pin(&self, window: IovaRange) -> Result<PinnedLeaf, BackendError> {
        Ok(self.with_pages(|| self.table.pin(window.start()))?)
    }

    fn map_pinned(
        &self,
        pin: &PinnedLeaf,
        extents: &mut ExtentCache,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
    ) -> Result<(), BackendError> {
        // The usual case, in one piece: as `map_runs` does it.
        if let Ok(run) = extents.run(self.queue(), memory)
            && run.len() == iova.len()
            && memory.len() as u64 == iova.len()
            && !self.caches_not_present()
        {
            return Ok(self.table.map_pinned(pin, iova, run.start(), access)?);
        }
        self.map_runs(iova, Some(pin), memory, access, |rest| extents.run(self.queue(), rest))
    }

    fn unpin(&self, pin: PinnedLeaf) {
        let mut retired = Retired::new();
        // Refused only if something is mapped there: then the page stays pinned, and the pin is
        // leaked.
        if self.table.unpin(pin, &mut retired).is_ok() {
            self.flush_retired(retired);
        }
    }
}

impl<F: Format, Q: InvalidationQueue + PhysTranslator> fmt::Debug for TableBackend<F, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableBackend").field("name", &self.name).finish_non_exhaustive()
    }
}
