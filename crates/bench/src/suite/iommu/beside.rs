//! What another thread waits for while very many mappings are revoked by one call:
//! `revoke-many-1m`.

use super::life::Setup;
use super::payload::Nothing;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use pinfold_core::access::FromDevice;
use pinfold_core::domain::{Domain, NotQuiesced};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Builder;
use std::time::{Duration, Instant};

const CASE: &str = "revoke-many-1m";

/// The unit of the longest call in the pass in which that is shortest. The time is that of the
/// clock, because a thread that waits for a lock may sleep: so it bounds every hold of a lock that
/// a call met, and contains what the thread was not running. A pass may have met few holds:
/// `calls meanwhile` is how many calls the pass with the fewest made.
const LONGEST: &str = "us, longest call";
/// The unit of the longest call of any pass, which the limit is for.
const ONCE: &str = "us, longest once";
/// How many passes there are.
const PASSES: usize = 3;

type Outcome = Result<(), BenchError>;

/// Measures the longest map or revoke of a thread without an owner, which takes the locks of the
/// domain, while the owner of 10^6 mappings revokes them by one call.
pub(super) fn revoke_many(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    let live = harness.scale(1_000_000);
    let rounds = harness.options().runs.min(3);
    harness.with_runs(rounds).interleave(vec![
        Subject::new("pinfold", move |out: &mut Samples| during(out, live, map_and_revoke)),
        Subject::new("empty-loop", move |out: &mut Samples| during(out, live, nothing)),
    ])
}

/// The calls that a thread has made.
#[derive(Default)]
struct Calls {
    count: u32,
    longest: Duration,
}

impl Calls {
    /// Notes a call that began at `started` and ends now.
    fn note(&mut self, started: Instant) {
        self.longest = self.longest.max(started.elapsed());
        self.count = self.count.saturating_add(1);
    }
}

/// Maps and revokes a page. The wait for its flush is not timed: it waits for the device's side,
/// not for a lock.
fn map_and_revoke(domain: &Domain, calls: &mut Calls) -> Outcome {
    let payload = Nothing::new(1)?;
    let started = Instant::now();
    let mapping = domain.map(payload, FromDevice).map_err(|failed| failed.error)?;
    calls.note(started);
    let started = Instant::now();
    let revoked = mapping.revoke();
    calls.note(started);
    revoked.wait().map_err(|NotQuiesced { error, .. }| error)?;
    Ok(())
}

/// Times two calls of nothing.
fn nothing(_: &Domain, calls: &mut Calls) -> Outcome {
    calls.note(Instant::now());
    calls.note(Instant::now());
    Ok(())
}

/// Calls `call` from another thread while one call revokes `live` mappings, in several passes, and
/// records the longest.
fn during(out: &mut Samples, live: usize, call: fn(&Domain, &mut Calls) -> Outcome) -> Outcome {
    let passes = (0..PASSES).map(|_| pass(live, call)).collect::<Result<Vec<_>, _>>()?;
    let us = |calls: &Calls| calls.longest.as_secs_f64() * 1e6;
    out.figure(CASE, Metric::Time, LONGEST, passes.iter().map(us).fold(f64::MAX, f64::min));
    out.figure(CASE, Metric::Time, ONCE, passes.iter().map(us).fold(0.0, f64::max));
    let fewest = passes.iter().map(|calls| calls.count).min().unwrap_or(0);
    out.figure(CASE, Metric::Count, "calls meanwhile", f64::from(fewest));
    Ok(())
}

/// Calls `call` from another thread, again and again, while one call revokes `live` mappings.
fn pass(live: usize, call: fn(&Domain, &mut Calls) -> Outcome) -> Result<Calls, BenchError> {
    let setup = Setup::new()?;
    let domain: &Domain = &setup.domain;
    let mut owner = setup.domain.local();
    let (mut mapped, mut revoked) = (Vec::with_capacity(live), Vec::with_capacity(live));
    for _ in 0..live {
        mapped.push(owner.map(Nothing::new(1)?, FromDevice).map_err(|failed| failed.error)?);
    }
    let (begin, done) = (Barrier::new(2), AtomicBool::new(false));
    let beside = || -> Result<Calls, BenchError> {
        // The first calls link table pages and touch memory for the first time.
        let warm = call(domain, &mut Calls::default());
        begin.wait();
        warm?;
        let mut calls = Calls::default();
        loop {
            call(domain, &mut calls)?;
            if done.load(Ordering::Acquire) {
                return Ok(calls);
            }
        }
    };
    let calls = std::thread::scope(|scope| {
        let thread = Builder::new().spawn_scoped(scope, beside).map_err(BenchError::NoThread)?;
        begin.wait();
        owner.revoke_many(mapped, &mut revoked);
        done.store(true, Ordering::Release);
        thread.join().unwrap_or(Err(BenchError::Thread))
    })?;
    for one in revoked {
        owner.wait(one).map_err(|NotQuiesced { error, .. }| error)?;
    }
    Ok(calls)
}
