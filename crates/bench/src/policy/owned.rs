//! The policies of Pinfold, through the public interface of a domain.
#![expect(unsafe_code, reason = "the policy's memory is a payload by its address, and is kept valid by hand")]

use super::api::{Dma, Policy, PolicyError, PolicyThread};
use super::memory::Memory;
use super::slots::Slots;
use super::stats::PolicyStats;
use super::table::LEVELS;
use pinfold::soft::{Port, PortStats, SoftBus, SoftConfig};
use pinfold_core::access::{Access, Bidirectional, FromDevice, ToDevice};
use pinfold_core::addr::{Iova, PhysRange};
use pinfold_core::domain::{
    BackendError, Domain, DomainId, Local, MapError, NotQuiesced, Pinned, Revoked, Unrevoked,
};
use pinfold_core::mem::DmaMemory;
use pinfold_core::share::Shared;
use pinfold_core::table::MappedRun;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// How many mappings `pinfold-batch` revokes at a time.
const BATCH: usize = 16;
/// How many revoked mappings a thread has at most; then it waits. More than an owner gathers.
const HELD: usize = 80;
/// One of this many unmaps is timed.
const SAMPLE: u64 = 64;

/// What an unmap does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unmap {
    /// Revokes and waits.
    Wait,
    /// Revokes, and returns.
    Revoke,
    /// Revokes with the next ones, [`BATCH`] at a time.
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
    pub(super) fn new(memory: &Arc<Memory>, config: &SoftConfig, unmap: Unmap) -> Result<Self, PolicyError> {
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
        Box::new(Thread {
            policy: self,
            owner: self.domain.local(),
            mapped: Slots::new(),
            gathered: Vec::with_capacity(BATCH),
            revoked: Vec::with_capacity(BATCH),
            held: VecDeque::new(),
            unmaps: 0,
            timed: false,
            held_bytes: 0,
            held_bytes_peak: 0,
            reachable_ns: 0,
        })
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

/// A range of the policy's memory.
#[derive(Debug)]
struct Payload(DmaMemory<'static>);

// SAFETY: the memory is mapped as long as the policy exists, which all threads and their mappings borrow; what a domain
// still holds after that it never accesses. No reference into it is ever made, so that one range in two values is
// harmless: the trait's rule that it belongs to one value serves those who make references.
unsafe impl Pinned for Payload {
    fn memory(&self) -> DmaMemory<'_> {
        self.0
    }

    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

impl Payload {
    fn range(&self) -> Result<PhysRange, PolicyError> {
        let start = pinfold_core::addr::PhysAddr::new(self.0.addr() as u64);
        Ok(PhysRange::new(start, self.0.len() as u64)?)
    }
}

/// Memory whose mapping has been unmapped and may still be reachable.
struct Held {
    revoked: Revoked<Payload>,
    since: Option<Instant>,
}

struct Thread<'p> {
    policy: &'p Pinfold,
    owner: Local,
    mapped: Slots<Unrevoked<Payload>>,
    /// Unmapped, and revoked with the next ones, with the time of the first.
    gathered: Vec<(Unrevoked<Payload>, Option<Instant>)>,
    revoked: Vec<Revoked<Payload>>,
    held: VecDeque<Held>,
    unmaps: u64,
    /// Whether one of `held` is timed, if each is revoked by itself.
    timed: bool,
    held_bytes: u64,
    held_bytes_peak: u64,
    reachable_ns: u64,
}

impl Thread<'_> {
    /// Revokes what is gathered.
    fn revoke_gathered(&mut self) {
        let first = self.gathered.first().and_then(|(_, since)| *since);
        self.owner.revoke_many(self.gathered.drain(..).map(|(mapping, _)| mapping), &mut self.revoked);
        let since = std::iter::once(first).chain(std::iter::repeat(None));
        self.held.extend(self.revoked.drain(..).zip(since).map(|(revoked, since)| Held { revoked, since }));
    }

    /// Frees what is quiesced. Only the last look costs more than a load.
    fn poll(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        while let Some(held) = self.held.pop_front() {
            match self.owner.poll(held.revoked) {
                Ok(payload) => self.release(&payload, held.since, freed)?,
                Err(revoked) => {
                    self.held.push_front(Held { revoked, ..held });
                    break;
                }
            }
        }
        Ok(())
    }

    /// Waits for the first.
    fn wait(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let Some(held) = self.held.pop_front() else { return Ok(()) };
        let payload = self.owner.wait(held.revoked).map_err(|NotQuiesced { error, .. }| error)?;
        self.release(&payload, held.since, freed)
    }

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
            self.timed = false;
        }
        freed.push(range);
        Ok(())
    }
}

impl PolicyThread for Thread<'_> {
    fn map(&mut self, memory: PhysRange, access: Access) -> Result<Dma, PolicyError> {
        let dma = self.policy.memory.dma_of(memory)?;
        // SAFETY: as for `Pinned` above.
        let payload = Payload(unsafe { dma.extend() });
        let failed = |MapError { error, .. }: MapError<Payload>| error;
        let mapping: Result<_, BackendError> =
            match (access.contains(Access::READ), access.contains(Access::WRITE)) {
                (true, false) => {
                    self.owner.map(payload, ToDevice).map(|mapping| (mapping.iova(), mapping.into()))
                }
                (false, _) => {
                    self.owner.map(payload, FromDevice).map(|mapping| (mapping.iova(), mapping.into()))
                }
                (true, true) => {
                    self.owner.map(payload, Bidirectional).map(|mapping| (mapping.iova(), mapping.into()))
                }
            }
            .map_err(failed);
        let (iova, mapping) = mapping?;
        Ok(Dma { iova, memory, token: self.mapped.put(mapping) })
    }

    fn unmap(&mut self, dma: Dma, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let page = dma.iova.start().raw() / 4096;
        let mapping = self.mapped.take(dma.token).ok_or(PolicyError::NotMapped { page })?;
        if self.policy.unmap == Unmap::Wait {
            freed.push(self.owner.unmap(mapping)?.range()?);
            return Ok(());
        }
        // What earlier calls revoked, which has completed meanwhile: a thread then uses the same few buffers again.
        self.poll(freed)?;
        self.unmaps += 1;
        self.held_bytes += dma.memory.len();
        self.held_bytes_peak = self.held_bytes_peak.max(self.held_bytes);
        let at = self.unmaps % SAMPLE;
        if self.policy.unmap == Unmap::Revoke {
            // The first after the last one that was timed has been returned: so the first behind each flush, or one next to it.
            let since = (!std::mem::replace(&mut self.timed, true)).then(Instant::now);
            let revoked = self.owner.revoke(mapping);
            self.held.push_back(Held { revoked, since });
        } else {
            // The first of its batch waits longest.
            let since = (self.gathered.is_empty() && at < BATCH as u64).then(Instant::now);
            self.gathered.push((mapping, since));
            if self.gathered.len() == BATCH {
                self.revoke_gathered();
            }
        }
        while self.held.len() >= HELD {
            self.wait(freed)?;
        }
        Ok(())
    }

    fn settle(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        self.revoke_gathered();
        while !self.held.is_empty() {
            self.wait(freed)?;
        }
        Ok(())
    }
}

impl Drop for Thread<'_> {
    fn drop(&mut self) {
        self.policy.held_bytes_peak.fetch_add(self.held_bytes_peak, Ordering::Relaxed);
        self.policy.reachable_ns.fetch_max(self.reachable_ns, Ordering::Relaxed);
    }
}
