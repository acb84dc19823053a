//! Keeps a value alive for the objects that come from it, by shares of one count.
//!
//! A mapping needs its domain, and a program keeps both in one struct: so handles own what they
//! refer to. A reference count for each would add a read-modify-write on a cache line that all
//! threads share to each map and unmap.
//!
//! [`Shared`] is that count, and [`Stock`] avoids its price: an owner takes [`Stock::SHARES`]
//! shares with one read-modify-write, issues one with each object that it allocates and takes it
//! back with each object that returns, both without any atomic operation. Only objects that are
//! dropped elsewhere return their share to the count itself. This is weighted reference counting
//! (Bevan, PARLE 1987).
//!
//! Zones, domains and their windows are kept so, and arenas of the crate `pinfold`. The pools have
//! no share in each object: a [DMA pool](crate::dma_pool) counts its handles, and its blocks only
//! when the last handle is dropped; a [page pool](crate::page_pool) counts its handles and pages
//! together, by one count with a bias.
//!
//! ```
//! use pinfold_core::share::Shared;
//!
//! let domain = Shared::new(String::from("a domain"));
//! let mut owner = domain.stock(); // one per thread
//! let share = owner.issue(); // travels with a mapping; no atomic operation
//! assert_eq!(*share, "a domain");
//! drop(domain);
//! assert_eq!(*share, "a domain"); // still there
//! owner.take_back(share);
//! ```

use crate::sync::{AtomicU64, Ordering};
use alloc::boxed::Box;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::ptr::NonNull;

struct Counted<T> {
    shares: AtomicU64,
    value: T,
}

/// A value that lives as long as one of its shares, from any thread. Each `Shared` is one share.
///
/// As `std::sync::Arc`, besides [`stock`](Self::stock).
pub struct Shared<T>(NonNull<Counted<T>>);

// SAFETY: as for `Arc`: a share gives `&T` to its thread, and the last one drops the `T` there.
unsafe impl<T: Send + Sync> Send for Shared<T> {}
// SAFETY: as for `Send`; a shared reference to a share can be cloned elsewhere.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

/// More shares than this are a leak of shares in a loop; the count must not wrap.
const MOST_SHARES: u64 = 1 << 62;

impl<T> Shared<T> {
    /// Moves `value` to the heap, with one share.
    pub fn new(value: T) -> Self {
        Self(NonNull::from(Box::leak(Box::new(Counted { shares: AtomicU64::new(1), value }))))
    }

    /// Returns an owner's stock of shares. One read-modify-write.
    pub fn stock(&self) -> Stock<T> {
        self.add(Stock::<T>::SHARES);
        Stock { value: ManuallyDrop::new(Self(self.0)), shares: Stock::<T>::SHARES }
    }

    /// Whether `other` is a share of the same value.
    pub fn is_same(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    /// Drops the share, and returns the value if it was the last: for exactly one of the threads
    /// that drop theirs.
    pub(crate) fn into_inner(self) -> Option<T> {
        let this = ManuallyDrop::new(self);
        // SAFETY: this is one share, and is not used or dropped any more.
        unsafe { Self::release(this.0, 1) }.map(|counted| counted.value)
    }

    fn counted(&self) -> &Counted<T> {
        // SAFETY: the value is freed with the last share, and `self` is one.
        unsafe { self.0.as_ref() }
    }

    fn add(&self, shares: u64) {
        // Relaxed: the caller has a share already, so the value cannot go away meanwhile.
        if self.counted().shares.fetch_add(shares, Ordering::Relaxed) > MOST_SHARES {
            abort();
        }
    }

    /// Returns shares to the count, and the value with the last of them.
    ///
    /// # Safety
    /// The caller owns that many shares and does not use them again.
    unsafe fn release(this: NonNull<Counted<T>>, shares: u64) -> Option<Box<Counted<T>>> {
        // SAFETY: the shares that the caller releases have kept the value alive until here.
        let before = unsafe { this.as_ref() }.shares.fetch_sub(shares, Ordering::Release);
        if before != shares {
            return None;
        }
        // All uses by other shares, which were released before, come before what the caller does
        // with it. (A load, because ThreadSanitizer does not see fences.) SAFETY: no share is left,
        // so this thread alone has the value.
        unsafe { this.as_ref() }.shares.load(Ordering::Acquire);
        // SAFETY: it came from `Box::leak`, and no share is left that could use or free it.
        Some(unsafe { Box::from_raw(this.as_ptr()) })
    }
}

/// Ends the program, without the standard library too: a panic while panicking aborts.
#[cold]
fn abort() -> ! {
    struct Twice;
    impl Drop for Twice {
        #[expect(clippy::panic, reason = "the second panic is what aborts")]
        fn drop(&mut self) {
            panic!("too many shares");
        }
    }
    let _twice = Twice;
    #[expect(clippy::panic, reason = "2^62 shares have been leaked")]
    {
        panic!("too many shares");
    }
}

impl<T> Clone for Shared<T> {
    /// Returns another share. One read-modify-write.
    fn clone(&self) -> Self {
        self.add(1);
        Self(self.0)
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: `self` is one share, and is gone with this.
        drop(unsafe { Self::release(self.0, 1) });
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.counted().value
    }
}

impl<T: fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// An owner's shares of a value: it issues and takes back single ones without an atomic operation.
///
/// Belongs to one thread of control at a time; it can move between threads.
pub struct Stock<T> {
    /// Represents all of `shares`, so it is not dropped as one.
    value: ManuallyDrop<Shared<T>>,
    /// At least 1.
    shares: u64,
}

impl<T> Stock<T> {
    /// The number of shares acquired at once.
    pub const SHARES: u64 = 1 << 20;

    /// Issues a share, for an object that is allocated. O(1).
    #[inline(always)]
    pub fn issue(&mut self) -> Shared<T> {
        if self.shares == 1 {
            // Once in about a million objects that are out at the same time, or that return
            // elsewhere.
            self.value.add(Self::SHARES);
            self.shares += Self::SHARES;
        }
        self.shares -= 1;
        Shared(self.value.0)
    }

    /// Returns a share of the same value, as [`Shared::clone`] does. One read-modify-write.
    pub(crate) fn share(&self) -> Shared<T> {
        self.value.deref().clone()
    }

    /// Takes back the share of an object that has returned. A share of another value is dropped.
    /// O(1).
    #[inline(always)]
    pub fn take_back(&mut self, share: Shared<T>) {
        if self.value.is_same(&share) {
            // It becomes one of `shares` instead of being released.
            core::mem::forget(share);
            self.shares += 1;
        }
    }

    /// Whether `share` is one of the same value.
    #[inline(always)]
    pub(crate) fn is_same(&self, share: &Shared<T>) -> bool {
        self.value.is_same(share)
    }

    /// Issues `shares` shares that no value holds, for objects whose owner keeps only addresses. They
    /// stay counted until [`take_back_lent`](Self::take_back_lent). At most one read-modify-write.
    pub fn lend(&mut self, shares: u32) {
        if shares > 0 {
            core::mem::forget(self.split(shares));
        }
    }

    /// Takes back a share of an object whose owner kept only an address. O(1).
    ///
    /// # Safety
    /// The share was [lent](Self::lend), or [issued](Self::issue) and forgotten, by a stock of the
    /// same value, and has not been taken back since.
    #[inline(always)]
    pub unsafe fn take_back_lent(&mut self) {
        self.shares += 1;
    }

    /// Takes `shares` shares out of the stock, as a stock of its own. At most one
    /// read-modify-write.
    pub(crate) fn split(&mut self, shares: u32) -> Self {
        let shares = u64::from(shares).max(1);
        while self.shares <= shares {
            self.value.add(Self::SHARES);
            self.shares += Self::SHARES;
        }
        self.shares -= shares;
        Self { value: ManuallyDrop::new(Shared(self.value.0)), shares }
    }

    /// Takes back shares that were [split](Self::split) off. A stock of another value drops its
    /// shares.
    pub(crate) fn merge(&mut self, other: Self) {
        if self.value.is_same(&other.value) {
            self.shares += ManuallyDrop::new(other).shares;
        }
    }

    /// Drops all shares, and returns the value if they were the last, as [`Shared::into_inner`]
    /// does.
    pub(crate) fn into_inner(self) -> Option<T> {
        let this = ManuallyDrop::new(self);
        // SAFETY: the stock owns `shares` shares, and is not used or dropped any more.
        unsafe { Shared::release(this.value.0, this.shares) }.map(|counted| counted.value)
    }
}

impl<T> Drop for Stock<T> {
    fn drop(&mut self) {
        // SAFETY: the stock owns `shares` shares, and is gone with this; `value` is not dropped by
        // itself.
        drop(unsafe { Shared::release(self.value.0, self.shares) });
    }
}

impl<T> Deref for Stock<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: fmt::Debug> fmt::Debug for Stock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod loom_model;
