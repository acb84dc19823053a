//! `refused-1t`: how long a zone of 1 TiB takes to refuse a run that it does not have.

use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use crate::suite::longest::{Longest, empty_loop};
use crate::suite::reserved::{fill, free_at_random};
use pinfold_core::frame::{Frame, FrameError, Order, Zone};

const CASE: &str = "refused-1t";

/// The orders of the runs: 2 frames to 1 MiB.
const ORDERS: std::ops::RangeInclusive<u8> = 1..=8;

/// Measures one allocation of each order in a zone that has no such run, at several occupancies.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    let frames = harness.scale(Zone::MAX_FRAMES as usize);
    let frames = u32::try_from(frames).unwrap_or(Zone::MAX_FRAMES);
    harness.with_runs(harness.options().runs.min(3)).interleave(vec![
        Subject::new("pinfold", move |out: &mut Samples| occupancies(out, frames)),
        Subject::new("empty-loop", move |out: &mut Samples| {
            empty_loop(out, CASE, 6 * ORDERS.count());
            Ok(())
        }),
    ])
}

/// The longest refusals of a zone.
#[derive(Default)]
struct Refusals {
    /// The longest of all, in microseconds.
    longest: f64,
    /// The longest of those that were not the first of their order at an occupancy.
    again: f64,
}

impl Refusals {
    /// Asks for a run of each order, twice. Those that the zone has do not count.
    fn note(&mut self, zone: &Zone) -> Result<(), BenchError> {
        for again in [false, true] {
            for order in ORDERS.filter_map(Order::new) {
                let mut longest = Longest::new();
                longest.begin();
                let run = zone.alloc(order);
                longest.note();
                match run {
                    Err(FrameError::Exhausted { .. }) => {
                        self.longest = self.longest.max(longest.us())
                    }
                    Err(error) => return Err(error.into()),
                    Ok(run) => {
                        zone.free(run, order)?;
                        continue;
                    }
                }
                if again {
                    self.again = self.again.max(longest.us());
                }
            }
        }
        Ok(())
    }
}

/// Records the longest refusal of a full zone, then with 1 % of the frames free at random, and of
/// another with every second frame free, and of one that has only given out single frames, and was
/// never asked for a run.
fn occupancies(out: &mut Samples, frames: u32) -> Result<(), BenchError> {
    let mut all = Refusals::default();
    let mut at = |zone: &Zone, unit: &'static str| -> Result<(), BenchError> {
        let mut here = Refusals::default();
        here.note(zone)?;
        out.figure(CASE, Metric::Time, unit, here.longest);
        all.longest = all.longest.max(here.longest);
        all.again = all.again.max(here.again);
        Ok(())
    };
    let zone = Zone::new(frames)?;
    fill(&zone)?;
    at(&zone, "us, full")?;
    free_at_random(&zone, frames / 100)?;
    at(&zone, "us, 1 % free")?;
    let zone = Zone::new(frames)?;
    fill(&zone)?;
    free_every_second(&zone)?;
    at(&zone, "us, half free")?;
    let zone = Zone::new(frames)?;
    fill_by_frames(&zone);
    free_every_second(&zone)?;
    at(&zone, "us, first run asked")?;
    out.figure(CASE, Metric::Time, "us, not the first", all.again);
    out.figure(CASE, Metric::Time, crate::suite::longest::LONGEST, all.longest);
    Ok(())
}

/// Allocates all frames of a zone, one by one.
fn fill_by_frames(zone: &Zone) {
    let mut owner = zone.local();
    let mut slots = [None; 4096];
    while owner.fill(&mut slots) > 0 {
        slots.fill(None);
    }
}

/// Frees every second frame of a full zone.
fn free_every_second(zone: &Zone) -> Result<(), FrameError> {
    let mut owner = zone.local();
    let mut odd = (1..zone.frames()).step_by(2).filter_map(Frame::new);
    odd.try_for_each(|frame| owner.free(frame, Order::PAGE))
}
