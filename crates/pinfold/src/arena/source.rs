//! Where an arena's memory comes from, and what is said about what could not be had.

use crate::sys::Errno;
use crate::sys::limits::MemlockLimit;
use pinfold_core::addr::PageSize;
use std::fmt;
use std::str::FromStr;

/// Where an arena's memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Source {
    /// 1 GiB pages of the hugetlb pool. The size is rounded up to them.
    Hugetlb1G,
    /// 2 MiB pages of the hugetlb pool. The size is rounded up to them.
    Hugetlb2M,
    /// 2 MiB pages that the kernel puts together as memory is touched (`MADV_HUGEPAGE`), where it can.
    Transparent,
    /// 4 KiB pages.
    Plain,
    /// 4 KiB pages with a file descriptor, to be shared with another process ([`Arena::memfd`](super::Arena::memfd)).
    Memfd,
    /// The same on 2 MiB pages of the hugetlb pool.
    Memfd2M,
    /// The same on 1 GiB pages of the hugetlb pool.
    Memfd1G,
    /// Memory that the caller owns ([`ArenaBuilder::caller`](super::ArenaBuilder::caller)); never tried by itself.
    Caller,
}

impl Source {
    /// What is tried where the caller names nothing, in this order.
    ///
    /// 1 GiB pages only where rounding the size up to them adds no more than an eighth of it, 2 MiB pages only for
    /// 2 MiB or more; else they are not tried, and not listed as refused.
    pub const PREFERENCE: [Self; 4] = [Self::Hugetlb1G, Self::Hugetlb2M, Self::Transparent, Self::Plain];

    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Hugetlb1G,
        Self::Hugetlb2M,
        Self::Transparent,
        Self::Plain,
        Self::Memfd,
        Self::Memfd2M,
        Self::Memfd1G,
        Self::Caller,
    ];

    /// What it is called on a command line and in a report.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hugetlb1G => "hugetlb-1g",
            Self::Hugetlb2M => "hugetlb-2m",
            Self::Transparent => "transparent",
            Self::Plain => "plain",
            Self::Memfd => "memfd",
            Self::Memfd2M => "memfd-2m",
            Self::Memfd1G => "memfd-1g",
            Self::Caller => "caller",
        }
    }

    /// The page size that it gives when it gives what it is for.
    pub const fn page_size(self) -> PageSize {
        match self {
            Self::Hugetlb1G | Self::Memfd1G => PageSize::Size1G,
            Self::Hugetlb2M | Self::Memfd2M | Self::Transparent => PageSize::Size2M,
            Self::Plain | Self::Memfd | Self::Caller => PageSize::Size4K,
        }
    }

    /// Whether its pages come from the hugetlb pool: always resident, and not counted against `RLIMIT_MEMLOCK`.
    pub const fn is_hugetlb(self) -> bool {
        matches!(self, Self::Hugetlb1G | Self::Hugetlb2M | Self::Memfd1G | Self::Memfd2M)
    }

    /// Whether it is worth trying, unasked, for `bytes` bytes.
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

/// A word that is no source.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "no memory source is called {0:?}: hugetlb-1g, hugetlb-2m, transparent, plain, memfd, memfd-2m, memfd-1g"
)]
pub struct UnknownSource(pub String);

impl FromStr for Source {
    type Err = UnknownSource;
    fn from_str(name: &str) -> Result<Self, UnknownSource> {
        let named = Self::ALL.into_iter().find(|source| source.name() == name && *source != Self::Caller);
        named.ok_or_else(|| UnknownSource(name.to_owned()))
    }
}

/// A source that was tried and gave nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceRefused {
    /// What was tried.
    pub source: Source,
    /// Why it gave nothing.
    pub why: Why,
    /// The command that mends it, where one does, as a user types it into a shell.
    pub remedy: Option<String>,
}

impl fmt::Display for SourceRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.source, self.why)?;
        match &self.remedy {
            Some(command) => write!(f, "; fix: {command}"),
            None => Ok(()),
        }
    }
}

/// Why a source gave nothing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// The hugetlb pool has too few free pages.
    #[error("{needed} free pages of {page} are needed, {free} are free of {total} reserved")]
    FewHugepages {
        /// Of which size.
        page: PageSize,
        /// How many the arena needs.
        needed: u64,
        /// How many are free and not promised to somebody else.
        free: u64,
        /// How many the pool has.
        total: u64,
    },
    /// The kernel or the processor has no pages of this size.
    #[error("this kernel has no pages of {page}")]
    NoSuchPages {
        /// Of which size.
        page: PageSize,
    },
    /// Transparent hugepages are switched off.
    #[error("transparent hugepages are switched off (never)")]
    TransparentOff,
    /// Transparent hugepages are on, but the first touch gave a plain page.
    #[error(
        "the kernel gave plain pages instead (memory is fragmented, or the process has switched them off)"
    )]
    PlainInstead,
    /// The NUMA node that was asked for has too few such pages.
    #[error("NUMA node {node} has too few free pages of {page}: {pages} are needed")]
    FewOnNode {
        /// Which node.
        node: u32,
        /// Of which size.
        page: PageSize,
        /// How many the arena needs.
        pages: u64,
    },
    /// Rounded up to the page size, the size does not fit in 64 bits or in the address space.
    #[error("{asked} bytes do not fit in this process's address space or the system's commit limit")]
    NoRoom {
        /// How many bytes were asked for, after rounding.
        asked: u64,
    },
    /// Another refusal of the kernel.
    #[error("{call}: {errno}")]
    Kernel {
        /// The system call.
        call: &'static str,
        /// What it said.
        errno: Errno,
    },
}

/// What keeps an arena's pages from being taken away.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Residency {
    /// They are hugetlb pages, which are never swapped out; `RLIMIT_MEMLOCK` does not count them.
    Hugetlb,
    /// They are locked (`mlock2`, from when each is first touched).
    Locked,
    /// Each mapping pins what it maps (`vfio`, `iommufd`): all of an arena that is exposed whole, else what is mapped.
    ByMapping,
    /// Nothing does: they could not be locked. Right all the same where "physical" is an address of this process
    /// (the software IOMMU), or where the backend pins by itself; the kernel may swap them out.
    NotLocked(NotLocked),
}

/// Why memory could not be locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotLocked {
    /// `RLIMIT_MEMLOCK` is too small.
    #[error(
        "RLIMIT_MEMLOCK: {asked} bytes asked, {used} locked already, {allowed} allowed; {}",
        .limit.raise_command(*.asked)
    )]
    Limit {
        /// How many bytes were to be locked.
        asked: u64,
        /// How many this process has locked already.
        used: u64,
        /// How many it may lock in all: the soft limit.
        allowed: u64,
        /// The limit in full.
        limit: MemlockLimit,
    },
    /// Another refusal of the kernel.
    #[error("mlock2: {0}")]
    Kernel(Errno),
}

impl NotLocked {
    /// The command that mends it, where one does.
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::Limit { asked, limit, .. } => Some(limit.raise_command(*asked)),
            Self::Kernel(_) => None,
        }
    }
}

/// What an arena got, and what it did not get.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Account {
    /// How many bytes were asked for.
    pub asked_bytes: u64,
    /// How many it has: rounded up as [`ArenaBuilder::size`](super::ArenaBuilder::size) says.
    pub bytes: u64,
    /// Where its memory comes from.
    pub source: Source,
    /// The page size of the source. With transparent hugepages: what the first touch gave;
    /// [`Arena::backing`](super::Arena::backing) says what the rest is.
    pub page_size: PageSize,
    /// The NUMA node that its pages are bound to.
    pub numa_node: Option<u32>,
    /// What keeps its pages in memory.
    pub residency: Residency,
    /// What was tried before, and gave nothing.
    pub refused: Vec<SourceRefused>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways_but_for_the_callers_memory() {
        for source in Source::ALL {
            let parsed = source.name().parse();
            assert_eq!(parsed.is_ok(), source != Source::Caller, "{source}");
            assert!(parsed.is_err() || parsed == Ok(source));
        }
        assert!("hugetlb".parse::<Source>().unwrap_err().to_string().contains("hugetlb-2m"));
    }

    #[test]
    fn large_pages_are_tried_only_where_they_waste_little() {
        let warranted = |bytes: u64| Source::PREFERENCE.map(|source| source.is_warranted(bytes));
        assert_eq!(warranted(4096), [false, false, false, true]);
        assert_eq!(warranted((2 << 20) - 1), [false, false, false, true]);
        assert_eq!(warranted(2 << 20), [false, true, true, true]);
        assert_eq!(warranted(1 << 30), [true, true, true, true]);
        assert_eq!(warranted((1 << 30) + 1), [false, true, true, true], "would nearly double it");
        assert_eq!(warranted((8 << 30) + 1), [true, true, true, true]);
    }

    #[test]
    fn a_refusal_names_what_was_asked_used_and_allowed_and_the_command() {
        let limit =
            MemlockLimit { soft: Some(8 << 20), hard: Some(64 << 20), used: Some(4096), lifted: false };
        let refused = NotLocked::Limit { asked: 16 << 20, used: 4096, allowed: 8 << 20, limit };
        assert_eq!(
            refused.to_string(),
            "RLIMIT_MEMLOCK: 16777216 bytes asked, 4096 locked already, 8388608 allowed; ulimit -l 16388"
        );
        let refused = NotLocked::Limit { asked: 64 << 20, used: 4096, allowed: 8 << 20, limit };
        assert_eq!(
            refused.remedy().unwrap(),
            "sudo prlimit --pid $$ --memlock=67112960:67112960",
            "more than the hard limit: only root can raise that"
        );
    }
}
