//! Payloads that no device accesses: for what a domain itself costs.
#![expect(unsafe_code, reason = "a payload names its memory by address")]

use crate::error::BenchError;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{Domain, DomainId, Pinned};
use pinfold_core::mem::DmaMemory;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// The memory of all payloads: 1 MiB, accessed by nothing.
static MEMORY: Aligned = Aligned([const { AtomicU64::new(0) }; BYTES / 8]);
const BYTES: usize = 1 << 20;

#[repr(align(4096))]
struct Aligned(#[expect(dead_code, reason = "reached by its address")] [AtomicU64; BYTES / 8]);

/// The first pages of a memory that all such payloads share.
#[derive(Debug)]
pub(super) struct Nothing(DmaMemory<'static>);

impl Nothing {
    /// Returns a payload of `pages` pages, at most 1 MiB.
    #[inline(always)]
    pub(super) fn new(pages: u64) -> Result<Self, BenchError> {
        let len = usize::try_from(pages * 4096).unwrap_or(usize::MAX);
        Ok(Self(Self::memory().part(0, len)?))
    }

    /// Registers the memory of all payloads with a domain.
    pub(super) fn register(domain: &Domain) -> Result<(), BenchError> {
        // SAFETY: a static stays valid for good.
        Ok(unsafe { domain.register_memory(Self::memory()) }?)
    }

    #[inline(always)]
    fn memory() -> DmaMemory<'static> {
        let base = NonNull::from(&MEMORY).cast();
        // SAFETY: a static lives for good, and consists of atomics, which may be written through a
        // shared reference; nothing else refers to it.
        unsafe { DmaMemory::from_raw(base, BYTES) }
    }
}

// SAFETY: the memory is a static of atomics, to which no other reference is made; so payloads may
// share it.
unsafe impl Pinned for Nothing {
    #[inline(always)]
    fn memory(&self) -> DmaMemory<'_> {
        self.0
    }

    #[inline(always)]
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}
