//! Payloads smaller than a page, or not made of whole pages: copies in pages that stay mapped.
//!
//! A mapping is whole pages, so a device that is given 512 bytes of a page reaches the other 3,584
//! too. A payload whose owner does not declare them shareable
//! ([`OwnedMemory::sharing_pages`](super::OwnedMemory::sharing_pages)) is *bounced*: the device is
//! given a copy in a [`BouncePool`]. Up to [`BouncePool::MAX_BYTES`] a copy also costs less than a
//! mapping that is unmapped with a flush of its own; where many mappings share a flush, they cost
//! less from some 2 KiB on (`pinfold-bench iommu`: `bounce-*`).
//!
//! ```
//! use pinfold::access::{FromDevice, ToDevice};
//! use pinfold::core::domain::Payload;
//! use pinfold::memory::BouncePool;
//! use pinfold::{Arena, Domain};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let arena = Arena::builder().size(4 << 20).build(&domain)?;
//! let (to, from) = (BouncePool::<ToDevice>::new(&arena)?, BouncePool::<FromDevice>::new(&arena)?);
//!
//! let program = *b"any bytes of the program"; // on no page of their own
//! let (request, answer) = (to.copy_of(&program)?, from.alloc(program.len())?);
//! // A queue of a driver takes both and returns them when the device has finished.
//! # let port = domain.port().ok_or("no device")?;
//! # let (at, into) = (request.segment(0).ok_or("none")?, answer.segment(0).ok_or("none")?);
//! # let mut seen = [0; 24];
//! # port.read(at.iova, &mut seen)?;
//! # port.write(into.iova, &seen)?;
//! let mut received = [0; 24];
//! answer.memory().copy_to_slice(0, &mut received)?;
//! assert_eq!(received, program);
//! # Ok(()) }
//! ```
//!
//! # What a device can see
//!
//! The pages of a pool hold bounced payloads and nothing else, and are mapped for the pool's
//! direction only. They stay mapped as long as the pool, its payloads, or clones of it live, so
//! **every device of the domain can reach all payloads of its pools at all times**: pages of their
//! own would not separate payloads that are all mapped at once. Only the domain separates them:
//! give devices that must not see each other's payloads a domain each, as they need for everything
//! else that stays mapped.
//!
//! Every byte of a pool that is not part of a payload that exists is 0, unless a device has written
//! it: a page is zeroed before it is mapped, and a payload before its block is used again. So no
//! device reads a byte of an earlier payload, of the arena's earlier buffers, or of the program.
//! Bytes that a device writes beside its payload, or after it has reported completion, change free
//! bytes of the pool or payloads of devices of the same domain, never the program's memory.
//!
//! In an arena with [`MappingPolicy::Whole`](super::MappingPolicy::Whole) a device reaches the rest
//! of the arena anyway, in both directions.

use super::arena::Arena;
use pinfold_core::access::{Access, Direction};
use pinfold_core::addr::{Iova, Segment};
use pinfold_core::dma_pool::{
    AllocError, Block, ChunkSource, CreateError, DmaPool, PoolLocal, SourceError,
};
use pinfold_core::domain::{DomainId, Payload};
use pinfold_core::frame::{Frame, Order};
use pinfold_core::mem::DmaMemory;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The sizes of blocks; a payload takes the least that is long enough. Aligned to their size (at
/// most to a page: PRP entries, NVM Express Base Specification 2.0, section 4.1.1).
const CLASSES: [usize; 4] = [256, 1 << 10, 4 << 10, 16 << 10];

const PAGE: usize = 4096;

/// Pages of an arena that stay mapped for direction `D`, and hold copies of payloads. See the
/// [module](self).
///
/// A handle: a clone is the same pool. A call takes a lock and makes a constant number of atomic
/// read-modify-writes; those of an owner's [`BounceLocal`] do neither.
pub struct BouncePool<D: Direction> {
    classes: [DmaPool; CLASSES.len()],
    direction: PhantomData<fn() -> D>,
}

/// One owner's handle to a [`BouncePool`]: for the thread that does a queue's work. Its calls take
/// no lock, except once for many.
pub struct BounceLocal<D: Direction> {
    classes: [PoolLocal; CLASSES.len()],
    domain: Option<DomainId>,
    direction: PhantomData<fn() -> D>,
}

/// Why a payload was not bounced. Nothing has changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BounceError {
    /// A payload has a length that is not supported.
    #[error(
        "cannot bounce {bytes} bytes: a payload has 1 to {limit} bytes; map a longer one by whole pages"
    )]
    Length {
        /// The requested value.
        bytes: usize,
        /// The largest one.
        limit: usize,
    },
    /// The arena has no pages left for the pool, or its limit is reached, or the domain does not
    /// map them.
    #[error("cannot bounce {bytes} bytes: no block of {block} bytes: {error}")]
    Exhausted {
        /// The requested value.
        bytes: usize,
        /// The size of the blocks that such a payload takes.
        block: usize,
        /// The reason.
        error: AllocError,
    },
}

impl<D: Direction> BouncePool<D> {
    /// The length of the longest payload.
    pub const MAX_BYTES: usize = CLASSES[CLASSES.len() - 1];

    /// Creates a pool of pages of `arena`, for the devices of its domain. Takes no page yet, and
    /// returns none before the last clone and the last payload are dropped: it may consume the
    /// whole arena.
    ///
    /// # Errors
    /// [`CreateError`] if the arena is too large or too little aligned for a pool.
    pub fn new(arena: &Arena) -> Result<Self, CreateError> {
        Self::with_limit(arena, u64::MAX)
    }

    /// Creates a pool as [`new`](Self::new) does that takes at most `limit` bytes of the arena.
    /// Payloads whose block is longer than that are always refused.
    ///
    /// # Errors
    /// As there.
    pub fn with_limit(arena: &Arena, limit: u64) -> Result<Self, CreateError> {
        let room = Arc::new(Room { left: AtomicU64::new(limit), limit });
        let pages = Pages { arena: arena.clone(), access: D::ACCESS, room };
        let class = |size: usize| {
            DmaPool::builder("bounce").block(size).align(size.min(PAGE)).build(&pages)
        };
        let [a, b, c, d] = CLASSES.map(class);
        Ok(Self { classes: [a?, b?, c?, d?], direction: PhantomData })
    }

    /// Returns a new owner's handle.
    pub fn local(&self) -> BounceLocal<D> {
        let domain = self.classes.first().and_then(DmaPool::domain);
        BounceLocal {
            classes: self.classes.each_ref().map(DmaPool::local),
            domain,
            direction: PhantomData,
        }
    }

    /// Returns a payload of `len` bytes, all 0 unless a device writes them.
    ///
    /// # Errors
    /// [`BounceError`].
    pub fn alloc(&self, len: usize) -> Result<Bounced<D>, BounceError> {
        let class = class_of::<D>(len)?;
        let pool = self.classes.get(class).ok_or_else(|| too_long::<D>(len))?;
        let block = pool.alloc().map_err(|error| exhausted(len, class, error))?;
        Ok(Bounced { block: Some(block), len, domain: pool.domain(), direction: PhantomData })
    }

    /// Returns a payload that is a copy of `bytes`.
    ///
    /// # Errors
    /// [`BounceError`].
    pub fn copy_of(&self, bytes: &[u8]) -> Result<Bounced<D>, BounceError> {
        self.alloc(bytes.len()).map(|bounced| bounced.with(bytes))
    }
}

impl<D: Direction> BounceLocal<D> {
    /// Like [`BouncePool::alloc`].
    ///
    /// # Errors
    /// [`BounceError`].
    pub fn alloc(&mut self, len: usize) -> Result<Bounced<D>, BounceError> {
        let (class, domain) = (class_of::<D>(len)?, self.domain);
        let local = self.classes.get_mut(class).ok_or_else(|| too_long::<D>(len))?;
        let block = local.alloc().map_err(|error| exhausted(len, class, error))?;
        Ok(Bounced { block: Some(block), len, domain, direction: PhantomData })
    }

    /// Like [`BouncePool::copy_of`].
    ///
    /// # Errors
    /// [`BounceError`].
    pub fn copy_of(&mut self, bytes: &[u8]) -> Result<Bounced<D>, BounceError> {
        self.alloc(bytes.len()).map(|bounced| bounced.with(bytes))
    }

    /// Zeroes a payload and frees its block, whichever handle it came from. Dropping it instead
    /// takes a lock.
    pub fn free(&mut self, mut bounced: Bounced<D>) {
        bounced.zero();
        let class = class_of::<D>(bounced.len).ok();
        if let (Some(local), Some(block)) =
            (class.and_then(|at| self.classes.get_mut(at)), bounced.block.take())
        {
            local.free(block);
        }
    }
}

/// Returns the class of blocks that holds `len` bytes.
fn class_of<D: Direction>(len: usize) -> Result<usize, BounceError> {
    let class = CLASSES.iter().position(|&size| len > 0 && len <= size);
    class.ok_or_else(|| too_long::<D>(len))
}

fn too_long<D: Direction>(len: usize) -> BounceError {
    BounceError::Length { bytes: len, limit: BouncePool::<D>::MAX_BYTES }
}

fn exhausted(len: usize, class: usize, error: AllocError) -> BounceError {
    BounceError::Exhausted { bytes: len, block: CLASSES.get(class).copied().unwrap_or(len), error }
}

impl<D: Direction> Clone for BouncePool<D> {
    fn clone(&self) -> Self {
        Self { classes: self.classes.clone(), direction: PhantomData }
    }
}

impl<D: Direction> fmt::Debug for BounceLocal<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BounceLocal").field("access", &D::ACCESS).finish_non_exhaustive()
    }
}

impl<D: Direction> fmt::Debug for BouncePool<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BouncePool").field("access", &D::ACCESS).finish_non_exhaustive()
    }
}

/// A payload in a [`BouncePool`], owned by this value: a queue takes it, and returns it when the
/// device has finished.
///
/// Dropping it, from any thread, zeroes the payload and frees its block, under a lock;
/// [`BounceLocal::free`] takes none.
pub struct Bounced<D: Direction> {
    /// `None` only while it is freed.
    block: Option<Block>,
    len: usize,
    domain: Option<DomainId>,
    direction: PhantomData<fn() -> D>,
}

impl<D: Direction> Bounced<D> {
    /// Returns the payload for access by copies: its bytes, and no others of their page. The data
    /// that the device wrote is complete when the queue has returned the value.
    pub fn memory(&self) -> DmaMemory<'_> {
        // A block is at least as long as its payload.
        let memory = self.block.as_ref().map_or(DmaMemory::EMPTY, Block::memory);
        memory.part(0, self.len).unwrap_or(DmaMemory::EMPTY)
    }

    /// Returns the payload, with a copy of as many bytes as it has.
    fn with(self, bytes: &[u8]) -> Self {
        // As long as the bytes, so this does not fail.
        let copied = self.memory().copy_from_slice(0, bytes);
        debug_assert_eq!(copied, Ok(()));
        self
    }

    fn zero(&self) {
        // The next payload of the block may be shorter, and another device may read then. All of
        // it, so this does not fail.
        let memory = self.memory();
        let zeroed = memory.fill(0, memory.len(), 0);
        debug_assert_eq!(zeroed, Ok(()));
    }
}

// SAFETY: the segment lies in a block that is this value's until it is dropped, in a chunk that is
// mapped for `D` in the domain for as long as the pool lives, of which the block holds a share.
// Neither changes, wherever the value is moved.
unsafe impl<D: Direction> Payload<D> for Bounced<D> {
    fn segment(&self, index: usize) -> Option<Segment> {
        let block = self.block.as_ref().filter(|_| index == 0)?;
        Some(Segment { iova: block.iova(), len: self.len as u64 })
    }

    fn domain(&self) -> Option<DomainId> {
        self.domain
    }
}

impl<D: Direction> Drop for Bounced<D> {
    fn drop(&mut self) {
        // Skipped after `BounceLocal::free`, which has zeroed it: a fill of no bytes at an address
        // that is not mapped takes a hundred nanoseconds where `memset` is a masked store.
        if self.block.is_some() {
            self.zero();
        }
    }
}

impl<D: Direction> fmt::Debug for Bounced<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bounced")
            .field("iova", &self.block.as_ref().map(Block::iova))
            .field("len", &self.len)
            .finish()
    }
}

/// The memory that the classes of a pool may have together.
struct Room {
    left: AtomicU64,
    limit: u64,
}

impl Room {
    fn take(&self, bytes: u64) -> Result<(), SourceError> {
        // Relaxed: it orders nothing, the arena does.
        let taken = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        taken.map(drop).map_err(|left| SourceError::Limit { bytes, left, limit: self.limit })
    }

    /// Undoes a take: the arena had no such pages.
    fn give_back(&self, bytes: u64) {
        self.left.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// An arena's frames, zeroed before they are mapped, for one direction.
#[derive(Clone)]
struct Pages {
    arena: Arena,
    access: Access,
    room: Arc<Room>,
}

// SAFETY: every call is forwarded to an arena, which gives these guarantees and lives as long as
// this value.
unsafe impl ChunkSource for Pages {
    fn span(&self) -> NonNull<[u8]> {
        ChunkSource::span(&self.arena)
    }
    fn iova(&self) -> Iova {
        self.arena.iova()
    }
    fn domain(&self) -> Option<DomainId> {
        ChunkSource::domain(&self.arena)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let bytes = u64::from(order.frames()) * Frame::BYTES;
        self.room.take(bytes)?;
        self.arena.acquire_zeroed(order, self.access).inspect_err(|_| self.room.give_back(bytes))
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // SAFETY: the caller upholds the contract of the same method.
        unsafe { ChunkSource::release(&self.arena, frame, order) };
        // The room is not given back: pages return with the last handle, when no handle is
        // left that could take them again.
    }
}

#[cfg(test)]
mod tests;
