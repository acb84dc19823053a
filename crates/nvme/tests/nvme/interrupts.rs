//! Queues whose owners sleep until an interrupt, and what a controller reports: health, namespaces,
//! transfer limits.

use crate::common::*;
use pinfold_nvme::Interrupt;
use pinfold_nvme::driver::{Config, Error, NamespaceInfo, Outcome, PollError, Reject, Vector};
use pinfold_nvme::spec::{Status, admin};
use pinfold_nvme_model::{Fault, MemoryMedia, ModelConfig, Namespace, Trigger};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

fn with_vectors(vectors: u16) -> Bench {
    with_timeout(vectors, Duration::from_secs(60))
}

/// Returns a bench whose requests time out in real time: a sleep has no test clock.
fn with_timeout(vectors: u16, timeout: Duration) -> Bench {
    let mut model = ModelConfig::new(namespaces(4 << 20));
    (model.vectors, model.queues) = (vectors, 4);
    bench(2048, model, Config { timeout, abort_timeout: Duration::ZERO, ..Config::default() })
}

fn vector(bench: &Bench, number: u16) -> Vector {
    Vector { number, interrupt: bench.model.interrupt(number).unwrap() }
}

/// Writes `count` pages, `depth` at a time, each with its own bytes, and reads them back.
fn write_and_read_back(bench: &Bench, queue: &mut TestQueue, first: u64, count: u64, depth: u64) {
    for start in (first..first + count).step_by(depth as usize) {
        let mut flying: Vec<_> = (start..start + depth)
            .map(|i| queue.write(2, i, 1, Buffer::filled(&bench.arena, &pattern(i, 4096))).unwrap())
            .collect();
        while let Some(completion) = queue.wait().unwrap() {
            let at = flying.iter().position(|f| f.tag() == completion.tag()).unwrap();
            let Outcome::Completed { result, .. } = flying.swap_remove(at).finish(completion)
            else {
                panic!()
            };
            result.unwrap();
        }
        assert!(flying.is_empty());
    }
    for i in first..first + count {
        let read = queue.read(2, i, 1, Buffer::new(&bench.arena, 4096)).unwrap();
        let (payload, result) = one(queue, read);
        result.unwrap();
        assert!(payload.bytes(4096) == pattern(i, 4096), "{i}");
    }
}

#[test]
fn a_queue_sleeps_until_its_interrupt_arrives() {
    let bench = with_vectors(2);
    for depth in [1, 8] {
        let mut queue = bench.controller.create_queue_with(depth, vector(&bench, 1)).unwrap();
        assert!(queue.has_interrupt());
        write_and_read_back(&bench, &mut queue, 0, 200, depth as u64);
        let stats = queue.stats();
        assert!(stats.interrupts > 0 && stats.sleeps >= stats.interrupts, "{stats:?}");
        // A sleep that no interrupt ended has lasted 100 ms, which few do even on a busy machine.
        assert!(stats.sleeps < 2 * stats.interrupts, "{stats:?}");
    }
    assert!(bench.model.stats().interrupts > 0);
}

#[test]
fn an_interrupt_without_a_completion_changes_nothing() {
    let bench = with_vectors(2);
    bench.model.faults().inject(Trigger::Every(1), Fault::SpuriousInterrupts);
    let mut queue = bench.controller.create_queue_with(8, vector(&bench, 1)).unwrap();
    write_and_read_back(&bench, &mut queue, 0, 50, 8);
    let stats = bench.model.stats();
    assert!(stats.interrupts >= 100 && stats.errors == 0, "{stats}");
}

#[test]
fn each_thread_has_a_queue_with_an_interrupt_or_polled() {
    let bench = with_vectors(5);
    std::thread::scope(|scope| {
        for number in 1..=4u16 {
            let bench = &bench;
            scope.spawn(move || {
                let mut queue = match number % 2 {
                    0 => bench.controller.create_queue(8),
                    _ => bench.controller.create_queue_with(8, vector(bench, number)),
                }
                .unwrap();
                write_and_read_back(bench, &mut queue, u64::from(number - 1) * 200, 200, 8);
            });
        }
    });
    let queues: Vec<_> = (0..4).map(|_| bench.controller.create_queue(1).unwrap()).collect();
    assert_eq!(bench.controller.create_queue(1).unwrap_err(), Error::NoQueueLeft { limit: 4 });
    drop(queues);
}

#[test]
fn a_missing_vector_is_an_error_and_the_queue_can_be_polled() {
    let bench = with_vectors(2);
    let wrong = Vector { number: 2, ..vector(&bench, 1) };
    let error = bench.controller.create_queue_with(4, wrong).unwrap_err();
    let Error::Admin { status, .. } = error else { panic!("{error}") };
    assert_eq!(status.code(), Status::INVALID_INTERRUPT_VECTOR);
    let mut queue = bench.controller.create_queue(4).unwrap();
    assert!(!queue.has_interrupt());
    write_and_read_back(&bench, &mut queue, 0, 8, 4);
    assert_eq!(queue.stats().sleeps, 0);
}

#[test]
fn a_lost_interrupt_is_not_waited_for() {
    let bench = with_vectors(3);
    // The queue waits for another vector.
    let wrong = Vector { number: 1, interrupt: bench.model.interrupt(2).unwrap() };
    let mut queue = bench.controller.create_queue_with(4, wrong).unwrap();
    let began = Instant::now();
    let flush = queue.flush(1).unwrap();
    one(&mut queue, flush).1.unwrap();
    assert_eq!(queue.stats().interrupts, 0);
    assert!(began.elapsed() < Duration::from_secs(30), "not a time-out: {:?}", began.elapsed());
}

#[test]
fn a_sleep_ends_in_time_on_a_timeout_a_failure_and_a_removal() {
    let bench = with_timeout(2, Duration::from_millis(300));
    let mut queue = bench.controller.create_queue_with(4, vector(&bench, 1)).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::NeverComplete);
    let began = Instant::now();
    let lost = queue.flush(1).unwrap();
    assert!(queue.wait().unwrap().unwrap().timed_out());
    let took = began.elapsed();
    assert!((300..30_000).contains(&took.as_millis()), "{took:?}");
    drop(queue);
    bench.controller.reset().unwrap();
    drop(lost);

    let bench = with_vectors(2);
    let mut queue = bench.controller.create_queue_with(4, vector(&bench, 1)).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Fatal);
    let began = Instant::now();
    let failed = queue.flush(1).unwrap();
    assert_eq!(queue.wait().unwrap_err(), PollError::Fatal);
    assert!(began.elapsed() < Duration::from_secs(30));
    bench.controller.reset().unwrap();
    drop(failed);

    let mut queue = bench.controller.create_queue_with(4, vector(&bench, 1)).unwrap();
    bench.model.faults().inject(Trigger::Every(1), Fault::NeverComplete);
    let flying = queue.flush(1).unwrap();
    queue.ring_doorbell();
    let Bench { model, .. } = bench;
    let puller = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        drop(model);
    });
    let began = Instant::now();
    assert_eq!(queue.wait().unwrap_err(), PollError::Gone);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert_eq!(queue.flush(1).unwrap_err().reason, Reject::NeedsReset);
    puller.join().unwrap();
    drop(flying);
}

#[test]
fn the_completion_doorbell_is_rung_only_when_entries_run_out() {
    let bench = with_vectors(2);
    let mut queue = bench.controller.create_queue(32).unwrap();
    write_and_read_back(&bench, &mut queue, 0, 512, 32);
    let stats = queue.stats();
    // 16 doorbells for the writes, 512 for the reads, one at a time.
    assert!(stats.doorbells < 512 + 16 + 16, "{stats:?}");
}

#[test]
fn health_and_all_namespaces_are_reported() {
    let bench = with_vectors(0);
    let before = bench.controller.health().unwrap();
    assert_eq!(
        (before.critical_warning, before.temperature_kelvin, before.host_writes),
        (0, 300, 0)
    );
    let mut queue = bench.controller.create_queue(8).unwrap();
    write_and_read_back(&bench, &mut queue, 0, 400, 8);
    let health = bench.controller.health().unwrap();
    assert_eq!((health.host_reads, health.host_writes), (400, 400));
    assert_eq!(health.bytes_written, (400u64 * 4096).div_ceil(512_000) * 512_000);
    let survey = bench.controller.scan_namespaces().unwrap();
    let wanted = |nsid, blocks, block_bytes| NamespaceInfo {
        nsid,
        blocks,
        capacity_blocks: blocks,
        used_blocks: blocks,
        block_bytes,
        metadata_bytes: 0,
        discard_zeroes: true,
        unusable: None,
    };
    assert_eq!(survey, [wanted(1, 8192, 512), wanted(2, 1024, 4096)]);
    let usable: Vec<_> = survey.iter().filter_map(NamespaceInfo::usable).collect();
    assert_eq!(usable, bench.controller.namespaces());
    let identity = bench.controller.identify();
    assert_eq!((identity.namespaces, identity.mdts_bytes), (2, Some(1 << 20)));
    assert_eq!(identity.subsystem, "nqn.2026-01.io.pinfold:model");

    let log = |seen: &pinfold_nvme_model::CommandInfo| seen.opcode == admin::GET_LOG_PAGE;
    let status = Status::INVALID_LOG_PAGE.do_not_retry();
    bench.model.faults().inject(Trigger::Matches(Box::new(log)), Fault::Fail(status));
    let error = bench.controller.health().unwrap_err();
    assert_eq!(error, Error::Admin { what: "get log page: SMART", status });
}

#[test]
fn namespaces_beyond_one_list_are_found() {
    let media = Arc::new(MemoryMedia::new(1 << 20).unwrap());
    let namespace = Namespace::new(media, 512).unwrap();
    // 1024 fill a list, so a second one is requested; the model has no more.
    let bench = bench(64, ModelConfig::new(vec![namespace; 1024]), Config::default());
    let survey = bench.controller.scan_namespaces().unwrap();
    assert_eq!((survey.len(), survey[1023].nsid), (1024, 1024));
}

#[test]
fn transfers_follow_mdts_however_small_or_large() {
    for (mdts, most, commands) in [(1, 8 << 10, 128), (0, 1 << 20, 1), (20, 1 << 20, 1)] {
        let mut model = ModelConfig::new(namespaces(4 << 20));
        model.mdts = mdts;
        let bench = bench(2048, model, Config::default());
        let identity = bench.controller.identify();
        assert_eq!(identity.max_transfer_bytes, most);
        assert_eq!(identity.mdts_bytes, (mdts > 0).then(|| 4096 << mdts));
        for nsid in [1, 2] {
            let mut queue = bench.controller.create_queue(2).unwrap();
            let block = bench.controller.namespaces()[nsid as usize - 1].block_bytes;
            let bytes = pattern(u64::from(nsid), 1 << 20);
            let blocks = (1 << 20) / block;
            let write = queue.write(nsid, 0, blocks, Buffer::filled(&bench.arena, &bytes)).unwrap();
            one(&mut queue, write).1.unwrap();
            assert_eq!(queue.stats().commands, commands, "MDTS {mdts}");
            let read = queue.read(nsid, 0, blocks, Buffer::new(&bench.arena, 1 << 20)).unwrap();
            let (payload, result) = one(&mut queue, read);
            result.unwrap();
            assert!(payload.bytes(1 << 20) == bytes);
        }
    }
}

/// An interrupt without a descriptor, written from the page of [`Interrupt`]: a flag that a thread
/// sets, which reads the model's.
#[derive(Default)]
struct Flag {
    raised: Mutex<bool>,
    signal: Condvar,
}

impl Flag {
    fn raise(&self) {
        *self.raised.lock().unwrap() = true;
        self.signal.notify_one();
    }
}

impl Interrupt for Flag {
    fn wait(&self, limit: Duration) -> bool {
        let raised = self.raised.lock().unwrap();
        let (mut raised, _) =
            self.signal.wait_timeout_while(raised, limit, |raised| !*raised).unwrap();
        std::mem::take(&mut *raised)
    }
}

/// Ends a thread that looks at it, also where the test fails.
struct End<'e>(&'e AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn an_interrupt_of_ones_own_needs_no_descriptor() {
    let bench = with_vectors(2);
    let (flag, ended) = (Arc::new(Flag::default()), AtomicBool::new(false));
    let model = bench.model.interrupt(1).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Acquire) {
                if model.wait(Duration::from_millis(10)) {
                    flag.raise();
                }
            }
        });
        let _end = End(&ended);
        let mine = Vector { number: 1, interrupt: flag.clone() };
        let mut queue = bench.controller.create_queue_with(8, mine).unwrap();
        assert!(queue.has_interrupt() && queue.interrupt_fd().is_none());
        write_and_read_back(&bench, &mut queue, 0, 96, 8);
        // Until a sleep was ended by it, however the threads meet.
        while queue.stats().interrupts == 0 {
            write_and_read_back(&bench, &mut queue, 0, 8, 8);
        }
    });
}

/// One whose waits do what a function says.
struct Odd<F>(F);

impl<F: Fn(Duration) -> bool + Send + Sync> Interrupt for Odd<F> {
    fn wait(&self, limit: Duration) -> bool {
        (self.0)(limit)
    }
}

#[test]
fn an_interrupt_that_is_wrong_costs_time_alone() {
    let bench = with_vectors(2);
    let with = |interrupt: Arc<dyn Interrupt>| {
        bench.controller.create_queue_with(4, Vector { number: 1, interrupt }).unwrap()
    };
    // It has always arrived, or never does and does not sleep, or sleeps for ever so long.
    for arrives in [true, false] {
        let mut queue = with(Arc::new(Odd(move |_| arrives)));
        write_and_read_back(&bench, &mut queue, 0, 16, 4);
    }
    let longest = Arc::new(Mutex::new(Duration::ZERO));
    let seen = longest.clone();
    let mut queue = with(Arc::new(Odd(move |limit: Duration| {
        let mut longest = seen.lock().unwrap();
        *longest = limit.max(*longest);
        std::thread::sleep(limit);
        false
    })));
    write_and_read_back(&bench, &mut queue, 0, 2, 1);
    assert!(*longest.lock().unwrap() <= Duration::from_millis(100));

    // The second wait of three panics, with a request in flight, which stays.
    let waits = AtomicU32::new(0);
    let mut queue = with(Arc::new(Odd(move |_| {
        assert!(waits.fetch_add(1, Ordering::Relaxed) != 1, "as planned");
        false
    })));
    bench.model.faults().inject(Trigger::Nth(1), Fault::Hold);
    let flush = queue.flush(1).unwrap();
    for sleep in 0..3 {
        let slept = catch_unwind(AssertUnwindSafe(|| queue.sleep(Duration::from_millis(1))));
        assert_eq!((slept.is_err(), queue.in_flight()), (sleep == 1, 1));
    }
    let completion = loop {
        bench.model.faults().release();
        if let Some(completion) = queue.poll().unwrap() {
            break completion;
        }
        std::thread::yield_now();
    };
    let Outcome::Completed { result, .. } = flush.finish(completion) else { panic!() };
    assert_eq!((result, queue.in_flight()), (Ok(()), 0));
}
