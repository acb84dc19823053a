//! A controller that fails as a whole or is removed: a typed error within the limit, and nothing is
//! released that the controller may reach.

use crate::common::*;
use crate::faults::{settle, with_test_clock};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{CommandError, Config, Controller, Error, Outcome, PollError, Reject};
use pinfold_nvme::spec::{Status, admin, nvm};
use pinfold_nvme_model::{Fault, ModelConfig, ModelController, Trigger};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[test]
fn failed_and_lost_admin_commands_are_named() {
    let (bench, _) = with_test_clock();
    let faults = bench.model.faults();
    let create =
        |seen: &pinfold_nvme_model::CommandInfo| seen.queue == 0 && seen.opcode == admin::CREATE_SQ;
    faults.inject(Trigger::Matches(Box::new(create)), Fault::Fail(Status::INTERNAL_ERROR));
    let error = bench.controller.create_queue(1).unwrap_err();
    assert_eq!(
        error,
        Error::Admin { what: "create submission queue", status: Status::INTERNAL_ERROR }
    );
    faults.clear();
    let mut queue = bench.controller.create_queue(1).unwrap();
    let flush = queue.flush(1).unwrap();
    one(&mut queue, flush).1.unwrap();

    let arena = Arena(Memory::new(256));
    let model =
        ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    let identify =
        |seen: &pinfold_nvme_model::CommandInfo| seen.queue == 0 && seen.opcode == admin::IDENTIFY;
    model.faults().inject(Trigger::Matches(Box::new(identify)), Fault::NeverComplete);
    let config = Config { admin_timeout: Duration::from_millis(20), ..Config::default() };
    let error = Controller::start(model.registers(), arena.clone(), config).unwrap_err();
    assert_eq!(error, Error::AdminTimeout { what: "identify controller", limit_ms: 20 });
    assert_eq!(arena.0.used(), 0, "it was disabled, so all is released");
}

#[test]
fn a_queue_dropped_with_commands_keeps_the_memory_they_reach() {
    let (bench, _) = with_test_clock();
    let faults = bench.model.faults();
    let mut queue = bench.controller.create_queue(2).unwrap();
    let late = |seen: &pinfold_nvme_model::CommandInfo| seen.opcode == nvm::READ;
    faults.inject(Trigger::Matches(Box::new(late)), Fault::Hold);
    let delete =
        |seen: &pinfold_nvme_model::CommandInfo| seen.queue == 0 && seen.opcode == admin::DELETE_SQ;
    faults.inject(Trigger::Matches(Box::new(delete)), Fault::Fail(Status::INTERNAL_ERROR));
    let read = queue.read(1, 0, 64, Buffer::new(&bench.arena, 32 << 10)).unwrap();
    queue.ring_doorbell();
    settle(&bench);
    let used = bench.arena.0.used();
    drop(queue);
    assert_eq!(bench.arena.0.used(), used);
    faults.clear();
    faults.release();
    settle(&bench);
    assert_eq!(bench.controller.stats().list_pages_used, 1);
    bench.controller.reset().unwrap();
    assert_eq!(bench.controller.stats().list_pages_used, 0);
    drop(read);
    assert_eq!(bench.controller.stats().quarantined_permanently, 0);
    assert!(bench.arena.0.used() < used);
}

/// The model's registers, in a system that may request the device.
#[derive(Clone)]
struct Lent {
    registers: pinfold_nvme_model::ModelRegisters,
    removal_requested: Arc<std::sync::atomic::AtomicBool>,
}

impl Registers for Lent {
    fn read32(&self, offset: u32) -> u32 {
        self.registers.read32(offset)
    }
    fn read64(&self, offset: u32) -> u64 {
        self.registers.read64(offset)
    }
    fn write32(&self, offset: u32, value: u32) {
        self.registers.write32(offset, value);
    }
    fn write64(&self, offset: u32, value: u64) {
        self.registers.write64(offset, value);
    }
    fn is_removal_requested(&self) -> bool {
        self.removal_requested.load(Ordering::SeqCst)
    }
}

#[test]
fn a_controller_to_be_removed_is_disabled_and_released() {
    let arena = Arena(Memory::new(256));
    let model =
        ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    let lent = Lent { registers: model.registers(), removal_requested: Arc::default() };
    let controller = Controller::start(lent.clone(), arena.clone(), Config::default()).unwrap();
    let mut queue = controller.create_queue(2).unwrap();
    model.faults().inject(Trigger::Every(1), Fault::Hold);
    let flying = queue.write(1, 0, 1, Buffer::new(&arena, 512)).unwrap();
    lent.removal_requested.store(true, Ordering::SeqCst);
    assert_eq!(queue.wait().unwrap_err(), PollError::RemovalRequested);
    controller.disable().unwrap();
    let completion = queue.poll().unwrap().unwrap();
    let Outcome::Completed { payload, result } = flying.finish(completion) else { panic!() };
    assert_eq!(result, Err(CommandError::Reset));
    assert_eq!(queue.flush(1).unwrap_err().reason, Reject::NeedsReset);
    assert_eq!(controller.create_queue(1).unwrap_err(), Error::NeedsReset);
    drop((payload, queue, controller));
    assert_eq!(arena.0.used(), 0);
}

#[test]
fn a_controller_stopped_by_another_program_is_an_error_at_once() {
    let (bench, clock) = with_test_clock();
    let mut queue = bench.controller.create_queue(2).unwrap();
    bench.model.faults().inject(Trigger::Every(1), Fault::Hold);
    let flying = queue.flush(1).unwrap();
    queue.ring_doorbell();
    let registers = bench.model.registers();
    registers.write32(0x14, 0);
    while registers.read32(0x1c) != 0 {
        std::thread::yield_now();
    }
    clock.advance(2_000_000);
    assert_eq!(queue.wait().unwrap_err(), PollError::Stopped);
    bench.model.faults().clear();
    bench.controller.reset().unwrap();
    drop(flying);
    assert_eq!(bench.controller.stats().quarantined_permanently, 0);
    let mut queue = bench.controller.create_queue(2).unwrap();
    let flush = queue.flush(1).unwrap();
    one(&mut queue, flush).1.unwrap();
}

#[test]
fn a_controller_that_is_unplugged_fails_at_once() {
    let Bench { controller, model, arena } =
        bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    let mut queue = controller.create_queue(2).unwrap();
    model.faults().inject(Trigger::Every(1), Fault::NeverComplete);
    let flying = queue.write(1, 0, 1, Buffer::new(&arena, 512)).unwrap();
    queue.ring_doorbell();
    drop(model);
    assert_eq!(queue.wait().unwrap_err(), PollError::Gone);
    assert_eq!(controller.create_queue(1).unwrap_err(), Error::Gone);
    assert_eq!(controller.reset(), Err(Error::Gone));
    let used = arena.0.used();
    drop((queue, flying));
    assert_eq!(controller.stats().quarantined_permanently, 1);
    drop(controller);
    assert_eq!(arena.0.used(), used, "it was never seen disabled");
}

/// The page with the ranges of a discard is quarantined as a page of a list is: the pool of both
/// ends, and with it the pool's handle of the arena.
#[test]
fn a_quarantined_page_keeps_no_pool() {
    let holders = |discard: bool| {
        let Bench { controller, model, arena } =
            bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
        let mut queue = controller.create_queue(2).unwrap();
        model.faults().inject(Trigger::Every(1), Fault::NeverComplete);
        let flying = if discard { queue.discard(1, 0, 1) } else { queue.flush(1) };
        let flying = flying.unwrap();
        queue.ring_doorbell();
        drop(model);
        assert_eq!(queue.wait().unwrap_err(), PollError::Gone);
        assert_eq!(controller.reset(), Err(Error::Gone));
        drop((queue, flying, controller));
        std::sync::Arc::strong_count(&arena.0)
    };
    assert_eq!(holders(true), holders(false));
}
