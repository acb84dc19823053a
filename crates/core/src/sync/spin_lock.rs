//! [`SpinLock`]: a lock that is mostly held for a few instructions, and never while a source, a
//! backend or a queue is called.
//!
//! It is held longer for a list of requests to an invalidator (16 appends, one of which may sort
//! the 256 requests of a full batch), for a move of up to 128 idle windows, and in the front of a
//! DMA pool: for an exchange at the depot, or a look through its chunks to explain a refused free,
//! both under the depot's [`Mutex`](super::Mutex); for filling a block in debug mode; and for
//! counting the blocks in use when the last handle is dropped.

use super::{AtomicBool, Ordering, UnsafeCell, relax};
use core::ops::{Deref, DerefMut};

/// A lock that costs one atomic read-modify-write to acquire and a plain store to release, half the
/// cost of one that can wake a sleeper. A waiting thread spins, then backs off by `relax`, so that
/// a holder of lower priority makes progress.
#[derive(Debug)]
pub(crate) struct SpinLock<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is accessed only by the thread that has set `taken` and not yet cleared it;
// acquire and release order one thread's accesses after the other's.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    #[inline(always)]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        if !self.try_take() {
            self.wait();
        }
        #[cfg(all(not(loom), feature = "count-rmw"))]
        super::counting::count_own_lock();
        Guard(self)
    }

    #[inline(always)]
    fn try_take(&self) -> bool {
        self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[cold]
    fn wait(&self) {
        let mut round = 0;
        loop {
            relax(round);
            round = round.saturating_add(1);
            if !self.taken.load(Ordering::Relaxed) && self.try_take() {
                return;
            }
        }
    }
}

/// Holds the lock until it is dropped.
pub(crate) struct Guard<'h, T>(&'h SpinLock<T>);

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the guard has the lock, so no other thread accesses the value while the guard is
        // borrowed.
        self.0.value.with(|value| unsafe { &*value })
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed mutably.
        self.0.value.with_mut(|value| unsafe { &mut *value })
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        #[cfg(all(not(loom), feature = "count-rmw"))]
        super::counting::end_hold();
        self.0.taken.store(false, Ordering::Release);
    }
}
