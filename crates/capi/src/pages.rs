//! Page pools: pages that stay mapped for the device while they are recycled.

use crate::arena::{ARENAS, pf_arena_t};
use crate::block::{Addresses, Returned, free_each, pf_block_t, read_block, write_block};
use crate::failure::{Failure, brief_call, call, check_out, count, fail, store};
use crate::handle::Table;
use crate::source::Marked;
use crate::trace::{Caller, Site, hook, pass_caller, pf_event_kind};
use pinfold::Iova;
use pinfold::core::frame::Order;
use pinfold::page_pool::{
    Config, Counts, CreateError, FreeError, PagePool, PagePoolStats, RawPage, Remote,
};
use std::ffi::{c_int, c_uint};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// A pool of pages. Calls of its consumer and of other threads use it at the same time.
pub struct pf_pages_t {
    /// Locked by one call at a time; a second one of a consumer is refused.
    consumer: Mutex<PagePool>,
    /// Locked before `consumer` by calls that only read it, for which a consumer's waits.
    observers: Mutex<()>,
    remote: Remote,
    source: Arc<Marked>,
    page_bytes: u32,
}

pub(crate) static PAGES: Table<pf_pages_t> = Table::new(6, "page pool");

/// The number of pages moved between the caller's array and the pool at once.
const BATCH: usize = 64;

/// Pages of a ring, where the caller names none.
const RING: u32 = 1024;

/// Creates a pool of pages for a receive path: the devices of the arena's first domain read and
/// write a page from when it is first allocated on, also while it is free.
///
/// @arena: the source of its memory, which is taken as needed.
/// @page_bytes: 4096 times a power of two, up to 2 MiB.
/// @ring: how many pages other threads can return before the consumer takes them, a power of two up
/// to 1,048,576; 0: 1024. More are returned all the same, by a slower way.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EINVAL (`page_bytes`, `ring`); ENOMEM (8 bytes for each page of the ring,
/// and for each 2 MiB of the arena); EBADF; EFAULT; ENFILE.
/// Thread: any. Allocates. Ends with pf_pages_destroy(), and the arena not before. Since 0.2.
///
/// # Safety
/// `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_pages_create(
    arena: *mut pf_arena_t,
    page_bytes: c_uint,
    ring: c_uint,
    out: *mut *mut pf_pages_t,
) -> c_int {
    call(|| {
        check_out(out, "out")?;
        let source = Marked::new(&*ARENAS.get(arena)?);
        let order = Order::for_bytes(page_bytes.into())
            .filter(|order| u64::from(order.frames()) * 4096 == u64::from(page_bytes))
            .filter(|&order| order <= Order::HUGE);
        let Some(order) = order else {
            return Err(fail!(
                EINVAL,
                "pages of {page_bytes} bytes: pass 4096 times a power of two, at most {}",
                2 << 20
            ));
        };
        let ring = if ring == 0 { RING } else { ring };
        let config = Config { order, ring, ..Config::default() };
        let pool = PagePool::new(Arc::clone(&source), "pages", config)
            .map_err(|error: CreateError| Failure::from(&error))?;
        let remote = pool.remote();
        let (consumer, observers) = (Mutex::new(pool), Mutex::default());
        let handle =
            PAGES.insert(pf_pages_t { consumer, observers, remote, source, page_bytes })?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// Ends a pool of pages: its memory goes back to the arena.
///
/// @pages: the pool; NULL does nothing.
///
/// Return: 0, or -errno: EBUSY (pages are in use: the message says how many; a mapping or a request
/// uses one; or another thread is in a call with it); EBADF. The pool is as before then.
/// Thread: any. Takes time proportional to the chunks, and to the pages where a mapping or a request
/// uses memory of the arena's pools. Calls of other threads with the pool are not refused for it.
/// Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_pages_destroy(pages: *mut pf_pages_t) -> c_int {
    call(|| {
        if pages.is_null() {
            return Ok(0);
        }
        // Most that are refused are so here, where no other thread waits for it.
        PAGES.get(pages)?.check_unused()?;
        drop(PAGES.remove(pages, |pages| pages.check_unused())?);
        Ok(0)
    })
}

/// Allocates a page for each slot whose `va` is NULL, until pages run out. Other slots stay as they
/// are. The content is what the last user left.
///
/// @pages: the pool.
/// @slots: the slots; their tags stay.
/// @n: how many; at most INT_MAX.
///
/// Return: how many slots are full now; or -errno: EINVAL (`n`); EFAULT; EBADF; EBUSY (another
/// thread is the pool's consumer in a call).
/// Thread: the consumer's. Allocates when the pool takes more memory: 16 bytes for each page,
/// without which it takes none. Ownership: the caller's, until pf_pages_recycle() or
/// pf_pages_return(). Since 0.2.
///
/// # Safety
/// `slots` is null or `n` blocks that can be read and written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_pages_fill(
    pages: *mut pf_pages_t,
    slots: *mut pf_block_t,
    n: c_uint,
) -> c_int {
    pass_caller!(3, fill_slots);
}

unsafe extern "C" fn fill_slots(
    handle: *mut pf_pages_t,
    slots: *mut pf_block_t,
    n: c_uint,
    caller: Caller,
) -> c_int {
    brief_call(|| {
        let pages = PAGES.get(handle)?;
        let mut consumer = pages.lock()?;
        let (n, hook) = (count(n, slots, "slots")?, hook());
        let slot = |index| slots.wrapping_add(index);
        // SAFETY: one of the `n` slots of the caller, here and below.
        let is_empty = |index: usize| unsafe { read_block(slot(index)) }.va.is_null();
        let (mut missing, mut first) = (0, 0);
        while first < n {
            let end = n.min(first + BATCH);
            let wanted = (first..end).filter(|&index| is_empty(index)).count();
            let mut taken = [None; BATCH];
            let taken = taken.get_mut(..wanted).unwrap_or_default();
            let filled = if missing > 0 { 0 } else { consumer.fill_raw(taken) };
            let mut new = taken.iter().flatten();
            for index in first..end {
                if !is_empty(index) {
                    continue;
                }
                let Some(page) = new.next() else { break };
                let page = Addresses { va: page.as_ptr().as_ptr(), iova: page.iova().raw() };
                // SAFETY: one of the slots.
                unsafe { write_block(slot(index), page, pages.page_bytes) };
                if let Some(hook) = hook {
                    let (kind, len) = (pf_event_kind::PF_EVENT_ALLOC, pages.page_bytes.into());
                    hook.report(kind, page.va, page.iova, len, Site::new(caller, handle));
                }
            }
            missing += wanted - filled;
            first = end;
        }
        // At most `n`, which a `c_int` holds.
        Ok(c_int::try_from(n - missing).unwrap_or(c_int::MAX))
    })
}

/// Returns pages to the pool, on the consumer's thread: the fast way.
///
/// @pages: the pool.
/// @blocks: the pages: the two addresses as they were returned. `va` NULL is skipped.
/// @n: how many.
/// @bad: where the index of the page is stored that was refused; NULL: not needed.
///
/// Return: 0; or -errno: EINVAL (it is free already, of another pool, not where a page begins, or
/// its addresses do not belong together) or EBUSY (a mapping or a request uses it): those before
/// `*bad` are returned, it and those behind it are as before. EBUSY without `*bad` where another
/// thread is the pool's consumer in a call. EFAULT; EBADF.
/// Thread: the consumer's. Allocates where it is refused: its message. Since 0.2.
///
/// # Safety
/// `blocks` is null or `n` blocks that can be read; `bad` is null or can be written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_pages_recycle(
    pages: *mut pf_pages_t,
    blocks: *const pf_block_t,
    n: c_uint,
    bad: *mut c_uint,
) -> c_int {
    pass_caller!(4, recycle);
}

unsafe extern "C" fn recycle(
    handle: *mut pf_pages_t,
    blocks: *const pf_block_t,
    n: c_uint,
    bad: *mut c_uint,
    caller: Caller,
) -> c_int {
    brief_call(|| {
        let pages = PAGES.get(handle)?;
        let mut consumer = pages.lock()?;
        let free = |page| consumer.free_raw(page);
        // SAFETY: as the caller promises.
        unsafe { pages.give_back((blocks, n, bad), free, Site::new(caller, handle)) }
    })
}

/// Returns pages to the pool, on any thread, also while the consumer is in a call.
///
/// @pages: the pool.
/// @blocks: the pages: the two addresses as they were returned. `va` NULL is skipped.
/// @n: how many.
/// @bad: where the index of the page is stored that was refused; NULL: not needed.
///
/// Return: 0, or -errno as for pf_pages_recycle(), but EBUSY only with `*bad`. One misuse is not
/// reported: two threads that return one page in the same instant. It is returned once.
/// Thread: any. Allocates where it is refused: its message. The event of the return may come after
/// that of the page's next use. Since 0.2.
///
/// # Safety
/// `blocks` is null or `n` blocks that can be read; `bad` is null or can be written.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn pf_pages_return(
    pages: *mut pf_pages_t,
    blocks: *const pf_block_t,
    n: c_uint,
    bad: *mut c_uint,
) -> c_int {
    pass_caller!(4, return_pages);
}

unsafe extern "C" fn return_pages(
    handle: *mut pf_pages_t,
    blocks: *const pf_block_t,
    n: c_uint,
    bad: *mut c_uint,
    caller: Caller,
) -> c_int {
    brief_call(|| {
        let pages = PAGES.get(handle)?;
        let free = |page| pages.remote.free_raw(page);
        // SAFETY: as the caller promises.
        unsafe { pages.give_back((blocks, n, bad), free, Site::new(caller, handle)) }
    })
}

impl pf_pages_t {
    /// Returns where the pages are, and the kernel's counters.
    ///
    /// # Errors
    /// `EBUSY`: a consumer is in a call.
    pub(crate) fn stats(&self) -> Result<(PagePoolStats, Counts), Failure> {
        let _observing = self.observe();
        let consumer = self.try_lock().ok_or_else(in_a_call)?;
        Ok((consumer.stats(), consumer.counts()))
    }

    /// Refuses while pages are in use, or a device uses memory of the pool.
    fn check_unused(&self) -> Result<(), Failure> {
        let in_use = self.stats()?.0.in_use;
        if in_use > 0 {
            return Err(fail!(
                EBUSY,
                "{in_use} pages are in use: return them with pf_pages_recycle or pf_pages_return first"
            ));
        }
        self.source.check_unused()
    }

    fn observe(&self) -> MutexGuard<'_, ()> {
        self.observers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, PagePool>> {
        match self.consumer.try_lock() {
            Ok(consumer) => Some(consumer),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns the consumer's side, for one call at a time.
    ///
    /// # Errors
    /// `EBUSY`: another consumer is in a call.
    #[inline]
    fn lock(&self) -> Result<MutexGuard<'_, PagePool>, Failure> {
        match self.try_lock() {
            Some(consumer) => Ok(consumer),
            None => self.lock_after_observers(),
        }
    }

    #[cold]
    fn lock_after_observers(&self) -> Result<MutexGuard<'_, PagePool>, Failure> {
        // Until this is dropped, what has the pool is a consumer.
        let _observing = self.observe();
        self.try_lock().ok_or_else(in_a_call)
    }

    /// Returns the caller's pages by `free`, until one is refused.
    ///
    /// # Safety
    /// As for [`free_each`].
    unsafe fn give_back(
        &self,
        returned: Returned,
        mut free: impl FnMut(RawPage) -> Result<(), FreeError>,
        site: Site,
    ) -> Result<c_int, Failure> {
        let (hook, len) = (hook(), self.page_bytes);
        let free = |page: Addresses| {
            let Some(va) = NonNull::new(page.va) else { return Ok(()) };
            self.source.region().check_unused(va.addr().get(), len as usize)?;
            let raw = RawPage::from_parts(va, Iova::new(page.iova));
            free(raw).map_err(|error| refused(&error))?;
            if let Some(hook) = hook {
                hook.report(pf_event_kind::PF_EVENT_FREE, page.va, page.iova, len.into(), site);
            }
            Ok(())
        };
        // SAFETY: as the caller promises.
        unsafe { free_each(returned, "page", free) }
    }
}

#[cold]
fn in_a_call() -> Failure {
    fail!(
        EBUSY,
        "another thread is in a call with this page pool: one thread fills and recycles, others use \
         pf_pages_return"
    )
}

/// Why a page is not returned, in the terms of C.
#[cold]
fn refused(error: &FreeError) -> Failure {
    match error {
        FreeError::Foreign { addr, .. } => {
            fail!(EINVAL, "{addr:#x} is in no page of this pool: pass the pool that allocated it")
        }
        other => Failure::from(other),
    }
}
