//! What keeps a domain's table.

use crate::access::Access;
use crate::addr::IovaRange;
use crate::invalidate::{InvalidationStats, Ticket, WaitError};
use crate::iova::IovaError;
use crate::mem::DmaMemory;
use crate::table::TableError;

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
        "memory of {len:#x} bytes at {addr:#x} was not admitted to this domain: admit it (or allocate it from an arena of this domain) first"
    )]
    NotAdmitted {
        /// Where the memory starts in this process.
        addr: usize,
        /// How many bytes it has.
        len: usize,
    },
    /// Memory is admitted once.
    #[error("memory of {len:#x} bytes at {addr:#x} overlaps memory that is admitted already")]
    AdmittedAlready {
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
    /// Access was taken back, but the flush was not seen to end: what it covers stays reachable.
    #[error(transparent)]
    Flush(#[from] WaitError),
    /// A map failed in the middle, and what had been mapped of it was not seen to be flushed: it stays reachable.
    #[error("a map of {iova} failed in the middle, and taking it back failed too: {flush}")]
    Stuck {
        /// What was being mapped.
        iova: IovaRange,
        /// Why taking it back failed.
        flush: WaitError,
    },
    /// Access could not be taken back.
    #[error("access could not be taken back: the memory stays reachable and is not used again")]
    NotRevoked,
}

impl BackendError {
    /// Whether a device may reach the memory for ever, although the call failed: then it must not be used again.
    pub fn stays_reachable(&self) -> bool {
        matches!(self, Self::Stuck { .. } | Self::NotRevoked | Self::Flush(_))
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
}

/// What keeps a domain's table: a short list of operations, a file each.
pub trait Backend: Send + Sync {
    /// `soft`, `vfio`, `none` ...
    fn name(&self) -> &'static str;

    /// The memory may be mapped from now until [`expel`](Self::expel).
    ///
    /// # Errors
    /// [`BackendError::AdmittedAlready`] where part of it is.
    ///
    /// # Safety
    /// The caller keeps the memory valid until `expel` has returned.
    unsafe fn admit(&self, memory: DmaMemory) -> Result<(), BackendError>;

    /// The memory goes away: when this returns, no device reaches it through this backend, whatever is mapped.
    fn expel(&self, memory: DmaMemory);

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
    fn is_done(&self, ticket: Ticket) -> bool;

    /// Waits until it is, or until the backend gives the device up.
    ///
    /// # Errors
    /// [`BackendError::Flush`]: what the flush covers may be reached for ever.
    fn wait(&self, ticket: Ticket) -> Result<(), BackendError>;

    /// What has been done so far.
    fn stats(&self) -> BackendStats;
}
