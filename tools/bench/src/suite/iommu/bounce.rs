//! Payloads below a page: `bounce-64` to `bounce-16k`, a copy each way against a mapping each way.

use super::life::Setup;
use super::payload::Nothing;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Cost, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use pinfold::arena::Arena;
use pinfold::memory::{BounceLocal, BouncePool};
use pinfold::soft::SoftConfig;
use pinfold_core::access::{FromDevice, ToDevice};
use pinfold_core::domain::{DomainLocal, NotQuiesced, Unrevoked};
use std::hint::black_box;
use std::time::Duration;

type Outcome = Result<(), BenchError>;

const CASES: [(&str, usize); 4] =
    [("bounce-64", 64), ("bounce-1k", 1 << 10), ("bounce-4k", 4 << 10), ("bounce-16k", 16 << 10)];
/// The program's memory that the payloads are taken from in turn, which the nearer caches hold in
/// part.
const PROGRAM: usize = 4 << 20;
/// The number of mappings revoked by one call.
const BATCH: usize = 16;
/// The time of a flush, as `pinfold io` models it.
const FLUSH: Duration = Duration::from_micros(1);

/// Measures a payload to the device and one from it: bounced, mapped with flushes that take no
/// time, and mapped with flushes on the model's timeline, each awaited or 16 mappings at a time.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let domain = pinfold::Domain::soft()?;
    let arena = Arena::builder().size(4 << 20).build(&domain)?;
    let (to, from) = (BouncePool::new(&arena)?, BouncePool::new(&arena)?);
    let free = Setup::new()?;
    let timed = Setup::with(SoftConfig { flush_cost: FLUSH, ..SoftConfig::default() })?;
    let (to, from, free, timed) = (&to, &from, &free.domain, &timed.domain);
    let times = harness.scale(16_000);
    let wanted = CASES.into_iter().filter(|(case, _)| harness.wants(case));
    let subjects = wanted.flat_map(|(case, len)| {
        [
            Subject::countable("bounced", move |out| {
                bounced(out, case, &mut to.local(), &mut from.local(), len, times)
            }),
            Subject::countable("pinfold", move |out| {
                let cost = mapped(&mut free.local(), len, times)?;
                out.cost(case, cost, times);
                Ok(())
            }),
            Subject::new("strict", move |out| {
                let cost = mapped(&mut timed.local(), len, times)?;
                modelled(out, case, cost, times);
                Ok(())
            }),
            Subject::new("batch", move |out| {
                let cost = batched(&mut timed.local(), len, times)?;
                modelled(out, case, cost, times.div_ceil(BATCH / 2) * (BATCH / 2));
                Ok(())
            }),
        ]
    });
    harness.interleave(subjects.collect())
}

#[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 operations")]
fn modelled(out: &mut Samples, case: &'static str, cost: Cost, times: usize) {
    if !COUNTS_RMW {
        out.modelled(case, Metric::Time, "ns/op", cost.ns / times.max(1) as f64);
    }
}

/// Copies in and out, with nothing between.
fn bounced(
    out: &mut Samples,
    case: &'static str,
    to: &mut BounceLocal<ToDevice>,
    from: &mut BounceLocal<FromDevice>,
    len: usize,
    times: usize,
) -> Outcome {
    let (mut program, mut at) = (vec![1; PROGRAM + len], 0);
    let (cost, result) = Cost::of(|| -> Outcome {
        for _ in 0..times {
            // One byte further than the last one ended: not aligned, which is why it is bounced.
            at = (at + len + 1) % PROGRAM;
            let payload = program.get_mut(at..at + len).unwrap_or_default();
            let sent = to.copy_of(payload)?;
            to.free(black_box(sent));
            let received = from.alloc(len)?;
            received.memory().copy_to_slice(0, payload)?;
            from.free(received);
        }
        Ok(())
    });
    result?;
    out.cost(case, cost, times);
    Ok(())
}

/// Returns whole pages for a payload.
fn pages(len: usize) -> Result<Nothing, BenchError> {
    Nothing::new(len.div_ceil(4096) as u64)
}

/// Maps, revokes and waits, for one payload at a time.
fn mapped(owner: &mut DomainLocal, len: usize, times: usize) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| -> Outcome {
        for _ in 0..times {
            let mapping = owner.map(pages(len)?, ToDevice).map_err(|failed| failed.error)?;
            owner.unmap(mapping)?;
            let mapping = owner.map(pages(len)?, FromDevice).map_err(|failed| failed.error)?;
            owner.unmap(mapping)?;
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// Maps [`BATCH`] payloads, revokes them by one call, and waits for them.
fn batched(owner: &mut DomainLocal, len: usize, times: usize) -> Result<Cost, BenchError> {
    let (mut mapped, mut revoked) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
    let (cost, result) = Cost::of(|| -> Outcome {
        for _ in 0..times.div_ceil(BATCH / 2) {
            for _ in 0..BATCH / 2 {
                let sent = owner.map(pages(len)?, ToDevice).map_err(|failed| failed.error)?;
                let received = owner.map(pages(len)?, FromDevice).map_err(|failed| failed.error)?;
                mapped.extend([Unrevoked::from(sent), received.into()]);
            }
            owner.revoke_many(mapped.drain(..), &mut revoked);
            for one in revoked.drain(..) {
                owner.wait(one).map_err(|NotQuiesced { error, .. }| error)?;
            }
        }
        Ok(())
    });
    result.map(|()| cost)
}
