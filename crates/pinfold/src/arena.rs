//! Arenas: pinned memory from the system, reached by devices through one domain.
//!
//! An [`Arena`] is one contiguous range of memory with one contiguous range of IOVAs in one domain, so that the IOVA of
//! anything inside is an addition. [`Arena::alloc`] gives [`Buffer`]s; as a
//! [`ChunkSource`](pinfold_core::dma_pool::ChunkSource) it feeds DMA pools and page pools; one that is exposed per use takes a
//! page pool's chunks from the device while their pages are still out
//! ([`RevocableSource`](pinfold_core::page_pool::RevocableSource)).
//!
//! # What is promised about the memory
//!
//! - **Zero when fresh.** Memory that nobody had before reads as zero, and takes no page until it is touched. Memory
//!   that was freed and is handed out again holds what its last user left: [`Arena::alloc_zeroed`] where that matters.
//! - **Where it is.** It does not move within this process, and children of `fork` get no copy (`MADV_DONTFORK`), so a
//!   write after a fork does not move the parent to another page than the one that the device knows.
//! - **Whether it is resident.** hugetlb pages always are. Other pages are locked from when they are first touched
//!   (`MLOCK_ONFAULT`), where `RLIMIT_MEMLOCK` allows; [`Account::residency`] says whether. Locking keeps a page in
//!   memory, but lets the kernel move it to another frame; what holds the *frame* for a real device is the pin that
//!   VFIO, iommufd or an io_uring registration takes. Behind the software IOMMU "physical" is an address of this
//!   process, so neither is needed to be right: not being allowed to lock is then noted, and is no error
//!   ([`Pinning::Required`] makes it one).
//! - **When it goes back.** When the last handle, buffer and pool chunk is gone. Frames that never come back (a pool
//!   destroyed while blocks are out, a revoke that timed out) keep the whole arena for ever: a device may still write
//!   there. [`quarantined_bytes`] counts it.

mod builder;
mod chunks;
mod error;
mod hide;
mod obtain;
mod source;
mod space;
#[cfg(test)]
mod tests;

pub use builder::{ArenaBuilder, Pinning};
pub use error::{AllocError, BuildError, Shared};
pub use source::{Account, NotLocked, Residency, Source, SourceRefused, UnknownSource, Why};

use crate::buffer::Buffer;
use crate::sys::{region::Region, smaps};
use crate::uring::Fixed;
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::StaticMapping;
use pinfold_core::frame::{Frame, FrameError, Order, Zone};
use pinfold_core::mem::DmaMemory;
use space::{Place, Space};
use std::collections::BTreeMap;
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What of an arena its domain's devices can reach.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum MappingPolicy {
    /// All of it, as long as it lives: mapped once, and no table work afterwards. A device may write any byte at any
    /// time, so no slice of it is lent.
    Whole,
    /// Only what is in use: a pool's chunks as long as the pool has them, a buffer as long as it is mapped.
    #[default]
    PerUse,
}

/// Pinned memory from the system, in one domain. A handle: cloning it makes another one to the same memory.
#[derive(Clone)]
pub struct Arena(Arc<Inner>);

pub(crate) struct Inner {
    /// Unmapped by hand: only where nothing reaches into it any more.
    region: ManuallyDrop<Region>,
    memfd: Option<OwnedFd>,
    zone: Zone,
    space: Box<dyn Space>,
    iova: IovaRange,
    /// `None` once the memory has been taken out of the domain.
    place: Option<Place>,
    /// The chunks that are mapped, by their first frame.
    chunks: Mutex<BTreeMap<u32, StaticMapping>>,
    mapping_policy: MappingPolicy,
    account: Account,
    /// Frames of the zone that are none of the region: a zone has at least 2 MiB.
    fenced: u64,
    /// The zone's own high-water mark counts what is fenced off, so it is of no use to a small arena.
    peak: AtomicU64,
    quarantined: AtomicU64,
}

/// How much of an arena is in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaStats {
    /// How many bytes it has.
    pub bytes: u64,
    /// How many frames of 4096 bytes it has.
    pub frames: u64,
    /// Frames handed out.
    pub frames_in_use: u64,
    /// The most that were handed out at once.
    pub frames_peak: u64,
    /// Frames that a device could not be kept from: they are never handed out again.
    pub frames_quarantined: u64,
    /// Bytes that the kernel keeps in memory once touched: all of them, or 0.
    pub pinned_bytes: u64,
}

/// What the kernel has put behind an arena so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Backing {
    /// Bytes that have a page of memory.
    pub resident_bytes: u64,
    /// Bytes of those on transparent hugepages.
    pub transparent_bytes: u64,
    /// Bytes of those on pages of the hugetlb pool.
    pub hugetlb_bytes: u64,
}

static LEAKED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes of arenas that were kept for ever, because something in them never came back.
pub fn quarantined_bytes() -> u64 {
    LEAKED_BYTES.load(Ordering::Relaxed)
}

fn count_quarantined(bytes: u64) {
    LEAKED_BYTES.fetch_add(bytes, Ordering::Relaxed);
    #[cfg(test)]
    tests::LEAKED_HERE.set(tests::LEAKED_HERE.get() + bytes);
}

impl Arena {
    /// The way to make one.
    pub fn builder() -> ArenaBuilder {
        ArenaBuilder::new()
    }

    /// A buffer of at least `bytes` bytes: rounded up to whole frames of 4096, all of which may be used, contiguous
    /// for the processor and for the device. A buffer of 2 MiB or more starts at a multiple of 2 MiB where such a run
    /// is free, so that it maps by large leaves.
    ///
    /// Fresh memory is zero; recycled memory holds what its last user left.
    ///
    /// # Errors
    /// [`AllocError`]; nothing has changed then.
    pub fn alloc(&self, bytes: usize) -> Result<Buffer, AllocError> {
        let asked = u64::try_from(bytes).unwrap_or(u64::MAX);
        let frames = self.0.frames_for(asked)?;
        let run = self.0.take(frames).map_err(|error| self.0.refusal(asked, error))?;
        Ok(Buffer::new(self.clone(), run))
    }

    /// The same, all bytes 0. O(bytes), and touches every page.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zeroed(&self, bytes: usize) -> Result<Buffer, AllocError> {
        let mut buffer = self.alloc(bytes)?;
        buffer.zero();
        Ok(buffer)
    }

    /// What a device of the domain calls the first byte; the rest follows linearly. With [`MappingPolicy::PerUse`] it
    /// reaches only what is mapped there.
    pub fn iova(&self) -> Iova {
        self.0.iova.start()
    }

    /// All of it, to be registered with a ring ([`Options::fixed`](crate::uring::Options::fixed)).
    pub fn fixed(&self) -> Fixed<'_> {
        self.0.region.memory().into()
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.0.region.len()
    }

    /// Never: an arena has at least one frame.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What of it devices can reach.
    pub fn mapping_policy(&self) -> MappingPolicy {
        self.0.mapping_policy
    }

    /// What it got, and what was refused.
    pub fn account(&self) -> &Account {
        &self.0.account
    }

    /// The descriptor by which another process maps the same memory, where the source is a memfd.
    pub fn memfd(&self) -> Option<BorrowedFd<'_>> {
        self.0.memfd.as_ref().map(AsFd::as_fd)
    }

    /// How much of it is in use. O(1).
    pub fn stats(&self) -> ArenaStats {
        let inner = &*self.0;
        let bytes = inner.account.bytes;
        let pinned = match inner.account.residency {
            Residency::Hugetlb | Residency::Locked => true,
            Residency::ByMapping => inner.mapping_policy == MappingPolicy::Whole,
            Residency::NotLocked(_) => false,
        };
        ArenaStats {
            bytes,
            frames: bytes / Frame::BYTES,
            frames_in_use: inner.in_use(),
            frames_peak: inner.peak.load(Ordering::Relaxed),
            frames_quarantined: inner.quarantined.load(Ordering::Relaxed),
            pinned_bytes: if pinned { bytes } else { 0 },
        }
    }

    /// What the kernel has put behind it so far, by `/proc/self/smaps`; `None` where that can not be read.
    /// O(mappings of the process). Of the caller's memory it is what is said of the mapping around it.
    pub fn backing(&self) -> Option<Backing> {
        let vma = smaps::of_range(self.0.region.addr(), self.0.region.len())?;
        Some(Backing {
            resident_bytes: vma.resident.saturating_add(vma.hugetlb),
            transparent_bytes: vma.transparent,
            hugetlb_bytes: vma.hugetlb,
        })
    }

    /// Whether a buffer of it that is not mapped is its owner's alone: no device reaches it, and no other process (nor
    /// this one by `write`, which is safe) has it as a file.
    pub(crate) fn is_private(&self) -> bool {
        self.0.mapping_policy == MappingPolicy::PerUse && self.0.memfd.is_none()
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.0
    }
}

/// Frames of an arena in one run, and how they were had.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) first: Frame,
    pub(crate) frames: u32,
}

impl Run {
    fn bytes(self) -> u64 {
        u64::from(self.frames) * Frame::BYTES
    }

    /// The order whose run it is, where it is one: then the zone has it by order, else by length. (A part of a run may
    /// be of such a length and not start where one of that order does.)
    fn order(self) -> Option<Order> {
        let order = u8::try_from(self.frames.trailing_zeros()).ok()?;
        let whole = self.frames.is_power_of_two() && self.first.index().is_multiple_of(self.frames);
        (whole && order <= Order::HUGE.get()).then(|| Order::new(order)).flatten()
    }
}

impl Inner {
    fn frames_for(&self, asked: u64) -> Result<u32, AllocError> {
        if asked == 0 {
            return Err(AllocError::Empty);
        }
        let too_large = AllocError::TooLarge { asked, arena: self.account.bytes };
        if asked > self.account.bytes {
            return Err(too_large);
        }
        u32::try_from(asked.div_ceil(Frame::BYTES)).map_err(|_| too_large)
    }

    fn take(&self, frames: u32) -> Result<Run, FrameError> {
        let huge = Order::HUGE.frames();
        // Which frame the run starts at does not matter here: `order` looks at its length alone.
        let order = Frame::new(0).and_then(|first| Run { first, frames }.order());
        let first = match order {
            Some(order) => self.zone.alloc(order)?,
            None if frames < huge => self.zone.alloc_run(frames, 1)?,
            None => self.zone.alloc_run(frames, huge).or_else(|_| self.zone.alloc_run(frames, 1))?,
        };
        self.note_peak();
        Ok(Run { first, frames })
    }

    fn note_peak(&self) {
        let in_use = self.in_use();
        if in_use > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(in_use, Ordering::Relaxed);
        }
    }

    /// Frames that are handed out: buffers, chunks, and what never came back.
    fn in_use(&self) -> u64 {
        self.zone.stats().in_use.saturating_sub(self.fenced)
    }

    /// Takes back a run that `take` gave, and that no device can reach.
    pub(crate) fn give_back(&self, run: Run) {
        let freed = match run.order() {
            Some(order) => self.zone.free(run.first, order),
            None => self.zone.free_run(run.first, run.frames),
        };
        if let Err(error) = freed {
            // Only a caller that broke its contract gets here: what it frees stays out, and so the arena stays.
            tracing::error!(first = %run.first, frames = run.frames, %error, "frames not taken back");
        }
    }

    /// Keeps a run out for ever, because a device may still reach it.
    fn quarantine(&self, run: Run) {
        self.quarantined.fetch_add(u64::from(run.frames), Ordering::Relaxed);
        self.space.count_quarantined(run.bytes());
    }

    fn refusal(&self, asked: u64, error: FrameError) -> AllocError {
        match error {
            FrameError::Exhausted { .. } | FrameError::NoRun { .. } => AllocError::Exhausted {
                asked,
                in_use: self.in_use() * Frame::BYTES,
                arena: self.account.bytes,
            },
            other => AllocError::Frames(other),
        }
    }

    /// The memory of a run that `take` gave.
    pub(crate) fn memory_of(&self, run: Run) -> DmaMemory<'_> {
        let memory = self.region.memory();
        let offset = usize::try_from(run.first.offset()).unwrap_or(usize::MAX);
        let len = usize::try_from(run.bytes()).unwrap_or(usize::MAX);
        // The zone has as many frames as the region, so the part is always inside.
        memory.part(offset, len).unwrap_or(DmaMemory::EMPTY)
    }

    /// Where a run that `take` gave lies in the arena's own range of IOVAs.
    fn iova_of(&self, run: Run) -> Option<IovaRange> {
        self.iova.part(run.first.offset(), run.bytes())
    }

    /// Where a run is mapped already for as long as the arena lives.
    pub(crate) fn fixed_iova_of(&self, run: Run) -> Option<Iova> {
        match self.mapping_policy {
            MappingPolicy::Whole => self.iova_of(run).map(|range| range.start()),
            MappingPolicy::PerUse => None,
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let in_use = self.in_use();
        let place = self.place.take().filter(|_| in_use == 0);
        let free = place.is_some_and(|place| space::detach(&*self.space, self.region.memory(), place));
        if !free {
            tracing::warn!(bytes = self.account.bytes, frames = in_use, "an arena is kept for ever");
            count_quarantined(self.account.bytes);
            return;
        }
        if !self.region.is_owned() {
            obtain::hand_back(&self.region, Some(&self.account.residency), self.account.numa_node);
        }
        // SAFETY: this is the only place that drops the region, in the drop of what holds it. Every frame is back and
        // no device reaches the memory (`detach`), so nothing is left that could.
        unsafe { ManuallyDrop::drop(&mut self.region) };
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        f.debug_struct("Arena")
            .field("bytes", &inner.account.bytes)
            .field("source", &inner.account.source)
            .field("iova", &inner.iova)
            .field("mapping_policy", &inner.mapping_policy)
            .finish_non_exhaustive()
    }
}
