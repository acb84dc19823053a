//! `lifo` and `thread-list`: unchecked stacks. They are what remains of an allocator without
//! everything that can be left out: the floor, with a lock and without.

use super::api::{BaselineError, Blocks};
use super::lock::KernelLock;

/// How many objects a [`Batches`] moves from or to the stack behind it at a time.
const BATCH: usize = 32;

/// `lifo`: a stack of free objects under one lock, last freed first. All of them exist from the
/// start.
#[derive(Debug)]
pub struct Lifo<T> {
    free: KernelLock<Vec<T>>,
    total: usize,
}

impl<T> Lifo<T> {
    /// Creates a stack of these objects, the last one on top.
    pub fn new(objects: impl IntoIterator<Item = T>) -> Self {
        let free: Vec<T> = objects.into_iter().collect();
        Self { total: free.len(), free: KernelLock::new(free) }
    }

    /// Returns how many objects there are, in use or not.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Allocates an object, from any thread.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    #[inline]
    pub fn alloc_shared(&self) -> Result<T, BaselineError> {
        self.free.lock().pop().ok_or(BaselineError::NoPages(self.total))
    }

    /// Frees an object, from any thread.
    #[inline]
    pub fn free_shared(&self, object: T) {
        self.free.lock().push(object);
    }

    /// Appends `count` objects to `to`, or as many as are free, with one lock.
    #[inline]
    pub fn alloc_many(&self, count: usize, to: &mut Vec<T>) {
        pop_many(&mut self.free.lock(), count, to);
    }

    /// Frees all of `from`, with one lock.
    #[inline]
    pub fn free_many(&self, from: &mut Vec<T>) {
        self.free.lock().append(from);
    }
}

/// Moves the top `count` objects of a stack, or as many as it has.
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
    fn free(&mut self, object: T) -> Result<(), BaselineError> {
        self.free_shared(object);
        Ok(())
    }

    fn destroy(&mut self) {}
}

/// `thread-list`: a stack owned by one thread, in a variable, which is cheaper than
/// `thread_local!`. It gets all its objects when it is created and returns them when it is dropped;
/// no other thread can free into it.
#[derive(Debug)]
pub struct ThreadList<'l, T> {
    home: &'l Lifo<T>,
    free: Vec<T>,
}

impl<'l, T> ThreadList<'l, T> {
    /// Creates a list with `count` objects of `home`, or as many as are free.
    pub fn new(home: &'l Lifo<T>, count: usize) -> Self {
        let mut free = Vec::with_capacity(count);
        home.alloc_many(count, &mut free);
        Self { home, free }
    }

    /// Appends `count` objects to `to`, or as many as are free.
    #[inline]
    pub fn alloc_many(&mut self, count: usize, to: &mut Vec<T>) {
        pop_many(&mut self.free, count, to);
    }

    /// Frees all of `from`.
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
    fn free(&mut self, object: T) -> Result<(), BaselineError> {
        self.free.push(object);
        Ok(())
    }

    fn destroy(&mut self) {}
}

impl<T> Drop for ThreadList<'_, T> {
    fn drop(&mut self) {
        self.home.free_many(&mut self.free);
    }
}

/// `batches`: a list of one thread in front of a [`Lifo`], which it uses for 32 objects at a time:
/// the minimum that lets one thread free what another allocates.
#[derive(Debug)]
pub struct Batches<'l, T> {
    behind: &'l Lifo<T>,
    free: Vec<T>,
    /// Objects that are moved to `behind`: kept, so that no batch allocates.
    spill: Vec<T>,
}

impl<'l, T> Batches<'l, T> {
    /// Creates an empty list.
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
            Some(object) => Ok(object),
            None => self.refill(),
        }
    }

    #[inline]
    fn free(&mut self, object: T) -> Result<(), BaselineError> {
        if self.free.len() == 2 * BATCH {
            self.spill();
        }
        self.free.push(object);
        Ok(())
    }

    fn destroy(&mut self) {}
}

impl<T> Drop for Batches<'_, T> {
    fn drop(&mut self) {
        self.behind.free_many(&mut self.free);
    }
}
