//! Requests and admin commands that do not complete in time are aborted; only what that does not
//! end is quarantined.

use crate::common::*;
use crate::faults::{SECOND, settle};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{CommandError, Config, Controller, Error, Outcome, Unpaused, Unusable};
use pinfold_nvme::spec::{Doorbell, Status, admin, doorbell_offset, offset};
use pinfold_nvme_model::{
    CommandInfo, Fault, ModelConfig, ModelController, ModelRegisters, Trigger,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Returns a bench whose clock stops until the test advances it; requests and aborts time out after
/// one second.
fn with_test_clock(acl: u8) -> (Bench, TestClock) {
    with_model(|model| model.acl = acl)
}

fn with_model(change: impl FnOnce(&mut ModelConfig)) -> (Bench, TestClock) {
    let clock = TestClock::default();
    let second = Duration::from_secs(1);
    let config = Config {
        timeout: second,
        abort_timeout: second,
        clock: Arc::new(clock.clone()),
        ..Config::default()
    };
    let mut model = ModelConfig::new(namespaces(4 << 20));
    change(&mut model);
    (bench(2048, model, config), clock)
}

fn aborts(seen: &CommandInfo) -> bool {
    seen.queue == 0 && seen.opcode == admin::ABORT
}

#[test]
fn an_aborted_request_returns_its_payload() {
    let (bench, clock) = with_test_clock(3);
    let mut queue = bench.controller.create_queue(4).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Hold);
    let late = queue.write(1, 0, 64, Buffer::new(&bench.arena, 32 << 10)).unwrap();
    queue.ring_doorbell();
    settle(&bench);
    assert!(queue.poll().unwrap().is_none());
    clock.advance(SECOND + 1);
    let (_payload, result) = one(&mut queue, late);
    assert_eq!(result, Err(CommandError::Aborted));
    let stats = queue.stats();
    assert_eq!((stats.timeouts, stats.aborts, stats.aborted, stats.late_completions), (1, 1, 1, 0));
    let stats = bench.controller.stats();
    assert_eq!(
        (stats.quarantined, stats.quarantined_permanently, stats.list_pages_used),
        (0, 0, 0)
    );
    // The queue continues.
    let flush = queue.flush(1).unwrap();
    one(&mut queue, flush).1.unwrap();
}

/// SIGSTOP, a debugger, a paused virtual machine: when the process goes on, every deadline has
/// passed.
#[test]
fn a_pause_of_the_process_is_no_timeout() {
    let clock = TestClock::default();
    let unpaused = Arc::new(Unpaused::new(clock.clone()));
    let config = Config { timeout: Duration::from_secs(10), clock: unpaused, ..Config::default() };
    let bench = bench(2048, ModelConfig::new(namespaces(4 << 20)), config);
    let mut queue = bench.controller.create_queue(4).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Hold);
    let paused = queue.write(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    queue.ring_doorbell();
    settle(&bench);
    for seconds in [12, 35, 3600] {
        assert!(queue.poll().unwrap().is_none());
        clock.advance(seconds * SECOND);
        // A device of the same machine stood still too and answers only later.
        assert!(queue.poll().unwrap().is_none());
    }
    bench.model.faults().release();
    assert_eq!(one(&mut queue, paused).1, Ok(()));
    assert_eq!((queue.stats().timeouts, queue.stats().aborts), (0, 0));
    // A device that does not answer is found, also by a program that looks every three seconds.
    for step_ns in [SECOND / 2, 3 * SECOND] {
        bench.model.faults().inject(Trigger::Nth(1), Fault::Hold);
        let late = queue.write(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
        let mut looks = 0;
        let completion = loop {
            if let Some(completion) = queue.poll().unwrap() {
                break completion;
            }
            settle(&bench);
            clock.advance(step_ns);
            looks += 1;
            assert!(looks < 30, "it is never given up");
        };
        let Outcome::Completed { result, .. } = late.finish(completion) else { panic!() };
        assert_eq!(result, Err(CommandError::Aborted));
    }
}

#[test]
fn a_request_that_was_not_aborted_is_quarantined_at_once() {
    let (bench, clock) = with_test_clock(3);
    let mut queue = bench.controller.create_queue(4).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::NeverComplete);
    let lost = queue.write(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    queue.ring_doorbell();
    clock.advance(SECOND + 1);
    // The clock is not advanced again: the abort completes with "command unknown".
    drop(crate::faults::quarantined(&mut queue, lost));
    assert_eq!((queue.stats().timeouts, queue.stats().aborted), (1, 0));
}

#[test]
fn a_controller_that_aborts_nothing_gives_nothing_back() {
    let (bench, clock) = with_model(|model| model.aborts = false);
    let mut queue = bench.controller.create_queue(4).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Hold);
    let held = queue.write(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    queue.ring_doorbell();
    clock.advance(SECOND + 1);
    drop(crate::faults::quarantined(&mut queue, held));
    assert_eq!((queue.stats().timeouts, queue.stats().aborted), (1, 0));
}

#[test]
fn an_answer_to_an_abort_reaches_the_queue_that_asked() {
    let (bench, clock) = with_test_clock(3);
    bench.model.faults().inject(Trigger::Every(1), Fault::NeverComplete);
    let mut queues = [(); 2].map(|()| bench.controller.create_queue(4).unwrap());
    let lost = queues.each_mut().map(|queue| {
        let flush = queue.flush(1).unwrap();
        queue.ring_doorbell();
        flush
    });
    settle(&bench);
    clock.advance(SECOND + 1);
    // Each sends its abort; the controller answers both, before the first queue looks.
    for queue in &mut queues {
        assert!(queue.poll().unwrap().is_none());
    }
    settle(&bench);
    for (queue, lost) in queues.iter_mut().zip(lost) {
        // The first poll sees the answer, the next one gives the request up. The clock is not
        // advanced again.
        let completion =
            (0..4).find_map(|_| queue.poll().unwrap()).expect("its answer went elsewhere");
        assert!(matches!(lost.finish(completion), Outcome::TimedOut(_)));
    }
}

#[test]
fn an_abort_that_times_out_quarantines_its_request() {
    let (bench, clock) = with_test_clock(3);
    let mut queue = bench.controller.create_queue(4).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Hold);
    bench.model.faults().inject(Trigger::Matches(Box::new(aborts)), Fault::Hold);
    let late = queue.write(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    queue.ring_doorbell();
    clock.advance(SECOND + 1);
    for _ in 0..3 {
        assert!(queue.poll().unwrap().is_none());
        settle(&bench);
    }
    clock.advance(SECOND + 1);
    let payload = crate::faults::quarantined(&mut queue, late);
    bench.controller.reset().unwrap();
    drop(payload.recover().unwrap());
    assert_eq!(bench.controller.stats().quarantined_permanently, 0);
}

#[test]
fn outstanding_aborts_are_limited_by_acl() {
    for acl in [0, 2] {
        let (bench, clock) = with_test_clock(acl);
        let mut queue = bench.controller.create_queue(6).unwrap();
        let held = Arc::new(AtomicU32::new(0));
        let counted = held.clone();
        bench.model.faults().inject(Trigger::Every(1), Fault::Hold);
        let hold = move |seen: &CommandInfo| {
            let hit = aborts(seen);
            counted.fetch_add(u32::from(hit), Ordering::SeqCst);
            hit
        };
        bench.model.faults().inject(Trigger::Matches(Box::new(hold)), Fault::Hold);
        let flying: Vec<_> = (0..6).map(|_| queue.flush(1).unwrap()).collect();
        queue.ring_doorbell();
        settle(&bench);
        clock.advance(SECOND + 1);
        for _ in 0..5 {
            assert!(queue.poll().unwrap().is_none());
            settle(&bench);
        }
        assert_eq!(held.load(Ordering::SeqCst), u32::from(acl) + 1, "ACL {acl}");
        drop(flying);
    }
}

#[test]
fn an_identify_without_completion_is_aborted() {
    let arena = Arena(Memory::new(256));
    let model =
        ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    let first =
        |seen: &CommandInfo| seen.queue == 0 && seen.opcode == admin::IDENTIFY && seen.nsid == 1;
    model.faults().inject(Trigger::Matches(Box::new(first)), Fault::Hold);
    // The other admin commands of the start have as long, on a busy machine too.
    let config = Config { admin_timeout: Duration::from_secs(5), ..Config::default() };
    let controller = Controller::start(model.registers(), arena.clone(), config).unwrap();
    let status = Status::ABORT_REQUESTED;
    assert_eq!(controller.namespace(1), Err(Unusable::Identify(status)));
    assert_eq!(controller.namespace(2).unwrap().blocks, 256);
    let mut queue = controller.create_queue(1).unwrap();
    let flush = queue.flush(2).unwrap();
    one(&mut queue, flush).1.unwrap();
}

/// Writes garbage to the admin completion queue each time the driver acknowledges entries.
#[derive(Clone)]
struct Flood {
    registers: ModelRegisters,
    arena: Arena,
    ring: Arc<AtomicU64>,
    /// The number of entries written, or `u64::MAX` before the flood begins.
    written: Arc<AtomicU64>,
}

impl Flood {
    fn write_garbage(&self) {
        let first = self.written.load(Ordering::SeqCst);
        let at = (self.ring.load(Ordering::SeqCst) - BASE) as usize;
        for i in first..first + 32 {
            let phase = u32::from(i / 32 % 2 == 0);
            // Identifier 7777h, status 0.
            let last = 0x7777 | phase << 16;
            self.arena.0.whole().store_release_u32(at + (i % 32) as usize * 16 + 12, last).unwrap();
        }
        self.written.store(first + 32, Ordering::SeqCst);
    }
}

impl Registers for Flood {
    fn read32(&self, at: u32) -> u32 {
        self.registers.read32(at)
    }
    fn read64(&self, at: u32) -> u64 {
        self.registers.read64(at)
    }
    fn write32(&self, at: u32, value: u32) {
        let flood = self.written.load(Ordering::SeqCst) != u64::MAX;
        if flood && Some(at) == doorbell_offset(0, Doorbell::SubmissionTail, 0) {
            return self.write_garbage();
        }
        if flood && Some(at) == doorbell_offset(0, Doorbell::CompletionHead, 0) {
            return self.write_garbage();
        }
        self.registers.write32(at, value);
    }
    fn write64(&self, at: u32, value: u64) {
        if at == offset::ACQ {
            self.ring.store(value, Ordering::SeqCst);
        }
        self.registers.write64(at, value);
    }
}

#[test]
fn endless_garbage_in_the_admin_queue_is_a_timeout() {
    let arena = Arena(Memory::new(256));
    let model =
        ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    let registers = Flood {
        registers: model.registers(),
        arena: arena.clone(),
        ring: Arc::default(),
        written: Arc::new(AtomicU64::new(0)),
    };
    let config = Config { admin_timeout: Duration::from_millis(20), ..Config::default() };
    let error = Controller::start(registers, arena, config).unwrap_err();
    assert_eq!(error, Error::AdminTimeout { what: "identify controller", limit_ms: 20 });
}

#[test]
fn a_completed_request_is_not_reported_as_aborted() {
    let (bench, clock) = with_test_clock(3);
    let mut queue = bench.controller.create_queue(4).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Hold);
    bench.model.faults().inject(Trigger::Matches(Box::new(aborts)), Fault::Hold);
    let late = queue.flush(1).unwrap();
    queue.ring_doorbell();
    settle(&bench);
    clock.advance(SECOND + 1);
    assert!(queue.poll().unwrap().is_none());
    settle(&bench);
    // It completes while its abort is outstanding.
    bench.model.faults().release();
    let completion = queue.wait().unwrap().unwrap();
    let Outcome::Completed { result, .. } = late.finish(completion) else { panic!("quarantined") };
    assert_eq!(result, Ok(()));
}

#[test]
fn an_identifier_is_not_reused_while_its_abort_is_outstanding() {
    let (bench, clock) = with_test_clock(3);
    let mut queue = bench.controller.create_queue(4).unwrap();
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let record = {
        let seen = seen.clone();
        move |command: &CommandInfo| {
            if command.queue != 0 {
                seen.lock().unwrap().push(command.cid);
            }
            false
        }
    };
    bench.model.faults().inject(Trigger::Matches(Box::new(record)), Fault::Fatal);
    bench.model.faults().inject(Trigger::Nth(1), Fault::Hold);
    // The command is aborted, and the abort itself is not answered.
    bench.model.faults().inject(Trigger::Matches(Box::new(aborts)), Fault::NeverComplete);
    let late = queue.flush(1).unwrap();
    queue.ring_doorbell();
    settle(&bench);
    clock.advance(SECOND + 1);
    assert_eq!(one(&mut queue, late).1, Err(CommandError::Aborted));
    for _ in 0..200 {
        let flush = queue.flush(1).unwrap();
        one(&mut queue, flush).1.unwrap();
    }
    let seen = seen.lock().unwrap();
    let slot = seen[0] & 0x3f;
    assert!(seen[1..].iter().all(|cid| cid & 0x3f != slot), "the abort could hit a later command");
}
