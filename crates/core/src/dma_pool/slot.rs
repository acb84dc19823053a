//! [`Slot`]: a value that one call at a time uses, on one thread.

use core::cell::{Cell, UnsafeCell};
use core::ops::{Deref, DerefMut};

/// A `RefCell` whose short uses leave no mark. A use during which user code may run [takes](Self::take) the value, so that a use
/// from inside is refused; one that runs no such code only [looks](Self::with) whether it is taken. That saves two stores and a
/// load in each call of a fast path.
pub(super) struct Slot<T> {
    taken: Cell<bool>,
    value: UnsafeCell<T>,
}

/// The value, until it is dropped.
pub(super) struct Taken<'s, T>(&'s Slot<T>);

impl<T> Slot<T> {
    pub(super) fn new(value: T) -> Self {
        Self { taken: Cell::new(false), value: UnsafeCell::new(value) }
    }

    pub(super) fn into_inner(self) -> T {
        self.value.into_inner()
    }

    /// Takes the value, unless a call further up has taken it.
    #[inline]
    pub(super) fn take(&self) -> Option<Taken<'_, T>> {
        (!self.taken.replace(true)).then(|| Taken(self))
    }

    /// Calls `work` with the value, unless a call further up has taken it.
    ///
    /// # Safety
    /// `work` runs no code that may use the slot: none that a user of the crate has written.
    #[inline(always)]
    pub(super) unsafe fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.taken.get() {
            return None;
        }
        // SAFETY: there is no other reference. A `Taken` exists only while `taken` is set; the reference of another `with` ends
        // before this one begins, since its `work` does not come here (contract) and no other thread has the slot (not `Sync`).
        Some(work(unsafe { &mut *self.value.get() }))
    }
}

impl<T> Drop for Taken<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.taken.set(false);
    }
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `taken` was clear and is set as long as this value lives, so there is no other `Taken` (`take` makes none), and
        // no `with` makes a reference. One that runs further up does not come here (its contract).
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Taken<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as for `deref`, and the borrow of this value excludes other references from it.
        unsafe { &mut *self.0.value.get() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::Slot;

    #[test]
    fn a_value_that_is_taken_is_refused_until_it_is_dropped() {
        let slot = Slot::new(1);
        {
            let mut taken = slot.take().unwrap();
            *taken += 1;
            assert!(slot.take().is_none());
            // SAFETY: the closure does nothing.
            assert_eq!(unsafe { slot.with(|_| ()) }, None);
        }
        // SAFETY: the closure uses nothing but the value.
        assert_eq!(unsafe { slot.with(|value| core::mem::replace(value, 5)) }, Some(2));
        assert_eq!(*slot.take().unwrap(), 5);
        assert_eq!(slot.into_inner(), 5);
    }

    #[test]
    fn a_panic_returns_what_was_taken() {
        let slot = std::panic::AssertUnwindSafe(Slot::new(1));
        let unwound = std::panic::catch_unwind(|| {
            let slot = &slot;
            let _taken = slot.take();
            panic!("while it is taken");
        });
        assert!(unwound.is_err());
        assert!(slot.take().is_some());
    }
}
