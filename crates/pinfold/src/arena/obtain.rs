//! Getting memory from the system: one source after the other until one gives it.

use super::BuildError;
use super::source::{Residency, Source, SourceRefused, Why};
use crate::probe::hugepages::{self, Thp};
use crate::sys::region::Region;
use crate::sys::{Errno, memfd, numa, smaps};
use pinfold_core::addr::PageSize;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

/// What is to be had.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) bytes: u64,
    pub(super) sources: Vec<Source>,
    pub(super) node: Option<u32>,
    pub(super) lent: Option<(NonNull<u8>, usize)>,
}

/// What was had.
#[derive(Debug)]
pub(super) struct Obtained {
    pub(super) region: Region,
    pub(super) memfd: Option<OwnedFd>,
    pub(super) source: Source,
    pub(super) page_size: PageSize,
    pub(super) refused: Vec<SourceRefused>,
}

/// Why a source gave nothing: then the next one is tried, or (a wrong node, a kernel without `MADV_DONTFORK`) none is.
enum Stop {
    Next(Why),
    Here(BuildError),
}

impl From<Why> for Stop {
    fn from(why: Why) -> Self {
        Self::Next(why)
    }
}

/// Arenas below this have a zone that is larger than they are.
const SMALL: u64 = PageSize::Size2M.bytes();
const SYS: &str = "/sys";

pub(super) fn obtain(plan: &Plan) -> Result<Obtained, BuildError> {
    if let Some((base, len)) = plan.lent {
        return lent(plan, base, len);
    }
    let mut refused = Vec::new();
    for &source in &plan.sources {
        match attempt(plan, source) {
            Ok((region, memfd)) => {
                return Ok(Obtained { region, memfd, source, page_size: source.page_size(), refused });
            }
            Err(Stop::Next(why)) => {
                let remedy = remedy(&why, plan.node);
                tracing::debug!(%source, %why, "no memory from this source");
                refused.push(SourceRefused { source, why, remedy });
            }
            Err(Stop::Here(error)) => return Err(error),
        }
    }
    Err(BuildError::NoMemory { asked: plan.bytes, refused })
}

fn lent(plan: &Plan, base: NonNull<u8>, len: usize) -> Result<Obtained, BuildError> {
    let start = base.as_ptr().addr();
    if !start.is_multiple_of(4096) || !len.is_multiple_of(4096) {
        return Err(BuildError::CallerAlignment { base: start, len });
    }
    // SAFETY: the contract of `ArenaBuilder::caller`: mapped, readable and writable until the arena is gone; the
    // alignment was just checked.
    let region = unsafe { Region::lent(base, len) };
    match settle(&region, plan.node) {
        Ok(()) => {}
        Err(error) => {
            hand_back(&region, None, plan.node);
            return Err(error);
        }
    }
    let source = Source::Caller;
    Ok(Obtained { region, memfd: None, source, page_size: source.page_size(), refused: Vec::new() })
}

/// Undoes what was done to the caller's memory. What fails is not done twice: the memory is the caller's again.
pub(super) fn hand_back(region: &Region, residency: Option<&Residency>, node: Option<u32>) {
    let undone = [
        if residency == Some(&Residency::Locked) { region.unlock() } else { Ok(()) },
        if node.is_some() { numa::unbind(region) } else { Ok(()) },
        region.give_to_children(),
    ];
    for errno in undone.into_iter().filter_map(Result::err) {
        tracing::warn!(%errno, "the caller's memory goes back not quite as it came");
    }
}

fn attempt(plan: &Plan, source: Source) -> Result<(Region, Option<OwnedFd>), Stop> {
    let page = source.page_size();
    let rounded = match (source.is_hugetlb(), plan.bytes) {
        (true, bytes) => bytes.checked_next_multiple_of(page.bytes()),
        // Runs of less than 2 MiB are found as powers of two: then all of a small arena can be one buffer.
        (false, ..SMALL) => Some(plan.bytes.next_power_of_two().max(PageSize::Size4K.bytes())),
        (false, bytes) => bytes.checked_next_multiple_of(PageSize::Size4K.bytes()),
    };
    let no_room = Why::NoRoom { asked: rounded.unwrap_or(plan.bytes) };
    let Some(len) = rounded.and_then(|bytes| usize::try_from(bytes).ok()) else { return Err(no_room.into()) };
    let (region, fd) = match source {
        Source::Hugetlb1G | Source::Hugetlb2M => {
            (Region::hugetlb(len, page).map_err(|errno| few_hugepages("mmap", errno, page, len))?, None)
        }
        Source::Memfd | Source::Memfd2M | Source::Memfd1G => {
            let fd =
                memfd::create(len as u64, page).map_err(|errno| few_hugepages("memfd", errno, page, len))?;
            let region =
                Region::shared(fd.as_fd(), len).map_err(|errno| few_hugepages("mmap", errno, page, len))?;
            (region, Some(fd))
        }
        Source::Transparent => (transparent(len, no_room)?, None),
        Source::Plain | Source::Caller => (plain(len, no_room)?, None),
    };
    settle(&region, plan.node).map_err(Stop::Here)?;
    if source.is_hugetlb() {
        take_all(&region, plan.node, page)?;
    } else if source == Source::Transparent {
        touch_transparent(&region)?;
    }
    Ok((region, fd))
}

/// What has to be done before a page is touched.
fn settle(region: &Region, node: Option<u32>) -> Result<(), BuildError> {
    region.keep_from_children().map_err(BuildError::Fork)?;
    let Some(node) = node else { return Ok(()) };
    numa::bind(region, node).map_err(|errno| BuildError::Node {
        node,
        online: hugepages::online_nodes(Path::new(SYS)),
        errno,
    })
}

/// 2 MiB-aligned memory, so that large leaves and transparent hugepages fit it, and a pool's chunks of any order lie at
/// multiples of their size. It costs addresses, and no memory.
fn aligned(len: usize, no_room: Why) -> Result<Region, Why> {
    Region::anonymous(len, 2 << 20).map_err(|errno| match errno.raw() {
        libc::ENOMEM => no_room,
        _ => Why::Kernel { call: "mmap", errno },
    })
}

fn plain(len: usize, no_room: Why) -> Result<Region, Why> {
    let region = aligned(len, no_room)?;
    // Where the mode is `always` we would get hugepages unasked, and the account would be wrong. A kernel without
    // transparent hugepages refuses the advice (EINVAL) and gives plain pages anyway.
    let _ = region.ask_for_plain_pages();
    Ok(region)
}

fn transparent(len: usize, no_room: Why) -> Result<Region, Why> {
    match hugepages::thp(Path::new(SYS)) {
        Some(Thp::Never) => return Err(Why::TransparentOff),
        None => return Err(Why::NoSuchPages { page: PageSize::Size2M }),
        Some(Thp::Always | Thp::Madvise) => {}
    }
    let region = aligned(len, no_room)?;
    region.ask_for_hugepages().map_err(|errno| Why::Kernel { call: "madvise(MADV_HUGEPAGE)", errno })?;
    Ok(region)
}

/// Touches the first page, and looks at what came: advice is no promise.
fn touch_transparent(region: &Region) -> Result<(), Why> {
    let touched = region.memory().write_u8(0, 0);
    let got = smaps::of_range(region.addr(), region.len()).map_or(0, |vma| vma.transparent);
    if touched.is_ok() && got > 0 { Ok(()) } else { Err(Why::PlainInstead) }
}

/// Takes all of a hugetlb region's pages from the pool now: what is missing later is no error but a `SIGBUS`.
///
/// The reservation that `mmap` made does not suffice. It is made without regard to nodes; and a pool that is made
/// smaller at that moment, or 1 GiB pages that are put together out of it, can take a page that was promised.
fn take_all(region: &Region, node: Option<u32>, page: PageSize) -> Result<(), Why> {
    let Err(errno) = region.populate(region.len()) else { return Ok(()) };
    match (errno.raw(), node) {
        // Before Linux 5.14 the reservation is all there is; for a node it is not even that.
        (libc::EINVAL, None) => Ok(()),
        (libc::EINVAL, Some(_)) => Err(Why::Kernel { call: "madvise(MADV_POPULATE_WRITE)", errno }),
        (_, Some(node)) => Err(Why::FewOnNode { node, page, pages: region.len() as u64 / page.bytes() }),
        (_, None) => {
            let pool = hugepages::pool(Path::new(SYS), page).ok_or(Why::NoSuchPages { page })?;
            Err(few(&pool, page, region.len()))
        }
    }
}

/// What a refused mapping from the hugetlb pool means.
fn few_hugepages(call: &'static str, errno: Errno, page: PageSize, len: usize) -> Why {
    if page == PageSize::Size4K {
        return match errno.raw() {
            libc::ENOMEM => Why::NoRoom { asked: len as u64 },
            _ => Why::Kernel { call, errno },
        };
    }
    let pool = hugepages::pool(Path::new(SYS), page);
    match (errno.raw(), pool) {
        (libc::ENOMEM | libc::ENOSPC, Some(pool)) => few(&pool, page, len),
        (libc::EINVAL | libc::ENODEV | libc::ENOMEM, None) => Why::NoSuchPages { page },
        _ => Why::Kernel { call, errno },
    }
}

fn few(pool: &hugepages::HugetlbPool, page: PageSize, len: usize) -> Why {
    Why::FewHugepages { page, needed: len as u64 / page.bytes(), free: pool.available(), total: pool.total }
}

/// The command that mends it, where one does.
fn remedy(why: &Why, node: Option<u32>) -> Option<String> {
    match why {
        Why::FewHugepages { page, needed, free, total } => {
            let want = total.saturating_add(needed.saturating_sub(*free));
            Some(hugepages::reserve_command(*page, want, node))
        }
        Why::FewOnNode { page, pages, .. } => {
            let pool = node.and_then(|node| hugepages::node_pool(Path::new(SYS), node, *page))?;
            let short = pages.saturating_sub(pool.available());
            Some(hugepages::reserve_command(*page, pool.total.saturating_add(short), node))
        }
        Why::TransparentOff => Some("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled".to_owned()),
        Why::PlainInstead => Some("echo 1 > /proc/sys/vm/compact_memory".to_owned()),
        Why::NoSuchPages { .. } | Why::NoRoom { .. } | Why::Kernel { .. } => None,
    }
}
