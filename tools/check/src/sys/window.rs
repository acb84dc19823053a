//! The registers of a device, in memory that the program maps.

use pinfold_nvme_model::RegisterWindow;
use rustix::fs::{FlockOperation, MemfdFlags, Mode, OFlags, SealFlags, flock};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Memory of a file that other processes map and write at any time.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    base: NonNull<AtomicU32>,
    bytes: usize,
    /// The part that has registers and doorbells.
    registers: u32,
    file: OwnedFd,
    /// Held while the memory is locked for a moment, to see whether it is open: others would take
    /// that for a program's lock, and a program's could be refused.
    probing: Mutex<()>,
}

// SAFETY: the range is accessed by atomic operations only, and stays mapped while the value lives.
unsafe impl Send for SharedMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates zeroed memory of `bytes` bytes, whose first `registers` bytes are a controller's.
    pub(crate) fn new(name: &str, bytes: u32, registers: u32) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&file, bytes.into())?;
        // A program that shortens the file would end this process with a SIGBUS.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED and with no hint the kernel chooses an unused range.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, prot, MapFlags::SHARED, &file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, bytes, registers, file, probing: Mutex::new(()) })
    }

    /// Opens the memory once more, as `flags` say: a file description of its own.
    pub(crate) fn open(&self, flags: OFlags) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Returns whether a program has a locked file description of the memory, or a map of one.
    pub(crate) fn is_open(&self) -> bool {
        let Ok(probe) = self.open(OFlags::RDWR) else { return true };
        let _one = self.probing.lock().unwrap_or_else(PoisonError::into_inner);
        let is_open = flock(&probe, FlockOperation::NonBlockingLockExclusive).is_err();
        // The lock ends with the probe.
        drop(probe);
        is_open
    }

    /// Opens the memory for a program: [open](Self::is_open) as long as any copy of the descriptor,
    /// or a map, exists.
    pub(crate) fn open_for_program(&self, flags: OFlags) -> io::Result<OwnedFd> {
        let fd = self.open(flags)?;
        let _one = self.probing.lock().unwrap_or_else(PoisonError::into_inner);
        flock(&fd, FlockOperation::NonBlockingLockShared)?;
        Ok(fd)
    }

    fn word(&self, at: u32) -> Option<&AtomicU32> {
        let at = usize::try_from(at).ok()?;
        let inside = at.is_multiple_of(4) && at.checked_add(4)? <= self.bytes;
        if !inside {
            return None;
        }
        // SAFETY: inside the range, which is one allocation.
        let word = unsafe { self.base.byte_add(at) };
        // SAFETY: a multiple of 4 from the start of a page; the file is sealed, so the memory
        // exists, and stays mapped while `self` is borrowed. All accesses of this process are
        // atomic; those of others are not part of this program.
        Some(unsafe { word.as_ref() })
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl RegisterWindow for SharedMemory {
    fn load(&self, at: u32) -> u32 {
        u32::from_le(self.word(at).map_or(0, |word| word.load(Ordering::Acquire)))
    }

    fn store(&self, at: u32, value: u32) {
        if let Some(word) = self.word(at) {
            word.store(value.to_le(), Ordering::Release);
        }
    }

    fn swap(&self, at: u32, value: u32) -> u32 {
        u32::from_le(self.word(at).map_or(0, |word| word.swap(value.to_le(), Ordering::SeqCst)))
    }

    fn len(&self) -> u32 {
        self.registers
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the range was mapped for this value alone, and readers borrow the value.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_outside_have_no_effect() {
        let memory = SharedMemory::new("test", 8192, 4096).unwrap();
        assert_eq!(memory.swap(8188, 7), 0);
        assert_eq!(memory.load(8188), 7);
        for at in [8190, 8192, u32::MAX - 3] {
            memory.store(at, 9);
            assert_eq!(memory.load(at), 0);
        }
        assert!(memory.len() == 4096 && !memory.is_empty());
    }

    #[test]
    fn a_program_cannot_shorten_the_registers() {
        let memory = SharedMemory::new("test", 8192, 4096).unwrap();
        let opened = memory.open(OFlags::RDWR).unwrap();
        assert_eq!(rustix::fs::ftruncate(&opened, 0), Err(rustix::io::Errno::PERM));
    }
}
