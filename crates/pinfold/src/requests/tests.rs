//! The loop over a backend whose flushes a test completes by hand, and over the software IOMMU with
//! a unit that hangs or fails.

mod ends;
mod manual;
mod model;
mod panics;
mod ready;

use super::*;
use crate::soft::SoftConfig;
use crate::{Arena, MappingPolicy};
use manual::{Manual, Page};
use std::time::Instant;

const HOUR: Duration = Duration::from_secs(3600);
/// The policies that end a mapping with its request.
const PER_REQUEST: [Policy; 3] = [Policy::Strict, Policy::Revoke, Policy::Batch];

/// Flushes are late at once, or never.
fn limits(flush: Duration) -> Limits {
    Limits { flush, ..Limits::default() }
}

fn polled<P: Pinned, const N: usize>(requests: &mut Requests<P, N>) -> Vec<Ended<P, N>> {
    let mut ended = Vec::new();
    requests.poll(&mut ended);
    ended
}

/// Begins a request of one page that the device writes.
fn begin<const N: usize>(requests: &mut Requests<Page, N>, manual: &Manual) -> Token {
    requests.begin([(manual.page(), Access::WRITE)]).unwrap()
}

fn ended_by(ended: &[Ended<Page, 1>]) -> Vec<(Token, End)> {
    ended.iter().map(|one| (one.token, one.end.clone())).collect()
}

#[test]
fn a_request_goes_to_the_device_and_back() {
    for policy in PER_REQUEST {
        let manual = Manual::new();
        let mut requests = Requests::<_, 1>::new(&manual.domain, policy, 4, limits(HOUR)).unwrap();
        let token = begin(&mut requests, &manual);
        assert_eq!((requests.in_flight(), requests.held()), (1, 0));
        let segment = requests.segments(token).unwrap().next().unwrap();
        assert!(manual.is_mapped(segment.iova) && segment.len == 4096);
        assert!(polled(&mut requests).is_empty());
        requests.completed(token).unwrap();
        assert_eq!((requests.in_flight(), requests.held()), (0, 1));
        assert!(polled(&mut requests).is_empty(), "its flush has not completed");
        assert!(!manual.is_mapped(segment.iova));
        manual.complete_all();
        let ended = polled(&mut requests);
        assert_eq!(ended_by(&ended), [(token, End::Quiesced)]);
        assert!(ended[0].payloads[0].as_ref().is_some_and(|page| !manual.reaches(page)));
        assert_eq!((requests.in_flight(), requests.held(), requests.slots()), (0, 0, 8));
    }
}

#[test]
fn batch_takes_one_flush_for_a_poll_and_revoke_one_for_each() {
    for (policy, flushes) in [(Policy::Batch, 1), (Policy::Strict, 1), (Policy::Revoke, 3)] {
        let manual = Manual::new();
        let mut requests = Requests::<_, 2>::new(&manual.domain, policy, 4, limits(HOUR)).unwrap();
        let tokens = [(); 3].map(|()| {
            let both = [(manual.page(), Access::READ), (manual.page(), Access::WRITE)];
            requests.begin(both).unwrap()
        });
        tokens.iter().for_each(|token| requests.completed(*token).unwrap());
        assert_eq!(manual.flushes(), 0, "not before the poll");
        assert!(polled(&mut requests).is_empty());
        assert_eq!(manual.flushes(), flushes, "{policy:?}");
        manual.complete_all();
        let ended = polled(&mut requests);
        assert!(ended.iter().map(|one| one.token).eq(tokens), "in their order");
        assert!(ended.iter().flat_map(|one| &one.payloads).all(Option::is_some));
    }
}

/// At a depth of one, a second buffer keeps the device busy while the first is held.
#[test]
fn what_is_held_takes_no_place_of_the_depth() {
    let manual = Manual::new();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 1, limits(HOUR)).unwrap();
    let first = begin(&mut requests, &manual);
    let refused = requests.begin([(manual.page(), Access::READ)]).unwrap_err();
    assert_eq!(refused.refusal, Refusal::Depth { depth: 1 });
    assert!(refused.payloads[0].is_some());
    requests.completed(first).unwrap();
    assert!(polled(&mut requests).is_empty());
    let second = begin(&mut requests, &manual);
    assert_eq!((requests.in_flight(), requests.held()), (1, 1));
    requests.completed(second).unwrap();
    let full = requests.begin([(manual.page(), Access::READ)]).unwrap_err();
    assert_eq!(full.refusal, Refusal::Slots { slots: 2, in_flight: 0, lost: 0 });
    assert!(full.payloads[0].is_some());
    manual.complete_all();
    assert_eq!(ended_by(&polled(&mut requests)), [(first, End::Quiesced)]);
    let third = begin(&mut requests, &manual);
    assert_eq!((third.slot(), third == first), (first.slot(), false), "the same slot, used again");
}

#[test]
fn directions_are_mixed_in_a_request_and_among_requests() {
    let domain = crate::Domain::soft().unwrap();
    let arena = Arena::builder().size(1 << 20).build(&domain).unwrap();
    let port = domain.port().unwrap();
    let mut requests = Requests::<_, 3>::new(&domain, Policy::Batch, 4, limits(HOUR)).unwrap();
    let all = [Access::READ, Access::WRITE, Access::all()];
    let mixed = requests.begin(all.map(|access| (arena.alloc(4096).unwrap(), access))).unwrap();
    let single = requests.begin([(arena.alloc(8192).unwrap(), Access::READ)]).unwrap();
    let segments: Vec<Segment> = requests.segments(mixed).unwrap().collect();
    let reads = |segment: &Segment| port.read(segment.iova, &mut [0; 16]).is_ok();
    let writes = |segment: &Segment| port.write(segment.iova, &[7; 16]).is_ok();
    assert_eq!(segments.iter().map(reads).collect::<Vec<_>>(), [true, false, true]);
    assert_eq!(segments.iter().map(writes).collect::<Vec<_>>(), [false, true, true]);
    assert_eq!(requests.segments(single).unwrap().map(|one| one.len).sum::<u64>(), 8192);
    requests.completed(single).unwrap();
    requests.completed(mixed).unwrap();
    let (mut ended, since) = (Vec::new(), Instant::now());
    while ended.len() < 2 && since.elapsed() < HOUR {
        requests.poll(&mut ended);
    }
    assert!(!segments.iter().any(|segment| reads(segment) || writes(segment)));
    let lens = |one: &Ended<crate::Buffer, 3>| {
        one.payloads.iter().flatten().map(crate::Buffer::len).collect::<Vec<_>>()
    };
    assert_eq!(ended.iter().map(lens).collect::<Vec<_>>(), [vec![8192], vec![4096; 3]]);
}

#[test]
fn a_request_without_payloads_goes_the_same_way() {
    for policy in [Policy::Strict, Policy::Revoke, Policy::Batch, Policy::Static] {
        let manual = Manual::new();
        let mut requests =
            Requests::<Page, 1>::new(&manual.domain, policy, 1, limits(HOUR)).unwrap();
        let token = requests.begin([]).unwrap();
        assert_eq!((requests.in_flight(), requests.segments(token).unwrap().count()), (1, 0));
        requests.completed(token).unwrap();
        assert_eq!(ended_by(&polled(&mut requests)), [(token, End::Quiesced)]);
        let token = requests.begin([]).unwrap();
        assert_eq!(requests.refused(token).unwrap().end, End::Quiesced);
        assert_eq!((requests.in_flight(), requests.held(), manual.flushes()), (0, 0, 0));
    }
}

#[test]
fn static_payloads_are_not_mapped_and_need_no_flush() {
    let domain = crate::Domain::soft().unwrap();
    let of = |policy| Arena::builder().size(1 << 20).mapping_policy(policy).build(&domain).unwrap();
    let (whole, per_use) = (of(MappingPolicy::Whole), of(MappingPolicy::PerUse));
    let mut requests = Requests::<_, 2>::new(&domain, Policy::Static, 4, limits(HOUR)).unwrap();
    let before = domain.stats().backend;
    let parts =
        [(whole.alloc(4096).unwrap(), Access::all()), (whole.alloc(4096).unwrap(), Access::READ)];
    let token = requests.begin(parts).unwrap();
    let segments: Vec<Segment> = requests.segments(token).unwrap().collect();
    assert_eq!(segments.len(), 2);
    requests.completed(token).unwrap();
    let ended = polled(&mut requests);
    assert!(ended.len() == 1 && ended[0].payloads.iter().all(Option::is_some));
    assert_eq!(domain.stats().backend.invalidations.waits, before.invalidations.waits);
    // Others are refused, and come back with those before them.
    let mixed =
        [(whole.alloc(4096).unwrap(), Access::READ), (per_use.alloc(4096).unwrap(), Access::READ)];
    let refused = requests.begin(mixed).unwrap_err();
    assert_eq!(refused.refusal, Refusal::NotStatic { index: 1 });
    assert!(refused.payloads.iter().all(Option::is_some) && domain.stats().live == 0);
    // The other policies take both.
    let mut requests = Requests::<_, 2>::new(&domain, Policy::Batch, 4, limits(HOUR)).unwrap();
    let token = requests.begin(refused.payloads.map(|one| (one.unwrap(), Access::READ))).unwrap();
    requests.completed(token).unwrap();
    let mut ended = Vec::new();
    while ended.is_empty() {
        requests.poll(&mut ended);
    }
    assert!(ended[0].payloads.iter().all(Option::is_some));
}

#[test]
fn a_loop_has_a_depth_and_a_bounded_number_of_slots() {
    let manual = Manual::new();
    let new = |depth, held| {
        let limits = Limits { held, ..Limits::default() };
        let made = Requests::<Page, 1>::new(&manual.domain, Policy::Batch, depth, limits);
        made.map(|requests| requests.slots())
    };
    assert_eq!(new(0, None), Err(NewError::Slots { depth: 0, held: 0 }));
    assert_eq!(new(usize::MAX, Some(3)), Err(NewError::Slots { depth: usize::MAX, held: 3 }));
    assert_eq!(new(slots::MAX_SLOTS, Some(1)), Err(NewError::Slots { depth: 1 << 20, held: 1 }));
    assert_eq!((new(1, Some(0)), new(7, None), new(3, Some(1))), (Ok(1), Ok(14), Ok(4)));
    assert!(new(0, None).unwrap_err().to_string().contains("at most 1048576"));
}

/// Without a place beyond the depth, a request waits for the flush of the one before.
#[test]
fn without_places_for_what_is_held_begin_waits_for_a_poll() {
    let manual = Manual::new();
    let none = Limits { held: Some(0), flush: HOUR };
    let mut requests = Requests::<_, 1>::new(&manual.domain, Policy::Batch, 1, none).unwrap();
    let token = begin(&mut requests, &manual);
    requests.completed(token).unwrap();
    assert!(polled(&mut requests).is_empty());
    let refused = requests.begin([(manual.page(), Access::READ)]).unwrap_err();
    assert_eq!(refused.refusal, Refusal::Slots { slots: 1, in_flight: 0, lost: 0 });
    manual.complete_all();
    assert_eq!(polled(&mut requests).len(), 1);
    let _token = begin(&mut requests, &manual);
}

#[test]
fn tokens_are_refused_by_other_loops_and_after_the_end() {
    let manual = Manual::new();
    let new = || Requests::<_, 1>::new(&manual.domain, Policy::Batch, 2, limits(HOUR)).unwrap();
    let (mut requests, mut other) = (new(), new());
    let token = begin(&mut requests, &manual);
    let same_place = begin(&mut other, &manual);
    assert_eq!(token.slot(), same_place.slot());
    let foreign = TokenError::OtherLoop { token };
    assert_eq!(other.completed(token), Err(foreign));
    assert_eq!(other.lost(token), Err(foreign));
    assert_eq!(other.refused(token).map(drop), Err(foreign));
    assert_eq!(other.segments(token).map(drop), Err(foreign));
    assert_eq!((requests.in_flight(), other.in_flight()), (1, 1));
    requests.completed(token).unwrap();
    let over = TokenError::Ended { token };
    // Completed, then returned, then another's slot.
    for step in 0..3 {
        assert_eq!(requests.completed(token), Err(over), "{step}");
        assert_eq!(requests.lost(token), Err(over));
        assert_eq!(requests.refused(token).map(drop), Err(over));
        assert_eq!(requests.segments(token).map(drop), Err(over));
        if step == 0 {
            assert!(polled(&mut requests).is_empty());
            manual.complete_all();
            assert_eq!(polled(&mut requests).len(), 1);
        } else if step == 1 {
            assert_eq!(begin(&mut requests, &manual).slot(), token.slot());
        }
    }
    assert_eq!(requests.in_flight(), 1);
    assert_eq!(over.to_string(), "request 0:0 has ended: say once what has become of a request");
}

/// All of a request is mapped, or nothing of it; what comes back is in its order.
#[test]
fn a_payload_that_is_refused_returns_all() {
    for policy in PER_REQUEST {
        let manual = Manual::new();
        manual.oblige();
        let mut requests = Requests::<_, 3>::new(&manual.domain, policy, 2, limits(HOUR)).unwrap();
        for (index, refusal) in [(1, "payload 1: "), (0, "payload 0: "), (2, "payload 2: ")] {
            let pages =
                [0, 1, 2].map(|at| if at == index { manual.odd_page() } else { manual.page() });
            let numbers = pages.each_ref().map(Page::number);
            let refused = requests.begin(pages.map(|page| (page, Access::WRITE))).unwrap_err();
            let returned = refused.payloads.each_ref().map(|page| page.as_ref().unwrap().number());
            assert_eq!(returned, numbers);
            assert!(refused.to_string().contains(refusal), "{refused}");
            assert!(!refused.payloads.iter().flatten().any(|page| manual.reaches(page)));
        }
        let none = [(manual.page(), Access::WRITE), (manual.page(), Access::empty())];
        let refused = requests.begin(none).unwrap_err();
        assert_eq!(refused.refusal, Refusal::NoAccess { index: 1 });
        assert!(refused.payloads.iter().all(Option::is_some));
        assert_eq!((requests.in_flight(), manual.domain.stats().live), (0, 0));
        // The slots are all there.
        let _tokens = [begin(&mut requests, &manual), begin(&mut requests, &manual)];
    }
}

/// Memory that was mapped stays with the domain if its flush is late, and is not returned.
#[test]
fn a_begin_that_cannot_be_undone_in_time_keeps_what_was_mapped() {
    let manual = Manual::new();
    let mut requests =
        Requests::<_, 2>::new(&manual.domain, Policy::Batch, 2, limits(Duration::ZERO)).unwrap();
    let parts = [(manual.page(), Access::WRITE), (manual.odd_page(), Access::WRITE)];
    let refused = requests.begin(parts).unwrap_err();
    assert_eq!(refused.payloads.each_ref().map(Option::is_some), [false, true]);
    assert_eq!(manual.domain.stats().deferred, 1);
    manual.complete_all();
    assert_eq!((manual.domain.release_late(), manual.domain.stats().live), (0, 0));
}
