//! Namespaces that cannot be used, minimal controllers, and asynchronous events: the reason is
//! reported, the others work; a namespace that changed is identified again.

use crate::common::*;
use pinfold_nvme::driver::{
    Config, Controller, Error, Event, EventKind, RawCommand, Reject, Unusable,
};
use pinfold_nvme::spec::{Command, Status, admin, cns, csi, nvm};
use pinfold_nvme_model::{CommandInfo, Fault, ModelConfig, ModelController, Trigger};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Returns whether a command identifies namespace 1 by `cns`.
fn identifies(command: &Command, nsid: u32, cns: u8) -> bool {
    (command.opcode, command.nsid.get(), command.cdw10.get()) == (admin::IDENTIFY, nsid, cns.into())
}

/// Reads a block of namespace 2.
fn reads(bench: &Bench) {
    let mut queue = bench.controller.create_queue(2).unwrap();
    let read = queue.read(2, 0, 1, Buffer::new(&bench.arena, 4096)).unwrap();
    one(&mut queue, read).1.unwrap();
}

/// Returns why namespace 1 is unusable after `forge` has changed the identify data.
fn reason(forge: impl Fn(&Command, &mut [u8]) + Send + 'static) -> Option<Unusable> {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    bench.model.faults().tamper(forge);
    bench.controller.reset().unwrap();
    let survey = bench.controller.scan_namespaces().unwrap();
    assert_eq!((survey.len(), survey[1].unusable), (2, None));
    assert_eq!(bench.controller.namespace(1).err(), survey[0].unusable);
    if let Some(reason) = survey[0].unusable {
        let mut queue = bench.controller.create_queue(2).unwrap();
        assert_eq!(queue.flush(1).unwrap_err().reason, Reject::NoSuchNamespace { nsid: 1 });
        assert_eq!(bench.controller.namespaces().len(), 1);
        assert!(!reason.to_string().is_empty());
    }
    reads(&bench);
    survey[0].unusable
}

/// Returns the same, with byte `at` of identify namespace changed.
fn changed(at: usize, byte: u8) -> Option<Unusable> {
    reason(move |command, data| {
        if identifies(command, 1, cns::NAMESPACE) {
            data[at] = byte;
        }
    })
}

#[test]
fn an_unsupported_namespace_is_reported_with_the_reason() {
    assert_eq!(changed(4000, 1), None, "a vendor specific byte");
    for (shift, reason) in [(0, 0), (8, 8), (13, 13), (63, 63), (64, 64), (255, 255)] {
        assert_eq!(changed(128 + 2, shift), Some(Unusable::BlockSize { shift: reason }));
    }
    assert_eq!(changed(26, 5), Some(Unusable::Format { index: 5, count: 2 }));
    assert_eq!(changed(26, 0x6f), Some(Unusable::Format { index: 63, count: 2 }));
    assert_eq!(changed(29, 3), Some(Unusable::Protection { kind: 3 }));
    assert_eq!(changed(128, 8), Some(Unusable::Metadata { bytes: 8, interleaved: false }));
    let huge = changed(7, 0xff).unwrap();
    assert!(matches!(huge, Unusable::Size { blocks } if blocks > 1 << 62), "{huge}");
    let both = reason(|command, data| {
        if identifies(command, 1, cns::NAMESPACE) {
            (data[26], data[128]) = (1 << 4, 8);
        }
    });
    assert_eq!(both, Some(Unusable::Metadata { bytes: 8, interleaved: true }));
    let empty = reason(|command, data| {
        if identifies(command, 1, cns::NAMESPACE) {
            data[..8].fill(0);
        }
    });
    assert_eq!(empty, Some(Unusable::Size { blocks: 0 }));
    let inactive = reason(|command, data| {
        if identifies(command, 1, cns::NAMESPACE) {
            data.fill(0);
        }
    });
    assert_eq!(inactive, Some(Unusable::Inactive));
}

/// The model has no such command: it completes as if it had been carried out.
#[test]
fn a_format_has_the_namespaces_identified_again() {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    let formatted = Arc::new(AtomicUsize::new(0));
    let seen = formatted.clone();
    bench.model.faults().tamper(move |command, data| {
        if identifies(command, 1, cns::NAMESPACE) && seen.load(Ordering::Relaxed) > 0 {
            // Blocks of 4096 bytes.
            data[128 + 2] = 12;
        }
    });
    let format =
        |seen: &CommandInfo| seen.queue == 0 && seen.opcode == admin::FORMAT && seen.nsid == 1;
    let mut queue = bench.controller.create_queue(2).unwrap();
    let command = RawCommand { opcode: admin::FORMAT, nsid: 1, ..RawCommand::default() };
    let mut data = [7; 4096];
    formatted.store(1, Ordering::Relaxed);
    // Not yet.
    let refused = bench.controller.admin(&command, &mut data);
    assert!(
        matches!(refused, Err(Error::Admin { status, .. }) if status.code() == Status::INVALID_OPCODE)
    );
    // One that was refused has changed nothing.
    let read = queue.read(1, 0, 1, Buffer::new(&bench.arena, 4096)).unwrap();
    one(&mut queue, read).1.unwrap();
    let done = Fault::Fail(Status::SUCCESS);
    bench.model.faults().inject(Trigger::Matches(Box::new(format)), done);
    assert_eq!(bench.controller.admin(&command, &mut data), Ok(0));
    assert_eq!(data, [7; 4096]);
    let refused = queue.read(1, 0, 1, Buffer::new(&bench.arena, 4096)).unwrap_err();
    assert_eq!(refused.reason, Reject::NamespaceChanged { nsid: 1 });
    assert_eq!(bench.controller.namespace(1).unwrap().block_bytes, 4096);
    reads(&bench);
}

#[test]
fn another_command_set_is_named_even_if_it_looks_like_nvm() {
    for csi in [csi::KEY_VALUE, csi::ZONED, 0x31] {
        let found = reason(move |command, data| {
            if identifies(command, 1, cns::DESCRIPTORS) {
                data[..5].copy_from_slice(&[4, 1, 0, 0, csi]);
            }
        });
        assert_eq!(found, Some(Unusable::CommandSet { csi }));
    }
}

#[test]
fn an_unidentifiable_namespace_does_not_affect_the_others() {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    let status = Status::INTERNAL_ERROR;
    let first =
        |seen: &CommandInfo| seen.queue == 0 && seen.opcode == admin::IDENTIFY && seen.nsid == 1;
    bench.model.faults().inject(Trigger::Matches(Box::new(first)), Fault::Fail(status));
    bench.controller.reset().unwrap();
    assert_eq!(
        bench.controller.scan_namespaces().unwrap()[0].unusable,
        Some(Unusable::Identify(status))
    );
    assert_eq!(bench.controller.namespace(1), Err(Unusable::Identify(status)));
    assert_eq!(bench.controller.namespace(0), Err(Unusable::Invalid { highest: 2 }));
    assert_eq!(bench.controller.namespace(3), Err(Unusable::Invalid { highest: 2 }));
    reads(&bench);
}

#[test]
fn a_controller_is_sent_only_commands_of_its_version() {
    for version in [0, 0x1_0000, 0x1_0100, 0x1_0200, 0x1_0300, 0x1_0400, 0x2_0100] {
        let mut model = ModelConfig::new(namespaces(1 << 20));
        model.version = version;
        let bench = bench(256, model, Config::default());
        let found: Vec<_> = bench.controller.namespaces().iter().map(|n| n.nsid).collect();
        assert_eq!(found, [1, 2], "version {version:x}h");
        reads(&bench);
        assert_eq!(
            bench.model.stats().errors,
            0,
            "version {version:x}h was sent an unknown command"
        );
    }
}

#[test]
fn without_a_list_identifiers_are_tried_up_to_a_bound() {
    let mut model = ModelConfig::new(namespaces(1 << 20));
    model.version = 0x1_0000;
    let bench = bench(256, model, Config::default());
    let tried = Arc::new(AtomicU32::new(0));
    let counted = tried.clone();
    bench.model.faults().tamper(move |command, data| {
        if command.opcode == admin::IDENTIFY && command.cdw10.get() == u32::from(cns::CONTROLLER) {
            // NN is at byte 516.
            data[516..520].copy_from_slice(&(u32::MAX - 1).to_le_bytes());
        }
    });
    let count = move |seen: &CommandInfo| {
        let identify = seen.queue == 0 && seen.opcode == admin::IDENTIFY;
        counted.fetch_max(if identify { seen.nsid } else { 0 }, Ordering::Relaxed);
        false
    };
    bench.model.faults().inject(Trigger::Matches(Box::new(count)), Fault::NeverComplete);
    bench.controller.reset().unwrap();
    assert_eq!(tried.load(Ordering::Relaxed), 1024);
    assert_eq!(bench.controller.namespaces().len(), 2);
    assert_eq!(bench.controller.namespace(2000), Err(Unusable::Inactive));
    reads(&bench);
}

#[test]
fn a_namespace_list_that_does_not_ascend_terminates() {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    bench.model.faults().tamper(|command, data| {
        if command.opcode == admin::IDENTIFY
            && command.cdw10.get() == u32::from(cns::ACTIVE_NAMESPACES)
        {
            for (i, nsid) in data.chunks_exact_mut(4).enumerate() {
                nsid.copy_from_slice(&(2 - (i as u32 & 1)).to_le_bytes());
            }
        }
    });
    bench.controller.reset().unwrap();
    assert_eq!(bench.controller.namespaces().iter().map(|n| n.nsid).collect::<Vec<_>>(), [2]);
    reads(&bench);
}

#[test]
fn a_namespace_that_is_listed_twice_is_found_once() {
    for listed in [vec![2, 2, 2], vec![]] {
        let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
        let list = listed.clone();
        bench.model.faults().tamper(move |command, data| {
            if command.opcode == admin::IDENTIFY
                && command.cdw10.get() == u32::from(cns::ACTIVE_NAMESPACES)
            {
                data.fill(0);
                for (nsid, entry) in list.iter().zip(data.chunks_exact_mut(4)) {
                    entry.copy_from_slice(&u32::to_le_bytes(*nsid));
                }
            }
        });
        let found: Vec<_> =
            bench.controller.scan_namespaces().unwrap().iter().map(|found| found.nsid).collect();
        assert_eq!(found, listed.get(..1).unwrap_or_default());
    }
}

#[test]
fn no_command_has_the_reserved_identifier() {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    // 64 slots leave ten bits for the use count: the last slot would reach the reserved identifier
    // within 1,024 uses.
    let mut queue = bench.controller.create_queue(64).unwrap();
    let reserved = |seen: &CommandInfo| seen.opcode == nvm::FLUSH && seen.cid == 0xffff;
    bench
        .model
        .faults()
        .inject(Trigger::Matches(Box::new(reserved)), Fault::Fail(Status::CID_CONFLICT));
    for _ in 0..1030 {
        let mut in_flight: Vec<_> = (0..64).map(|_| queue.flush(1).unwrap()).collect();
        while let Some(completion) = queue.wait().unwrap() {
            let at = in_flight.iter().position(|f| f.tag() == completion.tag()).unwrap();
            let pinfold_nvme::driver::Outcome::Completed { result, .. } =
                in_flight.swap_remove(at).finish(completion)
            else {
                panic!()
            };
            result.unwrap();
        }
    }
}

/// Fills every list of active namespaces.
fn endless(model: &ModelController) {
    model.faults().tamper(move |command, data| {
        if command.opcode == admin::IDENTIFY
            && command.cdw10.get() == u32::from(cns::ACTIVE_NAMESPACES)
        {
            for (nsid, entry) in (command.nsid.get() + 1..).zip(data.chunks_exact_mut(4)) {
                entry.copy_from_slice(&nsid.to_le_bytes());
            }
        }
    });
}

#[test]
fn endless_lists_delay_a_start_by_a_bounded_time() {
    let arena = Arena(Memory::new(256));
    let spawn =
        || ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    let model = spawn();
    endless(&model);
    let controller =
        Controller::start(model.registers(), arena.clone(), Config::default()).unwrap();
    assert_eq!(controller.scan_namespaces().unwrap().len(), 4096);

    let (model, clock) = (spawn(), TestClock::default());
    endless(&model);
    let advanced = clock.clone();
    let slow = move |info: &CommandInfo| {
        advanced.advance(if info.opcode == admin::IDENTIFY { 10_000_000_000 } else { 0 });
        false
    };
    model.faults().inject(Trigger::Matches(Box::new(slow)), Fault::Fatal);
    let config = Config { clock: Arc::new(clock), ..Config::default() };
    let controller = Controller::start(model.registers(), arena.clone(), config).unwrap();
    // 4 times 60 s, of which each command takes 10.
    assert!((1..=24).contains(&controller.scan_namespaces().unwrap().len()));
}

#[test]
fn a_controller_with_other_queue_entries_is_not_used() {
    let arena = Arena(Memory::new(256));
    let model =
        ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    for (sqes, cqes) in [(0x77, 0x44), (0x66, 0x55), (0x55, 0x44), (0, 0)] {
        model.faults().tamper(move |command, data| {
            if command.cdw10.get() == u32::from(cns::CONTROLLER) && data.len() == 4096 {
                (data[512], data[513]) = (sqes, cqes);
            }
        });
        let started = Controller::start(model.registers(), arena.clone(), Config::default());
        assert_eq!(started.unwrap_err(), Error::EntrySize { sqes, cqes });
    }
}

/// Type 1, information 1, log page 2: the temperature is above its threshold.
const TOO_HOT: u32 = 1 | 1 << 8 | 2 << 16;
/// Type 2, information 0, log page 4: a namespace changed.
const NAMESPACE: u32 = 2 | 4 << 16;

/// Polls until `count` events have arrived.
fn events(bench: &Bench, count: usize) -> Vec<Event> {
    let mut events = Vec::new();
    while events.len() < count {
        events.extend(bench.controller.events().unwrap());
        std::thread::yield_now();
    }
    events
}

#[test]
fn events_are_reported_counted_and_requested_again() {
    for aerl in [0, 3, 255] {
        let mut model = ModelConfig::new(namespaces(1 << 20));
        model.aerl = aerl;
        let bench = bench(256, model, Config::default());
        assert_eq!(bench.controller.events().unwrap(), []);
        // The second one is masked until the log page has been read.
        bench.model.faults().raise_event(TOO_HOT);
        bench.model.faults().raise_event(TOO_HOT);
        let hot = Event { kind: EventKind::Health, information: 1, log_page: 2 };
        assert_eq!(events(&bench, 2), [hot, hot]);
        bench.controller.reset().unwrap();
        bench.model.faults().raise_event(NAMESPACE);
        assert!(events(&bench, 1)[0].is_namespace_change());
        let stats = bench.controller.stats();
        assert_eq!((stats.events, stats.health_events, stats.namespace_events), (3, 2, 1));
        assert_eq!((stats.events_lost, stats.spurious_admin_completions), (0, 0));
        assert_eq!(bench.model.stats().errors, 0, "more requests than AERL {aerl} allows");
    }
}

#[test]
fn events_beside_every_command_are_reported() {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    // A transient internal error, masked until its log page has been read.
    bench.model.faults().inject(Trigger::Every(1), Fault::Event(5 << 8 | 1 << 16));
    let mut queue = bench.controller.create_queue(1).unwrap();
    let mut seen = Vec::new();
    while seen.len() < 3 {
        let flush = queue.flush(1).unwrap();
        one(&mut queue, flush).1.unwrap();
        seen.extend(bench.controller.events().unwrap());
    }
    let error = Event { kind: EventKind::Error, information: 5, log_page: 1 };
    assert_eq!(seen, [error; 3]);
    assert_eq!(bench.model.stats().errors, 0, "the log page can be read");
}

#[test]
fn a_controller_without_events_works() {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    let request = |seen: &CommandInfo| {
        seen.queue == 0 && matches!(seen.opcode, admin::ASYNC_EVENT)
            || seen.opcode == admin::SET_FEATURES && seen.slba & 0xff == 0x0b
    };
    let status = Status::INVALID_OPCODE.do_not_retry();
    bench.model.faults().inject(Trigger::Matches(Box::new(request)), Fault::Fail(status));
    bench.controller.reset().unwrap();
    assert_eq!(bench.controller.events().unwrap(), []);
    let mut queue = bench.controller.create_queue(1).unwrap();
    let flush = queue.flush(1).unwrap();
    one(&mut queue, flush).1.unwrap();
    assert!(bench.model.stats().errors <= 2, "the requests were repeated endlessly");
}

#[test]
fn uncollected_events_are_bounded_and_counted() {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    for i in 0..100 {
        // Each names another log page, so none is masked.
        bench.model.faults().raise_event(7 | i << 16);
    }
    while bench.controller.stats().events < 100 {
        bench.controller.scan_namespaces().unwrap();
    }
    assert_eq!(bench.controller.stats().events_lost, 36);
    assert_eq!(bench.controller.events().unwrap().len(), 64);
}

/// Has each command of these opcodes take 50 s, of the 60 s that it may take.
fn slow(bench: &Bench, clock: &TestClock, opcodes: &'static [u8]) -> Arc<AtomicUsize> {
    let (clock, count) = (clock.clone(), Arc::new(AtomicUsize::new(0)));
    let seen = count.clone();
    let slow = move |info: &CommandInfo| {
        if info.queue == 0 && opcodes.contains(&info.opcode) {
            clock.advance(50_000_000_000);
            seen.fetch_add(1, Ordering::SeqCst);
        }
        false
    };
    bench.model.faults().inject(Trigger::Matches(Box::new(slow)), Fault::Fatal);
    count
}

/// The controller names all log pages, and is slow.
#[test]
fn log_pages_delay_a_call_by_a_bounded_time() {
    const MINUTE: u64 = 60_000_000_000;
    let start = || {
        let clock = TestClock::default();
        let config = Config { clock: Arc::new(clock.clone()), ..Config::default() };
        (bench(256, ModelConfig::new(namespaces(1 << 20)), config), clock)
    };
    let (bench, clock) = start();
    for page in 0..=255 {
        bench.model.faults().raise_event(7 | page << 16);
    }
    let read = slow(&bench, &clock, &[admin::GET_LOG_PAGE]);
    let mut events = 0;
    while read.load(Ordering::SeqCst) < 256 {
        let before_ns = clock.0.load(Ordering::SeqCst);
        events += bench.controller.events().unwrap().len();
        // One begins in the last moment.
        assert!(clock.0.load(Ordering::SeqCst) - before_ns <= 2 * MINUTE);
    }
    assert_eq!(events as u64 + bench.controller.stats().events_lost, 256);
    assert_eq!(bench.controller.events().unwrap(), [], "each was read once");
    assert_eq!(read.load(Ordering::SeqCst), 256);

    // A submission after the event of a namespace.
    let (bench, clock) = start();
    let mut queue = bench.controller.create_queue(4).unwrap();
    for page in [4].into_iter().chain(5..=255) {
        bench.model.faults().raise_event(if page == 4 { NAMESPACE } else { 7 | page << 16 });
    }
    while bench.controller.stats().events < 252 {
        bench.controller.scan_namespaces().unwrap();
    }
    let read = slow(&bench, &clock, &[admin::GET_LOG_PAGE, admin::IDENTIFY]);
    let flush = queue.flush(1).unwrap();
    assert!(clock.0.load(Ordering::SeqCst) <= 7 * MINUTE);
    assert!(read.load(Ordering::SeqCst) > 2, "pages and namespaces were read");
    // The time that the controller has taken is the request's.
    drop(flush);

    // Lists without an end.
    let (bench, clock) = start();
    endless(&bench.model);
    slow(&bench, &clock, &[admin::IDENTIFY]);
    bench.controller.scan_namespaces().unwrap();
    assert!(clock.0.load(Ordering::SeqCst) <= 5 * MINUTE + MINUTE / 2);
}

/// Polls until the driver has seen the event: it polls the admin queue once per millisecond.
fn notice(bench: &Bench, queue: &mut TestQueue) {
    let before = bench.controller.stats().namespace_events;
    while bench.controller.stats().namespace_events == before {
        std::thread::sleep(std::time::Duration::from_millis(1));
        let flush = queue.flush(2).unwrap();
        one(queue, flush).1.unwrap();
    }
}

#[test]
fn a_changed_namespace_is_identified_before_the_next_request() {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    let mut queue = bench.controller.create_queue(2).unwrap();
    let blocks = Arc::new(AtomicU64::new(1000));
    let shown = blocks.clone();
    bench.model.faults().tamper(move |command, data| {
        if identifies(command, 1, cns::NAMESPACE) {
            data[..8].copy_from_slice(&shown.load(Ordering::SeqCst).to_le_bytes());
        }
    });
    let last = |queue: &mut TestQueue| {
        let read = queue.read(1, 1999, 1, Buffer::new(&bench.arena, 512));
        read.map(|read| one(queue, read).1.unwrap()).map_err(|rejected| rejected.reason)
    };
    assert_eq!(last(&mut queue), Ok(()), "it has 2048 blocks");
    bench.model.faults().raise_event(NAMESPACE);
    notice(&bench, &mut queue);
    assert_eq!(
        last(&mut queue),
        Err(Reject::OutOfRange { nsid: 1, slba: 1999, blocks: 1, size: 1000 })
    );
    assert_eq!(bench.controller.namespace(1).unwrap().blocks, 1000);
    blocks.store(2000, Ordering::SeqCst);
    bench.model.faults().raise_event(NAMESPACE);
    notice(&bench, &mut queue);
    assert_eq!(last(&mut queue), Ok(()));
}

#[test]
fn a_reformatted_namespace_is_rejected_by_queues_created_before() {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    let mut queue = bench.controller.create_queue(2).unwrap();
    bench.model.faults().tamper(|command, data| {
        if identifies(command, 1, cns::NAMESPACE) {
            // FLBAS: format 1, blocks of 4096 bytes.
            data[26] = 1;
        }
    });
    bench.model.faults().raise_event(NAMESPACE);
    notice(&bench, &mut queue);
    let buffer = || Buffer::new(&bench.arena, 4096);
    for _ in 0..2 {
        let refused = queue.read(1, 0, 8, buffer()).unwrap_err();
        assert_eq!(refused.reason, Reject::NamespaceChanged { nsid: 1 });
    }
    let read = queue.read(2, 0, 1, buffer()).unwrap();
    one(&mut queue, read).1.unwrap();
    drop(queue);
    let queue = bench.controller.create_queue(2).unwrap();
    assert_eq!(bench.controller.namespace(1).unwrap().block_bytes, 4096);
    drop(queue);
}
