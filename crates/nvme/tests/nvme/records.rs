//! The driver's records of commands that end late, twice, or not at all: a slot, a tag and a count
//! belong to the command that they were recorded for.

use crate::common::*;
use crate::faults::{SECOND, quarantined, settle};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{CommandError, Config, Controller, Outcome, Reject, quarantined_bytes};
use pinfold_nvme::spec::{Status, admin, nvm, offset};
use pinfold_nvme_model::{
    CommandInfo, Fault, ModelConfig, ModelController, ModelRegisters, Trigger,
};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Returns a bench whose clock the test advances. Requests time out after a second, without an
/// abort unless it has `abort` seconds.
fn rig(mqes: u16, acl: u8, abort: u64) -> (Bench, TestClock) {
    let clock = TestClock::default();
    let config = Config {
        timeout: Duration::from_secs(1),
        abort_timeout: Duration::from_secs(abort),
        clock: Arc::new(clock.clone()),
        ..Config::default()
    };
    let mut model = ModelConfig::new(namespaces(4 << 20));
    (model.mqes, model.acl, model.retry_delays) = (mqes, acl, [20, 0, 0]);
    (bench(1024, model, config), clock)
}

/// The tag of the quarantined request is that of a request in flight by then.
#[test]
fn a_late_completion_ends_no_later_request() {
    let (bench, clock) = rig(1023, 3, 0);
    let mut queue = bench.controller.create_queue(1).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Hold);
    let late = queue.write(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    queue.ring_doorbell();
    settle(&bench);
    clock.advance(2 * SECOND);
    let kept = quarantined(&mut queue, late);
    bench.model.faults().inject(Trigger::Nth(1), Fault::NeverComplete);
    let newer = queue.write(1, 8, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    queue.ring_doorbell();
    settle(&bench);
    bench.model.faults().release();
    settle(&bench);
    assert!(queue.poll().unwrap().is_none(), "the completion of the earlier request");
    let stats = queue.stats();
    assert_eq!((stats.late_completions, stats.completions, queue.in_flight()), (1, 0, 1));
    bench.controller.reset().unwrap();
    assert_eq!(one(&mut queue, newer).1, Err(CommandError::Reset));
    drop(kept);
}

#[test]
fn late_completions_make_room_for_commands_again() {
    let (bench, clock) = rig(3, 3, 0);
    let mut queue = bench.controller.create_queue(3).unwrap();
    for _ in 0..3 {
        let hold = |seen: &CommandInfo| seen.queue != 0;
        bench.model.faults().inject(Trigger::Matches(Box::new(hold)), Fault::Hold);
        let mut lost: Vec<_> = (0..3)
            .map(|at| queue.write(1, at, 1, Buffer::new(&bench.arena, 512)).unwrap())
            .collect();
        queue.ring_doorbell();
        settle(&bench);
        clock.advance(2 * SECOND);
        let mut kept = Vec::new();
        while let Some(completion) = queue.wait().unwrap() {
            let at = lost.iter().position(|lost| lost.tag() == completion.tag()).unwrap();
            let Outcome::TimedOut(one) = lost.remove(at).finish(completion) else { panic!() };
            kept.push(one);
        }
        assert_eq!(queue.flush(1).unwrap_err().reason, Reject::NeedsReset);
        bench.model.faults().clear();
        bench.model.faults().release();
        settle(&bench);
        assert!(queue.poll().unwrap().is_none());
        let flush = queue.flush(1).unwrap();
        assert_eq!(one(&mut queue, flush).1, Ok(()), "its slots are free again");
        drop(kept);
    }
    assert_eq!(queue.stats().late_completions, 9);
}

/// It waits for its retry, and for one of another queue.
#[test]
fn nothing_of_an_expired_request_is_sent_again() {
    let (bench, clock) = rig(1023, 3, 0);
    let mut first = bench.controller.create_queue(4).unwrap();
    let mut second = bench.controller.create_queue(4).unwrap();
    let write = |queue: &mut TestQueue, status| {
        bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(status));
        let write = queue.write(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
        queue.ring_doorbell();
        settle(&bench);
        write
    };
    let later = Status::NAMESPACE_NOT_READY.with_retry_delay(1);
    let older = write(&mut first, later);
    let newer = write(&mut second, Status::NAMESPACE_NOT_READY);
    assert!(first.poll().unwrap().is_none() && second.poll().unwrap().is_none());
    clock.advance(SECOND + SECOND / 2);
    // Only its retry was due, a millisecond after its failure.
    let error = CommandError::Status(Status::NAMESPACE_NOT_READY);
    assert_eq!(one(&mut second, newer).1, Err(error));
    clock.advance(SECOND);
    assert_eq!(one(&mut first, older).1, Ok(()));
    let (a, b) = (second.flush(1).unwrap(), second.flush(1).unwrap());
    clock.advance(SECOND / 2);
    assert_eq!((one(&mut second, a).1, one(&mut second, b).1), (Ok(()), Ok(())));
    assert_eq!((second.stats().commands, second.stats().retries), (3, 0));
}

/// The abort of a command is not answered before the reset, and counts against the controller's
/// limit, ACL, no longer.
#[test]
fn what_was_outstanding_before_a_reset_is_not_after_it() {
    let (bench, clock) = rig(1023, 0, 1);
    let aborts = |seen: &CommandInfo| seen.queue == 0 && seen.opcode == admin::ABORT;
    for _ in 0..3 {
        let mut queue = bench.controller.create_queue(4).unwrap();
        bench.model.faults().inject(Trigger::Nth(1), Fault::Hold);
        bench.model.faults().inject(Trigger::Matches(Box::new(aborts)), Fault::NeverComplete);
        let stuck = queue.flush(1).unwrap();
        queue.ring_doorbell();
        settle(&bench);
        clock.advance(SECOND + 1);
        assert!(queue.poll().unwrap().is_none());
        assert_eq!(queue.stats().aborts, 1);
        bench.model.faults().clear();
        bench.controller.reset().unwrap();
        assert_eq!(one(&mut queue, stuck).1, Err(CommandError::Reset));
    }
}

type Hook = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// The model's registers, with a hook that runs, once, when CSTS is read.
#[derive(Clone)]
struct Hooked(ModelRegisters, Hook);

impl Registers for Hooked {
    fn read32(&self, at: u32) -> u32 {
        let hook = if at == offset::CSTS { self.1.lock().unwrap().take() } else { None };
        if let Some(hook) = hook {
            hook();
        }
        self.0.read32(at)
    }
    fn read64(&self, at: u32) -> u64 {
        self.0.read64(at)
    }
    fn write32(&self, at: u32, value: u32) {
        self.0.write32(at, value);
    }
    fn write64(&self, at: u32, value: u64) {
        self.0.write64(at, value);
    }
}

/// A reset ends between the check of the controller and the aborts of a poll: the identifiers of
/// the queue are another queue's by then.
#[test]
fn a_queue_of_before_a_reset_aborts_nothing() {
    let arena = Arena(Memory::new(256));
    let model =
        ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    let (clock, hook) = (TestClock::default(), Hook::default());
    let config = Config {
        timeout: Duration::from_secs(1),
        abort_timeout: Duration::from_secs(1),
        clock: Arc::new(clock.clone()),
        ..Config::default()
    };
    let registers = Hooked(model.registers(), hook.clone());
    let controller = Controller::start(registers, arena.clone(), config).unwrap();
    let mut queue = controller.create_queue(4).unwrap();
    model.faults().inject(Trigger::Nth(1), Fault::Hold);
    let stuck = queue.flush(1).unwrap();
    queue.ring_doorbell();
    assert!(queue.poll().unwrap().is_none());
    clock.advance(SECOND + 1);
    let resets = controller.clone();
    *hook.lock().unwrap() = Some(Box::new(move || resets.reset().unwrap()));
    let aborted = Arc::new(Mutex::new(0));
    let seen = aborted.clone();
    let aborts = move |info: &CommandInfo| {
        *seen.lock().unwrap() += u32::from(info.queue == 0 && info.opcode == admin::ABORT);
        false
    };
    model.faults().inject(Trigger::Matches(Box::new(aborts)), Fault::Fatal);
    assert!(queue.poll().unwrap().is_none(), "the reset came after the check");
    assert!(hook.lock().unwrap().is_none());
    controller.scan_namespaces().unwrap();
    assert_eq!((*aborted.lock().unwrap(), queue.stats().aborts), (0, 0));
    let completion = queue.wait().unwrap().unwrap();
    let Outcome::Completed { result, .. } = stuck.finish(completion) else { panic!() };
    assert_eq!(result, Err(CommandError::Reset));
}

/// The page with the ranges of a discard, when its controller cannot be disabled.
#[test]
fn the_page_of_a_discard_is_not_reused_while_it_can_be_read() {
    let Bench { controller, model, arena } =
        bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    let mut queue = controller.create_queue(2).unwrap();
    let lists = controller.list_pool().in_use;
    model.faults().inject(Trigger::Nth(1), Fault::Hold);
    let discard = queue.discard(1, 0, 1).unwrap();
    queue.ring_doorbell();
    assert_eq!(controller.list_pool().in_use, lists + 1);
    let (used, leaked) = (arena.0.used(), quarantined_bytes());
    drop(model);
    assert!(queue.wait().is_err());
    drop((queue, discard));
    drop(controller);
    assert_eq!(arena.0.used(), used, "nothing that it may still reach is released");
    assert!(quarantined_bytes() > leaked);
}

/// The last command slot becomes free outside of a poll, while a large request waits for it.
#[test]
fn a_request_does_not_overtake_those_that_wait_for_slots() {
    let clock = TestClock::default();
    let config = Config { clock: Arc::new(clock), ..Config::default() };
    let mut model = ModelConfig::new(namespaces(4 << 20));
    (model.mqes, model.mdts, model.retry_delays) = (3, 3, [20, 0, 0]);
    let bench = bench(512, model, config);
    let mut queue = bench.controller.create_queue(3).unwrap();
    let (order, later) = (Arc::new(Mutex::new(Vec::new())), Status::NAMESPACE_NOT_READY);
    let seen = order.clone();
    let note = move |info: &CommandInfo| {
        if info.queue != 0 && info.opcode == nvm::WRITE_ZEROES {
            seen.lock().unwrap().push(info.slba);
        }
        false
    };
    bench.model.faults().inject(Trigger::Matches(Box::new(note)), Fault::Fatal);
    bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(later.with_retry_delay(1)));
    let waits = queue.flush(1).unwrap();
    queue.ring_doorbell();
    while queue.stats().errors == 0 {
        assert!(queue.poll().unwrap().is_none());
    }
    // Four commands of 64 blocks, for which there are two slots.
    let large = queue.write_zeroes(1, 0, 256).unwrap();
    queue.abandon_retries_of(&waits);
    let small = queue.write_zeroes(1, 1000, 1).unwrap();
    assert!(one(&mut queue, waits).1.is_err());
    let mut ended = 0;
    while ended < 2 {
        let completion = queue.wait().unwrap().unwrap();
        ended += 1;
        // The first one is the large request.
        assert_eq!(completion.tag() == large.tag(), ended == 1);
    }
    assert_eq!(*order.lock().unwrap(), [0, 64, 128, 192, 1000]);
    drop((large, small));
}
