//! Atomics that count their read-modify-writes, one count a thread.

use core::cell::Cell;
use core::sync::atomic::{self, Ordering};

std::thread_local! {
    static RMW: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    RMW.with(|c| c.set(c.get() + 1));
}

/// How many read-modify-writes this thread has made since [`rmw_reset`].
pub fn rmw_count() -> u64 {
    RMW.with(Cell::get)
}

/// Sets this thread's count back to 0.
pub fn rmw_reset() {
    RMW.with(|c| c.set(0));
}

macro_rules! counting {
    ($($name:ident $value:ty { $($op:ident),* };)*) => {$(
        #[derive(Debug, Default)]
        pub(crate) struct $name(atomic::$name);

        #[allow(dead_code, reason = "the same face as the real atomic, used or not")]
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
