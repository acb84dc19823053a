//! [`DropGuard`]: runs a clean-up that consumes its value on drop, unless the value is taken out first.

use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};

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
        // SAFETY: `into_inner` prevents this drop, and a drop runs once, so the value is taken once.
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::cell::Cell;

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
