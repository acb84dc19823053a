//! The lock of all locked baselines: a spin lock like that of a kernel.
//!
//! One read-modify-write acquires it and one plain release store releases it, as with an
//! uncontended queued or ticket lock of a kernel. `std::sync::Mutex` needs a second
//! read-modify-write to release, because a waiter may sleep. While the lock is held, a caller reads
//! until it is free and tries again. A kernel cannot be preempted while it holds a spin lock, but a
//! program can, so a caller that has waited long yields the processor.
#![expect(unsafe_code, reason = "a lock makes its content reachable through a shared reference")]

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// The number of reads of the lock before a caller yields.
const SPINS: u32 = 1 << 10;

/// A spin lock around a value.
#[derive(Debug, Default)]
pub struct KernelLock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a `Guard`, and `held` allows one guard at a time. So
// sharing the lock passes the value from thread to thread, which `T: Send` allows.
unsafe impl<T: Send> Sync for KernelLock<T> {}

impl<T> KernelLock<T> {
    /// Creates a lock that is free.
    pub const fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Acquires the lock; yields the processor after every 1,024 reads that found it held.
    #[inline(always)]
    pub fn lock(&self) -> Guard<'_, T> {
        if self.held.swap(true, Ordering::Acquire) {
            self.wait();
        }
        Guard { lock: self }
    }

    #[cold]
    #[inline(never)]
    fn wait(&self) {
        let mut spins = 0u32;
        loop {
            if self.held.load(Ordering::Relaxed) {
                spins += 1;
                if spins.is_multiple_of(SPINS) {
                    std::thread::yield_now();
                }
                std::hint::spin_loop();
            } else if !self.held.swap(true, Ordering::Acquire) {
                return;
            }
        }
    }
}

/// The lock while it is held.
#[derive(Debug)]
pub struct Guard<'l, T> {
    lock: &'l KernelLock<T>,
}

// SAFETY: a shared guard gives shared references to the value, which `T: Sync` allows.
unsafe impl<T: Sync> Sync for Guard<'_, T> {}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: only the holder of `held` has a guard, and this one borrows it shared.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: only the holder of `held` has a guard, and this one is borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.lock.held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two unsynchronised steps under the lock: with two threads inside at once, increments would
    /// be lost.
    #[test]
    fn one_thread_holds_it_at_a_time() {
        const EACH: u64 = 100_000;
        let lock = KernelLock::new((0u64, 0u64));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..EACH {
                        let mut both = lock.lock();
                        let next = std::hint::black_box(both.0) + 1;
                        both.0 = next;
                        both.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), (3 * EACH, 3 * EACH));
    }

    #[test]
    fn dropping_the_guard_releases_it() {
        let lock = KernelLock::new(1);
        drop(lock.lock());
        assert!(!lock.held.load(Ordering::Relaxed));
        let guard = lock.lock();
        assert!(lock.held.load(Ordering::Relaxed));
        drop(guard);
    }
}
