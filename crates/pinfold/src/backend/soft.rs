//! Domains behind the software IOMMU, for tests, device models and programs without a device:
//! [`Domain::soft`].
//!
//! The IOMMU is a crate of its own, `pinfold-soft`, whose items are re-exported here. A driver's
//! release build can leave it out: it comes with the default feature `soft`.
//!
//! ```
//! use pinfold::soft::{FaultKind, SoftConfig};
//! use pinfold::{Arena, Domain};
//! use pinfold_core::access::FromDevice;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft_with(SoftConfig::default())?;
//! let device = domain.port().ok_or("no port")?;
//! let arena = Arena::builder().size(4 << 20).build(&domain)?;
//! let mapped = domain.map(arena.alloc(4096)?, FromDevice)?;
//! let iova = mapped.iova().start();
//! device.write(iova, b"from the device")?;
//! drop(mapped.unmap()?);
//! assert_eq!(device.write(iova, b"late").map_err(|fault| fault.kind), Err(FaultKind::NotMapped));
//! # Ok(())
//! # }
//! ```

use crate::domain::{DeviceSide, Domain};
use pinfold_core::domain::BackendError;
use pinfold_core::invalidate::InvalidationQueue;

pub use pinfold_soft::*;

impl DeviceSide for SoftBus {}

impl Domain {
    /// Creates a domain behind a software IOMMU with the
    /// [default configuration](SoftConfig::default).
    ///
    /// # Errors
    /// [`BackendError::NoMemory`] if the memory for its table cannot be allocated.
    pub fn soft() -> Result<Self, BackendError> {
        Self::soft_with(SoftConfig::default())
    }

    /// Creates a domain behind a software IOMMU.
    ///
    /// # Errors
    /// [`BackendError::NoMemory`] as for [`soft`](Self::soft); [`BackendError::Table`] if the
    /// configuration asks for an unsupported number of levels.
    pub fn soft_with(config: SoftConfig) -> Result<Self, BackendError> {
        let (core, bus) = pinfold_soft::domain(config)?;
        Ok(Self::new(core, bus))
    }

    /// Creates the same over what `over` makes of the queue of each unit, by its number: for tests,
    /// whose queues do something wrong.
    ///
    /// # Errors
    /// As for [`soft_with`](Self::soft_with).
    ///
    /// # Safety
    /// As for [`domain_over`].
    pub unsafe fn soft_over<Q: InvalidationQueue + 'static>(
        config: SoftConfig,
        over: impl Fn(usize, UnitQueue) -> Q,
    ) -> Result<Self, BackendError> {
        // SAFETY: the caller's promise is the one required.
        let (core, bus) = unsafe { domain_over(config, over) }?;
        Ok(Self::new(core, bus))
    }

    /// Connects a new device model; `None` if the devices of this domain are real.
    pub fn port(&self) -> Option<Port> {
        self.soft_bus().map(|bus| bus.port().of_domain(self.id()))
    }

    /// Returns the bus of the device models, with its statistics and faults; `None` if the devices
    /// are real.
    pub fn soft_bus(&self) -> Option<&SoftBus> {
        self.device_side()
    }
}
