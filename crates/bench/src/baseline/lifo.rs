//! `lifo` and `thread-list`: stacks of numbers, which check nothing and know nothing but numbers. They are what is left
//! of an allocator when everything is taken away that can be: the floor, with a lock and without.

use super::{BaselineError, Blocks, Offset};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many a [`ThreadList`] takes from the stack behind it, or puts back, at a time.
const BATCH: usize = 32;

/// `lifo`: a stack of free offsets under one lock, last freed first; all of them are there from the beginning.
#[derive(Debug)]
pub struct Lifo {
    free: Mutex<Vec<Offset>>,
    total: usize,
}

impl Lifo {
    /// `count` things, one every `size` bytes, lowest first.
    pub fn new(count: usize, size: u64) -> Self {
        Self { free: Mutex::new((0..count as u64).rev().map(|i| i * size).collect()), total: count }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Offset>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One, from any thread.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    #[inline]
    pub fn alloc_shared(&self) -> Result<Offset, BaselineError> {
        self.lock().pop().ok_or(BaselineError::NoPages(self.total))
    }

    /// Takes one back, from any thread.
    #[inline]
    pub fn free_shared(&self, thing: Offset) {
        self.lock().push(thing);
    }

    /// Puts `count` behind what `to` has, or as many as there are.
    #[inline]
    pub fn alloc_many(&self, count: usize, to: &mut Vec<Offset>) {
        let mut free = self.lock();
        let at = free.len().saturating_sub(count);
        to.extend(free.drain(at..));
    }

    /// Takes all of `from` back.
    #[inline]
    pub fn free_many(&self, from: &[Offset]) {
        self.lock().extend_from_slice(from);
    }
}

impl Blocks for &Lifo {
    #[inline]
    fn alloc(&mut self) -> Result<Offset, BaselineError> {
        self.alloc_shared()
    }

    #[inline]
    fn free(&mut self, thing: Offset) -> Result<(), BaselineError> {
        self.free_shared(thing);
        Ok(())
    }

    fn destroy(self) {}
}

/// `thread-list`: a list that one thread owns, before a [`Lifo`] which it goes to for 32 at a time. The thread keeps
/// it in a variable, which is cheaper than `thread_local!`.
#[derive(Debug)]
pub struct ThreadList<'l> {
    behind: &'l Lifo,
    free: Vec<Offset>,
}

impl<'l> ThreadList<'l> {
    /// An empty list.
    pub fn new(behind: &'l Lifo) -> Self {
        Self { behind, free: Vec::with_capacity(2 * BATCH) }
    }

    #[cold]
    #[inline(never)]
    fn refill(&mut self) -> Result<Offset, BaselineError> {
        self.behind.alloc_many(BATCH, &mut self.free);
        self.free.pop().ok_or(BaselineError::NoPages(self.behind.total))
    }

    #[cold]
    #[inline(never)]
    fn spill(&mut self) {
        let at = self.free.len().saturating_sub(BATCH);
        self.behind.free_many(self.free.get(at..).unwrap_or_default());
        self.free.truncate(at);
    }
}

impl Blocks for ThreadList<'_> {
    #[inline]
    fn alloc(&mut self) -> Result<Offset, BaselineError> {
        match self.free.pop() {
            Some(thing) => Ok(thing),
            None => self.refill(),
        }
    }

    #[inline]
    fn free(&mut self, thing: Offset) -> Result<(), BaselineError> {
        if self.free.len() == 2 * BATCH {
            self.spill();
        }
        self.free.push(thing);
        Ok(())
    }

    fn destroy(self) {}
}

impl Drop for ThreadList<'_> {
    fn drop(&mut self) {
        self.behind.free_many(&self.free);
    }
}
