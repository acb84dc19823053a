//! A faulty controller: a typed error or a retry, never a hang or a wrong byte.

use crate::common::*;
use pinfold_nvme::driver::{
    CommandError, Config, InFlight, Outcome, PollError, Quarantined, Reject,
};
use pinfold_nvme::spec::Status;
use pinfold_nvme_model::{BusAccess, Fault, InjectionOutcome, ModelConfig, ROGUE_BYTE, Trigger};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const SECOND: u64 = 1_000_000_000;

/// Returns a bench whose clock stops until the test advances it; requests time out after one
/// second, without an abort.
pub(crate) fn with_test_clock() -> (Bench, TestClock) {
    let clock = TestClock::default();
    let config = Config {
        timeout: Duration::from_secs(1),
        abort_timeout: Duration::ZERO,
        clock: Arc::new(clock.clone()),
        ..Config::default()
    };
    (bench(2048, ModelConfig::new(namespaces(4 << 20)), config), clock)
}

/// Waits until the model has slept without progress for 30 ms: its threads may have to wait for a
/// processor.
pub(crate) fn settle(bench: &Bench) {
    let mut before = bench.model.stats();
    let mut unchanged = 0;
    while unchanged < 15 {
        std::thread::sleep(Duration::from_millis(2));
        let now = bench.model.stats();
        unchanged = if now == before && bench.model.is_idle() { unchanged + 1 } else { 0 };
        before = now;
    }
}

pub(crate) fn quarantined<P>(queue: &mut TestQueue, in_flight: InFlight<P>) -> Quarantined<P> {
    let completion = queue.wait().unwrap().unwrap();
    assert!(completion.timed_out());
    match in_flight.finish(completion) {
        Outcome::TimedOut(quarantined) => quarantined,
        other => panic!("{}", matches!(other, Outcome::Completed { .. })),
    }
}

#[test]
fn an_error_status_is_returned_and_a_retry_succeeds() {
    let (bench, _) = with_test_clock();
    let mut queue = bench.controller.create_queue(4).unwrap();
    bench
        .model
        .faults()
        .inject(Trigger::Nth(2), Fault::Fail(Status::INTERNAL_ERROR.do_not_retry()));
    let bytes = pattern(1, 4096);
    for expected in
        [Ok(()), Err(CommandError::Status(Status::INTERNAL_ERROR.do_not_retry())), Ok(())]
    {
        let write = queue.write(1, 0, 8, Buffer::filled(&bench.arena, &bytes)).unwrap();
        let (payload, result) = one(&mut queue, write);
        assert_eq!(result, expected);
        assert_eq!(payload.bytes(4096), bytes);
    }
    assert_eq!((queue.stats().errors, queue.stats().completions), (1, 3));
}

#[test]
fn one_failing_part_fails_the_request_once() {
    let clock = TestClock::default();
    let config = Config { max_transfer_bytes: 8192, clock: Arc::new(clock), ..Config::default() };
    let bench = bench(2048, ModelConfig::new(namespaces(4 << 20)), config);
    let mut queue = bench.controller.create_queue(1).unwrap();
    bench.model.faults().inject(Trigger::Every(7), Fault::Fail(Status::WRITE_FAULT.do_not_retry()));
    let write = queue.write(1, 0, 4096, Buffer::new(&bench.arena, 2 << 20)).unwrap();
    assert_eq!(
        one(&mut queue, write).1,
        Err(CommandError::Status(Status::WRITE_FAULT.do_not_retry()))
    );
    assert!(queue.wait().unwrap().is_none());
    bench.model.faults().clear();
    let write = queue.write(1, 0, 4096, Buffer::new(&bench.arena, 2 << 20)).unwrap();
    assert_eq!(one(&mut queue, write).1, Ok(()));
    assert_eq!(bench.controller.stats().list_pages_used, 0);
}

#[test]
fn a_lost_completion_quarantines_until_reset() {
    let (bench, clock) = with_test_clock();
    let mut queue = bench.controller.create_queue(4).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::NeverComplete);
    let lost = queue.write(1, 0, 64, Buffer::new(&bench.arena, 32 << 10)).unwrap();
    let fine = queue.write(1, 64, 64, Buffer::new(&bench.arena, 32 << 10)).unwrap();
    let completion = queue.wait().unwrap().unwrap();
    assert_eq!(completion.tag(), fine.tag());
    drop(fine.finish(completion));
    assert!(queue.poll().unwrap().is_none());
    clock.advance(2 * SECOND);
    let payload = quarantined(&mut queue, lost);
    let stats = bench.controller.stats();
    assert_eq!((stats.quarantined, stats.list_pages_used, queue.stats().timeouts), (1, 1, 1));
    let payload = payload.recover().unwrap_err();
    bench.controller.reset().unwrap();
    assert_eq!(payload.recover().unwrap().bytes(8), [0; 8]);
    assert_eq!(
        queue.write(1, 0, 1, Buffer::new(&bench.arena, 512)).unwrap_err().reason,
        Reject::NeedsReset
    );
    assert!(queue.wait().unwrap().is_none());
    drop(queue);
    let stats = bench.controller.stats();
    assert_eq!(
        (stats.quarantined, stats.quarantined_permanently, stats.list_pages_used, stats.resets),
        (0, 0, 0, 2)
    );
    drop(bench.controller);
    assert_eq!(bench.arena.0.used(), 0, "rings, lists and payloads are released");
}

#[test]
fn a_late_completion_is_recognised_and_discarded() {
    let (bench, clock) = with_test_clock();
    let mut queue = bench.controller.create_queue(1).unwrap();
    let faults = bench.model.faults();
    faults.inject(Trigger::Nth(1), Fault::Hold);
    let read = queue.read(1, 0, 64, Buffer::filled(&bench.arena, &pattern(3, 32 << 10))).unwrap();
    queue.ring_doorbell();
    settle(&bench);
    clock.advance(2 * SECOND);
    let payload = quarantined(&mut queue, read);
    // The queue continues; the late command completes meanwhile, and writes to quarantined memory.
    let write = queue.write(1, 0, 64, Buffer::filled(&bench.arena, &pattern(4, 32 << 10))).unwrap();
    one(&mut queue, write).1.unwrap();
    faults.release();
    settle(&bench);
    for seed in 5..80 {
        let write =
            queue.write(1, 0, 8, Buffer::filled(&bench.arena, &pattern(seed, 4096))).unwrap();
        assert_eq!(one(&mut queue, write).1, Ok(()));
    }
    let stats = queue.stats();
    assert_eq!((stats.late_completions, stats.spurious_completions, stats.timeouts), (1, 0, 1));
    let payload = payload.recover().unwrap_err();
    bench.controller.reset().unwrap();
    // The read returns what the second write stored.
    assert_eq!(payload.recover().unwrap().bytes(32 << 10), pattern(4, 32 << 10));
}

#[test]
fn payloads_dropped_in_flight_are_quarantined_and_counted() {
    let (bench, clock) = with_test_clock();
    let mut queue = bench.controller.create_queue(2).unwrap();
    bench.model.faults().inject(Trigger::Every(1), Fault::NeverComplete);
    let used = bench.arena.0.used();
    drop(queue.write(1, 0, 1, Buffer::new(&bench.arena, 512)).unwrap());
    let second = queue.write(1, 1, 1, Buffer::new(&bench.arena, 512)).unwrap();
    queue.ring_doorbell();
    clock.advance(2 * SECOND);
    drop(queue.poll().unwrap());
    drop(quarantined(&mut queue, second));
    assert_eq!(bench.arena.0.used(), used + 2);
    let stats = bench.controller.stats();
    assert_eq!((stats.quarantined_permanently, stats.quarantined), (2, 0));
}

#[test]
fn too_many_lost_commands_require_a_reset() {
    let clock = TestClock::default();
    let config = Config {
        timeout: Duration::from_secs(1),
        abort_timeout: Duration::ZERO,
        clock: Arc::new(clock.clone()),
        ..Config::default()
    };
    let mut model = ModelConfig::new(namespaces(4 << 20));
    model.mqes = 3;
    let bench = bench(256, model, config);
    let mut queue = bench.controller.create_queue(3).unwrap();
    bench.model.faults().inject(Trigger::Every(1), Fault::NeverComplete);
    let lost: Vec<_> =
        (0..3).map(|i| queue.write(1, i, 1, Buffer::new(&bench.arena, 512)).unwrap()).collect();
    queue.ring_doorbell();
    clock.advance(2 * SECOND);
    let kept: Vec<_> = lost.into_iter().map(|lost| quarantined(&mut queue, lost)).collect();
    assert_eq!(
        queue.write(1, 0, 1, Buffer::new(&bench.arena, 512)).unwrap_err().reason,
        Reject::NeedsReset
    );
    bench.model.faults().clear();
    bench.controller.reset().unwrap();
    drop(kept);
    assert_eq!(bench.controller.stats().quarantined_permanently, 0);
    let mut queue = bench.controller.create_queue(3).unwrap();
    let write = queue.write(1, 0, 1, Buffer::new(&bench.arena, 512)).unwrap();
    one(&mut queue, write).1.unwrap();
}

#[test]
fn a_request_behind_lost_commands_is_reported_as_never_sent() {
    let clock = TestClock::default();
    let config = Config {
        timeout: Duration::from_secs(1),
        abort_timeout: Duration::ZERO,
        clock: Arc::new(clock.clone()),
        max_transfer_bytes: 4096,
        ..Config::default()
    };
    let mut model = ModelConfig::new(namespaces(4 << 20));
    model.mqes = 3;
    let bench = bench(256, model, config);
    let mut queue = bench.controller.create_queue(2).unwrap();
    bench.model.faults().inject(Trigger::Every(1), Fault::NeverComplete);
    let first = queue.write(2, 0, 3, Buffer::new(&bench.arena, 12288)).unwrap();
    let second = queue.write(2, 3, 1, Buffer::new(&bench.arena, 4096)).unwrap();
    queue.ring_doorbell();
    clock.advance(2 * SECOND);
    let first = quarantined(&mut queue, first);
    assert_eq!(one(&mut queue, second).1, Err(CommandError::NotSent));
    bench.controller.reset().unwrap();
    drop(first);
    assert_eq!(bench.controller.stats().quarantined_permanently, 0);
}

#[test]
fn a_fatal_status_is_reported_and_a_reset_recovers_from_it() {
    let (bench, clock) = with_test_clock();
    let mut queue = bench.controller.create_queue(8).unwrap();
    bench.model.faults().inject(Trigger::Nth(3), Fault::Fatal);
    let flying: Vec<_> = (0..5u64)
        .map(|i| queue.write(1, i, 1, Buffer::filled(&bench.arena, &pattern(i, 512))).unwrap())
        .collect();
    queue.ring_doorbell();
    settle(&bench);
    clock.advance(2_000_000);
    let mut done = Vec::new();
    let error = loop {
        match queue.poll() {
            Ok(Some(completion)) => done.push(completion),
            Ok(None) => {
                // A loaded machine may not have run the model yet, and the requests have one
                // second.
                std::thread::sleep(Duration::from_millis(5));
                clock.advance(1_000_000);
            }
            Err(error) => break error,
        }
    };
    assert_eq!((error, done.len()), (PollError::Fatal, 2));
    assert_eq!(queue.poll().unwrap_err(), PollError::Fatal);
    assert_eq!(queue.flush(1).unwrap_err().reason, Reject::NeedsReset);
    bench.controller.reset().unwrap();
    while let Some(completion) = queue.poll().unwrap() {
        done.push(completion);
    }
    let mut results = Vec::new();
    for in_flight in flying {
        let at = done.iter().position(|completion| completion.tag() == in_flight.tag()).unwrap();
        let Outcome::Completed { result, .. } = in_flight.finish(done.swap_remove(at)) else {
            panic!()
        };
        results.push(result);
    }
    let reset = || Err(CommandError::Reset);
    assert_eq!(results, [Ok(()), Ok(()), reset(), reset(), reset()]);
    let mut queue = bench.controller.create_queue(8).unwrap();
    let write = queue.write(1, 0, 1, Buffer::new(&bench.arena, 512)).unwrap();
    one(&mut queue, write).1.unwrap();
}

#[test]
fn completions_out_of_order_find_their_requests() {
    let (bench, _) = with_test_clock();
    let mut queue = bench.controller.create_queue(32).unwrap();
    let faults = bench.model.faults();
    faults.inject(Trigger::Every(3), Fault::Reorder(5));
    faults.inject(Trigger::Every(4), Fault::Reorder(2));
    let mut flying: Vec<_> = (0..32u64)
        .map(|i| queue.write(1, i * 8, 8, Buffer::filled(&bench.arena, &pattern(i, 4096))).unwrap())
        .collect();
    queue.ring_doorbell();
    let mut order = Vec::new();
    while let Some(completion) = queue.wait().unwrap() {
        let at = flying.iter().position(|f| f.tag() == completion.tag()).unwrap();
        order.push(completion.tag());
        let Outcome::Completed { result, .. } = flying.swap_remove(at).finish(completion) else {
            panic!()
        };
        result.unwrap();
    }
    assert_eq!(order.len(), 32);
    assert!(!order.is_sorted(), "nothing was out of order");
    faults.clear();
    let read = queue.read(1, 0, 256, Buffer::new(&bench.arena, 128 << 10)).unwrap();
    let (back, result) = one(&mut queue, read);
    result.unwrap();
    for (i, block) in (0..).zip(back.bytes(128 << 10).chunks(4096)) {
        assert!(block == pattern(i, 4096), "{i}");
    }
}

#[test]
fn a_foreign_completion_is_returned_with_the_request() {
    let (bench, _) = with_test_clock();
    let mut queue = bench.controller.create_queue(2).unwrap();
    let first = queue.flush(1).unwrap();
    let second = queue.flush(2).unwrap();
    let completion = queue.wait().unwrap().unwrap();
    let tag = completion.tag();
    let (right, wrong) = if first.tag() == tag { (first, second) } else { (second, first) };
    let Outcome::Foreign(wrong, completion) = wrong.finish(completion) else { panic!() };
    assert!(matches!(right.finish(completion), Outcome::Completed { result: Ok(()), .. }));
    one(&mut queue, wrong).1.unwrap();
}

#[test]
fn a_rogue_write_is_recorded_with_its_outcome() {
    let (bench, _) = with_test_clock();
    let mut queue = bench.controller.create_queue(2).unwrap();
    let faults = bench.model.faults();
    faults.inject(Trigger::Nth(1), Fault::Remember);
    faults.inject(Trigger::Nth(2), Fault::RogueWrite(2));
    let mut kept = Vec::new();
    for i in 0..3u64 {
        let write = queue.write(2, i, 1, Buffer::filled(&bench.arena, &pattern(i, 4096))).unwrap();
        let (payload, result) = one(&mut queue, write);
        result.unwrap();
        kept.push(payload);
    }
    let first = kept.remove(0);
    let landed = faults.access_remembered(BusAccess::Write);
    assert_eq!((landed.len(), landed[0].outcome), (1, InjectionOutcome::Succeeded));
    assert_eq!(first.bytes(4096), [ROGUE_BYTE; 4096]);
    drop(first);
    assert!(matches!(
        faults.access_remembered(BusAccess::Read)[0].outcome,
        InjectionOutcome::Fault(_)
    ));
    drop(kept.remove(0));
    let flush = queue.flush(1).unwrap();
    one(&mut queue, flush).1.unwrap();
    settle(&bench);
    let strikes = faults.injections();
    assert_eq!(strikes.len(), 3);
    assert!(matches!(strikes[2].outcome, InjectionOutcome::Fault(_)), "its memory was released");
}
