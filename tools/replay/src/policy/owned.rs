//! The policies of Pinfold, through the public interface of a domain.
#![expect(
    unsafe_code,
    reason = "the policy's memory is a payload by its address, and is kept valid by hand"
)]

use super::api::{Dma, Payload, Policy, PolicyError, PolicyStats, PolicyThread};
use super::iommu::LEVELS;
use super::memory::Memory;
use pinfold::soft::{Port, PortStats, SoftBus, SoftConfig};
use pinfold_core::access::{Access, Bidirectional, FromDevice, ToDevice};
use pinfold_core::addr::{Iova, IovaRange, PhysRange};
use pinfold_core::domain::{Domain, DomainLocal, MapError, NotQuiesced, Revoked, Unrevoked};
use pinfold_core::table::MappedRun;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The effect of an unmap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unmap {
    /// Revokes and waits.
    Wait,
    /// Revokes, and returns.
    Revoke,
    /// Revokes with the next ones, some at a time.
    RevokeMany,
    /// Nothing: all memory is mapped for the lifetime of the policy.
    Never,
}

/// A domain, and the memory that it may map.
pub(super) struct Pinfold {
    domain: Domain,
    bus: SoftBus,
    unmap: Unmap,
    held_bytes_peak: AtomicU64,
    reachable_ns: AtomicU64,
    /// The mapping of all memory, if it lasts for the lifetime of the policy.
    whole: Option<Unrevoked<Payload>>,
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
        let mut policy = Self {
            domain,
            bus,
            unmap,
            held_bytes_peak: AtomicU64::new(0),
            reachable_ns: AtomicU64::new(0),
            whole: None,
            memory: Arc::clone(memory),
        };
        if unmap == Unmap::Never {
            let whole = policy.payload(memory.whole())?;
            let mapped = policy.domain.local().map(whole, Bidirectional);
            policy.whole = Some(mapped.map_err(|failed| failed.error)?.into());
        }
        Ok(policy)
    }

    /// Returns a part of the policy's memory.
    fn payload(&self, memory: PhysRange) -> Result<Payload, PolicyError> {
        // SAFETY: the policy keeps its memory mapped as long as it exists, which all threads
        // borrow; what a domain or a `Dma` still holds after that neither accesses: nothing asks a
        // mapping here for its memory.
        Ok(unsafe { Payload::new(self.memory.dma_of(memory)?) })
    }
}

impl Drop for Pinfold {
    fn drop(&mut self) {
        drop(self.whole.take());
        if self.domain.unregister_memory(self.memory.dma()).is_err() {
            // A device may reach it.
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

impl Policy for Pinfold {
    fn thread(&self) -> Box<dyn PolicyThread + '_> {
        let owner = self.domain.local();
        match self.unmap {
            Unmap::Wait | Unmap::Revoke => Box::new(Single::new(self, owner)),
            Unmap::RevokeMany => Box::new(Batches::new(self, owner)),
            Unmap::Never => Box::new(Static(self)),
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
    owner: &mut DomainLocal,
    memory: PhysRange,
    access: Access,
) -> Result<Dma, PolicyError> {
    let payload = policy.payload(memory)?;
    let failed = |MapError { error, .. }: MapError<Payload>| error;
    let mapping: Unrevoked<Payload> =
        match (access.contains(Access::READ), access.contains(Access::WRITE)) {
            (true, false) => owner.map(payload, ToDevice).map_err(failed)?.into(),
            (false, _) => owner.map(payload, FromDevice).map_err(failed)?.into(),
            (true, true) => owner.map(payload, Bidirectional).map_err(failed)?.into(),
        };
    Ok(Dma::of_mapping(mapping))
}

/// The buffers that a thread's unmaps hold, and for how long.
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

    /// Records that memory is returned which has been reachable `since`, if that is known.
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

/// A thread whose memory stays mapped.
struct Static<'p>(&'p Pinfold);

impl PolicyThread for Static<'_> {
    fn map(&mut self, memory: PhysRange, _: Access) -> Result<Dma, PolicyError> {
        let policy = self.0;
        let within = memory.start().raw()
            - policy.memory.dma_of(memory).map(|_| policy.memory.whole())?.start().raw();
        let whole = policy.whole.as_ref().ok_or(PolicyError::NotMapped { page: 0 })?;
        let iova = Iova::new(whole.iova().start().raw() + within);
        Ok(Dma::new(IovaRange::new(iova, memory.len())?, memory))
    }

    fn unmap(&mut self, dma: Dma, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        freed.push(dma.into_parts()?.1);
        Ok(())
    }

    fn settle(&mut self, _: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        Ok(())
    }
}

// A thread that revokes each mapping by itself.

/// One of this many revocations is timed.
const TIMED: u64 = 16;

/// The most revoked mappings of a thread; then it waits.
const HELD: usize = 80;

pub(super) struct Single<'p> {
    policy: &'p Pinfold,
    owner: DomainLocal,
    held: VecDeque<Revoked<Payload>>,
    /// When one of `held` was revoked, and how many precede it there.
    timed: Option<(Instant, usize)>,
    revoked: u64,
    figures: Figures,
}

impl<'p> Single<'p> {
    pub(super) fn new(policy: &'p Pinfold, owner: DomainLocal) -> Self {
        Self {
            policy,
            owner,
            held: VecDeque::new(),
            timed: None,
            revoked: 0,
            figures: Figures::default(),
        }
    }

    /// Frees quiesced payloads. Only the last check costs more than a load.
    #[inline]
    fn poll(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        while self.held.front().is_some_and(Revoked::is_quiesced) {
            self.wait(freed)?;
        }
        Ok(())
    }

    /// Waits for the first.
    fn wait(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let Some(revoked) = self.held.pop_front() else { return Ok(()) };
        let payload = self.owner.wait(revoked).map_err(|NotQuiesced { error, .. }| error)?;
        self.release(&payload, freed)
    }

    #[inline]
    fn release(
        &mut self,
        payload: &Payload,
        freed: &mut Vec<PhysRange>,
    ) -> Result<(), PolicyError> {
        let mut since = None;
        match &mut self.timed {
            Some((_, before @ 1..)) => *before -= 1,
            timed => since = timed.take().map(|(since, _)| since),
        }
        self.figures.release(payload, since, freed)
    }
}

impl PolicyThread for Single<'_> {
    fn map(&mut self, memory: PhysRange, access: Access) -> Result<Dma, PolicyError> {
        map(self.policy, &mut self.owner, memory, access)
    }

    fn unmap(&mut self, dma: Dma, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let bytes = dma.iova().len();
        let mapping = dma.into_mapping()?;
        if self.policy.unmap == Unmap::Wait {
            freed.push(self.owner.unmap(mapping)?.range()?);
            return Ok(());
        }
        // The flushes of earlier calls that have completed meanwhile: a thread then uses the same
        // few buffers again.
        self.poll(freed)?;
        self.figures.hold(bytes);
        self.revoked += 1;
        if self.timed.is_none() && self.revoked.is_multiple_of(TIMED) {
            self.timed = Some((Instant::now(), self.held.len()));
        }
        self.held.push_back(self.owner.revoke(mapping));
        while self.held.len() >= HELD {
            self.wait(freed)?;
        }
        Ok(())
    }

    fn settle(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        while !self.held.is_empty() {
            self.wait(freed)?;
        }
        Ok(())
    }
}

impl Drop for Single<'_> {
    fn drop(&mut self) {
        self.figures.add_to(self.policy);
    }
}

// A thread that revokes several mappings by one call.

/// The number of mappings revoked at a time.
const BATCH: usize = 16;
/// The most revoked batches of a thread; then it waits for the first.
const HELD_BATCHES: usize = 5;
/// One of this many batches is timed.
const SAMPLE: u64 = 4;

/// Mappings that were revoked by one call, and when the first of them was unmapped, if that was
/// noted.
#[derive(Default)]
struct Batch {
    revoked: Vec<Revoked<Payload>>,
    since: Option<Instant>,
}

pub(super) struct Batches<'p> {
    policy: &'p Pinfold,
    owner: DomainLocal,
    /// Unmapped, and revoked with the next ones.
    gathered: Vec<Unrevoked<Payload>>,
    /// When the first of them was unmapped.
    since: Option<Instant>,
    held: VecDeque<Batch>,
    /// The lists of batches that have been returned.
    spare: Vec<Vec<Revoked<Payload>>>,
    revocations: u64,
    figures: Figures,
}

impl<'p> Batches<'p> {
    pub(super) fn new(policy: &'p Pinfold, owner: DomainLocal) -> Self {
        Self {
            policy,
            owner,
            gathered: Vec::with_capacity(BATCH),
            since: None,
            held: VecDeque::new(),
            spare: Vec::new(),
            revocations: 0,
            figures: Figures::default(),
        }
    }

    /// Revokes the gathered mappings.
    fn revoke_gathered(&mut self) {
        let mut revoked = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(BATCH));
        self.owner.revoke_many(self.gathered.drain(..), &mut revoked);
        self.held.push_back(Batch { revoked, since: self.since.take() });
        self.revocations += 1;
    }

    /// Frees the batches that are quiesced.
    fn poll(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let quiesced = |batch: &Batch| batch.revoked.last().is_none_or(Revoked::is_quiesced);
        while self.held.front().is_some_and(quiesced) {
            self.wait(freed)?;
        }
        Ok(())
    }

    /// Waits for the first batch.
    fn wait(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let Some(Batch { mut revoked, mut since }) = self.held.pop_front() else { return Ok(()) };
        for one in revoked.drain(..) {
            let payload = self.owner.wait(one).map_err(|NotQuiesced { error, .. }| error)?;
            self.figures.release(&payload, since.take(), freed)?;
        }
        self.spare.push(revoked);
        Ok(())
    }
}

impl PolicyThread for Batches<'_> {
    fn map(&mut self, memory: PhysRange, access: Access) -> Result<Dma, PolicyError> {
        map(self.policy, &mut self.owner, memory, access)
    }

    fn unmap(&mut self, dma: Dma, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        self.figures.hold(dma.iova().len());
        if self.gathered.is_empty() && self.revocations.is_multiple_of(SAMPLE) {
            // The first of a batch waits longest.
            self.since = Some(Instant::now());
        }
        self.gathered.push(dma.into_mapping()?);
        if self.gathered.len() == BATCH {
            // The flushes of earlier calls that have completed meanwhile: a thread then uses the
            // same few buffers again.
            self.poll(freed)?;
            self.revoke_gathered();
            while self.held.len() >= HELD_BATCHES {
                self.wait(freed)?;
            }
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

impl Drop for Batches<'_> {
    fn drop(&mut self) {
        self.figures.add_to(self.policy);
    }
}
