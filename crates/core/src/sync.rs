//! The crate's atomics, locks and cells, which test builds replace; and what goes with them: cache
//! line padding, waiting between attempts (`relax`, `spin_then_yield`), unique numbers.
//!
//! Concurrent structures of this crate use only these. `--cfg loom` replaces them by those of a
//! model checker that tries every interleaving, and the feature `count-rmw` by ones that count
//! read-modify-writes and locks: scaling cannot be timed on two cores, but it can be counted.
//!
//! Memory shared with a *device* is accessed through [`mem`](crate::mem) instead.
//!
//! A model executes the product's code. The differences under loom, and the reasons:
//!
//! - here: the types themselves (`modelled` lists the additions to loom's), and `relax` and
//!   `spin_then_yield` yield, because loom cannot wait;
//! - `frame/storage`, `table/pages`: atomics are created one by one, because zeroed memory is
//!   no atomic of loom;
//! - `table/store`: an access to an entry, which is memory of a device and not seen by loom, is
//!   shown to it as one to a word that nothing else uses;
//! - `page_pool/records`, `page_pool/consumer`, `invalidate/batch`: fewer frames in a region, pages
//!   in a chunk, batches in flight, because the time of a model grows with them;
//! - `dma_pool/unit`: an assertion, whose failure is undefined in the product;
//! - `drop_guard` and the crate: the standard library is there.
//!
//! Not seen by loom: `unique_number` and the flags of `drop_guard`, which order nothing; and in
//! `table/pages` the chunks that are added later, which a thread acquires with the link into them.

#[cfg(loom)]
pub(crate) use modelled::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, explore, in_all_orders};

/// Not counted: pointers are published by stores and loads only.
#[cfg(not(loom))]
pub(crate) use core::sync::atomic::AtomicPtr;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::AtomicPtr;

#[cfg(all(not(loom), not(feature = "count-rmw")))]
pub(crate) use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};

#[cfg(all(not(loom), feature = "count-rmw"))]
pub(crate) use counting::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};

pub(crate) use core::sync::atomic::Ordering;

#[cfg(all(not(loom), feature = "count-rmw"))]
pub use counting::{lock_count, longest_hold, rmw_count, rmw_reset};

#[cfg(all(not(loom), feature = "count-rmw"))]
mod counting;
#[cfg(loom)]
mod modelled;
mod spin_lock;

pub(crate) use spin_lock::{Guard, SpinLock};

/// A lock for paths that are not hot.
///
/// `std::sync::Mutex` with the feature `std`, a spinning one without, loom's under loom. A panic
/// while it is held does not poison it: every step on the guarded data leaves it consistent.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(
    #[cfg(loom)] loom::sync::Mutex<T>,
    #[cfg(all(not(loom), feature = "std"))] std::sync::Mutex<T>,
    #[cfg(all(not(loom), not(feature = "std")))] spin::Mutex<T>,
);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        #[cfg(loom)]
        return Self(loom::sync::Mutex::new(value));
        #[cfg(all(not(loom), feature = "std"))]
        return Self(std::sync::Mutex::new(value));
        #[cfg(all(not(loom), not(feature = "std")))]
        return Self(spin::Mutex::new(value));
    }

    pub(crate) fn lock(&self) -> impl core::ops::DerefMut<Target = T> + '_ {
        #[cfg(all(not(loom), feature = "count-rmw"))]
        return counting::Guard::new(
            self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()),
        );
        #[cfg(any(loom, all(feature = "std", not(feature = "count-rmw"))))]
        return self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        #[cfg(all(not(loom), not(feature = "std")))]
        return self.0.lock();
    }
}

/// Counts `steps` of a loop over memory that is not atomic, in a build that counts: what a lock is
/// held for (`longest_hold`).
#[inline(always)]
pub(crate) fn count_steps(steps: usize) {
    let _ = steps;
    #[cfg(all(not(loom), feature = "count-rmw"))]
    counting::count_steps(steps as u64);
}

/// Waits before the next attempt, longer after more `attempts`: it spins, then yields in case the
/// other thread is not running, then sleeps in case that thread has a lower priority.
pub fn relax(attempts: u32) {
    let _ = attempts;
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(all(not(loom), feature = "std"))]
    match attempts {
        0..64 => core::hint::spin_loop(),
        64..80 => std::thread::yield_now(),
        _ => doze(),
    }
    #[cfg(all(not(loom), not(feature = "std")))]
    core::hint::spin_loop();
}

/// Sleeps for 50 microseconds, and is no cancellation point: `pthread_cancel` of a C program that
/// calls Rust code would unwind through it from `std::thread::sleep`.
#[cfg(all(not(loom), feature = "std"))]
#[cold]
fn doze() {
    let (nothing, never) = (std::sync::Mutex::new(()), std::sync::Condvar::new());
    let held = nothing.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let _ = never.wait_timeout(held, core::time::Duration::from_micros(50));
}

/// Returns a number that no other call returns: it names a domain, a table, a pool or a buffer for
/// as long as the process runs, so that a handle of one is refused by another. 2^64 of them do not
/// run out. It orders nothing, and loom need not see it.
pub(crate) fn unique_number() -> u64 {
    static LAST: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// Waits before the next poll of what a device is about to change: it spins for 64 polls, and then
/// yields.
pub(crate) fn spin_then_yield(polls: u64) {
    let _ = polls;
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(all(not(loom), feature = "std"))]
    if polls >= 64 {
        return std::thread::yield_now();
    }
    #[cfg(not(loom))]
    core::hint::spin_loop();
}

/// A cell whose owner is decided by a protocol of atomics; loom checks the protocol.
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(
    #[cfg(loom)] loom::cell::UnsafeCell<T>,
    #[cfg(not(loom))] core::cell::UnsafeCell<T>,
);

impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        #[cfg(loom)]
        return Self(loom::cell::UnsafeCell::new(value));
        #[cfg(not(loom))]
        return Self(core::cell::UnsafeCell::new(value));
    }

    /// Calls `f` with a pointer to read through. The caller's protocol must exclude writers
    /// meanwhile.
    #[inline(always)]
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        #[cfg(loom)]
        return self.0.with(f);
        #[cfg(not(loom))]
        return f(self.0.get());
    }

    /// Calls `f` with a pointer to write through. The caller's protocol must exclude all other
    /// accesses meanwhile.
    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        #[cfg(loom)]
        return self.0.with_mut(f);
        #[cfg(not(loom))]
        return f(self.0.get());
    }
}

/// Keeps its content on separate cache lines, to prevent false sharing.
///
/// 128 bytes, because processors prefetch lines of 64 in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(pub(crate) T);

impl<T> core::ops::Deref for CachePadded<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
