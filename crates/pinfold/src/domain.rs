//! A domain of this process: the core's [`Domain`](pinfold_core::domain::Domain) over one of the backends. (Skeleton.)
#![allow(unused_variables, clippy::todo, missing_debug_implementations)]

use crate::soft::{Port, SoftConfig};
use pinfold_core::domain::BackendError;
use std::sync::Arc;

/// One I/O address space, with the backend that keeps it. A handle: cloning it makes another one to the same space.
///
/// Everything that the core's domain offers (`map`, `revoke_all`, `reserve_iova`, `admit`, `stats` ...) is reached
/// through `Deref`.
#[derive(Clone)]
pub struct Domain(Arc<pinfold_core::domain::Domain>);

impl Domain {
    /// A domain behind the software IOMMU.
    ///
    /// # Errors
    /// [`BackendError`] where memory for its table could not be had.
    pub fn soft() -> Result<Self, BackendError> {
        todo!()
    }
    /// The same with a configuration.
    ///
    /// # Errors
    /// As [`soft`](Self::soft).
    pub fn soft_with(config: SoftConfig) -> Result<Self, BackendError> {
        todo!()
    }
    /// A device's way into the domain, where the devices of this domain are models; `None` for real ones.
    pub fn port(&self) -> Option<Port> {
        todo!()
    }
}

impl core::ops::Deref for Domain {
    type Target = pinfold_core::domain::Domain;
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}
