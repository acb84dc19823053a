//! Teardown while flushes are in flight: memory, domains and threads end when the flushes complete,
//! or are counted. A test binary of its own: it counts the threads and the held bytes of the whole
//! process.
#![expect(clippy::unwrap_used, reason = "test code outside of test functions")]

use pinfold::soft::SoftConfig;
use pinfold::{Arena, Domain, FromDevice, WaitLimit};
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

const ARENA: usize = 16 << 20;

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads that wake tasks.
fn timers() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks
        .filter(|task| {
            std::fs::read_to_string(task.path().join("comm"))
                .is_ok_and(|name| name.starts_with("pinfold-flushes"))
        })
        .count()
}

/// Bytes of the mappings that no child gets: the arenas. The resident memory would say less: an
/// allocator, and the sanitizer's above all, keeps a MiB of each domain that is gone.
fn arenas() -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut bytes, mut kib) = (0, 0);
    for line in smaps.lines() {
        if let Some(size) = line.strip_prefix("Size:") {
            kib = size.trim().trim_end_matches(" kB").parse::<usize>().unwrap();
        } else if line.starts_with("VmFlags:") && line.split(' ').any(|flag| flag == "dc") {
            bytes += kib << 10;
        }
    }
    bytes
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < limit, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Leaves one buffer with its domain, in the way of `how`, and drops everything.
fn leave(how: usize, config: SoftConfig) {
    let domain = Domain::soft_with(config).unwrap();
    let arena = Arena::builder().size(ARENA as u64).build(&domain).unwrap();
    assert!(arenas() >= ARENA);
    let now = WaitLimit::within(Duration::ZERO);
    let revoked = domain.map(arena.alloc(4096).unwrap(), FromDevice).unwrap().revoke();
    match how {
        0 => drop(revoked.quiesced()),
        1 => {
            let mut polled = pin!(revoked.quiesced());
            let mut context = Context::from_waker(Waker::noop());
            let _ = polled.as_mut().poll(&mut context);
        }
        2 => drop(revoked.wait_for(now)),
        3 => {
            let mut owner = domain.local();
            let mut batch = vec![revoked];
            let mappings = (0..8).map(|_| domain.map(arena.alloc(8192).unwrap(), FromDevice));
            owner.revoke_many(mappings.map(Result::unwrap), &mut batch);
            drop(owner.wait_many_for(batch, now).collect::<Vec<_>>());
        }
        _ => {
            // The handle of the domain first, and the arena's last.
            drop(domain);
            drop(revoked.wait_for(now));
        }
    }
}

/// One after the other: the threads that hang stay, and a thread has its name only once it runs.
#[test]
fn what_is_dropped_in_flight_ends_or_is_counted() {
    let _alone = alone();
    what_is_dropped_in_flight_ends_when_its_flush_completes();
    what_hangs_for_good_is_counted();
}

fn what_is_dropped_in_flight_ends_when_its_flush_completes() {
    let (before, threads) = (arenas(), timers());
    let (deferred, quarantined) = (pinfold::deferred_bytes(), pinfold::quarantined_bytes());
    let flush_cost = Duration::from_millis(50);
    for how in (0..5).cycle().take(10) {
        leave(how, SoftConfig { flush_cost, ..SoftConfig::default() });
    }
    until("buffers stay held", || pinfold::deferred_bytes() == deferred);
    // The timer of an earlier test may have ended meanwhile.
    until("the timers' threads stay", || timers() <= threads);
    until("arenas stay mapped", || arenas() <= before);
    assert_eq!(pinfold::quarantined_bytes(), quarantined);
}

/// A flush that never completes: what it holds is counted, its thread sleeps, and nothing is freed.
fn what_hangs_for_good_is_counted() {
    let config =
        SoftConfig { hang_from: Some(1), timeout: Duration::ZERO, ..SoftConfig::default() };
    let before = pinfold::deferred_bytes();
    for how in 0..3 {
        leave(how, config.clone());
    }
    assert_eq!(pinfold::deferred_bytes() - before, 3 * 4096);
    // A unit that fails completes nothing any more, and is known to: quarantined for good.
    let quarantined = pinfold::quarantined_bytes();
    let config = SoftConfig { fail_from: Some(1), ..SoftConfig::default() };
    leave(0, config);
    assert_eq!(pinfold::quarantined_bytes() - quarantined, 4096);
    assert_eq!(pinfold::deferred_bytes() - before, 3 * 4096);
}

/// The thread that wakes tasks is the parent's: a child has one of its own.
#[test]
fn a_child_of_fork_awaits_a_flush() {
    let _alone = alone();
    let flush_cost = Duration::from_millis(20);
    let domain = Domain::soft_with(SoftConfig { flush_cost, ..SoftConfig::default() }).unwrap();
    let bus = domain.soft_bus().unwrap();
    let revoke = || domain.map(bus.alloc_pages(1).unwrap(), FromDevice).unwrap().revoke();
    let wait = || {
        let mut future = pin!(revoke().quiesced());
        let waker = Waker::from(std::sync::Arc::new(Unpark(std::thread::current())));
        loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(ended) => break ended.is_ok(),
                Poll::Pending => std::thread::park(),
            }
        }
    };
    // The parent's thread exists, and sleeps.
    assert!(wait());
    std::thread::sleep(Duration::from_millis(20));
    // SAFETY: the child uses its copies of this process's memory alone, and ends by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = if wait() { 0 } else { 1 };
        // SAFETY: ends the child, without the parent's clean-ups.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    let limit = Instant::now() + Duration::from_secs(30);
    // SAFETY: a child of this process, and a valid pointer.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        if Instant::now() > limit {
            // SAFETY: the child that was started here.
            unsafe { libc::kill(child, libc::SIGKILL) };
            panic!("the child hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(status, 0, "the child's wait failed");
    assert!(wait(), "and the parent's goes on");
}

struct Unpark(std::thread::Thread);

impl std::task::Wake for Unpark {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.unpark();
    }
}
