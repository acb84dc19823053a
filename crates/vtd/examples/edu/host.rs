//! The parts of the example that depend on Linux: registers through `/dev/mem` and sysfs, memory in
//! hugepages, and its physical addresses.

use pinfold_core::addr::{PhysAddr, PhysRange};
use pinfold_core::domain::{BackendError, Generation, Generations, PhysExtent, PhysTranslator};
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::{TableMemory, TablePage, TablePages};
use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::error::Error;
use std::ffi::c_void;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Registers in the address space of this process.
#[derive(Clone, Copy)]
pub(crate) struct Mmio {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: accessed by volatile accesses of naturally aligned words alone, and never unmapped.
unsafe impl Send for Mmio {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mmio {}

impl Mmio {
    /// Maps `len` bytes at `offset` of a file.
    pub(crate) fn map(path: &str, offset: u64, len: usize) -> Result<Self, Box<dyn Error>> {
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::SYNC, Mode::empty())
            .map_err(|error| format!("cannot open {path}: {error}"))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, offset)
        };
        let base = base.map_err(|error| format!("cannot map {path} at {offset:#x}: {error}"))?;
        Ok(Self { base: NonNull::new(base.cast()).ok_or("a mapping at 0")?, len })
    }

    pub(crate) fn at<T>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= self.len && offset.is_multiple_of(size_of::<T>()));
        // SAFETY: inside.
        unsafe { self.base.as_ptr().add(offset) }.cast()
    }
    pub(crate) fn read<T>(&self, offset: usize) -> T {
        // SAFETY: `at` is inside and aligned; registers are words of any value.
        unsafe { self.at::<T>(offset).read_volatile() }
    }
    pub(crate) fn write<T>(&self, offset: usize, value: T) {
        // SAFETY: as for `read`.
        unsafe { self.at::<T>(offset).write_volatile(value) }
    }
}

/// Hugepages of one size, which do not move, handed out in pieces and never freed.
pub(crate) struct Hugepages {
    /// Bytes of each.
    page: usize,
    base: NonNull<u8>,
    len: usize,
    /// Of each hugepage.
    phys: Vec<u64>,
    used: AtomicUsize,
}

// SAFETY: memory that is never unmapped; each piece is handed out once.
unsafe impl Send for Hugepages {}
// SAFETY: as for `Send`; what changes is atomic.
unsafe impl Sync for Hugepages {}

impl Hugepages {
    /// Takes `count` pages of `page` bytes: 2 MiB or 1 GiB.
    pub(crate) fn new(page: usize, count: usize) -> Result<Arc<Self>, Box<dyn Error>> {
        let len = count * page;
        let size = if page == 2 << 20 { MapFlags::HUGE_2MB } else { MapFlags::HUGE_1GB };
        let flags = MapFlags::SHARED | MapFlags::HUGETLB | size | MapFlags::POPULATE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, access, flags) };
        let base: *mut c_void =
            base.map_err(|error| format!("cannot map {count} hugepages: {error}"))?;
        let pagemap = File::open("/proc/self/pagemap")?;
        let mut phys = Vec::new();
        for number in 0..count {
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, ((base.addr() + number * page) / 4096 * 8) as u64)?;
            let frame = u64::from_le_bytes(entry) & ((1 << 55) - 1);
            if frame == 0 {
                return Err("physical addresses are hidden: run as root".into());
            }
            phys.push(frame * 4096);
        }
        let base = NonNull::new(base.cast()).ok_or("a mapping at 0")?;
        Ok(Arc::new(Self { page, base, len, phys, used: AtomicUsize::new(0) }))
    }

    /// Takes `bytes`, a multiple of 4096, that do not cross a hugepage.
    pub(crate) fn take(&self, bytes: usize) -> Option<(NonNull<u8>, u64)> {
        let mut at = self.used.load(Ordering::Relaxed);
        if at % self.page + bytes > self.page {
            at = at.next_multiple_of(self.page);
        }
        if at + bytes > self.len {
            return None;
        }
        self.used.store(at + bytes, Ordering::Relaxed);
        // SAFETY: inside.
        Some((unsafe { self.base.add(at) }, self.phys_of(at)))
    }

    fn phys_of(&self, offset: usize) -> u64 {
        self.phys[offset / self.page] + (offset % self.page) as u64
    }

    /// The word at a physical address of them.
    pub(crate) fn word(&self, phys: u64) -> Option<&AtomicU64> {
        let of = |start: &u64| phys.checked_sub(*start).filter(|offset| *offset < self.page as u64);
        let (huge, within) =
            self.phys.iter().enumerate().find_map(|(huge, start)| Some((huge, of(start)?)))?;
        let offset = huge * self.page + usize::try_from(within).ok()?;
        // SAFETY: inside.
        let at = unsafe { self.base.add(offset) }.cast::<AtomicU64>();
        // SAFETY: a multiple of 8, as descriptors are; the queue is accessed as words in no other
        // way.
        Some(unsafe { at.as_ref() })
    }
}

/// Table pages from hugepages.
pub(crate) struct Tables(pub(crate) Arc<Hugepages>);

impl TableMemory for Tables {
    fn grow(&self, pages: u32) -> Option<TablePages> {
        let pages = pages.min(64) as usize;
        let (base, phys) = self.0.take(pages * 4096)?;
        // SAFETY: memory of that length, aligned to a page, handed out once and never freed; every
        // value is an entry.
        let pages = unsafe { std::slice::from_raw_parts(base.cast::<TablePage>().as_ptr(), pages) };
        // SAFETY: contiguous in a hugepage, at that address, and nobody else's.
        unsafe { TablePages::new(pages, PhysAddr::new(phys)) }.ok()
    }
    fn advice(&self) -> &'static str {
        "reserve more hugepages"
    }
}

/// Translates memory in hugepages.
pub(crate) struct Translator(pub(crate) Vec<Arc<Hugepages>>, pub(crate) Generations);

impl PhysTranslator for Translator {
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        self.1.advance();
        Ok(())
    }
    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        let found = self.0.iter().find_map(|pages| {
            let base = pages.base.as_ptr().addr();
            let offset = addr.checked_sub(base).filter(|offset| *offset < pages.len)?;
            let start = offset / pages.page * pages.page;
            let phys = PhysRange::new(PhysAddr::new(pages.phys_of(start)), pages.page as u64);
            Some(PhysExtent::new(base + start, phys.ok()?))
        });
        found.ok_or(BackendError::NotRegistered { addr, len })
    }
    fn generation(&self) -> Generation {
        self.1.current()
    }
}
