//! The order of the calls of the real code is one of the model's: a domain over a recording table
//! format and queue is used at random, and the model can do the same. With a mistake, it cannot.

mod accept;
mod recorder;

use accept::accepts;
use pinfold_core::access::{Access, FromDevice};
use pinfold_core::domain::{Backend, Mapping, Revocation, Revoked, Wait, WindowToken};
use pinfold_core::invalidate::{Ticket, WaitLimit};
use pinfold_core::known_bad;
use pinfold_model::Mistake;
use pinfold_model::state::{BUFFERS, DOMAIN, WINDOWS};
use recorder::{Event, Memory};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

const STEPS: usize = 60;
const SEEDS: u64 = 40;

/// The switch in the stack that makes a mistake. Those without one are made where the trace is
/// recorded: in what the stack submits, and in what it takes for completed (`recorder`, and below).
fn switch(mistake: Mistake) -> Option<known_bad::Mistake> {
    Some(match mistake {
        Mistake::FlushBeforeClear => known_bad::Mistake::FlushBeforeClear,
        Mistake::TablePageEarly => known_bad::Mistake::TablePageEarly,
        Mistake::TablePageEarlyAt => known_bad::Mistake::TablePageEarlyAt(1),
        Mistake::IovaEarly => known_bad::Mistake::IovaEarly,
        Mistake::WindowEarly => known_bad::Mistake::WindowEarly,
        Mistake::BufferEarly => known_bad::Mistake::BufferEarly,
        Mistake::RollbackNotAwaited => known_bad::Mistake::RollbackNotAwaited,
        Mistake::NoFlush
        | Mistake::TimeoutIsCompletion
        | Mistake::DeviceTlbFirst
        | Mistake::AbortIsCompletion
        | Mistake::LeafFlushForTablePage
        | Mistake::FirstUnitOnly => return None,
    })
}

/// Uses a domain at random, and returns what was seen.
fn trace_of_a_domain(seed: u64, mistake: Option<Mistake>) -> Vec<Event> {
    let (domain, queue, kept) = recorder::domain(mistake);
    known_bad::make(mistake.and_then(switch));
    let mut random = Random(seed);
    let mut mapped: Vec<(u8, Mapping<Memory, FromDevice>)> = Vec::new();
    let mut revoked: Vec<(u8, Revoked<Memory>)> = Vec::new();
    // The payloads that the program has, according to the recording.
    let mut free: Vec<u8> = (0..BUFFERS as u8).collect();
    let mut events = Vec::new();
    for _ in 0..STEPS {
        match random.below(14) {
            0..4 => {
                if !free.is_empty() {
                    let number = free.swap_remove(random.below(free.len()));
                    match domain.map(Memory(number), FromDevice) {
                        Ok(mapping) => mapped.push((number, mapping)),
                        // No address or no page; the payload was never mapped.
                        Err(error) => {
                            std::mem::forget(error.payload);
                            free.push(number);
                        }
                    }
                }
            }
            4 | 5 if !mapped.is_empty() => {
                let (number, one) = mapped.swap_remove(random.below(mapped.len()));
                revoked.push((number, one.revoke()));
            }
            6 | 7 if !revoked.is_empty() => {
                let (number, one) = revoked.swap_remove(random.below(revoked.len()));
                match one.poll() {
                    Ok(payload) => drop(payload),
                    Err(pending) => revoked.push((number, pending)),
                }
            }
            8 | 9 if !revoked.is_empty() => {
                let (number, one) = revoked.swap_remove(random.below(revoked.len()));
                let waited = one.wait_for(WaitLimit { time_ns: u64::MAX, polls: 1 });
                if mistake == Some(Mistake::TimeoutIsCompletion) && waited.is_err() {
                    std::mem::forget(waited);
                    drop(Memory(number));
                }
            }
            10 => queue.0.abort(),
            _ => {
                queue.0.carry();
                domain.release_late();
            }
        }
        let new = recorder::taken();
        free.extend(new.iter().filter_map(|event| match event {
            Event::Returned(number) => Some(*number),
            _ => None,
        }));
        events.extend(new);
    }
    known_bad::make(None);
    // No further steps: what is still mapped stays.
    std::mem::forget((mapped, revoked, kept));
    events
}

/// Uses pinned windows at random, and returns what was seen.
fn trace_of_windows(seed: u64, mistake: Option<Mistake>) -> Vec<Event> {
    let (backend, queue, ranges) = recorder::pinned(mistake);
    known_bad::make(mistake.and_then(switch));
    let backend = Arc::new(backend);
    let mut random = Random(seed);
    let mut windows: [Option<WindowToken>; WINDOWS] = Default::default();
    let mut mapped: [Option<u8>; WINDOWS] = [None; WINDOWS];
    let mut revoked: [Option<(u8, Ticket)>; WINDOWS] = [None; WINDOWS];
    let mut free: Vec<u8> = (0..BUFFERS as u8).collect();
    for _ in 0..STEPS {
        let at = random.below(WINDOWS);
        let idle = mapped[at].is_none() && revoked[at].is_none();
        match (random.below(6), &windows[at]) {
            (0, None) => {
                windows[at] = Arc::clone(&backend).window(recorder::window_of(ranges[at]));
            }
            (0, Some(_)) if idle => windows[at].take().unwrap().close(),
            (1, Some(window)) if idle => {
                if !free.is_empty() {
                    let number = free.swap_remove(random.below(free.len()));
                    let memory = Memory(number);
                    let access = Access::READ | Access::WRITE;
                    backend.map(ranges[at], memory.pages(), access, Some(window)).unwrap();
                    std::mem::forget(memory);
                    mapped[at] = Some(number);
                }
            }
            (2, window) => {
                if let Some(number) = mapped[at].take() {
                    let one = Revocation { range: ranges[at], window: window.as_ref() };
                    let ticket = backend.revoke(one, &mut std::iter::empty()).unwrap();
                    revoked[at] = Some((number, ticket));
                }
            }
            (3, _) => {
                if let Some((number, _)) = revoked[at]
                    .take_if(|(_, ticket)| backend.wait(*ticket, Wait::Not).is_ready_and_ok())
                {
                    drop(Memory(number));
                    free.push(number);
                }
            }
            (4, Some(window)) if idle && !free.is_empty() => {
                let memory = Memory(free[random.below(free.len())]);
                let (range, pages) = (recorder::two_pages(ranges[at]), memory.and_unregistered());
                queue.0.carry_for_waits(true);
                let failed = backend.map(range, pages, Access::READ, Some(window)).unwrap_err();
                queue.0.carry_for_waits(false);
                assert!(!failed.stays_reachable(), "{failed}");
                // As the domain returns it.
                drop(memory);
            }
            _ => queue.0.carry(),
        }
    }
    known_bad::make(None);
    recorder::taken()
}

/// A flush that has completed. (Past its deadline, a check is ready and no success.)
trait ReadyAndOk {
    fn is_ready_and_ok(&self) -> bool;
}

impl<E> ReadyAndOk for std::task::Poll<Result<(), E>> {
    fn is_ready_and_ok(&self) -> bool {
        matches!(self, Self::Ready(Ok(())))
    }
}

fn follow(traces: impl IntoIterator<Item = Vec<Event>>) -> BTreeSet<Event> {
    let mut kinds = BTreeSet::new();
    for (seed, trace) in traces.into_iter().enumerate() {
        if let Err((number, event)) = accepts(&trace) {
            panic!("seed {seed}: the model does not make {event:?} after {:?}", &trace[..number]);
        }
        kinds.extend(trace);
    }
    kinds
}

#[test]
fn what_a_domain_does_is_what_the_model_does() {
    let kinds = follow((0..SEEDS).map(|seed| trace_of_a_domain(seed, None)));
    // Every kind was seen, for each window and payload, or the comparison says little.
    for at in 0..WINDOWS as u8 {
        for kind in [Event::Link(at), Event::Clear(at), Event::Retire(at), Event::Reclaim(at)] {
            assert!(kinds.contains(&kind), "no {kind:?} in {kinds:?}");
        }
        for number in 0..BUFFERS as u8 {
            assert!(
                kinds.contains(&Event::Leaf(at, number))
                    && kinds.contains(&Event::Returned(number))
            );
        }
    }
    assert!(kinds.contains(&Event::Carried) && kinds.contains(&Event::Aborted));
    let recovery = Event::Submit { iotlb: DOMAIN, device: (1 << WINDOWS) - 1 };
    assert!(kinds.contains(&recovery), "no {recovery:?} in {kinds:?}");
}

#[test]
fn what_pinned_windows_do_is_what_the_model_does() {
    let kinds = follow((0..SEEDS).map(|seed| trace_of_windows(seed, None)));
    for at in 0..WINDOWS as u8 {
        for kind in [Event::Link(at), Event::Clear(at), Event::Retire(at), Event::Leaf(at, at)] {
            assert!(kinds.contains(&kind), "no {kind:?} in {kinds:?}");
        }
    }
    assert!(kinds.iter().any(|kind| matches!(kind, Event::Reclaim(_))));
    // Flushes of a leaf alone.
    for leaf in [1, 2] {
        assert!(kinds.contains(&Event::Submit { iotlb: leaf, device: leaf }));
    }
}

/// All mistakes but two are an order of what is recorded here:
/// - `WindowEarly` is a choice between the 512 addresses of an owner's window, and a trace has one of
///   each window, as the model has. The adversary shows it (`known_bad` in pinfold's `tests/adversary`).
/// - `FirstUnitOnly` is made above the queues of several units, and a trace is that of one queue. The
///   tests of `invalidate/fan_out.rs` show it, exhaustively in its loom model.
#[test]
fn what_is_done_with_a_mistake_the_model_does_not() {
    for mistake in Mistake::ALL {
        let trace = match mistake {
            Mistake::WindowEarly | Mistake::FirstUnitOnly => continue,
            Mistake::RollbackNotAwaited => trace_of_windows,
            _ => trace_of_a_domain,
        };
        let refused = (0..SEEDS).any(|seed| accepts(&trace(seed, Some(mistake))).is_err());
        assert!(refused, "{mistake:?}");
    }
}
