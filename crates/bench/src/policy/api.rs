//! The interface of all policies, and their error.

use super::payload::Payload;
use super::stats::PolicyStats;
use pinfold::soft::Port;
use pinfold_core::access::Access;
use pinfold_core::addr::{IovaRange, PhysRange, RangeError};
use pinfold_core::domain::{BackendError, Unrevoked};
use pinfold_core::invalidate::WaitError;
use pinfold_core::table::MappedRun;

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
    #[error("cannot start the flush timer of a policy: {0}")]
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
        /// How many pages were to be mapped.
        pages: u64,
        /// The width of an address.
        bits: u32,
    },
    /// All table pages of the model are in use.
    #[error("all {pages} table pages are in use: raise SoftConfig::table_bytes")]
    NoTablePages {
        /// How many there are.
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

/// Memory that a device may reach, and where it finds it. Unmapped by the thread that mapped it.
#[derive(Debug)]
#[must_use = "it stays mapped until it is unmapped"]
pub struct Dma(Kept);

/// What identifies it. A program keeps it with its request, so nothing else is kept beside it.
#[derive(Debug)]
enum Kept {
    /// The addresses, and the memory.
    Range(IovaRange, PhysRange),
    /// A mapping of a domain, which has both.
    Mapping(Unrevoked<Payload>),
}

/// Every policy's program keeps as much as one of Pinfold does, as documented in
/// docs/benchmarks.md.
const _: () =
    assert!(size_of::<Dma>() == size_of::<Unrevoked<Payload>>() && size_of::<Dma>() == 80);

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

    /// Has the processor load what a revocation of the mapping needs.
    #[inline]
    pub(super) fn prefetch_mapping(&self) {
        if let Kept::Mapping(mapping) = &self.0 {
            mapping.prefetch();
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

/// How DMA addresses are made and taken back, for one device.
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

    /// Has the processor load what the unmap of `dma`, one of the next, needs, and does not wait
    /// for it.
    fn prefetch(&self, dma: &Dma);

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
