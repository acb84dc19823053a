//! `rpc-259`: the receive loop of an RPC server. A request needs 259 pages; serving it consumes
//! some of them, and they are refilled before the next one.
//!
//! What is timed is the refill, one call at a time as in the published figures. Sixteen requests
//! take turns, so the clock is read once in sixteen calls. How many pages each consumed, from 1 to
//! all, and which, is the same for every subject. Consumed pages are freed outside the timed part,
//! to the zone, as the network side would.

use crate::baseline::buddy::{Buddy, Offset};
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::handle::Rng;
use pinfold_core::frame::{Frame, Local, Order, Zone};
use std::cell::RefCell;

/// How many pages a request needs.
pub(in crate::suite) const PAGES: usize = 259;
/// How many requests take turns.
const REQUESTS: usize = 16;

/// A request's pages.
pub(in crate::suite) type Slots<T> = [Option<T>; PAGES];

/// Fills the empty slots by one call for each.
#[inline(always)]
pub(in crate::suite) fn refill_singly<T>(
    slots: &mut Slots<T>,
    mut alloc: impl FnMut() -> Result<T, BenchError>,
) -> Result<(), BenchError> {
    slots.iter_mut().filter(|slot| slot.is_none()).try_for_each(|slot| {
        *slot = Some(alloc()?);
        Ok(())
    })
}

/// Fills the empty slots from a list, which one call allocates. Slots stay empty if there are too
/// few frames.
#[inline(always)]
pub(in crate::suite) fn refill_from_list(slots: &mut Slots<Frame>, local: &mut Local<&Zone>) {
    let holes = slots.iter().filter(|slot| slot.is_none()).count();
    let mut pages = local.take_list(holes);
    slots.iter_mut().filter(|slot| slot.is_none()).for_each(|slot| *slot = pages.next());
}

/// Fills the empty slots by one call for all.
#[inline(always)]
pub(in crate::suite) fn refill_at_once<T>(
    slots: &mut Slots<T>,
    fill: impl FnOnce(&mut Slots<T>) -> usize,
) -> Result<(), BenchError> {
    match fill(slots) {
        PAGES => Ok(()),
        got => Err(BenchError::Short { asked: PAGES, got }),
    }
}

pub(super) fn run(
    harness: &Harness<'_>,
    zone: &Zone,
    buddy: &Buddy,
) -> Result<Vec<Record>, BenchError> {
    let rounds = harness.scale(1_000);
    let free = |slot: &mut Option<Frame>| match slot.take() {
        Some(frame) => Ok(zone.free(frame, Order::PAGE)?),
        None => Ok(()),
    };
    // Consumed pages return to the owner's own list, which saves it refills: the most favourable
    // case for it.
    let owner = RefCell::new(buddy.owner());
    let owner = &owner;
    let free_page = |slot: &mut Option<Offset>| {
        slot.take().into_iter().for_each(|page| owner.borrow_mut().free_page(page));
        Ok(())
    };
    let (mut single, mut list, mut array) = (zone.local(), zone.local(), zone.local());
    harness.interleave(vec![
        Subject::new("single", move |out: &mut Samples| {
            serve(out, rounds, free_page, |slots| {
                let mut owner = owner.borrow_mut();
                refill_singly(slots, || Ok(owner.alloc_page()?))
            })
        }),
        Subject::countable("list", move |out: &mut Samples| {
            serve(out, rounds, free, |slots| {
                refill_from_list(slots, &mut list);
                Ok(())
            })
        }),
        Subject::countable("array", move |out: &mut Samples| {
            serve(out, rounds, free, |slots| refill_at_once(slots, |slots| array.fill(slots)))
        }),
        Subject::countable("pinfold-single", move |out: &mut Samples| {
            serve(out, rounds, free, |slots| {
                refill_singly(slots, || Ok(single.alloc(Order::PAGE)?))
            })
        }),
        Subject::countable("pinfold-shared", move |out: &mut Samples| {
            serve(out, rounds, free, |slots| refill_at_once(slots, |slots| zone.fill(slots)))
        }),
    ])
}

#[inline(always)]
fn serve<T: Copy>(
    out: &mut Samples,
    rounds: usize,
    mut free: impl FnMut(&mut Option<T>) -> Result<(), BenchError>,
    mut refill: impl FnMut(&mut Slots<T>) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let mut requests = vec![[None; PAGES]; REQUESTS];
    let mut rng = Rng::new();
    let mut total = Cost::default();
    for _ in 0..rounds {
        let (cost, result) = Cost::of(|| requests.iter_mut().try_for_each(&mut refill));
        result?;
        total = total + cost;
        for slots in &mut requests {
            // The pages of a request are consumed in ring order from a random one, as a stream of
            // data fills them.
            let (first, consumed) = (rng.below(PAGES), 1 + rng.below(PAGES));
            let (after, before) = slots.split_at_mut(first);
            before.iter_mut().chain(after).take(consumed).try_for_each(&mut free)?;
        }
    }
    requests.iter_mut().flatten().try_for_each(&mut free)?;
    out.cost("rpc-259", total, rounds * REQUESTS);
    Ok(())
}
