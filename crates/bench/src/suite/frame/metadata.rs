//! What a zone's metadata costs, and how well a zone keeps large runs whole.

use super::setup::FRAMES;
use crate::baseline::buddy::Buddy;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Cost, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use crate::suite::handle::{Baseline, Handle, Rng};
use pinfold_core::frame::{Order, Zone};

/// How many frames are freed at a time and allocated again.
const BURST: usize = 8192;

/// Counts the free runs of 2 MiB after many random frees and allocations of frames, with 70 %
/// allocated.
pub(super) fn churn(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    let steps = harness.scale(10_000_000);
    harness.once().interleave(vec![
        Subject::new("pinfold", move |out| {
            let zone = Zone::new(FRAMES)?;
            let mut local = zone.local();
            churn_frames(&mut local, steps)?;
            drop(local);
            record(out, std::iter::from_fn(|| zone.alloc(Order::HUGE).ok()).count())
        }),
        Subject::new("single", move |out| {
            let buddy = Buddy::new(FRAMES);
            let mut owner = Baseline(buddy.owner());
            churn_frames(&mut owner, steps)?;
            drop(owner);
            record(out, buddy.free_of(Order::HUGE.get()))
        }),
    ])
}

#[expect(clippy::cast_precision_loss, reason = "at most 512 runs")]
fn record(out: &mut Samples, runs: usize) -> Result<(), BenchError> {
    out.figure("churn-70", Metric::Count, "runs of 2 MiB", runs as f64);
    Ok(())
}

/// Allocates all frames and frees 30 % at random, so that no large run is whole; then repeatedly
/// frees some of the others at random and allocates as many. The frames held at the end stay
/// allocated.
fn churn_frames<H: Handle>(handle: &mut H, steps: usize) -> Result<(), BenchError> {
    let mut held: Vec<H::Object> = Vec::with_capacity(FRAMES as usize);
    for _ in 0..FRAMES {
        held.push(handle.alloc()?);
    }
    let mut rng = Rng::new();
    let mut free = |handle: &mut H, held: &mut Vec<H::Object>, count: usize| {
        (0..count).try_for_each(|_| handle.free(held.swap_remove(rng.below(held.len()))))
    };
    let count = held.len() / 10 * 7;
    let mut steps_made = held.len() - count;
    free(handle, &mut held, steps_made)?;
    while steps_made < steps {
        // More than any cache of frames holds, so it cannot just allocate the same ones again.
        free(handle, &mut held, BURST)?;
        while held.len() < count {
            held.push(handle.alloc()?);
        }
        steps_made += 2 * BURST;
    }
    Ok(())
}

/// Measures the metadata of a 1 TiB zone: bytes per frame, and the time to create it.
pub(super) fn one_tebibyte(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    harness.interleave(vec![Subject::new("pinfold", |out: &mut Samples| {
        let (cost, zone) = Cost::of(|| Zone::new(Zone::MAX_FRAMES));
        let zone = zone?;
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 bytes")]
        let bytes = zone.metadata_bytes() as f64 / f64::from(zone.frames());
        out.figure("zone-1t", Metric::Bytes, "bytes/frame", bytes);
        out.figure("zone-1t", Metric::Time, "ms", cost.ns / 1e6);
        Ok(())
    })])
}
