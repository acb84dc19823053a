//! A backend and a payload that record what is done with them.

use super::*;
use crate::mem::DmaMemory;
use crate::sync::Mutex;
use core::ptr::NonNull;
use core::task::Waker;
use std::collections::BTreeMap;

/// A backend that is a map from pages to memory, and whose flushes a test completes.
#[derive(Default)]
pub(super) struct Mock {
    pub(super) pages: Mutex<BTreeMap<u64, (usize, Access)>>,
    pub(super) last: AtomicU64,
    pub(super) done: AtomicU64,
    pub(super) flushes: AtomicU64,
    pub(super) refuse_revoke: AtomicBool,
    pub(super) stick: AtomicBool,
    /// Waiting completes what it waits for; else it times out.
    pub(super) obliging: AtomicBool,
    /// The unit has failed for good.
    pub(super) failed: AtomicBool,
    /// Panics instead of mapping or revoking.
    pub(super) panics: AtomicBool,
    pub(super) waits: AtomicU64,
    /// A flush completes while a task begins to wait for it.
    pub(super) completes_at_wake: AtomicBool,
    /// The tasks that wait for a ticket: woken by [`complete`], and by nothing else.
    pub(super) wakers: Mutex<Vec<(Ticket, Waker)>>,
    /// A range whose unmap is refused stays reachable for good.
    pub(super) sticks_for_good: AtomicBool,
    /// Panics instead of registering a waker.
    pub(super) wake_panics: AtomicBool,
    /// The number of further checks that panic.
    pub(super) check_panics: AtomicU64,
    /// Wakes at once, regardless of completions.
    pub(super) wakes_at_once: AtomicBool,
    pub(super) wakes: AtomicU64,
    /// The wait of the last waker: 1 until the deadline, 2 until the flush completes.
    pub(super) until: AtomicU64,
    /// Every incomplete flush is past its deadline.
    pub(super) overdue: AtomicBool,
    /// Ranges revoked.
    pub(super) ranges: AtomicU64,
    /// A wait fails for a reason that is not the flush's.
    pub(super) wait_breaks: AtomicBool,
}

pub(super) fn numbers(iova: IovaRange) -> core::ops::RangeInclusive<u64> {
    iova.start().raw() / 4096..=iova.last().raw() / 4096
}

impl Backend for Mock {
    fn properties(&self) -> Properties {
        Properties::new("mock")
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
        access: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        assert!(!self.panics.load(Ordering::SeqCst), "a backend");
        if self.stick.load(Ordering::SeqCst) {
            let flush = WaitError::TimedOut { ticket: Ticket(1), waited_ns: 0, polls: 0 };
            return Err(BackendError::RollbackIncomplete { iova, flush });
        }
        if memory.len() > 8 * PAGE && self.sticks_for_good.load(Ordering::SeqCst) {
            return Err(BackendError::NotRevoked);
        }
        if memory.len() > 8 * PAGE {
            return Err(BackendError::NotRegistered { addr: memory.addr(), len: memory.len() });
        }
        let mut pages = self.pages.lock();
        for (i, page) in numbers(iova).enumerate() {
            assert!(
                pages.insert(page, (memory.addr() + i * PAGE, access)).is_none(),
                "mapped twice"
            );
        }
        Ok(())
    }
    fn revoke<'w>(
        &self,
        first: Revocation<'w>,
        rest: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        if self.refuse_revoke.load(Ordering::SeqCst) {
            return Err(BackendError::NotRevoked);
        }
        assert!(!self.panics.load(Ordering::SeqCst), "a backend");
        for page in core::iter::once(first)
            .chain(rest)
            .inspect(|_| _ = self.ranges.fetch_add(1, Ordering::SeqCst))
            .flat_map(|one| numbers(one.range))
        {
            assert!(self.pages.lock().remove(&page).is_some(), "not mapped");
        }
        self.flushes.fetch_add(1, Ordering::SeqCst);
        Ok(Ticket(self.last.fetch_add(1, Ordering::SeqCst) + 1))
    }
    fn wait(&self, ticket: Ticket, wait: Wait<'_>) -> Poll<Result<(), BackendError>> {
        match wait {
            Wait::Not => self.check(ticket),
            Wait::Wake(until, waker) => self.wake(ticket, until, waker),
            Wait::ToDeadline | Wait::For(_) => Poll::Ready(self.block(ticket)),
        }
    }
}

impl Mock {
    fn check(&self, ticket: Ticket) -> Poll<Result<(), BackendError>> {
        let left = self.check_panics.load(Ordering::SeqCst);
        self.check_panics.store(left.saturating_sub(1), Ordering::SeqCst);
        assert_eq!(left, 0, "a backend");
        if self.done.load(Ordering::SeqCst) >= ticket.0 {
            return Poll::Ready(Ok(()));
        }
        match self.failed.load(Ordering::SeqCst) {
            true => Poll::Ready(Err(WaitError::UnitFailed { ticket }.into())),
            false if self.overdue.load(Ordering::SeqCst) => {
                Poll::Ready(Err(WaitError::TimedOut { ticket, waited_ns: 0, polls: 0 }.into()))
            }
            false => Poll::Pending,
        }
    }

    fn block(&self, ticket: Ticket) -> Result<(), BackendError> {
        self.waits.fetch_add(1, Ordering::SeqCst);
        if self.wait_breaks.load(Ordering::SeqCst) {
            return Err(BackendError::NoTranslation);
        }
        if self.obliging.load(Ordering::SeqCst) && !self.failed.load(Ordering::SeqCst) {
            self.done.fetch_max(ticket.0, Ordering::SeqCst);
        }
        let flush = WaitError::TimedOut { ticket, waited_ns: 0, polls: 0 };
        match self.check(ticket) {
            Poll::Ready(result) => result,
            Poll::Pending => Err(flush.into()),
        }
    }

    fn wake(&self, ticket: Ticket, until: Until, waker: &Waker) -> Poll<Result<(), BackendError>> {
        let check = || match self.check(ticket) {
            Poll::Ready(Err(error))
                if until == Until::Completion && error.late_ticket().is_some() =>
            {
                Poll::Pending
            }
            checked => checked,
        };
        if check().is_ready() {
            return check();
        }
        self.until.store(1 + u64::from(until == Until::Completion), Ordering::SeqCst);
        self.wakes.fetch_add(1, Ordering::SeqCst);
        assert!(!self.wake_panics.load(Ordering::SeqCst), "a backend");
        if self.completes_at_wake.load(Ordering::SeqCst) {
            self.done.fetch_max(ticket.0, Ordering::SeqCst);
        }
        if self.wakes_at_once.load(Ordering::SeqCst) {
            waker.wake_by_ref();
        } else {
            self.wakers.lock().push((ticket, waker.clone()));
        }
        check()
    }
}

/// Completes the flushes up to `ticket`, and wakes the tasks that wait for them.
pub(super) fn complete(mock: &Mock, ticket: Ticket) {
    mock.done.fetch_max(ticket.0, Ordering::SeqCst);
    let mut due = Vec::new();
    mock.wakers.lock().retain(|(awaited, waker)| {
        let is_due = *awaited <= ticket;
        if is_due {
            due.push(waker.clone());
        }
        !is_due
    });
    due.into_iter().for_each(Waker::wake);
}

/// Pinned memory that counts its drops.
#[derive(Debug)]
pub(super) struct Buf {
    pub(super) base: NonNull<u8>,
    pub(super) layout: core::alloc::Layout,
    pub(super) fixed: Option<(DomainId, Iova)>,
    pub(super) drops: Arc<AtomicUsize>,
}

// SAFETY: only `memory()` reaches the bytes.
unsafe impl Send for Buf {}
// SAFETY: the memory is allocated in `new`, owned, and freed on drop; no reference into it is made.
unsafe impl Pinned for Buf {
    fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: see above.
        unsafe { DmaMemory::from_raw(self.base, self.layout.size()) }
    }
    fn fixed_iova(&self, domain: DomainId) -> Option<Iova> {
        self.fixed.filter(|(fixed, _)| *fixed == domain).map(|(_, iova)| iova)
    }
}

impl Buf {
    pub(super) fn new(pages: usize, drops: &Arc<AtomicUsize>) -> Self {
        Self::aligned(pages, PAGE, drops)
    }

    pub(super) fn aligned(pages: usize, align: usize, drops: &Arc<AtomicUsize>) -> Self {
        let layout = core::alloc::Layout::from_size_align(pages * PAGE, align).unwrap();
        // SAFETY: the tests ask for at least one page.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
        Self { base, layout, fixed: None, drops: Arc::clone(drops) }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::SeqCst);
        // SAFETY: from `alloc_zeroed` with this layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

pub(super) fn domain() -> (Arc<Mock>, Domain, Arc<AtomicUsize>) {
    let mock = Arc::new(Mock::default());
    let domain = Domain::new(mock.clone(), IovaSpace::new(39).unwrap());
    (mock, domain, Arc::default())
}
