//! The domain: its backend, its addresses, its static mappings, and what it holds until a flush
//! completes.

use super::backend::Backend;
use super::error::BackendError;
use super::late::PendingReleases;
use super::statics::Statics;
use super::stats::{Counts, DomainStats, Sum, Writers};
use super::window::{OwnerShared, SlotBox};
use crate::addr::{Iova, IovaRange, PageSize};
use crate::drop_guard::PanicWatch;
use crate::invalidate::Ticket;
use crate::iova::{IovaError, IovaSpace};
use crate::mem::DmaMemory;
use crate::share::Shared;
use crate::sync::{AtomicU64, Mutex, Ordering, unique_number};
use crate::table::MappedRun;
use alloc::boxed::Box;
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
    backend: Box<dyn Backend>,
    panics: PanicWatch,
    /// Whether the backend translates.
    pub(super) translates: bool,
    pub(super) iovas: Arc<IovaSpace>,
    pub(super) statics: Statics,
    pub(super) pending: PendingReleases,
    /// What is done without an owner's handle, or was done by owners that have been dropped.
    pub(super) counts: Counts,
    pub(super) owners: Mutex<Vec<Arc<OwnerShared>>>,
    /// Windows to be closed: of owners that have been dropped, and idle ones.
    pub(super) abandoned: Mutex<Vec<SlotBox>>,
    /// Windows of all owners.
    pub(super) windows: AtomicU64,
    pub(super) quarantined: AtomicU64,
    pub(super) quarantined_bytes: AtomicU64,
    /// How many bytes may be revoked and not returned before a revocation waits.
    pub(super) held_limit: AtomicU64,
}

impl Domain {
    /// Creates a domain over `backend`, with addresses from `iovas`.
    pub fn new(backend: Box<dyn Backend>, iovas: IovaSpace) -> Self {
        Self { space: Shared::new(Space::new(backend, iovas)) }
    }

    /// Returns the domain's identity.
    pub fn id(&self) -> DomainId {
        self.space.id
    }

    /// Returns the name of its backend, as [`Backend::name`] does.
    pub fn name(&self) -> &'static str {
        self.space.backend.name()
    }

    /// Whether mapping memory pins it and charges it to the process: then it need not be locked
    /// too.
    pub fn pins(&self) -> bool {
        self.space.backend.properties().pins
    }

    /// Returns what devices can reach now by the table, by ascending address, neighbours merged;
    /// `None` if the backend cannot read its table (the kernel's, or none).
    ///
    /// Mappings of all kinds are in it; what has been revoked is not, although a device may reach
    /// it until the flush has completed. Other threads may map and revoke meanwhile: the result may
    /// then be torn, as [`Table::mapped`](crate::table::Table::mapped) describes.
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
    /// returned.
    pub unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        check_pages(memory)?;
        // SAFETY: the caller's promise is the one that `register_memory` requires.
        unsafe { self.space.backend.register_memory(memory) }
    }

    /// Unregisters the memory: after this returns, no device of this domain reaches it, whatever is
    /// mapped.
    pub fn unregister_memory(&self, memory: DmaMemory) {
        self.space.backend.unregister_memory(memory);
    }

    /// Counts memory that its owner quarantined, because a device may reach it for good.
    pub fn count_quarantined(&self, bytes: u64) {
        self.space.count_quarantined(bytes);
    }
}

impl Space {
    fn new(backend: Box<dyn Backend>, iovas: IovaSpace) -> Self {
        Self {
            id: DomainId::next(),
            translates: backend.properties().translates,
            backend,
            panics: PanicWatch::new(),
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

    /// Calls the backend, and remembers if that panics.
    #[inline(always)]
    pub(super) fn call<'d, R>(&'d self, call: impl FnOnce(&'d dyn Backend) -> R) -> R {
        self.panics.watch(|| call(&*self.backend))
    }

    /// Whether the flush has completed.
    #[inline(always)]
    pub(super) fn has_completed(&self, ticket: Ticket) -> bool {
        matches!(self.call(|backend| backend.check(ticket)), Poll::Ready(Ok(())))
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
        if !self.translates {
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
            // Not allocated here, which cannot happen; if it did, not reusing them is the safe
            // side.
            self.count_quarantined(0);
        }
    }

    /// Counts memory that is never reused, because a device may reach it for good.
    pub(super) fn count_quarantined(&self, bytes: u64) {
        self.quarantined.fetch_add(1, Ordering::Relaxed);
        self.quarantined_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Space {
    /// What is still pending stays leaked: its flush can no longer be observed.
    fn drop(&mut self) {
        if !self.is_unwinding() {
            self.release_late();
        }
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain")
            .field("backend", &self.space.backend.name())
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
}

impl Domain {
    /// Limits what may be revoked and not yet returned to `bytes`: a revocation that exceeds it
    /// waits for its flush, as a strict one does, and is counted ([`DomainStats::limited`]). At 0
    /// all of them wait. By default there is no limit; with one, each revocation takes a lock.
    ///
    /// What is quiesced and not returned counts too, so a caller that collects
    /// [`Revoked`](super::Revoked)s without polling them is slowed down as well; likewise what
    /// callers have left to the domain ([`DomainStats::deferred_bytes`]). A wait that reaches its
    /// deadline ends, and what it waited for stays held: the limit bounds nothing while the unit
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
