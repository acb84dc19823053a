//! The descriptor and the waits: they end when a poll finds something, and not before.

use super::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, AsRawFd};

/// Whether the descriptor becomes readable within `limit`.
fn is_readable(fd: impl AsFd, limit: Duration) -> bool {
    let limit = Timespec::try_from(limit).unwrap();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap() == 1
}

const MINUTE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);

#[test]
fn the_descriptor_is_readable_when_a_poll_finds_something() {
    let manual = Manual::new();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 2, limits(HOUR)).unwrap();
    let fd = requests.arm().unwrap().as_raw_fd();
    assert!(!is_readable(requests.arm().unwrap(), Duration::ZERO), "nothing is held");
    let token = begin(&mut requests, &manual);
    assert!(!is_readable(requests.arm().unwrap(), Duration::ZERO), "it is at the device");
    requests.completed(token).unwrap();
    assert!(is_readable(requests.arm().unwrap(), MINUTE), "a poll revokes it");
    assert!(polled(&mut requests).is_empty());
    assert!(!is_readable(requests.arm().unwrap(), SHORT), "the flush is under way");
    manual.complete_all();
    assert_eq!(requests.arm().unwrap().as_raw_fd(), fd, "always the same");
    assert!(is_readable(requests.arm().unwrap(), MINUTE), "it has completed before");
    assert_eq!(polled(&mut requests).len(), 1);
    assert!(!is_readable(requests.arm().unwrap(), Duration::ZERO), "cleared");
    assert!(is_readable(requests.arm_now().unwrap(), Duration::ZERO), "the driver's own reports");
    assert_eq!(requests.arm_now().unwrap().as_raw_fd(), fd, "always the same");
    assert!(!is_readable(requests.arm().unwrap(), Duration::ZERO), "cleared");
    // While the program sleeps, with the descriptor that it has.
    let token = begin(&mut requests, &manual);
    requests.completed(token).unwrap();
    assert!(polled(&mut requests).is_empty());
    let armed = requests.arm().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(SHORT);
            manual.complete_all();
        });
        assert!(is_readable(armed, MINUTE));
    });
    assert_eq!(polled(&mut requests).len(), 1);
}

/// Also if the deadline of the backend has passed, which is not the loop's.
#[test]
fn the_descriptor_is_readable_when_a_flush_is_late_and_when_it_ends() {
    for overdue in [false, true] {
        let manual = Manual::new();
        let limit = Duration::from_millis(100);
        let domain = &manual.domain;
        let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 2, limits(limit)).unwrap();
        let token = begin(&mut requests, &manual);
        requests.completed(token).unwrap();
        if overdue {
            manual.set_overdue();
        }
        let since = Instant::now();
        let mut looks = 0;
        while polled(&mut requests).is_empty() {
            looks += 1;
            assert!(is_readable(requests.arm().unwrap(), MINUTE));
        }
        assert!(since.elapsed() >= limit && looks <= 3, "{looks} looks");
        assert!(!is_readable(requests.arm().unwrap(), SHORT), "it was said");
        manual.complete_all();
        assert!(is_readable(requests.arm().unwrap(), MINUTE));
        assert_eq!(ended_by(&polled(&mut requests)), [(token, End::Quiesced)]);
    }
}

/// The second becomes late while the first is late and still waits.
#[test]
fn the_descriptor_tells_of_each_late_flush() {
    let manual = Manual::new();
    let limit = Duration::from_millis(100);
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 2, limits(limit)).unwrap();
    for _ in 0..2 {
        let token = begin(&mut requests, &manual);
        requests.completed(token).unwrap();
        let mut late = Vec::new();
        while late.is_empty() {
            requests.poll(&mut late);
            assert!(!late.is_empty() || is_readable(requests.arm().unwrap(), MINUTE));
        }
        assert!(matches!(late[0].end, End::Late(_)) && late[0].token == token);
    }
}

#[test]
fn the_descriptor_tells_of_a_unit_that_fails() {
    let manual = Manual::new();
    let domain = &manual.domain;
    let mut requests = Requests::<_, 1>::new(domain, Policy::Batch, 2, limits(HOUR)).unwrap();
    let token = begin(&mut requests, &manual);
    requests.completed(token).unwrap();
    assert!(polled(&mut requests).is_empty());
    assert!(!is_readable(requests.arm().unwrap(), Duration::ZERO));
    manual.fail();
    assert!(is_readable(requests.arm().unwrap(), MINUTE));
    assert!(matches!(polled(&mut requests)[0].end, End::Lost(_)));
}

/// A backend whose table the kernel keeps never holds anything.
#[test]
fn a_backend_without_flushes_returns_at_the_first_poll() {
    for policy in PER_REQUEST {
        let manual = Manual::new();
        manual.complete_at_once();
        let mut requests = Requests::<_, 1>::new(&manual.domain, policy, 2, limits(HOUR)).unwrap();
        let token = begin(&mut requests, &manual);
        requests.completed(token).unwrap();
        assert!(is_readable(requests.arm().unwrap(), MINUTE));
        assert_eq!(ended_by(&polled(&mut requests)), [(token, End::Quiesced)]);
        assert!(!is_readable(requests.arm().unwrap(), Duration::ZERO));
    }
}

#[test]
fn the_descriptor_works_on_the_software_iommu() {
    let config = SoftConfig { flush_cost: SHORT, ..SoftConfig::default() };
    let domain = crate::Domain::soft_with(config).unwrap();
    let arena = Arena::builder().size(1 << 20).build(&domain).unwrap();
    let mut requests = Requests::<_, 1>::new(&domain, Policy::Batch, 2, limits(HOUR)).unwrap();
    let token = requests.begin([(arena.alloc(4096).unwrap(), Access::WRITE)]).unwrap();
    requests.completed(token).unwrap();
    let mut ended = polled(&mut requests);
    let mut looks = 0;
    while ended.is_empty() {
        assert!(is_readable(requests.arm().unwrap(), MINUTE));
        requests.poll(&mut ended);
        looks += 1;
    }
    // None where the first poll took as long as the flush.
    assert!(looks <= 3, "{looks}");
}

#[test]
fn a_wait_ends_with_the_first_flush_or_its_limit() {
    let config = SoftConfig { flush_cost: SHORT, ..SoftConfig::default() };
    let domain = crate::Domain::soft_with(config).unwrap();
    let arena = Arena::builder().size(1 << 20).build(&domain).unwrap();
    let mut requests = Requests::<_, 1>::new(&domain, Policy::Batch, 2, limits(HOUR)).unwrap();
    let (mut ended, since) = (Vec::new(), Instant::now());
    requests.wait(HOUR, &mut ended);
    let token = requests.begin([(arena.alloc(4096).unwrap(), Access::WRITE)]).unwrap();
    requests.wait(HOUR, &mut ended);
    assert!(ended.is_empty() && since.elapsed() < MINUTE, "it does not wait for the device");
    requests.completed(token).unwrap();
    requests.wait(HOUR, &mut ended);
    assert!(ended.len() == 1 && since.elapsed() >= SHORT);
}

#[test]
fn a_wait_ends_when_a_flush_is_late() {
    let config = SoftConfig { hang_from: Some(1), ..SoftConfig::default() };
    let domain = crate::Domain::soft_with(config).unwrap();
    let arena = Arena::builder().size(1 << 20).build(&domain).unwrap();
    let limit = 4 * SHORT;
    let mut requests = Requests::<_, 1>::new(&domain, Policy::Batch, 2, limits(limit)).unwrap();
    let token = requests.begin([(arena.alloc(4096).unwrap(), Access::WRITE)]).unwrap();
    requests.completed(token).unwrap();
    let (mut ended, since) = (Vec::new(), Instant::now());
    requests.wait(SHORT, &mut ended);
    assert!(since.elapsed() >= SHORT && (ended.is_empty() || since.elapsed() >= limit));
    while ended.is_empty() {
        requests.wait(HOUR, &mut ended);
    }
    assert!(matches!(ended[0].end, End::Late(_)) && since.elapsed() >= limit);
    // It is late already: the wait has its own limit.
    let since = Instant::now();
    requests.wait(SHORT, &mut ended);
    assert!(since.elapsed() >= SHORT && ended.len() == 1);
}

/// None of several payloads wakes by the deadline of the backend, which has passed.
#[test]
fn the_descriptor_stays_quiet_for_each_payload_of_a_late_request() {
    let manual = Manual::new();
    let limits = limits(Duration::ZERO);
    let domain = &manual.domain;
    let mut requests = Requests::<_, 2>::new(domain, Policy::Batch, 2, limits).unwrap();
    let both = [(manual.page(), Access::READ), (manual.page(), Access::WRITE)];
    let token = requests.begin(both).unwrap();
    requests.completed(token).unwrap();
    manual.set_overdue();
    assert!(matches!(polled(&mut requests)[0].end, End::Late(_)));
    assert!(!is_readable(requests.arm().unwrap(), SHORT));
    manual.complete_all();
    assert!(is_readable(requests.arm().unwrap(), MINUTE));
    assert_eq!(polled(&mut requests)[0].end, End::Quiesced);
}

/// A payload that stays mapped waits for nothing, and wakes nothing.
#[test]
fn the_descriptor_stays_quiet_beside_a_static_payload() {
    let manual = Manual::new();
    let of = |policy| Arena::builder().size(1 << 20).mapping_policy(policy);
    let domain = crate::Domain::new(manual.domain.clone(), ());
    let whole = of(MappingPolicy::Whole).build(&domain).unwrap();
    let per_use = of(MappingPolicy::PerUse).build(&domain).unwrap();
    for order in [[&whole, &per_use], [&per_use, &whole]] {
        let mut requests = Requests::<_, 2>::new(&domain, Policy::Batch, 2, limits(HOUR)).unwrap();
        let both = order.map(|arena| (arena.alloc(4096).unwrap(), Access::READ));
        let token = requests.begin(both).unwrap();
        requests.completed(token).unwrap();
        assert!(polled(&mut requests).is_empty());
        assert!(!is_readable(requests.arm().unwrap(), SHORT), "its flush is under way");
        manual.complete_all();
        assert!(is_readable(requests.arm().unwrap(), MINUTE));
        assert!(polled(&mut requests)[0].payloads.iter().all(Option::is_some));
    }
}

/// The limit of the wait comes first: the request is held, and not late.
#[test]
fn a_strict_wait_ends_with_its_own_limit() {
    let config = SoftConfig { hang_from: Some(1), ..SoftConfig::default() };
    let domain = crate::Domain::soft_with(config).unwrap();
    let arena = Arena::builder().size(1 << 20).build(&domain).unwrap();
    let flush = Duration::from_secs(10);
    let mut requests = Requests::<_, 1>::new(&domain, Policy::Strict, 2, limits(flush)).unwrap();
    let token = requests.begin([(arena.alloc(4096).unwrap(), Access::WRITE)]).unwrap();
    requests.completed(token).unwrap();
    let (mut ended, since) = (Vec::new(), Instant::now());
    requests.wait(SHORT, &mut ended);
    let waited = since.elapsed();
    assert!(waited >= SHORT && waited < flush && ended.is_empty(), "{waited:?}");
    assert_eq!((requests.held(), requests.late()), (1, 0));
}
