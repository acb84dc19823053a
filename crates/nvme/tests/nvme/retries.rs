//! Commands whose status permits a retry: sent again when the controller wants them, up to a limit,
//! without a sleep in a poll.

use crate::common::*;
use crate::faults::settle;
use pinfold_nvme::driver::{CommandError, Completion, Config, Controller, Error, Outcome, Reject};
use pinfold_nvme::spec::{Status, admin, cns, nvm};
use pinfold_nvme_model::{CommandInfo, Fault, ModelConfig, ModelController, Trigger};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub(crate) const MS: u64 = 1_000_000;
const NOT_READY: Status = Status::NAMESPACE_NOT_READY;

/// Returns a bench whose clock the test advances, and a controller with CRDT1 of 2 s and CRDT3 of
/// 100 s. Requests time out after one second: a wait for a retry that counted would show.
pub(crate) fn rig() -> (Bench, TestClock) {
    let clock = TestClock::default();
    let config = Config {
        clock: Arc::new(clock.clone()),
        timeout: Duration::from_secs(1),
        abort_timeout: Duration::ZERO,
        ..Config::default()
    };
    let mut model = ModelConfig::new(namespaces(4 << 20));
    model.retry_delays = [20, 0, 1000];
    (bench(2048, model, config), clock)
}

/// Has I/O commands fail with `status` until the returned switch is cleared.
fn failing(bench: &Bench, status: Status) -> Arc<AtomicBool> {
    let fails = Arc::new(AtomicBool::new(true));
    let hit = {
        let fails = fails.clone();
        move |seen: &CommandInfo| seen.queue != 0 && fails.load(Ordering::SeqCst)
    };
    bench.model.faults().inject(Trigger::Matches(Box::new(hit)), Fault::Fail(status));
    fails
}

/// Polls until the controller has nothing left to do and the queue has seen it.
pub(crate) fn poll_all(bench: &Bench, queue: &mut TestQueue) -> Option<Completion> {
    for _ in 0..2 {
        if let Some(completion) = queue.poll().unwrap() {
            return Some(completion);
        }
        settle(bench);
    }
    queue.poll().unwrap()
}

#[test]
fn a_retry_waits_as_long_as_the_controller_asks() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    let fails = failing(&bench, NOT_READY.with_retry_delay(1));
    let bytes = pattern(1, 4096);
    let write = queue.write(1, 0, 8, Buffer::filled(&bench.arena, &bytes)).unwrap();
    assert!(poll_all(&bench, &mut queue).is_none());
    clock.advance(1_999 * MS);
    assert!(poll_all(&bench, &mut queue).is_none());
    assert_eq!((queue.stats().commands, queue.stats().retries), (1, 0), "CRDT1 is 2 s");
    clock.advance(MS);
    assert!(poll_all(&bench, &mut queue).is_none());
    assert_eq!((queue.stats().commands, queue.stats().retries), (2, 1));
    fails.store(false, Ordering::SeqCst);
    clock.advance(2_000 * MS);
    let (payload, result) = one(&mut queue, write);
    assert_eq!((result, payload.bytes(4096) == bytes), (Ok(()), true));
    let stats = queue.stats();
    assert_eq!((stats.retried_requests, stats.retries, stats.retry_wait_ns), (1, 2, 4_000 * MS));
    assert_eq!((stats.errors, stats.requests, stats.timeouts), (2, 1, 0));
}

#[test]
fn without_a_delay_retries_back_off_up_to_the_limit() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    failing(&bench, NOT_READY.with_retry_delay(2));
    let flush = queue.flush(1).unwrap();
    let mut at_ms = Vec::new();
    let completion = loop {
        if let Some(completion) = poll_all(&bench, &mut queue) {
            break completion;
        }
        // The next retry is due after 1, 2, 4 ... 512, then 1000 ms, and the last after 10 s in
        // all.
        let left = 10_000 - at_ms.iter().sum::<u64>();
        let delay = (1 << at_ms.len().min(10)).min(1000).min(left);
        clock.advance((delay - 1) * MS);
        assert!(poll_all(&bench, &mut queue).is_none());
        assert_eq!(queue.stats().retries, at_ms.len() as u64);
        clock.advance(MS);
        at_ms.push(delay);
    };
    assert_eq!((at_ms.iter().sum::<u64>(), at_ms.len()), (10_000, 19), "{at_ms:?}");
    let Outcome::Completed { result, .. } = flush.finish(completion) else { panic!() };
    assert_eq!(result, Err(CommandError::Status(NOT_READY.with_retry_delay(2))));
}

#[test]
fn a_delay_beyond_the_limit_and_a_final_status_fail_at_once() {
    let (bench, _) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    for status in [NOT_READY.with_retry_delay(3), NOT_READY.do_not_retry()] {
        failing(&bench, status);
        let flush = queue.flush(1).unwrap();
        assert_eq!(one(&mut queue, flush).1, Err(CommandError::Status(status)));
        bench.model.faults().clear();
    }
    assert_eq!((queue.stats().retries, queue.stats().retry_wait_ns), (0, 0));
}

#[test]
fn a_media_error_is_retried_four_times() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    failing(&bench, Status::UNRECOVERED_READ_ERROR);
    let read = queue.read(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    let completion = loop {
        match poll_all(&bench, &mut queue) {
            Some(completion) => break completion,
            None => clock.advance(1_000 * MS),
        }
    };
    let Outcome::Completed { result, .. } = read.finish(completion) else { panic!() };
    assert_eq!(result, Err(CommandError::Status(Status::UNRECOVERED_READ_ERROR)));
    assert_eq!(queue.stats().retries, 4);
}

/// The second flush would succeed, without what the first has lost.
#[test]
fn a_flush_that_may_have_been_tried_is_not_repeated() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    for status in [
        Status::WRITE_FAULT,
        Status::INTERNAL_ERROR,
        Status::CAPACITY_EXCEEDED,
        Status::DATA_TRANSFER_ERROR,
        // A delay that the controller asks for does not say that it has done nothing.
        Status::WRITE_FAULT.with_retry_delay(1),
    ] {
        bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(status));
        let flush = queue.flush(1).unwrap();
        let completion = poll_all(&bench, &mut queue).expect("not at once");
        let Outcome::Completed { result, .. } = flush.finish(completion) else { panic!() };
        assert_eq!(result, Err(CommandError::Status(status)));
        // The others are: they carry what is written.
        bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(status));
        let write = queue.write(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
        assert!(poll_all(&bench, &mut queue).is_none());
        clock.advance(2_000 * MS);
        assert_eq!(one(&mut queue, write).1, Ok(()));
    }
    assert_eq!(queue.stats().retries, 5);
    for status in [NOT_READY, Status::COMMAND_INTERRUPTED] {
        bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(status));
        let flush = queue.flush(1).unwrap();
        assert!(poll_all(&bench, &mut queue).is_none(), "{status}");
        clock.advance(MS);
        assert_eq!(one(&mut queue, flush).1, Ok(()));
    }
}

#[test]
fn only_the_failed_commands_of_a_request_are_retried() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    bench.model.faults().inject(Trigger::Nth(2), Fault::Fail(NOT_READY));
    let bytes = pattern(3, 4 << 20);
    let write = queue.write(1, 0, 8192, Buffer::filled(&bench.arena, &bytes)).unwrap();
    while queue.stats().completions < 4 {
        assert!(queue.poll().unwrap().is_none());
    }
    clock.advance(MS);
    assert_eq!(one(&mut queue, write).1, Ok(()));
    assert_eq!((queue.stats().commands, queue.stats().retries), (5, 1));
    let read = queue.read(1, 0, 8192, Buffer::new(&bench.arena, 4 << 20)).unwrap();
    assert!(one(&mut queue, read).0.bytes(4 << 20) == bytes);
    assert_eq!(bench.controller.stats().list_pages_used, 0);
}

/// Each of its 128 commands fails once, one after the other.
#[test]
fn retries_extend_a_request_by_a_bounded_time() {
    let clock = TestClock::default();
    let config = Config {
        clock: Arc::new(clock.clone()),
        timeout: Duration::from_secs(1),
        abort_timeout: Duration::ZERO,
        ..Config::default()
    };
    let mut model = ModelConfig::new(namespaces(4 << 20));
    (model.retry_delays, model.mqes, model.mdts) = ([20, 0, 0], 1, 3);
    let bench = bench(256, model, config);
    let mut queue = bench.controller.create_queue(1).unwrap();
    let mut last = u64::MAX;
    let once = move |seen: &CommandInfo| {
        seen.queue != 0 && std::mem::replace(&mut last, seen.slba) != seen.slba
    };
    let status = NOT_READY.with_retry_delay(1);
    bench.model.faults().inject(Trigger::Matches(Box::new(once)), Fault::Fail(status));
    let zeroes = queue.write_zeroes(1, 0, 8192).unwrap();
    let completion = loop {
        match poll_all(&bench, &mut queue) {
            Some(completion) => break completion,
            None => clock.advance(1_000 * MS),
        }
    };
    let Outcome::Completed { result, .. } = zeroes.finish(completion) else { panic!() };
    assert_eq!(result, Err(CommandError::Status(status)));
    // A second, the limit of 10 s, a second, which the sixth retry would exceed.
    assert_eq!(clock.0.load(Ordering::SeqCst), 10_000 * MS);
}

#[test]
fn a_final_error_ends_a_request_of_which_others_wait() {
    let (bench, _) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(NOT_READY.with_retry_delay(1)));
    let fault = Status::WRITE_FAULT.do_not_retry();
    bench.model.faults().inject(Trigger::Nth(3), Fault::Fail(fault));
    let write = queue.write(1, 0, 8192, Buffer::new(&bench.arena, 4 << 20)).unwrap();
    assert_eq!(one(&mut queue, write).1, Err(CommandError::Status(fault)));
    assert_eq!((queue.stats().retries, bench.controller.stats().list_pages_used), (0, 0));
    let flush = queue.flush(1).unwrap();
    assert_eq!(one(&mut queue, flush).1, Ok(()));
}

#[test]
fn a_reset_ends_requests_that_wait_for_a_retry() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    failing(&bench, NOT_READY.with_retry_delay(1));
    let write = queue.write(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    assert!(poll_all(&bench, &mut queue).is_none());
    clock.advance(1_000 * MS);
    assert!(poll_all(&bench, &mut queue).is_none());
    bench.controller.reset().unwrap();
    assert_eq!(one(&mut queue, write).1, Err(CommandError::Reset));
    assert!(queue.poll().unwrap().is_none());
    // It waits no more, also where the program then gives up.
    assert_eq!(queue.stats().retry_wait_ns, 1_000 * MS);
    queue.abandon_retries();
    assert_eq!(queue.stats().retry_wait_ns, 1_000 * MS);
}

#[test]
fn abandoned_retries_fail_with_their_last_status() {
    let (bench, _) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    let status = NOT_READY.with_retry_delay(1);
    let fails = failing(&bench, status);
    let write = queue.write(1, 0, 8192, Buffer::new(&bench.arena, 4 << 20)).unwrap();
    let flush = queue.flush(1).unwrap();
    assert!(poll_all(&bench, &mut queue).is_none());
    queue.abandon_retries();
    assert_eq!(one(&mut queue, write).1, Err(CommandError::Status(status)));
    assert_eq!(one(&mut queue, flush).1, Err(CommandError::Status(status)));
    assert_eq!((queue.stats().retries, queue.in_flight()), (0, 0));
    let flush = queue.flush(1).unwrap();
    assert_eq!(
        one(&mut queue, flush).1,
        Err(CommandError::Status(status)),
        "none is retried from now on"
    );
    fails.store(false, Ordering::SeqCst);
    let flush = queue.flush(1).unwrap();
    assert_eq!(one(&mut queue, flush).1, Ok(()));
    assert_eq!(bench.controller.stats().list_pages_used, 0);
}

#[test]
fn a_second_completion_of_the_first_attempt_is_not_the_retrys() {
    let (bench, clock) = rig();
    let before = bench.arena.0.used();
    let mut queue = bench.controller.create_queue(4).unwrap();
    let ring = bench.arena.0.whole().part((before + 1) * 4096, 4096).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(NOT_READY));
    let write = queue.write(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    assert!(poll_all(&bench, &mut queue).is_none());
    bench.model.faults().inject(Trigger::Nth(1), Fault::NeverComplete);
    clock.advance(MS);
    assert!(poll_all(&bench, &mut queue).is_none());
    let mut first = [0; 16];
    ring.copy_to_slice(0, &mut first).unwrap();
    // As the first completion, but with success.
    first[14..].copy_from_slice(&1u16.to_le_bytes());
    ring.copy_from_slice(16, &first).unwrap();
    assert!(queue.poll().unwrap().is_none());
    assert_eq!((queue.stats().spurious_completions, queue.in_flight()), (1, 1));
    bench.controller.reset().unwrap();
    assert_eq!(one(&mut queue, write).1, Err(CommandError::Reset));
}

#[test]
fn the_wait_for_an_interrupt_ends_when_a_retry_is_due() {
    let mut model = ModelConfig::new(namespaces(1 << 20));
    model.vectors = 2;
    let bench = bench(256, model, Config::default());
    let interrupt = bench.model.interrupt(1).unwrap();
    let vector = pinfold_nvme::driver::Vector { number: 1, interrupt };
    let mut queue = bench.controller.create_queue_with(4, vector).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(NOT_READY));
    let flush = queue.flush(1).unwrap();
    queue.ring_doorbell();
    while queue.stats().errors == 0 {
        assert!(queue.poll().unwrap().is_none());
    }
    assert!(queue.arm_interrupt() <= Duration::from_millis(1), "not 100 ms");
    assert_eq!(one(&mut queue, flush).1, Ok(()));
}

#[test]
fn a_namespace_that_is_not_ready_for_seconds_is_waited_for() {
    let mut model = ModelConfig::new(namespaces(1 << 20));
    (model.not_ready, model.retry_delays) = (Duration::from_secs(2), [3, 0, 0]);
    let began = Instant::now();
    let bench = bench(256, model, Config::default());
    let mut queue = bench.controller.create_queue(4).unwrap();
    let flush = queue.flush(1).unwrap();
    assert_eq!(one(&mut queue, flush).1, Ok(()));
    assert!(began.elapsed() >= Duration::from_secs(2));
    let stats = queue.stats();
    // Once every 300 ms, not thousands of times.
    assert!((1..=7).contains(&stats.retries) && stats.retried_requests == 1, "{stats}");
    assert!(stats.retry_wait_ns >= 300 * MS, "{stats}");
}

#[test]
fn crd_is_used_only_after_the_host_has_declared_it() {
    let (bench, _) = rig();
    // A driver that finds delays sets ACRE; this controller has none, so the model keeps CRD to
    // itself.
    let arena = Arena(Memory::new(256));
    let model =
        ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    let config = Config { retry_limit: Duration::ZERO, ..Config::default() };
    let controller = Controller::start(model.registers(), arena, config).unwrap();
    let mut queue = controller.create_queue(1).unwrap();
    model.faults().inject(Trigger::Nth(1), Fault::Fail(NOT_READY.with_retry_delay(3)));
    let flush = queue.flush(1).unwrap();
    assert_eq!(one(&mut queue, flush).1, Err(CommandError::Status(NOT_READY)));
    let mut queue = bench.controller.create_queue(1).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(NOT_READY.with_retry_delay(3)));
    let flush = queue.flush(1).unwrap();
    assert_eq!(one(&mut queue, flush).1, Err(CommandError::Status(NOT_READY.with_retry_delay(3))));
}

#[test]
fn an_admin_command_waits_for_a_controller_that_is_not_ready() {
    let arena = Arena(Memory::new(256));
    let model =
        ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    let refused = AtomicU32::new(0);
    let identify = move |seen: &CommandInfo| {
        let is_it = seen.opcode == admin::IDENTIFY && seen.queue == 0;
        is_it && refused.fetch_add(1, Ordering::Relaxed) < 3
    };
    model.faults().inject(Trigger::Matches(Box::new(identify)), Fault::Fail(NOT_READY));
    let controller =
        Controller::start(model.registers(), arena.clone(), Config::default()).unwrap();
    assert!(controller.stats().admin_retries > 0);
    assert_eq!(controller.namespaces().len(), 2);
    drop(controller);

    model.faults().clear();
    let identify = |seen: &CommandInfo| seen.opcode == admin::IDENTIFY && seen.queue == 0;
    model.faults().inject(Trigger::Matches(Box::new(identify)), Fault::Fail(NOT_READY));
    let config = Config { retry_limit: Duration::from_millis(50), ..Config::default() };
    let error = Controller::start(model.registers(), arena, config).unwrap_err();
    assert_eq!(error, Error::Admin { what: "identify controller", status: NOT_READY });
}

/// The event of a changed namespace; its log page is 4.
const NAMESPACE: u32 = 2 | 4 << 16;

/// Gives namespace 1 blocks of 4096 bytes, and waits until the controller has reported it.
fn reformat(bench: &Bench) {
    bench.model.faults().tamper(|command, data| {
        let identified = (command.opcode, command.nsid.get(), command.cdw10.get());
        if identified == (admin::IDENTIFY, 1, cns::NAMESPACE.into()) {
            data[26] = 1; // FLBAS
        }
    });
    bench.model.faults().raise_event(NAMESPACE);
    let before = bench.controller.stats().namespace_events;
    while bench.controller.stats().namespace_events == before {
        bench.controller.scan_namespaces().unwrap();
    }
}

#[test]
fn no_command_is_sent_again_to_a_reformatted_namespace() {
    // Noticed by a request that is refused, or by a poll.
    for submit in [true, false] {
        let (bench, clock) = rig();
        let mut queue = bench.controller.create_queue(4).unwrap();
        let fails = Arc::new(AtomicBool::new(true));
        let hit = {
            let fails = fails.clone();
            move |seen: &CommandInfo| {
                seen.queue != 0 && seen.opcode == nvm::READ && fails.load(Ordering::SeqCst)
            }
        };
        bench
            .model
            .faults()
            .inject(Trigger::Matches(Box::new(hit)), Fault::Fail(NOT_READY.with_retry_delay(1)));
        let read = queue.read(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
        while queue.stats().errors == 0 {
            assert!(queue.poll().unwrap().is_none());
        }
        reformat(&bench);
        if submit {
            let refused = queue.read(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap_err();
            assert_eq!(refused.reason, Reject::NamespaceChanged { nsid: 1 });
        }
        fails.store(false, Ordering::SeqCst);
        let commands = queue.stats().commands;
        clock.advance(2_000 * MS);
        assert_eq!(
            one(&mut queue, read).1,
            Err(CommandError::NamespaceChanged { nsid: 1 }),
            "{submit}"
        );
        assert_eq!((queue.stats().commands, queue.stats().retries), (commands, 0), "{submit}");
        assert_eq!((queue.in_flight(), bench.controller.stats().list_pages_used), (0, 0));
        let flush = queue.flush(2).unwrap();
        assert_eq!(one(&mut queue, flush).1, Ok(()), "the other namespace is the same");
    }
}

/// It waits for an older one, which fails because its namespace has changed.
#[test]
fn a_held_request_is_not_sent_to_a_reformatted_namespace() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(NOT_READY.with_retry_delay(1)));
    let write =
        |queue: &mut TestQueue| queue.write(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    let (older, held) = (write(&mut queue), write(&mut queue));
    while queue.stats().errors == 0 {
        assert!(queue.poll().unwrap().is_none());
    }
    reformat(&bench);
    clock.advance(2_000 * MS);
    let changed = Err(CommandError::NamespaceChanged { nsid: 1 });
    assert_eq!(one(&mut queue, older).1, changed);
    assert_eq!(one(&mut queue, held).1, changed);
    assert_eq!((queue.stats().commands, queue.in_flight()), (1, 0));
}

/// A request has more commands than the queue has slots.
#[test]
fn the_rest_of_a_request_is_not_sent_to_a_reformatted_namespace() {
    let mut model = ModelConfig::new(namespaces(4 << 20));
    model.mdts = 3; // 32 KiB
    let bench = bench(256, model, Config::default());
    let mut queue = bench.controller.create_queue(1).unwrap();
    let hit = |seen: &CommandInfo| seen.queue != 0 && seen.opcode == nvm::WRITE_ZEROES;
    bench.model.faults().inject(Trigger::Matches(Box::new(hit)), Fault::Hold);
    let zeroes = queue.write_zeroes(1, 0, 8192).unwrap();
    queue.ring_doorbell();
    let sent = queue.stats().commands;
    assert!(sent < 128, "{sent} of 128");
    reformat(&bench);
    bench.model.faults().clear();
    bench.model.faults().release();
    assert_eq!(one(&mut queue, zeroes).1, Err(CommandError::NamespaceChanged { nsid: 1 }));
    assert_eq!(queue.stats().commands, sent);
}
