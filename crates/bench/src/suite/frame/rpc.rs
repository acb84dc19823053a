//! `rpc-259`: an RPC server's receive loop. A request needs 259 pages; serving it consumes some of them, and before the
//! next one the missing are filled in.
//!
//! What is timed is the refill, a call at a time as in the published figures. Sixteen requests take turns, so that
//! the clock is read once in sixteen calls; how many pages each consumed, from 1 to all, and which, is the same for
//! every subject. Consumed pages go back while the clock stands, to the zone as they would from the network's side.

use super::BenchError;
use crate::baseline::buddy::{Buddy, Offset};
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::hand::Rng;
use pinfold_core::frame::{Frame, Order, Zone};
use std::cell::RefCell;

/// How many pages a request needs.
const PAGES: usize = 259;
/// How many requests take turns.
const REQUESTS: usize = 16;

/// A request's pages.
type Slots<T> = [Option<T>; PAGES];

pub(super) fn run(harness: &Harness<'_>, zone: &Zone, buddy: &Buddy) -> Result<Vec<Record>, BenchError> {
    let rounds = harness.scale(1_000);
    let give = |slot: &mut Option<Frame>| match slot.take() {
        Some(frame) => Ok(zone.free(frame, Order::PAGE)?),
        None => Ok(()),
    };
    // What was consumed comes back to the owner's own list, which spares it a refill: the kindest that can be.
    let owner = RefCell::new(buddy.owner());
    let owner = &owner;
    let give_page = |slot: &mut Option<Offset>| {
        slot.take().into_iter().for_each(|page| owner.borrow_mut().free_page(page));
        Ok(())
    };
    let (mut single, mut list, mut array) = (zone.local(), zone.local(), zone.local());
    harness.interleave(vec![
        Subject::new("single", move |out: &mut Samples| {
            serve(out, rounds, give_page, |slots| {
                let mut owner = owner.borrow_mut();
                slots.iter_mut().filter(|slot| slot.is_none()).try_for_each(|slot| {
                    *slot = Some(owner.alloc_page()?);
                    Ok(())
                })
            })
        }),
        Subject::countable("list", move |out: &mut Samples| {
            serve(out, rounds, give, |slots| {
                let holes = slots.iter().filter(|slot| slot.is_none()).count();
                let mut pages = list.take_list(holes);
                slots.iter_mut().filter(|slot| slot.is_none()).for_each(|slot| *slot = pages.next());
                Ok(())
            })
        }),
        Subject::countable("array", move |out: &mut Samples| {
            serve(out, rounds, give, |slots| match array.fill(slots) {
                PAGES => Ok(()),
                got => Err(BenchError::Short { asked: PAGES, got }),
            })
        }),
        Subject::countable("pinfold-single", move |out: &mut Samples| {
            serve(out, rounds, give, |slots| {
                slots.iter_mut().filter(|slot| slot.is_none()).try_for_each(|slot| {
                    *slot = Some(single.alloc(Order::PAGE)?);
                    Ok(())
                })
            })
        }),
        Subject::countable("pinfold-shared", move |out: &mut Samples| {
            serve(out, rounds, give, |slots| match zone.fill(slots) {
                PAGES => Ok(()),
                got => Err(BenchError::Short { asked: PAGES, got }),
            })
        }),
    ])
}

#[inline(always)]
fn serve<T: Copy>(
    out: &mut Samples,
    rounds: usize,
    mut give: impl FnMut(&mut Option<T>) -> Result<(), BenchError>,
    mut refill: impl FnMut(&mut Slots<T>) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let mut requests = vec![[None; PAGES]; REQUESTS];
    let mut dice = Rng::new();
    let mut total = Cost::default();
    for _ in 0..rounds {
        let (cost, result) = Cost::of(|| requests.iter_mut().try_for_each(&mut refill));
        result?;
        total = total + cost;
        for slots in &mut requests {
            // A request's pages are consumed from one on, round and round, as a stream of data lies in them.
            let (first, consumed) = (dice.below(PAGES), 1 + dice.below(PAGES));
            let (after, before) = slots.split_at_mut(first);
            before.iter_mut().chain(after).take(consumed).try_for_each(&mut give)?;
        }
    }
    requests.iter_mut().flatten().try_for_each(&mut give)?;
    out.cost("rpc-259", total, rounds * REQUESTS);
    Ok(())
}
