//! The domain: its backend, its addresses, its static mappings, and the buffers that it holds until
//! a flush completes; and the two contracts of its users: [`Pinned`] memory, which can be mapped,
//! and a [`Payload`], which a driver gives to its device.

use super::backend::{Backend, Properties, Revocation, Wait, WindowToken};
use super::error::BackendError;
use super::late::{self, PendingReleases};
use super::stats::{Counts, DomainStats, Sum, Writers};
use super::window::{OwnerShared, SlotBox};
use crate::access::{Access, Direction};
use crate::addr::{Iova, IovaRange, PageSize, Segment};
use crate::drop_guard::PanicFlag;
use crate::invalidate::{Ticket, WaitError, WaitLimit};
use crate::iova::{IovaError, IovaSpace};
use crate::mem::DmaMemory;
use crate::share::Shared;
use crate::sync::{AtomicU64, Mutex, Ordering, unique_number};
use crate::table::MappedRun;
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::task::Poll;

/// One I/O address space. A handle: a clone is the same domain.
///
/// Its mappings, and the handles of its owners, keep the domain, so it lives as long as one of
/// them. See the [module](super) for the life of a mapping.
#[derive(Clone)]
pub struct Domain {
    pub(super) space: Shared<Space>,
}

/// The domain itself, which all of its handles and mappings share.
pub(super) struct Space {
    id: DomainId,
    backend: Arc<dyn Backend>,
    properties: Properties,
    panics: PanicFlag,
    pub(super) iovas: Arc<IovaSpace>,
    pub(super) statics: Statics,
    pub(super) pending: PendingReleases,
    /// Counts operations without an owner's handle, and those of owners that have been dropped.
    pub(super) counts: Counts,
    pub(super) owners: Mutex<Vec<Arc<OwnerShared>>>,
    /// Windows to be closed: of owners that have been dropped, and idle ones.
    pub(super) abandoned: Mutex<Vec<SlotBox>>,
    /// Windows of all owners.
    pub(super) windows: AtomicU64,
    pub(super) quarantined: AtomicU64,
    pub(super) quarantined_bytes: AtomicU64,
    /// The most bytes that may be revoked and not yet returned before a revocation waits.
    pub(super) held_limit: AtomicU64,
}

impl Domain {
    /// Creates a domain over `backend`, with addresses from `iovas`.
    pub fn new(backend: Arc<dyn Backend>, iovas: IovaSpace) -> Self {
        Self { space: Shared::new(Space::new(backend, iovas)) }
    }

    /// Returns the domain's identity.
    pub fn id(&self) -> DomainId {
        self.space.id
    }

    /// Returns the [name](Properties::name) of its backend.
    pub fn name(&self) -> &'static str {
        self.space.properties.name
    }

    /// Whether mapping memory pins it and charges it to the process: then it need not be locked
    /// too.
    pub fn pins(&self) -> bool {
        self.space.properties.pins
    }

    /// Returns what devices can reach now by the table, by ascending address, neighbours merged;
    /// `None` if the backend cannot read its table (the kernel's, or none).
    ///
    /// Includes mappings of all kinds; revoked ranges are not included, although a device may reach
    /// them until the flush has completed. Other threads may map and revoke meanwhile: the result
    /// may then be torn, as [`Table::mapped`](crate::table::Table::mapped) describes.
    pub fn mapped(&self) -> Option<Box<dyn Iterator<Item = MappedRun> + '_>> {
        self.space.backend.mapped()
    }

    /// Registers the memory: only registered memory can be mapped.
    ///
    /// # Errors
    /// [`BackendError::AlreadyRegistered`], [`BackendError::NotPages`].
    ///
    /// # Safety
    /// The caller keeps the memory valid until [`unregister_memory`](Self::unregister_memory) has
    /// succeeded: for good where it has not. No thread maps it while another unregisters it; and
    /// where the unit's walk does not snoop, what was revoked of it has been waited for before.
    pub unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        check_pages(memory)?;
        // SAFETY: the caller's promise is the one that `register_memory` requires.
        unsafe { self.space.backend.register_memory(memory) }
    }

    /// Unregisters the memory: after this succeeds, no device of this domain reaches it, even if it
    /// was mapped. It may have all that the devices have cached flushed, and wait for that, which
    /// includes what another thread is revoking.
    ///
    /// No other thread may map the memory meanwhile. If it is revoked by another thread, and the
    /// unit's walk does not snoop, wait for the revocation first: until the thread has written the
    /// cleared entry back, the unit may read the old one again after the flush.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`] if no memory was registered with this address and length:
    /// nothing has changed. [`BackendError::NotRevoked`] if a device may still reach it: it can be
    /// mapped no more, and must not be reused.
    pub fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        self.space.backend.unregister_memory(memory)
    }

    /// Counts memory that its owner quarantined, because a device may reach it for good.
    pub fn count_quarantined(&self, bytes: u64) {
        self.space.count_quarantined(bytes);
    }
}

impl Space {
    fn new(backend: Arc<dyn Backend>, iovas: IovaSpace) -> Self {
        Self {
            id: DomainId::next(),
            properties: backend.properties(),
            backend,
            panics: PanicFlag::new(),
            iovas: Arc::new(iovas),
            statics: Statics::new(),
            pending: PendingReleases::new(),
            counts: Counts::new(Writers::Many),
            owners: Mutex::new(Vec::new()),
            abandoned: Mutex::new(Vec::new()),
            windows: AtomicU64::new(0),
            quarantined: AtomicU64::new(0),
            quarantined_bytes: AtomicU64::new(0),
            held_limit: AtomicU64::new(u64::MAX),
        }
    }

    pub(super) fn id(&self) -> DomainId {
        self.id
    }

    /// Whether the backend translates.
    #[inline(always)]
    pub(super) fn translates(&self) -> bool {
        self.properties.translates
    }

    /// Calls the backend, and remembers if that panics.
    #[inline(always)]
    pub(super) fn call<'d, R>(&'d self, call: impl FnOnce(&'d dyn Backend) -> R) -> R {
        self.panics.call(|| call(&*self.backend))
    }

    /// Prepares a window in the backend.
    pub(super) fn prepare(&self, window: IovaRange) -> Option<WindowToken> {
        self.panics.call(|| Arc::clone(&self.backend).window(window))
    }

    /// Revokes one range, with a flush of its own.
    #[inline(always)]
    pub(super) fn revoke_one(&self, revocation: Revocation<'_>) -> Result<Ticket, BackendError> {
        self.call(|backend| backend.revoke(revocation, &mut core::iter::empty()))
    }

    /// Returns how a wait for the flush would end if it ended now.
    #[inline(always)]
    pub(super) fn check(&self, ticket: Ticket) -> Poll<Result<(), BackendError>> {
        self.call(|backend| backend.wait(ticket, Wait::Not))
    }

    /// Whether the flush has completed.
    #[inline(always)]
    pub(super) fn has_completed(&self, ticket: Ticket) -> bool {
        matches!(self.check(ticket), Poll::Ready(Ok(())))
    }

    /// Waits for the flush: to its deadline, or for at most `limit`.
    #[inline(always)]
    pub(super) fn wait(
        &self,
        ticket: Ticket,
        limit: Option<WaitLimit>,
    ) -> Result<(), BackendError> {
        let wait = limit.map_or(Wait::ToDeadline, Wait::For);
        match self.call(|backend| backend.wait(ticket, wait)) {
            Poll::Ready(waited) => waited,
            // Against the contract: it has returned, so the wait has ended.
            Poll::Pending => {
                Err(BackendError::Flush(WaitError::TimedOut { ticket, waited_ns: 0, polls: 0 }))
            }
        }
    }

    /// Whether the backend has panicked and this thread unwinds: then no clean-up calls it again.
    pub(super) fn is_unwinding(&self) -> bool {
        self.panics.forbids_calls()
    }

    /// Allocates addresses of the space, up to `limit` if there is one. If there are none, the idle
    /// windows of all owners are closed first.
    pub(super) fn alloc_iova(
        &self,
        len: u64,
        align: u64,
        limit: Option<Iova>,
    ) -> Result<IovaRange, BackendError> {
        if !self.translates() {
            return Err(BackendError::NoTranslation);
        }
        match self.iovas.alloc(len, align, limit) {
            Err(IovaError::Exhausted { .. }) if self.reclaim_idle() => {
                Ok(self.iovas.alloc(len, align, limit)?)
            }
            allocated => Ok(allocated?),
        }
    }

    /// Frees addresses that no device can reach.
    pub(super) fn free_iova(&self, iova: IovaRange) {
        if self.iovas.free(iova).is_err() {
            // The range was not allocated here, which cannot happen; if it did, not reusing it
            // would be the safe choice.
            self.count_quarantined(0);
        }
    }

    /// Counts a payload that is never released, because a device may reach it for good.
    pub(super) fn count_lost(&self, bytes: u64) {
        late::count_quarantined(bytes);
        self.count_quarantined(bytes);
    }

    /// Counts memory that is never reused, because a device may reach it for good.
    pub(super) fn count_quarantined(&self, bytes: u64) {
        self.quarantined.fetch_add(1, Ordering::Relaxed);
        self.quarantined_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Space {
    /// Releases buffers whose flush has completed. The rest is leaked: the domain ends before them
    /// only with a backend that did not promise to wake it.
    fn drop(&mut self) {
        if !self.is_unwinding() {
            self.release_late();
        }
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain")
            .field("backend", &self.space.properties.name)
            .finish_non_exhaustive()
    }
}

pub(super) const PAGE_BYTES: usize = 4096;

#[inline]
pub(super) fn check_pages(memory: DmaMemory) -> Result<(), BackendError> {
    let (addr, len) = (memory.addr(), memory.len());
    let pages = len > 0 && (addr | len).is_multiple_of(PAGE_BYTES);
    if pages { Ok(()) } else { Err(BackendError::NotPages { addr, len }) }
}

/// Returns the alignment that lets the table use its largest leaves.
#[inline]
pub(super) fn alignment(memory: DmaMemory) -> u64 {
    let (addr, len) = (memory.addr() as u64, memory.len() as u64);
    let usable = |size: &PageSize| len >= size.bytes() && addr & size.mask() == 0;
    PageSize::ALL
        .iter()
        .rev()
        .find(|size| usable(size))
        .map_or(PageSize::Size4K.bytes(), |size| size.bytes())
}

/// Identifies a domain; unique within the process, and never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DomainId(u64);

impl DomainId {
    pub(super) fn next() -> Self {
        Self(unique_number())
    }

    /// Returns the number that identifies it, from 1, for interfaces that know domains by numbers.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl Domain {
    /// Limits what may be revoked and not yet returned to `bytes`: a revocation that exceeds it
    /// waits for its flush, as a strict one does, and is counted ([`DomainStats::limited`]). At 0
    /// all of them wait. By default there is no limit; with one, each revocation takes a lock.
    ///
    /// Buffers that are quiesced and not returned count too, so a caller that collects
    /// [`Revoked`](super::Revoked)s without polling them is slowed down as well; likewise buffers
    /// that callers have left to the domain ([`DomainStats::deferred_bytes`]). A wait that reaches
    /// its deadline ends, and its buffer stays held: the limit bounds nothing while the unit
    /// completes no flush.
    pub fn set_held_limit(&self, bytes: u64) {
        self.space.held_limit.store(bytes, Ordering::Relaxed);
    }

    /// Returns the statistics. O(owners).
    pub fn stats(&self) -> DomainStats {
        let (sum, owners) = self.space.count_all();
        let (deferred, deferred_bytes) = self.space.pending.counts();
        DomainStats {
            maps: sum.maps,
            maps_fixed: sum.maps_fixed,
            revokes: sum.revokes,
            unmaps: sum.unmaps,
            live: sum.maps.saturating_sub(sum.revokes),
            held_bytes: held_bytes(&sum),
            limited: sum.limited,
            refused: sum.refused,
            owners,
            windows: self.space.windows.load(Ordering::Relaxed),
            deferred,
            deferred_bytes,
            quarantined: self.space.quarantined.load(Ordering::Relaxed),
            quarantined_bytes: self.space.quarantined_bytes.load(Ordering::Relaxed),
            static_mappings: self.space.statics.len() as u64,
            iova_extents: self.space.iovas.stats().free as u64,
            backend: self.space.call(|backend| backend.stats()),
        }
    }
}

impl Space {
    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Returns the sum of all counters, and the number of owners.
    pub(super) fn count_all(&self) -> (Sum, u64) {
        // With the lock, so that no owner is counted twice or not at all while it is dropped.
        let owners = self.owners.lock();
        let all =
            || core::iter::once(&self.counts).chain(owners.iter().map(|owner| &*owner.counts));
        let mut sum = Sum::default();
        all().for_each(|counts| counts.add_revokes_to(&mut sum));
        all().for_each(|counts| counts.add_rest_to(&mut sum));
        (sum, owners.len() as u64)
    }
}

/// Returns how many bytes are held by a sum of counters that were read one after another.
pub(super) fn held_bytes(sum: &Sum) -> u64 {
    u64::try_from(sum.held_bytes.cast_signed()).unwrap_or(0)
}

/// Memory that stays mapped for its lifetime.
#[derive(Clone, Copy)]
struct Static {
    iova: IovaRange,
    addr: usize,
    access: Access,
}

impl Static {
    /// Returns where it has `memory` mapped for `access`, if that is at `start`.
    fn find(&self, start: Iova, memory: DmaMemory, access: Access) -> Option<IovaRange> {
        let iova = IovaRange::new(start, memory.len() as u64).ok()?;
        let offset = memory.addr().checked_sub(self.addr)?;
        let here = self.access.contains(access)
            && self.iova.covers(&iova)
            && iova.start().checked_offset_from(self.iova.start()) == Some(offset as u64);
        here.then_some(iova)
    }
}

/// A static mapping that an owner found, valid while the generation is the same.
pub(super) struct Hit {
    found: Static,
    generation: u64,
}

/// The static mappings of a domain.
pub(super) struct Statics {
    /// Keyed by first address.
    all: Mutex<BTreeMap<Iova, Static>>,
    /// The number of removals.
    generation: AtomicU64,
}

impl Statics {
    pub(super) fn new() -> Self {
        Self { all: Mutex::new(BTreeMap::new()), generation: AtomicU64::new(0) }
    }

    pub(super) fn insert(&self, iova: IovaRange, memory: DmaMemory, access: Access) {
        self.all.lock().insert(iova.start(), Static { iova, addr: memory.addr(), access });
    }

    /// Removes the mapping of exactly `iova`, if there is one: afterwards no lookup finds it.
    pub(super) fn remove(&self, iova: IovaRange) {
        let mut all = self.all.lock();
        if all.get(&iova.start()).is_some_and(|found| found.iova == iova) {
            all.remove(&iova.start());
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.lock().len()
    }

    /// Returns where `memory` is mapped for `access`, if that is at `start`. O(log mappings), with
    /// a lock.
    pub(super) fn find(&self, start: Iova, memory: DmaMemory, access: Access) -> Option<IovaRange> {
        let (_, nearest) =
            self.all.lock().range(..=start).next_back().map(|(at, found)| (*at, *found))?;
        nearest.find(start, memory, access)
    }

    /// Returns the same, from `hit` if that contains it. Then one load.
    pub(super) fn find_cached(
        &self,
        start: Iova,
        memory: DmaMemory,
        access: Access,
        hit: &mut Option<Hit>,
    ) -> Option<IovaRange> {
        // Before the lookup: what is removed after it makes the hit stale.
        let generation = self.generation.load(Ordering::Acquire);
        if let Some(hit) = hit
            && hit.generation == generation
            && let Some(iova) = hit.found.find(start, memory, access)
        {
            return Some(iova);
        }
        let (_, nearest) =
            self.all.lock().range(..=start).next_back().map(|(at, found)| (*at, *found))?;
        let iova = nearest.find(start, memory, access)?;
        *hit = Some(Hit { found: nearest, generation });
        Some(iova)
    }
}

/// Memory that can be mapped: pinned, and owned by the value.
///
/// # Safety
/// The results of all methods never change. Until the value is dropped, all memory that they return
/// stays where it is, valid, and the value's alone (if the value is leaked, for good), except that
/// others may access what lies outside all extents as with a [`DmaMemory`]. While the value is not
/// borrowed, no reference into the memory exists. A value with a `fixed_iova` has one piece.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be mapped: it is not pinned memory that the value owns",
    label = "a device would reach memory that may move, or be freed while it is mapped",
    note = "allocate a buffer of an arena (`arena.alloc(len)`), or hand memory that the program has to an `OwnedMemory` \
            and map its pieces"
)]
pub unsafe trait Pinned: Send + 'static {
    /// Returns the memory. Start and length are multiples of 4096.
    fn memory(&self) -> DmaMemory<'_>;

    /// Returns the address at which the memory is mapped in `domain` for as long as the value lives
    /// (an arena mapped as a whole), if it is.
    fn fixed_iova(&self, domain: DomainId) -> Option<Iova>;

    /// Returns piece `index` of memory that is scattered in this process; `None` after the last.
    /// The first is [`memory`](Self::memory).
    ///
    /// The pieces are mapped one behind the other, as one contiguous range of I/O virtual
    /// addresses.
    fn piece(&self, index: usize) -> Option<DmaMemory<'_>> {
        (index == 0).then(|| self.memory())
    }

    /// Returns offset and length, in the mapped range, of extent `index` of the data to be
    /// transferred; `None` after the last. By default one extent: all of the memory.
    ///
    /// For payloads that do not consist of whole pages.
    fn extent(&self, index: usize) -> Option<(u64, u64)> {
        (index == 0).then(|| (0, pieces(self).map(|piece| piece.len() as u64).sum()))
    }
}

pub(super) fn pieces<P: Pinned + ?Sized>(payload: &P) -> impl Iterator<Item = DmaMemory<'_>> {
    (0..).map_while(|index| payload.piece(index))
}

/// Memory that the devices of a domain may reach in direction `D` for as long as the value lives.
///
/// A [`Mapping`](super::Mapping) is one. A type of one's own holds mappings, to transfer parts of
/// them, or several by one request, and returns them once it is given back.
///
/// The data are the segments one behind the other, the first byte of a transfer first. Segments may
/// lie anywhere in their mappings, adjoin each other, name the same bytes again (of those that a
/// device writes twice, either may remain), and be empty: these count as nothing. How they must be
/// aligned, and how many there may be, is the device's matter; the queue refuses others.
///
/// # Queues
/// A queue gives the segments only to a device of [`domain`](Self::domain). In the call that starts
/// a transfer, and on its thread, it asks for the domain and then for the segments in order from 0
/// on, until they have the bytes of the transfer (and perhaps one more) or there is none left. It
/// works with what it was told then; only to explain an error it may ask again. Fewer bytes than
/// those of the transfer are an error, which returns the value, like every other; more are not
/// touched. A panic of a method passes through the call: nothing is sent, and the value is dropped.
///
/// From then on the queue holds the value, until the device no longer uses the segments; if it
/// cannot know that, it leaks the value. It may move the value, and drop it or give it back on
/// another thread if it is [`Send`].
///
/// # Safety
/// Until the value is dropped (if it is leaked, for good), wherever it is moved: `segment` and
/// `domain` return the same, and every segment that is not empty is part of a live mapping, in that
/// domain and for all of the access of `D`, that the value holds. So a mapping that is only borrowed
/// for less than `'static` does not suffice: a leaked value would not keep it. Mappings may be held
/// together with other values, and their [memory](super::Mapping::memory) be read and written
/// meanwhile, which the device may see.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not mapped for the device",
    label = "a transfer takes a mapping",
    note = "map it first: `domain.map(buffer, ToDevice)` for what the device reads (a write to the device), \
            `domain.map(buffer, FromDevice)` for what it writes (a read)"
)]
pub unsafe trait Payload<D: Direction> {
    /// Returns segment `index`; `None` for each from the number of segments on, which is finite.
    fn segment(&self, index: usize) -> Option<Segment>;

    /// Returns the domain of the segments, all of them; `None` if that is no [`Domain`]: then their
    /// addresses are those of the devices of a queue that has no domain either. Only a queue whose
    /// own memory is in the same domain accepts the value.
    fn domain(&self) -> Option<DomainId>;
}
