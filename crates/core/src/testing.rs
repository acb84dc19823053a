//! Threads, random numbers and sizes for tests.

use std::cell::RefCell;
use std::thread::{Scope, ScopedJoinHandle};

/// The threads of a [`scope`], which joins them all at its end.
pub(crate) struct Crew<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    threads: RefCell<Vec<ScopedJoinHandle<'scope, ()>>>,
}

impl<'scope> Crew<'scope, '_> {
    pub(crate) fn spawn(&self, work: impl FnOnce() + Send + 'scope) {
        self.threads.borrow_mut().push(self.scope.spawn(work));
    }
}

/// Like `std::thread::scope`, but joins each thread by the system's call. The standard library
/// waits for scoped threads by a counter, which ThreadSanitizer does not see in a library that it
/// did not instrument: it would report races between the threads and what the test does afterwards.
pub(crate) fn scope<'env>(body: impl for<'scope> FnOnce(&Crew<'scope, 'env>)) {
    std::thread::scope(|scope| {
        let crew = Crew { scope, threads: RefCell::default() };
        body(&crew);
        for thread in crew.threads.into_inner() {
            thread.join().unwrap();
        }
    });
}

/// Returns how many cases a large property test tries: `full` where the compiler optimises
/// (`cargo test --profile ci`), and a quarter where it does not, where they would take a third of the
/// time of `make test`.
pub(crate) const fn cases(full: u32) -> u32 {
    if cfg!(debug_assertions) { full / 4 } else { full }
}

/// Pseudo-random numbers (xorshift), the same in each run.
pub(crate) struct Random(u64);

impl Random {
    /// `seed` must not be 0.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number less than `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).unwrap()
    }
}
