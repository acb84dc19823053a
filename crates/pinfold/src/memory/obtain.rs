//! Obtains memory from the system, from the first available source.

use super::arena::BuildError;
use super::source::{Residency, Source, SourceUnavailable, UnavailableReason};
use crate::sys::hugepages::{self, Thp};
use crate::sys::region::Region;
use crate::sys::{Errno, memfd, numa, smaps};
use pinfold_core::addr::PageSize;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

/// What is requested.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) bytes: u64,
    pub(super) sources: Vec<Source>,
    pub(super) node: Option<u32>,
    pub(super) caller: Option<(NonNull<u8>, usize)>,
}

/// What was obtained.
#[derive(Debug)]
pub(super) struct Obtained {
    pub(super) region: Region,
    pub(super) memfd: Option<OwnedFd>,
    pub(super) source: Source,
    pub(super) page_size: PageSize,
    pub(super) unavailable: Vec<SourceUnavailable>,
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

pub(super) fn obtain(request: &Request) -> Result<Obtained, BuildError> {
    if let Some((base, len)) = request.caller {
        return of_caller(request, base, len);
    }
    let mut unavailable = Vec::new();
    for &source in &request.sources {
        match attempt(request, source) {
            Ok((region, memfd)) => {
                return Ok(Obtained { region, memfd, source, page_size: source.page_size(), unavailable });
            }
            Err(Failure::Unavailable(reason)) => {
                let fix = fix(&reason, request.node);
                tracing::debug!(%source, %reason, "no memory from this source");
                unavailable.push(SourceUnavailable { source, reason, fix });
            }
            Err(Failure::Fatal(error)) => return Err(error),
        }
    }
    Err(BuildError::NoMemory { requested: request.bytes, unavailable })
}

fn of_caller(request: &Request, base: NonNull<u8>, len: usize) -> Result<Obtained, BuildError> {
    let start = base.as_ptr().addr();
    if !start.is_multiple_of(4096) || !len.is_multiple_of(4096) {
        return Err(BuildError::CallerAlignment { base: start, len });
    }
    // SAFETY: the contract of `ArenaBuilder::caller`: mapped, readable and writable until the arena is gone; the
    // alignment was just checked.
    let region = unsafe { Region::lent(base, len) };
    prepare(&region, request.node).inspect_err(|_| restore(&region, None, request.node))?;
    let source = Source::Caller;
    Ok(Obtained { region, memfd: None, source, page_size: source.page_size(), unavailable: Vec::new() })
}

/// Undoes what was done to the caller's memory, as far as possible.
pub(super) fn restore(region: &Region, residency: Option<&Residency>, node: Option<u32>) {
    let undone = [
        if residency == Some(&Residency::Locked) { region.unlock() } else { Ok(()) },
        if node.is_some() { numa::unbind(region) } else { Ok(()) },
        region.give_to_children(),
    ];
    for errno in undone.into_iter().filter_map(Result::err) {
        tracing::warn!(%errno, "the caller's memory was not completely restored");
    }
}

fn attempt(request: &Request, source: Source) -> Result<(Region, Option<OwnedFd>), Failure> {
    let page = source.page_size();
    let rounded = match (source.is_hugetlb(), request.bytes) {
        (true, bytes) => bytes.checked_next_multiple_of(page.bytes()),
        // Runs of less than 2 MiB are allocated as powers of two: this lets a small arena be one buffer.
        (false, ..SMALL) => Some(request.bytes.next_power_of_two().max(PageSize::Size4K.bytes())),
        (false, bytes) => bytes.checked_next_multiple_of(PageSize::Size4K.bytes()),
    };
    let no_space = UnavailableReason::NoAddressSpace { requested: rounded.unwrap_or(request.bytes) };
    let Some(len) = rounded.and_then(|bytes| usize::try_from(bytes).ok()) else {
        return Err(no_space.into());
    };
    let (region, fd) = match source {
        Source::Hugetlb1G | Source::Hugetlb2M => {
            (Region::hugetlb(len, page).map_err(|errno| hugetlb_error("mmap", errno, page, len))?, None)
        }
        Source::Memfd | Source::Memfd2M | Source::Memfd1G => {
            let fd =
                memfd::create(len as u64, page).map_err(|errno| hugetlb_error("memfd", errno, page, len))?;
            let region =
                Region::shared(fd.as_fd(), len).map_err(|errno| hugetlb_error("mmap", errno, page, len))?;
            (region, Some(fd))
        }
        Source::Transparent => (transparent(len, no_space)?, None),
        Source::Plain | Source::Caller => (plain(len, no_space)?, None),
    };
    prepare(&region, request.node).map_err(Failure::Fatal)?;
    if source.is_hugetlb() {
        populate(&region, request.node, page)?;
    } else if source == Source::Transparent {
        touch_transparent(&region)?;
    }
    Ok((region, fd))
}

/// Applies what must precede the first touch of a page.
fn prepare(region: &Region, node: Option<u32>) -> Result<(), BuildError> {
    region.keep_from_children().map_err(BuildError::Fork)?;
    let Some(node) = node else { return Ok(()) };
    numa::bind(region, node).map_err(|errno| BuildError::Node {
        node,
        online: hugepages::online_nodes(Path::new(SYS)),
        errno,
    })
}

/// Maps memory aligned to 2 MiB, so that large leaves and transparent hugepages fit it, and a pool's chunks of any order
/// are aligned to their size. It costs addresses, and no memory.
fn aligned(len: usize, no_space: UnavailableReason) -> Result<Region, UnavailableReason> {
    Region::anonymous(len, 2 << 20).map_err(|errno| match errno.raw() {
        libc::ENOMEM => no_space,
        _ => UnavailableReason::Kernel { call: "mmap", errno },
    })
}

fn plain(len: usize, no_space: UnavailableReason) -> Result<Region, UnavailableReason> {
    let region = aligned(len, no_space)?;
    // In mode `always` the pages would be hugepages, and the report wrong. A kernel without transparent hugepages
    // refuses the advice (EINVAL) and allocates plain pages anyway.
    let _ = region.ask_for_plain_pages();
    Ok(region)
}

fn transparent(len: usize, no_space: UnavailableReason) -> Result<Region, UnavailableReason> {
    match hugepages::thp(Path::new(SYS)) {
        Some(Thp::Never) => return Err(UnavailableReason::TransparentOff),
        None => return Err(UnavailableReason::NoSuchPages { page: PageSize::Size2M }),
        Some(Thp::Always | Thp::Madvise) => {}
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
    let huge = smaps::of_range(region.addr(), region.len()).map_or(0, |vma| vma.transparent);
    if touched.is_ok() && huge > 0 { Ok(()) } else { Err(UnavailableReason::PlainInstead) }
}

/// Allocates all of a hugetlb region's pages now: a page that is missing later raises a `SIGBUS`.
///
/// The reservation that `mmap` made does not suffice. It disregards nodes; and shrinking the pool at that moment, or
/// building 1 GiB pages from it, can take a reserved page.
fn populate(region: &Region, node: Option<u32>, page: PageSize) -> Result<(), UnavailableReason> {
    let Err(errno) = region.populate(region.len()) else { return Ok(()) };
    match (errno.raw(), node) {
        // Before Linux 5.14 there is only the reservation, which holds for no particular node.
        (libc::EINVAL, None) => Ok(()),
        (libc::EINVAL, Some(_)) => {
            Err(UnavailableReason::Kernel { call: "madvise(MADV_POPULATE_WRITE)", errno })
        }
        (_, Some(node)) => {
            Err(UnavailableReason::FewOnNode { node, page, pages: region.len() as u64 / page.bytes() })
        }
        (_, None) => {
            let pool =
                hugepages::pool(Path::new(SYS), page).ok_or(UnavailableReason::NoSuchPages { page })?;
            Err(too_few(&pool, page, region.len()))
        }
    }
}

/// Explains a failed mapping from the hugetlb pool.
fn hugetlb_error(call: &'static str, errno: Errno, page: PageSize, len: usize) -> UnavailableReason {
    if page == PageSize::Size4K {
        return match errno.raw() {
            libc::ENOMEM => UnavailableReason::NoAddressSpace { requested: len as u64 },
            _ => UnavailableReason::Kernel { call, errno },
        };
    }
    let pool = hugepages::pool(Path::new(SYS), page);
    match (errno.raw(), pool) {
        (libc::ENOMEM | libc::ENOSPC, Some(pool)) => too_few(&pool, page, len),
        (libc::EINVAL | libc::ENODEV | libc::ENOMEM, None) => UnavailableReason::NoSuchPages { page },
        _ => UnavailableReason::Kernel { call, errno },
    }
}

fn too_few(pool: &hugepages::HugetlbPool, page: PageSize, len: usize) -> UnavailableReason {
    UnavailableReason::FewHugepages {
        page,
        needed: len as u64 / page.bytes(),
        free: pool.available(),
        total: pool.total,
    }
}

/// Returns the shell command that fixes it, if there is one.
fn fix(reason: &UnavailableReason, node: Option<u32>) -> Option<String> {
    match reason {
        UnavailableReason::FewHugepages { page, needed, free, total } => {
            let want = total.saturating_add(needed.saturating_sub(*free));
            Some(hugepages::reserve_command(*page, want, node))
        }
        UnavailableReason::FewOnNode { page, pages, .. } => {
            let pool = node.and_then(|node| hugepages::node_pool(Path::new(SYS), node, *page))?;
            let short = pages.saturating_sub(pool.available());
            Some(hugepages::reserve_command(*page, pool.total.saturating_add(short), node))
        }
        UnavailableReason::TransparentOff => {
            Some("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled".to_owned())
        }
        UnavailableReason::PlainInstead => Some("echo 1 > /proc/sys/vm/compact_memory".to_owned()),
        UnavailableReason::NoSuchPages { .. }
        | UnavailableReason::NoAddressSpace { .. }
        | UnavailableReason::Kernel { .. } => None,
    }
}
