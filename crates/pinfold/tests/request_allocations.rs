//! The request loop allocates nothing once it is created, counted at the global allocator, on the
//! thread that uses it.

#![expect(clippy::unwrap_used, reason = "a test")]

use pinfold::requests::{Ended, Limits, Policy, Requests};
use pinfold::soft::SoftConfig;
use pinfold::{Access, Arena, Domain, MappingPolicy, Source};
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{
    Backend, BackendError, Domain as Core, DomainId, Pinned, Properties, Revocation, Wait,
    WindowToken,
};
use pinfold_core::invalidate::Ticket;
use pinfold_core::iova::IovaSpace;
use pinfold_core::mem::DmaMemory;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A unit whose flushes complete when the test says so, or when they are waited for.
#[derive(Default)]
struct Unit {
    requested: AtomicU64,
    completed: AtomicU64,
}

impl Unit {
    fn complete(&self) {
        self.completed.store(self.requested.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

struct OfUnit(Arc<Unit>);

impl Backend for OfUnit {
    fn properties(&self) -> Properties {
        Properties::new("counted")
    }
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn map(
        &self,
        _: IovaRange,
        _: DmaMemory,
        _: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        Ok(())
    }
    fn revoke<'w>(
        &self,
        _: Revocation<'w>,
        rest: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        rest.for_each(drop);
        Ok(Ticket(self.0.requested.fetch_add(1, Ordering::Relaxed) + 1))
    }
    fn wait(&self, ticket: Ticket, wait: Wait<'_>) -> Poll<Result<(), BackendError>> {
        if matches!(wait, Wait::ToDeadline | Wait::For(_)) {
            self.0.complete();
        }
        match ticket.0 <= self.0.completed.load(Ordering::Relaxed) {
            true => Poll::Ready(Ok(())),
            false => Poll::Pending,
        }
    }
}

const BYTES: usize = 8192;

/// Pages that are never freed.
struct Pages {
    start: NonNull<u8>,
    /// The address at which they stay mapped for their lifetime.
    fixed: Option<Iova>,
}

impl Pages {
    fn new(domain: &Core, stay_mapped: bool) -> Self {
        let layout = Layout::from_size_align(BYTES, 4096).unwrap();
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { System.alloc_zeroed(layout) }).unwrap();
        let mut pages = Self { start, fixed: None };
        if stay_mapped {
            // SAFETY: the memory is never freed, and nothing refers into it.
            let mapped = unsafe { domain.map_static(pages.memory(), Access::all()) }.unwrap();
            // Dropped, it stays mapped.
            pages.fixed = Some(mapped.iova().start());
        }
        pages
    }
}

// SAFETY: the memory is the value's own.
unsafe impl Send for Pages {}
// SAFETY: the memory is never freed and does not move, and nothing refers into it. It is mapped for
// its lifetime where it says so.
unsafe impl Pinned for Pages {
    fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: as for the trait.
        unsafe { DmaMemory::from_raw(self.start, BYTES) }
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        self.fixed
    }
}

const HOUR: Duration = Duration::from_secs(3600);
const DEPTH: usize = 4;
/// One request at a time of three payloads goes through several windows of addresses.
const ROUNDS: usize = 200;
const ALL: [Policy; 4] = [Policy::Static, Policy::Strict, Policy::Revoke, Policy::Batch];

/// The way a driver uses its loop.
#[derive(Clone, Copy, Debug)]
enum Driver {
    /// Keeps tokens.
    Tokens,
    /// Is lent the payloads.
    Lent,
    /// Loses each request before it completes.
    Loses,
    /// Finds that its device refuses each request.
    Refused,
    /// Waits, and sleeps on the descriptor.
    Sleeps,
}

const DRIVERS: [Driver; 5] =
    [Driver::Tokens, Driver::Lent, Driver::Loses, Driver::Refused, Driver::Sleeps];

/// A loop of requests of `M` payloads, the payloads that are free, and what has ended.
struct Driven<P: Pinned, const M: usize> {
    requests: Requests<P, 3>,
    free: Vec<P>,
    ended: Vec<Ended<P, 3>>,
}

impl<P: Pinned, const M: usize> Driven<P, M> {
    fn new(domain: &Core, policy: Policy, new: impl Fn() -> P) -> Self {
        let limits = Limits { flush: HOUR, ..Limits::default() };
        let requests = Requests::new(domain, policy, DEPTH, limits).unwrap();
        let free = (0..DEPTH * M).map(|_| new()).collect();
        Self { requests, free, ended: Vec::with_capacity(DEPTH) }
    }

    /// Begins `count` requests, and ends them.
    fn submit(&mut self, driver: Driver, count: usize) {
        for number in 0..count {
            let access = [Access::READ, Access::WRITE, Access::all()];
            let payloads: [(P, Access); M] = std::array::from_fn(|payload| {
                (self.free.pop().unwrap(), access[(number + payload) % access.len()])
            });
            if let Driver::Lent = driver {
                let lent = self.requests.begin_lent(payloads).unwrap();
                self.requests.completed_lent(lent).unwrap();
                continue;
            }
            let token = self.requests.begin(payloads).unwrap();
            assert_eq!(self.requests.segments(token).unwrap().count(), M);
            match driver {
                Driver::Refused => {
                    self.ended.push(self.requests.refused(token).unwrap());
                    continue;
                }
                Driver::Loses => self.requests.lost(token).unwrap(),
                Driver::Tokens | Driver::Lent | Driver::Sleeps => {}
            }
            self.requests.completed(token).unwrap();
        }
    }

    /// Takes the payloads of `count` requests back.
    fn collect(&mut self, driver: Driver, count: usize, complete: impl Fn()) {
        loop {
            match driver {
                Driver::Sleeps => {
                    let _descriptor = self.requests.arm().unwrap();
                    self.requests.wait(HOUR, &mut self.ended);
                }
                _ => self.requests.poll(&mut self.ended),
            }
            if self.ended.len() == count {
                break;
            }
            complete();
        }
        for ended in self.ended.drain(..) {
            self.free.extend(ended.payloads.into_iter().flatten());
        }
        assert_eq!(self.free.len(), DEPTH * M);
    }

    /// Returns how many allocations `rounds` of `count` requests make.
    fn allocations(
        &mut self,
        driver: Driver,
        count: usize,
        rounds: usize,
        complete: impl Fn(),
    ) -> u64 {
        let before = ALLOCATIONS.get();
        for _ in 0..rounds {
            self.submit(driver, count);
            self.collect(driver, count, &complete);
        }
        ALLOCATIONS.get() - before
    }
}

/// Counts each driver, with each policy, over a unit whose flushes are completed by hand.
fn by_hand<const M: usize>() {
    for policy in ALL {
        for driver in DRIVERS {
            let unit = Arc::new(Unit::default());
            let backend = Arc::new(OfUnit(Arc::clone(&unit)));
            let domain = Core::new(backend, IovaSpace::new(39).unwrap());
            let pages = || Pages::new(&domain, policy == Policy::Static);
            let mut driven = Driven::<_, M>::new(&domain, policy, pages);
            // The windows that it goes round in, and the descriptor.
            if policy != Policy::Static || matches!(driver, Driver::Sleeps) {
                driven.allocations(driver, DEPTH, ROUNDS, || unit.complete());
            }
            let counted = driven.allocations(driver, DEPTH, ROUNDS, || unit.complete());
            assert_eq!(counted, 0, "{policy:?}, {driver:?}, {M} payloads");
            let flushes = unit.requested.load(Ordering::Relaxed);
            assert_eq!(flushes > 0, policy != Policy::Static && M > 0, "{policy:?}, {driver:?}");
        }
    }
}

#[test]
fn requests_allocate_nothing() {
    by_hand::<0>();
    by_hand::<1>();
    by_hand::<2>();
    by_hand::<3>();
}

/// The same with a table and an invalidation queue: one request at a time, so that what the model
/// of the unit allocates as its queue grows does not depend on time.
#[test]
fn requests_allocate_nothing_below_the_loop() {
    for policy in ALL {
        let domain = Domain::soft_with(SoftConfig::default()).unwrap();
        let mapping = match policy {
            Policy::Static => MappingPolicy::Whole,
            _ => MappingPolicy::PerUse,
        };
        let arena = Arena::builder().size(1 << 20).source(Source::Plain).mapping_policy(mapping);
        let arena = arena.build(&domain).unwrap();
        let buffer = || arena.alloc(BYTES).unwrap();
        let mut driven = Driven::<_, 3>::new(&domain, policy, buffer);
        driven.allocations(Driver::Tokens, 1, ROUNDS, std::thread::yield_now);
        let counted = driven.allocations(Driver::Tokens, 1, ROUNDS, std::thread::yield_now);
        assert_eq!(counted, 0, "{policy:?}");
    }
}

/// It counts: the vector of the caller has to grow.
#[test]
fn an_allocation_is_counted() {
    let domain = Domain::soft().unwrap();
    let arena = Arena::builder().size(1 << 20).source(Source::Plain).build(&domain).unwrap();
    let buffer = || arena.alloc(BYTES).unwrap();
    let mut driven = Driven::<_, 1>::new(&domain, Policy::Batch, buffer);
    driven.allocations(Driver::Tokens, 1, ROUNDS, std::thread::yield_now);
    driven.ended = Vec::new();
    assert_eq!(driven.allocations(Driver::Tokens, 1, 1, std::thread::yield_now), 1);
}
