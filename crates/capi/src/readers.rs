//! [`Shared`]: a value that each thread reads under a lock of its own, so that readers share nothing,
//! and that a writer changes with all of these locks held.

use std::cell::UnsafeCell;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A value with any number of [`Reader`]s.
pub(crate) struct Shared<T> {
    value: UnsafeCell<T>,
    /// The locks of all readers.
    locks: Mutex<Vec<Arc<RwLock<()>>>>,
}

// SAFETY: the value is reached by `Reader::read` and `Shared::write` only. The one has the lock of
// its reader shared, the other those of all readers exclusively, and the list of them, so that none
// is added meanwhile: so there are references of readers, for which `T` is `Sync`, or one of a
// writer, for which it is `Send`.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

/// A thread's way to the value. Threads may share one, and with it its lock.
pub(crate) struct Reader<T> {
    shared: Arc<Shared<T>>,
    lock: Arc<RwLock<()>>,
}

impl<T> Shared<T> {
    pub(crate) fn new(value: T) -> Arc<Self> {
        Arc::new(Self { value: UnsafeCell::new(value), locks: Mutex::default() })
    }

    /// Creates a reader. It waits for a writer.
    pub(crate) fn reader(self: &Arc<Self>) -> Reader<T> {
        let lock = Arc::<RwLock<()>>::default();
        self.locks().push(Arc::clone(&lock));
        Reader { shared: Arc::clone(self), lock }
    }

    /// Calls `change` while nothing reads the value. O(readers).
    pub(crate) fn write(&self, mut change: impl FnMut(&mut T)) {
        Self::write_all(&[self], |values| {
            for value in values {
                change(value);
            }
        });
    }

    /// Calls `change` while nothing reads any of the values, which are different ones. Waits for
    /// one after the other: no other thread may do so in another order. O(readers).
    pub(crate) fn write_all<R>(all: &[&Self], change: impl FnOnce(&mut [&mut T]) -> R) -> R {
        let locks: Vec<_> = all.iter().map(|shared| shared.locks()).collect();
        let _held: Vec<_> =
            locks.iter().flat_map(|locks| locks.iter()).map(|lock| exclusive(lock)).collect();
        let value = |shared: &&Self| {
            let value = shared.value.get();
            // SAFETY: all readers' locks are held exclusively, and their list is, until the end of
            // the call: no other reference exists. The lists are locked once each, so that the
            // values are different ones.
            unsafe { &mut *value }
        };
        let mut values: Vec<&mut T> = all.iter().map(value).collect();
        change(&mut values)
    }

    fn locks(&self) -> MutexGuard<'_, Vec<Arc<RwLock<()>>>> {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn exclusive(lock: &RwLock<()>) -> RwLockWriteGuard<'_, ()> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Reader<T> {
    /// Returns the value, which does not change until the guard is dropped.
    #[inline]
    pub(crate) fn read(&self) -> Reading<'_, T> {
        let held = self.lock.read().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the reader's lock is held shared until the guard is dropped, and the reference
        // does not outlive it: no writer has another one.
        Reading { value: unsafe { &*self.shared.value.get() }, _held: held }
    }
}

impl<T> Drop for Reader<T> {
    fn drop(&mut self) {
        self.shared.locks().retain(|lock| !Arc::ptr_eq(lock, &self.lock));
    }
}

#[cfg(test)]
impl<T> Reader<T> {
    /// Takes the reader's lock as a writer does, which keeps no other reader from the value.
    pub(crate) fn stop(&self) -> RwLockWriteGuard<'_, ()> {
        exclusive(&self.lock)
    }
}

/// The value, while it is read.
pub(crate) struct Reading<'r, T> {
    value: &'r T,
    _held: RwLockReadGuard<'r, ()>,
}

impl<T> Deref for Reading<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_reader_waits_for_a_writer_only() {
        let shared = Shared::new(1);
        let (one, two) = (shared.reader(), shared.reader());
        let reading = one.read();
        // Others read beside it, and readers are added.
        assert_eq!((*two.read(), *shared.reader().read()), (1, 1));
        let written = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                shared.write(|value| *value = 2);
                written.store(true, Ordering::Release);
            });
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!written.load(Ordering::Acquire));
            assert_eq!(*reading, 1);
            drop(reading);
        });
        assert_eq!((*one.read(), *two.read()), (2, 2));
        drop(one);
        assert_eq!(shared.locks().len(), 1);
    }

    #[test]
    fn readers_share_no_lock() {
        let shared = Shared::new(1);
        let (one, two) = (shared.reader(), shared.reader());
        let _stopped = one.stop();
        assert_eq!(*two.read(), 1);
    }

    #[test]
    fn stress_readers_see_whole_changes() {
        let shared = Shared::new((0u64, 0u64));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let reader = shared.reader();
                        for _ in 0..100 {
                            let pair = reader.read();
                            assert_eq!(pair.0, pair.1);
                        }
                    }
                });
            }
            for _ in 0..2000 {
                shared.write(|pair| {
                    pair.0 += 1;
                    std::thread::yield_now();
                    pair.1 += 1;
                });
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(shared.reader().read().0, 2000);
    }
}
