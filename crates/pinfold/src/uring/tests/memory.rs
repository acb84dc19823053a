//! Memory and files for the tests.

use pinfold_core::addr::Iova;
use pinfold_core::domain::{DomainId, Pinned};
use pinfold_core::mem::DmaMemory;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::fs::{File, OpenOptions};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
/// Pages of memory with one owner.
#[derive(Debug)]
pub(super) struct Pages(pub(super) DmaMemory<'static>);

impl Pages {
    pub(super) fn new(len: usize) -> Self {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, prot, flags) }.unwrap();
        let base = NonNull::new(at.cast::<u8>()).unwrap();
        // SAFETY: mapped just now, until the value is dropped; no reference into it is ever made.
        Self(unsafe { DmaMemory::from_raw(base, len) })
    }

    pub(super) fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.copy_to_slice(0, &mut bytes).unwrap();
        bytes
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the whole of what `new` mapped, which nothing reaches any more: the value had it
        // alone.
        unsafe { munmap(self.0.as_ptr().as_ptr().cast(), self.0.len()) }.unwrap();
    }
}

// SAFETY: an anonymous mapping stays where it is until `drop`; `Pages` gives out no reference into
// it.
unsafe impl Pinned for Pages {
    fn memory(&self) -> DmaMemory<'_> {
        self.0
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

/// A piece of pages that stay mapped until exit: what is registered once and used many times.
#[derive(Debug)]
pub(super) struct Piece(pub(super) DmaMemory<'static>);

// SAFETY: the pages are leaked, and the tests give each piece to one transfer at a time.
unsafe impl Pinned for Piece {
    fn memory(&self) -> DmaMemory<'_> {
        self.0
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

pub(super) fn arena(len: usize) -> DmaMemory<'static> {
    let pages = Pages::new(len);
    let memory = pages.0;
    std::mem::forget(pages);
    memory
}

/// Bytes that tell where they belong.
pub(super) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

pub(super) fn create() -> OpenOptions {
    let mut how = OpenOptions::new();
    how.read(true).write(true).create(true);
    how
}

/// Pages that count how many of them have been freed.
#[derive(Debug)]
pub(super) struct Counted(pub(super) Pages, pub(super) Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: as for the pages inside.
unsafe impl Pinned for Counted {
    fn memory(&self) -> DmaMemory<'_> {
        self.0.memory()
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

/// A file whose reads wait until something is written to it.
pub(super) fn waiting() -> File {
    // SAFETY: a system call without pointers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    // SAFETY: a new descriptor, which has no other owner.
    File::from(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `CAP_IPC_LOCK` is the calling thread's, and without it the kernel counts what is pinned.
pub(super) fn without_ipc_lock<R: Send>(body: impl FnOnce() -> R + Send) -> R {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let run = || {
        let mut sets = capabilities(None).unwrap();
        sets.effective -= CapabilitySet::IPC_LOCK;
        set_capabilities(None, sets).unwrap();
        body()
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}
