//! The life of a mapping in a domain: `domain-4k`, `domain-1m`, `flush-64p`.

use super::payload::Nothing;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Cost, Harness, Samples, Subject};
use crate::policy::{Dma, Memory, PolicyKind};
use crate::record::{Metric, Record};
use pinfold::soft::{Effect, SoftBus, SoftConfig};
use pinfold_core::access::{Access, FromDevice};
use pinfold_core::domain::{Domain, Local, NotQuiesced};
use pinfold_core::share::Shared;
use std::time::Duration;

/// How many mappings are revoked by one call in `domain-4k-batch`.
const BATCH: usize = 256;

type Outcome = Result<(), BenchError>;

/// A software IOMMU whose flushes take no time: what is left is the cost of the domain and of the
/// model's bookkeeping.
pub(super) fn free_flushes() -> SoftConfig {
    SoftConfig { flush_cost: Duration::ZERO, effect: Effect::AtLast, ..SoftConfig::default() }
}

/// A domain which maps [`Nothing`].
pub(super) struct Setup {
    pub(super) domain: Shared<Domain>,
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
        Ok(Self { domain: Shared::new(domain), _bus: bus })
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
        Subject::countable("pinfold-shared", move |out| {
            shared(out, "domain-4k", domain, small, times)
        }),
        Subject::countable("pinfold", move |out| {
            batches(out, "domain-4k-batch", &mut domain.local(), times / BATCH)
        }),
        Subject::countable("pinfold-many", move |out| {
            batches_by_one_call(out, "domain-4k-batch", &mut domain.local(), times / BATCH)
        }),
        Subject::countable("pinfold", move |out| {
            single(out, "domain-1m", &mut domain.local(), large, times / 8)
        }),
        Subject::countable("pinfold-shared", move |out| {
            shared(out, "domain-1m", domain, large, times / 8)
        }),
    ])
}

/// Maps, revokes and waits for one payload at a time.
fn single(
    out: &mut Samples,
    case: &'static str,
    owner: &mut Local,
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

/// The same through the domain, without an owner.
fn shared(
    out: &mut Samples,
    case: &'static str,
    domain: &Domain,
    pages: u64,
    times: usize,
) -> Outcome {
    let (cost, result) = Cost::of(|| -> Outcome {
        for _ in 0..times {
            let mapping =
                domain.map(Nothing::new(pages)?, FromDevice).map_err(|failed| failed.error)?;
            mapping.unmap()?;
        }
        Ok(())
    });
    result?;
    out.cost(case, cost, times);
    Ok(())
}

/// Maps [`BATCH`] payloads, revokes them by one call, and waits for them.
fn batches(out: &mut Samples, case: &'static str, owner: &mut Local, rounds: usize) -> Outcome {
    let (mut mapped, mut revoked) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
    let (cost, result) = Cost::of(|| -> Outcome {
        for _ in 0..rounds {
            for _ in 0..BATCH {
                mapped
                    .push(owner.map(Nothing::new(1)?, FromDevice).map_err(|failed| failed.error)?);
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

/// The same, mapped by one call too.
fn batches_by_one_call(
    out: &mut Samples,
    case: &'static str,
    owner: &mut Local,
    rounds: usize,
) -> Outcome {
    let mut revoked = Vec::with_capacity(BATCH);
    let (cost, result) = Cost::of(|| -> Outcome {
        for _ in 0..rounds {
            let payloads: Vec<Nothing> =
                (0..BATCH).map(|_| Nothing::new(1)).collect::<Result<_, _>>()?;
            let mapped = owner.map_many(payloads, FromDevice).map_err(|failed| failed.error)?;
            owner.revoke_many(mapped, &mut revoked);
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

/// Counts what one descriptor of 64 separately mapped pages needs: by one call, and page by page.
pub(super) fn flush_64p(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    harness.once().interleave(vec![
        Subject::new("pinfold", |out: &mut Samples| {
            let setup = Setup::new()?;
            let mut owner = setup.domain.local();
            batches_of_64(&mut owner)?;
            let before = owner.stats().backend.invalidations;
            batches_of_64(&mut owner)?;
            let after = owner.stats().backend.invalidations;
            record_flushes(out, after.sent - before.sent, after.waits - before.waits);
            Ok(())
        }),
        Subject::new("magazines-strict", |out: &mut Samples| {
            let memory = Memory::new(64 * 4096)?;
            let policy = PolicyKind::MagazinesStrict.create(&memory, &free_flushes())?;
            let mut thread = policy.thread();
            let page = memory.range(0, 4096).ok_or(BenchError::Addresses)?;
            let mapped: Vec<Dma> =
                (0..64).map(|_| thread.map(page, Access::WRITE)).collect::<Result<_, _>>()?;
            mapped.into_iter().try_for_each(|dma| thread.unmap(dma, &mut Vec::new()))?;
            let stats = policy.stats();
            record_flushes(out, stats.invalidations, stats.waits);
            Ok(())
        }),
    ])
}

fn batches_of_64(owner: &mut Local) -> Outcome {
    let (mut mapped, mut revoked) = (Vec::new(), Vec::new());
    for _ in 0..64 {
        mapped.push(owner.map(Nothing::new(1)?, FromDevice).map_err(|failed| failed.error)?);
    }
    owner.revoke_many(mapped, &mut revoked);
    for one in revoked {
        owner.wait(one).map_err(|NotQuiesced { error, .. }| error)?;
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a few")]
fn record_flushes(out: &mut Samples, invalidations: u64, waits: u64) {
    out.figure("flush-64p", Metric::Count, "invalidations", invalidations as f64);
    out.figure("flush-64p", Metric::Count, "waits/page", waits as f64 / 64.0);
}
