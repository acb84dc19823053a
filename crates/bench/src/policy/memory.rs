//! The memory that policies map.
#![expect(unsafe_code, reason = "memory from mmap is used by its address")]

use super::api::PolicyError;
use pinfold_core::addr::{PhysAddr, PhysRange};
use pinfold_core::mem::DmaMemory;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::fs;
use std::ops::Range;
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

    /// Has the kernel use transparent hugepages for what is accessed from now on, where it can: a
    /// kernel's own memory is mapped by large pages.
    pub(crate) fn use_hugepages(&self) {
        let len = usize::try_from(self.range.len()).unwrap_or(0);
        // SAFETY: mapped until `drop`; the advice changes no contents. Where it is refused, the
        // pages stay as they are.
        let _ = unsafe { madvise(self.base.as_ptr().cast(), len, Advice::LinuxHugepage) };
    }

    /// Says which pages the kernel has used for what was accessed so far.
    pub(crate) fn describe_pages(&self) -> String {
        let start = self.range.start().raw();
        let in_use = fs::read_to_string("/proc/self/smaps")
            .ok()
            .map(|smaps| in_use(&smaps, start..start + self.range.len()));
        match in_use {
            Some(Resident { kib, huge_kib }) => {
                format!("buffers: {huge_kib} of {kib} KiB in memory are on transparent hugepages of 2 MiB")
            }
            None => {
                "buffers: whether they are on hugepages is unknown, since /proc/self/smaps cannot be read"
                    .to_owned()
            }
        }
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

/// How much of a range is in memory, and on transparent hugepages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Resident {
    kib: u64,
    huge_kib: u64,
}

/// Adds up what `/proc/self/smaps` says of the mappings that begin in `range`.
fn in_use(smaps: &str, range: Range<u64>) -> Resident {
    let (mut sum, mut inside) = (Resident::default(), false);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (Some(first), second) = (words.next(), words.next()) else { continue };
        let kib = || second.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0);
        match first {
            "Rss:" if inside => sum.kib += kib(),
            "AnonHugePages:" if inside => sum.huge_kib += kib(),
            field if field.ends_with(':') => {}
            addresses => {
                let start = addresses
                    .split_once('-')
                    .and_then(|(start, _)| u64::from_str_radix(start, 16).ok());
                inside = start.is_some_and(|start| range.contains(&start));
            }
        }
    }
    sum
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mapped = usize::try_from(self.range.len()).unwrap_or(0).saturating_add(ALIGN);
        // SAFETY: mapped by `new` with this length, and not used any more. The only error is one of
        // the arguments.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_in_memory_are_added_up_for_the_mappings_inside() {
        let mapping = |start: u64, rss, huge| {
            format!(
                "{start:x}-{:x} rw-p 00000000 00:00 0 \nSize: 4096 kB\nRss:        {rss} kB\n\
                 AnonHugePages:  {huge} kB\nVmFlags: rd wr mr mw me ac hg\n",
                start + 0x40_0000
            )
        };
        let smaps = [
            mapping(0x7f00_0000_0000, 8, 0),
            mapping(0x7f00_0040_0000, 2100, 2048),
            mapping(0x7f00_0080_0000, 12, 0),
            mapping(0x7f00_00c0_0000, 4096, 4096),
        ];
        let range = 0x7f00_0040_0000..0x7f00_00c0_0000;
        assert_eq!(in_use(&smaps.concat(), range), Resident { kib: 2112, huge_kib: 2048 });
        assert_eq!(in_use("", 0..u64::MAX), Resident::default());
    }

    #[test]
    fn what_was_accessed_is_described() {
        let memory = Memory::new(8 << 20).unwrap();
        memory.use_hugepages();
        assert!(
            memory.describe_pages().starts_with("buffers: 0 of 0 KiB"),
            "{}",
            memory.describe_pages()
        );
        // SAFETY: mapped until the drop, and accessed here alone.
        let accessed = unsafe { DmaMemory::from_raw(memory.base, 8 << 20) };
        accessed.fill(0, 4 << 20, 1).unwrap();
        let described = memory.describe_pages();
        assert!(described.contains(" of 4096 KiB in memory"), "{described}");
    }
}
