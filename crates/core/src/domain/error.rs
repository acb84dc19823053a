//! Errors of a domain and of its backend.

use crate::addr::{Iova, IovaRange};
use crate::invalidate::{Ticket, WaitError};
use crate::iova::IovaError;
use crate::table::TableError;
use alloc::borrow::Cow;
use alloc::string::String;

/// An error of a domain or its backend. Nothing has changed when one is returned, unless it says
/// so.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The memory does not consist of whole pages.
    #[error(
        "cannot map {len:#x} bytes at {addr:#x}: start and length must be multiples of 4096, length at least 4096"
    )]
    NotPages {
        /// The start of the memory in this process.
        addr: usize,
        /// Its length in bytes.
        len: usize,
    },
    /// The memory and the range of I/O virtual addresses differ in length.
    #[error("cannot map {memory_bytes:#x} bytes of memory to {iova}: the lengths differ")]
    LengthsDiffer {
        /// The range.
        iova: IovaRange,
        /// The length of the memory in bytes.
        memory_bytes: usize,
    },
    /// The memory is not registered with the domain: it is in none, or in another one.
    #[error(
        "cannot map {len:#x} bytes at {addr:#x}: they are not registered with this domain; call \
         map_into with this domain on their arena or OwnedMemory, or register_memory, or allocate \
         from an arena of this domain"
    )]
    NotRegistered {
        /// The start of the memory in this process.
        addr: usize,
        /// Its length in bytes.
        len: usize,
    },
    /// The memory overlaps memory that is registered already.
    #[error("cannot register {len:#x} bytes at {addr:#x}: part of them is registered already")]
    AlreadyRegistered {
        /// The start of the memory in this process.
        addr: usize,
        /// Its length in bytes.
        len: usize,
    },
    /// Allocating memory for the backend itself failed.
    #[error("cannot allocate {bytes} bytes for {what} (system error {code})")]
    NoMemory {
        /// The purpose.
        what: &'static str,
        /// The size in bytes.
        bytes: usize,
        /// The system's error number.
        code: i32,
    },
    /// I/O virtual addresses could not be allocated or released.
    #[error(transparent)]
    Iova(#[from] IovaError),
    /// The I/O page table could not be changed.
    #[error(transparent)]
    Table(#[from] TableError),
    /// Access was revoked, but the flush has not completed: a device may reach the memory until it
    /// does.
    #[error(transparent)]
    Flush(#[from] WaitError),
    /// The flush that a map needs did not complete in time; the map was undone.
    #[error("cannot map {iova}: the flush of cached not-present entries failed: {flush}")]
    MapNotFlushed {
        /// The range to be mapped.
        iova: IovaRange,
        /// The failure of the flush.
        flush: WaitError,
    },
    /// A map failed halfway, and the flush of its first half has not completed: a device may reach
    /// that until it does.
    #[error("cannot map {iova}, and the part that was mapped may still be reached: {flush}")]
    RollbackIncomplete {
        /// The range to be mapped.
        iova: IovaRange,
        /// The failure of the flush.
        flush: WaitError,
    },
    /// A backend of the program's own refuses the map, for a reason of its own.
    #[error("cannot map {iova}: {reason}")]
    Refused {
        /// The range.
        iova: IovaRange,
        /// The reason: the value, the limit, and the next step.
        reason: Cow<'static, str>,
    },
    /// The table, which is the kernel's or the program's own, has no entry left.
    #[error(
        "all {limit} entries of this I/O address space are in use: map fewer and larger ranges (such as an arena with \
         MappingPolicy::Whole), or raise the limit: {remedy}"
    )]
    NoEntries {
        /// The number of entries.
        limit: u64,
        /// The command that raises it.
        remedy: String,
    },
    /// The kernel pins what it maps, and the limit of this process is reached.
    #[error(
        "cannot pin {asked} more bytes: RLIMIT_MEMLOCK allows {limit}, of which {used} are in use; {remedy}"
    )]
    LockedMemory {
        /// The bytes to be mapped.
        asked: u64,
        /// The bytes that are pinned or locked.
        used: u64,
        /// The limit in bytes.
        limit: u64,
        /// The command that raises the limit.
        remedy: String,
    },
    /// The IOMMU does not translate these addresses, or something is mapped at them.
    #[error("cannot map {iova}: it is in use, or outside the range that this IOMMU translates")]
    Unmappable {
        /// The range.
        iova: IovaRange,
    },
    /// The mapping is another domain's.
    #[error(
        "cannot unmap {iova}: it was mapped in another domain, where it stays mapped; unmap it through that one"
    )]
    OtherDomain {
        /// The range.
        iova: IovaRange,
    },
    /// Without translation, the memory is where the device does not reach it.
    #[error(
        "{iova} is beyond {limit}, the last address that the device reaches, and there is no IOMMU: use memory of a lower \
         physical address"
    )]
    BeyondLimit {
        /// The addresses of the memory.
        iova: IovaRange,
        /// The last address that the device reaches.
        limit: Iova,
    },
    /// The addresses are not part of the reserved range, or the range belongs to another domain.
    #[error("{iova} is not part of the range reserved in this domain")]
    NotReserved {
        /// The range.
        iova: IovaRange,
    },
    /// The domain does not translate, so addresses cannot be chosen.
    #[error(
        "cannot choose I/O virtual addresses without an IOMMU: build the arena with MappingPolicy::Whole"
    )]
    NoTranslation,
    /// Without translation, memory must be physically contiguous.
    #[error(
        "{len:#x} bytes at {addr:#x} are not physically contiguous (only the first {run:#x} are), and there is no IOMMU: \
         use an arena of one hugepage"
    )]
    NotContiguous {
        /// The start of the memory in this process.
        addr: usize,
        /// Its length in bytes.
        len: usize,
        /// The length of the contiguous run at its start.
        run: usize,
    },
    /// Without translation, memory must not move, and it cannot be pinned.
    #[error(
        "cannot pin the {len:#x} bytes at {addr:#x}, which the kernel may migrate, and there is no IOMMU: use an arena from \
         hugetlb-2m or hugetlb-1g"
    )]
    Movable {
        /// The start of the memory in this process.
        addr: usize,
        /// Its length in bytes.
        len: usize,
    },
    /// The physical address of the memory is unavailable.
    #[error("cannot read the physical address of the memory at {addr:#x}: {remedy}")]
    PhysAddrUnknown {
        /// The start of the memory in this process.
        addr: usize,
        /// The condition under which the backend can read it.
        remedy: Cow<'static, str>,
    },
    /// The kernel returned an error.
    #[error("{call} of {iova} failed (system error {code}): nothing was mapped")]
    System {
        /// The call.
        call: &'static str,
        /// The range.
        iova: IovaRange,
        /// The system's error number.
        code: i32,
    },
    /// Access could not be revoked.
    #[error("cannot revoke access: the memory stays reachable and is quarantined")]
    NotRevoked,
}

impl BackendError {
    /// Whether a device may still reach the memory although the call failed. Then the memory must
    /// not be reused, unless the flush is [late](Self::late_ticket) and completes.
    pub fn stays_reachable(&self) -> bool {
        matches!(self, Self::RollbackIncomplete { .. } | Self::NotRevoked | Self::Flush(_))
    }

    /// Returns what a wait for `ticket` reports where one for a later ticket has ended with this
    /// error.
    pub(super) fn for_ticket(self, ticket: Ticket) -> Self {
        match self {
            Self::Flush(WaitError::TimedOut { waited_ns, polls, .. }) => {
                Self::Flush(WaitError::TimedOut { ticket, waited_ns, polls })
            }
            Self::Flush(WaitError::UnitFailed { .. }) => {
                Self::Flush(WaitError::UnitFailed { ticket })
            }
            other => other,
        }
    }

    /// Returns the ticket after which no device reaches the memory, if the flush is only late.
    pub fn late_ticket(&self) -> Option<Ticket> {
        match self {
            Self::RollbackIncomplete { flush: WaitError::TimedOut { ticket, .. }, .. }
            | Self::Flush(WaitError::TimedOut { ticket, .. }) => Some(*ticket),
            _ => None,
        }
    }
}
