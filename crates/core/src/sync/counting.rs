//! Atomics and locks that count read-modify-writes per thread.
//!
//! Failed compare-and-swaps count too, and so do sequentially consistent stores, which are an
//! `xchg` on x86-64. A lock counts once as a lock and [`LOCK_RMWS`] times as a read-modify-write;
//! those of waiting for a held lock are not counted.
//!
//! While a thread holds a lock, its steps are counted: each access to an atomic, and each round of
//! the loops that count themselves by [`count_steps`](super::count_steps). A hold inside another
//! one belongs to that.

use core::cell::Cell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{self, Ordering};

std::thread_local! {
    static RMW: Cell<u64> = const { Cell::new(0) };
    static LOCKS: Cell<u64> = const { Cell::new(0) };
    /// The number of locks held, and the steps since the first of them was acquired.
    static HOLD: Cell<(u32, u64)> = const { Cell::new((0, 0)) };
    static LONGEST: Cell<u64> = const { Cell::new(0) };
}

/// The read-modify-writes of an uncontended `std::sync::Mutex`: a compare-and-swap locks it, and a
/// swap unlocks it, because a waiter may have to be woken. (This feature implies `std`.
/// `spin::Mutex` unlocks by a store.)
const LOCK_RMWS: u64 = 2;

fn count() {
    RMW.with(|c| c.set(c.get() + 1));
    count_steps(1);
}

/// Counts steps, if a lock is held.
pub(super) fn count_steps(steps: u64) {
    HOLD.with(|hold| {
        let (held, before) = hold.get();
        if held > 0 {
            hold.set((held, before + steps));
        }
    });
}

fn begin_hold() {
    LOCKS.with(|c| c.set(c.get() + 1));
    HOLD.with(|hold| {
        let (held, steps) = hold.get();
        hold.set((held + 1, if held == 0 { 0 } else { steps }));
    });
}

pub(super) fn end_hold() {
    HOLD.with(|hold| {
        let (held, steps) = hold.get();
        hold.set((held - 1, steps));
        LONGEST.with(|longest| longest.set(longest.get().max(steps)));
    });
}

/// Holds a lock of the library, and counts it, its release included.
pub(super) struct Guard<G>(G);

impl<G> Guard<G> {
    pub(super) fn new(guard: G) -> Self {
        RMW.with(|c| c.set(c.get() + LOCK_RMWS));
        begin_hold();
        Self(guard)
    }
}

impl<G: Deref> Deref for Guard<G> {
    type Target = G::Target;
    fn deref(&self) -> &G::Target {
        &self.0
    }
}

impl<G: DerefMut> DerefMut for Guard<G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.0
    }
}

impl<G> Drop for Guard<G> {
    fn drop(&mut self) {
        end_hold();
    }
}

/// Counts an acquisition of a lock made of these atomics, whose read-modify-writes are counted as
/// they are made. Its release calls [`end_hold`].
pub(crate) fn count_own_lock() {
    begin_hold();
}

/// Returns how many read-modify-writes this thread has made since [`rmw_reset`], those of locks
/// included.
pub fn rmw_count() -> u64 {
    RMW.with(Cell::get)
}

/// Returns how many locks this thread has taken since [`rmw_reset`].
pub fn lock_count() -> u64 {
    LOCKS.with(Cell::get)
}

/// Returns the most steps that this thread has made under one hold of a lock that has ended since
/// [`rmw_reset`]: accesses to atomics, and rounds of loops over the rest of what locks protect.
pub fn longest_hold() -> u64 {
    LONGEST.with(Cell::get)
}

/// Sets this thread's counts back to 0.
pub fn rmw_reset() {
    RMW.with(|c| c.set(0));
    LOCKS.with(|c| c.set(0));
    LONGEST.with(|c| c.set(0));
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
                count_steps(1);
                self.0.load(order)
            }
            #[inline]
            pub(crate) fn store(&self, value: $value, order: Ordering) {
                if order == Ordering::SeqCst {
                    count();
                } else {
                    count_steps(1);
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
    use crate::sync::{Mutex, SpinLock};

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
    fn the_longest_hold_is_that_of_the_most_steps_under_one_lock() {
        let (outer, inner, word) = (Mutex::new(0), SpinLock::new(0), AtomicU64::new(0));
        rmw_reset();
        word.fetch_add(word.load(Ordering::Relaxed), Ordering::Relaxed);
        count_steps(9);
        assert_eq!(longest_hold(), 0, "no lock is held");
        {
            let mut number = outer.lock();
            *number += word.load(Ordering::Relaxed);
            *inner.lock() += 1; // a compare-and-swap and a store
            count_steps(5);
        }
        assert_eq!(longest_hold(), 8, "the inner hold belongs to the outer one");
        drop(outer.lock());
        assert_eq!(longest_hold(), 8);
        rmw_reset();
        drop(outer.lock());
        assert_eq!(longest_hold(), 0);
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
