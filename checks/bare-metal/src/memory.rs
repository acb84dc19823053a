//! Memory: a heap and pages in static arrays, at their physical addresses.

use core::alloc::{GlobalAlloc, Layout};
use core::arch::x86_64::{_mm_clflush, _mm_mfence};
use core::cell::UnsafeCell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use pinfold_core::addr::{Iova, PhysAddr, PhysRange};
use pinfold_core::domain::{
    BackendError, DomainId, Generation, Generations, PhysExtent, PhysTranslator, Pinned,
};
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::{TableMemory, TablePage, TablePages};
use pinfold_vtd::WriteBack;

/// Memory that is given out in pieces, from its start, and never again.
#[repr(C, align(0x20_0000))]
struct Arena<const BYTES: usize> {
    bytes: UnsafeCell<[u8; BYTES]>,
    used: AtomicUsize,
}

// SAFETY: each byte is given out once.
unsafe impl<const BYTES: usize> Sync for Arena<BYTES> {}

impl<const BYTES: usize> Arena<BYTES> {
    const fn new() -> Self {
        Self { bytes: UnsafeCell::new([0; BYTES]), used: AtomicUsize::new(0) }
    }

    fn take(&self, bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let place = |used: usize| used.next_multiple_of(align);
        let used = self
            .used
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                place(used).checked_add(bytes).filter(|end| *end <= BYTES)
            })
            .ok()?;
        NonNull::new(self.bytes.get().cast::<u8>().wrapping_add(place(used)))
    }
}

/// The heap: freed memory is not used again.
struct Heap(Arena<{ 2 << 20 }>);

// SAFETY: memory of the layout, or none, given out once.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let at = self.0.take(layout.size(), layout.align());
        at.map_or(core::ptr::null_mut(), NonNull::as_ptr)
    }
    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[global_allocator]
static HEAP: Heap = Heap(Arena::new());

/// The memory that the unit and devices access.
static PAGES: Arena<{ 4 << 20 }> = Arena::new();

/// Pages that a device accesses.
pub(crate) struct Pages {
    base: NonNull<u8>,
    len: usize,
}

impl Pages {
    pub(crate) fn take(count: usize) -> Option<Self> {
        Some(Self { base: PAGES.take(count * 4096, 4096)?, len: count * 4096 })
    }
}

// SAFETY: static memory that one value owns.
unsafe impl Send for Pages {}
// SAFETY: as for `Send`; it does not move, and nothing refers into it.
unsafe impl Pinned for Pages {
    fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: as for the trait.
        unsafe { DmaMemory::from_raw(self.base, self.len) }
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

/// Pages of tables.
pub(crate) struct Tables;

impl TableMemory for Tables {
    fn grow(&self, pages: u32) -> Option<TablePages> {
        let pages = pages.min(64) as usize;
        let base = PAGES.take(pages * 4096, 4096)?;
        // SAFETY: static memory of that length and alignment, given out once; every value is an entry.
        let all = unsafe { core::slice::from_raw_parts(base.cast::<TablePage>().as_ptr(), pages) };
        // SAFETY: contiguous at its own address, and nobody else's.
        unsafe { TablePages::new(all, PhysAddr::new(base.addr().get() as u64)) }.ok()
    }
    fn advice(&self) -> &'static str {
        "enlarge PAGES"
    }
}

/// Memory is at its physical address.
pub(crate) struct Identity(pub(crate) Generations);

impl PhysTranslator for Identity {
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        self.0.advance();
        Ok(())
    }
    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        let range = PhysRange::new(PhysAddr::new(addr as u64), len as u64);
        let range = range.map_err(|_| BackendError::NotRegistered { addr, len })?;
        Ok(PhysExtent::new(addr, range))
    }
    fn generation(&self) -> Generation {
        self.0.current()
    }
}

/// Writes lines of the cache back, for a unit that does not look into it.
pub(crate) struct Clflush;

impl WriteBack for Clflush {
    const FOR_NON_COHERENT: bool = true;
    fn write_back(words: &[AtomicU64]) {
        let Some(last) = words.last() else { return };
        let (first, last) = (words.as_ptr().addr() & !63, core::ptr::from_ref(last).addr());
        for line in (first..=last).step_by(64) {
            // SAFETY: the line has one of the words.
            unsafe { _mm_clflush(line as *const u8) };
        }
        // SAFETY: x86-64 has SSE2.
        unsafe { _mm_mfence() };
    }
}
