//! Deliberate mistakes in the product's own path, which tests switch on to prove that they are
//! detected.
//!
//! **For tests only.** With the feature `known-bad` (or in this crate's own unit tests) a thread
//! can make one [`Mistake`]; each is one decision of the map, revoke and reclaim path taken wrongly
//! that no test double of a queue can take in its place. In every other build the functions below
//! are constants and compile to nothing.

/// A mistake that the stack could make.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mistake {
    /// The flush is requested and submitted before the entries are cleared.
    #[cfg(any(test, feature = "known-bad"))]
    FlushBeforeClear,
    /// Retired table pages are reclaimed before their ticket has completed.
    TablePageEarly,
    /// A table page of this level is free when it is retired.
    TablePageEarlyAt(u8),
    /// The domain's I/O virtual addresses are released when they are revoked.
    IovaEarly,
    /// Addresses in an owner's window are returned to it when they are revoked.
    WindowEarly,
    /// A buffer is returned before its ticket has completed.
    BufferEarly,
    /// A map that failed halfway does not wait for the flush of its rollback.
    RollbackNotAwaited,
}

#[cfg(any(test, feature = "known-bad"))]
mod switches {
    use super::Mistake;
    use core::cell::Cell;

    std::thread_local! {
        static MISTAKE: Cell<Option<Mistake>> = const { Cell::new(None) };
        static TRAP: Cell<Option<u64>> = const { Cell::new(None) };
    }

    impl Mistake {
        /// All of them.
        pub const ALL: [Self; 10] = [
            Self::FlushBeforeClear,
            Self::TablePageEarly,
            Self::TablePageEarlyAt(1),
            Self::TablePageEarlyAt(2),
            Self::TablePageEarlyAt(3),
            Self::TablePageEarlyAt(4),
            Self::IovaEarly,
            Self::WindowEarly,
            Self::BufferEarly,
            Self::RollbackNotAwaited,
        ];
    }

    /// Makes `mistake`, or none, on the calling thread from now on.
    pub fn make(mistake: Option<Mistake>) {
        MISTAKE.set(mistake);
    }

    /// Poisons the table pages that the calling thread reclaims from now on: every entry maps the
    /// memory at `trap`.
    pub fn poison_free_table_pages(trap: Option<u64>) {
        TRAP.set(trap);
    }

    pub(crate) fn makes(mistake: Mistake) -> bool {
        MISTAKE.get() == Some(mistake)
    }

    pub(crate) fn trap() -> Option<u64> {
        TRAP.get()
    }
}

#[cfg(not(any(test, feature = "known-bad")))]
mod switches {
    pub(crate) const fn makes(_: super::Mistake) -> bool {
        false
    }

    pub(crate) const fn trap() -> Option<u64> {
        None
    }
}

#[cfg(any(test, feature = "known-bad"))]
pub use switches::{make, poison_free_table_pages};
pub(crate) use switches::{makes, trap};

/// Whether free table pages may hold poison, and are zeroed when they are taken.
pub(crate) const POISONS: bool = cfg!(any(test, feature = "known-bad"));
