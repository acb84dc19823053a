//! Obtains memory from the system, from the first available source.

use super::arena::BuildError;
use super::claim::{Claim, ClaimedFor};
use super::source::{Source, SourceUnavailable, UnavailableReason};
use crate::sys::hugepages::{self, HugetlbPool, Thp};
use crate::sys::limits::{FileLimit, MapLimit, SystemMemory};
use crate::sys::region::Region;
use crate::sys::{Errno, control_group, pages, process, region, trial};
use pinfold_core::addr::PageSize;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

/// A request for memory.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) bytes: u64,
    pub(super) sources: Vec<Source>,
    pub(super) node: Option<u32>,
    pub(super) caller: Option<(NonNull<u8>, usize)>,
}

/// Memory that was obtained.
#[derive(Debug)]
pub(super) struct Obtained {
    pub(super) held: Held,
    pub(super) memfd: Option<OwnedFd>,
    pub(super) source: Source,
    pub(super) page_size: PageSize,
    pub(super) unavailable: Vec<SourceUnavailable>,
}

/// Memory with the claim of its bytes.
#[derive(Debug)]
pub(super) struct Held {
    /// Dropped before the region, whose addresses may be another mapping's as soon as it is unmapped.
    #[expect(dead_code, reason = "held, and dropped first")]
    claim: Claim,
    region: Region,
}

impl Deref for Held {
    type Target = Region;
    fn deref(&self) -> &Region {
        &self.region
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Before the claim ends: the next owner of the program's own memory sets the same on it.
        self.region.restore();
    }
}

impl Held {
    /// Claims memory that was mapped for it.
    fn mapped(region: Region) -> Result<Self, BuildError> {
        let range = region.addr()..region.addr() + region.len();
        Ok(Self { claim: Claim::memory(range, ClaimedFor::Arena)?, region })
    }
}

/// Why a source failed.
enum Failure {
    /// The next one is tried.
    Unavailable(UnavailableReason),
    /// The others would fail, too: a wrong node, a kernel without `MADV_DONTFORK`.
    Fatal(BuildError),
}

impl From<UnavailableReason> for Failure {
    fn from(reason: UnavailableReason) -> Self {
        Self::Unavailable(reason)
    }
}

/// Arenas below this have a zone that is larger than they are.
const SMALL: u64 = PageSize::Size2M.bytes();
const SYS: &str = "/sys";
const PROC: &str = "/proc";

pub(super) fn obtain(request: &Request) -> Result<Obtained, BuildError> {
    if let Some((base, len)) = request.caller {
        return of_caller(request, base, len);
    }
    let mut refused = Vec::new();
    for &source in &request.sources {
        match attempt(request, source) {
            Ok((region, memfd)) => {
                // Only memory that was unmapped while it was in use has addresses of a new mapping.
                return Ok(Obtained {
                    held: Held::mapped(region)?,
                    memfd,
                    source,
                    page_size: source.page_size(),
                    unavailable: refused,
                });
            }
            Err(Failure::Unavailable(reason)) => {
                tracing::debug!(%source, %reason, "no memory from this source");
                refused.push(unavailable(source, reason, request.node));
            }
            Err(Failure::Fatal(error)) => return Err(error),
        }
    }
    Err(BuildError::NoMemory { requested: request.bytes, unavailable: refused })
}

fn of_caller(request: &Request, base: NonNull<u8>, len: usize) -> Result<Obtained, BuildError> {
    let start = base.as_ptr().addr();
    if !start.is_multiple_of(4096) || !len.is_multiple_of(4096) {
        return Err(BuildError::CallerAlignment { base: start, len });
    }
    // First: another's memory is not changed.
    let claim = Claim::memory(start..start.saturating_add(len), ClaimedFor::Arena)?;
    trial::check_mapped(start, len)?;
    // SAFETY: the contract of `ArenaBuilder::caller`: mapped, readable and writable until the arena
    // is gone; the alignment was just checked.
    let held = Held { claim, region: unsafe { Region::lent(base, len) } };
    bind(&held, request.node)?;
    // Populated on its node: a page that is missing later would raise a signal.
    trial::populate(start, len)?;
    held.keep_from_children().map_err(BuildError::Fork)?;
    let source = Source::Caller;
    Ok(Obtained {
        held,
        memfd: None,
        source,
        page_size: source.page_size(),
        unavailable: Vec::new(),
    })
}

fn attempt(request: &Request, source: Source) -> Result<(Region, Option<OwnedFd>), Failure> {
    let page = source.page_size();
    let rounded = match (page, request.bytes) {
        (PageSize::Size2M | PageSize::Size1G, bytes) => {
            bytes.checked_next_multiple_of(page.bytes())
        }
        // Runs of less than 2 MiB are allocated as powers of two: this lets a small arena be one
        // buffer.
        (PageSize::Size4K, ..SMALL) => Some(request.bytes.next_power_of_two().max(page.bytes())),
        (PageSize::Size4K, bytes) => bytes.checked_next_multiple_of(page.bytes()),
    };
    let no_space =
        UnavailableReason::NoAddressSpace { requested: rounded.unwrap_or(request.bytes) };
    let Some(len) = rounded.and_then(|bytes| usize::try_from(bytes).ok()) else {
        return Err(no_space.into());
    };
    let (region, fd) = match source {
        Source::Hugetlb1G | Source::Hugetlb2M => (
            Region::hugetlb(len, page).map_err(|errno| explain("mmap", errno, page, len, None))?,
            None,
        ),
        Source::Memfd | Source::Memfd2M | Source::Memfd1G => {
            if let Some(limit) = FileLimit::refusing(len as u64) {
                return Err(UnavailableReason::FileLimit(limit).into());
            }
            let fd = region::memory_file(len as u64, page)
                .map_err(|errno| explain("memfd", errno, page, len, None))?;
            let region = Region::shared(fd.as_fd(), len)
                .map_err(|errno| explain("mmap", errno, page, len, None))?;
            (region, Some(fd))
        }
        Source::Thp => (transparent(len, no_space)?, None),
        Source::Plain | Source::Caller => (plain(len, no_space)?, None),
    };
    prepare(&region, request.node).map_err(Failure::Fatal)?;
    if source.is_hugetlb() {
        if let Err(errno) = populate(&region, request.node) {
            // The free memory, and the use of the control groups, are read without the pages of
            // this attempt.
            drop((region, fd));
            return Err(
                explain("madvise(MADV_POPULATE_WRITE)", errno, page, len, request.node).into()
            );
        }
    } else if source == Source::Thp {
        touch_transparent(&region)?;
    }
    Ok((region, fd))
}

/// Applies what must precede the first touch of a page.
fn prepare(region: &Region, node: Option<u32>) -> Result<(), BuildError> {
    region.keep_from_children().map_err(BuildError::Fork)?;
    bind(region, node)
}

fn bind(region: &Region, node: Option<u32>) -> Result<(), BuildError> {
    let Some(node) = node else { return Ok(()) };
    region::bind_to_node(region, node).map_err(|errno| BuildError::Node {
        node,
        online: hugepages::online_nodes(Path::new(SYS)),
        errno,
    })
}

/// Maps memory aligned to 2 MiB, so that large leaves and transparent hugepages fit it, and a
/// pool's chunks of any order are aligned to their size. It costs addresses, and no memory.
fn aligned(len: usize, no_space: UnavailableReason) -> Result<Region, UnavailableReason> {
    // Aligning it takes up to 2 MiB of addresses, and the guards two pages.
    let requested = (len as u64).saturating_add((2 << 20) + 8192);
    let too_much = || match MapLimit::refusing(requested, false) {
        Some(limit) => UnavailableReason::MapLimit { requested, limit },
        None => no_space,
    };
    Region::anonymous(len, 2 << 20).map_err(|errno| match errno.raw() {
        libc::ENOMEM => too_much(),
        _ => UnavailableReason::Kernel { call: "mmap", errno },
    })
}

fn plain(len: usize, no_space: UnavailableReason) -> Result<Region, UnavailableReason> {
    let region = aligned(len, no_space)?;
    // In mode `always` the pages would be hugepages, and the report wrong. A kernel without
    // transparent hugepages refuses the advice (EINVAL) and allocates plain pages anyway.
    let _ = region.ask_for_plain_pages();
    Ok(region)
}

fn transparent(len: usize, no_space: UnavailableReason) -> Result<Region, UnavailableReason> {
    match hugepages::thp(Path::new(SYS)) {
        Some(Thp::Never) => return Err(UnavailableReason::TransparentOff),
        None if is_mounted(SYS) => {
            return Err(UnavailableReason::NoSuchPages { page: PageSize::Size2M });
        }
        // Without sysfs the kernel's answer to the advice decides.
        None | Some(Thp::Always | Thp::Madvise) => {}
    }
    let region = aligned(len, no_space)?;
    region
        .ask_for_hugepages()
        .map_err(|errno| UnavailableReason::Kernel { call: "madvise(MADV_HUGEPAGE)", errno })?;
    Ok(region)
}

/// Touches the first page and checks its size: the advice guarantees nothing.
fn touch_transparent(region: &Region) -> Result<(), UnavailableReason> {
    let touched = region.memory().write_u8(0, 0);
    let transparent = match pages::vma_of(region.addr(), region.len()) {
        Some(vma) => vma.transparent > 0,
        None => one_fault_suffices(region),
    };
    if touched.is_ok() && transparent {
        return Ok(());
    }
    Err(if hugepages::thp_disabled_for_process() {
        UnavailableReason::TransparentDisabled
    } else if hugepages::is_fragmented(Path::new(PROC)) == Some(true) {
        UnavailableReason::Fragmented
    } else {
        UnavailableReason::PlainInstead
    })
}

/// Returns whether the last page of the first 2 MiB is there once the first page has been touched:
/// without `/proc/self/smaps`, which shows the pages.
fn one_fault_suffices(region: &Region) -> bool {
    let before = process::page_faults();
    let touched = region.memory().write_u8((2 << 20) - 4096, 0);
    touched.is_ok() && process::page_faults() == before
}

/// Allocates all of a hugetlb region's pages now: a page that is missing later raises a `SIGBUS`.
///
/// The reservation that `mmap` made does not suffice. It disregards nodes; a control group may
/// limit the pages in use; and shrinking the pool at that moment, or building 1 GiB pages from it,
/// can take a reserved page.
fn populate(region: &Region, node: Option<u32>) -> Result<(), Errno> {
    match region.populate(region.len()) {
        // Before Linux 5.14 there is only the reservation, which holds for no particular node.
        Err(errno) if errno.raw() == libc::EINVAL && node.is_none() => Ok(()),
        result => result,
    }
}

/// Finds the limit that refused `len` bytes on pages of this size, of a node if one is named, by
/// comparing each with its current use. Otherwise it is the kernel's error.
fn explain(
    call: &'static str,
    errno: Errno,
    page: PageSize,
    len: usize,
    node: Option<u32>,
) -> UnavailableReason {
    let bytes = len as u64;
    let needed = bytes / page.bytes();
    let kernel = UnavailableReason::Kernel { call, errno };
    // A page fault that finds no page is `EFAULT` (or `EHWPOISON`) here, and never `EINVAL`.
    let refused = matches!(errno.raw(), libc::ENOMEM | libc::ENOSPC) || call.starts_with("madvise");
    if refused && let Some(limit) = MapLimit::refusing(bytes, page != PageSize::Size4K) {
        return UnavailableReason::MapLimit { requested: bytes, limit };
    }
    if page == PageSize::Size4K {
        return match errno.raw() {
            libc::ENOMEM => UnavailableReason::NoAddressSpace { requested: bytes },
            _ => kernel,
        };
    }
    let sys = Path::new(SYS);
    let Some(pool) = hugepages::pool(sys, page) else {
        let unsupported =
            matches!(errno.raw(), libc::EINVAL | libc::ENODEV) || refused && is_mounted(SYS);
        return if unsupported { UnavailableReason::NoSuchPages { page } } else { kernel };
    };
    if !refused || errno.raw() == libc::EINVAL {
        return kernel;
    }
    if pool.available().saturating_add(pool.overcommit) < needed {
        let HugetlbPool { total, .. } = pool;
        return UnavailableReason::FewHugepages { page, needed, free: pool.available(), total };
    }
    let limits = control_group::hugetlb(Path::new(PROC), page).refusing(bytes);
    if !limits.is_empty() {
        return UnavailableReason::ControlGroup { page, needed: bytes, limits };
    }
    match node {
        Some(node)
            if hugepages::node_pool(sys, node, page)
                .is_none_or(|pool| pool.available() < needed) =>
        {
            UnavailableReason::FewOnNode { node, page, pages: needed }
        }
        _ => kernel,
    }
}

/// Returns whether sysfs is there: if not, its files are missing without any meaning.
fn is_mounted(sys: &str) -> bool {
    Path::new(sys).join("kernel/mm").is_dir()
}

/// Tries to obtain one page of the source, and releases it: for [`probe`](crate::probe). A page of
/// 1 GiB, which takes long to zero, is reserved only.
pub(crate) fn try_one_page(source: Source) -> Result<(), SourceUnavailable> {
    let page = source.page_size();
    let request = Request { bytes: page.bytes(), sources: vec![source], node: None, caller: None };
    if page != PageSize::Size1G {
        return match attempt(&request, source) {
            Ok(_) => Ok(()),
            Err(Failure::Unavailable(reason)) => Err(unavailable(source, reason, None)),
            Err(Failure::Fatal(BuildError::Fork(errno))) => {
                let reason = UnavailableReason::Kernel { call: "madvise(MADV_DONTFORK)", errno };
                Err(unavailable(source, reason, None))
            }
            // The other such errors name a node, and none is requested.
            Err(Failure::Fatal(_)) => Ok(()),
        };
    }
    let len = crate::sys::bytes(page.bytes());
    let reserved = Region::hugetlb(len, page)
        .map(drop)
        .map_err(|errno| explain("mmap", errno, page, len, None));
    let limits = control_group::hugetlb(Path::new(PROC), page).refusing(page.bytes());
    let in_use = match limits.is_empty() {
        true => Ok(()),
        false => Err(UnavailableReason::ControlGroup { page, needed: page.bytes(), limits }),
    };
    reserved.and(in_use).map_err(|reason| unavailable(source, reason, None))
}

fn unavailable(source: Source, reason: UnavailableReason, node: Option<u32>) -> SourceUnavailable {
    let fix = fix(&reason, node);
    SourceUnavailable { source, reason, fix }
}

fn available() -> u64 {
    SystemMemory::read(Path::new(PROC)).available
}

/// Returns the shell command that fixes it, if there is one.
fn fix(reason: &UnavailableReason, node: Option<u32>) -> Option<String> {
    match reason {
        UnavailableReason::FewHugepages { page, needed, free, total } => {
            let missing = needed.saturating_sub(*free);
            hugepages::grow_command(*page, (*total, missing), node, available()).ok()
        }
        UnavailableReason::FewOnNode { page, pages, .. } => {
            let pool = node.and_then(|node| hugepages::node_pool(Path::new(SYS), node, *page))?;
            let short = pages.saturating_sub(pool.available());
            hugepages::grow_command(*page, (pool.total, short), node, available()).ok()
        }
        UnavailableReason::ControlGroup { needed, limits, .. } => {
            Some(control_group::raise_command(limits, *needed))
        }
        UnavailableReason::TransparentOff => Some(hugepages::thp_command(Path::new(SYS))),
        UnavailableReason::Fragmented => Path::new(PROC)
            .join("sys/vm/compact_memory")
            .exists()
            .then(|| "sudo sysctl vm.compact_memory=1".to_owned()),
        UnavailableReason::MapLimit { requested, limit } => limit.raise(*requested).ok(),
        UnavailableReason::NoSuchPages { .. }
        | UnavailableReason::TransparentDisabled
        | UnavailableReason::PlainInstead
        | UnavailableReason::NoAddressSpace { .. }
        | UnavailableReason::FileLimit(_)
        | UnavailableReason::Kernel { .. } => None,
    }
}
