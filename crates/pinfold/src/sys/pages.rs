//! Finds the pages, frames and mappings of this process's addresses: `/proc/self/pagemap`,
//! `/proc/kpageflags`, `/proc/self/maps` and `/proc/self/smaps`.

use super::errno::Errno;
use super::files;
use rustix::ioctl::{IoctlOutput, Opcode, Updater, opcode};
use std::ffi::c_void;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The size of a frame here. These files have one word for each page of the system, which may be
/// larger.
const FRAME: u64 = 4096;
/// The bits of an entry that are its frame number.
const FRAME_BITS: u64 = (1 << 55) - 1;
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
        let frame = self.0 & FRAME_BITS;
        (self.is_present() && frame != 0).then_some(frame)
    }

    /// Returns the entry of a frame in a page of `frames`, whose entry this is.
    fn part(self, at: u64, frames: u64) -> Self {
        match self.0 & FRAME_BITS {
            0 => self,
            page => Self(self.0 & !FRAME_BITS | (page * frames + at) & FRAME_BITS),
        }
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
    /// The number of frames of 4 KiB in a page of the system.
    frames: u64,
}

impl Pagemap {
    /// Opens both files. `/proc/self/pagemap`: since Linux 2.6.25, frame numbers for
    /// `CAP_SYS_ADMIN` only since 4.2. `/proc/kpageflags`: since 2.6.25, for root.
    pub(crate) fn open() -> Result<Self, Errno> {
        let errno = |error: std::io::Error| Errno::new(error.raw_os_error().unwrap_or(0));
        let pagemap = File::open("/proc/self/pagemap").map_err(errno)?;
        let frames = (rustix::param::page_size() as u64 / FRAME).max(1);
        Ok(Self { pagemap, flags: File::open("/proc/kpageflags").ok(), frames })
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
        let (mut frame, last) = (start as u64 / FRAME, end as u64 / FRAME);
        let first = frame / self.frames;
        let count = last.div_ceil(self.frames).saturating_sub(first);
        words(&self.pagemap, first, count, |word| {
            let page_end = (frame / self.frames + 1) * self.frames;
            for frame in frame..page_end.min(last) {
                let entry = Entry(word).part(frame % self.frames, self.frames);
                each(super::errno::bytes(frame * FRAME), entry);
            }
            frame = page_end;
        })
    }

    /// Returns the first page of the compound page around a page of the system, and its number of
    /// them: the page alone if there is none. `None` if that is hidden from this process.
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

    /// Returns the pages larger than a frame of the `count` frames from `first`, each once: first frame
    /// and number of frames. These are compound pages and, where the system's pages are larger than a
    /// frame, all. `None` if that is hidden from this process.
    pub(crate) fn folios(&self, first: u64, count: u64) -> Option<Vec<(u64, u64)>> {
        let mut found: Vec<(u64, u64)> = Vec::new();
        let mut known = true;
        let flags = self.flags.as_ref()?;
        let mut page = first / self.frames;
        let pages = (first + count).div_ceil(self.frames) - page;
        let read = words(flags, page, pages, |word| {
            let frame = page * self.frames;
            let inside = found.last().is_some_and(|&(start, frames)| frame < start + frames);
            let large = self.frames > 1 || word & (COMPOUND_HEAD | COMPOUND_TAIL) != 0;
            if large && !inside {
                match self.folio_of(page) {
                    Some((first, pages)) => found.push((first * self.frames, pages * self.frames)),
                    None => known = false,
                }
            }
            page += 1;
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

// Queries the mapping at an address: its bounds, access rights and page size.

/// One mapping of this process.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct MmapRegion {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// The page size of its hugetlb pool, else 4096. Transparent hugepages are not visible here.
    pub(crate) page_bytes: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// Whether other mappings may share its pages.
    pub(crate) shared: bool,
    name: String,
}

impl MmapRegion {
    /// Returns whether it consists of a device's registers or of the kernel's own pages instead of
    /// memory.
    ///
    /// O(mappings of the process) if its name permits that, else constant.
    pub(crate) fn is_special(&self) -> bool {
        if self.name.starts_with("[v") {
            return true;
        }
        let suspect = self.name.starts_with("/dev/") || self.name.starts_with("anon_inode:");
        let flags = |vma: Vma| vma.has_flag("io") || vma.has_flag("pf");
        suspect && vma_of(self.start, self.end - self.start).is_none_or(flags)
    }
}

/// `struct procmap_query` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    addr: u64,
    start: u64,
    end: u64,
    vma_flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name_addr: u64,
    build_id_addr: u64,
}

const _: () = assert!(size_of::<Query>() == 104);

const QUERY: rustix::ioctl::Opcode = opcode::read_write::<Query>(b'f', 17);
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const SHARED: u64 = 8;
/// The longest name that the kernel returns (`PATH_MAX`).
const NAME: u32 = 4096;

/// The mappings of this process, queried one by one if the kernel supports that.
#[derive(Debug)]
pub(crate) struct Mappings {
    maps: File,
    /// All of them, from `/proc/self/smaps`, if the kernel has no queries.
    read: Option<Vec<Vma>>,
}

impl Mappings {
    pub(crate) fn open() -> Result<Self, Errno> {
        let maps = File::open("/proc/self/maps").map_err(|error| error.raw_os_error());
        Ok(Self { maps: maps.map_err(|raw| Errno::new(raw.unwrap_or(0)))?, read: None })
    }

    /// Reads `/proc/self/smaps`, as on a kernel without queries.
    #[cfg(test)]
    pub(crate) fn by_smaps() -> Result<Self, Errno> {
        Ok(Self { read: Some(vmas()), ..Self::open()? })
    }

    /// Returns whether mappings are queried; otherwise `/proc/self/smaps` was read once.
    pub(crate) fn are_queried(&self) -> bool {
        self.read.is_none()
    }

    /// Returns the mapping that contains `addr`. `PROCMAP_QUERY`: since Linux 6.11; before, all of
    /// `/proc/self/smaps`.
    pub(crate) fn at(&mut self, addr: usize) -> Result<Option<MmapRegion>, Errno> {
        if self.read.is_none() {
            match self.query(addr) {
                Ok(mapping) => return Ok(Some(mapping)),
                Err(errno) if errno.raw() == libc::ENOENT => return Ok(None),
                Err(errno) if errno.raw() == libc::ENOTTY => {}
                Err(errno) => return Err(errno),
            }
        }
        let all = self.read.get_or_insert_with(vmas);
        let vma = all.iter().find(|vma| vma.start <= addr && addr < vma.end);
        Ok(vma.map(|vma| MmapRegion {
            start: vma.start,
            end: vma.end,
            page_bytes: vma.page_bytes,
            readable: vma.has_flag("rd"),
            writable: vma.has_flag("wr"),
            shared: vma.has_flag("sh"),
            name: vma.name.clone(),
        }))
    }

    fn query(&self, addr: usize) -> Result<MmapRegion, Errno> {
        let mut name = vec![0u8; NAME as usize];
        let mut query = Query {
            size: size_of::<Query>() as u64,
            addr: addr as u64,
            name_size: NAME,
            name_addr: name.as_mut_ptr().expose_provenance() as u64,
            ..Query::default()
        };
        // SAFETY: the opcode is `PROCMAP_QUERY`, whose argument is this structure (its size is
        // asserted above).
        let ioctl = unsafe { Updater::<QUERY, Query>::new(&mut query) };
        // SAFETY: the kernel writes to `query`, and at most `name_size` bytes to `name`, which
        // outlives the call.
        unsafe { rustix::ioctl::ioctl(&self.maps, ioctl) }?;
        let bytes = name.get(..query.name_size.saturating_sub(1) as usize).unwrap_or(&[]);
        Ok(MmapRegion {
            start: super::errno::bytes(query.start),
            end: super::errno::bytes(query.end),
            page_bytes: query.page_size,
            readable: query.vma_flags & READABLE != 0,
            writable: query.vma_flags & WRITABLE != 0,
            shared: query.vma_flags & SHARED != 0,
            name: String::from_utf8_lossy(bytes).into_owned(),
        })
    }
}

// Parses `/proc/self/smaps`: the pages that a mapping really has.

/// One mapping in `/proc/self/smaps`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Vma {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Bytes backed by pages of memory, without those of `hugetlb`.
    pub(crate) resident: u64,
    /// The bytes on transparent hugepages.
    pub(crate) transparent: u64,
    /// Bytes on pages of the hugetlb pool.
    pub(crate) hugetlb: u64,
    /// `KernelPageSize`.
    pub(crate) page_bytes: u64,
    /// The mapped file, or the kernel's name for it; empty for anonymous memory.
    pub(crate) name: String,
    flags: String,
}

impl Vma {
    /// Returns whether `VmFlags` has the two letters: `dc` not copied on fork, `lo` locked, `hg`
    /// hugepages requested, `rd` readable, `wr` writable, `io` and `pf` of a device.
    pub(crate) fn has_flag(&self, flag: &str) -> bool {
        self.flags.split_whitespace().any(|have| have == flag)
    }
}

/// Returns the mapping that contains all of the `len` bytes from `addr`. O(mappings of the
/// process).
pub(crate) fn vma_of(addr: usize, len: usize) -> Option<Vma> {
    let end = addr.checked_add(len)?;
    vmas().into_iter().find(|vma| vma.start <= addr && end <= vma.end)
}

/// Returns all mappings of the process, in order; none if the file cannot be read.
pub(crate) fn vmas() -> Vec<Vma> {
    std::fs::read("/proc/self/smaps").map(|smaps| parse(&smaps)).unwrap_or_default()
}

/// Parses the file; malformed lines are skipped.
fn parse(smaps: &[u8]) -> Vec<Vma> {
    let mut all: Vec<Vma> = Vec::new();
    for line in files::lines(smaps) {
        if let Some((start, end)) = header(&line) {
            // `start-end rights offset device inode name`
            let name = line.split_whitespace().skip(5).collect::<Vec<_>>().join(" ");
            all.push(Vma { start, end, name, ..Vma::default() });
            continue;
        }
        let (Some(vma), Some((key, value))) = (all.last_mut(), line.split_once(':')) else {
            continue;
        };
        match key {
            "Rss" => vma.resident = files::kib(value).unwrap_or(0),
            "AnonHugePages" | "ShmemPmdMapped" | "FilePmdMapped" => {
                vma.transparent = vma.transparent.saturating_add(files::kib(value).unwrap_or(0));
            }
            "Shared_Hugetlb" | "Private_Hugetlb" => {
                vma.hugetlb = vma.hugetlb.saturating_add(files::kib(value).unwrap_or(0));
            }
            "KernelPageSize" => vma.page_bytes = files::kib(value).unwrap_or(0),
            "VmFlags" => value.clone_into(&mut vma.flags),
            _ => {}
        }
    }
    all
}

/// `7f00-7f01 rw-p ...`
fn header(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::region::Region;

    #[test]
    fn queries_and_smaps_agree() {
        let region = Region::anonymous(8192, 4096).unwrap();
        let mut queried = Mappings::open().unwrap();
        let here = std::ptr::from_ref(&queried).addr();
        for addr in [region.addr(), region.addr() + 8191, region.addr() - 1, here, 1, usize::MAX] {
            let by_smaps = || Mappings::by_smaps().unwrap().at(addr).unwrap();
            // The guard of another thread's region joins the guard of this one whenever the kernel
            // puts them side by side, so the two may see different moments: once in many tries they
            // see the same.
            let tries = (0..1000).map(|_| (queried.at(addr).unwrap(), by_smaps()));
            let (answer, _) = tries
                .into_iter()
                .find(|(one, other)| one == other)
                .unwrap_or_else(|| panic!("{addr:#x}"));
            assert_eq!(answer.is_none(), addr == 1 || addr == usize::MAX);
        }
        let mapping = queried.at(region.addr()).unwrap().unwrap();
        assert!(mapping.writable && !mapping.shared && !mapping.is_special());
        assert_eq!((mapping.start, mapping.page_bytes), (region.addr(), 4096));
        assert!(!queried.at(region.addr() - 1).unwrap().unwrap().readable, "the guard");
    }

    /// A file of these words.
    fn file(words: &[u64]) -> File {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        file.write_all_at(&bytes, 0).unwrap();
        file
    }

    const PRESENT: u64 = 1 << 63;

    /// A system with pages of 64 KiB has one word for 16 frames.
    #[test]
    fn frames_are_found_in_pages_of_64_kib() {
        let entries = [0, PRESENT | 5, PRESENT, PRESENT | 7, 3];
        let large = Pagemap { pagemap: file(&entries), flags: None, frames: 16 };
        let each = |from: usize, to: usize| {
            let mut found = Vec::new();
            let seen = |at, entry: Entry| found.push((at, entry.is_present(), entry.frame()));
            large.each(from, to, seen).unwrap();
            found
        };
        const PAGE: usize = 64 << 10;
        // Within a page, and from one to the next.
        let of = |at: usize, frame: u64| (at, true, Some(frame));
        assert_eq!(each(PAGE + 4096, PAGE + 8192), [of(PAGE + 4096, 5 * 16 + 1)]);
        let across = each(2 * PAGE - 4096, 2 * PAGE + 4096);
        assert_eq!(across, [of(2 * PAGE - 4096, 5 * 16 + 15), (2 * PAGE, true, None)]);
        assert_eq!(each(PAGE, 5 * PAGE).len(), 64);
        assert_eq!(each(3 * PAGE, 4 * PAGE)[15], of(4 * PAGE - 4096, 7 * 16 + 15));
        assert_eq!(each(4 * PAGE, 4 * PAGE + 4096), [(4 * PAGE, false, None)], "swapped out");
        assert!(each(PAGE, PAGE).is_empty() && each(PAGE + 4096, PAGE + 4096).is_empty());
    }

    #[test]
    fn large_pages_are_found_among_pages_of_any_size() {
        // A page, a compound page of two, a page.
        let flags = || Some(file(&[0, 0, COMPOUND_HEAD, COMPOUND_TAIL, 0, 0, 0, 0]));
        let of = |frames| Pagemap { pagemap: file(&[]), flags: flags(), frames };
        assert_eq!(of(1).folios(1, 4), Some(vec![(2, 2)]));
        assert_eq!(of(16).folios(16, 4 * 16), Some(vec![(16, 16), (32, 32), (64, 16)]));
        // Parts of pages count as the pages.
        assert_eq!(of(16).folios(31, 2), Some(vec![(16, 16), (32, 32)]));
    }

    #[test]
    fn pages_of_the_kernel_are_special() {
        let vvar = vmas().into_iter().find(|vma| vma.name.starts_with("[vvar"));
        let Some(vvar) = vvar else { return eprintln!("SKIPPED: no vvar page") };
        assert!(Mappings::open().unwrap().at(vvar.start).unwrap().unwrap().is_special());
        assert!(Mappings::by_smaps().unwrap().at(vvar.start).unwrap().unwrap().is_special());
    }
}

#[cfg(test)]
mod smaps_tests {
    use super::*;
    use proptest::prelude::*;

    const SAMPLE: &[u8] =
        b"7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \nSize:               4096 kB\n\
        Rss:                2052 kB\nAnonHugePages:      2048 kB\nShmemPmdMapped:        0 kB\n\
        Private_Hugetlb:       0 kB\nVmFlags: rd wr mr mw me dc ac lo hg \n";

    #[test]
    fn parses_the_fields_it_needs() {
        let all = parse(SAMPLE);
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].resident, all[0].transparent, all[0].hugetlb), (2052 << 10, 2 << 20, 0));
        assert!(all[0].has_flag("dc") && all[0].has_flag("lo") && !all[0].has_flag("io"));
    }

    proptest! {
        #[test]
        fn tolerates_truncated_and_malformed_input(cut in 0usize..300, at in 0usize..300, byte in any::<u8>()) {
            let mut bytes = SAMPLE[..cut.min(SAMPLE.len())].to_vec();
            if let Some(changed) = bytes.get_mut(at) {
                *changed = byte;
            }
            prop_assert!(parse(&bytes).len() <= 2);
        }

        #[test]
        fn tolerates_anything(bytes in proptest::collection::vec(any::<u8>(), 0..500)) {
            parse(&bytes);
        }
    }
}
