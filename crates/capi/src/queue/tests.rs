//! A controller that fails commands, loses them, or fails itself: each request is reported once,
//! and memory that the controller may still reach stays in use.

mod ordering;

use super::*;
use crate::arena::{PF_POLICY_PER_USE, PF_POLICY_WHOLE};
use crate::arena::{
    pf_alloc, pf_arena_create, pf_arena_destroy, pf_arena_opts, pf_arena_t, pf_free,
};
use crate::domain::{DOMAINS, State, pf_domain_destroy, pf_domain_t};
use crate::failure::pf_strerror_last;
use crate::nvme::{open_model, pf_nvme_destroy};
use crate::trace::Site;
use libc::{EBUSY, ECANCELED, EIO, ENODEV, ETIMEDOUT};
use pinfold::Domain;
use pinfold::soft::{Effect, SoftConfig};
use pinfold_nvme::driver::Config;
use pinfold_nvme::spec::{SglSupport, Status, nvm};
use pinfold_nvme_model::{
    self as model, BusAccess, CommandInfo, Fault, Faults, InjectionOutcome, MemoryMedia,
    ModelConfig, Trigger,
};
use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};
use std::time::Instant;

const BLOCK: usize = 4096;
const COUNT: usize = 8;
const PROTECTIONS: [u32; 4] =
    [PF_PROTECT_STATIC, PF_PROTECT_STRICT, PF_PROTECT_REVOKE, PF_PROTECT_BATCH];
/// Protections that end a mapping with its request.
const PER_REQUEST: [u32; 3] = [PF_PROTECT_STRICT, PF_PROTECT_REVOKE, PF_PROTECT_BATCH];

/// A program, as its C would have it.
struct Program {
    domain: *mut pf_domain_t,
    core: Domain,
    rings: *mut pf_arena_t,
    arena: *mut pf_arena_t,
    memory: *mut c_void,
    nvme: *mut pf_nvme_t,
    queue: *mut pf_queue_t,
    faults: Faults,
}

fn arena(domain: *mut pf_domain_t, policy: u32) -> *mut pf_arena_t {
    let opts = pf_arena_opts {
        struct_size: size_of::<pf_arena_opts>(),
        size: 2 << 20,
        policy,
        ..pf_arena_opts::DEFAULT
    };
    let mut arena = null_mut();
    // SAFETY: the options have as many bytes as they say, and the handle can be stored.
    assert_eq!(unsafe { pf_arena_create(domain, &raw const opts, &raw mut arena) }, 0);
    arena
}

/// A configuration whose commands are given up soon, without an abort.
fn impatient() -> Config {
    Config {
        timeout: Duration::from_secs(2),
        abort_timeout: Duration::ZERO,
        retry_limit: Duration::ZERO,
        ..Config::default()
    }
}

impl Program {
    fn new(protect: u32, config: Config) -> Self {
        Self::on(Domain::soft().unwrap(), protect, config, |_| {})
    }

    fn on(
        core: Domain,
        protect: u32,
        config: Config,
        change: impl FnOnce(&mut ModelConfig),
    ) -> Self {
        let state = State::new(core.clone(), Vec::new());
        let domain = DOMAINS.insert(pf_domain_t { state: Arc::clone(&state) }).unwrap();
        let rings = arena(domain, PF_POLICY_WHOLE);
        let policy = if protect == PF_PROTECT_STATIC { PF_POLICY_WHOLE } else { PF_POLICY_PER_USE };
        let arena = arena(domain, policy);
        let namespace =
            model::Namespace::new(Arc::new(MemoryMedia::new(1 << 20).unwrap()), 512).unwrap();
        let mut model = ModelConfig::new(vec![namespace]);
        // Units of 500 ms: a controller that is stuck is given up soon.
        model.timeout_500ms = 2;
        change(&mut model);
        let source = crate::nvme::rings(rings, &state).unwrap();
        let (device, faults) = open_model(state, source, model, config).unwrap();
        let nvme = NVMES.insert(pf_nvme_t { device: Arc::new(device) }).unwrap();
        let opts = pf_queue_opts {
            struct_size: size_of::<pf_queue_opts>(),
            depth: 32,
            protect,
            flags: PF_QUEUE_INTERRUPT,
            ..pf_queue_opts::DEFAULT
        };
        let mut queue = null_mut();
        // SAFETY: as for the arena.
        assert_eq!(unsafe { pf_queue_create(nvme, &raw const opts, &raw mut queue) }, 0);
        // SAFETY: null is allowed.
        let memory = unsafe { pf_alloc(arena, COUNT * BLOCK, null_mut()) };
        assert!(!memory.is_null());
        Self { domain, core, rings, arena, memory, nvme, queue, faults }
    }

    /// Submits reads or writes of a block each, with their number as `user_data`.
    fn submit(&self, op: u32, count: usize) -> c_int {
        let iovs: Vec<iovec> = (0..count)
            .map(|at| iovec {
                iov_base: self.memory.wrapping_byte_add(at % COUNT * BLOCK),
                iov_len: BLOCK,
            })
            .collect();
        let request = |(at, iov): (usize, &iovec)| pf_request {
            op,
            nsid: 1,
            offset: (at % COUNT * BLOCK) as u64,
            len: 0,
            iov,
            iovcnt: 1,
            flags: 0,
            command: std::ptr::null(),
            user_data: at as u64,
        };
        let requests: Vec<_> = iovs.iter().enumerate().map(request).collect();
        // SAFETY: there are `count` requests, of one entry each.
        unsafe { pf_submit(self.queue, requests.as_ptr(), u32::try_from(count).unwrap()) }
    }

    /// Waits for the reports of `count` requests, and returns them in the order of the requests.
    fn reports(&self, count: usize) -> Vec<(i32, u32)> {
        let mut found: Vec<Option<(i32, u32)>> = vec![None; count];
        let none =
            pf_completion { user_data: u64::MAX, result: 1, status: 1, ..pf_completion::NONE };
        while found.iter().any(Option::is_none) {
            assert!(pf_queue_wait(self.queue, 60_000_000_000) > 0, "{found:?}");
            let mut done = [none; 3];
            // SAFETY: three fit.
            let stored = unsafe { pf_complete(self.queue, done.as_mut_ptr(), 3) };
            for one in &done[..usize::try_from(stored).unwrap()] {
                let place = &mut found[usize::try_from(one.user_data).unwrap()];
                assert_eq!(place.replace((one.result, one.status)), None, "reported twice");
            }
        }
        assert_eq!(pf_queue_wait(self.queue, 0), 0);
        found.into_iter().flatten().collect()
    }

    /// Sets the time limit of a flush in the queue's loop.
    fn limit_flushes(&self, protect: u32, flush: Duration) {
        let mut queue = QUEUES.get_mut(self.queue).unwrap();
        let depth = queue.queue.depth();
        queue.requests = requests_of(&queue.lease.device, protect, depth, flush).unwrap();
    }

    fn free(&self) -> c_int {
        pf_free(self.arena, self.memory)
    }

    /// Ends all, in the order that a program would: no call is refused.
    fn end(self) {
        assert_eq!(pf_queue_destroy(self.queue), 0);
        assert_eq!(pf_nvme_destroy(self.nvme), 0);
        assert_eq!(self.free(), 0, "{}", message());
        for arena in [self.arena, self.rings] {
            assert_eq!(pf_arena_destroy(arena), 0, "{}", message());
        }
        assert_eq!(pf_domain_destroy(self.domain), 0);
        let stats = self.core.stats();
        assert_eq!((stats.live, stats.deferred, stats.quarantined), (0, 0, 0));
    }
}

fn message() -> String {
    // SAFETY: a C string, which is valid until the next failure.
    unsafe { CStr::from_ptr(pf_strerror_last()) }.to_str().unwrap().to_owned()
}

/// Selects the `nth` read or write, from 1.
fn nth(nth: u64) -> Trigger {
    let mut seen = 0;
    Trigger::Matches(Box::new(move |info: &CommandInfo| {
        let moves = info.queue != 0 && matches!(info.opcode, nvm::READ | nvm::WRITE);
        seen += u64::from(moves);
        moves && seen == nth
    }))
}

#[test]
fn a_failed_command_is_reported_with_its_status_and_no_other() {
    for protect in PROTECTIONS {
        let program = Program::new(protect, Config::default());
        let status = Status::LBA_OUT_OF_RANGE.do_not_retry();
        program.faults.inject(nth(3), Fault::Fail(status));
        assert_eq!(program.submit(PF_WRITE, COUNT), 8);
        let mut expected = vec![(0, 0); COUNT];
        expected[2] = (-EIO, 0x4080);
        assert_eq!(program.reports(COUNT), expected, "{protect}");
        program.end();
    }
}

#[test]
fn a_command_that_hangs_is_reported_lost_and_keeps_its_memory() {
    for protect in PROTECTIONS {
        let program = Program::new(protect, impatient());
        program.faults.inject(nth(5), Fault::NeverComplete);
        assert_eq!(program.submit(PF_READ, COUNT), 8);
        let mut expected = vec![(0, 0); COUNT];
        expected[4] = (-ETIMEDOUT, PF_LOST);
        assert_eq!(program.reports(COUNT), expected, "{protect}");
        // One of eight requests still has the allocation.
        assert_eq!(program.free(), -EBUSY);
        assert!(message().contains("1 mapping or request"), "{}", message());
        assert_eq!(pf_arena_destroy(program.arena), -EBUSY);
        // The queue goes on.
        program.faults.clear();
        assert_eq!(program.submit(PF_READ, COUNT), 8);
        assert_eq!(program.reports(COUNT), [(0, 0); COUNT]);
        assert_eq!(program.free(), -EBUSY);
        // The controller is disabled by `pf_nvme_destroy`, and gives it up.
        program.end();
    }
}

#[test]
fn an_aborted_command_is_canceled_and_returns_its_memory() {
    for protect in PROTECTIONS {
        let config = Config { abort_timeout: Duration::from_secs(60), ..impatient() };
        let program = Program::new(protect, config);
        program.faults.inject(nth(1), Fault::Hold);
        assert_eq!(program.submit(PF_WRITE, 2), 2);
        assert_eq!(program.reports(2), [(-ECANCELED, 0), (0, 0)], "{protect}");
        assert_eq!(program.free(), 0);
        // SAFETY: null is allowed.
        let memory = unsafe { pf_alloc(program.arena, COUNT * BLOCK, null_mut()) };
        Program { memory, ..program }.end();
    }
}

#[test]
fn a_controller_that_fails_is_disabled_and_all_memory_returns() {
    for protect in PROTECTIONS {
        let program = Program::new(protect, Config::default());
        program.faults.inject(nth(3), Fault::Fatal);
        assert_eq!(program.submit(PF_WRITE, COUNT), 8);
        let reports = program.reports(COUNT);
        assert!(
            reports.iter().all(|one| matches!(one, (0, 0)) || *one == (-ECANCELED, 0)),
            "{reports:?}"
        );
        assert_eq!(reports[2], (-ECANCELED, 0), "{protect}");
        assert_eq!(program.submit(PF_WRITE, 1), -EIO);
        assert!(message().contains("CSTS.CFS") && message().contains("pf_nvme_destroy"));
        program.end();
    }
}

#[test]
fn a_controller_that_cannot_be_disabled_keeps_the_memory_for_good() {
    for protect in [PF_PROTECT_STATIC, PF_PROTECT_BATCH] {
        let program = Program::new(protect, Config::default());
        program.faults.inject(nth(1), Fault::Fatal);
        program.faults.set_stuck(true);
        assert_eq!(program.submit(PF_READ, 3), 3);
        assert_eq!(program.reports(3), [(-ENODEV, PF_LOST); 3], "{protect}");
        assert_eq!(program.free(), -EBUSY);
        assert_eq!(pf_queue_destroy(program.queue), 0);
        assert_eq!(pf_nvme_destroy(program.nvme), -ETIMEDOUT, "{}", message());
        // Its handle has ended, and the memory is as it was.
        assert_eq!(pf_nvme_destroy(program.nvme), -libc::EBADF);
        assert_eq!(program.free(), -EBUSY);
        assert!(message().contains("3 mappings or requests"), "{}", message());
        assert_eq!(pf_arena_destroy(program.arena), -EBUSY);
        assert_eq!(pf_arena_destroy(program.rings), -EBUSY);
    }
}

/// On an IOMMU that drops what it has cached as late as it may.
#[test]
fn no_device_reaches_memory_that_is_reported_unless_it_is_static() {
    for protect in PROTECTIONS {
        let flush_cost = Duration::from_millis(2);
        let config = SoftConfig { flush_cost, effect: Effect::AtLast, ..SoftConfig::default() };
        let core = Domain::soft_with(config).unwrap();
        let program = Program::on(core, protect, Config::default(), |_| {});
        program.faults.inject(Trigger::Every(1), Fault::Remember);
        for op in [PF_READ, PF_WRITE] {
            assert_eq!(program.submit(op, COUNT), 8);
            assert_eq!(program.reports(COUNT), [(0, 0); COUNT]);
        }
        for access in [BusAccess::Read, BusAccess::Write] {
            let outcomes = program.faults.access_remembered(access);
            assert_eq!(outcomes.len(), 2 * COUNT);
            let reached = outcomes.iter().filter(|one| one.outcome == InjectionOutcome::Succeeded);
            let expected = if protect == PF_PROTECT_STATIC { 2 * COUNT } else { 0 };
            assert_eq!(reached.count(), expected, "{protect}: {access:?}");
        }
        program.end();
    }
}

/// The completions found by one call need a flush for each request, or one for all.
#[test]
fn strict_and_batch_need_one_flush_for_what_a_call_finds() {
    for protect in PER_REQUEST {
        let program = Program::new(protect, Config::default());
        let flushes = || program.core.stats().backend.invalidations.waits;
        assert_eq!(program.submit(PF_READ, COUNT), 8);
        // The model executes in order: an admin command that has completed is behind all of them.
        let device = Arc::clone(&NVMES.get(program.nvme).unwrap().device);
        device.controller.scan_namespaces().unwrap();
        drop(device);
        let before = flushes();
        let site = Site { caller: std::ptr::null(), handle: 0 };
        QUEUES.get_mut(program.queue).unwrap().step(site);
        assert_eq!(program.reports(COUNT), [(0, 0); COUNT]);
        // Each asks for a flush of its own, and those that the unit is too slow for become one: all
        // but the first, at most.
        let expected = if protect == PF_PROTECT_REVOKE { 2..=8 } else { 1..=1 };
        let found = flushes() - before;
        assert!(expected.contains(&found), "{protect}: {found}");
        program.end();
    }
}

/// The flush is later than its limit: its request is reported once, as late, and the memory is in
/// use until the flush has completed.
#[test]
fn the_memory_of_a_late_request_is_free_when_its_flush_has_completed() {
    for protect in PER_REQUEST {
        let flush_cost = Duration::from_secs(1);
        let core = Domain::soft_with(SoftConfig { flush_cost, ..SoftConfig::default() }).unwrap();
        let program = Program::on(core, protect, Config::default(), |_| {});
        program.limit_flushes(protect, Duration::from_millis(50));
        let since = Instant::now();
        assert_eq!(program.submit(PF_READ, 1), 1);
        assert_eq!(program.reports(1), [(-ETIMEDOUT, PF_LOST | PF_LATE)], "{protect}");
        let mut freed = program.free();
        while freed == -EBUSY {
            assert_eq!(pf_queue_wait(program.queue, 1_000_000), 0, "reported twice");
            freed = program.free();
        }
        assert_eq!(freed, 0);
        assert!(since.elapsed() >= flush_cost, "{protect}: freed before its flush");
        // SAFETY: null is allowed.
        let memory = unsafe { pf_alloc(program.arena, COUNT * BLOCK, null_mut()) };
        Program { memory, ..program }.end();
    }
}

/// The flush never completes: its requests are reported as late, and the domain has the memory.
#[test]
fn a_flush_that_hangs_keeps_the_memory_of_its_requests() {
    for protect in PER_REQUEST {
        let timeout = Duration::from_millis(100);
        let config = SoftConfig { hang_from: Some(1), timeout, ..SoftConfig::default() };
        let core = Domain::soft_with(config).unwrap();
        let program = Program::on(core, protect, Config::default(), |_| {});
        program.limit_flushes(protect, Duration::from_millis(200));
        assert_eq!(program.submit(PF_READ, 2), 2);
        assert_eq!(program.reports(2), [(-ETIMEDOUT, PF_LOST | PF_LATE); 2], "{protect}");
        assert_eq!(program.free(), -EBUSY);
        assert!(message().contains("2 mappings or requests"), "{}", message());
        assert_eq!(pf_queue_destroy(program.queue), 0);
        assert_eq!(pf_nvme_destroy(program.nvme), 0);
        assert_eq!(program.free(), -EBUSY);
    }
}

/// A flush that is later than a poll may wait, but not lost: its requests are held until then.
#[test]
fn a_request_is_held_until_its_flush_has_completed() {
    for protect in PER_REQUEST {
        let flush_cost = Duration::from_millis(300);
        let core = Domain::soft_with(SoftConfig { flush_cost, ..SoftConfig::default() }).unwrap();
        let program = Program::on(core, protect, Config::default(), |_| {});
        let since = Instant::now();
        assert_eq!(program.submit(PF_READ, 1), 1);
        assert_eq!(program.reports(1), [(0, 0)]);
        assert!(since.elapsed() >= flush_cost, "{protect}: reported before its flush");
        program.end();
    }
}

/// An event loop learns of the end of a flush, which no interrupt reports, and sleeps until then.
#[test]
fn a_descriptor_is_readable_when_the_flush_of_a_request_ends() {
    for protect in [PF_PROTECT_REVOKE, PF_PROTECT_BATCH] {
        let flush_cost = Duration::from_millis(300);
        let core = Domain::soft_with(SoftConfig { flush_cost, ..SoftConfig::default() }).unwrap();
        let program = Program::on(core, protect, Config::default(), |_| {});
        let fd = pf_queue_fd(program.queue);
        assert!(fd >= 0, "{}", message());
        let none = pf_completion { user_data: 0, result: 1, status: 1, ..pf_completion::NONE };
        let (mut done, mut looks) = ([none; 2], 0);
        assert_eq!(program.submit(PF_READ, 1), 1);
        loop {
            let mut event = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one event.
            assert_eq!(unsafe { libc::poll(&raw mut event, 1, 60_000) }, 1, "asleep");
            // SAFETY: two fit.
            if unsafe { pf_complete(program.queue, done.as_mut_ptr(), 2) } > 0 {
                break;
            }
            looks += 1;
        }
        // After pf_queue_fd(), and after the interrupt, perhaps twice.
        assert!(looks <= 4 && done[0].result == 0, "{looks}");
        let mut event = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: two fit.
        assert_eq!(unsafe { pf_complete(program.queue, done.as_mut_ptr(), 2) }, 0);
        // SAFETY: one event.
        assert_eq!(unsafe { libc::poll(&raw mut event, 1, 0) }, 0);
        program.end();
    }
}

/// The flush that is late does not make the descriptor readable again, and its end does.
#[test]
fn a_descriptor_tells_of_a_late_flush_and_of_its_end() {
    let flush_cost = Duration::from_secs(1);
    let core = Domain::soft_with(SoftConfig { flush_cost, ..SoftConfig::default() }).unwrap();
    let program = Program::on(core, PF_PROTECT_BATCH, Config::default(), |_| {});
    program.limit_flushes(PF_PROTECT_BATCH, Duration::from_millis(50));
    let fd = pf_queue_fd(program.queue);
    assert_eq!(pf_queue_fd(program.queue), fd, "always the same");
    let (mut done, mut looks) =
        ([pf_completion { user_data: 0, result: 1, status: 1, ..pf_completion::NONE }; 2], 0);
    let mut found = 0;
    assert_eq!(program.submit(PF_READ, 1), 1);
    while program.free() == -EBUSY {
        let mut event = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one event.
        assert_eq!(unsafe { libc::poll(&raw mut event, 1, 60_000) }, 1, "asleep");
        // SAFETY: two fit.
        found += unsafe { pf_complete(program.queue, done.as_mut_ptr(), 2) };
        looks += 1;
    }
    assert_eq!((found, done[0].status), (1, PF_LOST | PF_LATE));
    assert!(looks <= 8, "{looks}");
    // SAFETY: null is allowed.
    let memory = unsafe { pf_alloc(program.arena, COUNT * BLOCK, null_mut()) };
    Program { memory, ..program }.end();
}

/// Late requests have all slots: a wait sleeps until one of them has ended.
#[test]
fn a_wait_for_room_ends_when_a_late_request_does() {
    let limit = Duration::from_millis(300);
    let limit_ns = u64::try_from(limit.as_nanos()).unwrap();
    for hangs in [true, false] {
        let flush_cost = Duration::from_millis(if hangs { 0 } else { 500 });
        let hang_from = hangs.then_some(1);
        let config = SoftConfig { flush_cost, hang_from, ..SoftConfig::default() };
        let program = Program::on(
            Domain::soft_with(config).unwrap(),
            PF_PROTECT_BATCH,
            Config::default(),
            |_| {},
        );
        program.limit_flushes(PF_PROTECT_BATCH, Duration::from_millis(20));
        let slots = QUEUES.get_mut(program.queue).unwrap().requests.slots();
        for _ in 0..slots / COUNT {
            assert_eq!(program.submit(PF_READ, COUNT), 8);
            // One that is not late where this thread does not run for long.
            let late = [(-ETIMEDOUT, PF_LOST | PF_LATE); COUNT];
            assert!(program.reports(COUNT) == late || !hangs);
        }
        let since = Instant::now();
        if hangs {
            assert_eq!(program.submit(PF_READ, 1), -libc::EAGAIN);
            assert_eq!(pf_queue_wait(program.queue, limit_ns), 0);
            assert!(since.elapsed() >= limit, "it returned at once");
            assert_eq!(pf_queue_destroy(program.queue), 0);
            continue;
        }
        let mut waits = 0;
        while program.submit(PF_READ, 1) == -libc::EAGAIN {
            assert_eq!(pf_queue_wait(program.queue, 60_000_000_000), 0);
            waits += 1;
        }
        assert!(waits <= 2, "{waits}");
        let _ = program.reports(1);
        while program.free() == -EBUSY {
            assert_eq!(pf_queue_wait(program.queue, limit_ns), 0);
        }
        // SAFETY: null is allowed.
        let memory = unsafe { pf_alloc(program.arena, COUNT * BLOCK, null_mut()) };
        Program { memory, ..program }.end();
    }
}

/// The loop has lent it no memory, so nothing of it is kept.
#[test]
fn a_request_that_hangs_without_memory_of_the_loop_leaves_its_slot() {
    for (protect, op) in
        [(PF_PROTECT_BATCH, PF_FLUSH), (PF_PROTECT_STATIC, PF_FLUSH), (PF_PROTECT_STATIC, PF_READ)]
    {
        let program = Program::new(protect, impatient());
        let opcode = if op == PF_FLUSH { nvm::FLUSH } else { nvm::READ };
        let hangs = move |info: &CommandInfo| info.queue != 0 && info.opcode == opcode;
        program.faults.inject(Trigger::Matches(Box::new(hangs)), Fault::NeverComplete);
        if op == PF_FLUSH {
            let flush = pf_request {
                op,
                nsid: 1,
                offset: 0,
                len: 0,
                iov: null(),
                iovcnt: 0,
                flags: 0,
                command: std::ptr::null(),
                user_data: 0,
            };
            // SAFETY: one request without memory.
            assert_eq!(unsafe { pf_submit(program.queue, &raw const flush, 1) }, 1);
        } else {
            assert_eq!(program.submit(op, 1), 1);
        }
        let status = if op == PF_FLUSH { 0 } else { PF_LOST };
        assert_eq!(program.reports(1), [(-ETIMEDOUT, status)], "{protect}");
        let requests = format!("{:?}", QUEUES.get_mut(program.queue).unwrap().requests);
        assert!(requests.contains("in_flight: 0, held: 0, late: 0, lost: 0"), "{requests}");
        program.end();
    }
}

#[test]
fn a_controller_with_sgls_takes_memory_with_gaps() {
    for protect in PROTECTIONS {
        let core = Domain::soft().unwrap();
        let sgls = |model: &mut ModelConfig| model.sgls = SglSupport::DwordAligned;
        let program = Program::on(core, protect, Config::default(), sgls);
        let bytes = program.memory.cast::<u8>();
        for at in 0..COUNT * BLOCK {
            // SAFETY: inside of the allocation, which no request has.
            unsafe { bytes.wrapping_add(at).write(u8::try_from(at % 251).unwrap()) };
        }
        // Two parts of one page and one of another, with gaps; and the other way round.
        let part = |at: usize, iov_len| iovec { iov_base: bytes.wrapping_add(at).cast(), iov_len };
        let parts = [part(4, 500), part(1000, 524), part(8192 + 8, 512)];
        let back = [part(20_000, 1000), part(24_000, 536)];
        let request = |op, parts: &[iovec]| pf_request {
            op,
            nsid: 1,
            offset: 0,
            len: 1536,
            iov: parts.as_ptr(),
            iovcnt: u32::try_from(parts.len()).unwrap(),
            flags: 0,
            command: std::ptr::null(),
            user_data: 0,
        };
        for request in [request(PF_WRITE, &parts), request(PF_READ, &back)] {
            // SAFETY: one request, of as many entries as it says.
            assert_eq!(unsafe { pf_submit(program.queue, &raw const request, 1) }, 1);
            assert_eq!(program.reports(1), [(0, 0)], "{protect}");
        }
        let copy = |parts: &[iovec]| -> Vec<u8> {
            let bytes = |part: &iovec| {
                let (base, len) = (part.iov_base.cast::<u8>(), part.iov_len);
                // SAFETY: inside of the allocation, which no request has any more.
                unsafe { std::slice::from_raw_parts(base, len) }.to_vec()
            };
            parts.iter().flat_map(bytes).collect()
        };
        assert_eq!(copy(&parts), copy(&back), "{protect}");
        // Not at a multiple of 4.
        let odd = [part(512, 512), part(8192 + 2, 512)];
        let request = pf_request { len: 0, ..request(PF_READ, &odd) };
        // SAFETY: as above.
        let refused = unsafe { pf_submit(program.queue, &raw const request, 1) };
        assert_eq!(refused, -libc::EINVAL);
        assert!(message().starts_with("iov[1], 512 bytes at 0x"), "{}", message());
        program.end();
    }
}

#[test]
fn a_queue_finds_memory_without_a_lock_of_other_threads() {
    let program = Program::new(PF_PROTECT_STRICT, impatient());
    let state = Arc::clone(&DOMAINS.get(program.domain).unwrap().state);
    let (done, waiting) = std::sync::mpsc::channel();
    let stopped = state.stop_shared();
    std::thread::scope(|scope| {
        let (queue, memory) = (program.queue.addr(), program.memory.addr());
        scope.spawn(move || {
            let iov_base = std::ptr::without_provenance_mut(memory);
            let iov = [iovec { iov_base, iov_len: BLOCK }; 2];
            let request = |(iovcnt, user_data)| pf_request {
                op: PF_READ,
                nsid: 1,
                offset: 0,
                len: 0,
                iov: iov.as_ptr(),
                iovcnt,
                flags: 0,
                command: std::ptr::null(),
                user_data,
            };
            let requests = [request((1, 0)), request((2, 1))];
            // SAFETY: there are two requests, of so many entries.
            let accepted =
                unsafe { pf_submit(std::ptr::without_provenance_mut(queue), requests.as_ptr(), 2) };
            done.send(accepted).unwrap();
        });
        let accepted = waiting.recv_timeout(Duration::from_secs(60));
        // Before a failure is reported, so that the thread ends.
        drop(stopped);
        assert_eq!(accepted, Ok(2));
    });
    assert_eq!(program.reports(2), [(0, 0); 2]);
    program.end();
}
