//! A lock that is held for moments.

use crate::sync::{AtomicBool, Ordering, UnsafeCell, relax};
use core::ops::{Deref, DerefMut};

/// A lock whose taking costs one atomic read-modify-write and whose release a plain store, half of what one costs that
/// can wake a sleeper. A thread that finds it taken tries again: at first at once, then after yielding, then (with the
/// feature `std`) after sleeps of 50 µs, so that a holder of lower priority makes progress.
#[derive(Debug)]
pub(super) struct SpinLock<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only by the thread that has set `taken` and not yet cleared it; acquire and release
// order one thread's accesses after the other's.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    pub(super) fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    #[inline(always)]
    pub(super) fn lock(&self) -> Guard<'_, T> {
        if !self.try_take() {
            self.wait();
        }
        #[cfg(all(not(loom), feature = "count-rmw"))]
        crate::sync::count_own_lock();
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

/// The lock, taken until this is dropped.
pub(super) struct Guard<'h, T>(&'h SpinLock<T>);

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the guard has the lock, so nobody else reaches the value as long as the borrow of the guard lasts.
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
        self.0.taken.store(false, Ordering::Release);
    }
}
