//! What the account of frames costs, and how well it keeps large runs whole.

use super::{BenchError, FRAMES};
use crate::baseline::buddy::Buddy;
use crate::harness::{COUNTS_RMW, Cost, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use crate::suite::hand::{Baseline, Hand, Rng};
use pinfold_core::frame::{Order, Zone};

/// How many frames go back at a time, and come again.
const BURST: usize = 8192;

/// How many runs of 2 MiB are to be had after frames were freed and taken at random for long, at 70 %.
pub(super) fn churn(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    let steps = harness.scale(10_000_000);
    harness.once().interleave(vec![
        Subject::new("pinfold", move |out| {
            let zone = Zone::new(FRAMES)?;
            let mut local = zone.local();
            stir(&mut local, steps)?;
            drop(local);
            tell(out, std::iter::from_fn(|| zone.alloc(Order::HUGE).ok()).count())
        }),
        Subject::new("single", move |out| {
            let buddy = Buddy::new(FRAMES);
            let mut owner = Baseline(buddy.owner());
            stir(&mut owner, steps)?;
            drop(owner);
            tell(out, buddy.free_of(Order::HUGE.get()))
        }),
    ])
}

#[expect(clippy::cast_precision_loss, reason = "at most 512 runs")]
fn tell(out: &mut Samples, runs: usize) -> Result<(), BenchError> {
    out.figure("churn-70", Metric::Count, "runs of 2 MiB", runs as f64);
    Ok(())
}

/// Takes all frames and gives 30 % back, chosen at random, so that no large run is whole; then gives some of the others
/// back, chosen at random, and takes as many again, over and over. Those that are held at the end stay taken.
fn stir<H: Hand>(hand: &mut H, steps: usize) -> Result<(), BenchError> {
    let mut held: Vec<H::Thing> = Vec::with_capacity(FRAMES as usize);
    for _ in 0..FRAMES {
        held.push(hand.get()?);
    }
    let mut dice = Rng::new();
    let mut give = |hand: &mut H, held: &mut Vec<H::Thing>, count: usize| {
        (0..count).try_for_each(|_| hand.put(held.swap_remove(dice.below(held.len()))))
    };
    let count = held.len() / 10 * 7;
    let mut done = held.len() - count;
    give(hand, &mut held, done)?;
    while done < steps {
        // More than any cache of frames has, so that it does not just hand the same ones out again.
        give(hand, &mut held, BURST)?;
        while held.len() < count {
            held.push(hand.get()?);
        }
        done += 2 * BURST;
    }
    Ok(())
}

/// The account of 1 TiB: how many bytes a frame, and how long it takes to make.
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
