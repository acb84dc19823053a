//! The order of the calls of the real code is one of the model's: a domain over a recording table
//! format and queue is used at random, and the model can do the same. With a mistake of
//! `known_bad`, it cannot.

mod accept;
mod recorder;

use accept::accepts;
use pinfold_core::access::{Access, FromDevice};
use pinfold_core::domain::{Backend, Mapping, Revocation, Revoked, Wait, WindowToken};
use pinfold_core::invalidate::{Ticket, WaitLimit};
use pinfold_core::known_bad::{self, Mistake};
use pinfold_model::state::{BUFFERS, WINDOWS};
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

/// Uses a domain at random, and returns what was seen.
fn trace_of_a_domain(seed: u64, mistake: Option<Mistake>) -> Vec<Event> {
    let (domain, queue, kept) = recorder::domain();
    known_bad::make(mistake);
    let mut random = Random(seed);
    let mut mapped: Vec<Mapping<Memory, FromDevice>> = Vec::new();
    let mut revoked: Vec<Revoked<Memory>> = Vec::new();
    // The payloads that the program has, according to the recording.
    let mut free: Vec<u8> = (0..BUFFERS as u8).collect();
    let mut events = Vec::new();
    for _ in 0..STEPS {
        match random.below(6) {
            0 | 1 => {
                if !free.is_empty() {
                    let number = free.swap_remove(random.below(free.len()));
                    match domain.map(Memory(number), FromDevice) {
                        Ok(mapping) => mapped.push(mapping),
                        // No address or no page; the payload was never mapped.
                        Err(error) => {
                            std::mem::forget(error.payload);
                            free.push(number);
                        }
                    }
                }
            }
            2 if !mapped.is_empty() => {
                revoked.push(mapped.swap_remove(random.below(mapped.len())).revoke());
            }
            3 if !revoked.is_empty() => {
                match revoked.swap_remove(random.below(revoked.len())).poll() {
                    Ok(payload) => drop(payload),
                    Err(pending) => revoked.push(pending),
                }
            }
            4 if !revoked.is_empty() => {
                let one = revoked.swap_remove(random.below(revoked.len()));
                drop(one.wait_for(WaitLimit { time_ns: u64::MAX, polls: 1 }));
            }
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
fn trace_of_windows(seed: u64) -> Vec<Event> {
    let (backend, queue, ranges) = recorder::pinned();
    let backend = Arc::new(backend);
    let mut random = Random(seed);
    let mut windows: [Option<WindowToken>; WINDOWS] = Default::default();
    let mut mapped: [Option<u8>; WINDOWS] = [None; WINDOWS];
    let mut revoked: [Option<(u8, Ticket)>; WINDOWS] = [None; WINDOWS];
    let mut free: Vec<u8> = (0..BUFFERS as u8).collect();
    for _ in 0..STEPS {
        let at = random.below(WINDOWS);
        let idle = mapped[at].is_none() && revoked[at].is_none();
        match (random.below(5), &windows[at]) {
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
            _ => queue.0.carry(),
        }
    }
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
    assert!(kinds.contains(&Event::Carried));
}

#[test]
fn what_pinned_windows_do_is_what_the_model_does() {
    let kinds = follow((0..SEEDS).map(trace_of_windows));
    for at in 0..WINDOWS as u8 {
        for kind in [Event::Link(at), Event::Clear(at), Event::Retire(at), Event::Leaf(at, at)] {
            assert!(kinds.contains(&kind), "no {kind:?} in {kinds:?}");
        }
    }
    assert!(kinds.iter().any(|kind| matches!(kind, Event::Reclaim(_))));
    // Flushes of a leaf alone.
    assert!(kinds.contains(&Event::Submit(1)) && kinds.contains(&Event::Submit(2)));
}

#[test]
fn what_a_domain_does_with_a_mistake_the_model_does_not() {
    use Mistake::{BufferEarly, FlushBeforeClear, IovaEarly, TablePageEarly, TablePageEarlyAt};
    for mistake in [FlushBeforeClear, TablePageEarly, TablePageEarlyAt(1), IovaEarly, BufferEarly] {
        let refused =
            (0..SEEDS).filter(|seed| accepts(&trace_of_a_domain(*seed, Some(mistake))).is_err());
        assert!(refused.count() > 0, "{mistake:?}");
    }
}
