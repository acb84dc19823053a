//! A domain in which one operation fails, and that records its calls.

use super::DomainOps;
use crate::domain::Domain;
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use pinfold_core::domain::{BackendError, Reservation, StaticMapping};
use pinfold_core::mem::DmaMemory;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

/// An error after which no device reaches the memory.
pub(in crate::memory) const REFUSED: BackendError = BackendError::NotPages { addr: 0, len: 0 };
/// An error after which a device may still reach the memory.
pub(in crate::memory) const REACHABLE: BackendError = BackendError::NotRevoked;

/// A handle: a clone is the same domain.
#[derive(Clone)]
pub(in crate::memory) struct FakeDomain {
    /// Carries out the operations that do not fail.
    domain: Domain,
    fails: Option<(&'static str, BackendError)>,
    steps: Arc<Mutex<Vec<&'static str>>>,
    pins: bool,
    observer: Arc<dyn Fn() + Send + Sync>,
}

impl FakeDomain {
    pub(in crate::memory) fn working() -> Self {
        let domain = Domain::soft().unwrap();
        Self { domain, fails: None, steps: Arc::default(), pins: false, observer: Arc::new(|| ()) }
    }

    /// Fails each time that it is asked for `step`.
    pub(in crate::memory) fn failing(step: &'static str, error: BackendError) -> Self {
        Self { fails: Some((step, error)), ..Self::working() }
    }

    /// Its mappings pin memory.
    pub(in crate::memory) fn pinning(self) -> Self {
        Self { pins: true, ..self }
    }

    /// Calls `observer` before each step.
    pub(in crate::memory) fn observed(self, observer: impl Fn() + Send + Sync + 'static) -> Self {
        Self { observer: Arc::new(observer), ..self }
    }

    /// Returns the calls so far.
    pub(in crate::memory) fn steps(&self) -> Vec<&'static str> {
        self.steps.lock().unwrap().clone()
    }

    /// Returns the domain that carries the operations out.
    pub(in crate::memory) fn domain(&self) -> &Domain {
        &self.domain
    }

    fn step(&self, name: &'static str) -> Result<(), BackendError> {
        (self.observer)();
        self.steps.lock().unwrap().push(name);
        match &self.fails {
            Some((step, error)) if *step == name => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

impl DomainOps for FakeDomain {
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        self.step("register_memory")?;
        // SAFETY: the caller's promise.
        unsafe { self.domain.register_memory(memory) }
    }
    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        self.step("unregister_memory")?;
        self.domain.unregister_memory(memory)
    }
    unsafe fn map_static(&self, memory: DmaMemory) -> Result<StaticMapping, BackendError> {
        self.step("map_static")?;
        // SAFETY: the caller's promise.
        unsafe { DomainOps::map_static(&self.domain, memory) }
    }
    unsafe fn map_static_at(
        &self,
        reservation: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
    ) -> Result<StaticMapping, BackendError> {
        self.step("map_static_at")?;
        // SAFETY: the caller's promise.
        unsafe { DomainOps::map_static_at(&self.domain, reservation, iova, memory) }
    }
    fn reserve(&self, len: u64, align: u64) -> Result<Reservation, BackendError> {
        self.step("reserve")?;
        self.domain.reserve(len, align)
    }
    fn release(&self, reservation: Reservation) {
        self.step("release").unwrap();
        drop(reservation);
    }
    unsafe fn map_at(
        &self,
        reservation: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
    ) -> Result<StaticMapping, BackendError> {
        self.step("map_at")?;
        // SAFETY: the caller's promise.
        unsafe { DomainOps::map_at(&self.domain, reservation, iova, memory, access) }
    }
    fn unmap(&self, mapping: StaticMapping) -> Result<(), BackendError> {
        self.step("unmap")?;
        self.domain.unmap(mapping)
    }
    fn count_quarantined(&self, _bytes: u64) {
        self.step("count_quarantined").unwrap();
    }
    fn pins(&self) -> bool {
        self.pins
    }
    fn lend_file(&self, _: DmaMemory, _: BorrowedFd<'_>) {
        self.step("lend_file").unwrap();
    }
}
