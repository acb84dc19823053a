//! Atomics and locks that count read-modify-writes per thread.
//!
//! Failed compare-and-swaps count too, and so do sequentially consistent stores, which are an `xchg` on x86-64. A lock counts
//! once as a lock and [`LOCK_RMWS`] times as a read-modify-write; those of waiting for a held lock are not counted.

use core::cell::Cell;
use core::sync::atomic::{self, Ordering};

std::thread_local! {
    static RMW: Cell<u64> = const { Cell::new(0) };
    static LOCKS: Cell<u64> = const { Cell::new(0) };
}

/// The read-modify-writes of an uncontended `std::sync::Mutex`: a compare-and-swap locks it, and a swap unlocks it, because
/// a waiter may have to be woken. (This feature implies `std`. `spin::Mutex` unlocks by a store.)
const LOCK_RMWS: u64 = 2;

fn count() {
    RMW.with(|c| c.set(c.get() + 1));
}

/// Counts an acquisition of a lock, its release included.
pub(super) fn count_lock() {
    RMW.with(|c| c.set(c.get() + LOCK_RMWS));
    LOCKS.with(|c| c.set(c.get() + 1));
}

/// Counts an acquisition of a lock made of these atomics, whose read-modify-writes are counted as they are made.
pub(crate) fn count_own_lock() {
    LOCKS.with(|c| c.set(c.get() + 1));
}

/// Returns how many read-modify-writes this thread has made since [`rmw_reset`], those of locks included.
pub fn rmw_count() -> u64 {
    RMW.with(Cell::get)
}

/// Returns how many locks this thread has taken since [`rmw_reset`].
pub fn lock_count() -> u64 {
    LOCKS.with(Cell::get)
}

/// Sets this thread's counts back to 0.
pub fn rmw_reset() {
    RMW.with(|c| c.set(0));
    LOCKS.with(|c| c.set(0));
}

macro_rules! counting {
    ($($name:ident $value:ty { $($op:ident),* };)*) => {$(
        #[derive(Debug, Default)]
        pub(crate) struct $name(atomic::$name);

        #[allow(dead_code, reason = "the interface of the real atomic, used or not")]
        impl $name {
            pub(crate) const fn new(value: $value) -> Self {
                Self(atomic::$name::new(value))
            }
            #[inline]
            pub(crate) fn load(&self, order: Ordering) -> $value {
                self.0.load(order)
            }
            #[inline]
            pub(crate) fn store(&self, value: $value, order: Ordering) {
                if order == Ordering::SeqCst {
                    count();
                }
                self.0.store(value, order);
            }
            #[inline]
            pub(crate) fn compare_exchange(
                &self, old: $value, new: $value, ok: Ordering, err: Ordering,
            ) -> Result<$value, $value> {
                count();
                self.0.compare_exchange(old, new, ok, err)
            }
            #[inline]
            pub(crate) fn compare_exchange_weak(
                &self, old: $value, new: $value, ok: Ordering, err: Ordering,
            ) -> Result<$value, $value> {
                count();
                self.0.compare_exchange_weak(old, new, ok, err)
            }
            $(
                #[inline]
                pub(crate) fn $op(&self, value: $value, order: Ordering) -> $value {
                    count();
                    self.0.$op(value, order)
                }
            )*
        }
    )*};
}

counting! {
    AtomicBool bool { swap, fetch_or, fetch_and };
    AtomicU8 u8 { swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max };
    AtomicU32 u32 { swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max };
    AtomicU64 u64 { swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Mutex;

    #[test]
    fn a_lock_is_counted_as_one_and_by_its_read_modify_writes() {
        let lock = Mutex::new(0);
        rmw_reset();
        *lock.lock() += 1;
        assert_eq!((lock_count(), rmw_count()), (1, LOCK_RMWS));
        *lock.lock() += 1;
        assert_eq!((lock_count(), rmw_count()), (2, 2 * LOCK_RMWS));
        rmw_reset();
        assert_eq!((lock_count(), rmw_count()), (0, 0));
    }

    #[test]
    fn a_sequentially_consistent_store_counts_as_an_exchange() {
        let word = AtomicU64::new(0);
        rmw_reset();
        word.store(1, Ordering::Relaxed);
        word.store(2, Ordering::Release);
        assert_eq!((word.load(Ordering::SeqCst), rmw_count()), (2, 0));
        word.store(3, Ordering::SeqCst);
        assert_eq!((rmw_count(), lock_count()), (1, 0));
    }
}
