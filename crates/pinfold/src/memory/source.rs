//! The source of an arena's memory, and why a source is unavailable.

use crate::sys::Errno;
use crate::sys::control_group::GroupLimit;
use crate::sys::limits::{FileLimit, MapLimit, MemlockLimit};
use crate::sys::process::placed;
use pinfold_core::addr::PageSize;
use std::fmt;
use std::str::FromStr;

/// The source of an arena's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Source {
    /// 1 GiB pages of the hugetlb pool. The size is rounded up to them.
    Hugetlb1G,
    /// 2 MiB pages of the hugetlb pool. The size is rounded up to them.
    Hugetlb2M,
    /// Transparent hugepages of 2 MiB (`MADV_HUGEPAGE`), where the kernel can allocate them when
    /// memory is touched. The size is rounded up to them.
    Thp,
    /// 4 KiB pages.
    Plain,
    /// 4 KiB pages with a file descriptor, to be shared with another process
    /// ([`ArenaMemory::memfd`](crate::arena::ArenaMemory::memfd)).
    Memfd,
    /// Like `Memfd`, on 2 MiB pages of the hugetlb pool.
    Memfd2M,
    /// Like `Memfd`, on 1 GiB pages of the hugetlb pool.
    Memfd1G,
    /// Memory that the caller owns ([`ArenaBuilder::caller`](crate::arena::ArenaBuilder::caller));
    /// never tried by default.
    Caller,
}

impl Source {
    /// The sources that are tried by default, in this order.
    ///
    /// 1 GiB pages only where rounding the size up to them adds no more than an eighth of it, 2 MiB
    /// pages only for 2 MiB or more; otherwise they are neither tried nor reported as unavailable.
    pub const PREFERENCE: [Self; 4] = [Self::Hugetlb1G, Self::Hugetlb2M, Self::Thp, Self::Plain];

    /// All sources.
    pub const ALL: [Self; 8] = [
        Self::Hugetlb1G,
        Self::Hugetlb2M,
        Self::Thp,
        Self::Plain,
        Self::Memfd,
        Self::Memfd2M,
        Self::Memfd1G,
        Self::Caller,
    ];

    /// Returns the name that is used on a command line and in a report.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hugetlb1G => "hugetlb-1g",
            Self::Hugetlb2M => "hugetlb-2m",
            Self::Thp => "thp",
            Self::Plain => "plain",
            Self::Memfd => "memfd",
            Self::Memfd2M => "memfd-2m",
            Self::Memfd1G => "memfd-1g",
            Self::Caller => "caller",
        }
    }

    /// Returns the page size that the source is meant to provide.
    pub(crate) const fn page_size(self) -> PageSize {
        match self {
            Self::Hugetlb1G | Self::Memfd1G => PageSize::Size1G,
            Self::Hugetlb2M | Self::Memfd2M | Self::Thp => PageSize::Size2M,
            Self::Plain | Self::Memfd | Self::Caller => PageSize::Size4K,
        }
    }

    /// Returns whether its pages come from the hugetlb pool: always resident, and not counted
    /// against `RLIMIT_MEMLOCK`.
    pub const fn is_hugetlb(self) -> bool {
        matches!(self, Self::Hugetlb1G | Self::Hugetlb2M | Self::Memfd1G | Self::Memfd2M)
    }

    /// Returns whether it is tried by default for `bytes` bytes.
    pub(crate) fn is_warranted(self, bytes: u64) -> bool {
        let page = self.page_size();
        match page {
            PageSize::Size4K => true,
            PageSize::Size2M => bytes >= page.bytes(),
            PageSize::Size1G => {
                let added = bytes.next_multiple_of(page.bytes()) - bytes;
                bytes >= page.bytes() && added <= bytes / 8
            }
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The error of parsing an unknown source name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "unknown memory source {0:?}: hugetlb-1g, hugetlb-2m, thp, plain, memfd, memfd-2m, memfd-1g"
)]
pub struct UnknownSource(pub String);

impl FromStr for Source {
    type Err = UnknownSource;
    fn from_str(name: &str) -> Result<Self, UnknownSource> {
        let named =
            Self::ALL.into_iter().find(|source| source.name() == name && *source != Self::Caller);
        named.ok_or_else(|| UnknownSource(name.to_owned()))
    }
}

/// A source that was tried and is unavailable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceUnavailable {
    /// The source.
    pub source: Source,
    /// Why it is unavailable.
    pub reason: UnavailableReason,
    /// The shell command that fixes it, if there is one.
    pub fix: Option<String>,
}

impl fmt::Display for SourceUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.source, self.reason)?;
        match &self.fix {
            Some(command) => write!(f, "; fix: {}", placed(command)),
            None => Ok(()),
        }
    }
}

/// Why a source is unavailable.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnavailableReason {
    /// The hugetlb pool has too few free pages.
    #[error("{needed} free pages of {page} are needed, {free} are free of {total} reserved")]
    FewHugepages {
        /// Their size.
        page: PageSize,
        /// The number that the arena needs.
        needed: u64,
        /// The number that is free and not reserved for other mappings.
        free: u64,
        /// The number that the pool has.
        total: u64,
    },
    /// Limits of control groups allow too few of them.
    #[error("{needed} bytes on pages of {page} are needed, and a control group allows fewer: {}", list(.limits))]
    ControlGroup {
        /// Their size.
        page: PageSize,
        /// The number of bytes that the arena needs.
        needed: u64,
        /// The limits that refuse them.
        limits: Vec<GroupLimit>,
    },
    /// The kernel or the processor does not support pages of this size.
    #[error("this kernel does not support pages of {page}")]
    NoSuchPages {
        /// Their size.
        page: PageSize,
    },
    /// Transparent hugepages are switched off.
    #[error("transparent hugepages are switched off (never)")]
    TransparentOff,
    /// Transparent hugepages are switched off for this process, by itself or by a program that
    /// started it.
    #[error(
        "transparent hugepages are switched off for this process (PR_SET_THP_DISABLE): start it by a program that does not"
    )]
    TransparentDisabled,
    /// No 2 MiB of memory are free in one piece.
    #[error("no 2 MiB of memory are free in one piece (/proc/buddyinfo): memory is fragmented")]
    Fragmented,
    /// Transparent hugepages are on and memory is not fragmented, but the first page is a plain
    /// one.
    #[error("the kernel allocated plain pages instead")]
    PlainInstead,
    /// The requested NUMA node has too few such pages.
    #[error("NUMA node {node} has too few free pages of {page}: {pages} are needed")]
    FewOnNode {
        /// The node.
        node: u32,
        /// Their size.
        page: PageSize,
        /// The number that the arena needs.
        pages: u64,
    },
    /// Rounded up to the page size, the size does not fit in 64 bits or in the address space.
    #[error(
        "{requested} bytes do not fit in this process's address space or the system's commit limit"
    )]
    NoAddressSpace {
        /// The requested size in bytes, after rounding.
        requested: u64,
    },
    /// A limit on the process's mappings is too small.
    #[error("{}: {requested} bytes requested, {} of {} left", .limit.setting, .limit.left, .limit.limit)]
    MapLimit {
        /// The requested size in bytes, after rounding.
        requested: u64,
        /// The limit.
        limit: MapLimit,
    },
    /// A memory file may not be as long.
    #[error(transparent)]
    FileLimit(FileLimit),
    /// Another error of the kernel.
    #[error("{call}: {errno}")]
    Kernel {
        /// The system call.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
}

fn list(limits: &[GroupLimit]) -> String {
    limits.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The means that keeps an arena's pages in memory.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Residency {
    /// They are hugetlb pages, which are never swapped out and not counted against
    /// `RLIMIT_MEMLOCK`.
    Hugetlb,
    /// They are locked (`mlock2`, each when it is first touched).
    Locked,
    /// Each mapping pins its memory (`vfio`, `iommufd`): all of an arena that is mapped whole, else
    /// the mapped parts.
    ByMapping,
    /// Nothing: they could not be locked, and the kernel may swap them out. That is harmless behind
    /// the software IOMMU, and where mappings pin.
    NotLocked(NotLocked),
}

impl fmt::Display for Residency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hugetlb => f.write_str("resident (hugetlb)"),
            Self::Locked => f.write_str("locked"),
            Self::ByMapping => f.write_str("pinned while mapped"),
            Self::NotLocked(reason) => write!(f, "not locked ({reason})"),
        }
    }
}

/// Why memory could not be locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotLocked {
    /// `RLIMIT_MEMLOCK` is too small.
    #[error(
        "RLIMIT_MEMLOCK: {requested} bytes requested, {used} locked already, {allowed} allowed; {}",
        .limit.raise_command(*.requested)
    )]
    Limit {
        /// The number of bytes to be locked.
        requested: u64,
        /// The number of bytes that this process has locked already.
        used: u64,
        /// The number of bytes that it may lock: the soft limit.
        allowed: u64,
        /// The complete limit.
        limit: MemlockLimit,
    },
    /// Another error of the kernel.
    #[error("mlock2: {0}")]
    Kernel(Errno),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_names_parse_except_the_callers_memory() {
        for source in Source::ALL {
            let parsed = source.name().parse();
            assert_eq!(parsed.is_ok(), source != Source::Caller, "{source}");
            assert!(parsed.is_err() || parsed == Ok(source));
        }
        assert!("hugetlb".parse::<Source>().unwrap_err().to_string().contains("hugetlb-2m"));
    }

    #[test]
    fn large_pages_are_tried_by_default_only_if_they_waste_little() {
        let warranted = |bytes: u64| Source::PREFERENCE.map(|source| source.is_warranted(bytes));
        assert_eq!(warranted(4096), [false, false, false, true]);
        assert_eq!(warranted((2 << 20) - 1), [false, false, false, true]);
        assert_eq!(warranted(2 << 20), [false, true, true, true]);
        assert_eq!(warranted(1 << 30), [true, true, true, true]);
        assert_eq!(warranted((1 << 30) + 1), [false, true, true, true], "would nearly double it");
        assert_eq!(warranted((8 << 30) + 1), [true, true, true, true]);
    }

    #[test]
    fn not_locked_names_the_request_the_limit_and_the_command() {
        let limit = MemlockLimit {
            soft: Some(8 << 20),
            hard: Some(64 << 20),
            used: Some(4096),
            lifted: false,
        };
        let refused = NotLocked::Limit { requested: 16 << 20, used: 4096, allowed: 8 << 20, limit };
        assert_eq!(
            refused.to_string(),
            "RLIMIT_MEMLOCK: 16777216 bytes requested, 4096 locked already, 8388608 allowed; ulimit -l 16388"
        );
    }
}
