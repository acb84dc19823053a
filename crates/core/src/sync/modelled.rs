//! Loom's atomics, whose first value is written sequentially consistently, and whose operations loom
//! tries in all orders where a model asks for it.
//!
//! In loom 0.7 a sequentially consistent load does not return a value that was stored sequentially
//! consistently and overwritten by another such store. But loom treats the initial value of an
//! atomic as a release store, and so may return it forever. After one thread has stored to `a` and
//! another to `b`, each could miss the other's store, which no machine does and no structure here
//! allows for. Hence the initial value is stored again.
//!
//! Loom compares an operation only with the last one on the same atomic. If a thread reads an
//! atomic right before it changes it, loom misses an earlier read by another thread, and tries one
//! order of these two. [`in_all_orders`] precedes each operation with a relaxed one on a word
//! beside the atomic, which all of them change: so loom compares each with the last one of the
//! other thread. That orders no memory. It multiplies the time of a model, so models that take too
//! long with it are explored twice ([`explore`]): as loom does it, and in all orders with fewer
//! preemptions. One is enough to come between a read and the change behind it. The models of frames
//! name the pair of operations whose orders matter (`frame/loom_models`: `Race`).
//!
//! Loom explores no load that returns a later store; nor a sequentially consistent load that
//! returns an old value after a relaxed load has returned a later store of the same thread. No
//! structure here relies on their order: the result of a relaxed load is a hint where to look
//! first.

use core::sync::atomic::Ordering;
use loom::sync::atomic as checked;
use std::cell::Cell;

std::thread_local! {
    /// All threads of a model run in one of the system.
    static ALL_ORDERS: Cell<bool> = const { Cell::new(false) };
}

/// Makes loom try all orders of the operations on each atomic in the model that `check` explores.
pub(crate) fn in_all_orders<R>(check: impl FnOnce() -> R) -> R {
    ALL_ORDERS.set(true);
    let result = check();
    ALL_ORDERS.set(false);
    result
}

/// Explores `model` with at most `preemptions`, if they are limited, and then in all orders of the
/// operations on each atomic with at most `of_all_orders`.
pub(crate) fn explore(
    preemptions: Option<usize>,
    of_all_orders: usize,
    model: impl Fn() + Sync + Send + 'static,
) {
    let model = std::sync::Arc::new(model);
    let check = |preemptions| {
        let mut builder = loom::model::Builder::new();
        (builder.preemption_bound, builder.max_branches) = (preemptions, 20_000);
        let model = std::sync::Arc::clone(&model);
        builder.check(move || model());
    };
    check(preemptions);
    in_all_orders(|| check(Some(of_all_orders)));
}

macro_rules! modelled {
    ($($name:ident $value:ty { $($call:ident)* })*) => {$(
        #[derive(Debug)]
        pub(crate) struct $name {
            atomic: checked::$name,
            order: checked::AtomicUsize,
        }

        #[allow(dead_code, reason = "each has the calls of all")]
        impl $name {
            #[track_caller]
            pub(crate) fn new(value: $value) -> Self {
                let atomic = checked::$name::new(value);
                atomic.store(value, Ordering::SeqCst);
                Self { atomic, order: checked::AtomicUsize::new(0) }
            }

            #[track_caller]
            fn ordered(&self) -> &checked::$name {
                if ALL_ORDERS.get() {
                    self.order.fetch_add(1, Ordering::Relaxed);
                }
                &self.atomic
            }

            #[track_caller]
            pub(crate) fn load(&self, order: Ordering) -> $value {
                self.ordered().load(order)
            }

            #[track_caller]
            pub(crate) fn store(&self, value: $value, order: Ordering) {
                self.ordered().store(value, order);
            }

            #[track_caller]
            pub(crate) fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.ordered().compare_exchange(current, new, success, failure)
            }

            #[track_caller]
            pub(crate) fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.ordered().compare_exchange_weak(current, new, success, failure)
            }

            $(
                #[track_caller]
                pub(crate) fn $call(&self, value: $value, order: Ordering) -> $value {
                    self.ordered().$call(value, order)
                }
            )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new(Default::default())
            }
        }
    )*};
}

modelled! {
    AtomicBool bool { swap }
    AtomicU8 u8 { swap fetch_add fetch_sub fetch_or fetch_and fetch_max }
    AtomicU32 u32 { swap fetch_add fetch_sub fetch_or fetch_and fetch_max }
    AtomicU64 u64 { swap fetch_add fetch_sub fetch_or fetch_and fetch_max }
}
