//! Asynchronous tasks that wait for flushes.

use crate::{Pages, SoftConfig, domain};
use pinfold_core::access::FromDevice;
use pinfold_core::domain::{BackendError, Domain, QuiescedFuture, Revoked};
use pinfold_core::invalidate::WaitError;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Wakes a thread, and counts how often.
struct Unpark(Thread, AtomicUsize);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.unpark();
    }
}

/// Runs `future` in this thread, which sleeps while it is pending. Returns how often it was polled.
fn block_on<T>(future: impl Future<Output = T>) -> (T, usize) {
    let unpark = Arc::new(Unpark(std::thread::current(), AtomicUsize::new(0)));
    let waker = Waker::from(Arc::clone(&unpark));
    let (mut future, mut polls) = (pin!(future), 0);
    loop {
        polls += 1;
        let seen = unpark.1.load(Ordering::SeqCst);
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return (value, polls);
        }
        while unpark.1.load(Ordering::SeqCst) == seen {
            std::thread::park();
        }
    }
}

fn revoked(domain: &Domain, bus: &crate::SoftBus) -> Revoked<Pages> {
    domain.map(bus.alloc_pages(1).unwrap(), FromDevice).unwrap().revoke()
}

#[test]
fn a_task_sleeps_until_its_flush_completes() {
    let flush_cost = Duration::from_millis(20);
    let (domain, bus) = domain(SoftConfig { flush_cost, ..SoftConfig::default() }).unwrap();
    let revoked = revoked(&domain, &bus);
    let ((), polls) = block_on(async { drop(revoked.await.unwrap()) });
    // When it is in flight, and when it has completed; each effect of it may be an event.
    assert!(polls <= 4, "{polls} polls");
    let stats = domain.stats();
    assert_eq!((stats.live, stats.deferred, stats.backend.invalidations.waited), (0, 0, 0));
}

/// One batch may be in flight: what gathers behind it is submitted by the tasks that wait for it.
#[test]
fn tasks_behind_a_full_queue_are_woken_to_submit() {
    let config = SoftConfig {
        flush_cost: Duration::from_millis(50),
        // Not what wakes them.
        timeout: Duration::from_secs(3600),
        queue_entries: 4,
        ..SoftConfig::default()
    };
    let (domain, bus) = domain(config).unwrap();
    let all: Vec<_> = (0..20).map(|_| revoked(&domain, &bus)).collect();
    // The last first, so that no other task submits for it.
    let polls: usize =
        all.into_iter().rev().map(|one| block_on(async { drop(one.await.unwrap()) }).1).sum();
    assert!(polls < 200, "{polls} polls");
    assert_eq!(domain.stats().live, 0);
}

#[test]
fn a_dropped_task_returns_at_once_and_its_buffer_later() {
    let flush_cost = Duration::from_secs(3600);
    let config =
        SoftConfig { flush_cost, timeout: Duration::from_secs(7200), ..SoftConfig::default() };
    let (domain, bus) = domain(config).unwrap();
    {
        let mut task = pin!(revoked(&domain, &bus).quiesced());
        assert!(task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    let stats = domain.stats();
    assert_eq!((stats.deferred, stats.quarantined), (1, 0));
    // The same with a flush that ends.
    let (domain, bus) = crate::domain(SoftConfig {
        flush_cost: Duration::from_millis(20),
        ..SoftConfig::default()
    })
    .unwrap();
    {
        let mut task = pin!(revoked(&domain, &bus).quiesced());
        assert!(task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    let limit = Instant::now() + Duration::from_secs(60);
    while domain.release_late() > 0 {
        assert!(Instant::now() < limit, "it is never released");
        std::thread::yield_now();
    }
    assert_eq!(domain.stats().live, 0);
}

#[test]
fn a_task_ends_at_the_deadline_of_its_flush() {
    let config = SoftConfig {
        hang_from: Some(1),
        timeout: Duration::from_millis(5),
        ..SoftConfig::default()
    };
    let (domain, bus) = domain(config).unwrap();
    let (failed, _) = block_on(revoked(&domain, &bus).quiesced());
    let Err(failed) = failed else { panic!("a flush that hangs has completed") };
    assert!(
        matches!(failed.error, BackendError::Flush(WaitError::TimedOut { .. })),
        "{}",
        failed.error
    );
    assert!(failed.revoked.is_some());
}

/// The task is woken by the failure: no event of the timeline would.
#[test]
fn a_task_ends_when_the_unit_fails() {
    let config = SoftConfig {
        fail_from: Some(2),
        flush_cost: Duration::from_secs(3600),
        timeout: Duration::from_secs(7200),
        queue_depth: 2,
        ..SoftConfig::default()
    };
    let (domain, bus) = domain(config).unwrap();
    let unpark = Arc::new(Unpark(std::thread::current(), AtomicUsize::new(0)));
    let mut task = pin!(revoked(&domain, &bus).quiesced());
    let waker = Waker::from(Arc::clone(&unpark));
    assert!(task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    // For the timer's thread, which sleeps until the flush is due.
    (0..1000).for_each(|_| std::thread::yield_now());
    drop(domain.map(bus.alloc_pages(1).unwrap(), FromDevice).unwrap().unmap());
    wait_until_woken(&unpark);
    let Poll::Ready(ended) = task.as_mut().poll(&mut Context::from_waker(&waker)) else {
        panic!("the unit has failed")
    };
    let error = ended.err().map(|failed| failed.error);
    assert!(matches!(error, Some(BackendError::Flush(WaitError::UnitFailed { .. }))), "{error:?}");
}

fn wait_until_woken(unpark: &Unpark) {
    let limit = Instant::now() + Duration::from_secs(60);
    while unpark.1.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < limit, "it is never woken");
        std::thread::park_timeout(Duration::from_millis(100));
    }
}

/// Polls another task where it is woken, and panics.
struct Rude(Mutex<QuiescedFuture<Pages>>);

impl Wake for Rude {
    fn wake(self: Arc<Self>) {
        let mut other = self.0.lock().unwrap();
        let _ = Pin::new(&mut *other).poll(&mut Context::from_waker(Waker::noop()));
        panic!("a waker");
    }
}

/// Two tasks wait for one flush, and the first to be woken misbehaves: the second is woken too.
#[test]
fn each_task_of_a_flush_is_woken_whatever_the_others_do() {
    let flush_cost = Duration::from_millis(20);
    let (domain, bus) = domain(SoftConfig { flush_cost, ..SoftConfig::default() }).unwrap();
    let mapping = || domain.map(bus.alloc_pages(1).unwrap(), FromDevice).unwrap();
    let mut both = Vec::new();
    domain.revoke_many([mapping(), mapping()], &mut both);
    let rude = Waker::from(Arc::new(Rude(Mutex::new(revoked(&domain, &bus).quiesced()))));
    let unpark = Arc::new(Unpark(std::thread::current(), AtomicUsize::new(0)));
    let wakers = [rude, Waker::from(Arc::clone(&unpark))];
    let mut tasks: Vec<_> = both.into_iter().map(Revoked::quiesced).collect();
    let mut pending = 0;
    for (task, waker) in tasks.iter_mut().zip(&wakers) {
        pending += usize::from(Pin::new(task).poll(&mut Context::from_waker(waker)).is_pending());
    }
    if pending == 2 {
        wait_until_woken(&unpark);
    }
}

/// A future whose flush is late resolves once, and the next one waits until the flush has completed.
#[test]
fn a_late_future_is_awaited_again() {
    let config = SoftConfig {
        flush_cost: Duration::from_millis(200),
        timeout: Duration::from_millis(1),
        ..SoftConfig::default()
    };
    let (domain, bus) = domain(config).unwrap();
    // Not where this thread gets no processor for as long as the flush takes.
    let attempt = || block_on(revoked(&domain, &bus).quiesced()).0.err()?.revoked;
    let late = (0..100).find_map(|_| attempt()).expect("the flush is late");
    let (ended, polls) = block_on(late.quiesced());
    drop(ended.unwrap());
    assert!(polls <= 4, "{polls} polls");
    assert_eq!((domain.stats().live, domain.stats().deferred), (0, 0));
}

/// Counts the polls of many tasks, each of which is polled when it is woken.
struct Many {
    ready: Mutex<Vec<usize>>,
    thread: Thread,
}

struct One(Arc<Many>, usize);

impl Wake for One {
    fn wake(self: Arc<Self>) {
        self.0.ready.lock().unwrap().push(self.1);
        self.0.thread.unpark();
    }
}

/// The queue is full, and tasks gather behind it: none is polled before a batch has completed.
#[test]
fn tasks_behind_a_full_queue_sleep() {
    const TASKS: usize = 2_000;
    let config = SoftConfig {
        flush_cost: Duration::from_millis(100),
        timeout: Duration::from_secs(3600),
        queue_depth: 1,
        ..SoftConfig::default()
    };
    let (domain, bus) = domain(config).unwrap();
    let many =
        Arc::new(Many { ready: Mutex::new((0..TASKS).collect()), thread: std::thread::current() });
    let wakers: Vec<_> =
        (0..TASKS).map(|task| Waker::from(Arc::new(One(Arc::clone(&many), task)))).collect();
    let mut tasks: Vec<_> = (0..TASKS).map(|_| Some(revoked(&domain, &bus).quiesced())).collect();
    let (mut polls, mut left) = (0, TASKS);
    while left > 0 {
        let ready = std::mem::take(&mut *many.ready.lock().unwrap());
        if ready.is_empty() {
            std::thread::park();
        }
        for task in ready {
            let Some(future) = &mut tasks[task] else { continue };
            polls += 1;
            if Pin::new(future).poll(&mut Context::from_waker(&wakers[task])).is_ready() {
                tasks[task] = None;
                left -= 1;
            }
        }
    }
    // Polls: at first, when the queue accepts the gathered requests, and when it has completed.
    assert!(polls <= 6 * TASKS, "{polls} polls of {TASKS} tasks");
    assert_eq!(domain.stats().live, 0);
}

/// Aborted waits are submitted again by the task that is woken.
#[test]
fn tasks_outlast_aborts() {
    let config = SoftConfig { abort_one_in: Some(2), units: 2, ..SoftConfig::default() };
    let (domain, bus) = domain(config).unwrap();
    for _ in 0..100 {
        block_on(async { drop(revoked(&domain, &bus).await.unwrap()) });
    }
    assert!(domain.stats().backend.invalidations.resubmitted > 0);
}

/// Another thread executes what is due while the timer's thread looks for it, and submits nothing
/// afterwards.
#[test]
fn a_completion_that_another_thread_executes_wakes_the_task() {
    let config = SoftConfig {
        flush_cost: Duration::from_micros(100),
        // Not what wakes it.
        timeout: Duration::from_secs(3600),
        ..SoftConfig::default()
    };
    let (domain, bus) = domain(config).unwrap();
    let (to_other, others) = mpsc::channel::<Revoked<Pages>>();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for revoked in others {
                while revoked.check().is_pending() {
                    std::hint::spin_loop();
                }
                drop(revoked.wait());
            }
        });
        // Its end ends the other thread.
        let to_other = to_other;
        for _ in 0..10_000 {
            let unpark = Arc::new(Unpark(std::thread::current(), AtomicUsize::new(0)));
            let waker = Waker::from(Arc::clone(&unpark));
            let mapping = || domain.map(bus.alloc_pages(1).unwrap(), FromDevice).unwrap();
            let mut both = Vec::new();
            domain.revoke_many([mapping(), mapping()], &mut both);
            to_other.send(both.pop().unwrap()).unwrap();
            let mut task = both.pop().unwrap().quiesced();
            while Pin::new(&mut task).poll(&mut Context::from_waker(&waker)).is_pending() {
                wait_until_woken(&unpark);
                unpark.1.store(0, Ordering::SeqCst);
            }
        }
    });
}

/// A buffer that nobody waits for is behind a unit that aborts whatever it is given: the flush is
/// submitted again and again, and keeps no processor busy.
#[test]
fn a_unit_that_aborts_everything_is_asked_a_thousand_times_a_second() {
    let config = SoftConfig {
        abort_one_in: Some(1),
        timeout: Duration::from_millis(1),
        ..SoftConfig::default()
    };
    let (domain, bus) = domain(config).unwrap();
    let begun = Instant::now();
    let mut task = revoked(&domain, &bus).quiesced();
    let _ = Pin::new(&mut task).poll(&mut Context::from_waker(Waker::noop()));
    drop(task);
    let submitted = || u128::from(domain.stats().backend.invalidations.resubmitted);
    while begun.elapsed() < Duration::from_millis(200) || submitted() <= 16 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} submissions", submitted());
        std::thread::sleep(Duration::from_millis(10));
    }
    let (submitted, elapsed) = (submitted(), begun.elapsed().as_millis());
    assert!(submitted <= 1_000 + 10 * elapsed, "{submitted} in {elapsed} ms");
}
