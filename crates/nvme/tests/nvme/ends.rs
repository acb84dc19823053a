//! The end of a controller and of its queues: a failure or a removal is a typed error within the
//! limit; a queue belongs to one generation; nothing is released that the controller may reach, or
//! before it is known to have stopped (CC.EN, CC.SHN and CSTS).

use crate::common::*;
use crate::faults::{SECOND, settle, with_test_clock};
use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{ChunkSource, SourceError};
use pinfold_core::frame::{Frame, Order};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{
    CommandError, Config, Controller, Error, Outcome, PollError, Reject, quarantined_bytes,
};
use pinfold_nvme::spec::{Cc, Csts, Status, admin, nvm, offset};
use pinfold_nvme_model::{
    CommandInfo, Fault, ModelConfig, ModelController, ModelRegisters, Trigger,
};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The time of a fast clock, and by how much each reading advances it, in ns.
#[derive(Default)]
struct FastClock {
    ticks: AtomicU64,
    step: AtomicU64,
    /// Where it stops.
    end: AtomicU64,
}

impl FastClock {
    fn read(&self) -> u64 {
        let now = self.ticks.load(Ordering::SeqCst);
        if now >= self.end.load(Ordering::SeqCst) {
            return now;
        }
        self.ticks.fetch_add(self.step.load(Ordering::SeqCst), Ordering::SeqCst)
    }

    /// Lets it run from now on, for `limit` ns at most: what has to happen in time and is not what
    /// a test is about must not depend on how fast the model's threads are.
    fn run(&self, step: u64, limit: u64) -> u64 {
        let now = self.ticks.load(Ordering::SeqCst);
        self.end.store(now.saturating_add(limit), Ordering::SeqCst);
        self.step.store(step, Ordering::SeqCst);
        now
    }
}

/// Returns a clock that advances by `step` ns with each reading.
fn fast_clock(step: u64) -> (Config, Arc<FastClock>) {
    let ticks = Arc::new(FastClock::default());
    ticks.run(step, u64::MAX);
    let clock = {
        let ticks = ticks.clone();
        move || ticks.read()
    };
    // Requests and admin commands have no deadline; the controller's state changes have.
    let timeout = std::time::Duration::from_secs(1 << 30);
    (Config { timeout, admin_timeout: timeout, clock: Arc::new(clock), ..Config::default() }, ticks)
}

fn spawn() -> (Arena, ModelController) {
    let arena = Arena(Memory::new(256));
    let model =
        ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    (arena, model)
}

fn wait_for(registers: &impl Registers, wanted: Csts) {
    while Csts::from_bits_retain(registers.read32(offset::CSTS)) != wanted {
        std::thread::yield_now();
    }
}

/// Starts, uses and drops a controller.
fn works(model: &ModelController, arena: &Arena) {
    let controller =
        Controller::start(model.registers(), arena.clone(), Config::default()).unwrap();
    let mut queue = controller.create_queue(2).unwrap();
    let flush = queue.flush(1).unwrap();
    one(&mut queue, flush).1.unwrap();
}

#[test]
fn an_unfinished_enable_keeps_its_memory_and_cc_en_set() {
    let (arena, model) = spawn();
    model.faults().set_stuck(true);
    let leaked = quarantined_bytes();
    let error =
        Controller::start(model.registers(), arena.clone(), fast_clock(SECOND / 10).0).unwrap_err();
    assert_eq!(error, Error::NotReady { wanted: "ready", limit_ms: 10_000 });
    assert_eq!(model.stats().early_changes, 0, "CC.EN was cleared while CSTS.RDY was 0");
    // Two admin rings and the page for identify data.
    assert_eq!(
        arena.0.used(),
        3,
        "the enable is still in progress, so the rings are the controller's"
    );
    assert!(quarantined_bytes() - leaked >= 3 * 4096);
    model.faults().set_stuck(false);
    wait_for(&model.registers(), Csts::READY);
    works(&model, &arena);
    assert_eq!((model.stats().early_changes, arena.0.used()), (0, 3));
}

#[test]
fn a_disable_waits_for_an_enable_in_progress() {
    let (arena, model) = spawn();
    let registers = model.registers();
    model.faults().set_stuck(true);
    registers.write32(offset::CC, Cc::ENABLED.0);
    let faults = model.faults();
    let late = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        faults.set_stuck(false);
    });
    // Another program's admin queues at unmapped addresses: they are read only when a doorbell is
    // written.
    registers.write32(offset::AQA, 1 | 1 << 16);
    works(&model, &arena);
    late.join().unwrap();
    assert_eq!((model.stats().early_changes, arena.0.used()), (0, 0));
}

/// A controller whose CAP declares CRTO valid (CRMS), and the value of CRTO.
#[derive(Clone)]
struct Slow(ModelRegisters, u32);

impl Registers for Slow {
    fn read32(&self, at: u32) -> u32 {
        if at == offset::CRTO { self.1 } else { self.0.read32(at) }
    }
    fn read64(&self, at: u32) -> u64 {
        self.0.read64(at) | if at == offset::CAP { 1 << 59 } else { 0 }
    }
    fn write32(&self, at: u32, value: u32) {
        self.0.write32(at, value);
    }
    fn write64(&self, at: u32, value: u64) {
        self.0.write64(at, value);
    }
}

#[test]
fn enabling_takes_at_most_the_bounded_crto() {
    for (crto, limit_ms) in [(0, 10_000), (400, 200_000), (400 << 16, 10_000), (0xffff, 600_000)] {
        let (arena, model) = spawn();
        model.faults().set_stuck(true);
        let registers = Slow(model.registers(), crto);
        let error = Controller::start(registers, arena, fast_clock(SECOND).0).unwrap_err();
        assert_eq!(error, Error::NotReady { wanted: "ready", limit_ms }, "CRTO {crto:x}h");
    }
}

#[test]
fn a_controller_that_cannot_be_disabled_keeps_its_memory() {
    let (arena, model) = spawn();
    let (config, ticks) = fast_clock(0);
    let controller = Controller::start(model.registers(), arena.clone(), config).unwrap();
    ticks.run(SECOND / 250, u64::MAX);
    let mut queue = controller.create_queue(2).unwrap();
    model.faults().inject(Trigger::Nth(1), Fault::Hold);
    let lost = queue.write(1, 0, 64, Buffer::new(&arena, 32 << 10)).unwrap();
    queue.ring_doorbell();
    model.faults().set_stuck(true);
    assert_eq!(controller.reset(), Err(Error::NotReady { wanted: "disabled", limit_ms: 10_000 }));
    assert!(matches!(controller.create_queue(1), Err(Error::NeedsReset)));
    let (used, leaked, before) =
        (arena.0.used(), quarantined_bytes(), ticks.ticks.load(Ordering::SeqCst));
    drop(lost);
    drop(queue);
    assert_eq!(
        (controller.stats().quarantined_permanently, controller.stats().quarantined_queues),
        (1, 1)
    );
    drop(controller);
    assert_eq!(arena.0.used(), used, "nothing that it may still reach is released");
    // Admin: 3 pages, queue pair: 2, PRP lists: 1.
    assert!(quarantined_bytes() - leaked >= 6 * 4096);
    let waited = ticks.ticks.load(Ordering::SeqCst) - before;
    assert!(waited < SECOND, "the drop waited again for the full time: {waited} ns");
    assert_eq!(model.stats().early_changes, 0);
}

#[test]
fn a_failed_enable_is_a_fatal_error_and_releases_the_memory() {
    /// Clears CC's entry sizes and sets a command set that the model does not have, so that
    /// enabling fails.
    #[derive(Clone)]
    struct Wrong(ModelRegisters, Arc<AtomicU32>);
    impl Registers for Wrong {
        fn read32(&self, at: u32) -> u32 {
            let value = self.0.read32(at);
            if at == offset::CSTS {
                self.1.fetch_or(value, Ordering::SeqCst);
            }
            value
        }
        fn read64(&self, at: u32) -> u64 {
            self.0.read64(at)
        }
        fn write32(&self, at: u32, value: u32) {
            self.0.write32(at, if at == offset::CC { value | 1 << 4 } else { value });
        }
        fn write64(&self, at: u32, value: u64) {
            self.0.write64(at, value);
        }
    }
    let (arena, model) = spawn();
    let registers = Wrong(model.registers(), Arc::default());
    let error = Controller::start(registers.clone(), arena.clone(), Config::default()).unwrap_err();
    assert_eq!(error, Error::Fatal);
    assert_eq!(Csts::from_bits_retain(registers.1.load(Ordering::SeqCst)), Csts::FATAL);
    assert_eq!(model.registers().read32(offset::CSTS), 0, "the failed controller was disabled");
    assert_eq!(arena.0.used(), 0);
}

/// A controller with a bit of CSTS set while CC.EN is clear, and until it is ready, or for good.
#[derive(Clone)]
struct Left(ModelRegisters, Csts, bool);

impl Registers for Left {
    fn read32(&self, at: u32) -> u32 {
        let value = self.0.read32(at);
        let ends = !self.2 && Csts::from_bits_retain(value).contains(Csts::READY);
        if at == offset::CSTS && !ends { value | self.1.bits() } else { value }
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

#[test]
fn a_fatal_status_of_before_does_not_fail_an_enable() {
    let (arena, model) = spawn();
    let registers = Left(model.registers(), Csts::FATAL, false);
    let controller = Controller::start(registers, arena.clone(), Config::default()).unwrap();
    let mut queue = controller.create_queue(2).unwrap();
    let flush = queue.flush(1).unwrap();
    let completion = queue.wait().unwrap().unwrap();
    assert!(matches!(flush.finish(completion), Outcome::Completed { result: Ok(()), .. }));
    // Nor does it fail a reset.
    controller.reset().unwrap();
    drop(queue);
    drop(controller);
    assert_eq!((arena.0.used(), model.stats().early_changes), (0, 0));
}

#[test]
fn a_fatal_status_that_stays_fails_an_enable_in_time() {
    // It becomes ready and has failed all the same.
    let (arena, model) = spawn();
    let registers = Left(model.registers(), Csts::FATAL, true);
    let error = Controller::start(registers, arena.clone(), Config::default()).unwrap_err();
    assert_eq!((error, arena.0.used()), (Error::Fatal, 0));
    // It does not become ready: one limit for that, and one for disabling it again.
    let (arena, model) = spawn();
    model.faults().set_stuck(true);
    let registers = Left(model.registers(), Csts::FATAL, false);
    let (config, ticks) = fast_clock(SECOND / 10);
    let error = Controller::start(registers, arena, config).unwrap_err();
    let took = ticks.ticks.load(Ordering::SeqCst);
    assert_eq!((error, took >= 10 * SECOND, took < 25 * SECOND), (Error::Fatal, true, true));
}

#[test]
fn a_disable_of_before_that_does_not_end_is_not_awaited_for_ever() {
    let (arena, model) = spawn();
    let registers = Left(model.registers(), Csts::READY, true);
    let (config, ticks) = fast_clock(SECOND / 10);
    let error = Controller::start(registers, arena.clone(), config).unwrap_err();
    assert_eq!(error, Error::NotReady { wanted: "disabled", limit_ms: 10_000 });
    assert!(ticks.ticks.load(Ordering::SeqCst) < 25 * SECOND);
    assert_eq!(model.registers().read32(offset::CC), 0, "it was not enabled");
}

#[test]
fn only_a_drop_notifies_the_controller_of_the_shutdown() {
    let (arena, model) = spawn();
    works(&model, &arena);
    assert_eq!(model.stats().shutdowns, 1, "dropped");
    let controller =
        Controller::start(model.registers(), arena.clone(), Config::default()).unwrap();
    controller.reset().unwrap();
    assert_eq!(model.stats().shutdowns, 1, "reset");
    controller.disable().unwrap();
    assert_eq!(model.stats().shutdowns, 2, "disabled");
    wait_for(&model.registers(), Csts::empty());
    drop(controller);
    assert_eq!(model.stats().shutdowns, 2, "already disabled");
    assert_eq!(arena.0.used(), 0);
}

#[test]
fn a_hanging_shutdown_delays_a_drop_by_its_limit_at_most() {
    for (rtd3_entry_us, wait) in [(0, 10), (2_000_000, 2), (u32::MAX, 60)] {
        let arena = Arena(Memory::new(256));
        let mut config = ModelConfig::new(namespaces(1 << 20));
        config.rtd3_entry_us = rtd3_entry_us;
        let model = ModelController::spawn(arena.clone(), config).unwrap();
        let (config, ticks) = fast_clock(0);
        let controller = Controller::start(model.registers(), arena.clone(), config).unwrap();
        model.faults().set_shutdown_stuck(true);
        // It stops one second later, and disabling takes what it takes.
        let before = ticks.run(SECOND / 250, (wait + 1) * SECOND);
        drop(controller);
        let waited = ticks.ticks.load(Ordering::SeqCst) - before;
        assert!(
            (wait * SECOND..(wait + 2) * SECOND).contains(&waited),
            "RTD3E {rtd3_entry_us}: {waited} ns"
        );
        assert_eq!(
            (model.stats().shutdowns, arena.0.used()),
            (0, 0),
            "it was disabled nevertheless"
        );
    }
}

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

type Hook = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// An arena that runs a hook, once, before it allocates.
#[derive(Clone)]
struct Hooked(Arena, Hook);

// SAFETY: all of it is the arena's.
unsafe impl ChunkSource for Hooked {
    fn span(&self) -> NonNull<[u8]> {
        self.0.span()
    }
    fn iova(&self) -> Iova {
        self.0.iova()
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let hook = self.1.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
        self.0.acquire(order)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // SAFETY: the caller's contract.
        unsafe { self.0.release(frame, order) };
    }
}

#[test]
fn a_reset_while_a_queue_is_created_does_not_make_it_stale() {
    let arena = Arena(Memory::new(256));
    let model =
        ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    let source = Hooked(arena.clone(), Hook::default());
    let controller: Controller<ModelRegisters, Hooked> =
        Controller::start(model.registers(), source.clone(), Config::default()).unwrap();
    let again = controller.clone();
    *source.1.lock().unwrap() = Some(Box::new(move || again.reset().unwrap()));
    let before = arena.0.used();
    let mut queue = controller.create_queue(4).unwrap();
    assert!(source.1.lock().unwrap().is_none() && controller.stats().resets == 2);
    let flush = queue.flush(1).expect("the controller has the queue");
    let completion = queue.wait().unwrap().unwrap();
    assert!(matches!(flush.finish(completion), Outcome::Completed { result: Ok(()), .. }));
    drop(queue);
    assert_eq!(arena.0.used(), before);
    // Had the rings been released without deleting the queue, the identifier would still be in use.
    assert_eq!(controller.create_queue(4).unwrap().id(), 1);
    assert_eq!(model.stats().errors, 0);
}

#[test]
fn a_partly_created_queue_is_quarantined() {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    let (faults, status) = (bench.model.faults(), Status::INTERNAL_ERROR);
    let on = |opcode| {
        let hit = move |seen: &CommandInfo| seen.queue == 0 && seen.opcode == opcode;
        Trigger::Matches(Box::new(hit))
    };
    let before = bench.arena.0.used();
    for opcode in [admin::CREATE_CQ, admin::CREATE_SQ] {
        faults.inject(on(opcode), Fault::Fail(status));
        assert!(matches!(bench.controller.create_queue(1), Err(Error::Admin { .. })));
        assert_eq!(
            (bench.arena.0.used(), bench.controller.stats().quarantined_queues),
            (before, 0)
        );
        faults.clear();
    }
    faults.inject(on(admin::CREATE_SQ), Fault::Fail(status));
    faults.inject(on(admin::DELETE_CQ), Fault::Fail(status));
    assert!(matches!(bench.controller.create_queue(1), Err(Error::Admin { .. })));
    assert_eq!(
        (bench.arena.0.used(), bench.controller.stats().quarantined_queues),
        (before + 2, 1)
    );
    faults.clear();
    // The controller has a completion queue of this number.
    assert_eq!(bench.controller.create_queue(1).unwrap().id(), 2);
    bench.controller.reset().unwrap();
    assert_eq!((bench.arena.0.used(), bench.controller.stats().quarantined_queues), (before, 0));
    assert_eq!(bench.controller.create_queue(1).unwrap().id(), 1);
}
