//! The parts of a VT-d backend that depend on Linux: registers through `/dev/mem`, unmovable memory
//! for its tables, the physical addresses of payloads, and write-back of stores for a page walk
//! that does not snoop.

mod pauses;

use self::pauses::Pauses;
use super::pinned::PinnedMemory;
use crate::folios::{PinError, PinnedFolios};
use crate::sys::Errno;
use crate::sys::region::Region;
use crate::sys::window::Window;
use pinfold_core::addr::{PageSize, PhysAddr};
use pinfold_core::domain::{BackendError, Generation, Generations, PhysExtent, PhysTranslator};
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::{TableMemory, TablePage, TablePages};
use pinfold_vtd::registers::{GCMD, Registers};
use pinfold_vtd::{WriteBack, unit};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::time::Instant;

/// A unit's registers. The last user of the unit, a domain of it included, owns them last: when
/// they are dropped, the unit is as the kernel left it, disabled.
#[derive(Debug)]
pub(crate) struct UnitRegisters {
    window: Window,
    /// Whether the unit has been given a command.
    commanded: AtomicBool,
    clock: Instant,
    pauses: Pauses,
    /// Locked, so that another process with the same intention is refused.
    _lock: OwnedFd,
}

impl UnitRegisters {
    /// Wraps the registers in `window`. `lock` keeps others from the unit.
    ///
    /// # Safety
    /// As for [`vtd::Device::open`](crate::vtd::Device::open): what uses the unit ends before what
    /// devices must not reach is at stake, since dropping the value disables the unit.
    pub(crate) unsafe fn new(window: Window, lock: OwnedFd) -> Self {
        let commanded = AtomicBool::new(false);
        Self { window, commanded, clock: Instant::now(), pauses: Pauses::default(), _lock: lock }
    }
}

/// An offset outside reads as all ones, and writes to it are lost, as on a bus.
impl Registers for UnitRegisters {
    fn read32(&self, offset: u32) -> u32 {
        self.window.read(offset as usize).unwrap_or(u32::MAX)
    }
    fn write32(&self, offset: u32, value: u32) {
        if offset == GCMD {
            self.commanded.store(true, Ordering::Relaxed);
        }
        self.window.write(offset as usize, value);
    }
    fn read64(&self, offset: u32) -> u64 {
        self.window.read(offset as usize).unwrap_or(u64::MAX)
    }
    fn write64(&self, offset: u32, value: u64) {
        self.window.write(offset as usize, value);
    }
    fn now_ns(&self) -> Option<u64> {
        u64::try_from(self.clock.elapsed().as_nanos()).ok()
    }
    fn wake_later(&self, waker: &Waker) {
        self.pauses.wake_later(waker);
    }
}

impl Drop for UnitRegisters {
    fn drop(&mut self) {
        if !*self.commanded.get_mut() {
            return;
        }
        // SAFETY: the constructor's caller has promised it, and no handle of the unit is left.
        if let Err(error) = unsafe { unit::disable(self) } {
            tracing::error!(%error, "the unit stays enabled, with tables in memory that is freed: reboot");
        }
    }
}

/// Writes lines of the processor's caches back, for a unit that does not look into them. For one
/// that does it is time lost, and nothing else.
#[derive(Debug)]
pub(crate) struct FlushLines;

const LINE: usize = 64;

/// Returns the address of each line that has one of the `len` bytes at `addr`.
fn lines(addr: usize, len: usize) -> impl Iterator<Item = usize> {
    (addr / LINE * LINE..addr + len).step_by(LINE)
}

impl WriteBack for FlushLines {
    const FOR_NON_COHERENT: bool = true;

    fn write_back(words: &[AtomicU64]) {
        for line in lines(words.as_ptr().addr(), size_of_val(words)) {
            // The first may begin before the words: the address alone matters.
            let line = words.as_ptr().with_addr(line).cast();
            // SAFETY: every processor of x86-64 has the instruction; it changes no value, and the
            // line contains a part of `words`, so that it is mapped.
            #[cfg(target_arch = "x86_64")]
            unsafe {
                std::arch::x86_64::_mm_clflush(line);
            }
        }
        // Before what is stored next, such as the link to these words. `clflush` is ordered by it.
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// Table pages in hugepages of a pool, which have addresses that do not change and are contiguous.
/// They are never freed: hardware may walk them until the machine is reset.
#[derive(Clone, Debug, Default)]
pub(crate) struct TableChunks(Arc<Mutex<Chunk>>);

/// The pages of a hugepage that are left.
#[derive(Debug, Default)]
struct Chunk {
    pages: &'static [TablePage],
    phys: u64,
}

const CHUNK: usize = 2 << 20;

/// Why there is no memory for tables.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChunkError {
    #[error("no hugepage of 2 MiB: {0}")]
    Hugepage(Errno),
    #[error(transparent)]
    Frames(#[from] PinError),
    #[error("a hugepage is not contiguous")]
    Pieces,
}

impl Chunk {
    fn new() -> Result<Self, ChunkError> {
        let region = Region::hugetlb(CHUNK, PageSize::Size2M).map_err(ChunkError::Hugepage)?;
        region.keep_from_children().map_err(ChunkError::Hugepage)?;
        let folios = PinnedFolios::new(region.memory(), false)?;
        let whole = folios.table().locate(0).ok().filter(|segment| segment.len == CHUNK as u64);
        let phys = whole.ok_or(ChunkError::Pieces)?.iova.raw();
        let first = region.memory().as_ptr().cast::<TablePage>().as_ptr();
        // Both are leaked: they stay mapped and pinned.
        std::mem::forget((region, folios));
        // SAFETY: a mapping of this length, zeroed, aligned to its size, that is never unmapped;
        // nothing but the slice refers to it, and every value is an entry.
        let pages = unsafe { std::slice::from_raw_parts(first, CHUNK / TablePages::PAGE_BYTES) };
        Ok(Self { pages, phys })
    }
}

impl TableMemory for TableChunks {
    fn grow(&self, pages: u32) -> Option<TablePages> {
        // A panic while it was locked has left it as it was.
        let mut chunk = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if chunk.pages.is_empty() {
            let next = Chunk::new();
            *chunk =
                next.inspect_err(|error| tracing::warn!(%error, "no memory for tables")).ok()?;
        }
        let count = chunk.pages.len().min(pages as usize);
        let (taken, rest) = chunk.pages.split_at_checked(count)?;
        // SAFETY: contiguous in a hugepage that is pinned, at that address; the rest alone is
        // passed on later, so that nothing else has these pages.
        let taken = unsafe { TablePages::new(taken, PhysAddr::new(chunk.phys)) }.ok()?;
        let phys = chunk.phys + (count * TablePages::PAGE_BYTES) as u64;
        *chunk = Chunk { pages: rest, phys };
        Some(taken)
    }

    fn advice(&self) -> &'static str {
        "reserve hugepages of 2 MiB (`sudo sysctl vm.nr_hugepages=64`)"
    }
}

/// The physical addresses of what is registered, which is pinned meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Translator {
    memory: PinnedMemory,
    generations: Generations,
}

impl PhysTranslator for Translator {
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        self.memory.add(memory)
    }

    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        self.memory.remove(memory)?;
        self.generations.advance();
        Ok(())
    }

    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        self.memory.extent(memory)
    }

    fn generation(&self) -> Generation {
        self.generations.current()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_with_a_word_is_written_back_and_no_other() {
        let of = |addr, len| lines(addr, len).collect::<Vec<_>>();
        assert_eq!(of(128, 8), [128]);
        assert_eq!(of(184, 16), [128, 192], "across a border");
        assert_eq!(of(128, 128), [128, 192]);
        assert_eq!(of(136, 64), [128, 192], "as long as one, in two");
        assert_eq!(of(4096, 4096).len(), 64);
        assert_eq!(of(128, 0), [0_usize; 0]);
    }

    #[test]
    fn table_pages_are_contiguous_and_given_once() {
        let chunks = TableChunks::default();
        let Some(first) = chunks.grow(3) else {
            return eprintln!("SKIPPED: no hugepage, or frames are hidden here");
        };
        let second = chunks.clone().grow(600).unwrap();
        assert_eq!((first.pages().len(), second.pages().len()), (3, 509), "what is left");
        assert_eq!(second.phys().raw(), first.phys().raw() + 3 * 4096);
        assert!(first.phys().is_aligned(CHUNK as u64));
        let zero = |pages: &TablePages| {
            let words =
                |page: &TablePage| page.entries().iter().all(|e| e.load(Ordering::Relaxed) == 0);
            pages.pages().iter().all(words)
        };
        assert!(zero(&first) && zero(&second));
        FlushLines::write_back(&first.pages()[0].entries()[3..21]);
    }
}
