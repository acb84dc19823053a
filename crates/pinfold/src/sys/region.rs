//! A range of this process's address space that one owner holds and unmaps, memory files for it,
//! and the NUMA node that it is bound to.

use super::errno::Errno;
use super::pages;
use pinfold_core::addr::PageSize;
use pinfold_core::mem::DmaMemory;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, MlockFlags, MprotectFlags, ProtFlags};
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};

/// Memory that is mapped until the value is dropped, readable and writable.
#[derive(Debug)]
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
    origin: Origin,
}

/// The fate of the memory when the value is dropped.
#[derive(Debug)]
enum Origin {
    /// It is unmapped.
    Mapped(Outer),
    /// It stays, without what this value has set on it.
    Lent(Lent),
}

/// The attributes of memory that another owner mapped.
#[derive(Debug)]
struct Lent {
    /// The ranges that differ in what was set before.
    parts: Vec<Part>,
    /// Attributes set by this value since, on the parts that did not have them.
    kept: AtomicBool,
    locked: AtomicBool,
    bound: AtomicBool,
}

/// A part of lent memory, as its owner set it.
#[derive(Debug)]
struct Part {
    base: NonNull<u8>,
    len: usize,
    /// Not copied on fork.
    kept: bool,
    locked: bool,
    policy: Policy,
}

impl Part {
    fn of(region: &Region, start: usize, end: usize) -> Self {
        let (first, at) = (region.addr(), start.max(region.addr()));
        // SAFETY: `at` is inside the region, as `end` is, which is behind it.
        let base = unsafe { region.base.add(at - first) };
        let len = end.min(first + region.len) - at;
        Self { base, len, kept: false, locked: false, policy: Policy::of(at) }
    }
}

/// The range that is unmapped on drop: the memory and its guards.
#[derive(Clone, Copy, Debug)]
struct Outer {
    base: NonNull<c_void>,
    len: usize,
}

// SAFETY: a `Region` is a range of the address space, which all threads share; it is reached only
// through raw pointers, whose users answer for their accesses.
unsafe impl Send for Region {}
// SAFETY: as for `Send`; its methods are system calls, which the kernel serializes.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes of private memory at a multiple of `align`; zeroed pages are allocated when
    /// they are first touched.
    ///
    /// Not charged against the system's commit limit (`MAP_NORESERVE`), unless
    /// `vm.overcommit_memory` is 2: an arena may be larger than memory and be used in parts.
    ///
    /// `mmap`, `mprotect`: since the first Linux.
    pub(crate) fn anonymous(len: usize, align: usize) -> Result<Self, Errno> {
        Self::anonymous_of_pages(len, align, rustix::param::page_size())
    }

    /// Like [`anonymous`](Self::anonymous), where the system has pages of `page` bytes, or smaller
    /// ones.
    fn anonymous_of_pages(len: usize, align: usize, page: usize) -> Result<Self, Errno> {
        let too_much = Errno::from(rustix::io::Errno::NOMEM);
        let align = align.max(page);
        let whole = len.checked_next_multiple_of(page).ok_or(too_much)?;
        // A page before and one behind stay without rights. They catch accesses past the end, and
        // keep the kernel from merging the range with a neighbour, so that its entry in
        // `/proc/self/smaps` describes it alone.
        let outer_len =
            whole.checked_add(align).and_then(|n| n.checked_add(2 * page)).ok_or(too_much)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without MAP_FIXED and with no hint the kernel chooses an unused range.
        let base = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), outer_len, ProtFlags::empty(), flags)
        }?;
        let outer = Outer { base: NonNull::new(base).ok_or(too_much)?, len: outer_len };
        let lead = (base.addr() + page).next_multiple_of(align) - base.addr();
        // SAFETY: `lead <= page + align`, so it lies inside the `outer_len` bytes just mapped.
        let inner = unsafe { base.cast::<u8>().add(lead) };
        let region =
            Self { base: NonNull::new(inner).ok_or(too_much)?, len, origin: Origin::Mapped(outer) };
        // SAFETY: `inner..inner + whole` lies in the range that was just mapped for this value alone:
        // `lead + whole + page <= outer_len`. No pointer into it exists yet.
        unsafe {
            rustix::mm::mprotect(inner.cast(), whole, MprotectFlags::READ | MprotectFlags::WRITE)
        }?;
        Ok(region)
    }

    /// Maps `len` bytes (a multiple of `page`) of the hugetlb pool: reserved now, zeroed when
    /// touched.
    ///
    /// `MAP_HUGETLB` since Linux 2.6.32, the choice of a page size since 3.8.
    pub(crate) fn hugetlb(len: usize, page: PageSize) -> Result<Self, Errno> {
        let size = match page {
            PageSize::Size4K => return Err(rustix::io::Errno::INVAL.into()),
            PageSize::Size2M => MapFlags::HUGE_2MB,
            PageSize::Size1G => MapFlags::HUGE_1GB,
        };
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | size;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED and with no hint the kernel chooses an unused range.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, prot, flags) }?;
        Self::whole(base, len)
    }

    /// Maps `len` bytes of the file behind `fd`, shared with every other mapping of it.
    ///
    /// `mmap`: since the first Linux.
    pub(crate) fn shared(fd: BorrowedFd<'_>, len: usize) -> Result<Self, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED and with no hint the kernel chooses an unused range. That the
        // file keeps its length, so that the pages stay there, is sealed by `region::memory_file`.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
        Self::whole(base, len)
    }

    fn whole(base: *mut c_void, len: usize) -> Result<Self, Errno> {
        let base = NonNull::new(base).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { base: base.cast(), len, origin: Origin::Mapped(Outer { base, len }) })
    }

    /// Wraps memory that another owner mapped, and unmaps after this value is dropped. What this
    /// value sets on it is undone then, except where its owner had set it before: as
    /// `/proc/self/smaps` says, or nowhere if that cannot be read.
    ///
    /// O(mappings of the process).
    ///
    /// # Safety
    /// `base..base + len` stays mapped, readable and writable until the value is dropped; both are
    /// multiples of 4096, and `len` is not 0.
    pub(crate) unsafe fn lent(base: NonNull<u8>, len: usize) -> Self {
        let lent = Lent {
            parts: Vec::new(),
            kept: AtomicBool::new(false),
            locked: AtomicBool::new(false),
            bound: AtomicBool::new(false),
        };
        let region = Self { base, len, origin: Origin::Lent(lent) };
        let (mut at, end) = (region.addr(), region.addr() + len);
        let mut parts = Vec::new();
        for vma in pages::vmas().iter().filter(|vma| vma.start < end && vma.end > region.addr()) {
            if vma.start > at {
                parts.push(Part::of(&region, at, vma.start));
            }
            let (kept, locked) = (vma.has_flag("dc"), vma.has_flag("lo"));
            parts.push(Part { kept, locked, ..Part::of(&region, vma.start, vma.end) });
            at = vma.end;
        }
        if at < end {
            parts.push(Part::of(&region, at, end));
        }
        region.with_parts(parts)
    }

    fn with_parts(mut self, found: Vec<Part>) -> Self {
        if let Origin::Lent(Lent { parts, .. }) = &mut self.origin {
            *parts = found;
        }
        self
    }

    /// Calls `set` for the memory, or for the parts of lent memory that do not have it already; the
    /// flag says that they may have it afterwards.
    fn set(
        &self,
        flag: impl Fn(&Lent) -> &AtomicBool,
        had: impl Fn(&Part) -> bool,
        value: bool,
        mut set: impl FnMut(NonNull<u8>, usize) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let Origin::Lent(lent) = &self.origin else { return set(self.base, self.len) };
        if value {
            // Before the first call: if a later one fails, the drop undoes all.
            flag(lent).store(true, Ordering::Relaxed);
        }
        for part in lent.parts.iter().filter(|part| !had(part)) {
            set(part.base, part.len)?;
        }
        flag(lent).store(value, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the memory, for access beside devices.
    pub(crate) fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: the range is mapped, readable and writable while `self` lives (every
        // constructor's result or contract) and is one mapping of less than isize::MAX bytes, since
        // the kernel makes no larger ones. That no copy outlives it and that no reference is alive
        // meanwhile is the arena's promise: it drops its region last, and lends references only
        // into runs that no device can reach.
        unsafe { DmaMemory::from_raw(self.base, self.len) }
    }

    /// Excludes the memory from children: `fork` would share the pages, and the first write on
    /// either side would move the parent to another page than the one that the device uses.
    /// `MADV_DONTFORK`: since Linux 2.6.16.
    pub(crate) fn keep_from_children(&self) -> Result<(), Errno> {
        self.fork_advice(true, Advice::LinuxDontFork)
    }

    /// Includes the memory in children again, as far as it was before. `MADV_DOFORK`: since Linux
    /// 2.6.16.
    pub(crate) fn give_to_children(&self) -> Result<(), Errno> {
        self.fork_advice(false, Advice::LinuxDoFork)
    }

    fn fork_advice(&self, keep: bool, advice: Advice) -> Result<(), Errno> {
        self.set(
            |lent| &lent.kept,
            |part| part.kept,
            keep,
            // SAFETY: a part of the range, which is mapped while `self` lives; the advice does not
            // change what it holds.
            |at, len| Ok(unsafe { rustix::mm::madvise(at.as_ptr().cast(), len, advice) }?),
        )
    }

    /// Requests transparent hugepages. `MADV_HUGEPAGE`: since Linux 2.6.38.
    pub(crate) fn ask_for_hugepages(&self) -> Result<(), Errno> {
        self.advise(Advice::LinuxHugepage)
    }

    /// Requests plain pages. `MADV_NOHUGEPAGE`: since Linux 2.6.38.
    pub(crate) fn ask_for_plain_pages(&self) -> Result<(), Errno> {
        self.advise(Advice::LinuxNoHugepage)
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is mapped while `self` lives, and none of the advice used here changes
        // what it holds.
        Ok(unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, advice) }?)
    }

    /// Faults in the first `len` bytes for writing; a missing page is an error and not a signal.
    /// `MADV_POPULATE_WRITE`: since Linux 5.14.
    pub(crate) fn populate(&self, len: usize) -> Result<(), Errno> {
        let len = len.min(self.len);
        // SAFETY: the range is mapped while `self` lives; populating does not change what it holds.
        Ok(unsafe {
            rustix::mm::madvise(self.base.as_ptr().cast(), len, Advice::LinuxPopulateWrite)
        }?)
    }

    /// Locks each page in memory when it is first touched. `mlock2` with `MLOCK_ONFAULT`: since
    /// Linux 4.4.
    pub(crate) fn lock(&self) -> Result<(), Errno> {
        let lock = |at: NonNull<u8>, len| {
            // SAFETY: a part of the range, which is mapped while `self` lives; locking does not
            // change what it holds.
            Ok(unsafe { rustix::mm::mlock_with(at.as_ptr().cast(), len, MlockFlags::ONFAULT) }?)
        };
        self.set(|lent| &lent.locked, |part| part.locked, true, lock).inspect_err(|_| {
            // The parts before the one that was refused. Of one mapping nothing was locked.
            let _ = self.unlock();
        })
    }

    /// Undoes [`lock`](Self::lock). `munlock`: since the first Linux.
    pub(crate) fn unlock(&self) -> Result<(), Errno> {
        let unlock = |at: NonNull<u8>, len| {
            // SAFETY: a part of the range, which is mapped while `self` lives; unlocking does not
            // change what it holds.
            Ok(unsafe { rustix::mm::munlock(at.as_ptr().cast(), len) }?)
        };
        self.set(|lent| &lent.locked, |part| part.locked, false, unlock)
    }

    /// Returns its address in this process.
    pub(crate) fn addr(&self) -> usize {
        self.base.as_ptr().addr()
    }

    /// Returns its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns a pointer to its first byte.
    #[cfg(test)]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Undoes changes to lent memory, as far as possible; each only once, and nothing on other
    /// memory.
    pub(crate) fn restore(&self) {
        let Origin::Lent(lent) = &self.origin else { return };
        let undone = [
            if lent.locked.swap(false, Ordering::Relaxed) { self.unlock() } else { Ok(()) },
            if lent.bound.swap(false, Ordering::Relaxed) { unbind(self) } else { Ok(()) },
            if lent.kept.swap(false, Ordering::Relaxed) { self.give_to_children() } else { Ok(()) },
        ];
        for errno in undone.into_iter().filter_map(Result::err) {
            tracing::warn!(%errno, "the caller's memory was not completely restored");
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let outer = match &self.origin {
            Origin::Mapped(outer) => outer,
            Origin::Lent(_) => return self.restore(),
        };
        // SAFETY: the range was mapped by this value's constructor for it alone, and is unmapped
        // only here. The arena drops its region when nothing reaches into it any more.
        let done = unsafe { rustix::mm::munmap(outer.base.as_ptr(), outer.len) };
        if let Err(errno) = done {
            tracing::error!(base = ?outer.base, len = outer.len, %errno, "memory could not be unmapped and is leaked");
        }
    }
}

// Memory with a file descriptor, for sharing with another process.

/// Creates a memory file of `len` bytes (a multiple of `page`), sealed against changes of its
/// length: if the other process could shorten it, the next access here would be a `SIGBUS`.
///
/// `memfd_create` since Linux 3.17, hugepages in it since 4.14, sealing those since 4.16.
pub(crate) fn memory_file(len: u64, page: PageSize) -> Result<OwnedFd, Errno> {
    let size = match page {
        PageSize::Size4K => MemfdFlags::empty(),
        PageSize::Size2M => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        PageSize::Size1G => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
    };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | size;
    let fd = rustix::fs::memfd_create("pinfold", flags)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

// Binding memory to a NUMA node.

/// Words of the node mask, for the most nodes of Linux (`MAX_NUMNODES`, 1024).
const WORDS: usize = 1024 / libc::c_ulong::BITS as usize;

/// The number of node numbers.
pub(crate) const MAX_NODES: u32 = 1024;

/// `linux/mempolicy.h`: pages on other nodes are an error. Missing in libc.
const MPOL_MF_STRICT: libc::c_int = 1;

/// Binds the region's pages to `node`: a page fault fails rather than use another node's memory,
/// and pages that are already elsewhere are an error (`EIO`).
///
/// `mbind` with `MPOL_BIND` and `MPOL_MF_STRICT`: since Linux 2.6.7.
pub(crate) fn bind_to_node(region: &Region, node: u32) -> Result<(), Errno> {
    let mut mask: Mask = [0; WORDS];
    let word = usize::try_from(node / libc::c_ulong::BITS).unwrap_or(usize::MAX);
    let Some(bits) = mask.get_mut(word) else { return Err(Errno::new(libc::EINVAL)) };
    *bits = 1 << (node % libc::c_ulong::BITS);
    let policy = Policy { mode: libc::MPOL_BIND, mask };
    region.set(|lent| &lent.bound, |_| false, true, |at, len| policy.apply(at, len, MPOL_MF_STRICT))
}

/// Undoes [`bind_to_node`] on lent memory: each part has the policy again that it had.
fn unbind(region: &Region) -> Result<(), Errno> {
    let Origin::Lent(lent) = &region.origin else { return Ok(()) };
    lent.parts.iter().try_for_each(|part| part.policy.apply(part.base, part.len, 0))
}

/// A set of NUMA nodes.
type Mask = [libc::c_ulong; WORDS];

/// The NUMA nodes that pages are allocated from.
#[derive(Clone, Copy, Debug)]
struct Policy {
    mode: libc::c_int,
    mask: Mask,
}

/// `linux/mempolicy.h`: the policy of the memory at an address. Missing in libc.
const MPOL_F_ADDR: libc::c_int = 2;

impl Policy {
    /// Returns the policy of the mapping at `addr`: the process's own where it has none, or the
    /// kernel does not say. `get_mempolicy`: since Linux 2.6.7.
    fn of(addr: usize) -> Self {
        let mut policy = Self { mode: libc::MPOL_DEFAULT, mask: [0; WORDS] };
        // SAFETY: the kernel writes to the mode and to the `MAX_NODES` bits of the mask, both of
        // which outlive the call, and only looks up the address.
        let done = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut policy.mode,
                policy.mask.as_mut_ptr(),
                libc::c_ulong::from(MAX_NODES),
                addr,
                MPOL_F_ADDR,
            )
        };
        if done == 0 { policy } else { Self { mode: libc::MPOL_DEFAULT, mask: [0; WORDS] } }
    }

    /// Sets the policy of memory that is mapped.
    fn apply(&self, at: NonNull<u8>, len: usize, flags: libc::c_int) -> Result<(), Errno> {
        // SAFETY: `mask` has the `MAX_NODES` bits that the call is given (it reads one less than it
        // is given, hence the `+ 1`, and never past the array); a policy changes no content, and
        // what is not mapped is refused.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                at.as_ptr(),
                len,
                self.mode,
                self.mask.as_ptr(),
                libc::c_ulong::from(MAX_NODES) + 1,
                flags,
            )
        };
        if done == 0 { Ok(()) } else { Err(super::errno::last_errno()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::pages;

    #[test]
    fn anonymous_memory_is_aligned_zero_and_between_guards() {
        let own = rustix::param::page_size();
        // Also as on a system with pages of 64 KiB.
        let cases = [(4096, 4096), (5 << 12, 2 << 20), (4 << 20, 2 << 20)];
        for ((len, align), page) in
            cases.into_iter().flat_map(|case| [(case, own), (case, 64 << 10)])
        {
            let region = Region::anonymous_of_pages(len, align, page).unwrap();
            assert_eq!((region.addr() % align, region.addr() % page, region.len()), (0, 0, len));
            let whole = len.next_multiple_of(page);
            let memory = region.memory();
            assert_eq!(memory.read_u8(0).unwrap(), 0);
            memory.write_u8(len - 1, 7).unwrap();
            assert_eq!(memory.read_u8(len - 1).unwrap(), 7);
            let vma = pages::vma_of(region.addr(), whole).unwrap();
            assert_eq!(
                (vma.start, vma.end),
                (region.addr(), region.addr() + whole),
                "not merged with a neighbour"
            );
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let ends_here = format!("-{:x} ---p", region.addr());
            assert!(maps.contains(&ends_here), "a guard below");
        }
    }

    #[test]
    fn an_owned_region_is_unmapped_on_drop_and_a_lent_one_is_not() {
        let unmapped = || {
            let region = Region::anonymous(8192, 4096).unwrap();
            let addr = region.addr();
            // SAFETY: `region` outlives `lent`.
            let lent = unsafe { Region::lent(region.base(), 8192) };
            drop(lent);
            assert!(pages::vma_of(addr, 8192).is_some());
            drop(region);
            pages::vma_of(addr, 8192).is_none()
        };
        // Another test may map something there meanwhile, but not every time.
        assert!((0..50).any(|_| unmapped()));
    }

    #[test]
    fn a_region_beyond_the_address_space_is_an_error() {
        assert_eq!(Region::anonymous(1 << 60, 4096).unwrap_err().raw(), libc::ENOMEM);
        assert_eq!(Region::anonymous(usize::MAX - 4095, 4096).unwrap_err().raw(), libc::ENOMEM);
    }

    #[test]
    fn children_get_no_copy_until_it_is_allowed() {
        let region = Region::anonymous(4096, 4096).unwrap();
        let flagged = || pages::vma_of(region.addr(), 4096).unwrap().has_flag("dc");
        assert!(!flagged());
        region.keep_from_children().unwrap();
        assert!(flagged());
        region.give_to_children().unwrap();
        assert!(!flagged());
    }

    #[test]
    fn lent_memory_keeps_what_its_owner_had_set() {
        let own = Region::anonymous(8 << 12, 4096).unwrap();
        let page = |at: usize| NonNull::new(own.base().as_ptr().wrapping_add(at << 12)).unwrap();
        // SAFETY: parts of `own`, which outlives them.
        let part = |at, count: usize| unsafe { Region::lent(page(at), count << 12) };
        let flags = |flag: &str| {
            let all = pages::vmas();
            let has = |at: usize| {
                let vma = all.iter().find(|vma| vma.start <= at && at < vma.end);
                vma.is_some_and(|vma| vma.has_flag(flag))
            };
            (0..8).map(|at| u32::from(has(own.addr() + (at << 12))) << at).sum::<u32>()
        };
        let (kept, locked) = (part(2, 2), part(3, 3));
        kept.keep_from_children().unwrap();
        if locked.lock().is_err() {
            return eprintln!("SKIPPED: mlock is refused");
        }
        assert_eq!((flags("dc"), flags("lo")), (0b1100, 0b11_1000));
        for (first, count) in [(0, 8), (2, 2), (3, 1), (0, 4)] {
            let lent = part(first, count);
            let all = ((1 << count) - 1) << first;
            lent.keep_from_children().unwrap();
            lent.lock().unwrap();
            assert_eq!((flags("dc"), flags("lo")), (0b1100 | all, 0b11_1000 | all));
            // As a domain that pins does, and back.
            lent.unlock().unwrap();
            assert_eq!(flags("lo"), 0b11_1000);
            lent.lock().unwrap();
            drop(lent);
            assert_eq!((flags("dc"), flags("lo")), (0b1100, 0b11_1000), "{first} {count}");
        }
        drop((kept, locked));
        assert_eq!((flags("dc"), flags("lo")), (0, 0));
    }
}

#[cfg(test)]
mod memfd_tests {
    use super::*;
    use crate::sys::region::Region;
    use std::os::fd::AsFd;

    #[test]
    fn a_memory_file_has_a_sealed_length_and_shared_pages() {
        let fd = memory_file(8192, PageSize::Size4K).unwrap();
        assert!(rustix::fs::ftruncate(&fd, 4096).is_err());
        let (one, two) =
            (Region::shared(fd.as_fd(), 8192).unwrap(), Region::shared(fd.as_fd(), 8192).unwrap());
        one.memory().write_u64(4096, 0x1234).unwrap();
        assert_eq!(two.memory().read_u64(4096).unwrap(), 0x1234);
    }
}

#[cfg(test)]
mod numa_tests {
    use super::*;

    #[test]
    fn a_missing_node_is_refused() {
        let region = Region::anonymous(4096, 4096).unwrap();
        assert!(bind_to_node(&region, 1000).is_err());
        assert!(bind_to_node(&region, u32::MAX).is_err());
    }
}
