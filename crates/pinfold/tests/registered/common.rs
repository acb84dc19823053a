//! Memory of all kinds, and what the kernel reports about it.

use io_uring::IoUring;
use pinfold::OwnedMemory;
use pinfold::uring::{BufferIndex, RingBuffers};
use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) const PAGE: usize = 4096;
pub(crate) const HUGE: usize = 2 << 20;

pub(crate) fn skipped(why: &str) {
    eprintln!("SKIPPED: {why}");
}

/// One test at a time in this process, each after the kernel has unpinned what the previous one had
/// pinned: it closes rings in its own time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for _ in 0..6000 {
        if pinned_by_kernel() == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    guard
}

/// Hugepages in the machine's pool beside those that are there, released when dropped. One at a
/// time on the machine.
pub(crate) struct Hugepages {
    before: u64,
    pool: &'static str,
    lock: File,
}

const POOL_2M: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const POOL_1G: &str = "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages";

impl Hugepages {
    pub(crate) fn reserve(pages: u64) -> Option<Self> {
        Self::in_pool(POOL_2M, pages)
    }

    pub(crate) fn reserve_1g() -> Option<Self> {
        Self::in_pool(POOL_1G, 1)
    }

    fn in_pool(pool: &'static str, pages: u64) -> Option<Self> {
        let lock = File::open(pool).ok()?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).ok()?;
        let read = || std::fs::read_to_string(pool).ok()?.trim().parse::<u64>().ok();
        let before = read()?;
        std::fs::write(pool, (before + pages).to_string()).ok()?;
        let reserve = Self { before, pool, lock };
        (read()? >= before + pages).then_some(reserve)
    }
}

impl Drop for Hugepages {
    fn drop(&mut self) {
        let _ = std::fs::write(self.pool, self.before.to_string());
        let _ = rustix::fs::flock(&self.lock, rustix::fs::FlockOperation::Unlock);
    }
}

/// The kind of memory of a part of an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Plain pages that are there.
    Plain,
    /// Plain pages that were never touched.
    Untouched,
    /// Transparent hugepages.
    Transparent,
    /// 2 MiB pages of the pool: private, shared, or of a memfd.
    Hugetlb,
    HugetlbShared,
    HugetlbMemfd,
    /// Plain pages of a memfd: shared, and private.
    Memfd,
    PrivateFile,
    /// Private pages of a file on disk.
    Disk,
    /// That is not writable, and that is not accessible.
    ReadOnly,
    Denied,
    /// Nothing.
    Hole,
}

/// Addresses of our own, on a multiple of 1 GiB plus `lead`, with parts of all kinds one after the
/// other.
pub(crate) struct Area {
    base: usize,
    len: usize,
    pub(crate) addr: usize,
    pub(crate) bytes: usize,
}

impl Area {
    /// Maps an area whose parts begin `lead` bytes after a multiple of 2 MiB.
    pub(crate) fn new(lead: usize, parts: &[(Kind, usize)]) -> Option<Self> {
        let bytes: usize = parts.iter().map(|part| part.1).sum();
        let len = bytes + lead + 2 * HUGE;
        let base = map(0, len, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None)?;
        let addr = base.next_multiple_of(HUGE) + lead;
        let area = Self { base, len, addr, bytes };
        let mut at = addr;
        for &(kind, len) in parts {
            area.part(kind, at, len)?;
            at += len;
        }
        Some(area)
    }

    fn part(&self, kind: Kind, at: usize, len: usize) -> Option<()> {
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let anonymous = libc::MAP_ANONYMOUS | libc::MAP_PRIVATE;
        let huge = libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
        match kind {
            Kind::Hole => return unmap(at, len),
            Kind::Hugetlb => map(at, len, rw, anonymous | huge, None)?,
            Kind::HugetlbShared => {
                map(at, len, rw, libc::MAP_ANONYMOUS | libc::MAP_SHARED | huge, None)?
            }
            Kind::HugetlbMemfd => {
                map(at, len, rw, libc::MAP_SHARED, Some(memfd(len, libc::MFD_HUGETLB)?))?
            }
            Kind::Memfd => map(at, len, rw, libc::MAP_SHARED, Some(memfd(len, 0)?))?,
            Kind::PrivateFile => map(at, len, rw, libc::MAP_PRIVATE, Some(memfd(len, 0)?))?,
            Kind::Disk => map(at, len, rw, libc::MAP_PRIVATE, Some(disk(len)?))?,
            Kind::ReadOnly => map(at, len, libc::PROT_READ, anonymous, None)?,
            Kind::Denied => map(at, len, libc::PROT_NONE, anonymous, None)?,
            Kind::Plain | Kind::Untouched | Kind::Transparent => map(at, len, rw, anonymous, None)?,
        };
        let advice =
            if kind == Kind::Transparent { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        if matches!(kind, Kind::Plain | Kind::Untouched | Kind::Transparent) {
            advise(at, len, advice);
        }
        if !matches!(kind, Kind::Untouched | Kind::ReadOnly | Kind::Denied) {
            (at..at + len).step_by(PAGE).for_each(|page| poke(page, 1));
        }
        Some(())
    }

    /// Returns the pages that have these bytes, as memory of the program.
    pub(crate) fn owned(&self, from: usize, len: usize) -> OwnedMemory {
        let start = (self.addr + from) & !(PAGE - 1);
        let end = (self.addr + from + len).next_multiple_of(PAGE);
        let pages = std::ptr::NonNull::new(ptr::<u8>(start)).unwrap();
        let pages = std::ptr::NonNull::slice_from_raw_parts(pages, end - start);
        // SAFETY: the area is the test's, which outlives what it registers, and is reached by system
        // calls and volatile accesses only.
        unsafe { OwnedMemory::joint(pages, ()) }.unwrap()
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        unmap(self.base, self.len);
    }
}

/// # Safety of what follows
/// The addresses are those of an `Area` private to the test; it is reached by these functions and
/// by the kernel only.
fn ptr<T>(addr: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(addr)
}

pub(crate) fn map(
    addr: usize,
    len: usize,
    prot: i32,
    flags: i32,
    fd: Option<OwnedFd>,
) -> Option<usize> {
    use std::os::fd::AsRawFd;
    let fixed = if addr == 0 { 0 } else { libc::MAP_FIXED };
    let raw = fd.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    // SAFETY: either the kernel chooses, or the addresses are within an area of the test's.
    let at = unsafe { libc::mmap(ptr(addr), len, prot, flags | fixed, raw, 0) };
    (at != libc::MAP_FAILED).then(|| at.expose_provenance())
}

pub(crate) fn unmap(addr: usize, len: usize) -> Option<()> {
    // SAFETY: the addresses are within an area of the test's.
    (unsafe { libc::munmap(ptr(addr), len) } == 0).then_some(())
}

pub(crate) fn advise(addr: usize, len: usize, advice: i32) {
    // SAFETY: the addresses are within an area of the test's, which knows what it asks for.
    assert_eq!(unsafe { libc::madvise(ptr(addr), len, advice) }, 0);
}

fn disk(len: usize) -> Option<OwnedFd> {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).ok()?;
    file.set_len(len as u64).ok()?;
    Some(file.into())
}

pub(crate) fn memfd(len: usize, flags: u32) -> Option<OwnedFd> {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | flags) };
    if fd < 0 {
        return None;
    }
    // SAFETY: a new descriptor, which has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::fs::ftruncate(&fd, len as u64).ok()?;
    Some(fd)
}

pub(crate) fn poke(addr: usize, byte: u8) {
    // SAFETY: the address is within an area of the test's, and mapped writable there.
    unsafe { ptr::<u8>(addr).write_volatile(byte) };
}

pub(crate) fn peek(addr: usize) -> u8 {
    // SAFETY: the address is within an area of the test's, and mapped readable there.
    unsafe { ptr::<u8>(addr).read_volatile() }
}

/// Returns the bytes that this process has pinned, by the kernel's count.
pub(crate) fn pinned_by_kernel() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024
}

/// Returns a ring, unless the machine has no io_uring.
pub(crate) fn ring() -> Option<IoUring> {
    IoUring::new(8).inspect_err(|error| skipped(&format!("no io_uring: {error}"))).ok()
}

/// Returns all places of a table that has this memory, by the addresses in it.
pub(crate) fn places(table: &RingBuffers<'_>, addr: usize, len: usize) -> Vec<BufferIndex> {
    let at = |addr| {
        let byte = std::ptr::NonNull::new(ptr::<u8>(addr)).unwrap();
        // SAFETY: a byte of the area, which is not accessed.
        table.index_of(unsafe { pinfold::DmaMemory::from_raw(byte, 1) })
    };
    (addr..addr + len).step_by(PAGE).filter_map(at).collect()
}

/// Lowers the soft limit of locked memory until it is dropped.
pub(crate) struct Memlock(rustix::process::Rlimit);

impl Memlock {
    pub(crate) fn of(bytes: u64) -> Self {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let before = getrlimit(Resource::Memlock);
        setrlimit(Resource::Memlock, Rlimit { current: Some(bytes), ..before }).unwrap();
        Self(before)
    }
}

impl Drop for Memlock {
    fn drop(&mut self) {
        rustix::process::setrlimit(rustix::process::Resource::Memlock, self.0).unwrap();
    }
}

/// Runs in a thread without these capabilities.
pub(crate) fn without<R: Send>(
    gone: rustix::thread::CapabilitySet,
    body: impl FnOnce() -> R + Send,
) -> R {
    use rustix::thread::{capabilities, set_capabilities};
    let run = || {
        let mut sets = capabilities(None).unwrap();
        sets.effective -= gone;
        set_capabilities(None, sets).unwrap();
        body()
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}
