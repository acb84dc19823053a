//! The policies of Pinfold, through the public interface of a domain.
#![expect(
    unsafe_code,
    reason = "the policy's memory is a payload by its address, and is kept valid by hand"
)]

mod batches;
mod single;

use self::batches::Batches;
use self::single::Single;
use super::api::{Dma, Policy, PolicyError, PolicyThread};
use super::memory::Memory;
use super::payload::Payload;
use super::stats::PolicyStats;
use super::table::LEVELS;
use pinfold::soft::{Port, PortStats, SoftBus, SoftConfig};
use pinfold_core::access::{Access, Bidirectional, FromDevice, ToDevice};
use pinfold_core::addr::PhysRange;
use pinfold_core::domain::{Domain, Local, MapError, Unrevoked};
use pinfold_core::share::Shared;
use pinfold_core::table::MappedRun;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// What an unmap does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unmap {
    /// Revokes and waits.
    Wait,
    /// Revokes, and returns.
    Revoke,
    /// Revokes with the next ones, some at a time.
    RevokeMany,
}

/// A domain, and the memory that it may map.
pub(super) struct Pinfold {
    domain: Shared<Domain>,
    bus: SoftBus,
    unmap: Unmap,
    held_bytes_peak: AtomicU64,
    reachable_ns: AtomicU64,
    /// Kept until the domain has unregistered it.
    memory: Arc<Memory>,
}

impl Pinfold {
    pub(super) fn new(
        memory: &Arc<Memory>,
        config: &SoftConfig,
        unmap: Unmap,
    ) -> Result<Self, PolicyError> {
        let (domain, bus) = pinfold::soft::domain(SoftConfig { levels: LEVELS, ..config.clone() })?;
        // SAFETY: `drop` unregisters it, and `Self` keeps it until then.
        unsafe { domain.register_memory(memory.dma()) }?;
        Ok(Self {
            domain: Shared::new(domain),
            bus,
            unmap,
            held_bytes_peak: AtomicU64::new(0),
            reachable_ns: AtomicU64::new(0),
            memory: Arc::clone(memory),
        })
    }
}

impl Drop for Pinfold {
    fn drop(&mut self) {
        self.domain.unregister_memory(self.memory.dma());
    }
}

impl Policy for Pinfold {
    fn thread(&self) -> Box<dyn PolicyThread + '_> {
        let owner = self.domain.local();
        match self.unmap {
            Unmap::Wait | Unmap::Revoke => Box::new(Single::new(self, owner)),
            Unmap::RevokeMany => Box::new(Batches::new(self, owner)),
        }
    }

    fn port(&self) -> Port {
        self.bus.port()
    }

    fn stats(&self) -> PolicyStats {
        let stats = self.domain.stats();
        let PortStats { walk_reads, walk_ns, .. } = self.bus.stats();
        let own = PolicyStats {
            entries: stats.iova_extents + stats.windows,
            walk_reads,
            walk_ns,
            table_pages: stats.backend.table_pages,
            held_bytes_peak: self.held_bytes_peak.load(Ordering::Relaxed),
            reachable_ns: self.reachable_ns.load(Ordering::Relaxed),
            ..PolicyStats::default()
        };
        own.with(stats.backend.invalidations)
    }

    fn mapped(&self) -> Option<Vec<MappedRun>> {
        Some(self.domain.mapped()?.collect())
    }
}

/// Maps a part of the policy's memory.
#[inline]
fn map(
    policy: &Pinfold,
    owner: &mut Local,
    memory: PhysRange,
    access: Access,
) -> Result<Dma, PolicyError> {
    // SAFETY: the policy keeps its memory mapped as long as it exists, which all threads borrow;
    // what a domain or a `Dma` still holds after that neither accesses: nothing asks a mapping here
    // for its memory.
    let payload = unsafe { Payload::new(policy.memory.dma_of(memory)?) };
    let failed = |MapError { error, .. }: MapError<Payload>| error;
    let mapping: Unrevoked<Payload> =
        match (access.contains(Access::READ), access.contains(Access::WRITE)) {
            (true, false) => owner.map(payload, ToDevice).map_err(failed)?.into(),
            (false, _) => owner.map(payload, FromDevice).map_err(failed)?.into(),
            (true, true) => owner.map(payload, Bidirectional).map_err(failed)?.into(),
        };
    Ok(Dma::of_mapping(mapping))
}

/// What a thread's unmaps hold, and for how long.
#[derive(Default)]
struct Figures {
    held_bytes: u64,
    held_bytes_peak: u64,
    reachable_ns: u64,
}

impl Figures {
    #[inline]
    fn hold(&mut self, bytes: u64) {
        self.held_bytes += bytes;
        self.held_bytes_peak = self.held_bytes_peak.max(self.held_bytes);
    }

    /// Notes that memory is returned which has been reachable `since`, if that is known.
    #[inline]
    fn release(
        &mut self,
        payload: &Payload,
        since: Option<Instant>,
        freed: &mut Vec<PhysRange>,
    ) -> Result<(), PolicyError> {
        let range = payload.range()?;
        self.held_bytes -= range.len();
        if let Some(since) = since {
            let reachable = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.reachable_ns = self.reachable_ns.max(reachable);
        }
        freed.push(range);
        Ok(())
    }

    /// Adds those of a thread that ends to its policy's.
    fn add_to(&self, policy: &Pinfold) {
        policy.held_bytes_peak.fetch_add(self.held_bytes_peak, Ordering::Relaxed);
        policy.reachable_ns.fetch_max(self.reachable_ns, Ordering::Relaxed);
    }
}
