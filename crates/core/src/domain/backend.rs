//! What keeps a domain's table.

use crate::access::Access;
use crate::addr::IovaRange;
use crate::invalidate::{InvalidationStats, Ticket, WaitError, WaitLimit};
use crate::iova::IovaError;
use crate::mem::DmaMemory;
use crate::table::TableError;
use alloc::string::String;
use core::task::Poll;

/// Why a domain or its backend refused. Nothing has changed when one is returned, except where it says so.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// Mappings are made of whole pages.
    #[error(
        "memory of {len:#x} bytes at {addr:#x} can not be mapped: start and length must be multiples of 4096, and there must be at least one page"
    )]
    NotPages {
        /// Where the memory starts in this process.
        addr: usize,
        /// How many bytes it has.
        len: usize,
    },
    /// The memory and the range of I/O virtual addresses have different lengths.
    #[error("{memory_bytes:#x} bytes of memory do not fill {iova}")]
    LengthsDiffer {
        /// The range.
        iova: IovaRange,
        /// How many bytes of memory.
        memory_bytes: usize,
    },
    /// The memory was never admitted to the domain, or it was expelled.
    #[error(
        "memory of {len:#x} bytes at {addr:#x} was not admitted to this domain: register_memory it (or allocate it from an arena of this domain) first"
    )]
    NotRegistered {
        /// Where the memory starts in this process.
        addr: usize,
        /// How many bytes it has.
        len: usize,
    },
    /// Memory is admitted once.
    #[error("memory of {len:#x} bytes at {addr:#x} overlaps memory that is admitted already")]
    AlreadyRegistered {
        /// Where the memory starts in this process.
        addr: usize,
        /// How many bytes it has.
        len: usize,
    },
    /// No memory for the account of it.
    #[error("{bytes} bytes of memory for {what} could not be had (system error {code})")]
    NoMemory {
        /// For what.
        what: &'static str,
        /// How many bytes.
        bytes: usize,
        /// The system's error number.
        code: i32,
    },
    /// No I/O virtual addresses.
    #[error(transparent)]
    Iova(#[from] IovaError),
    /// The table refused.
    #[error(transparent)]
    Table(#[from] TableError),
    /// Access was taken back, but the flush has not completed: what it covers stays reachable until it does.
    #[error(transparent)]
    Flush(#[from] WaitError),
    /// The device was not told of a map in time; the map was taken back.
    #[error("a map of {iova} was taken back, because the device could not be told of it in time: {flush}")]
    MapNotFlushed {
        /// What was being mapped.
        iova: IovaRange,
        /// Why the device was not told.
        flush: WaitError,
    },
    /// A map failed in the middle, and the flush of what had been mapped of it has not completed: it stays reachable.
    #[error("a map of {iova} failed in the middle, and taking it back failed too: {flush}")]
    RollbackIncomplete {
        /// What was being mapped.
        iova: IovaRange,
        /// Why taking it back failed.
        flush: WaitError,
    },
    /// The kernel keeps the table, and has no entry left in it.
    #[error(
        "all {limit} entries that the kernel allows an I/O address space are in use: map fewer and larger pieces \
         (an arena that is exposed whole is one), or raise the limit: {remedy}"
    )]
    NoEntries {
        /// How many there are.
        limit: u64,
        /// The command that raises it.
        remedy: String,
    },
    /// The kernel pins what it maps, and this process may not pin so much.
    #[error(
        "{asked} more bytes can not be pinned: RLIMIT_MEMLOCK allows {limit}, of which {used} are in use; {remedy}"
    )]
    LockedMemory {
        /// How many bytes were to be mapped.
        asked: u64,
        /// How many are pinned or locked.
        used: u64,
        /// How many may be.
        limit: u64,
        /// The command that raises the limit.
        remedy: String,
    },
    /// The IOMMU does not translate these addresses, or something is mapped at them.
    #[error("{iova} can not be mapped: it is in use, or outside what this IOMMU translates")]
    Unmappable {
        /// The range.
        iova: IovaRange,
    },
    /// The addresses are no part of the reserved range, or the range is another domain's.
    #[error("{iova} is no part of the range that was reserved in this domain")]
    NotReserved {
        /// The range.
        iova: IovaRange,
    },
    /// Nothing translates here, so no addresses can be chosen.
    #[error(
        "without an IOMMU no addresses can be chosen for memory: build the arena with MappingPolicy::Whole (--protect static)"
    )]
    NoTranslation,
    /// Without translation memory must be in one piece.
    #[error(
        "{len:#x} bytes at {addr:#x} are not in one piece of physical memory (only {run:#x} from the start are), and there is no IOMMU to make them one: use an arena of one hugepage"
    )]
    NotContiguous {
        /// Where the memory starts in this process.
        addr: usize,
        /// How many bytes it has.
        len: usize,
        /// How many bytes from its start are in one piece.
        run: usize,
    },
    /// Without translation memory must stay where it is.
    #[error(
        "the kernel may move the {len:#x} bytes at {addr:#x} to other pages, and there is no IOMMU to follow them: use an arena from hugetlb-2m or hugetlb-1g"
    )]
    Movable {
        /// Where the memory starts in this process.
        addr: usize,
        /// How many bytes it has.
        len: usize,
    },
    /// Where memory is in physical memory can not be known.
    #[error("where the memory at {addr:#x} is can not be known: that needs CAP_SYS_ADMIN; try it with sudo")]
    PhysAddrUnknown {
        /// Where the memory starts in this process.
        addr: usize,
    },
    /// The kernel refused.
    #[error("{call} of {iova} failed (system error {code}): nothing was mapped")]
    System {
        /// Which call.
        call: &'static str,
        /// The range.
        iova: IovaRange,
        /// The system's error number.
        code: i32,
    },
    /// Access could not be taken back.
    #[error("access could not be taken back: the memory stays reachable and is not used again")]
    NotRevoked,
}

impl BackendError {
    /// Whether a device may still reach the memory, although the call failed: then it must not be used again, unless
    /// the [late](Self::late_ticket) flush is seen to complete.
    pub fn stays_reachable(&self) -> bool {
        matches!(self, Self::RollbackIncomplete { .. } | Self::NotRevoked | Self::Flush(_))
    }

    /// The ticket after which no device reaches the memory any more, where it is only late.
    pub fn late_ticket(&self) -> Option<Ticket> {
        match self {
            Self::RollbackIncomplete { flush: WaitError::TimedOut { ticket, .. }, .. }
            | Self::Flush(WaitError::TimedOut { ticket, .. }) => Some(*ticket),
            _ => None,
        }
    }
}

/// What a backend has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct BackendStats {
    /// The invalidation queue's account.
    pub invalidations: InvalidationStats,
    /// Table pages in use.
    pub table_pages: u64,
    /// Table pages that wait for a flush before they can be used again.
    pub table_pages_retired: u64,
    /// Mappings in the kernel's table, where the kernel keeps it.
    pub entries: u64,
    /// How many of these the kernel allows; `None` where it sets no limit, or keeps no table.
    pub entries_limit: Option<u64>,
    /// The most that there were at once.
    pub entries_peak: u64,
    /// Bytes that are pinned for these mappings; what is mapped twice counts twice.
    pub pinned_bytes: u64,
}

/// What keeps a domain's table: a short list of operations, a file each.
pub trait Backend: Send + Sync {
    /// `soft`, `vfio`, `none` ...
    fn name(&self) -> &'static str;

    /// The memory may be mapped from now until [`unregister_memory`](Self::unregister_memory).
    ///
    /// # Errors
    /// [`BackendError::AlreadyRegistered`] where part of it is.
    ///
    /// # Safety
    /// The caller keeps the memory valid until `unregister_memory` has returned.
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;

    /// The memory goes away: when this returns, no device reaches it through this backend, whatever is mapped.
    fn unregister_memory(&self, memory: DmaMemory);

    /// Gives the device `access` to `memory` at `iova`. When it returns, the device finds it.
    ///
    /// # Errors
    /// On failure nothing has changed and no device reaches the memory; except where the error
    /// [says so](BackendError::stays_reachable).
    fn map(&self, iova: IovaRange, memory: DmaMemory, access: Access) -> Result<(), BackendError>;

    /// Takes access to all of `ranges` back and asks for one flush of them all. The device can reach them until the
    /// ticket is done. Allocates nothing.
    ///
    /// # Errors
    /// After one, a device may reach any of the ranges for ever.
    fn revoke(&self, ranges: &mut dyn Iterator<Item = IovaRange>) -> Result<Ticket, BackendError>;

    /// Whether the flush is over. [`Ticket::NEVER`] never is.
    fn is_completed(&self, ticket: Ticket) -> bool;

    /// Waits until it is, or its deadline has passed.
    ///
    /// # Errors
    /// [`BackendError::Flush`]: what the flush covers may be reached until it completes, which may be
    /// [never](WaitError::UnitFailed).
    fn wait(&self, ticket: Ticket) -> Result<(), BackendError>;

    /// Waits until it is, or `limit` is reached, which counts from now: for a ticket past its deadline.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait), which it is for a backend whose tickets are done when they are given out.
    fn wait_for(&self, ticket: Ticket, limit: WaitLimit) -> Result<(), BackendError> {
        let _ = limit;
        self.wait(ticket)
    }

    /// Returns how a [`wait`](Self::wait) would end, if it would end now, without waiting. By default, deadlines are not
    /// noticed.
    fn check(&self, ticket: Ticket) -> Poll<Result<(), BackendError>> {
        if self.is_completed(ticket) || self.has_failed() {
            Poll::Ready(self.wait(ticket))
        } else {
            Poll::Pending
        }
    }

    /// Whether flushes will never complete again: then a ticket that is not done never is.
    fn has_failed(&self) -> bool {
        false
    }

    /// What has been done so far.
    fn stats(&self) -> BackendStats;

    /// Whether it translates: else a device finds memory at its physical address, and all other memory too.
    fn translates(&self) -> bool {
        true
    }

    /// Whether what is mapped is pinned by the mapping itself, and charged to the process by that.
    fn pins(&self) -> bool {
        false
    }

    /// Where memory has to be mapped, if that is nobody's to choose: without translation, at its physical address.
    ///
    /// # Errors
    /// [`BackendError::NotContiguous`], [`BackendError::Movable`], [`BackendError::PhysAddrUnknown`].
    fn required_iova(&self, memory: DmaMemory) -> Result<Option<IovaRange>, BackendError> {
        let _ = memory;
        Ok(None)
    }
}
