//! The interface of all policies, and their error.
#![expect(
    unsafe_code,
    reason = "a policy's memory is a payload by its address, kept valid by hand"
)]

use pinfold::soft::Port;
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange, PhysAddr, PhysRange, RangeError};
use pinfold_core::domain::{BackendError, DomainId, Pinned, Unrevoked};
use pinfold_core::invalidate::{InvalidationStats, WaitError};
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::MappedRun;
use std::fmt;

/// Why a policy could not map or unmap.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The memory for the mappings could not be reserved.
    #[error("cannot reserve {bytes} bytes of address space for the mapped memory: {error}")]
    NoMemory {
        /// The size in bytes.
        bytes: usize,
        /// The system's error.
        error: std::io::Error,
    },
    /// The timer of a lazy policy could not be started.
    #[error("cannot start the flush timer of a policy: {}", pinfold::probe::threads::refusal(.0))]
    NoTimer(#[source] std::io::Error),
    /// The range is not whole pages of the policy's memory.
    #[error("cannot map {range}: it is not whole pages of the policy's memory {memory}")]
    Outside {
        /// The range.
        range: PhysRange,
        /// The memory of the policy.
        memory: PhysRange,
    },
    /// No addresses are free.
    #[error("no {pages} pages of I/O virtual addresses are free below 2^{bits}")]
    Exhausted {
        /// The number of pages to be mapped.
        pages: u64,
        /// The width of an address.
        bits: u32,
    },
    /// All table pages of the model are in use.
    #[error("all {pages} table pages are in use: raise SoftConfig::table_bytes")]
    NoTablePages {
        /// The number of table pages.
        pages: usize,
    },
    /// Nothing is mapped there.
    #[error("cannot unmap page {page:#x} of the I/O address space: nothing is mapped there")]
    NotMapped {
        /// The number of the page.
        page: u64,
    },
    /// The flush did not complete.
    #[error(transparent)]
    Flush(#[from] WaitError),
    /// The domain or the software IOMMU failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A range is not valid.
    #[error(transparent)]
    Range(#[from] RangeError),
}

/// A range of a policy's memory.
#[derive(Debug)]
pub(super) struct Payload(DmaMemory<'static>);

// SAFETY: the memory is mapped as long as the value is used for more than its address, as `new`
// demands. No reference into it is ever made, so that one range in two values is harmless: the
// trait's rule that it belongs to one value serves those who make references.
unsafe impl Pinned for Payload {
    #[inline]
    fn memory(&self) -> DmaMemory<'_> {
        self.0
    }

    #[inline]
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

impl Payload {
    /// Creates the payload of `memory`.
    ///
    /// # Safety
    /// The caller keeps the memory mapped until nothing accesses it through this value or its
    /// mapping any more. No reference into it is ever made.
    #[inline]
    pub(super) unsafe fn new(memory: DmaMemory<'_>) -> Self {
        // SAFETY: valid for as long as it is used, as the caller promises.
        Self(unsafe { memory.extend() })
    }

    /// Returns the range.
    #[inline]
    pub(super) fn range(&self) -> Result<PhysRange, RangeError> {
        PhysRange::new(PhysAddr::new(self.0.addr() as u64), self.0.len() as u64)
    }
}

/// Memory that a device may reach, and where it finds it. Unmapped by the thread that mapped it.
#[derive(Debug)]
#[must_use = "it stays mapped until it is unmapped"]
pub struct Dma(Kept);

/// The identifier of the mapping. A program keeps it with its request, so nothing else is kept
/// beside it.
#[derive(Debug)]
enum Kept {
    /// The addresses, and the memory.
    Range(IovaRange, PhysRange),
    /// A mapping of a domain, which has both.
    Mapping(Unrevoked<Payload>),
}

impl Dma {
    #[inline]
    pub(super) fn new(iova: IovaRange, memory: PhysRange) -> Self {
        Self(Kept::Range(iova, memory))
    }

    #[inline]
    pub(super) fn of_mapping(mapping: Unrevoked<Payload>) -> Self {
        Self(Kept::Mapping(mapping))
    }

    /// Returns where the device finds the memory.
    #[inline]
    pub fn iova(&self) -> IovaRange {
        match &self.0 {
            Kept::Range(iova, _) => *iova,
            Kept::Mapping(mapping) => mapping.iova(),
        }
    }

    /// Returns the mapping.
    ///
    /// # Errors
    /// [`PolicyError::NotMapped`] if it is another policy's.
    #[inline]
    pub(super) fn into_mapping(self) -> Result<Unrevoked<Payload>, PolicyError> {
        match self.0 {
            Kept::Mapping(mapping) => Ok(mapping),
            Kept::Range(iova, _) => Err(PolicyError::NotMapped { page: iova.start().raw() / 4096 }),
        }
    }

    /// Returns the addresses and the memory.
    ///
    /// # Errors
    /// [`PolicyError::NotMapped`] if it is another policy's.
    #[inline]
    pub(super) fn into_parts(self) -> Result<(IovaRange, PhysRange), PolicyError> {
        match self.0 {
            Kept::Range(iova, memory) => Ok((iova, memory)),
            Kept::Mapping(mapping) => {
                Err(PolicyError::NotMapped { page: mapping.iova().start().raw() / 4096 })
            }
        }
    }
}

/// Creation and release of DMA addresses, for one device.
pub trait Policy: Send + Sync {
    /// Returns a handle for one thread.
    fn thread(&self) -> Box<dyn PolicyThread + '_>;

    /// Connects a queue of the device, with caches of its own.
    fn port(&self) -> Port;

    /// Returns the statistics.
    fn stats(&self) -> PolicyStats;

    /// Returns the runs that its table maps, by ascending address; `None`, the default, if the
    /// table cannot be read, as those of the baselines.
    fn mapped(&self) -> Option<Vec<MappedRun>> {
        None
    }
}

/// One thread's handle to a [`Policy`].
pub trait PolicyThread: Send {
    /// Maps `memory`, whole pages of the policy's [`Memory`](super::Memory), for `access`. Memory
    /// may be mapped more than once.
    ///
    /// # Errors
    /// [`PolicyError`]; nothing is mapped.
    fn map(&mut self, memory: PhysRange, access: Access) -> Result<Dma, PolicyError>;

    /// Unmaps, and appends to `freed` the memory that may be reused now: that of this call, of
    /// earlier ones, or none.
    ///
    /// # Errors
    /// [`PolicyError`]; the memory is not freed.
    fn unmap(&mut self, dma: Dma, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError>;

    /// Waits until no device reaches what this thread has unmapped, and appends to `freed` what had
    /// not been freed yet.
    ///
    /// # Errors
    /// [`PolicyError::Flush`].
    fn settle(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError>;
}

// The counts of a policy.

/// The counts of a policy so far, and the memory that it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PolicyStats {
    /// Invalidations submitted to the IOMMU.
    pub invalidations: u64,
    /// Of these, invalidations of the whole domain.
    pub domain_flushes: u64,
    /// Waits submitted behind them: one a batch.
    pub waits: u64,
    /// Nanoseconds spent in waits for flushes.
    pub wait_ns: u64,
    /// Pages of 4096 bytes whose translations were to be invalidated.
    pub pages_requested: u64,
    /// Pages invalidated for them. An invalidation of the whole domain counts as the pages
    /// requested.
    pub pages_flushed: u64,
    /// Entries that describe the addresses in use: of a tree, of the pages' counts, or the free
    /// extents of a domain and the windows of its owners.
    pub entries: u64,
    /// Table entries that the IOMMU has read.
    pub walk_reads: u64,
    /// The devices' time for that, in nanoseconds: modelled.
    pub walk_ns: u64,
    /// Pages of the I/O page table.
    pub table_pages: u64,
    /// The most bytes that were unmapped and whose flush had not completed; the sum of the peaks of
    /// the threads or CPUs.
    pub held_bytes_peak: u64,
    /// The longest time from the return of an unmap until its flush had completed, in nanoseconds;
    /// a sample of the unmaps, which contains the first one behind each flush.
    pub reachable_ns: u64,
    /// Whether the memory was free for reuse during that time.
    pub reused_while_reachable: bool,
}

impl PolicyStats {
    pub(super) fn with(self, flushes: InvalidationStats) -> Self {
        let InvalidationStats {
            sent,
            domain_flushes,
            waits,
            wait_ns,
            pages_requested,
            pages_flushed,
            ..
        } = flushes;
        Self {
            invalidations: sent,
            domain_flushes,
            waits,
            wait_ns,
            pages_requested,
            pages_flushed,
            ..self
        }
    }
}

impl fmt::Display for PolicyStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { invalidations, waits, entries, walk_reads, table_pages, .. } = self;
        write!(
            f,
            "{invalidations} invalidations, {waits} waits, {entries} entries, {table_pages} table pages, "
        )?;
        write!(
            f,
            "{walk_reads} entries read by walks; at most {} bytes held, ",
            self.held_bytes_peak
        )?;
        let whose = if self.reused_while_reachable { "free" } else { "held" };
        write!(f, "{whose} memory reachable for {} ns", self.reachable_ns)
    }
}
