//! The physical side of an IOMMU.

use crate::addr::PhysRange;
use crate::domain::error::BackendError;
use crate::mem::DmaMemory;

/// Translates memory of this process to physical addresses.
pub trait PhysTranslator: Send + Sync {
    /// Allows the memory to be given to devices.
    ///
    /// # Errors
    /// As for [`Backend::register_memory`](crate::domain::Backend::register_memory).
    ///
    /// # Safety
    /// The caller keeps the memory valid until [`unregister_memory`](Self::unregister_memory) has
    /// returned.
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;

    /// Forgets the memory: after this returns, no device reaches it, whatever the table contains,
    /// and [`generation`](Self::generation) has changed.
    fn unregister_memory(&self, memory: DmaMemory);

    /// Returns the largest registered, physically contiguous extent that contains the start of
    /// `memory`. It may begin before `memory`, and end before or after it.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`] if any part of `memory` is not registered.
    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError>;

    /// Returns a number that changes when memory is unregistered. An extent that was found after it
    /// was read is valid for as long as it stays the same: [`ExtentCache`] relies on that.
    fn generation(&self) -> u64;

    /// Returns the physically contiguous run at the start of `memory`: a multiple of 4096 bytes, at
    /// most its length.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`].
    fn run(&self, memory: DmaMemory) -> Result<PhysRange, BackendError> {
        run_in(self.extent(memory)?, memory)
    }
}

/// Registered memory of this process that is physically contiguous: whole pages of 4096 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PhysExtent {
    addr: usize,
    phys: PhysRange,
}

impl PhysExtent {
    /// Creates the extent of the process addresses `addr..addr + phys.len()`, whose physical
    /// addresses are `phys`.
    pub const fn new(addr: usize, phys: PhysRange) -> Self {
        Self { addr, phys }
    }

    /// Returns the first address in this process.
    pub const fn addr(&self) -> usize {
        self.addr
    }

    /// Returns the physical addresses.
    pub const fn phys(&self) -> PhysRange {
        self.phys
    }

    /// Returns the part of the extent at the start of `memory`, at most its length; `None` if the
    /// extent does not contain that address.
    #[inline]
    pub fn run(&self, memory: DmaMemory) -> Option<PhysRange> {
        let offset = memory.addr().checked_sub(self.addr)? as u64;
        let rest = self.phys.len().checked_sub(offset)?;
        self.phys.part(offset, rest.min(memory.len() as u64))
    }
}

/// One owner's copy of the extent that it found last: translates memory in it by one load, without
/// a lock.
///
/// ```
/// use pinfold_core::domain::{BackendError, ExtentCache, PhysTranslator};
/// # use pinfold_core::addr::PhysRange;
/// # use pinfold_core::mem::DmaMemory;
///
/// fn phys(
///     cache: &mut ExtentCache,
///     iommu: &impl PhysTranslator,
///     memory: DmaMemory,
/// ) -> Result<PhysRange, BackendError> {
///     cache.run(iommu, memory) // asks the IOMMU only where the last answer does not hold
/// }
/// ```
#[derive(Clone, Debug, Default)]
pub struct ExtentCache {
    last: Option<(u64, PhysExtent)>,
}

impl ExtentCache {
    /// Creates an empty cache.
    pub const fn new() -> Self {
        Self { last: None }
    }

    /// Returns what [`PhysTranslator::run`] returns for `memory`, from the extent found last if
    /// that contains it and nothing has been unregistered since.
    ///
    /// The caller keeps `memory` registered during the call: if it is unregistered meanwhile, this
    /// may return the physical addresses that it had.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`].
    #[inline]
    pub fn run(
        &mut self,
        translator: &(impl PhysTranslator + ?Sized),
        memory: DmaMemory,
    ) -> Result<PhysRange, BackendError> {
        // Read before the extent is looked up: one that is unregistered in between is then not used
        // again.
        let generation = translator.generation();
        let cached = self.last.filter(|(then, _)| *then == generation);
        if let Some(run) = cached.and_then(|(_, extent)| extent.run(memory)) {
            return Ok(run);
        }
        let extent = translator.extent(memory)?;
        self.last = Some((generation, extent));
        run_in(extent, memory)
    }
}

fn run_in(extent: PhysExtent, memory: DmaMemory) -> Result<PhysRange, BackendError> {
    extent.run(memory).ok_or(BackendError::NotRegistered { addr: memory.addr(), len: memory.len() })
}
