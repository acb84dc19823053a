//! Queries the mapping at an address: its bounds, access rights and page size.

use super::errno::Errno;
use super::smaps;
use rustix::ioctl::{Updater, opcode};
use std::fs::File;

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
        let flags = |vma: smaps::Vma| vma.has_flag("io") || vma.has_flag("pf");
        suspect && smaps::of_range(self.start, self.end - self.start).is_none_or(flags)
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
    read: Option<Vec<smaps::Vma>>,
}

impl Mappings {
    pub(crate) fn open() -> Result<Self, Errno> {
        let maps = File::open("/proc/self/maps").map_err(|error| error.raw_os_error());
        Ok(Self { maps: maps.map_err(|raw| Errno::new(raw.unwrap_or(0)))?, read: None })
    }

    /// Reads `/proc/self/smaps`, as on a kernel without queries.
    #[cfg(test)]
    pub(crate) fn by_smaps() -> Result<Self, Errno> {
        Ok(Self { read: Some(smaps::all()), ..Self::open()? })
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
        let all = self.read.get_or_insert_with(smaps::all);
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

    #[test]
    fn pages_of_the_kernel_are_special() {
        let vvar = smaps::all().into_iter().find(|vma| vma.name.starts_with("[vvar"));
        let Some(vvar) = vvar else { return eprintln!("SKIPPED: no vvar page") };
        assert!(Mappings::open().unwrap().at(vvar.start).unwrap().unwrap().is_special());
        assert!(Mappings::by_smaps().unwrap().at(vvar.start).unwrap().unwrap().is_special());
    }
}
