//! A model network card behind ports, and asynchronous tasks that wait for flushes.

use crate::{Effect, Nic, NicEvent, Pages, SoftBus, SoftConfig, domain};
use pinfold_core::access::{Bidirectional, Direction, FromDevice, ToDevice};
use pinfold_core::addr::Iova;
use pinfold_core::domain::{BackendError, Domain, DomainLocal, Mapping, Quiesced, Revoked};
use pinfold_core::invalidate::WaitError;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

const ENTRIES: u32 = 4;
/// The transmit ring is in the second half of the page.
const TRANSMIT: u64 = 2048;

/// The driver's side: its rings in one page, which stays mapped.
struct Driver<'d> {
    bus: &'d SoftBus,
    domain: DomainLocal,
    rings: Mapping<Pages, Bidirectional>,
}

impl<'d> Driver<'d> {
    fn new(domain: &'d Domain, bus: &'d SoftBus) -> (Self, Nic) {
        let rings = domain.map(bus.alloc_pages(1).unwrap(), Bidirectional).unwrap();
        let at = rings.iova().start();
        let card = Nic::new(bus.port())
            .receive_ring(at, ENTRIES)
            .transmit_ring(at.checked_add(TRANSMIT).unwrap(), ENTRIES);
        (Self { bus, domain: domain.local(), rings }, card)
    }

    fn map<D: Direction>(&mut self, direction: D) -> Mapping<Pages, D> {
        let pages = self.bus.alloc_pages(1).unwrap();
        self.domain.map(pages, direction).unwrap()
    }

    fn offset(ring: u64, entry: u32) -> usize {
        usize::try_from(ring + u64::from(entry) * Nic::DESCRIPTOR_BYTES).unwrap()
    }

    /// Passes descriptor `entry` of the ring to the card.
    fn post(&self, ring: u64, entry: u32, buffer: Iova, len: u32) {
        let (memory, at) = (self.rings.memory(), Self::offset(ring, entry));
        memory.write_u64(at, buffer.raw().to_le()).unwrap();
        memory.write_u32(at + 8, len.to_le()).unwrap();
        memory.store_release_u32(at + 12, Nic::OWNED.to_le()).unwrap();
    }

    /// Returns the length and the flags of a descriptor.
    fn done(&self, ring: u64, entry: u32) -> (u32, u32) {
        let (memory, at) = (self.rings.memory(), Self::offset(ring, entry));
        let flags = u32::from_le(memory.load_acquire_u32(at + 12).unwrap());
        (u32::from_le(memory.read_u32(at + 8).unwrap()), flags)
    }
}

#[test]
fn frames_go_around_the_rings_in_order() {
    let (domain, bus) = domain(SoftConfig::default()).unwrap();
    let (mut driver, mut card) = Driver::new(&domain, &bus);
    let (receive, transmit) = (driver.map(FromDevice), driver.map(ToDevice));
    for round in 0..3 * ENTRIES {
        let entry = round % ENTRIES;
        assert_eq!(card.receive(b"no buffer").unwrap(), NicEvent::NoDescriptor);
        driver.post(0, entry, receive.iova().start(), 4096);
        let frame = [u8::try_from(round).unwrap(); 60];
        assert_eq!(card.receive(&frame).unwrap(), NicEvent::Moved(60));
        assert_eq!(driver.done(0, entry), (60, 0));
        let mut found = [0; 60];
        receive.memory().copy_to_slice(0, &mut found).unwrap();
        assert_eq!(found, frame);
        transmit.memory().copy_from_slice(0, &frame).unwrap();
        driver.post(TRANSMIT, entry, transmit.iova().start(), 60);
        assert_eq!((card.transmit().unwrap(), card.sent()), (NicEvent::Moved(60), &frame[..]));
        assert_eq!((card.transmit().unwrap(), card.sent()), (NicEvent::NoDescriptor, &[][..]));
    }
}

#[test]
fn an_unreachable_buffer_is_a_descriptor_with_a_fault() {
    let (domain, bus) = domain(SoftConfig::default()).unwrap();
    let (mut driver, mut card) = Driver::new(&domain, &bus);
    let read_only = driver.map(ToDevice);
    let start = read_only.iova().start();
    driver.post(0, 0, start, 4096);
    driver.post(0, 1, Iova::new(u64::MAX - 3), 4096);
    driver.post(0, 2, start, 3);
    (0..3).for_each(|_| assert_eq!(card.receive(b"frame").unwrap(), NicEvent::Faulted));
    driver.post(TRANSMIT, 0, start, u32::MAX);
    driver.post(TRANSMIT, 1, start, 4097);
    (0..2).for_each(|_| assert_eq!(card.transmit().unwrap(), NicEvent::Faulted));
    for (ring, entry) in [(0, 0), (0, 1), (0, 2), (TRANSMIT, 0), (TRANSMIT, 1)] {
        assert_eq!(driver.done(ring, entry), (0, Nic::FAULTED), "{ring}, {entry}");
    }
    // The write without permission, the address that wraps, and the page behind the buffer: the
    // rest the card refuses itself.
    assert_eq!(bus.take_faults().records.len(), 3);
    // Without its ring the card cannot say anything.
    drop(driver.rings);
    assert!(card.receive(b"frame").is_err() && card.transmit().is_err());
}

/// Drivers on threads of their own, with flushes that are late: what the card moves is what was
/// mapped for it, and once a buffer has been returned, its descriptor leads nowhere.
#[test]
fn stress_cards_beside_drivers_that_revoke() {
    let (late_by, effect) = (Duration::from_micros(200), Effect::AtRandom);
    let (domain, bus) =
        domain(SoftConfig { late_by, effect, queue_depth: 4, ..SoftConfig::default() }).unwrap();
    std::thread::scope(|scope| {
        for number in 0..4u8 {
            let (domain, bus) = (&domain, &bus);
            scope.spawn(move || {
                let (mut driver, mut card) = Driver::new(domain, bus);
                for round in 0..200u32 {
                    let entry = round % ENTRIES;
                    let frame = [number ^ u8::try_from(round % 251).unwrap(); 64];
                    let (receive, transmit) = (driver.map(FromDevice), driver.map(ToDevice));
                    transmit.memory().copy_from_slice(0, &frame).unwrap();
                    let stale = receive.iova().start();
                    driver.post(TRANSMIT, entry, transmit.iova().start(), 64);
                    driver.post(0, entry, stale, 4096);
                    assert_eq!(card.transmit().unwrap(), NicEvent::Moved(64));
                    let sent = card.sent().to_vec();
                    assert_eq!(card.receive(&sent).unwrap(), NicEvent::Moved(64));
                    let transmit = driver.domain.revoke(transmit);
                    let receive = driver.domain.unmap::<Pages>(receive).unwrap();
                    let mut found = [0; 64];
                    receive.memory().copy_to_slice(0, &mut found).unwrap();
                    assert_eq!(found, frame);
                    // The device keeps the address. Nothing else is mapped there yet: this driver's
                    // window goes on behind it.
                    assert!(is_blocked(&mut driver, &mut card, entry, stale));
                    receive.memory().copy_to_slice(0, &mut found).unwrap();
                    assert_eq!(found, frame, "a device wrote after the buffer was returned");
                    driver.domain.wait(transmit).unwrap();
                }
            });
        }
    });
    assert_eq!(
        (domain.stats().live, domain.stats().windows, domain.stats().quarantined),
        (0, 0, 0)
    );
}

/// Posts the stale address again, and returns whether the card faults on it. The rings go on by a
/// full round.
fn is_blocked(driver: &mut Driver<'_>, card: &mut Nic, entry: u32, stale: Iova) -> bool {
    let mut blocked = true;
    for further in 1..=ENTRIES {
        let entry = (entry + further) % ENTRIES;
        driver.post(0, entry, stale, 4096);
        blocked &= card.receive(&[0xff; 64]).unwrap() == NicEvent::Faulted;
    }
    blocked
}

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
struct Rude(Mutex<Quiesced<Pages>>);

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
