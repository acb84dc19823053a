//! `thread-list`: an unchecked stack of one thread. It is what remains of an allocator without
//! everything that can be left out: the floor.

use super::{BaselineError, Blocks};
use pinfold_replay::lock::KernelLock;

/// The objects of the lists of several threads, under one lock. All of them exist from the start.
#[derive(Debug)]
pub(crate) struct Lifo<T> {
    free: KernelLock<Vec<T>>,
    total: usize,
}

impl<T> Lifo<T> {
    /// Creates a stack of these objects, the last one on top.
    pub(crate) fn new(objects: impl IntoIterator<Item = T>) -> Self {
        let free: Vec<T> = objects.into_iter().collect();
        Self { total: free.len(), free: KernelLock::new(free) }
    }

    /// Appends `count` objects to `to`, or as many as are free, with one lock.
    #[inline]
    pub(crate) fn alloc_many(&self, count: usize, to: &mut Vec<T>) {
        pop_many(&mut self.free.lock(), count, to);
    }

    /// Frees all of `from`, with one lock.
    #[inline]
    pub(crate) fn free_many(&self, from: &mut Vec<T>) {
        self.free.lock().append(from);
    }
}

/// Moves the top `count` objects of a stack, or as many as it has.
#[inline]
fn pop_many<T>(free: &mut Vec<T>, count: usize, to: &mut Vec<T>) {
    let at = free.len().saturating_sub(count);
    to.extend(free.drain(at..));
}

/// `thread-list`: a stack owned by one thread, in a variable, which is cheaper than
/// `thread_local!`. It gets all its objects when it is created and returns them when it is dropped;
/// no other thread can free into it.
#[derive(Debug)]
pub(crate) struct ThreadList<'l, T> {
    home: &'l Lifo<T>,
    free: Vec<T>,
}

impl<'l, T> ThreadList<'l, T> {
    /// Creates a list with `count` objects of `home`, or as many as are free.
    pub(crate) fn new(home: &'l Lifo<T>, count: usize) -> Self {
        let mut free = Vec::with_capacity(count);
        home.alloc_many(count, &mut free);
        Self { home, free }
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
}

impl<T> Drop for ThreadList<'_, T> {
    fn drop(&mut self) {
        self.home.free_many(&mut self.free);
    }
}
