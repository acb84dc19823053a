//! Flushes that are late or never complete, which a program in C cannot have a software IOMMU make.

use super::*;
use crate::arena::{
    PF_POLICY_PER_USE, PF_POLICY_WHOLE, pf_alloc, pf_arena_create, pf_arena_opts, pf_arena_t,
    pf_free,
};
use crate::domain::State;
use crate::failure::pf_strerror_last;
use crate::map::{pf_held, pf_quarantine};
use crate::queue::{PF_PROTECT_BATCH, PF_PROTECT_REVOKE, PF_PROTECT_STRICT};
use libc::{EBUSY, EIO, ETIMEDOUT};
use pinfold::Domain;
use pinfold::soft::SoftConfig;
use std::ptr::{null, null_mut};

/// A program, as its C would have it.
struct Program {
    domain: *mut pf_domain_t,
    arena: *mut pf_arena_t,
    /// Mapped as a whole.
    whole: *mut pf_arena_t,
    requests: *mut pf_requests_t,
    memory: *mut c_void,
}

/// The protections that end a mapping with its request.
const PER_REQUEST: [u32; 3] = [PF_PROTECT_STRICT, PF_PROTECT_REVOKE, PF_PROTECT_BATCH];
const SOON: u64 = 20_000_000;

fn program(config: SoftConfig, protect: u32, flush_ns: u64) -> Program {
    let state = State::new(Domain::soft_with(config).unwrap(), Vec::new());
    let domain = DOMAINS.insert(pf_domain_t { state }).unwrap();
    let arena = |policy| {
        let opts = pf_arena_opts {
            struct_size: size_of::<pf_arena_opts>(),
            size: 1 << 20,
            policy,
            ..pf_arena_opts::DEFAULT
        };
        let mut arena = null_mut();
        // SAFETY: options and result are locals.
        assert_eq!(unsafe { pf_arena_create(domain, &raw const opts, &raw mut arena) }, 0);
        arena
    };
    let (arena, whole) = (arena(PF_POLICY_PER_USE), arena(PF_POLICY_WHOLE));
    let opts = pf_requests_opts {
        struct_size: size_of::<pf_requests_opts>(),
        flush_ns,
        depth: 2,
        protect,
        ..pf_requests_opts::DEFAULT
    };
    let mut requests = null_mut();
    // SAFETY: options and result are locals.
    assert_eq!(unsafe { pf_requests_create(domain, &raw const opts, &raw mut requests) }, 0);
    // SAFETY: NULL is allowed.
    let memory = unsafe { pf_alloc(arena, 4096, null_mut()) };
    assert!(!memory.is_null());
    Program { domain, arena, whole, requests, memory }
}

impl Program {
    fn begin(&self) -> u64 {
        self.begin_with(&[self.memory])
    }

    fn begin_with(&self, memory: &[*mut c_void]) -> u64 {
        let payload = |va: &*mut c_void| pf_payload { va: *va, len: 4096, dir: 2, reserved: 0 };
        let payloads: Vec<_> = memory.iter().map(payload).collect();
        let (mut token, mut iovas, n) = (0, [0; MOST], u32::try_from(memory.len()).unwrap());
        let (payloads, iovas) = (payloads.as_ptr(), iovas.as_mut_ptr());
        // SAFETY: payloads and results are locals.
        let code = unsafe { pf_requests_begin(self.requests, payloads, n, &raw mut token, iovas) };
        assert_eq!(code, 0);
        token
    }

    /// Polls until there is a report, for a minute at most.
    fn reported(&self) -> pf_done {
        let mut done = pf_done { token: 0, result: 0, end: 0, error: 0 };
        for _ in 0..60 {
            // SAFETY: the result is a local.
            let code = unsafe { pf_requests_wait(self.requests, 1_000_000_000, &raw mut done, 1) };
            if code == 1 {
                return done;
            }
            assert_eq!(code, 0);
        }
        panic!("no report");
    }

    fn free(&self) -> c_int {
        pf_free(self.arena, self.memory)
    }

    fn held(&self) -> pf_held {
        let mut held = pf_held { struct_size: size_of::<pf_held>(), ..pf_held::DEFAULT };
        // SAFETY: the result is a local.
        assert!(unsafe { pf_quarantine(self.domain, &raw mut held, null_mut(), 0) } >= 0);
        held
    }
}

fn hanging() -> SoftConfig {
    SoftConfig { hang_from: Some(1), ..SoftConfig::default() }
}

fn failing() -> SoftConfig {
    SoftConfig { fail_from: Some(1), ..SoftConfig::default() }
}

/// A unit whose flushes take longer than the loop's limit, and complete.
fn slow() -> SoftConfig {
    let cost = Duration::from_secs(1);
    SoftConfig { flush_cost: cost, ..SoftConfig::default() }
}

#[test]
fn a_late_request_is_reported_twice() {
    for protect in PER_REQUEST {
        let program = program(slow(), protect, SOON);
        let token = program.begin();
        assert_eq!(pf_requests_completed(program.requests, token, 9), 0);
        let done = program.reported();
        assert_eq!((done.token, done.result), (token, 9));
        assert_eq!((done.end, done.error), (PF_END_LATE, -ETIMEDOUT));
        assert_eq!(program.free(), -EBUSY);
        let done = program.reported();
        assert_eq!((done.token, done.result), (token, 9));
        assert_eq!((done.end, done.error), (PF_END_QUIESCED, 0));
        assert_eq!(program.free(), 0);
        assert_eq!(pf_requests_destroy(program.requests), 0);
    }
}

#[test]
fn a_refused_request_that_is_late_is_reported_when_it_ends() {
    for protect in PER_REQUEST {
        let program = program(slow(), protect, SOON);
        let token = program.begin();
        assert_eq!(pf_requests_refused(program.requests, token), -ETIMEDOUT);
        assert_eq!(program.free(), -EBUSY);
        assert_eq!(pf_requests_refused(program.requests, token), -libc::ESTALE);
        let done = program.reported();
        assert_eq!((done.token, done.end, done.error), (token, PF_END_QUIESCED, 0));
        assert_eq!(program.free(), 0);
        assert_eq!(pf_requests_destroy(program.requests), 0);
    }
}

#[test]
fn a_flush_that_hangs_stays_late_and_its_memory_with_the_domain() {
    for protect in PER_REQUEST {
        let program = program(hanging(), protect, SOON);
        let token = program.begin();
        assert_eq!(pf_requests_completed(program.requests, token, 0), 0);
        assert_eq!(program.reported().end, PF_END_LATE);
        // It keeps its slot, and none of the depth.
        assert!([program.begin(), program.begin()].iter().all(|other| (other ^ token) & 3 != 0));
        assert_eq!(pf_requests_destroy(program.requests), -EBUSY);
        assert_eq!(pf_requests_stopped(program.requests), 0);
        assert_eq!([program.reported().end, program.reported().end], [PF_END_LATE; 2]);
        assert_eq!(pf_requests_destroy(program.requests), 0);
        assert_eq!((program.free(), program.held().deferred), (-EBUSY, 3));
    }
}

#[test]
fn a_flush_that_fails_loses_its_request() {
    for protect in PER_REQUEST {
        let program = program(failing(), protect, 0);
        let [token, refused] = [program.begin(), program.begin()];
        assert_eq!(pf_requests_completed(program.requests, token, 4), 0);
        let done = program.reported();
        assert_eq!((done.token, done.result), (token, 4));
        assert_eq!((done.end, done.error), (PF_END_LOST, -EIO));
        assert_eq!(pf_requests_refused(program.requests, refused), -EIO);
        // Both slots are free again.
        let again = program.begin();
        assert_eq!(pf_requests_refused(program.requests, again), -EIO);
        assert_eq!(pf_requests_destroy(program.requests), 0);
        assert_eq!((program.free(), program.held().quarantined), (-EBUSY, 3));
    }
}

/// A late request's device has ended, a lost one's may not have.
#[test]
fn memory_that_stays_mapped_is_in_use_for_good_only_if_its_request_is_lost() {
    for is_lost in [false, true] {
        let program = program(hanging(), PF_PROTECT_BATCH, SOON);
        // SAFETY: NULL is allowed.
        let kept = unsafe { pf_alloc(program.whole, 4096, null_mut()) };
        let token = program.begin_with(&[program.memory, kept]);
        if is_lost {
            assert_eq!(pf_requests_lost(program.requests, token), 0);
        } else {
            assert_eq!(pf_requests_completed(program.requests, token, 0), 0);
            assert_eq!(program.reported().end, PF_END_LATE);
        }
        assert_eq!(pf_free(program.whole, kept), -EBUSY);
        assert_eq!(pf_requests_destroy(program.requests), 0);
        assert_eq!(pf_free(program.whole, kept), if is_lost { -EBUSY } else { 0 });
        assert_eq!(program.free(), -EBUSY);
        let held = program.held();
        assert_eq!((held.lost, held.deferred), (is_lost.into(), (!is_lost).into()));
        assert_eq!(held.quarantined, 0);
    }
}

/// The limit of a wait is the caller's, also where the protection waits.
#[test]
fn a_strict_wait_ends_at_its_own_limit() {
    let program = program(hanging(), PF_PROTECT_STRICT, 0);
    let token = program.begin();
    assert_eq!(pf_requests_completed(program.requests, token, 0), 0);
    let since = std::time::Instant::now();
    // SAFETY: no report is to be stored.
    assert_eq!(unsafe { pf_requests_wait(program.requests, SOON, null_mut(), 0) }, 0);
    assert!(since.elapsed() < FLUSH_LIMIT);
    assert_eq!(program.free(), -EBUSY);
    // Neither reported nor late.
    assert_eq!(pf_requests_destroy(program.requests), -EBUSY);
}

#[test]
fn options_may_be_shorter_and_have_defaults() {
    let program = program(SoftConfig::default(), 0, 0);
    let token = program.begin();
    assert_eq!(pf_requests_completed(program.requests, token, 0), 0);
    let done = program.reported();
    assert_eq!((done.token, done.end), (token, PF_END_QUIESCED));
    let mut requests = null_mut();
    // SAFETY: null is allowed; the result is a local.
    let code = unsafe { pf_requests_create(program.domain, null(), &raw mut requests) };
    // SAFETY: a C string of this thread.
    let message = unsafe { std::ffi::CStr::from_ptr(pf_strerror_last()) };
    assert_eq!((code, requests), (-libc::EFAULT, null_mut()));
    assert!(message.to_string_lossy().contains("`opts` is NULL"));
}
