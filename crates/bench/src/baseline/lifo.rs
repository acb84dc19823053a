//! `lifo` and `thread-list`: stacks that check nothing. They are what is left of an allocator when everything is taken
//! away that can be: the floor, with a lock and without.

use super::lock::KernelLock;
use super::{BaselineError, Blocks};

/// How many a [`Batches`] takes from the stack behind it, or puts back, at a time.
const BATCH: usize = 32;

/// `lifo`: a stack of free things under one lock, last freed first; all of them are there from the beginning.
#[derive(Debug)]
pub struct Lifo<T> {
    free: KernelLock<Vec<T>>,
    total: usize,
}

impl<T> Lifo<T> {
    /// These things, the last one on top.
    pub fn new(things: impl IntoIterator<Item = T>) -> Self {
        let free: Vec<T> = things.into_iter().collect();
        Self { total: free.len(), free: KernelLock::new(free) }
    }

    /// Returns how many there are, in use or not.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Returns one, from any thread.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    #[inline]
    pub fn alloc_shared(&self) -> Result<T, BaselineError> {
        self.free.lock().pop().ok_or(BaselineError::NoPages(self.total))
    }

    /// Takes one back, from any thread.
    #[inline]
    pub fn free_shared(&self, thing: T) {
        self.free.lock().push(thing);
    }

    /// Puts `count` behind what `to` has, or as many as there are, by one lock.
    #[inline]
    pub fn alloc_many(&self, count: usize, to: &mut Vec<T>) {
        pop_many(&mut self.free.lock(), count, to);
    }

    /// Takes all of `from` back, by one lock.
    #[inline]
    pub fn free_many(&self, from: &mut Vec<T>) {
        self.free.lock().append(from);
    }
}

/// Moves the top `count` of a stack, or as many as there are.
#[inline]
fn pop_many<T>(free: &mut Vec<T>, count: usize, to: &mut Vec<T>) {
    let at = free.len().saturating_sub(count);
    to.extend(free.drain(at..));
}

impl<T> Blocks for &Lifo<T> {
    type Block = T;

    #[inline]
    fn alloc(&mut self) -> Result<T, BaselineError> {
        self.alloc_shared()
    }

    #[inline]
    fn free(&mut self, thing: T) -> Result<(), BaselineError> {
        self.free_shared(thing);
        Ok(())
    }

    fn destroy(&mut self) {}
}

/// `thread-list`: a stack that one thread owns, kept in a variable, which is cheaper than `thread_local!`. It gets all
/// its things when it is made and gives them back when it is dropped; in between no other thread can free into it.
#[derive(Debug)]
pub struct ThreadList<'l, T> {
    home: &'l Lifo<T>,
    free: Vec<T>,
}

impl<'l, T> ThreadList<'l, T> {
    /// A list with `count` things of `home`, or as many as there are.
    pub fn new(home: &'l Lifo<T>, count: usize) -> Self {
        let mut free = Vec::with_capacity(count);
        home.alloc_many(count, &mut free);
        Self { home, free }
    }

    /// Puts `count` behind what `to` has, or as many as there are.
    #[inline]
    pub fn alloc_many(&mut self, count: usize, to: &mut Vec<T>) {
        pop_many(&mut self.free, count, to);
    }

    /// Takes all of `from` back.
    #[inline]
    pub fn free_many(&mut self, from: &mut Vec<T>) {
        self.free.append(from);
    }
}

impl<T> Blocks for ThreadList<'_, T> {
    type Block = T;

    #[inline]
    fn alloc(&mut self) -> Result<T, BaselineError> {
        self.free.pop().ok_or(BaselineError::NoPages(self.home.total))
    }

    #[inline]
    fn free(&mut self, thing: T) -> Result<(), BaselineError> {
        self.free.push(thing);
        Ok(())
    }

    fn destroy(&mut self) {}
}

impl<T> Drop for ThreadList<'_, T> {
    fn drop(&mut self) {
        self.home.free_many(&mut self.free);
    }
}

/// `batches`: a list of one thread before a [`Lifo`] that it goes to for 32 at a time: the least that lets one thread
/// free what another one allocates.
#[derive(Debug)]
pub struct Batches<'l, T> {
    behind: &'l Lifo<T>,
    free: Vec<T>,
    /// On their way to `behind`: kept, so that no batch allocates.
    spill: Vec<T>,
}

impl<'l, T> Batches<'l, T> {
    /// An empty list.
    pub fn new(behind: &'l Lifo<T>) -> Self {
        Self { behind, free: Vec::with_capacity(2 * BATCH), spill: Vec::with_capacity(BATCH) }
    }

    #[cold]
    #[inline(never)]
    fn refill(&mut self) -> Result<T, BaselineError> {
        self.behind.alloc_many(BATCH, &mut self.free);
        self.free.pop().ok_or(BaselineError::NoPages(self.behind.total))
    }

    #[cold]
    #[inline(never)]
    fn spill(&mut self) {
        pop_many(&mut self.free, BATCH, &mut self.spill);
        self.behind.free_many(&mut self.spill);
    }
}

impl<T> Blocks for Batches<'_, T> {
    type Block = T;

    #[inline]
    fn alloc(&mut self) -> Result<T, BaselineError> {
        match self.free.pop() {
            Some(thing) => Ok(thing),
            None => self.refill(),
        }
    }

    #[inline]
    fn free(&mut self, thing: T) -> Result<(), BaselineError> {
        if self.free.len() == 2 * BATCH {
            self.spill();
        }
        self.free.push(thing);
        Ok(())
    }

    fn destroy(&mut self) {}
}

impl<T> Drop for Batches<'_, T> {
    fn drop(&mut self) {
        self.behind.free_many(&mut self.free);
    }
}
