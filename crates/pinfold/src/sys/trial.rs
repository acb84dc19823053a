//! Tests memory of the program before it is used: a fault that would raise a signal later is an
//! error here, with its address.

use super::errno::{Errno, last_errno};
use super::pages;
use std::sync::atomic::AtomicU32;

/// No larger than a page of any system.
const PAGE: usize = 4096;

/// Memory that cannot be read and written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "cannot use {len:#x} bytes at {addr:#x}: the page at {failed:#x} cannot be read and written ({errno}): map it so \
     before, with a file as long as the mapping, and pass nothing that is not memory"
)]
pub struct Inaccessible {
    /// The address of the memory.
    pub addr: usize,
    /// Its length in bytes.
    pub len: usize,
    /// The address of the first page that failed.
    pub failed: usize,
    /// The kernel's error: `ENOMEM` for what is not mapped, `EINVAL` without the rights or for what
    /// is no memory, `EFAULT` where an access would raise a signal.
    pub errno: Errno,
}

/// Checks that the pages of the `len` bytes at `addr` are mapped. Changes nothing.
///
/// # Errors
/// [`Inaccessible`].
pub(crate) fn check_mapped(addr: usize, len: usize) -> Result<(), Inaccessible> {
    // `MS_ASYNC` writes nothing since Linux 2.6.19, and checks that all of the range is mapped.
    each_page(addr, len, |at, bytes| {
        let at = std::ptr::with_exposed_provenance_mut(at);
        // SAFETY: the call reads and writes no memory, and refuses what is not mapped.
        if unsafe { libc::msync(at, bytes, libc::MS_ASYNC) } == 0 {
            Ok(())
        } else {
            Err(last_errno())
        }
    })
}

/// Faults in the pages of the `len` bytes at `addr` for writing, which shows that they are memory
/// that can be read and written, and keeps their contents.
///
/// `MADV_POPULATE_WRITE` since Linux 5.14; before, each page is written to by an atomic addition of
/// 0 in the kernel.
///
/// # Errors
/// [`Inaccessible`].
pub(crate) fn populate(addr: usize, len: usize) -> Result<(), Inaccessible> {
    let Err(refused) = each_page(addr, len, advise) else { return Ok(()) };
    // An unknown advice, which is refused for memory of any kind, or one that a filter refuses; or
    // the system's pages are larger than the one here.
    let mut own = OwnPage([0; PAGE]);
    if advise((&raw mut own.0).addr(), PAGE).is_ok() {
        return Err(refused);
    }
    touch_pages(addr, len)
}

/// A page of this process that can be written.
#[repr(C, align(4096))]
struct OwnPage([u8; PAGE]);

fn advise(at: usize, bytes: usize) -> Result<(), Errno> {
    let at = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: the call changes no contents, and refuses what is not mapped.
    let done = unsafe { libc::madvise(at, bytes, libc::MADV_POPULATE_WRITE) };
    if done == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Writes to each page, where the mapping allows it and is no device's.
fn touch_pages(addr: usize, len: usize) -> Result<(), Inaccessible> {
    let known = pages::vmas();
    let allowed = |at: usize| {
        let vma = known.iter().find(|vma| vma.start <= at && at < vma.end);
        // Without /proc the access itself decides.
        vma.map_or(known.is_empty(), |vma| {
            vma.has_flag("rd") && vma.has_flag("wr") && !vma.has_flag("io") && !vma.has_flag("pf")
        })
    };
    let (first, end) = (addr & !(PAGE - 1), addr.saturating_add(len));
    for at in (first..end).step_by(PAGE) {
        let touched = if allowed(at) { add_nothing(at) } else { Err(Errno::new(libc::EINVAL)) };
        touched.map_err(|errno| Inaccessible { addr, len, failed: at, errno })?;
    }
    Ok(())
}

/// Adds 0 to the word at `at`, a multiple of 4, in the kernel: where that cannot be read and
/// written, it is an error and no signal.
///
/// `FUTEX_WAKE_OP`: since Linux 2.6.14. Nothing waits for the futexes, so nothing is woken.
fn add_nothing(at: usize) -> Result<(), Errno> {
    let own = AtomicU32::new(0);
    let none: libc::c_long = 0;
    // FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0).
    let add_zero: libc::c_long = 1 << 28;
    // SAFETY: `own` is a word of this function; the word at `at` gets its own value again in one
    // atomic step, and what cannot be accessed is refused.
    let done = unsafe {
        libc::syscall(
            libc::SYS_futex,
            own.as_ptr(),
            libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG,
            none,
            none,
            at,
            add_zero,
        )
    };
    if done >= 0 { Ok(()) } else { Err(last_errno()) }
}

/// Calls `check` for all whole pages of the system around the memory at once, and if that fails
/// finds the first page that fails alone.
fn each_page(
    addr: usize,
    len: usize,
    check: impl Fn(usize, usize) -> Result<(), Errno>,
) -> Result<(), Inaccessible> {
    each_of_pages(rustix::param::page_size(), addr, len, check)
}

/// Like [`each_page`], where a page has `page` bytes.
fn each_of_pages(
    page: usize,
    addr: usize,
    len: usize,
    check: impl Fn(usize, usize) -> Result<(), Errno>,
) -> Result<(), Inaccessible> {
    let mut first = addr & !(page - 1);
    let refuse = |failed, errno| Inaccessible { addr, len, failed, errno };
    let end = addr.checked_add(len).and_then(|end| end.checked_next_multiple_of(page));
    let Some(end) = end else { return Err(refuse(first, Errno::new(libc::EINVAL))) };
    let mut left = end - first;
    let Err(mut errno) = check(first, left) else { return Ok(()) };
    while left > page {
        let half = (left / page / 2) * page;
        match check(first, half) {
            Ok(()) => (first, left) = (first + half, left - half),
            Err(error) => (left, errno) = (half, error),
        }
    }
    // The rest has not failed alone yet, where the whole has.
    Err(refuse(first, check(first, left).err().unwrap_or(errno)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::region::Region;
    use rustix::mm::{MprotectFlags, mprotect};

    const LEN: usize = 8 * PAGE;

    /// A system with pages of 64 KiB refuses other addresses and lengths.
    #[test]
    fn pages_of_64_kib_are_tried_as_a_whole() {
        const LARGE: usize = 64 << 10;
        let bad = 7 * LARGE;
        let check = |at: usize, bytes: usize| {
            assert!(at.is_multiple_of(LARGE) && bytes.is_multiple_of(LARGE) && bytes > 0);
            match (at..at + bytes).contains(&bad) {
                true => Err(Errno::new(libc::ENOMEM)),
                false => Ok(()),
            }
        };
        let tried = |addr, len| each_of_pages(LARGE, addr, len, check).map_err(|no| no.failed);
        assert_eq!(tried(LARGE + 4096, 4096), Ok(()));
        assert_eq!(tried(LARGE, 6 * LARGE), Ok(()));
        assert_eq!(tried(bad - 4096, 8192), Err(bad));
        assert_eq!(tried(bad + 4096, 4096), Err(bad));
        assert_eq!(tried(4096, 20 * LARGE), Err(bad));
    }

    /// Memory whose page `bad` has these rights.
    fn with(bad: usize, rights: MprotectFlags) -> Region {
        let region = Region::anonymous(LEN, PAGE).unwrap();
        let at = region.base().as_ptr().wrapping_add(bad * PAGE);
        // SAFETY: a page of the region, into which no pointer is used.
        unsafe { mprotect(at.cast(), PAGE, rights) }.unwrap();
        region
    }

    #[test]
    fn both_ways_find_the_first_page_that_fails() {
        for rights in [MprotectFlags::empty(), MprotectFlags::READ] {
            for bad in 0..8 {
                let region = with(bad, rights);
                let at = region.addr() + bad * PAGE;
                let failed = |tried: Result<(), Inaccessible>| tried.unwrap_err().failed;
                assert_eq!(failed(populate(region.addr(), LEN)), at);
                assert_eq!(failed(touch_pages(region.addr(), LEN)), at);
                assert_eq!(check_mapped(region.addr(), LEN), Ok(()));
                // The page's last byte, and the first behind it.
                assert_eq!(failed(populate(at + PAGE - 1, 1)), at);
                assert_eq!(failed(touch_pages(at + PAGE - 1, 1)), at);
                for (first, pages) in [(0, bad), (bad + 1, 7 - bad)] {
                    let first = region.addr() + first * PAGE;
                    assert!(pages == 0 || populate(first, pages * PAGE).is_ok());
                    assert!(pages == 0 || touch_pages(first, pages * PAGE).is_ok());
                }
            }
        }
    }

    #[test]
    fn a_hole_is_found_and_nothing_is_populated() {
        let region = Region::anonymous(LEN, PAGE).unwrap();
        // No process can map this address, whereas memory behind the region's guard may be mapped.
        let beyond = 1 << 60;
        assert_eq!(check_mapped(beyond, PAGE).unwrap_err().failed, beyond);
        assert!(check_mapped(region.addr(), 1 << 60).is_err());
        assert!(check_mapped(usize::MAX - 10, 100).is_err());
        assert_eq!(pages::vma_of(region.addr(), LEN).unwrap().resident, 0);
        assert_eq!(touch_pages(beyond, PAGE).unwrap_err().failed, beyond);
    }

    #[test]
    fn contents_stay_as_they_are() {
        let region = Region::anonymous(LEN, PAGE).unwrap();
        region.memory().write_u64(4096, 0x1234_5678_9abc_def0).unwrap();
        populate(region.addr() + 4100, 1).unwrap();
        touch_pages(region.addr() + 4100, 4096).unwrap();
        assert_eq!(region.memory().read_u64(4096).unwrap(), 0x1234_5678_9abc_def0);
        assert_eq!(pages::vma_of(region.addr(), LEN).unwrap().resident, 2 * PAGE as u64);
    }

    #[test]
    fn pages_of_the_kernel_are_no_memory() {
        let vvar = pages::vmas().into_iter().find(|vma| vma.name.starts_with("[vvar"));
        let Some(vvar) = vvar else { return eprintln!("SKIPPED: no vvar page") };
        assert!(populate(vvar.start, PAGE).is_err());
        assert!(touch_pages(vvar.start, PAGE).is_err());
    }
}
