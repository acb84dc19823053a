//! Asynchronous events: reported to the caller and counted; a namespace that changed is identified
//! again.

use crate::common::*;
use pinfold_nvme::driver::{Config, Event, EventKind, Reject};
use pinfold_nvme::spec::{Command, Status, admin, cns};
use pinfold_nvme_model::{CommandInfo, Fault, ModelConfig, Trigger};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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

fn identifies(command: &Command, nsid: u32, cns: u8) -> bool {
    (command.opcode, command.nsid.get(), command.cdw10.get()) == (admin::IDENTIFY, nsid, cns.into())
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
