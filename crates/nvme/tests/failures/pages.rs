//! Memory of the program, by `mmap`: what a program has before it knows Pinfold.

use pinfold::OwnedMemory;
use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::error::Error;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::ptr::{NonNull, null_mut};

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// A range of mapped pages, unmapped on drop.
pub(crate) struct Pages {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory, reached only through the value that owns it.
unsafe impl Send for Pages {}

impl Pages {
    /// Maps `len` bytes of zeroes. No page is allocated before it is touched.
    pub(crate) fn new(len: usize) -> Result<Self, Box<dyn Error>> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { mmap_anonymous(null_mut(), len, READ_WRITE, flags) }?;
        Self::of(at.cast(), len)
    }

    /// Like [`new`](Self::new), on hugepages where the kernel has them.
    pub(crate) fn large(len: usize) -> Result<Self, Box<dyn Error>> {
        let pages = Self::new(len)?;
        // SAFETY: the range was mapped above. It is advice, and its failure changes nothing.
        let _ = unsafe { madvise(pages.base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Ok(pages)
    }

    /// Like [`new`](Self::new), at a multiple of `align` bytes (a power of two).
    pub(crate) fn aligned(len: usize, align: usize) -> Result<Self, Box<dyn Error>> {
        let all = ManuallyDrop::new(Self::new(len.checked_add(align).ok_or("too long")?)?);
        let before = all.addr().next_multiple_of(align) - all.addr();
        // SAFETY: `before` is at most `align`, so the start and the end of the part are inside.
        let base = unsafe { all.base.add(before) };
        let part = Self { base, len };
        // SAFETY: as above.
        let behind = unsafe { base.add(len) };
        // The parts before and behind it are dropped: mapped above, and used by nothing.
        [(all.base, before), (behind, align - before)]
            .into_iter()
            .filter(|(_, len)| *len > 0)
            .for_each(|(base, len)| drop(Self { base, len }));
        Ok(part)
    }

    /// Maps new pages of zeroes at an address that nothing uses, as an allocator does that keeps
    /// the addresses it has given back.
    pub(crate) fn at(addr: usize, len: usize) -> Result<Self, Box<dyn Error>> {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        let at = std::ptr::with_exposed_provenance_mut(addr);
        // SAFETY: a new mapping; the kernel refuses a range in which something is mapped.
        let mapped = unsafe { mmap_anonymous(at, len, READ_WRITE, flags) }?;
        Self::of(mapped.cast(), len)
    }

    /// Maps `len` bytes of a file, shared: at an address that nothing uses, or (0) anywhere.
    pub(crate) fn of_file(
        addr: usize,
        len: usize,
        file: impl AsFd,
        offset: u64,
    ) -> Result<Self, Box<dyn Error>> {
        let at = std::ptr::with_exposed_provenance_mut(addr);
        let fixed = if addr == 0 { MapFlags::empty() } else { MapFlags::FIXED_NOREPLACE };
        // SAFETY: a new mapping; the kernel refuses a range in which something is mapped.
        let at = unsafe { mmap(at, len, READ_WRITE, MapFlags::SHARED | fixed, file, offset) }?;
        Self::of(at.cast(), len)
    }

    fn of(at: *mut u8, len: usize) -> Result<Self, Box<dyn Error>> {
        let base = NonNull::new(at).ok_or("mapped at address 0")?;
        Ok(Self { base, len })
    }

    pub(crate) fn addr(&self) -> usize {
        self.base.as_ptr().expose_provenance()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the bytes. Requires that no device reaches them, which holds for memory that no
    /// [`OwnedMemory`] has.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the pages are mapped, readable, writable and initialized (zeroes of the kernel),
        // and this value's alone, which is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// Passes the pages by value, so that devices may reach them.
    pub(crate) fn owned(self) -> Result<OwnedMemory, Box<dyn Error>> {
        let memory = NonNull::slice_from_raw_parts(self.base, self.len);
        // SAFETY: the pages stay mapped, readable, writable and initialized until `self` is
        // dropped, and are reached only through the new value.
        Ok(unsafe { OwnedMemory::new(memory, self) }?)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: all of what this value mapped, which nothing else reaches.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Creates a file in memory of `len` bytes.
pub(crate) fn memory_file(len: u64) -> Result<std::os::fd::OwnedFd, Box<dyn Error>> {
    let file = rustix::fs::memfd_create("pinfold-failures", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, len)?;
    Ok(file)
}
