//! Finds the pages and frames of this process's addresses: `/proc/self/pagemap` and
//! `/proc/kpageflags`.

use super::errno::Errno;
use rustix::ioctl::{IoctlOutput, Opcode, opcode};
use std::ffi::c_void;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The page size of these files.
const PAGE: u64 = 4096;
/// `/proc/kpageflags`: the page is the head, or a tail, of a compound page.
const COMPOUND_HEAD: u64 = 1 << 15;
const COMPOUND_TAIL: u64 = 1 << 16;
/// Entries per read.
const BATCH: usize = 512;

/// The entry of a 4 KiB page: whether it is present, and its frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entry(u64);

impl Entry {
    pub(crate) fn is_present(self) -> bool {
        self.0 >> 63 == 1
    }

    /// Returns its frame number; `None` if it is not present, or hidden from this process.
    pub(crate) fn frame(self) -> Option<u64> {
        let frame = self.0 & ((1 << 55) - 1);
        (self.is_present() && frame != 0).then_some(frame)
    }
}

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

const _: () = assert!(size_of::<Scan>() == 96 && size_of::<Region>() == 24);

/// `PAGE_IS_HUGE`: mapped by one entry for 2 MiB or more.
const HUGE: u64 = 1 << 6;
/// `PAGE_IS_PFNZERO`: the page of zeroes that backs memory that has only been read so far.
const ZERO: u64 = 1 << 5;

/// `PAGEMAP_SCAN` in the form of rustix; it returns how many regions it filled.
struct ScanCall<'a>(&'a mut Scan);

// SAFETY: the opcode is that of `PAGEMAP_SCAN`, whose argument is `Scan` (its size is asserted
// above), which the kernel reads and writes.
unsafe impl rustix::ioctl::Ioctl for ScanCall<'_> {
    type Output = usize;
    const IS_MUTATING: bool = true;
    fn opcode(&self) -> Opcode {
        opcode::read_write::<Scan>(b'f', 16)
    }
    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(self.0).cast()
    }
    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<usize> {
        Ok(usize::try_from(out).unwrap_or(0))
    }
}

/// The pages of this process.
#[derive(Debug)]
pub(crate) struct Pagemap {
    pagemap: File,
    flags: Option<File>,
}

impl Pagemap {
    /// Opens both files. `/proc/self/pagemap`: since Linux 2.6.25, frame numbers for
    /// `CAP_SYS_ADMIN` only since 4.2. `/proc/kpageflags`: since 2.6.25, for root.
    pub(crate) fn open() -> Result<Self, Errno> {
        let errno = |error: std::io::Error| Errno::new(error.raw_os_error().unwrap_or(0));
        let pagemap = File::open("/proc/self/pagemap").map_err(errno)?;
        Ok(Self { pagemap, flags: File::open("/proc/kpageflags").ok() })
    }

    /// Returns the ranges of `start..end` that are mapped by entries for 2 MiB or more, in order.
    /// Pages of zeroes are left out: the first write replaces them by pages of unknown size.
    ///
    /// `PAGEMAP_SCAN`: since Linux 6.7; `ENOTTY` before.
    pub(crate) fn huge(&self, start: usize, end: usize) -> Result<Vec<(usize, usize)>, Errno> {
        let mut found: Vec<(usize, usize)> = Vec::new();
        let mut at = start as u64;
        let mut regions = [Region::default(); 64];
        while at < end as u64 {
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                start: at,
                end: end as u64,
                vec: regions.as_mut_ptr().expose_provenance() as u64,
                vec_len: regions.len() as u64,
                category_inverted: ZERO,
                category_mask: HUGE | ZERO,
                return_mask: HUGE,
                ..Scan::default()
            };
            // SAFETY: the kernel writes to `scan`, and at most `vec_len` regions to `regions`; both
            // outlive the call.
            let filled = unsafe { rustix::ioctl::ioctl(&self.pagemap, ScanCall(&mut scan)) }?;
            for region in regions.iter().take(filled) {
                let (from, to) = (super::errno::bytes(region.start), super::bytes(region.end));
                match found.last_mut().filter(|last| last.1 == from) {
                    Some(last) => last.1 = to,
                    None => found.push((from, to)),
                }
            }
            // The walk advances or ends; stop if the kernel reports no progress.
            if scan.walk_end <= at {
                break;
            }
            at = scan.walk_end;
        }
        Ok(found)
    }

    /// Calls `each` with the address and the entry of each 4 KiB page of `start..end` (multiples of
    /// 4096).
    pub(crate) fn each(
        &self,
        start: usize,
        end: usize,
        mut each: impl FnMut(usize, Entry),
    ) -> Result<(), Errno> {
        let first = start as u64 / PAGE;
        let mut at = start;
        words(&self.pagemap, first, (end as u64 / PAGE).saturating_sub(first), |word| {
            each(at, Entry(word));
            at += super::errno::bytes(PAGE);
        })
    }

    /// Returns the number of frames of the compound page around the frame, and its first frame: one
    /// frame if there is none. `None` if that is hidden from this process.
    fn folio_of(&self, frame: u64) -> Option<(u64, u64)> {
        let flags = self.flags.as_ref()?;
        let at = |frame: u64| {
            let mut word = [0; 8];
            flags.read_exact_at(&mut word, frame.checked_mul(8)?).ok()?;
            Some(u64::from_ne_bytes(word))
        };
        let mut first = frame;
        // A compound page is aligned to its size, and has at most 1 GiB.
        if at(frame)? & COMPOUND_TAIL != 0 {
            let heads = (1..=18).map(|order| frame >> order << order);
            first = heads
                .into_iter()
                .find(|&head| at(head).is_some_and(|word| word & COMPOUND_HEAD != 0))?;
        }
        if at(first)? & COMPOUND_HEAD == 0 {
            return Some((frame, 1));
        }
        let is_tail = |frame: u64| at(frame).is_some_and(|word| word & COMPOUND_TAIL != 0);
        let order = (1..=18).find(|order| !is_tail(first + (1 << order)))?;
        Some((first, 1 << order))
    }

    /// Returns the compound pages of the `count` frames from `first`, each once: first frame and
    /// number of frames. Frames outside of compound pages are left out. `None` if that is hidden
    /// from this process.
    pub(crate) fn folios(&self, first: u64, count: u64) -> Option<Vec<(u64, u64)>> {
        let mut found: Vec<(u64, u64)> = Vec::new();
        let mut frame = first;
        let mut known = true;
        let flags = self.flags.as_ref()?;
        let read = words(flags, first, count, |word| {
            let inside = found.last().is_some_and(|&(start, frames)| frame < start + frames);
            if word & (COMPOUND_HEAD | COMPOUND_TAIL) != 0 && !inside {
                match self.folio_of(frame) {
                    Some(folio) => found.push(folio),
                    None => known = false,
                }
            }
            frame += 1;
        });
        (known && read.is_ok()).then_some(found)
    }
}

/// Calls `each` with `count` words of a file from the one numbered `first`.
fn words(file: &File, first: u64, count: u64, mut each: impl FnMut(u64)) -> Result<(), Errno> {
    let mut bytes = [0u8; BATCH * 8];
    let (mut at, mut left) = (first, count);
    while left > 0 {
        let batch = left.min(BATCH as u64);
        let part = bytes.get_mut(..usize::try_from(batch * 8).unwrap_or(0)).unwrap_or_default();
        let offset = at.checked_mul(8).ok_or(Errno::new(libc::EOVERFLOW))?;
        let read = file.read_exact_at(part, offset);
        read.map_err(|error| Errno::new(error.raw_os_error().unwrap_or(libc::EIO)))?;
        for word in part.as_chunks::<8>().0 {
            each(u64::from_ne_bytes(*word));
        }
        at += batch;
        left -= batch;
    }
    Ok(())
}
