//! A backend or a payload's drop that panics in a call of the loop: each request is reported all the
//! same, once, no slot is lost, and no payload is said to be returned that is not.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn panics(call: impl FnOnce()) {
    catch_unwind(AssertUnwindSafe(call)).unwrap_err();
}

fn lost(token: Token) -> (Token, End) {
    (token, End::Lost(BackendError::NotRevoked))
}

/// All slots of a loop of depth 3 can be used.
fn assert_empty(requests: &mut Requests<Page, 1>, manual: &Manual) {
    assert_eq!((requests.in_flight(), requests.held(), requests.late()), (0, 0, 0));
    manual.oblige();
    for _ in 0..2 {
        let tokens = [(); 3].map(|()| begin(requests, manual));
        tokens.iter().for_each(|token| requests.completed(*token).unwrap());
        let mut ended = polled(requests);
        manual.complete_all();
        requests.poll(&mut ended);
        assert_eq!(ended_by(&ended), tokens.map(|token| (token, End::Quiesced)));
    }
}

fn with_completed(policy: Policy) -> (Manual, Requests<Page, 1>, [Token; 3]) {
    let manual = Manual::new();
    let three = Limits { held: Some(0), flush: HOUR };
    let mut requests = Requests::<_, 1>::new(&manual.domain, policy, 3, three).unwrap();
    let tokens = [(); 3].map(|()| begin(&mut requests, &manual));
    tokens.iter().for_each(|token| requests.completed(*token).unwrap());
    (manual, requests, tokens)
}

#[test]
fn a_revocation_that_panics_loses_no_slot() {
    for policy in PER_REQUEST {
        let (manual, mut requests, tokens) = with_completed(policy);
        manual.panic(true);
        panics(|| drop(polled(&mut requests)));
        manual.panic(false);
        let mut ended = polled(&mut requests);
        manual.complete_all();
        requests.poll(&mut ended);
        let ended = ended_by(&ended);
        // After a panic of `revoke`, the others are revoked by the next poll.
        let of_others = |token| match policy {
            Policy::Revoke => (token, End::Quiesced),
            _ => lost(token),
        };
        assert_eq!(ended, [lost(tokens[0]), of_others(tokens[1]), of_others(tokens[2])]);
        assert_empty(&mut requests, &manual);
    }
}

#[test]
fn a_wait_that_panics_loses_no_slot() {
    let (manual, mut requests, tokens) = with_completed(Policy::Strict);
    manual.panic_in_wait(true);
    panics(|| drop(polled(&mut requests)));
    manual.panic_in_wait(false);
    assert_eq!(requests.held(), 3);
    manual.complete_all();
    let ended = polled(&mut requests);
    let [first, second, third] = tokens;
    let expected = [lost(first), (second, End::Quiesced), (third, End::Quiesced)];
    assert_eq!(ended_by(&ended), expected);
    assert_empty(&mut requests, &manual);
}

/// A request that waits for a flush which was late before.
#[test]
fn a_wait_that_panics_keeps_the_count_of_late_requests() {
    let manual = Manual::new();
    let limits = limits(Duration::ZERO);
    let mut requests = Requests::<_, 1>::new(&manual.domain, Policy::Strict, 3, limits).unwrap();
    let tokens = [begin(&mut requests, &manual), begin(&mut requests, &manual)];
    requests.completed(tokens[0]).unwrap();
    assert!(matches!(polled(&mut requests)[0].end, End::Late(_)));
    requests.completed(tokens[1]).unwrap();
    manual.panic_in_wait(true);
    panics(|| drop(polled(&mut requests)));
    manual.panic_in_wait(false);
    assert_eq!((requests.held(), requests.late()), (1, 1));
    manual.complete_all();
    let ended = ended_by(&polled(&mut requests));
    assert_eq!(ended, [lost(tokens[0]), (tokens[1], End::Quiesced)]);
    assert_empty(&mut requests, &manual);
}

/// The payload stays with the domain: it is not said to be returned.
#[test]
fn a_wait_that_panics_returns_nothing() {
    let calls: [fn(&mut Requests<Page, 1>); 2] = [
        |requests| requests.wait(HOUR, &mut Vec::new()),
        |requests| drop(requests.arm().map(drop)),
    ];
    for call in calls {
        let manual = Manual::new();
        let domain = &manual.domain;
        let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 3, limits(HOUR)).unwrap();
        let token = begin(&mut requests, &manual);
        requests.completed(token).unwrap();
        assert!(polled(&mut requests).is_empty());
        manual.panic_in_wait(true);
        panics(|| call(&mut requests));
        manual.panic_in_wait(false);
        let ended = polled(&mut requests);
        assert_eq!((ended_by(&ended), manual.pages()), (vec![lost(token)], 1));
        manual.complete_all();
        assert_eq!((domain.release_late(), manual.pages()), (0, 0));
        assert_empty(&mut requests, &manual);
    }
}

#[test]
fn a_refused_request_whose_wait_panics_is_reported_later() {
    let manual = Manual::new();
    let three = Limits { held: Some(0), flush: HOUR };
    let mut requests = Requests::<_, 1>::new(&manual.domain, Policy::Batch, 3, three).unwrap();
    for in_wait in [false, true] {
        let token = begin(&mut requests, &manual);
        manual.panic(!in_wait);
        manual.panic_in_wait(in_wait);
        panics(|| drop(requests.refused(token)));
        manual.panic(false);
        manual.panic_in_wait(false);
        assert_eq!(ended_by(&polled(&mut requests)), [lost(token)]);
    }
    assert_empty(&mut requests, &manual);
}

/// The domain drops what it holds first: before it takes what is to be revoked, or returned.
#[test]
fn a_drop_that_panics_loses_no_slot() {
    for policy in PER_REQUEST {
        let (manual, mut requests, tokens) = with_completed(policy);
        manual.leave_rude_page();
        manual.complete_unnoticed();
        panics(|| drop(polled(&mut requests)));
        let mut ended = polled(&mut requests);
        manual.complete_all();
        requests.poll(&mut ended);
        assert!(ended.iter().map(|one| one.token).eq(tokens), "{policy:?}");
        assert_eq!(ended_by(&ended)[0], lost(tokens[0]));
        assert_empty(&mut requests, &manual);
    }
    let (manual, mut requests, tokens) = with_completed(Policy::Batch);
    let mut ended = polled(&mut requests);
    manual.leave_rude_page();
    manual.complete_unnoticed();
    panics(|| requests.poll(&mut ended));
    requests.poll(&mut ended);
    let [first, second, third] = tokens;
    let expected = [lost(first), (second, End::Quiesced), (third, End::Quiesced)];
    assert_eq!(ended_by(&ended), expected);
    assert_empty(&mut requests, &manual);
}

#[test]
fn what_a_panic_has_left_mapped_is_quarantined_with_the_loop() {
    let (manual, mut requests, _) = with_completed(Policy::Batch);
    manual.leave_rude_page();
    manual.complete_unnoticed();
    panics(|| drop(polled(&mut requests)));
    manual.oblige();
    drop(requests);
    assert_eq!(manual.domain.stats().quarantined, 3);
}

#[test]
fn a_drop_that_panics_loses_no_static_request() {
    let manual = Manual::new();
    let whole = Arena::builder().size(1 << 20).mapping_policy(MappingPolicy::Whole);
    let arena = whole.build(&crate::Domain::new(manual.domain.clone(), ())).unwrap();
    let two = Limits { held: Some(0), flush: HOUR };
    let mut requests = Requests::<_, 1>::new(&manual.domain, Policy::Static, 2, two).unwrap();
    let begin = |requests: &mut Requests<_, 1>| {
        requests.begin([(arena.alloc(4096).unwrap(), Access::READ)]).unwrap()
    };
    let tokens = [begin(&mut requests), begin(&mut requests)];
    tokens.iter().for_each(|token| requests.completed(*token).unwrap());
    manual.leave_rude_page();
    manual.complete_unnoticed();
    let mut ended = Vec::new();
    panics(|| requests.poll(&mut ended));
    requests.poll(&mut ended);
    let ended: Vec<_> = ended.iter().map(|one| (one.token, one.end.clone())).collect();
    assert_eq!(ended, [lost(tokens[0]), (tokens[1], End::Quiesced)]);
    let _tokens = [begin(&mut requests), begin(&mut requests)];
}

/// A driver that panics: its loop waits for no flush, and calls no backend.
#[test]
fn dropping_a_loop_while_a_thread_unwinds_does_not_wait() {
    let (manual, mut requests, _) = with_completed(Policy::Revoke);
    assert!(polled(&mut requests).is_empty());
    let mut other = Requests::<_, 1>::new(&manual.domain, Policy::Batch, 2, limits(HOUR)).unwrap();
    let token = begin(&mut other, &manual);
    other.completed(token).unwrap();
    let flushes = manual.flushes();
    panics(move || {
        let _loops = (requests, other);
        panic!("a driver");
    });
    assert_eq!((manual.unlimited_waits(), manual.flushes()), (0, flushes));
    let stats = manual.domain.stats();
    assert_eq!((stats.deferred, stats.quarantined, manual.pages()), (3, 1, 4));
    manual.complete_all();
    assert_eq!((manual.domain.release_late(), manual.pages()), (0, 1));
}
