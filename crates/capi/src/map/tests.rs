//! Device access, and the return of memory: with the device side of the software IOMMU, which the C
//! interface does not have.

use super::*;
use crate::arena::{
    ARENAS, PF_POLICY_PER_USE, PF_POLICY_WHOLE, pf_alloc, pf_arena_create, pf_arena_destroy,
    pf_arena_opts, pf_arena_t, pf_free,
};
use crate::domain::{State, pf_domain_destroy};
use crate::owner::{
    pf_owner_create, pf_owner_destroy, pf_quiesce_fd, pf_quiesced, pf_ticket_t, pf_wait,
};
use crate::registered::{pf_reg_destroy, pf_reg_t, pf_register};
use pinfold::soft::{Port, SoftConfig};
use pinfold::{Domain, Iova};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A program in C, and the device of its domain.
struct Program {
    domain: *mut pf_domain_t,
    arena: *mut pf_arena_t,
    owner: *mut pf_owner_t,
    device: Port,
}

fn program(config: SoftConfig, policy: u32) -> Program {
    let domain = Domain::soft_with(config).unwrap();
    let device = domain.port().unwrap();
    let domain = DOMAINS.insert(pf_domain_t { state: State::new(domain, Vec::new()) }).unwrap();
    let opts = pf_arena_opts {
        struct_size: size_of::<pf_arena_opts>(),
        size: 4 << 20,
        policy,
        ..pf_arena_opts::DEFAULT
    };
    let (mut arena, mut owner) = (null_mut(), null_mut());
    // SAFETY: options and results are locals.
    assert_eq!(unsafe { pf_arena_create(domain, &raw const opts, &raw mut arena) }, 0);
    // SAFETY: the result is a local.
    assert_eq!(unsafe { pf_owner_create(domain, &raw mut owner) }, 0);
    Program { domain, arena, owner, device }
}

impl Program {
    fn alloc(&self, len: usize) -> *mut c_void {
        // SAFETY: NULL is allowed.
        let memory = unsafe { pf_alloc(self.arena, len, null_mut()) };
        assert!(!memory.is_null());
        memory
    }

    fn map(&self, va: *mut c_void, len: usize, dir: pf_dir) -> (pf_map_t, Iova) {
        let (mut map, mut iova) = (pf_map_t { id: 0, r#gen: 0 }, 0);
        // SAFETY: the results are locals.
        let code = unsafe { pf_map(self.owner, va, len, dir as u32, &raw mut map, &raw mut iova) };
        assert_eq!(code, 0);
        (map, Iova::new(iova))
    }

    fn revoke(&self, maps: &[pf_map_t]) -> pf_ticket_t {
        let (mut ticket, count) = (pf_ticket_t { seq: 0 }, u32::try_from(maps.len()).unwrap());
        // SAFETY: the names are a slice, the result is a local.
        let code = unsafe { pf_revoke_many(self.owner, maps.as_ptr(), count, &raw mut ticket) };
        assert!(code == 0 || code == PF_STAYS_MAPPED);
        ticket
    }

    fn held(&self) -> (pf_held, String) {
        let mut held = pf_held { struct_size: size_of::<pf_held>(), ..pf_held::DEFAULT };
        let mut why = [0; 512];
        // SAFETY: the results are locals.
        let len = unsafe {
            pf_quarantine(self.domain, &raw mut held, why.as_mut_ptr().cast(), why.len())
        };
        (held, String::from_utf8(why[..usize::try_from(len).unwrap()].to_vec()).unwrap())
    }

    /// Ends it: nothing is left.
    fn end(self) {
        assert_eq!(pf_owner_destroy(self.owner), 0);
        assert_eq!(pf_arena_destroy(self.arena), 0);
        assert_eq!(pf_domain_destroy(self.domain), 0);
    }
}

/// Reads memory that a device may write.
fn bytes<const N: usize>(va: *mut c_void) -> [u8; N] {
    // SAFETY: memory of the test's arena, which no device writes meanwhile.
    unsafe { va.cast::<[u8; N]>().read_volatile() }
}

#[test]
fn a_device_reaches_what_is_mapped_and_nothing_after() {
    let program = program(SoftConfig::default(), PF_POLICY_PER_USE);
    let Program { device, .. } = &program;
    let memory = program.alloc(1 << 16);
    for round in 0..8 {
        let from = memory.wrapping_byte_add(round * 4096 + 5);
        let (written, to) = program.map(from, 100, pf_dir::PF_FROM_DEVICE);
        let (read, from_iova) = program.map(from, 100, pf_dir::PF_TO_DEVICE);
        device.write(to, b"packet").unwrap();
        assert_eq!(&bytes::<6>(from), b"packet");
        let mut seen = [0; 6];
        device.read(from_iova, &mut seen).unwrap();
        assert_eq!(&seen, b"packet");
        device.write(from_iova, b"wrong direction").unwrap_err();
        device.read(to, &mut seen).unwrap_err();
        let ticket = program.revoke(&[written]);
        if round % 2 == 0 {
            assert_eq!(pf_wait(program.owner, ticket, u64::MAX), 0);
        } else {
            while pf_quiesced(program.owner, ticket) == 0 {}
        }
        device.write(to, b"late").unwrap_err();
        device.read(from_iova, &mut seen).unwrap();
        assert_eq!(pf_unmap(program.owner, read), 0);
        device.read(from_iova, &mut seen).unwrap_err();
        assert_eq!(&bytes::<6>(from), b"packet");
    }
    assert_eq!(pf_free(program.arena, memory), 0);
    program.end();
}

#[test]
fn pieces_of_a_batch_are_where_their_addresses_say() {
    let program = program(SoftConfig::default(), PF_POLICY_PER_USE);
    let memory = program.alloc(1 << 16);
    let pieces: Vec<_> = (0..10)
        .map(|at| iovec { iov_base: memory.wrapping_byte_add(at * 4096 + at), iov_len: 9 })
        .collect();
    let (mut maps, mut iovas) = ([pf_map_t { id: 0, r#gen: 0 }; 10], [0; 10]);
    let dir = pf_dir::PF_BIDIR as u32;
    let (to, at) = (maps.as_mut_ptr(), iovas.as_mut_ptr());
    // SAFETY: ten elements each.
    assert_eq!(unsafe { pf_map_many(program.owner, pieces.as_ptr(), 10, dir, to, at) }, 0);
    for (number, iova) in (0..).zip(iovas) {
        program.device.write(Iova::new(iova), &[number; 9]).unwrap();
    }
    for (number, piece) in (0..).zip(&pieces) {
        assert_eq!(bytes::<9>(piece.iov_base), [number; 9]);
    }
    let ticket = program.revoke(&maps);
    assert_eq!(pf_wait(program.owner, ticket, u64::MAX), 0);
    assert!(iovas.iter().all(|&iova| program.device.write(Iova::new(iova), b"late").is_err()));
    assert_eq!(pf_free(program.arena, memory), 0);
    program.end();
}

#[test]
fn memory_that_was_handed_back_is_never_written() {
    // Flushes complete late and out of order, while a device writes wherever it was ever told to.
    let late_by = Duration::from_micros(200);
    let program = program(SoftConfig { late_by, ..SoftConfig::default() }, PF_POLICY_PER_USE);
    let known = [const { AtomicU64::new(0) }; 64];
    let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    let device = program.device.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for iova in &known {
                    let iova = Iova::new(iova.load(Ordering::Relaxed));
                    let written = device.write(iova, &[0xff; 16]).is_ok();
                    writes.fetch_add(u64::from(written), Ordering::Relaxed);
                }
            }
        });
        let memory = program.alloc(64 * 4096);
        let page = |at: usize| memory.wrapping_byte_add(at * 4096);
        for round in 0..200_u8 {
            let (maps, iovas): (Vec<_>, Vec<_>) =
                (0..64).map(|at| program.map(page(at), 16, pf_dir::PF_FROM_DEVICE)).unzip();
            for (known, iova) in known.iter().zip(&iovas) {
                known.store(iova.raw(), Ordering::Relaxed);
            }
            let tickets = [program.revoke(&maps[..32]), program.revoke(&maps[32..])];
            for (number, ticket) in tickets.into_iter().enumerate().rev() {
                assert_eq!(pf_wait(program.owner, ticket, u64::MAX), 0);
                for at in number * 32..number * 32 + 32 {
                    // SAFETY: memory of this test, which has been handed back.
                    unsafe { page(at).cast::<[u8; 16]>().write_volatile([round; 16]) };
                }
            }
            std::thread::yield_now();
            assert!((0..64).all(|at| bytes::<16>(page(at)) == [round; 16]), "{round}");
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(pf_free(program.arena, memory), 0);
    });
    assert!(writes.into_inner() > 0);
    drop(device);
    program.end();
}

#[test]
fn a_late_flush_may_be_waited_for_again() {
    // The thread may get no processor between its calls.
    let config = SoftConfig {
        flush_cost: Duration::from_secs(3),
        timeout: Duration::from_millis(500),
        ..SoftConfig::default()
    };
    let program = program(config, PF_POLICY_PER_USE);
    let memory = program.alloc(8192);
    let (map, iova) = program.map(memory, 8192, pf_dir::PF_FROM_DEVICE);
    program.device.write(iova, b"before").unwrap();
    let ticket = program.revoke(&[map]);
    assert_eq!(pf_quiesced(program.owner, ticket), 0);
    for _ in 0..3 {
        assert_eq!(pf_wait(program.owner, ticket, 1_000), -libc::ETIMEDOUT);
        assert_eq!(pf_free(program.arena, memory), -libc::EBUSY);
        assert_eq!(pf_owner_destroy(program.owner), -libc::EBUSY);
    }
    let mut code = 0;
    while code == 0 {
        std::thread::sleep(Duration::from_millis(5));
        code = pf_quiesced(program.owner, ticket);
    }
    assert_eq!(code, -libc::ETIMEDOUT);
    assert_eq!(pf_wait(program.owner, ticket, u64::MAX), 0);
    assert_eq!(pf_free(program.arena, memory), 0);
    program.end();
}

#[test]
fn a_late_unmap_leaves_its_memory_with_the_domain() {
    let config = SoftConfig {
        flush_cost: Duration::from_secs(2),
        timeout: Duration::from_millis(10),
        ..SoftConfig::default()
    };
    let program = program(config, PF_POLICY_PER_USE);
    let memory = program.alloc(8192);
    let (map, _) = program.map(memory, 8192, pf_dir::PF_FROM_DEVICE);
    assert_eq!(pf_unmap(program.owner, map), -libc::ETIMEDOUT);
    assert_eq!(pf_unmap(program.owner, map), -libc::ESTALE);
    let (held, why) = program.held();
    assert_eq!((held.deferred, held.deferred_bytes, held.quarantined), (1, 8192, 0));
    assert!(why.contains("a flush is late for 1 mapping (8192 bytes)"), "{why}");
    assert_eq!(pf_free(program.arena, memory), -libc::EBUSY);
    let limit = Instant::now() + Duration::from_secs(60);
    while program.held().0.deferred > 0 {
        assert!(Instant::now() < limit, "it stays with the domain");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(pf_free(program.arena, memory), 0);
    program.end();
}

#[test]
fn a_flush_that_never_completes_quarantines_the_memory() {
    let config = SoftConfig { fail_from: Some(1), ..SoftConfig::default() };
    let program = program(config, PF_POLICY_PER_USE);
    let (lost, kept) = (program.alloc(4096), program.alloc(4096));
    let (map, iova) = program.map(lost, 4096, pf_dir::PF_FROM_DEVICE);
    let (strict, _) = program.map(lost, 4096, pf_dir::PF_FROM_DEVICE);
    program.device.write(iova, b"cached").unwrap();
    // Together with one that is mapped for its lifetime, and needs no flush.
    let page = std::alloc::Layout::from_size_align(4096, 4096).unwrap();
    // SAFETY: 4096 bytes.
    let own: *mut c_void = unsafe { std::alloc::alloc_zeroed(page) }.cast();
    let mut reg: *mut pf_reg_t = null_mut();
    // SAFETY: the memory is freed after it has been unregistered.
    assert_eq!(unsafe { pf_register(program.domain, own, 4096, &raw mut reg) }, 0);
    let (fixed, _) = program.map(own, 4096, pf_dir::PF_FROM_DEVICE);
    let ticket = program.revoke(&[map, fixed]);
    for _ in 0..3 {
        assert_eq!(pf_wait(program.owner, ticket, 1_000_000), -libc::EIO);
        assert!(last_message().contains("memory of 1 mapping for good"));
        assert_eq!(pf_quiesced(program.owner, ticket), -libc::EIO);
        assert_eq!(pf_free(program.arena, lost), -libc::EBUSY);
    }
    let message = last_message();
    assert!(message.contains("in use by 2 mappings"), "{message}");
    let (held, why) = program.held();
    assert_eq!((held.quarantined, held.quarantined_bytes, held.deferred), (1, 4096, 0));
    assert!(why.contains("1 mapping (4096 bytes) could not be revoked"), "{why}");
    assert_eq!(pf_unmap(program.owner, strict), -libc::EIO);
    assert_eq!(program.held().0.quarantined, 2);
    // The registered memory has been handed back, but cannot be unmapped: the page is leaked.
    assert_eq!(pf_reg_destroy(reg), -libc::EIO);
    assert!(last_message().contains("keep it mapped"));
    assert_eq!(pf_reg_destroy(reg), -libc::EBADF);
    assert_eq!(pf_free(program.arena, kept), 0);
    assert_eq!(pf_owner_destroy(program.owner), 0);
    assert_eq!(pf_free(program.arena, lost), -libc::EBUSY);
    assert_eq!(pf_arena_destroy(program.arena), -libc::EBUSY);
    assert!(ARENAS.get(program.arena).is_ok());
}

fn last_message() -> String {
    // SAFETY: a C string, valid until the next failure.
    let last = unsafe { std::ffi::CStr::from_ptr(crate::failure::pf_strerror_last()) };
    last.to_str().unwrap().to_owned()
}

/// Waits until the descriptor is readable, and reads it; false after `timeout`.
fn readable(fd: c_int, timeout: Duration) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let timeout = c_int::try_from(timeout.as_millis()).unwrap();
    // SAFETY: one element.
    let ready = unsafe { libc::poll(&raw mut poll, 1, timeout) } == 1;
    let mut count = 0_u64;
    // SAFETY: eight bytes of a local.
    let read = unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
    assert_eq!(read == 8, ready);
    ready
}

/// Whether the announcements end, with `ask` after each: the timer's thread may have one to make
/// yet, but a program that asks as it is told is not kept busy for ever.
fn ceases(fd: c_int, ask: impl Fn() -> c_int) -> bool {
    (0..100).any(|_| {
        let again = readable(fd, Duration::from_millis(50));
        if again {
            ask();
        }
        !again
    })
}

#[test]
fn an_owner_finds_memory_without_a_lock_of_other_threads() {
    let program = program(SoftConfig::default(), PF_POLICY_PER_USE);
    let memory = program.alloc(8192);
    let state = Arc::clone(&DOMAINS.get(program.domain).unwrap().state);
    let (done, waiting) = std::sync::mpsc::channel();
    let stopped = state.stop_shared();
    std::thread::scope(|scope| {
        let (owner, memory) = (program.owner.addr(), memory.addr());
        scope.spawn(move || {
            let owner: *mut pf_owner_t = std::ptr::without_provenance_mut(owner);
            let base = std::ptr::without_provenance_mut(memory);
            let pieces = [iovec { iov_base: base, iov_len: 64 }; 2];
            let mut names = [pf_map_t { id: 0, r#gen: 0 }; 3];
            let mut addresses = [0; 3];
            let bidir = pf_dir::PF_BIDIR as u32;
            // SAFETY: the results are locals.
            let one =
                unsafe { pf_map(owner, base, 64, bidir, &raw mut names[0], &raw mut addresses[0]) };
            let (more, at) = (names[1..].as_mut_ptr(), addresses[1..].as_mut_ptr());
            // SAFETY: two pieces, and two results of each kind.
            let many = unsafe { pf_map_many(owner, pieces.as_ptr(), 2, bidir, more, at) };
            done.send((one, many, names.map(|name| pf_unmap(owner, name)))).unwrap();
        });
        let mapped = waiting.recv_timeout(Duration::from_secs(60));
        // Before a failure is reported, so that the thread ends.
        drop(stopped);
        assert_eq!(mapped, Ok((0, 0, [0; 3])));
    });
    assert_eq!(pf_free(program.arena, memory), 0);
    program.end();
}

#[test]
fn the_descriptor_announces_each_end_once() {
    let flush_cost = Duration::from_millis(20);
    let program = program(SoftConfig { flush_cost, ..SoftConfig::default() }, PF_POLICY_PER_USE);
    let memory = program.alloc(4096);
    let fd = pf_quiesce_fd(program.owner);
    let begin = Instant::now();
    let tickets: Vec<_> =
        (0..3).map(|_| program.revoke(&[program.map(memory, 4096, pf_dir::PF_BIDIR).0])).collect();
    let mut done = 0;
    while done < 3 {
        assert!(readable(fd, Duration::from_secs(60)));
        while done < 3 && pf_quiesced(program.owner, tickets[done]) == 1 {
            done += 1;
        }
    }
    assert!(begin.elapsed() >= flush_cost);
    // A revocation that needs no flush, and a ticket that was not asked about.
    while readable(fd, Duration::ZERO) {}
    let (quick, empty) = (program.revoke(&[]), program.revoke(&[]));
    assert!(readable(fd, Duration::ZERO));
    assert_eq!(pf_quiesced(program.owner, empty), 1);
    assert!(ceases(fd, || pf_quiesced(program.owner, empty)), "announced again");
    assert_eq!(pf_quiesced(program.owner, quick), 1);
    assert_eq!(pf_free(program.arena, memory), 0);
    program.end();
}

#[test]
fn memory_that_is_announced_is_in_use_until_its_ticket_is_asked_about() {
    let config = SoftConfig { timeout: Duration::from_secs(3600), ..SoftConfig::default() };
    let program = program(config, PF_POLICY_PER_USE);
    let memory = program.alloc(4096);
    let fd = pf_quiesce_fd(program.owner);
    let ticket = program.revoke(&[program.map(memory, 4096, pf_dir::PF_BIDIR).0]);
    assert!(readable(fd, Duration::from_secs(60)));
    // This call finds that the flush has ended, too.
    let empty = program.revoke(&[]);
    assert_eq!(pf_free(program.arena, memory), -libc::EBUSY);
    assert_eq!(pf_quiesced(program.owner, ticket), 1);
    assert_eq!(pf_quiesced(program.owner, empty), 1);
    assert_eq!(pf_free(program.arena, memory), 0);
    program.end();
}

#[test]
fn the_descriptor_announces_a_deadline_and_a_failure() {
    let timeout = Duration::from_millis(20);
    let hanging = SoftConfig { hang_from: Some(1), timeout, ..SoftConfig::default() };
    let failed = SoftConfig { fail_from: Some(1), ..SoftConfig::default() };
    for (config, error) in [(hanging, libc::ETIMEDOUT), (failed, libc::EIO)] {
        let program = program(config, PF_POLICY_PER_USE);
        let memory = program.alloc(4096);
        let ticket = program.revoke(&[program.map(memory, 4096, pf_dir::PF_BIDIR).0]);
        let fd = pf_quiesce_fd(program.owner);
        let mut code = 0;
        while code == 0 {
            assert!(readable(fd, Duration::from_secs(60)));
            code = pf_quiesced(program.owner, ticket);
        }
        assert_eq!(code, -error);
        while readable(fd, Duration::ZERO) {}
        assert_eq!(pf_quiesced(program.owner, ticket), -error);
        assert!(ceases(fd, || pf_quiesced(program.owner, ticket)), "a loop that never ends");
        assert_eq!(pf_free(program.arena, memory), -libc::EBUSY);
    }
}

#[test]
fn the_descriptor_announces_a_late_ticket_again_when_it_ends() {
    let config = SoftConfig {
        flush_cost: Duration::from_millis(300),
        timeout: Duration::from_millis(20),
        ..SoftConfig::default()
    };
    for waits in [false, true] {
        let program = program(config.clone(), PF_POLICY_PER_USE);
        let memory = program.alloc(4096);
        let ticket = program.revoke(&[program.map(memory, 4096, pf_dir::PF_BIDIR).0]);
        let fd = pf_quiesce_fd(program.owner);
        let (mut announced, mut late) = (0, 0);
        loop {
            assert!(readable(fd, Duration::from_secs(60)), "the end is not announced");
            announced += 1;
            // A process that does not run for long enough sees the end only.
            let (code, ended) = match waits && announced == 1 {
                true => (pf_wait(program.owner, ticket, 1), 0),
                false => (pf_quiesced(program.owner, ticket), 1),
            };
            late += u32::from(code == -libc::ETIMEDOUT);
            if code == ended && (code == 1 || waits) {
                break;
            }
        }
        // Its deadline, its end, and what was read late of either.
        assert!(late <= 2 && announced <= 5, "{late} of {announced}");
        while readable(fd, Duration::ZERO) {}
        assert!(ceases(fd, || pf_quiesced(program.owner, ticket)), "announced for ever");
        assert_eq!(pf_free(program.arena, memory), 0);
        program.end();
    }
}

/// Its deadline passes while a call asks whether it has.
#[test]
fn the_descriptor_announces_the_end_of_a_ticket_asked_about_at_its_deadline() {
    let config = SoftConfig {
        flush_cost: Duration::from_millis(10),
        timeout: Duration::from_millis(1),
        ..SoftConfig::default()
    };
    let program = program(config, PF_POLICY_PER_USE);
    let memory = program.alloc(4096);
    let fd = pf_quiesce_fd(program.owner);
    for _ in 0..50 {
        let ticket = program.revoke(&[program.map(memory, 4096, pf_dir::PF_BIDIR).0]);
        while pf_quiesced(program.owner, ticket) == 0 {}
        while pf_quiesced(program.owner, ticket) != 1 {
            assert!(readable(fd, Duration::from_secs(60)), "the end is not announced");
        }
    }
    assert_eq!(pf_free(program.arena, memory), 0);
    program.end();
}

#[test]
fn the_descriptor_announces_the_deadline_behind_a_late_ticket() {
    let hanging = SoftConfig {
        hang_from: Some(1),
        timeout: Duration::from_millis(20),
        ..SoftConfig::default()
    };
    let program = program(hanging, PF_POLICY_PER_USE);
    let memory = program.alloc(4096);
    let fd = pf_quiesce_fd(program.owner);
    let revoke = || program.revoke(&[program.map(memory, 4096, pf_dir::PF_BIDIR).0]);
    let first = revoke();
    while pf_quiesced(program.owner, first) == 0 {
        assert!(readable(fd, Duration::from_secs(60)));
    }
    assert_eq!(pf_quiesced(program.owner, first), -libc::ETIMEDOUT);
    while readable(fd, Duration::ZERO) {}
    // No call of the owner's between its revocation and its deadline.
    let second = revoke();
    assert!(readable(fd, Duration::from_secs(60)), "the second deadline is not announced");
    while pf_quiesced(program.owner, second) == 0 {
        assert!(readable(fd, Duration::from_secs(60)));
    }
    assert_eq!(pf_quiesced(program.owner, second), -libc::ETIMEDOUT);
}

#[test]
fn zeroed_options_protect() {
    let program = program(SoftConfig::default(), 0);
    let memory = program.alloc(4096);
    let (map, iova) = program.map(memory, 4096, pf_dir::PF_BIDIR);
    program.device.write(iova, b"mapped").unwrap();
    assert_eq!(pf_unmap(program.owner, map), 0);
    program.device.write(iova, b"unmapped").unwrap_err();
    assert_eq!(&bytes::<6>(memory), b"mapped");
    assert_eq!(pf_free(program.arena, memory), 0);
    program.end();
}

#[test]
fn the_end_of_a_mapping_says_that_the_memory_stays_mapped() {
    let program = program(SoftConfig::default(), PF_POLICY_WHOLE);
    let memory = program.alloc(4096);
    let iov = [libc::iovec { iov_base: memory, iov_len: 4096 }; 2];
    let (mut maps, mut iovas) = ([pf_map_t { id: 0, r#gen: 0 }; 2], [0; 2]);
    // SAFETY: two of each.
    let mapped = unsafe {
        pf_map_many(program.owner, iov.as_ptr(), 2, 3, maps.as_mut_ptr(), iovas.as_mut_ptr())
    };
    assert_eq!(mapped, 0);
    let mut ticket = pf_ticket_t { seq: 0 };
    // SAFETY: two names, and a local.
    let revoked = unsafe { pf_revoke_many(program.owner, maps.as_ptr(), 2, &raw mut ticket) };
    assert_eq!(revoked, PF_STAYS_MAPPED);
    assert_eq!(pf_quiesced(program.owner, ticket), 1);
    program.device.write(Iova::new(iovas[0]), b"still").unwrap();
    assert_eq!(pf_free(program.arena, memory), 0);
    program.end();
}

#[test]
fn memory_mapped_whole_stays_reachable_until_it_is_unregistered() {
    let program = program(SoftConfig::default(), PF_POLICY_WHOLE);
    let page = std::alloc::Layout::from_size_align(8192, 4096).unwrap();
    // SAFETY: 8192 bytes.
    let own: *mut c_void = unsafe { std::alloc::alloc_zeroed(page) }.cast();
    let mut reg: *mut pf_reg_t = null_mut();
    // SAFETY: the memory is freed after it has been unregistered.
    assert_eq!(unsafe { pf_register(program.domain, own, 8192, &raw mut reg) }, 0);
    let (map, iova) = program.map(own.wrapping_byte_add(5000), 100, pf_dir::PF_TO_DEVICE);
    program.device.write(iova, b"registered").unwrap();
    assert_eq!(&bytes::<10>(own.wrapping_byte_add(5000)), b"registered");
    assert_eq!(pf_unmap(program.owner, map), PF_STAYS_MAPPED);
    program.device.write(iova, b"still").unwrap();
    assert_eq!(pf_reg_destroy(reg), 0);
    program.device.write(iova, b"never").unwrap_err();
    assert_eq!(&bytes::<5>(own.wrapping_byte_add(5000)), b"still");
    // SAFETY: allocated above; no device reaches it.
    unsafe { std::alloc::dealloc(own.cast(), page) };
    program.end();
}
