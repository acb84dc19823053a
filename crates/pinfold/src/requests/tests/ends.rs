//! Requests that do not complete: refused, lost, stopped, late, with a unit that has failed, and
//! with a loop that is dropped.

use super::*;
use pinfold_core::domain::quarantined_bytes;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn what_was_refused_is_returned_by_the_call() {
    for policy in PER_REQUEST {
        let manual = Manual::new();
        manual.oblige();
        let mut requests = Requests::<_, 1>::new(&manual.domain, policy, 2, limits(HOUR)).unwrap();
        let token = begin(&mut requests, &manual);
        let ended = requests.refused(token).unwrap();
        assert_eq!((ended.token, &ended.end), (token, &End::Quiesced));
        assert!(ended.payloads[0].as_ref().is_some_and(|page| !manual.reaches(page)));
        assert_eq!((requests.in_flight(), requests.held(), manual.flushes()), (0, 0, 1));
    }
}

/// Late, and not lost: a later poll returns it.
#[test]
fn a_refused_request_whose_flush_is_late_is_returned_later() {
    let manual = Manual::new();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 2, limits(HOUR)).unwrap();
    let token = begin(&mut requests, &manual);
    let late = requests.refused(token).unwrap();
    assert!(matches!(&late.end, End::Late(error) if error.late_ticket().is_some()));
    assert!(late.payloads[0].is_none());
    assert_eq!((requests.in_flight(), requests.held(), requests.late()), (0, 0, 1));
    assert!(polled(&mut requests).is_empty(), "it was said already");
    manual.complete_all();
    assert_eq!(ended_by(&polled(&mut requests)), [(token, End::Quiesced)]);
    assert_eq!(requests.late(), 0);
}

#[test]
fn a_late_flush_is_said_once_and_its_request_returned_later() {
    for policy in PER_REQUEST {
        let manual = Manual::new();
        let mut requests =
            Requests::<_, 1>::new(&manual.domain, policy, 2, limits(Duration::ZERO)).unwrap();
        let tokens = [begin(&mut requests, &manual), begin(&mut requests, &manual)];
        tokens.iter().for_each(|token| requests.completed(*token).unwrap());
        let late = polled(&mut requests);
        for (late, token) in late.iter().zip(tokens) {
            let End::Late(error) = &late.end else { panic!("{policy:?}: {late:?}") };
            assert!(error.late_ticket().is_some() && late.payloads[0].is_none());
            assert!(error.to_string().contains("not completed after"), "{error}");
            assert_eq!(late.token, token);
        }
        assert_eq!((late.len(), requests.held(), requests.late()), (2, 0, 2));
        assert!(polled(&mut requests).is_empty());
        // Late ones hold no place of the depth.
        let _more = [begin(&mut requests, &manual), begin(&mut requests, &manual)];
        manual.complete_all();
        let ended = polled(&mut requests);
        assert_eq!(ended_by(&ended), tokens.map(|token| (token, End::Quiesced)));
        assert!(ended.iter().all(|one| one.payloads[0].is_some()));
        assert_eq!((manual.domain.stats().quarantined, requests.late()), (0, 0));
    }
}

/// A request that becomes late behind one that is late already, and before one that is not.
#[test]
fn each_request_is_late_at_its_own_time() {
    let manual = Manual::new();
    let limit = Duration::from_millis(300);
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 3, limits(limit)).unwrap();
    let mut said = Vec::new();
    let mut since = Vec::new();
    for _ in 0..3 {
        let token = begin(&mut requests, &manual);
        since.push((token, Instant::now()));
        requests.completed(token).unwrap();
        requests.poll(&mut said);
        std::thread::sleep(limit / 3);
    }
    while said.len() < 3 {
        let before = said.len();
        requests.poll(&mut said);
        for late in &said[before..] {
            let (_, revoked) = since.iter().find(|(token, _)| *token == late.token).unwrap();
            assert!(matches!(late.end, End::Late(_)) && revoked.elapsed() >= limit, "too early");
        }
    }
    assert!(said.iter().map(|late| late.token).eq(since.iter().map(|(token, _)| *token)));
    manual.complete(2);
    assert_eq!(polled(&mut requests).len(), 2);
    manual.complete_all();
    assert_eq!(polled(&mut requests).len(), 1);
}

#[test]
fn a_unit_that_fails_makes_requests_lost() {
    for policy in PER_REQUEST {
        let manual = Manual::new();
        let mut requests = Requests::<_, 1>::new(&manual.domain, policy, 3, limits(HOUR)).unwrap();
        let tokens = [(); 3].map(|()| begin(&mut requests, &manual));
        requests.completed(tokens[0]).unwrap();
        assert!(polled(&mut requests).is_empty());
        manual.fail();
        requests.completed(tokens[1]).unwrap();
        let ended = polled(&mut requests);
        assert!(ended.iter().map(|one| one.token).eq([tokens[0], tokens[1]]));
        let is_lost = |one: &Ended<Page, 1>| {
            matches!(&one.end, End::Lost(error) if error.late_ticket().is_none())
                && one.payloads[0].is_none()
        };
        assert!(ended.iter().all(is_lost), "{ended:?}");
        let refused = requests.refused(tokens[2]).unwrap();
        assert!(is_lost(&refused));
        assert_eq!((requests.in_flight(), requests.held()), (0, 0), "the slots are free");
        assert_eq!((manual.domain.stats().quarantined, manual.pages()), (3, 3));
    }
}

/// A revocation that fails has no flush to wait for, also behind one that hangs.
#[test]
fn a_revocation_that_fails_is_reported_at_once() {
    let manual = Manual::new();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 3, limits(HOUR)).unwrap();
    let tokens = [(); 3].map(|()| begin(&mut requests, &manual));
    requests.completed(tokens[0]).unwrap();
    assert!(polled(&mut requests).is_empty());
    manual.refuse(true);
    requests.completed(tokens[1]).unwrap();
    assert_eq!(
        ended_by(&polled(&mut requests)),
        [(tokens[1], End::Lost(BackendError::NotRevoked))]
    );
    manual.refuse(false);
    let none = requests.begin([]).unwrap();
    requests.completed(none).unwrap();
    requests.completed(tokens[2]).unwrap();
    assert_eq!(ended_by(&polled(&mut requests)), [(none, End::Quiesced)], "nothing to wait for");
    manual.complete_all();
    let ended = ended_by(&polled(&mut requests));
    assert_eq!(ended, [tokens[0], tokens[2]].map(|token| (token, End::Quiesced)));
}

/// A backend that panics in a revocation: its requests are lost, and no slot is.
#[test]
fn a_revocation_that_panics_loses_its_requests() {
    let manual = Manual::new();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 1, limits(HOUR)).unwrap();
    let token = begin(&mut requests, &manual);
    requests.completed(token).unwrap();
    manual.panic(true);
    catch_unwind(AssertUnwindSafe(|| polled(&mut requests))).unwrap_err();
    manual.panic(false);
    assert_eq!(ended_by(&polled(&mut requests)), [(token, End::Lost(BackendError::NotRevoked))]);
    assert_eq!((domain.stats().quarantined, manual.pages()), (1, 1));
    let token = begin(&mut requests, &manual);
    requests.completed(token).unwrap();
    assert!(polled(&mut requests).is_empty());
    manual.complete_all();
    assert_eq!(polled(&mut requests).len(), 1);
}

#[test]
fn a_lost_request_keeps_its_payloads_until_the_device_has_stopped() {
    let manual = Manual::new();
    let limits = Limits { held: Some(1), flush: HOUR };
    let mut requests = Requests::<_, 1>::new(&manual.domain, Policy::Batch, 2, limits).unwrap();
    let [lost, other] = [begin(&mut requests, &manual), begin(&mut requests, &manual)];
    requests.lost(lost).unwrap();
    assert_eq!((requests.in_flight(), requests.held()), (1, 0));
    assert_eq!(requests.lost(lost), Err(TokenError::Lost { token: lost }));
    let at = requests.segments(lost).unwrap().next().unwrap().iova;
    assert!(polled(&mut requests).is_empty());
    assert!(manual.is_mapped(at), "its late access must not fault in another's memory");
    // It has a slot, and no place of the depth.
    let third = begin(&mut requests, &manual);
    let full = requests.begin([(manual.page(), Access::READ)]).unwrap_err();
    assert_eq!(full.refusal, Refusal::Depth { depth: 2 });
    requests.lost(third).unwrap();
    let full = requests.begin([(manual.page(), Access::READ)]).unwrap_err();
    assert_eq!(full.refusal, Refusal::Slots { slots: 3, in_flight: 1, lost: 2 });
    requests.stopped();
    assert_eq!((requests.in_flight(), requests.held()), (0, 3));
    assert!(polled(&mut requests).is_empty());
    manual.complete_all();
    let ended = polled(&mut requests);
    for token in [lost, other, third] {
        let one = ended.iter().find(|one| one.token == token).unwrap();
        assert!(one.end == End::Quiesced && one.payloads[0].is_some());
        assert_eq!(requests.completed(token), Err(TokenError::Ended { token }));
    }
    assert_eq!((ended.len(), manual.domain.stats().quarantined), (3, 0));
    requests.stopped();
    assert_eq!(requests.held(), 0, "once");
}

#[test]
fn a_lost_request_may_complete_after_all() {
    let manual = Manual::new();
    manual.oblige();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Strict, 1, limits(HOUR)).unwrap();
    let token = begin(&mut requests, &manual);
    requests.lost(token).unwrap();
    requests.completed(token).unwrap();
    assert_eq!(ended_by(&polled(&mut requests)), [(token, End::Quiesced)]);
    let _again = [begin(&mut requests, &manual)];
    assert_eq!(requests.in_flight(), 1);
}

#[test]
fn lent_payloads_go_to_the_driver_and_back() {
    use pinfold_core::domain::Payload;
    let manual = Manual::new();
    manual.oblige();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 2>::new(domain, Policy::Strict, 2, limits(HOUR)).unwrap();
    let both = [(manual.page(), Access::WRITE), (manual.page(), Access::all())];
    let lent = requests.begin_lent(both).unwrap();
    let token = lent.token();
    let segments: Vec<Segment> = lent.pieces().map(|(segment, _)| segment).collect();
    assert_eq!((segments.len(), requests.in_flight()), (2, 1));
    assert!(segments.iter().all(|segment| manual.is_mapped(segment.iova) && segment.len == 4096));
    let payload = |index| Payload::<FromDevice>::segment(&lent, index);
    assert!((0..).map_while(payload).eq(segments.iter().copied()));
    assert_eq!(Payload::<ToDevice>::segment(&lent, 0), None, "the first is not for reading");
    assert_eq!(Payload::<FromDevice>::domain(&lent), Some(domain.id()));
    assert!(lent.pieces().all(|(_, piece)| piece.is_some_and(|piece| piece.len() == 4096)));
    // Nothing is done behind the driver's back.
    let error = TokenError::Lent { token };
    assert_eq!(requests.completed(token), Err(error));
    assert_eq!(requests.refused(token).map(drop), Err(error));
    assert_eq!(requests.segments(token).map(drop), Err(error));
    requests.stopped();
    assert_eq!((requests.in_flight(), requests.held()), (1, 0));
    // Another loop does not accept it.
    let mut other = Requests::<_, 2>::new(domain, Policy::Strict, 2, limits(HOUR)).unwrap();
    let lent = other.take_back(lent).unwrap_err();
    let lent = other.completed_lent(lent).unwrap_err();
    assert_eq!(requests.take_back(lent).unwrap(), token);
    assert!(requests.segments(token).unwrap().eq(segments));
    requests.completed(token).unwrap();
    let ended = polled(&mut requests);
    assert!(ended.len() == 1 && ended[0].payloads.iter().all(Option::is_some));
    assert_eq!(domain.stats().quarantined, 0);
}

#[test]
fn a_lent_request_that_is_lost_comes_back_when_its_driver_recovers_it() {
    let manual = Manual::new();
    manual.oblige();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 1, limits(HOUR)).unwrap();
    let lent = requests.begin_lent([(manual.page(), Access::READ)]).unwrap();
    let token = lent.token();
    requests.lost(token).unwrap();
    assert_eq!(requests.lost(token), Err(TokenError::Lost { token }));
    assert_eq!(requests.in_flight(), 0);
    let token = requests.take_back(lent).unwrap();
    assert_eq!(requests.in_flight(), 0, "it is still lost");
    requests.completed(token).unwrap();
    let mut ended = Vec::new();
    requests.wait(HOUR, &mut ended);
    assert_eq!(ended_by(&ended), [(token, End::Quiesced)]);
    // And as one that has completed.
    let lent = requests.begin_lent([(manual.page(), Access::READ)]).unwrap();
    let token = lent.token();
    assert_eq!(requests.in_flight(), 1);
    let full = requests.begin_lent([(manual.page(), Access::READ)]).unwrap_err();
    assert!(full.refusal == Refusal::Depth { depth: 1 } && full.payloads[0].is_some());
    requests.lost(token).unwrap();
    requests.completed_lent(lent).unwrap();
    assert_eq!((requests.in_flight(), requests.held()), (0, 1));
    ended.clear();
    requests.wait(HOUR, &mut ended);
    assert_eq!(ended_by(&ended), [(token, End::Quiesced)]);
}

/// The device was reset after the loop had ended.
#[test]
fn lent_payloads_are_released_without_their_loop() {
    let manual = Manual::new();
    manual.oblige();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 1, limits(HOUR)).unwrap();
    let lent = requests.begin_lent([(manual.page(), Access::READ)]).unwrap();
    drop(requests);
    assert_eq!((manual.pages(), domain.stats().live), (1, 1));
    lent.release();
    let stats = domain.stats();
    assert_eq!((manual.pages(), stats.live, stats.quarantined), (0, 0, 0));
}

#[test]
fn lent_payloads_that_are_dropped_are_quarantined() {
    let manual = Manual::new();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 1, limits(HOUR)).unwrap();
    let lent = requests.begin_lent([(manual.page(), Access::READ)]).unwrap();
    let at = lent.pieces().next().unwrap().0.iova;
    let before = quarantined_bytes();
    drop(lent);
    assert!(quarantined_bytes() >= before + 4096);
    assert_eq!((domain.stats().quarantined, manual.pages()), (1, 1));
    assert!(manual.is_mapped(at));
    drop(requests);
    assert_eq!(domain.stats().quarantined, 1);
}

/// At the device: quarantined. Completed or held: freed when the flush has completed. No wait.
#[test]
fn dropping_a_loop_quarantines_what_may_be_reached() {
    for policy in PER_REQUEST {
        let manual = Manual::new();
        let mut requests = Requests::<_, 1>::new(&manual.domain, policy, 4, limits(HOUR)).unwrap();
        let tokens = [(); 4].map(|()| begin(&mut requests, &manual));
        requests.completed(tokens[0]).unwrap();
        assert!(polled(&mut requests).is_empty());
        requests.completed(tokens[1]).unwrap();
        requests.lost(tokens[2]).unwrap();
        let at = [tokens[2], tokens[3]]
            .map(|token| requests.segments(token).unwrap().next().unwrap().iova);
        let before = quarantined_bytes();
        drop(requests);
        let stats = manual.domain.stats();
        assert_eq!((stats.quarantined, stats.quarantined_bytes), (2, 8192), "{policy:?}");
        assert!(quarantined_bytes() >= before + 8192);
        assert_eq!((stats.deferred, manual.pages()), (2, 4));
        assert!(at.iter().all(|at| manual.is_mapped(*at)));
        manual.complete_all();
        assert_eq!((manual.domain.release_late(), manual.pages()), (0, 2), "freed by the domain");
    }
}

#[test]
fn dropping_a_loop_while_a_thread_unwinds_quarantines_too() {
    let manual = Manual::new();
    let domain = manual.domain.clone();
    let mut requests = Requests::<_, 1>::new(&domain, Policy::Batch, 2, limits(HOUR)).unwrap();
    let tokens = [begin(&mut requests, &manual), begin(&mut requests, &manual)];
    requests.completed(tokens[0]).unwrap();
    manual.panic(true);
    catch_unwind(AssertUnwindSafe(move || {
        let mut requests = requests;
        polled(&mut requests)
    }))
    .unwrap_err();
    assert_eq!((domain.stats().quarantined, manual.pages()), (2, 2));
}

/// Eight flushes that hang have the limit together, and not one each.
#[test]
fn a_drop_waits_for_no_more_than_its_limit() {
    for policy in PER_REQUEST {
        let manual = Manual::new();
        let mut requests = Requests::<_, 1>::new(&manual.domain, policy, 9, limits(HOUR)).unwrap();
        let tokens = [(); 8].map(|()| begin(&mut requests, &manual));
        tokens.iter().for_each(|token| requests.completed(*token).unwrap());
        manual.slow_down();
        drop(requests);
        let waits = manual.limits();
        assert_eq!(waits.len(), 8, "{policy:?}");
        assert!(waits.iter().sum::<Duration>() <= DROP_LIMIT, "{policy:?}: {waits:?}");
        assert_eq!((manual.domain.stats().deferred, manual.unlimited_waits()), (8, 0));
    }
}

/// A limit of the domain for what is held has each revocation wait for the deadline of its flush: of
/// one flush, where all are revoked with one.
#[test]
fn a_drop_waits_for_one_deadline_where_the_domain_limits_what_is_held() {
    for policy in [Policy::Batch, Policy::Revoke, Policy::Strict] {
        let manual = Manual::new();
        let mut requests = Requests::<_, 1>::new(&manual.domain, policy, 3, limits(HOUR)).unwrap();
        let tokens = [(); 3].map(|()| begin(&mut requests, &manual));
        tokens.iter().for_each(|token| requests.completed(*token).unwrap());
        manual.domain.set_held_limit(0);
        drop(requests);
        assert_eq!(manual.unlimited_waits(), 1, "{policy:?}");
        assert_eq!((manual.domain.stats().deferred, manual.pages()), (3, 3));
        manual.complete_all();
        assert_eq!((manual.domain.release_late(), manual.pages()), (0, 0));
    }
}

/// The software IOMMU hangs, or fails: the drop ends all the same.
#[test]
fn a_drop_ends_with_a_unit_that_hangs_or_fails() {
    let hangs = SoftConfig { hang_from: Some(1), ..SoftConfig::default() };
    let fails = SoftConfig { fail_from: Some(1), ..SoftConfig::default() };
    for (config, expected) in [(hangs, (8, 1)), (fails, (0, 9))] {
        let domain = crate::Domain::soft_with(config).unwrap();
        let arena = Arena::builder().size(1 << 20).build(&domain).unwrap();
        let mut requests = Requests::<_, 1>::new(&domain, Policy::Revoke, 9, limits(HOUR)).unwrap();
        let begin = |requests: &mut Requests<_, 1>| {
            requests.begin([(arena.alloc(4096).unwrap(), Access::READ)]).unwrap()
        };
        for _ in 0..8 {
            let token = begin(&mut requests);
            requests.completed(token).unwrap();
        }
        let _at_device = begin(&mut requests);
        drop(requests);
        let stats = domain.stats();
        assert_eq!((stats.deferred, stats.quarantined), expected);
    }
}

/// `strict` waits for the flush in the poll, for all that is revoked with it and no longer than its
/// limit.
#[test]
fn strict_waits_for_its_flush_in_the_poll() {
    let flush_cost = Duration::from_millis(30);
    let slow = SoftConfig { flush_cost, ..SoftConfig::default() };
    let hangs = SoftConfig { hang_from: Some(1), ..SoftConfig::default() };
    for (config, is_late) in [(slow, false), (hangs, true)] {
        let domain = crate::Domain::soft_with(config).unwrap();
        let arena = Arena::builder().size(1 << 20).build(&domain).unwrap();
        let flush = if is_late { flush_cost } else { HOUR };
        let mut requests =
            Requests::<_, 1>::new(&domain, Policy::Strict, 4, limits(flush)).unwrap();
        for _ in 0..4 {
            let token = requests.begin([(arena.alloc(4096).unwrap(), Access::WRITE)]).unwrap();
            requests.completed(token).unwrap();
        }
        let since = Instant::now();
        let ended = polled(&mut requests);
        assert!(since.elapsed() >= flush_cost);
        assert_eq!((ended.len(), requests.late()), (4, if is_late { 4 } else { 0 }));
        assert_eq!(requests.held(), 0);
        assert!(ended.iter().all(|one| matches!(one.end, End::Late(_)) == is_late), "{ended:?}");
        assert!(ended.iter().all(|one| one.payloads[0].is_none() == is_late));
    }
}

/// Also with several payloads: what is found late does not wait when it is dropped.
#[test]
fn a_drop_waits_for_no_deadline_of_the_backend() {
    let manual = Manual::new();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 3>::new(domain, Policy::Batch, 2, limits(HOUR)).unwrap();
    let three = [(); 3].map(|()| (manual.page(), Access::WRITE));
    let token = requests.begin(three).unwrap();
    requests.completed(token).unwrap();
    drop(requests);
    assert_eq!((domain.stats().deferred, manual.unlimited_waits()), (3, 0));
    manual.complete_all();
    assert_eq!((domain.release_late(), manual.pages()), (0, 0));
}

/// It is mapped before that is found, and its flush has the limit of the loop.
#[test]
fn a_payload_that_wrongly_claims_to_stay_mapped_is_refused_in_time() {
    let manual = Manual::new();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Static, 2, limits(HOUR)).unwrap();
    let refused = requests.begin([(manual.claiming_page(), Access::READ)]).unwrap_err();
    assert_eq!(refused.refusal, Refusal::NotStatic { index: 0 });
    assert!(refused.payloads[0].is_none(), "its flush is late");
    assert_eq!((domain.stats().deferred, manual.unlimited_waits()), (1, 0));
    manual.oblige();
    let refused = requests.begin([(manual.claiming_page(), Access::READ)]).unwrap_err();
    assert!(refused.payloads[0].as_ref().is_some_and(|page| !manual.reaches(page)));
}

/// A request that was given up has been submitted, so the device may work on it: it cannot be
/// refused, which would return its payloads at once.
#[test]
fn a_request_that_is_lost_cannot_be_refused() {
    for policy in PER_REQUEST {
        let manual = Manual::new();
        manual.oblige();
        let mut requests = Requests::<_, 1>::new(&manual.domain, policy, 2, limits(HOUR)).unwrap();
        let token = begin(&mut requests, &manual);
        let iova = requests.segments(token).unwrap().next().unwrap().iova;
        requests.lost(token).unwrap();
        let lost = TokenError::Lost { token };
        assert_eq!(requests.refused(token).map(drop), Err(lost));
        assert_eq!(requests.lost(token), Err(lost), "it is counted once");
        assert!(manual.is_mapped(iova), "nothing has changed");
        assert_eq!((requests.in_flight(), requests.held()), (0, 0));
        assert!(lost.to_string().contains("ends with `completed` or `stopped`"), "{lost}");
        // Also while its driver has the payloads.
        let lent = requests.begin_lent([(manual.page(), Access::WRITE)]).unwrap();
        let of_lent = lent.token();
        requests.lost(of_lent).unwrap();
        let lost = TokenError::Lost { token: of_lent };
        assert_eq!(requests.refused(of_lent).map(drop), Err(lost));
        let _token = requests.take_back(lent).unwrap();
        assert_eq!(requests.refused(of_lent).map(drop), Err(lost));
        // Both end as they can.
        requests.completed(token).unwrap();
        requests.stopped();
        let mut ended = polled(&mut requests);
        manual.complete_all();
        ended.extend(polled(&mut requests));
        assert_eq!(ended.len(), 2, "{policy:?}");
    }
}
