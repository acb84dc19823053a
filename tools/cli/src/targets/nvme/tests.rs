//! The model controller with injected faults: a typed error or a retry, never a hang, never a wrong
//! byte.

use super::*;
use crate::engine::pump::Ranges;
use crate::engine::pump::{PumpStats, Transfer, pump};
use crate::engine::worker::EngineError;
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::targets::fake::Fake;
use pinfold::requests::Refusal;
use pinfold::soft::{Effect, SoftConfig};
use pinfold::{Arena, Buffer, MappingPolicy};
use pinfold_core::domain::BackendError;
use pinfold_nvme::driver::{CommandError, Config};
use pinfold_nvme::spec::Status;
use pinfold_nvme_model::{
    BusAccess, Fault, Injection, InjectionOutcome, MemoryMedia, ModelConfig, ModelController,
    ModelRegisters, Trigger,
};
use std::sync::Arc;

const BLOCK: usize = 8192;
const BYTES: u64 = 40 * BLOCK as u64;

struct Setup {
    domain: pinfold::Domain,
    control: Arena,
    data: Arena,
    model: ModelController,
    protect: Protect,
    /// The time for which a command is sent again: far longer than a busy machine keeps a thread
    /// waiting.
    retry_limit: Duration,
}

type Soft = NvmeTarget<Buffer, ModelRegisters, Arena>;

impl Setup {
    fn new(protect: Protect) -> Self {
        Self::on(pinfold::Domain::soft().unwrap(), protect)
    }

    fn on(domain: pinfold::Domain, protect: Protect) -> Self {
        let mapping_policy =
            if protect == Protect::Static { MappingPolicy::Whole } else { MappingPolicy::PerUse };
        let data =
            Arena::builder().size(1 << 20).mapping_policy(mapping_policy).build(&domain).unwrap();
        let control = Arena::builder()
            .size(2 << 20)
            .mapping_policy(MappingPolicy::Whole)
            .build(&domain)
            .unwrap();
        let media = Arc::new(MemoryMedia::new(1 << 20).unwrap());
        let namespace = pinfold_nvme_model::Namespace::new(media, 512).unwrap();
        let port = domain.port().unwrap();
        let model = ModelController::spawn(port, ModelConfig::new(vec![namespace])).unwrap();
        Self { domain, control, data, model, protect, retry_limit: Duration::from_secs(600) }
    }

    fn target(&self) -> Soft {
        self.target_with(Duration::from_secs(60))
    }

    /// Returns a target whose commands time out.
    fn target_with(&self, timeout: Duration) -> Soft {
        self.target_within(timeout, Duration::from_millis(200))
    }

    /// Returns a target whose commands time out, and whose flushes do.
    fn target_within(&self, timeout: Duration, flush_limit: Duration) -> Soft {
        let config = Config { timeout, retry_limit: self.retry_limit, ..Config::default() };
        let controller =
            Controller::start(self.model.registers(), self.control.clone(), config).unwrap();
        let namespace = controller.namespaces()[0];
        let (domain, protect) = (&*self.domain, self.protect);
        let options = NvmeOptions {
            domain,
            protect,
            controller,
            namespace,
            depth: 8,
            vector: None,
            flush_limit,
        };
        NvmeTarget::new("soft".into(), options).unwrap()
    }

    fn buffers(&self) -> Vec<Buffer> {
        (0..8).map(|_| self.data.alloc(BLOCK).unwrap()).collect()
    }
}

const PROTECTIONS: [Protect; 4] =
    [Protect::Strict, Protect::Revoke, Protect::Batch, Protect::Static];

/// The policies that end a mapping with its request.
const PER_REQUEST: [Protect; 3] = [Protect::Strict, Protect::Revoke, Protect::Batch];

fn execute(
    from: &mut dyn Target<Buffer>,
    to: &mut dyn Target<Buffer>,
    buffers: &mut Vec<Buffer>,
) -> Result<PumpStats, EngineError> {
    let transfer = Transfer { ranges: &Ranges::whole(BYTES), block: BLOCK, write_holes: false };
    let (stats, result) =
        pump(from, to, transfer, buffers, &Progress::hidden(), &Interrupt::default());
    result.map(|()| stats)
}

/// Writes, reads back, and compares.
fn write_and_read_back(target: &mut Soft, buffers: &mut Vec<Buffer>) {
    let data: Vec<u8> = (0..=250u8).cycle().take(40 * BLOCK).collect();
    let (mut from, mut to) = (Fake::new(data, 512), Fake::new(Vec::new(), 512).grows());
    execute(&mut from, target, buffers).unwrap();
    execute(target, &mut to, buffers).unwrap();
    assert!(from.data == to.data, "a wrong byte");
    assert_eq!(buffers.len(), 8);
}

fn write(target: &mut Soft, buffers: &mut Vec<Buffer>) -> Result<PumpStats, EngineError> {
    let mut from = Fake::new((0..=250u8).cycle().take(40 * BLOCK).collect(), 512);
    execute(&mut from, target, buffers)
}

#[test]
fn retryable_errors_are_retried_and_any_order_is_accepted() {
    for protect in PROTECTIONS {
        let setup = Setup::new(protect);
        let mut target = setup.target();
        let mut buffers = setup.buffers();
        setup.model.faults().inject(Trigger::Every(7), Fault::Fail(Status::NAMESPACE_NOT_READY));
        setup.model.faults().inject(Trigger::Every(3), Fault::Reorder(2));
        write_and_read_back(&mut target, &mut buffers);
        let stats = target.stats();
        assert!(stats.queue.retries > 0 && stats.queue.errors == stats.queue.retries, "{stats:?}");
        drop(target);
        let stats = setup.domain.stats();
        assert_eq!((stats.live, stats.quarantined), (0, 0), "{protect:?}");
    }
}

#[test]
fn a_final_error_ends_the_run_and_returns_all_buffers() {
    for protect in PROTECTIONS {
        let setup = Setup::new(protect);
        let mut target = setup.target();
        let mut buffers = setup.buffers();
        let status = Status::WRITE_FAULT.do_not_retry();
        setup.model.faults().inject(Trigger::Nth(20), Fault::Fail(status));
        let error = write(&mut target, &mut buffers).unwrap_err();
        let EngineError::Target(TargetError::Command { error, .. }) = error else {
            panic!("{error:?}")
        };
        assert_eq!(error, CommandError::Status(status));
        assert_eq!(buffers.len(), 8);
        assert_eq!(target.stats().queue.retries, 0);
        write_and_read_back(&mut target, &mut buffers);
    }
}

/// An IOMMU that no longer answers, or has failed: the requests end with a typed error within their
/// limit, and the buffers that the controller may still reach stay with the domain.
#[test]
fn an_endless_flush_ends_the_run_and_keeps_the_buffers() {
    let hangs = SoftConfig { hang_from: Some(4), ..SoftConfig::default() };
    let fails = SoftConfig { fail_from: Some(4), ..SoftConfig::default() };
    for (config, is_hang) in [(hangs, true), (fails, false)] {
        for protect in PER_REQUEST {
            let config = SoftConfig { timeout: Duration::from_millis(200), ..config.clone() };
            let setup = Setup::on(pinfold::Domain::soft_with(config).unwrap(), protect);
            let mut target = setup.target();
            let mut buffers = setup.buffers();
            let error = write(&mut target, &mut buffers).unwrap_err();
            let EngineError::Target(TargetError::Domain { error, .. }) = error else {
                panic!("{error:?}")
            };
            assert_eq!(error.late_ticket().is_some(), is_hang, "{protect:?}: {error}");
            assert!(buffers.len() < 8, "{protect:?}");
            drop(target);
            let stats = setup.domain.stats();
            let kept = 8 - buffers.len() as u64;
            let expected = if is_hang { (kept, 0) } else { (0, kept) };
            assert_eq!((stats.deferred, stats.quarantined), expected, "{protect:?}");
        }
    }
}

#[test]
fn holes_are_zeroed_with_and_without_write_zeroes() {
    use std::os::unix::fs::FileExt;
    let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    file.set_len(BYTES).unwrap();
    file.write_all_at(&[9; BLOCK], 10 * BLOCK as u64).unwrap();
    let ranges = Ranges::of_file(&file, BYTES);
    for without in [false, true] {
        let setup = Setup::new(Protect::Batch);
        if without {
            // ONCS bit 3 of Identify Controller.
            setup.model.faults().tamper(|command, data| {
                if (command.opcode, command.cdw10.get() & 0xff) == (6, 1) {
                    data[520] &= !(1 << 3);
                }
            });
        }
        let mut target = setup.target();
        let mut buffers = setup.buffers();
        // Something else is there.
        write(&mut target, &mut buffers).unwrap();
        let mut from = Fake::new(vec![0; 40 * BLOCK], 512);
        let data = 10 * BLOCK..11 * BLOCK;
        from.data[data.clone()].fill(9);
        let transfer = Transfer { ranges: &ranges, block: BLOCK, write_holes: true };
        let before = target.stats().queue.segments;
        let none = (&Progress::hidden(), &Interrupt::default());
        pump(&mut from, &mut target, transfer, &mut buffers, none.0, none.1).1.unwrap();
        let segments = target.stats().queue.segments - before;
        assert!(without || segments <= ranges.data_bytes().div_ceil(512), "{segments}");
        assert_eq!(segments == 40, without || ranges == Ranges::whole(BYTES));
        let mut to = Fake::new(Vec::new(), 512).grows();
        execute(&mut target, &mut to, &mut buffers).unwrap();
        assert!(to.data == from.data);
    }
}

#[test]
fn retries_are_limited() {
    let setup = Setup { retry_limit: Duration::from_millis(100), ..Setup::new(Protect::Batch) };
    let mut target = setup.target();
    let mut buffers = setup.buffers();
    setup.model.faults().inject(Trigger::Every(1), Fault::Fail(Status::INTERNAL_ERROR));
    let error = write(&mut target, &mut buffers).unwrap_err();
    assert!(error.to_string().contains("internal error"), "{error}");
    assert_eq!(buffers.len(), 8);
    assert!(target.stats().queue.retries >= 3);
}

#[test]
fn an_endless_command_quarantines_its_buffer_and_no_other() {
    for protect in PROTECTIONS {
        let setup = Setup::new(protect);
        // A model that gets no processor for so long loses more than one command.
        let mut target = setup.target_with(Duration::from_secs(1));
        let mut buffers = setup.buffers();
        setup.model.faults().inject(Trigger::Nth(20), Fault::NeverComplete);
        let error = write(&mut target, &mut buffers).unwrap_err();
        assert!(matches!(error, EngineError::Target(TargetError::Timeout { .. })), "{error:?}");
        assert_eq!((buffers.len(), target.stats().queue.timeouts), (7, 1), "{protect:?}");
    }
}

#[test]
fn a_failed_controller_is_disabled_and_all_buffers_return() {
    for protect in PROTECTIONS {
        let setup = Setup::new(protect);
        let mut target = setup.target();
        let mut buffers = setup.buffers();
        setup.model.faults().inject(Trigger::Nth(20), Fault::Fatal);
        let error = write(&mut target, &mut buffers).unwrap_err();
        let EngineError::Target(TargetError::Poll { error, .. }) = error else {
            panic!("{error:?}")
        };
        assert_eq!(error, PollError::Fatal);
        assert_eq!(buffers.len(), 8, "{protect:?}");
        // It is not used again: requests are rejected, and do not hang.
        let error = write(&mut target, &mut buffers).unwrap_err();
        assert!(matches!(error, EngineError::Target(TargetError::Rejected { .. })), "{error:?}");
        assert_eq!(buffers.len(), 8);
    }
}

fn reads(buffers: Vec<Buffer>) -> Vec<Request<Buffer>> {
    let io = |n| Io::new(IoDirection::Read, n * BLOCK as u64, BLOCK);
    (0..).map(io).zip(buffers).map(|(io, buffer)| Request { io, buffer }).collect()
}

/// The requests before it are queued, the buffers of the others returned.
#[test]
fn a_batch_with_an_unmappable_buffer_is_queued_up_to_it() {
    for protect in PROTECTIONS {
        let setup = Setup::new(protect);
        let elsewhere =
            Arena::builder().size(1 << 20).build(&pinfold::Domain::soft().unwrap()).unwrap();
        let mut target = setup.target();
        let mut buffers = setup.buffers();
        buffers.insert(5, elsewhere.alloc(BLOCK).unwrap());
        let rejected = target.submit_many(reads(buffers)).unwrap_err();
        match *rejected.error {
            TargetError::Domain { error: BackendError::NotRegistered { .. }, .. } => {}
            TargetError::Begin { refusal: Refusal::NotStatic { index: 0 }, .. }
                if protect == Protect::Static => {}
            error => panic!("{protect:?}: {error}"),
        }
        assert_eq!((rejected.queued, rejected.buffers.len()), (5, 4));
        let mut completed = Vec::new();
        while completed.len() < 5 {
            target.wait(&mut completed).unwrap();
        }
        assert_eq!((setup.domain.stats().live, target.stats().queue.requests), (0, 5));
    }
}

/// A batch longer than the queue: the first requests are queued, the buffers of the others are
/// returned.
#[test]
fn a_batch_that_does_not_fit_is_queued_in_part() {
    for protect in PROTECTIONS {
        let setup = Setup::new(protect);
        let mut target = setup.target();
        let buffers = setup.buffers().into_iter().chain(setup.buffers()).collect();
        let rejected = target.submit_many(reads(buffers)).unwrap_err();
        let error =
            TargetError::Begin { target: "soft".into(), refusal: Refusal::Depth { depth: 8 } };
        assert_eq!(rejected.error.to_string(), error.to_string());
        assert_eq!((rejected.queued, rejected.buffers.len()), (8, 8));
        let mut completed = Vec::new();
        while completed.len() < 8 {
            target.wait(&mut completed).unwrap();
        }
        assert!(
            completed.iter().all(|read| matches!(read.result, Ok(BLOCK)) && read.buffer.is_some())
        );
        drop(target);
        assert_eq!(setup.domain.stats().live, 0, "{protect:?}");
    }
}

/// A request that the driver rejects (here because of an unknown namespace) is unmapped at once,
/// and its buffer returned.
#[test]
fn a_request_that_the_driver_rejects_returns_its_buffer() {
    for protect in PROTECTIONS {
        let setup = Setup::new(protect);
        let mut target = setup.target();
        target.namespace.nsid = 7;
        for direction in [IoDirection::Read, IoDirection::Write, IoDirection::Flush] {
            let buffer = setup.data.alloc(BLOCK).unwrap();
            let io = Io::new(direction, 0, BLOCK);
            let rejected = target.submit(Request { io, buffer }).unwrap_err();
            assert!(matches!(rejected.error, TargetError::Rejected { .. }), "{direction:?}");
            assert!(rejected.buffer.is_some(), "{protect:?}, {direction:?}");
        }
        assert_eq!((target.requests.in_flight(), target.held()), (0, 0));
        assert_eq!(setup.domain.stats().live, 0);
    }
}

/// Accesses of a device to what it was once given, on an IOMMU that drops what it has cached as
/// late as it may.
#[test]
fn flushes_are_as_protect_says_and_precede_each_return() {
    for protect in PER_REQUEST {
        let flush_cost = Duration::from_millis(2);
        let config = SoftConfig {
            flush_cost,
            effect: Effect::AtLast,
            queue_depth: 8,
            ..SoftConfig::default()
        };
        let setup = Setup::on(pinfold::Domain::soft_with(config).unwrap(), protect);
        let mut target = setup.target();
        let faults = setup.model.faults();
        faults.inject(Trigger::Every(1), Fault::Remember);
        target.submit_many(reads(setup.buffers())).unwrap();
        target.queue.ring_doorbell();
        reads_are_written(&setup, &target, 8 * BLOCK as u64);
        let succeeded = |one: &Injection| one.outcome == InjectionOutcome::Succeeded;
        assert!(faults.access_remembered(BusAccess::Write).iter().all(succeeded));
        let waits = || setup.domain.stats().backend.invalidations.waits;
        let (before, mut completed) = (waits(), Vec::new());
        target.poll(&mut completed).unwrap();
        if protect == Protect::Strict {
            assert_eq!((completed.len(), target.held()), (8, 0), "strict returns its buffers");
        }
        while completed.len() < 8 {
            target.wait(&mut completed).unwrap();
        }
        for access in [BusAccess::Write, BusAccess::Read] {
            let outcomes = faults.access_remembered(access);
            assert_eq!(outcomes.len(), 8);
            assert!(!outcomes.iter().any(succeeded), "{protect:?}: {access:?}");
        }
        let flushes = if protect == Protect::Revoke { 8 } else { 1 };
        assert_eq!(waits() - before, flushes, "{protect:?}");
    }
}

/// Waits until the controller has written the completions of all reads of `setup`'s buffers,
/// without a look at them.
fn reads_are_written(setup: &Setup, target: &Soft, bytes: u64) {
    while setup.model.stats().bytes_read < bytes {
        std::thread::yield_now();
    }
    // The controller carries out one command after another: now it has written all completions.
    target.controller.scan_namespaces().unwrap();
}

/// The flush takes long, and less than its limit: the poll returns with the buffers.
#[test]
fn strict_waits_for_its_flush_within_its_limit() {
    let flush_cost = Duration::from_millis(200);
    let config = SoftConfig { flush_cost, effect: Effect::AtLast, ..SoftConfig::default() };
    let setup = Setup::on(pinfold::Domain::soft_with(config).unwrap(), Protect::Strict);
    let mut target = setup.target_within(Duration::from_secs(60), Duration::from_secs(3600));
    let faults = setup.model.faults();
    faults.inject(Trigger::Every(1), Fault::Remember);
    target.submit_many(reads(setup.buffers())).unwrap();
    target.queue.ring_doorbell();
    reads_are_written(&setup, &target, 8 * BLOCK as u64);
    let (mut completed, since) = (Vec::new(), Instant::now());
    target.poll(&mut completed).unwrap();
    assert!(since.elapsed() >= flush_cost, "returned before its flush");
    assert_eq!((completed.len(), target.held()), (8, 0));
    assert!(completed.iter().all(|read| matches!(read.result, Ok(BLOCK)) && read.buffer.is_some()));
    let offsets: Vec<_> = completed.iter().map(|read| read.io.offset / BLOCK as u64).collect();
    assert_eq!(offsets, [0, 1, 2, 3, 4, 5, 6, 7]);
    for access in [BusAccess::Write, BusAccess::Read] {
        let outcomes = faults.access_remembered(access);
        assert_eq!(outcomes.len(), 8);
        assert!(
            !outcomes.iter().any(|one| one.outcome == InjectionOutcome::Succeeded),
            "{access:?}"
        );
    }
    drop((target, completed));
    let stats = setup.domain.stats();
    assert_eq!((stats.live, stats.deferred, stats.quarantined, stats.held_bytes), (0, 0, 0, 0));
}

/// The flush never completes: each request ends once, with an error that says so, and the
/// controller can be used; dropping the queue does not wait for it.
#[test]
fn a_flush_that_hangs_keeps_no_later_request() {
    for protect in PER_REQUEST {
        let config = SoftConfig { hang_from: Some(1), ..SoftConfig::default() };
        let setup = Setup::on(pinfold::Domain::soft_with(config).unwrap(), protect);
        let mut target = setup.target_within(Duration::from_secs(60), Duration::from_millis(50));
        for _ in 0..2 {
            target.submit_many(reads(setup.buffers())).unwrap();
            let mut completed = Vec::new();
            while completed.len() < 8 {
                target.wait(&mut completed).unwrap();
            }
            for Completion { buffer, result, .. } in completed {
                let Err(TargetError::Domain { error, .. }) = result else { panic!("{result:?}") };
                assert!(error.late_ticket().is_some() && buffer.is_none(), "{error}");
            }
        }
        assert_eq!((target.held(), target.requests.late()), (0, 16), "{protect:?}");
        let since = Instant::now();
        drop(target);
        assert!(since.elapsed() < SoftConfig::default().timeout);
        let stats = setup.domain.stats();
        assert_eq!((stats.deferred, stats.quarantined), (16, 0), "{protect:?}");
    }
}

/// The flush takes longer than its limit: the requests end with an error that names the flush, and
/// their buffers are free when it has completed.
#[test]
fn the_buffers_of_a_late_flush_are_freed_when_it_completes() {
    for protect in PER_REQUEST {
        let flush_cost = Duration::from_secs(1);
        let config = SoftConfig { flush_cost, ..SoftConfig::default() };
        let setup = Setup::on(pinfold::Domain::soft_with(config).unwrap(), protect);
        let mut target = setup.target();
        let mut completed = Vec::new();
        target.submit_many(reads(setup.buffers())).unwrap();
        // Each wait is for what the one before has not returned, as a caller's is.
        while completed.len() < 8 {
            let mut more = Vec::new();
            target.wait(&mut more).unwrap();
            completed.append(&mut more);
        }
        for Completion { buffer, result, .. } in completed {
            let Err(TargetError::Domain { error, .. }) = result else { panic!("{result:?}") };
            assert!(error.late_ticket().is_some() && buffer.is_none(), "{error}");
        }
        while target.requests.late() > 0 {
            let mut more = Vec::new();
            target.wait(&mut more).unwrap();
            assert!(more.is_empty(), "reported twice");
        }
        let stats = setup.domain.stats();
        assert_eq!((stats.live, stats.held_bytes, stats.quarantined), (0, 0, 0));
        // The whole arena is free again, but for what is in no request.
        assert_eq!(setup.data.alloc(1 << 20).map(|buffer| buffer.len()).ok(), Some(1 << 20));
    }
}

/// With `batch` a wait ends when the controller has room, though the buffers are still held:
/// others can be used meanwhile.
#[test]
fn a_wait_ends_when_the_controller_has_room_again() {
    let config = SoftConfig { flush_cost: Duration::from_millis(50), ..SoftConfig::default() };
    let setup = Setup::on(pinfold::Domain::soft_with(config).unwrap(), Protect::Batch);
    let mut target = setup.target();
    let mut completed = Vec::new();
    target.submit_many(reads(setup.buffers())).unwrap();
    let mut waits = 0;
    while target.held() < 8 {
        target.wait(&mut completed).unwrap();
        waits += 1;
        assert!(completed.is_empty() && waits <= 8, "a wait for nothing, or for a flush");
    }
    while completed.len() < 8 {
        target.wait(&mut completed).unwrap();
    }
    assert_eq!(target.held(), 0);
}

/// Once a flush may have lost data, the success of another proves nothing, of whichever queue.
#[test]
fn after_a_failed_flush_no_queue_reports_a_good_one() {
    let setup = Setup { retry_limit: Duration::from_millis(100), ..Setup::new(Protect::Batch) };
    let lost = LostData::default();
    let flush = |target: &mut Soft| {
        let buffer = setup.data.alloc(BLOCK).unwrap();
        target.submit(Request { io: Io::new(IoDirection::Flush, 0, 0), buffer }).unwrap();
        let mut completed = Vec::new();
        while completed.is_empty() {
            target.wait(&mut completed).unwrap();
        }
        completed.remove(0).result
    };
    let inject = |status| setup.model.faults().inject(Trigger::Every(1), Fault::Fail(status));
    let mut target = setup.target().sharing(&lost);
    // The controller did not get to it: nothing is lost.
    inject(Status::NAMESPACE_NOT_READY);
    assert!(flush(&mut target).is_err());
    setup.model.faults().clear();
    assert!(flush(&mut target).is_ok());
    inject(Status::INTERNAL_ERROR);
    assert!(flush(&mut target).is_err());
    setup.model.faults().clear();
    drop(target);
    let mut other = setup.target().sharing(&lost);
    let error = CommandError::Status(Status::INTERNAL_ERROR);
    let Err(TargetError::Command { error: found, .. }) = flush(&mut other) else {
        panic!("flushed")
    };
    assert_eq!(found, error);
    let Err(TargetError::Flush { error: found, .. }) = other.sync(&Interrupt::default()) else {
        panic!("flushed")
    };
    assert_eq!(found, Some(error));
}
