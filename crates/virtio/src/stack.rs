//! [`Stack`]: the memory and the domain behind a `Hal`, and what a driver has not freed or unshared.

use crate::mapping::{self, MappedFrames};
use crate::stats::{Counts, Stats, count};
use pinfold::arena::{AllocError, BuildError};
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use pinfold_core::dma_pool::{self, ChunkSource, CreateError, DmaPool, RawBlock};
use pinfold_core::domain::{BackendError, StaticMapping};
use pinfold_core::mem::DmaMemory;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};
use virtio_drivers::BufferDirection;

/// The largest payload that is copied into a block of the pool; larger ones have frames of their own. A request's
/// header, its status, and a list of 16 descriptors fit.
pub const SMALL_BYTES: usize = 256;
const _: () = assert!(SMALL_BYTES >= 16 * 16, "a descriptor has 16 bytes");

const PAGE: usize = 4096;

/// Why a payload cannot be shared with the device, or revoked.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// No stack is installed.
    #[error(
        "no stack is installed in this place: keep the value of install() for as long as the driver lives"
    )]
    NotInstalled,
    /// Frames for a copy could not be allocated.
    #[error("cannot allocate frames for a copy of the payload: {0}")]
    Frames(#[from] AllocError),
    /// A block for a copy could not be allocated.
    #[error("cannot allocate a block for a copy of the payload: {0}")]
    Block(#[from] dma_pool::AllocError),
    /// The domain did not map the payload itself.
    #[error("cannot map the payload for the device: {0}")]
    NotMapped(BackendError),
    /// The domain did not map a copy of it.
    #[error("cannot map a copy of the payload for the device: {0}")]
    CopyNotMapped(BackendError),
    /// The domain could not revoke the payload.
    #[error("the device may still access {bytes} bytes of the program at {iova}: {error}")]
    NotRevoked {
        /// Where the device accesses them.
        iova: IovaRange,
        /// The number of bytes.
        bytes: usize,
        /// The cause.
        error: BackendError,
    },
}

impl ShareError {
    /// Whether a device may still access the payload itself, so that its owner must not reuse it.
    pub fn stays_reachable(&self) -> bool {
        match self {
            Self::NotRevoked { .. } => true,
            // A copy that stays reachable belongs to the stack and is quarantined; see `MappedFrames::new`.
            Self::NotMapped(error) => error.stays_reachable(),
            _ => false,
        }
    }
}

/// How a payload is shared.
#[derive(Debug)]
enum Share {
    InPlace(StaticMapping),
    Small(RawBlock),
    Frames(MappedFrames),
}

/// What has not been freed or unshared, by the device's address.
#[derive(Debug, Default)]
struct Outstanding {
    dma: HashMap<u64, MappedFrames>,
    shares: HashMap<u64, Share>,
}

/// The memory and the domain behind a `Hal`.
#[derive(Debug)]
pub(crate) struct Stack {
    small: DmaPool<Arena>,
    arena: Arena,
    domain: Domain,
    out: Mutex<Outstanding>,
    counts: Counts,
}

/// Why a stack could not be created.
#[derive(Debug)]
pub(crate) enum StackError {
    Arena(BuildError),
    Pool(CreateError),
}

impl Stack {
    pub(crate) fn new(domain: &Domain, arena: pinfold::arena::ArenaBuilder) -> Result<Self, StackError> {
        // Mapped as a whole it would have no slices, and access could not be revoked.
        let arena = arena.mapping_policy(MappingPolicy::PerUse).build(domain).map_err(StackError::Arena)?;
        let small =
            DmaPool::new(arena.clone(), "virtio", SMALL_BYTES, SMALL_BYTES, 0).map_err(StackError::Pool)?;
        Ok(Self { small, arena, domain: domain.clone(), out: Mutex::default(), counts: Counts::default() })
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(crate) fn stats(&self) -> Stats {
        let out = self.state();
        let pages = |frames: &MappedFrames| frames.iova().len() / PAGE as u64;
        self.counts.stats(out.dma.values().map(pages).sum(), out.shares.len() as u64)
    }

    pub(crate) fn is_idle(&self) -> bool {
        let out = self.state();
        out.dma.is_empty() && out.shares.is_empty()
    }

    /// Allocates and maps zeroed pages; returns the device's address and the program's.
    pub(crate) fn dma_alloc(
        &self,
        pages: usize,
        direction: BufferDirection,
    ) -> Result<(u64, NonNull<u8>), ShareError> {
        let buffer = self.arena.alloc_zeroed(pages.saturating_mul(PAGE))?;
        let frames = self.map_frames(buffer, direction)?;
        let (iova, base) = (frames.iova().start().raw(), frames.memory().as_ptr());
        self.state().dma.insert(iova, frames);
        count(&self.counts.dma_allocs, 1);
        Ok((iova, base))
    }

    /// Frees pages; returns whether they were allocated.
    pub(crate) fn dma_dealloc(&self, iova: u64, base: NonNull<u8>, pages: usize) -> bool {
        let mut out = self.state();
        let same = |frames: &MappedFrames| {
            let memory = frames.memory();
            memory.as_ptr() == base && pages.checked_mul(PAGE) == Some(memory.len())
        };
        let frames = if out.dma.get(&iova).is_some_and(same) { out.dma.remove(&iova) } else { None };
        drop(out);
        match frames {
            Some(frames) => self.unmap(frames, |_| {}),
            None => self.count_invalid_free(iova),
        }
    }

    /// # Safety
    /// The payload is valid, and not accessed elsewhere during the call; if it is in the arena, nothing accesses it
    /// until [`unshare`](Self::unshare).
    pub(crate) unsafe fn share(
        &self,
        payload: NonNull<[u8]>,
        direction: BufferDirection,
    ) -> Result<u64, ShareError> {
        let (iova, share) = if self.in_whole_pages(payload) {
            // SAFETY: the caller upholds the same contract.
            unsafe { self.share_in_place(payload, direction) }?
        } else {
            // SAFETY: the caller guarantees that it is valid and not accessed elsewhere meanwhile.
            self.share_copy(unsafe { payload.as_ref() }, direction)?
        };
        self.state().shares.insert(iova, share);
        count(&self.counts.shares, 1);
        Ok(iova)
    }

    /// # Safety
    /// The payload is the one that was shared, valid, and not accessed elsewhere during the call.
    pub(crate) unsafe fn unshare(
        &self,
        iova: u64,
        mut payload: NonNull<[u8]>,
        direction: BufferDirection,
    ) -> Result<(), ShareError> {
        let Some(share) = self.state().shares.remove(&iova) else {
            self.count_invalid_free(iova);
            return Ok(());
        };
        let mut copy_out = |memory: DmaMemory<'_>| {
            if mapping::access(direction).contains(Access::WRITE) {
                let n = payload.len().min(memory.len());
                // SAFETY: writable in this direction; the caller guarantees that it is valid and not accessed elsewhere.
                let to = unsafe { payload.as_mut() };
                // Does not fail: the payload has the length of the copy.
                let copied = to.get_mut(..n).is_some_and(|to| memory.copy_to_slice(0, to).is_ok());
                debug_assert!(copied, "a payload of another length than was shared");
                count(&self.counts.copied_bytes, n as u64);
            }
        };
        match share {
            Share::InPlace(mapping) => {
                let (iova, bytes) = (mapping.iova(), payload.len());
                self.domain.unmap_static(mapping).map_err(|error| ShareError::NotRevoked {
                    iova,
                    bytes,
                    error,
                })?;
            }
            Share::Small(block) => {
                // It is allocated until it is freed here, once, so neither of these fails.
                if let Ok(memory) = self.small.memory(block) {
                    copy_out(memory);
                }
                let freed = self.small.free_raw(block);
                debug_assert_eq!(freed, Ok(()));
            }
            Share::Frames(frames) => _ = self.unmap(frames, copy_out),
        }
        Ok(())
    }

    /// Whether the payload consists of whole pages of the arena.
    fn in_whole_pages(&self, payload: NonNull<[u8]>) -> bool {
        let span = self.arena.span();
        let (addr, len) = (payload.addr().get(), payload.len());
        let offset = addr.checked_sub(span.addr().get());
        let end = offset.and_then(|offset| offset.checked_add(len));
        (addr | len).is_multiple_of(PAGE) && len > 0 && end.is_some_and(|end| end <= span.len())
    }

    /// # Safety
    /// As for [`share`](Self::share).
    unsafe fn share_in_place(
        &self,
        payload: NonNull<[u8]>,
        direction: BufferDirection,
    ) -> Result<(u64, Share), ShareError> {
        // SAFETY: in one arena; the caller guarantees that it is valid and not accessed while it is shared. It is only passed
        // to the domain.
        let memory = unsafe { DmaMemory::from_raw(payload.cast(), payload.len()) };
        // SAFETY: the caller guarantees that it is valid until it is unshared; if it cannot be unmapped, `Hal` aborts the
        // process.
        let mapping =
            unsafe { mapping::map(&self.domain, memory, direction) }.map_err(ShareError::NotMapped)?;
        count(&self.counts.shares_in_place, 1);
        Ok((mapping.iova().start().raw(), Share::InPlace(mapping)))
    }

    /// Shares a copy. Bytes that the device does not write must keep their value, so the payload is copied in for either
    /// direction; a device with write access only cannot read it.
    fn share_copy(&self, payload: &[u8], direction: BufferDirection) -> Result<(u64, Share), ShareError> {
        let copy_in = |memory: DmaMemory<'_>| {
            let copied = memory.copy_from_slice(0, payload);
            debug_assert!(copied.is_ok(), "as long as the payload");
            count(&self.counts.copied_bytes, payload.len() as u64);
        };
        if payload.len() <= SMALL_BYTES {
            let block = self.small.alloc_raw()?;
            // It was just allocated, so this does not fail.
            if let Ok(memory) = self.small.memory(block) {
                copy_in(memory);
            }
            count(&self.counts.shares_small, 1);
            return Ok((block.iova().raw(), Share::Small(block)));
        }
        let buffer = self.arena.alloc(payload.len())?;
        copy_in(buffer.memory());
        let frames = self.map_frames(buffer, direction)?;
        Ok((frames.iova().start().raw(), Share::Frames(frames)))
    }

    fn map_frames(
        &self,
        buffer: pinfold::Buffer,
        direction: BufferDirection,
    ) -> Result<MappedFrames, ShareError> {
        MappedFrames::new(&self.domain, buffer, direction).map_err(|(error, lost)| {
            count(&self.counts.quarantined_bytes, lost);
            ShareError::CopyNotMapped(error)
        })
    }

    fn unmap(&self, frames: MappedFrames, read: impl FnOnce(DmaMemory<'_>)) -> bool {
        if let Err(lost) = frames.unmap(&self.domain, read) {
            count(&self.counts.quarantined_bytes, lost);
        }
        true
    }

    fn count_invalid_free(&self, iova: u64) -> bool {
        tracing::error!(iova, "a driver freed memory that is not allocated or shared");
        count(&self.counts.invalid_frees, 1);
        false
    }

    fn state(&self) -> MutexGuard<'_, Outstanding> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
