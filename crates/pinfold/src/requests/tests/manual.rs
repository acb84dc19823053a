//! A backend whose flushes a test completes, and pages that say whether a device reaches them.

use crate::{DmaMemory, Iova, WaitError};
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use pinfold_core::domain::{
    Backend, BackendError, Domain, DomainId, Pinned, Properties, Revocation, Until, Wait,
    WindowToken,
};
use pinfold_core::invalidate::Ticket;
use pinfold_core::iova::IovaSpace;
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::time::Duration;

/// The state of the unit, and the memory that the device could reach.
#[derive(Default)]
struct Unit {
    /// Keyed by first address: the range, and the address of its memory.
    mapped: BTreeMap<u64, (IovaRange, usize)>,
    in_flight: Vec<(Ticket, IovaRange, usize)>,
    last: u64,
    completed: u64,
    wakers: Vec<(Ticket, Until, Waker)>,
    /// A wait completes what it waits for.
    obliges: bool,
    /// No flush completes any more.
    failed: bool,
    /// All flushes are past their deadline.
    overdue: bool,
    /// Revocations have completed when they return, as where the kernel keeps the table.
    at_once: bool,
    /// Revocations fail.
    refuses: bool,
    /// Revocations panic.
    panics: bool,
    /// Waits panic.
    wait_panics: bool,
    /// The number of waits limited only by the deadline of their flush.
    unlimited_waits: u64,
    /// The limits of the other waits.
    limits: Vec<Duration>,
    /// A wait for what does not complete takes its time.
    is_slow: bool,
}

impl Unit {
    fn check(&self, ticket: Ticket) -> Poll<Result<(), BackendError>> {
        if ticket.0 <= self.completed {
            return Poll::Ready(Ok(()));
        }
        if self.failed {
            return Poll::Ready(Err(WaitError::UnitFailed { ticket }.into()));
        }
        if self.overdue {
            return Poll::Ready(Err(late(ticket)));
        }
        Poll::Pending
    }

    /// Returns those to be woken.
    fn complete(&mut self, up_to: u64) -> Vec<Waker> {
        self.completed = self.completed.max(up_to.min(self.last));
        let done = self.completed;
        self.in_flight.retain(|(ticket, ..)| ticket.0 > done);
        let due = self.wakers.extract_if(.., |(ticket, ..)| ticket.0 <= done);
        due.map(|(.., waker)| waker).collect()
    }
}

fn late(ticket: Ticket) -> BackendError {
    WaitError::TimedOut { ticket, waited_ns: 0, polls: 0 }.into()
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Unit>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Unit> {
        self.0.lock().unwrap()
    }
}

impl Backend for Shared {
    fn properties(&self) -> Properties {
        Properties::new("manual")
    }
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn map(
        &self,
        iova: IovaRange,
        memory: DmaMemory,
        _: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        if memory.len() == 8192 {
            return Err(BackendError::Refused { iova, reason: "two pages".into() });
        }
        self.lock().mapped.insert(iova.start().raw(), (iova, memory.addr()));
        Ok(())
    }
    fn revoke<'w>(
        &self,
        first: Revocation<'w>,
        rest: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        let refuses = self.lock().refuses;
        let panics = self.lock().panics;
        assert!(!panics, "a revocation");
        if refuses {
            return Err(BackendError::NotRevoked);
        }
        let mut unit = self.lock();
        let ticket = Ticket(unit.last + 1);
        for Revocation { range, .. } in std::iter::once(first).chain(rest) {
            let inside = range.start().raw()..range.end().raw();
            let starts: Vec<u64> = unit.mapped.range(inside).map(|(start, _)| *start).collect();
            for start in starts {
                let (iova, addr) = unit.mapped.remove(&start).unwrap();
                if !unit.at_once {
                    unit.in_flight.push((ticket, iova, addr));
                }
            }
        }
        if unit.at_once {
            return Ok(Ticket::COMPLETED);
        }
        unit.last = ticket.0;
        Ok(ticket)
    }
    fn wait(&self, ticket: Ticket, wait: Wait<'_>) -> Poll<Result<(), BackendError>> {
        match wait {
            Wait::Not => self.lock().check(ticket),
            Wait::Wake(until, waker) => self.wake(ticket, until, waker),
            Wait::ToDeadline => Poll::Ready(self.block(ticket, true)),
            Wait::For(limit) => {
                let limit = Duration::from_nanos(limit.time_ns);
                let is_slow = {
                    let mut unit = self.lock();
                    unit.limits.push(limit);
                    unit.is_slow
                };
                if is_slow {
                    std::thread::sleep(limit);
                }
                Poll::Ready(self.block(ticket, false))
            }
        }
    }
}

impl Shared {
    fn block(&self, ticket: Ticket, to_deadline: bool) -> Result<(), BackendError> {
        let panics = self.lock().wait_panics;
        assert!(!panics, "a wait");
        let mut unit = self.lock();
        unit.unlimited_waits += u64::from(to_deadline);
        if unit.obliges {
            let due = unit.complete(ticket.0);
            drop(unit);
            due.into_iter().for_each(Waker::wake);
            unit = self.lock();
        }
        match unit.check(ticket) {
            Poll::Ready(ended) => ended,
            Poll::Pending => Err(late(ticket)),
        }
    }

    fn wake(&self, ticket: Ticket, until: Until, waker: &Waker) -> Poll<Result<(), BackendError>> {
        let mut unit = self.lock();
        match unit.check(ticket) {
            Poll::Ready(Err(error))
                if until == Until::Completion && error.late_ticket().is_some() => {}
            Poll::Pending => {}
            ended => return ended,
        }
        unit.wakers.push((ticket, until, waker.clone()));
        Poll::Pending
    }
}

/// The backend, and its domain.
pub(super) struct Manual {
    unit: Shared,
    pub(super) domain: Domain,
    pages: Arc<AtomicU64>,
}

impl Manual {
    pub(super) fn new() -> Self {
        let unit = Shared::default();
        let domain = Domain::new(Arc::new(unit.clone()), IovaSpace::new(39).unwrap());
        Self { unit, domain, pages: Arc::default() }
    }

    pub(super) fn page(&self) -> Page {
        Page::new(&self.pages, 1)
    }

    /// Returns one that the backend does not map.
    pub(super) fn odd_page(&self) -> Page {
        Page::new(&self.pages, 2)
    }

    /// Returns one that wrongly claims to stay mapped.
    pub(super) fn claiming_page(&self) -> Page {
        let mut page = self.page();
        page.claims = true;
        page
    }

    /// Returns how many pages have not been dropped.
    pub(super) fn pages(&self) -> u64 {
        self.pages.load(Ordering::SeqCst)
    }

    pub(super) fn is_mapped(&self, at: Iova) -> bool {
        self.unit.lock().mapped.values().any(|(iova, _)| iova.contains(at))
    }

    /// Whether a device may reach the page.
    pub(super) fn reaches(&self, page: &Page) -> bool {
        let (unit, addr) = (self.unit.lock(), page.memory().addr());
        unit.mapped.values().any(|(_, mapped)| *mapped == addr)
            || unit.in_flight.iter().any(|(.., mapped)| *mapped == addr)
    }

    pub(super) fn flushes(&self) -> u64 {
        self.unit.lock().last
    }

    /// Completes the first `flushes` that have not been.
    pub(super) fn complete(&self, flushes: u64) {
        let due = {
            let mut unit = self.unit.lock();
            let up_to = unit.completed + flushes;
            unit.complete(up_to)
        };
        due.into_iter().for_each(Waker::wake);
    }

    pub(super) fn complete_all(&self) {
        let due = self.unit.lock().complete(u64::MAX);
        due.into_iter().for_each(Waker::wake);
    }

    /// Completes all, and wakes nothing: so that the next call of the domain releases what it holds.
    pub(super) fn complete_unnoticed(&self) {
        drop(self.unit.lock().complete(u64::MAX));
    }

    /// Fails the unit, and wakes those that wait.
    pub(super) fn fail(&self) {
        let wakers = {
            let mut unit = self.unit.lock();
            unit.failed = true;
            std::mem::take(&mut unit.wakers)
        };
        wakers.into_iter().for_each(|(.., waker)| waker.wake());
    }

    /// Makes waits complete the flushes that they wait for.
    pub(super) fn oblige(&self) {
        self.unit.lock().obliges = true;
    }

    pub(super) fn complete_at_once(&self) {
        self.unit.lock().at_once = true;
    }

    pub(super) fn set_overdue(&self) {
        self.unit.lock().overdue = true;
    }

    pub(super) fn refuse(&self, refuses: bool) {
        self.unit.lock().refuses = refuses;
    }

    pub(super) fn panic(&self, panics: bool) {
        self.unit.lock().panics = panics;
    }

    pub(super) fn panic_in_wait(&self, panics: bool) {
        self.unit.lock().wait_panics = panics;
    }

    pub(super) fn unlimited_waits(&self) -> u64 {
        self.unit.lock().unlimited_waits
    }

    /// Has each wait with a limit take as long as that.
    pub(super) fn slow_down(&self) {
        self.unit.lock().is_slow = true;
    }

    /// Returns the limits of all waits that had one.
    pub(super) fn limits(&self) -> Vec<Duration> {
        self.unit.lock().limits.clone()
    }

    /// Leaves a page with the domain until its flush completes, whose drop then panics.
    pub(super) fn leave_rude_page(&self) {
        let mut page = self.page();
        page.is_rude = true;
        let mapping = self.domain.map(page, crate::FromDevice).unwrap();
        drop(mapping.revoke().quiesced());
    }
}

/// Memory of its own, which counts.
#[derive(Debug)]
pub(super) struct Page {
    start: NonNull<u8>,
    pages: usize,
    left: Arc<AtomicU64>,
    /// Whether its drop panics.
    is_rude: bool,
    /// Whether it claims to stay mapped in any domain.
    claims: bool,
}

impl Page {
    fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * 4096, 4096).unwrap()
    }

    fn new(left: &Arc<AtomicU64>, pages: usize) -> Self {
        // SAFETY: at least one page is asked for.
        let start = unsafe { std::alloc::alloc_zeroed(Self::layout(pages)) };
        left.fetch_add(1, Ordering::SeqCst);
        let start = NonNull::new(start).unwrap();
        Self { start, pages, left: Arc::clone(left), is_rude: false, claims: false }
    }

    /// Tells pages apart.
    pub(super) fn number(&self) -> usize {
        self.start.as_ptr().addr()
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.left.fetch_sub(1, Ordering::SeqCst);
        // SAFETY: from `new`, with this layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), Self::layout(self.pages)) };
        assert!(!self.is_rude, "a payload's drop");
    }
}

// SAFETY: the memory is the value's own.
unsafe impl Send for Page {}
// SAFETY: the memory is the value's own until its drop, does not move, and nothing refers into it.
unsafe impl Pinned for Page {
    fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: as for the trait.
        unsafe { DmaMemory::from_raw(self.start, self.pages * 4096) }
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        self.claims.then_some(Iova::new(0))
    }
}
