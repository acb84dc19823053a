//! The handles of an arena: its memory, and that memory in one domain.

use super::error::{ArenaReport, ArenaStats};
use super::state::{Run, State};
use crate::domain::Domain;
use crate::memory::attachment::{Attachment, DomainOps, Fixed, MappingPolicy, READ_WRITE};
use crate::memory::source::Residency;
use pinfold_core::access::Access;
use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{ChunkSource, SourceError};
use pinfold_core::domain::{BackendError, DomainId};
use pinfold_core::frame::{Frame, Order};
use pinfold_core::page_pool::{RevocableSource, RevokeError};
use pinfold_core::share::Shared;
use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Pinned memory from the operating system, in any number of domains, including none.
///
/// A handle: a clone is the same arena. It allocates buffers; I/O virtual addresses belong to the
/// [`Arena`] that [`map_into`](Self::map_into) returns.
#[derive(Clone)]
pub struct ArenaMemory(Shared<State>);

impl ArenaMemory {
    pub(super) fn new(state: State) -> Self {
        Self(Shared::new(state))
    }

    pub(super) fn from_share(share: Shared<State>) -> Self {
        Self(share)
    }

    pub(super) fn share(&self) -> &Shared<State> {
        &self.0
    }

    pub(super) fn into_share(self) -> Shared<State> {
        self.0
    }

    /// Maps the memory into a domain, as its [mapping policy](Self::mapping_policy) says, and
    /// returns the handle that is the [`ChunkSource`] there.
    /// [`Domain::map`](pinfold_core::domain::Domain::map) works from then on for every buffer of
    /// the arena. It stays mapped until the arena is dropped, with all its handles, buffers and
    /// pools.
    ///
    /// Returns another handle if it is mapped into this domain already.
    ///
    /// Memory that is [locked](Residency::Locked) is unlocked if the domain's mappings pin memory
    /// themselves, since `RLIMIT_MEMLOCK` would count it twice.
    ///
    /// # Errors
    /// [`BackendError`]; the memory is not in the domain then. If it
    /// [may be reached](BackendError::stays_reachable) nevertheless, it is quarantined when the
    /// arena is dropped.
    ///
    /// ```
    /// use pinfold::{Arena, Domain, access::FromDevice};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let memory = Arena::builder().size(1 << 20).build_unmapped()?; // before any device is open
    /// let buffer = memory.alloc(4096)?;
    /// let (nic, disk) = (Domain::soft()?, Domain::soft()?);
    /// let _in_nic = memory.map_into(&nic)?;
    /// let _in_disk = memory.map_into(&disk)?;
    /// let buffer = nic.map(buffer, FromDevice)?.unmap()?; // received ...
    /// disk.map(buffer, pinfold::access::ToDevice)?.unmap()?; // ... and written, without a copy
    /// # Ok(()) }
    /// ```
    pub fn map_into(&self, domain: &Domain) -> Result<Arena, BackendError> {
        self.attach(Box::new(domain.clone()))
    }

    pub(super) fn attach(&self, domain: Box<dyn DomainOps>) -> Result<Arena, BackendError> {
        Ok(Arena { attachment: self.0.attach(domain)?, memory: self.clone() })
    }

    /// Returns all of the memory, to be registered with a ring
    /// ([`Options::fixed`](crate::uring::Options::fixed)).
    pub fn fixed(&self) -> Fixed<'_> {
        self.0.region().memory().into()
    }

    /// Returns the size in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it has at least one frame")]
    pub fn len(&self) -> usize {
        self.0.region().len()
    }

    /// Returns which part of the arena devices can reach.
    pub fn mapping_policy(&self) -> MappingPolicy {
        self.0.policy()
    }

    /// Returns the requested and the obtained memory, and the sources that were unavailable.
    pub fn report(&self) -> ArenaReport {
        self.0.report()
    }

    /// Returns the descriptor by which another process can map the same memory, if the source is a
    /// memfd.
    pub fn memfd(&self) -> Option<BorrowedFd<'_>> {
        self.0.memfd().map(AsFd::as_fd)
    }

    /// Returns how much of the arena is in use. Exact while no call is being made, but for the peak.
    /// O(owners).
    pub fn stats(&self) -> ArenaStats {
        let bytes = self.0.bytes();
        let pinned = match &*self.0.residency() {
            Residency::Hugetlb | Residency::Locked => true,
            Residency::ByMapping => self.0.policy() == MappingPolicy::Whole,
            Residency::NotLocked(_) => false,
        };
        let in_use = self.0.in_use();
        ArenaStats {
            bytes,
            frames: bytes / Frame::BYTES,
            frames_in_use: in_use,
            // The peak is noted from what owners have reported.
            frames_peak: self.0.peak().max(in_use),
            frames_quarantined: self.0.quarantined(),
            pinned_bytes: if pinned { bytes } else { 0 },
        }
    }

    /// Returns whether `other` is a handle of the same arena.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.0.is_same(&other.0)
    }

    /// Returns the address of the memory in this process.
    pub(crate) fn addr(&self) -> usize {
        self.0.region().addr()
    }

    pub(crate) fn state(&self) -> &State {
        &self.0
    }
}

impl fmt::Debug for ArenaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaMemory")
            .field("bytes", &self.len())
            .field("mapping_policy", &self.mapping_policy())
            .finish_non_exhaustive()
    }
}

/// An arena in one domain: [`ArenaMemory`] and its I/O virtual addresses there.
///
/// A handle: a clone is the same arena in the same domain. It is the
/// [`ChunkSource`] of the pools of that domain.
#[derive(Clone)]
pub struct Arena {
    /// Dropped before `memory`, whose drop detaches the memory.
    attachment: Arc<Attachment>,
    memory: ArenaMemory,
}

impl Arena {
    /// Returns the I/O virtual address of the first byte in this domain; the rest follows linearly.
    /// With [`MappingPolicy::PerUse`] a device reaches only what is mapped there.
    pub fn iova(&self) -> Iova {
        self.attachment.iova().start()
    }

    pub(in crate::memory) fn attachment(&self) -> &Attachment {
        &self.attachment
    }
}

impl Deref for Arena {
    type Target = ArenaMemory;
    fn deref(&self) -> &ArenaMemory {
        &self.memory
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("bytes", &self.len())
            .field("iova", &self.attachment.iova())
            .field("mapping_policy", &self.mapping_policy())
            .finish_non_exhaustive()
    }
}

// An arena as the source of a pool's chunks.

impl Arena {
    /// Acquires a chunk whose bytes are 0 before a device can reach them, for `access` (any, in an
    /// arena that is mapped whole).
    pub(in crate::memory) fn acquire_zeroed(
        &self,
        order: Order,
        access: Access,
    ) -> Result<Frame, SourceError> {
        let run = self.state().alloc_order(order)?;
        let memory = self.state().memory_of(run);
        // All of it, so this does not fail.
        let zeroed = memory.fill(0, memory.len(), 0);
        debug_assert_eq!(zeroed, Ok(()));
        self.acquire_run(run, access)
    }

    /// Maps a run that was just allocated as a chunk, or frees it.
    fn acquire_run(&self, run: Run, access: Access) -> Result<Frame, SourceError> {
        let state = self.state();
        // SAFETY: the run is in use until `release` has unmapped it, and the region stays while
        // anything is in use (`State::drop`). The run is a chunk's and no buffer's, and references
        // are lent into buffers only.
        let mapped = unsafe {
            self.attachment().map_chunk(run.first.offset(), state.memory_of(run), access)
        };
        match mapped {
            Ok(()) => Ok(run.first),
            Err(error) => {
                if error.stays_reachable() {
                    state.quarantine(run, self.attachment());
                } else {
                    state.free(run);
                }
                Err(SourceError::Map(error))
            }
        }
    }

    /// Unmaps a chunk, or quarantines it.
    fn unmap_chunk(&self, run: Run) -> Result<(), BackendError> {
        self.attachment().unmap_chunk(run.first.offset()).inspect_err(|error| {
            // Not retried: nothing would be left to clear, and the flush that failed may never
            // complete.
            tracing::error!(first = %run.first, frames = run.frames, %error, "a chunk is quarantined");
            self.state().quarantine(run, self.attachment());
        })
    }
}

// SAFETY: the region and its address range are fixed when the arena is mapped and stay while a
// handle is held. A run comes from the zone, which allocates it to no other caller before `release`
// frees it; it lies in the region, because the zone has as many frames. References into an arena
// are lent by a `Buffer` only, into the run that it owns.
unsafe impl ChunkSource for Arena {
    fn span(&self) -> NonNull<[u8]> {
        let memory = self.state().region().memory();
        NonNull::slice_from_raw_parts(memory.as_ptr(), memory.len())
    }
    fn iova(&self) -> Iova {
        Self::iova(self)
    }
    fn domain(&self) -> Option<DomainId> {
        self.attachment().domain_id()
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        self.acquire_run(self.state().alloc_order(order)?, READ_WRITE)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        let run = Run::of_order(frame, order);
        if self.unmap_chunk(run).is_ok() {
            self.state().free(run);
        }
    }
}

// SAFETY: `unmap_chunk` is strict, and the run stays allocated until `release_hidden` frees it;
// while anything is allocated the region stays (`State::drop`). A run that could not be unmapped is
// never freed.
unsafe impl RevocableSource for Arena {
    unsafe fn hide(&self, frame: Frame, order: Order) -> Result<(), RevokeError> {
        if self.mapping_policy() == MappingPolicy::Whole {
            return Err(RevokeError::Permanent);
        }
        self.unmap_chunk(Run::of_order(frame, order))
            .map_err(|error| RevokeError::Unmap(error.to_string()))
    }
    unsafe fn release_hidden(&self, frame: Frame, order: Order) {
        self.state().free(Run::of_order(frame, order));
    }
}
