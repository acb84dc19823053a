//! Loom's atomics, with the one property of sequentially consistent operations that loom 0.7 lacks.
//!
//! Loom treats them as acquire and release. So after one thread has written `a` and another `b`,
//! each may miss what the other wrote, which no machine does and no structure here allows for. A
//! fence in the models would exclude that, and more: loom's fences order what lies around them too,
//! so a model with fences no longer sees an access that nothing else orders.
//!
//! Hence, and no more than that: *a sequentially consistent load reads the newest value, if that
//! was written sequentially consistently*. It does so as a read-modify-write that fails, and those
//! read the newest value in loom. The interleaving is then the total order of these operations. All
//! else is as weak as it is in the product: other loads may read old values, so may those of a
//! value that was written in another way, and only acquire and release order accesses to other
//! memory.

use core::sync::atomic::{self, Ordering};
use loom::sync::atomic as checked;

macro_rules! modelled {
    ($($name:ident $value:ty { $($op:ident),* };)*) => {$(
        #[derive(Debug)]
        pub(crate) struct $name {
            value: checked::$name,
            /// Whether the newest value was written sequentially consistently. Loom switches
            /// threads at the start of an operation, so this changes together with the value.
            total: atomic::AtomicBool,
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new(0)
            }
        }

        #[allow(dead_code, reason = "the interface of the real atomic, used or not")]
        impl $name {
            #[track_caller]
            pub(crate) fn new(value: $value) -> Self {
                Self { value: checked::$name::new(value), total: atomic::AtomicBool::new(true) }
            }
            fn written(&self, order: Ordering) {
                self.total.store(order == Ordering::SeqCst, Ordering::Relaxed);
            }
            #[track_caller]
            pub(crate) fn load(&self, order: Ordering) -> $value {
                if order != Ordering::SeqCst || !self.total.load(Ordering::Relaxed) {
                    return self.value.load(order);
                }
                // Where this value is the newest, it is written once more, and stays what it is.
                let newest = <$value>::MAX;
                self.value
                    .compare_exchange(newest, newest, Ordering::Acquire, Ordering::Acquire)
                    .unwrap_or_else(|newest| newest)
            }
            #[track_caller]
            pub(crate) fn store(&self, value: $value, order: Ordering) {
                self.value.store(value, order);
                self.written(order);
            }
            #[track_caller]
            pub(crate) fn compare_exchange(
                &self, old: $value, new: $value, ok: Ordering, err: Ordering,
            ) -> Result<$value, $value> {
                let result = self.value.compare_exchange(old, new, ok, err);
                if result.is_ok() {
                    self.written(ok);
                }
                result
            }
            #[track_caller]
            pub(crate) fn compare_exchange_weak(
                &self, old: $value, new: $value, ok: Ordering, err: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(old, new, ok, err)
            }
            $(
                #[track_caller]
                pub(crate) fn $op(&self, value: $value, order: Ordering) -> $value {
                    let old = self.value.$op(value, order);
                    self.written(order);
                    old
                }
            )*
        }
    )*};
}

modelled! {
    AtomicU8 u8 { swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max };
    AtomicU32 u32 { swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max };
    AtomicU64 u64 { swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max };
}
