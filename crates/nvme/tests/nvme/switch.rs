//! CC.EN, CC.SHN and CSTS: nothing is released before the controller is known to have stopped.

use crate::common::*;
use crate::faults::SECOND;
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{Config, Controller, Error, quarantined_bytes};
use pinfold_nvme::spec::{Cc, Csts, offset};
use pinfold_nvme_model::{Fault, ModelConfig, ModelController, ModelRegisters, Trigger};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

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

/// A clock that advances by `step` ns with each reading.
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
