//! [`DropGuard`]: runs a clean-up that consumes its value on drop, unless the value is taken out
//! first; [`PanicFlag`]: whether a clean-up must not call a user's callback; and [`for_all`], a
//! clean-up of many that calls the user's callback for each, whichever of the calls panic.

use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
// Not those of `sync`: it orders nothing.
use core::sync::atomic::{AtomicBool, Ordering};

/// Cleans up by value, which `Drop` cannot.
pub(crate) trait CleanUp: Sized {
    /// Runs when a [`DropGuard`] is dropped.
    fn clean_up(self);
}

/// Owns a `T` and cleans it up when dropped.
pub(crate) struct DropGuard<T: CleanUp>(ManuallyDrop<T>);

impl<T: CleanUp> DropGuard<T> {
    #[inline(always)]
    pub(crate) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }

    /// Returns the value; its clean-up does not run.
    #[inline(always)]
    pub(crate) fn into_inner(self) -> T {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped nor used again, so the value is taken once.
        unsafe { ManuallyDrop::take(&mut this.0) }
    }
}

impl<T: CleanUp> Drop for DropGuard<T> {
    fn drop(&mut self) {
        // SAFETY: `into_inner` prevents this drop, and a drop runs once, so the value is taken
        // once.
        unsafe { ManuallyDrop::take(&mut self.0) }.clean_up();
    }
}

impl<T: CleanUp> Deref for DropGuard<T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: CleanUp> DerefMut for DropGuard<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// Whether a user's callback has ever panicked. A clean-up that runs while a thread unwinds does
/// not call it then: a second panic would end the process.
#[derive(Debug)]
pub(crate) struct PanicFlag(AtomicBool);

/// Dropped only by unwinding.
struct Unwinds<'f>(&'f AtomicBool);

impl Drop for Unwinds<'_> {
    #[cold]
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl PanicFlag {
    pub(crate) const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Calls `callback`. Costs nothing unless it panics.
    #[inline(always)]
    pub(crate) fn call<R>(&self, callback: impl FnOnce() -> R) -> R {
        let unwinds = Unwinds(&self.0);
        let result = callback();
        core::mem::forget(unwinds);
        result
    }

    /// Whether a callback has panicked and this thread unwinds. Without `std` that is unknown, and
    /// nothing is forbidden.
    #[inline]
    pub(crate) fn forbids_calls(&self) -> bool {
        #[cfg(any(test, loom, feature = "std"))]
        let unwinds = || std::thread::panicking();
        #[cfg(not(any(test, loom, feature = "std")))]
        let unwinds = || false;
        self.0.load(Ordering::Relaxed) && unwinds()
    }
}

/// Calls `each` with every item, and panics afterwards as the first call that panicked did. While
/// the thread unwinds it does not: a second panic would end the process.
///
/// Without `std`, which catches panics, the first one ends the loop.
pub(crate) fn for_all<T>(items: impl IntoIterator<Item = T>, mut each: impl FnMut(T)) {
    #[cfg(any(test, loom, feature = "std"))]
    {
        use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
        let mut first = None;
        for item in items {
            // `each` is used after a panic of its own, which its callers write it for.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| each(item))) {
                first.get_or_insert(panic);
            }
        }
        if let Some(panic) = first.filter(|_| !std::thread::panicking()) {
            resume_unwind(panic);
        }
    }
    #[cfg(not(any(test, loom, feature = "std")))]
    items.into_iter().for_each(&mut each);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    /// The second and the fourth of six calls panic.
    fn six(calls: &Cell<u32>) {
        for_all(1..=6, |call| {
            calls.set(calls.get() + 1);
            if call == 2 || call == 4 {
                resume_unwind(Box::new(call));
            }
        });
    }

    #[test]
    fn all_are_called_and_the_first_panic_goes_on() {
        let calls = Cell::new(0);
        let panic = catch_unwind(AssertUnwindSafe(|| six(&calls))).unwrap_err();
        assert_eq!((calls.get(), panic.downcast_ref()), (6, Some(&2)));
    }

    #[test]
    fn a_clean_up_that_panics_while_its_thread_unwinds_ends_with_it() {
        struct Six<'c>(&'c Cell<u32>);
        impl Drop for Six<'_> {
            fn drop(&mut self) {
                six(self.0);
            }
        }
        let calls = Cell::new(0);
        let run = || {
            let _six = Six(&calls);
            resume_unwind(Box::new("the thread's own"));
        };
        let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        assert_eq!((calls.get(), panic.downcast_ref()), (6, Some(&"the thread's own")));
    }

    struct Counted<'c>(&'c Cell<u32>);
    impl CleanUp for Counted<'_> {
        fn clean_up(self) {
            self.0.set(self.0.get() + 1);
        }
    }

    #[test]
    fn a_value_is_cleaned_up_once_unless_taken_out() {
        let count = Cell::new(0);
        drop(DropGuard::new(Counted(&count)));
        assert_eq!(count.get(), 1);
        let value = DropGuard::new(Counted(&count)).into_inner();
        assert_eq!(count.get(), 1);
        drop(DropGuard::new(value));
        assert_eq!(count.get(), 2);
    }
}
