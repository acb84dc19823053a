//! The life of a mapping in a domain: `domain-4k`, `domain-1m`, and both in batches; and unmapping
//! and mapping at random among many mappings: `live-1k`, `live-1m`.

use super::payload::Nothing;
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::handle::Rng;
use pinfold::soft::{Effect, SoftBus, SoftConfig};
use pinfold_core::access::{Access, FromDevice};
use pinfold_core::domain::{Domain, DomainLocal, NotQuiesced};
use pinfold_replay::policy::{Dma, Memory, PolicyKind};
use std::sync::Arc;
use std::time::Duration;

/// The number of mappings revoked by one call in batch cases.
const BATCH: usize = 256;

type Outcome = Result<(), BenchError>;

/// Returns a software IOMMU whose flushes take no time: what is left is the cost of the domain and
/// of the model's bookkeeping.
pub(super) fn free_flushes() -> SoftConfig {
    SoftConfig { flush_cost: Duration::ZERO, effect: Effect::AtLast, ..SoftConfig::default() }
}

/// A domain which maps [`Nothing`].
pub(super) struct Setup {
    pub(super) domain: Domain,
    _bus: SoftBus,
}

impl Setup {
    /// Creates one whose flushes are free.
    pub(super) fn new() -> Result<Self, BenchError> {
        Self::with(free_flushes())
    }

    pub(super) fn with(config: SoftConfig) -> Result<Self, BenchError> {
        let (domain, bus) = pinfold::soft::domain(config)?;
        Nothing::register(&domain)?;
        Ok(Self { domain, _bus: bus })
    }
}

pub(super) fn domain(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let setup = Setup::new()?;
    let domain = &setup.domain;
    let times = harness.scale(160_000);
    let (small, large) = (1, 256);
    harness.interleave(vec![
        Subject::countable("pinfold", move |out| {
            single(out, "domain-4k", &mut domain.local(), small, times)
        }),
        Subject::countable("pinfold", move |out| {
            batches(out, "domain-4k-batch", &mut domain.local(), small, times / BATCH)
        }),
        Subject::countable("pinfold", move |out| {
            single(out, "domain-1m", &mut domain.local(), large, times / 8)
        }),
        Subject::countable("pinfold", move |out| {
            batches(out, "domain-1m-batch", &mut domain.local(), large, times / 8 / BATCH)
        }),
    ])
}

/// Measures exchanges of one mapping among few and among very many.
pub(super) fn live(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let memory = &Memory::new(4096)?;
    let times = harness.scale(100_000);
    // A search of the tree takes milliseconds once addresses have been freed at random.
    let kinds = [
        (PolicyKind::Revoke, times),
        (PolicyKind::Batch, times),
        (PolicyKind::Lazy, times),
        (PolicyKind::Tree2015, times / 500),
    ];
    let mut subjects = Vec::new();
    for (case, live) in [("live-1k", 1000), ("live-1m", harness.scale(1_000_000))] {
        for (kind, times) in kinds.into_iter().filter(|_| harness.wants(case)) {
            subjects.push(Subject::new(kind.name(), move |out: &mut Samples| {
                among(out, (case, live), kind, memory, times.max(1))
            }));
        }
    }
    harness.with_runs(harness.options().runs.min(5)).interleave(subjects)
}

/// Unmaps a mapping at random and maps its page again, with `live` mappings.
fn among(
    out: &mut Samples,
    (case, live): (&'static str, usize),
    kind: PolicyKind,
    memory: &Arc<Memory>,
    times: usize,
) -> Outcome {
    // The table pages for all mappings are there before, with room for those that address space
    // with holes needs: no exchange pays for the first touch of one.
    let reserved = (1 << 20) + 16 * (live + 3 * times);
    let policy = kind.create(memory, &SoftConfig { table_reserved: reserved, ..free_flushes() })?;
    let page = memory.range(0, 4096).ok_or(BenchError::Addresses)?;
    let (mut thread, mut rng) = (policy.thread(), Rng::new());
    let (mut freed, mut mapped): (_, Vec<Dma>) = (Vec::new(), Vec::with_capacity(live));
    for _ in 0..live {
        mapped.push(thread.map(page, Access::WRITE)?);
    }
    let mut exchange = || -> Outcome {
        thread.unmap(mapped.swap_remove(rng.below(mapped.len())), &mut freed)?;
        freed.clear();
        mapped.push(thread.map(page, Access::WRITE)?);
        Ok(())
    };
    // The addresses are in order at first.
    (0..times).try_for_each(|_| exchange())?;
    let (cost, result) = Cost::of(|| (0..times).try_for_each(|_| exchange()));
    result?;
    out.cost(case, cost, times);
    mapped.into_iter().try_for_each(|dma| thread.unmap(dma, &mut freed))?;
    Ok(thread.settle(&mut freed)?)
}

/// Maps, revokes and waits for one payload at a time.
fn single(
    out: &mut Samples,
    case: &'static str,
    owner: &mut DomainLocal,
    pages: u64,
    times: usize,
) -> Outcome {
    let (cost, result) = Cost::of(|| -> Outcome {
        for _ in 0..times {
            let mapping =
                owner.map(Nothing::new(pages)?, FromDevice).map_err(|failed| failed.error)?;
            owner.unmap(mapping)?;
        }
        Ok(())
    });
    result?;
    out.cost(case, cost, times);
    Ok(())
}

/// Maps [`BATCH`] payloads, revokes them by one call, and waits for them.
fn batches(
    out: &mut Samples,
    case: &'static str,
    owner: &mut DomainLocal,
    pages: u64,
    rounds: usize,
) -> Outcome {
    let (mut mapped, mut revoked) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
    let (cost, result) = Cost::of(|| -> Outcome {
        for _ in 0..rounds {
            for _ in 0..BATCH {
                let payload = Nothing::new(pages)?;
                mapped.push(owner.map(payload, FromDevice).map_err(|failed| failed.error)?);
            }
            owner.revoke_many(mapped.drain(..), &mut revoked);
            for one in revoked.drain(..) {
                owner.wait(one).map_err(|NotQuiesced { error, .. }| error)?;
            }
        }
        Ok(())
    });
    result?;
    out.cost(case, cost, rounds * BATCH);
    Ok(())
}
