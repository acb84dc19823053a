//! [`Stack`]: the memory and the domain behind a `Hal`, and the blocks that a driver has not freed
//! or unshared.

use crate::mapping::{self, MappedFrames};
use pinfold::arena::{AllocError, BuildError};
use pinfold::memory::{BounceError, BouncePool, Bounced};
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::access::{Access, Bidirectional, Direction, FromDevice, ToDevice};
use pinfold_core::addr::IovaRange;
use pinfold_core::dma_pool::{ChunkSource, CreateError};
use pinfold_core::domain::{BackendError, Payload, StaticMapping};
use pinfold_core::mem::DmaMemory;
use std::collections::HashMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use virtio_drivers::BufferDirection;

/// The largest payload that is [bounced](pinfold::memory::bounce) in pages that stay mapped; larger
/// copies have frames of their own. A request's header, its status, and a list of descriptors fit.
pub const BOUNCED_BYTES: usize = BouncePool::<Bidirectional>::MAX_BYTES;

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
    /// A payload could not be bounced.
    #[error(transparent)]
    Bounce(#[from] BounceError),
    /// The domain did not map the payload itself.
    #[error("cannot map the payload for the device: {0}")]
    NotMapped(BackendError),
    /// The domain did not map a copy of it.
    #[error("cannot map a copy of the payload for the device: {0}")]
    CopyNotMapped(BackendError),
    /// The domain could not revoke the payload.
    #[error("the device may still access {bytes} bytes of the program at {iova}: {error}")]
    NotRevoked {
        /// The address at which the device accesses them.
        iova: IovaRange,
        /// The number of bytes.
        bytes: usize,
        /// The cause.
        error: BackendError,
    },
}

impl ShareError {
    /// Returns whether a device may still access the payload itself, so that its owner must not
    /// reuse it.
    pub fn stays_reachable(&self) -> bool {
        match self {
            Self::NotRevoked { .. } => true,
            // A copy that stays reachable belongs to the stack and is quarantined; see
            // `MappedFrames::new`.
            Self::NotMapped(error) => error.stays_reachable(),
            _ => false,
        }
    }
}

/// The way a payload is shared.
#[derive(Debug)]
enum Share {
    InPlace(StaticMapping),
    ToDevice(Bounced<ToDevice>),
    FromDevice(Bounced<FromDevice>),
    Both(Bounced<Bidirectional>),
    Frames(MappedFrames),
}

/// The memory that has not been freed or unshared, by the device's address.
#[derive(Debug, Default)]
struct Outstanding {
    dma: HashMap<u64, MappedFrames>,
    shares: HashMap<u64, Share>,
}

/// The memory and the domain behind a `Hal`.
#[derive(Debug)]
pub(crate) struct Stack {
    to_device: BouncePool<ToDevice>,
    from_device: BouncePool<FromDevice>,
    both: BouncePool<Bidirectional>,
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
    pub(crate) fn new(
        domain: &Domain,
        arena: pinfold::arena::ArenaBuilder,
    ) -> Result<Self, StackError> {
        // Mapped as a whole it would have no slices, and access could not be revoked.
        let arena =
            arena.mapping_policy(MappingPolicy::PerUse).build(domain).map_err(StackError::Arena)?;
        // Pools keep their memory: three eighths of the arena at most are not available to rings
        // and other copies.
        let limit = arena.span().len() as u64 / 8;
        Ok(Self {
            to_device: BouncePool::with_limit(&arena, limit).map_err(StackError::Pool)?,
            from_device: BouncePool::with_limit(&arena, limit).map_err(StackError::Pool)?,
            both: BouncePool::with_limit(&arena, limit).map_err(StackError::Pool)?,
            arena,
            domain: domain.clone(),
            out: Mutex::default(),
            counts: Counts::default(),
        })
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
        let frames =
            if out.dma.get(&iova).is_some_and(same) { out.dma.remove(&iova) } else { None };
        drop(out);
        match frames {
            Some(frames) => self.unmap(frames, |_| {}),
            None => self.count_invalid_free(iova),
        }
    }

    /// # Safety
    /// The payload is valid, and not accessed elsewhere during the call; if it is in the arena,
    /// nothing accesses it until [`unshare`](Self::unshare).
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
                // SAFETY: writable in this direction; the caller guarantees that it is valid and
                // not accessed elsewhere.
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
                self.domain.unmap_static(mapping).map_err(|failed| ShareError::NotRevoked {
                    iova,
                    bytes,
                    error: failed.error,
                })?;
            }
            Share::ToDevice(bounced) => drop(bounced),
            Share::FromDevice(bounced) => copy_out(bounced.memory()),
            Share::Both(bounced) => copy_out(bounced.memory()),
            Share::Frames(frames) => _ = self.unmap(frames, copy_out),
        }
        Ok(())
    }

    /// Returns whether the payload consists of whole pages of the arena.
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
        // SAFETY: in one arena; the caller guarantees that it is valid and not accessed while it is
        // shared. It is only passed to the domain.
        let memory = unsafe { DmaMemory::from_raw(payload.cast(), payload.len()) };
        // SAFETY: the caller guarantees that it is valid until it is unshared; if it cannot be
        // unmapped, `Hal` aborts the process.
        let mapping = unsafe { mapping::map(&self.domain, memory, direction) }
            .map_err(ShareError::NotMapped)?;
        count(&self.counts.shares_in_place, 1);
        Ok((mapping.iova().start().raw(), Share::InPlace(mapping)))
    }

    /// Shares a copy. Bytes that the device does not write must keep their value, so the payload is
    /// copied in for either direction; a device with write access only cannot read it.
    fn share_copy(
        &self,
        payload: &[u8],
        direction: BufferDirection,
    ) -> Result<(u64, Share), ShareError> {
        // Payloads that the pools have no room for get frames of their own, as do longer ones.
        let bounced = match self.bounce(payload, direction) {
            Ok(bounced) => Some(bounced),
            Err(BounceError::Exhausted { .. }) => None,
            Err(BounceError::Length { .. }) if payload.len() > BOUNCED_BYTES => None,
            Err(error) => return Err(error.into()),
        };
        let (iova, share) = if let Some(bounced) = bounced {
            count(&self.counts.shares_bounced, 1);
            bounced
        } else {
            let buffer = self.arena.alloc(payload.len())?;
            let (memory, len) = (buffer.memory(), payload.len());
            let copied = memory.copy_from_slice(0, payload);
            // The frames may have held something of the program.
            let zeroed = memory.fill(len, memory.len() - len, 0);
            debug_assert_eq!((copied, zeroed), (Ok(()), Ok(())), "at least as long as the payload");
            let frames = self.map_frames(buffer, direction)?;
            (frames.iova().start().raw(), Share::Frames(frames))
        };
        count(&self.counts.copied_bytes, payload.len() as u64);
        Ok((iova, share))
    }

    fn bounce(
        &self,
        payload: &[u8],
        direction: BufferDirection,
    ) -> Result<(u64, Share), BounceError> {
        fn iova<D: Direction>(bounced: &Bounced<D>) -> u64 {
            // A bounced payload has one segment.
            bounced.segment(0).map_or(0, |segment| segment.iova.raw())
        }
        Ok(match direction {
            BufferDirection::DriverToDevice => {
                let bounced = self.to_device.copy_of(payload)?;
                (iova(&bounced), Share::ToDevice(bounced))
            }
            BufferDirection::DeviceToDriver => {
                let bounced = self.from_device.copy_of(payload)?;
                (iova(&bounced), Share::FromDevice(bounced))
            }
            BufferDirection::Both => {
                let bounced = self.both.copy_of(payload)?;
                (iova(&bounced), Share::Both(bounced))
            }
        })
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

// Counters of a stack.

/// Counters of a stack, and of its outstanding memory. They print as a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Allocations of rings (`dma_alloc`).
    pub dma_allocs: u64,
    /// Pages of rings that have not been freed.
    pub dma_pages_live: u64,
    /// Payloads shared with the device.
    pub shares: u64,
    /// Payloads mapped in place.
    pub shares_in_place: u64,
    /// Payloads bounced in pages that stay mapped.
    pub shares_bounced: u64,
    /// Payloads shared now.
    pub shares_live: u64,
    /// Bytes copied, in either direction.
    pub copied_bytes: u64,
    /// Frees of something that was not allocated or shared: errors of the driver.
    pub invalid_frees: u64,
    /// Bytes quarantined because the domain could not revoke them.
    pub quarantined_bytes: u64,
}

impl Stats {
    /// Returns whether nothing is outstanding, quarantined or wrongly freed.
    pub fn is_clean(&self) -> bool {
        let Self { dma_pages_live, shares_live, invalid_frees, quarantined_bytes, .. } = *self;
        [dma_pages_live, shares_live, invalid_frees, quarantined_bytes] == [0; 4]
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "rings allocated    {:>14}", self.dma_allocs)?;
        writeln!(f, "pages outstanding  {:>14}", self.dma_pages_live)?;
        writeln!(f, "payloads shared    {:>14}", self.shares)?;
        writeln!(f, "  mapped in place  {:>14}", self.shares_in_place)?;
        writeln!(f, "  bounced          {:>14}", self.shares_bounced)?;
        writeln!(f, "  outstanding      {:>14}", self.shares_live)?;
        writeln!(f, "bytes copied       {:>14}", self.copied_bytes)?;
        writeln!(f, "invalid frees      {:>14}", self.invalid_frees)?;
        write!(f, "bytes quarantined  {:>14}", self.quarantined_bytes)
    }
}

/// The counters behind [`Stats`].
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) dma_allocs: AtomicU64,
    pub(crate) shares: AtomicU64,
    pub(crate) shares_in_place: AtomicU64,
    pub(crate) shares_bounced: AtomicU64,
    pub(crate) copied_bytes: AtomicU64,
    pub(crate) invalid_frees: AtomicU64,
    pub(crate) quarantined_bytes: AtomicU64,
}

impl Counts {
    pub(crate) fn stats(&self, dma_pages_live: u64, shares_live: u64) -> Stats {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Stats {
            dma_allocs: get(&self.dma_allocs),
            dma_pages_live,
            shares: get(&self.shares),
            shares_in_place: get(&self.shares_in_place),
            shares_bounced: get(&self.shares_bounced),
            shares_live,
            copied_bytes: get(&self.copied_bytes),
            invalid_frees: get(&self.invalid_frees),
            quarantined_bytes: get(&self.quarantined_bytes),
        }
    }
}

pub(crate) fn count(count: &AtomicU64, by: u64) {
    count.fetch_add(by, Ordering::Relaxed);
}
