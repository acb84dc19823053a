//! The memory that policies map.
#![expect(unsafe_code, reason = "memory from mmap is used by its address, and kept valid by hand")]

use super::api::PolicyError;
use pinfold_core::addr::{PhysAddr, PhysRange};
use pinfold_core::mem::DmaMemory;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::iter::{once, repeat_n};
use std::ptr::NonNull;
use std::sync::Arc;

/// Memory for the devices of a policy, aligned to 2 MiB. Pages that are never accessed take no
/// memory, so it may be as large as the physical memory of a machine whose trace is replayed.
///
/// Its physical address is its address in this process, as everywhere behind the software IOMMU. It
/// gives no references: devices read and write it through their [`Port`](pinfold::soft::Port).
#[derive(Debug)]
pub struct Memory {
    /// The start of the whole mapping, which is [`ALIGN`] longer than the memory.
    map: NonNull<u8>,
    base: NonNull<u8>,
    range: PhysRange,
}

// SAFETY: the memory is accessed through `DmaMemory` only, whose accesses are atomics.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`.
unsafe impl Sync for Memory {}

const ALIGN: usize = 2 << 20;

impl Memory {
    /// Reserves at least `bytes`.
    ///
    /// # Errors
    /// [`PolicyError::NoMemory`].
    pub fn new(bytes: usize) -> Result<Arc<Self>, PolicyError> {
        let error = |error: Errno| PolicyError::NoMemory { bytes, error: error.into() };
        let rounded =
            bytes.max(1).checked_next_multiple_of(ALIGN).ok_or_else(|| error(Errno::NOMEM))?;
        let mapped = rounded.checked_add(ALIGN).ok_or_else(|| error(Errno::NOMEM))?;
        let (prot, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: at an address of the kernel's choice, so it replaces nothing.
        let map =
            unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, prot, flags) }.map_err(error)?;
        let map = NonNull::new(map.cast::<u8>()).ok_or_else(|| error(Errno::NOMEM))?;
        let skip = map.addr().get().next_multiple_of(ALIGN) - map.addr().get();
        // SAFETY: less than `ALIGN`, by which the mapping is longer than the memory.
        let base = unsafe { map.add(skip) };
        let range = PhysRange::new(PhysAddr::new(base.addr().get() as u64), rounded as u64)?;
        Ok(Arc::new(Self { map, base, range }))
    }

    /// Makes the kernel use transparent hugepages for memory that is accessed from now on, where it
    /// can: a kernel's own memory is mapped by large pages.
    pub fn use_hugepages(&self) {
        let len = usize::try_from(self.range.len()).unwrap_or(0);
        // SAFETY: mapped until `drop`; the advice changes no contents. Where it is refused, the
        // pages stay as they are.
        let _ = unsafe { madvise(self.base.as_ptr().cast(), len, Advice::LinuxHugepage) };
    }

    /// Returns all of it.
    pub fn whole(&self) -> PhysRange {
        self.range
    }

    /// Returns `len` bytes at `offset`; `None` if they are not inside, or `len` is 0.
    pub fn range(&self, offset: u64, len: u64) -> Option<PhysRange> {
        self.range.part(offset, len)
    }

    /// Returns the memory for a backend, which registers it.
    pub(crate) fn dma(&self) -> DmaMemory<'_> {
        let len = usize::try_from(self.range.len()).unwrap_or(0);
        // SAFETY: mapped until `drop`; no reference into it is ever made.
        unsafe { DmaMemory::from_raw(self.base, len) }
    }

    /// Returns the memory of a range that consists of whole pages.
    ///
    /// # Errors
    /// [`PolicyError::Outside`].
    #[inline]
    pub(super) fn dma_of(&self, range: PhysRange) -> Result<DmaMemory<'_>, PolicyError> {
        let outside = || PolicyError::Outside { range, memory: self.range };
        let offset = range.start().checked_offset_from(self.range.start()).ok_or_else(outside)?;
        let part = usize::try_from(offset).ok().zip(usize::try_from(range.len()).ok());
        let (offset, len) = part.filter(|_| range.is_aligned(4096)).ok_or_else(outside)?;
        self.dma().part(offset, len).map_err(|_| outside())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mapped = usize::try_from(self.range.len()).unwrap_or(0).saturating_add(ALIGN);
        // SAFETY: mapped by `new` with this length, and not used any more. The only error is one of
        // the arguments.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), mapped) };
    }
}

// The mappings that drivers make when they start and keep.

/// Returns the sizes in pages of `count` mappings that four drivers make at boot, in order: two
/// network cards whose queues have a descriptor ring and a buffer for each descriptor, a storage
/// controller with queue pairs, and one with a command table for each of its commands. Each has an
/// area of an odd size too, for its firmware.
///
/// The study of 2015 counted tens of thousands of such mappings for the drivers of two network
/// cards alone.
pub fn static_maps(count: usize) -> impl Iterator<Item = u64> {
    let card = |firmware: u64, queues: usize, descriptors: usize, ring: u64, buffer: u64| {
        let queue = move |_| once(ring).chain(repeat_n(buffer, descriptors));
        once(firmware).chain((0..queues).flat_map(queue))
    };
    let cards = card(13, 16, 1024, 4, 1).chain(card(5, 8, 2048, 8, 2));
    let queue_pairs = once(3).chain(repeat_n(16, 64)).chain(repeat_n(4, 64));
    let command_tables = once(21).chain(repeat_n(8, 512));
    cards.chain(queue_pairs).chain(command_tables).chain(std::iter::repeat(1)).take(count)
}
