//! The owner-local cache with its depot: one mechanism that serves frames, blocks and IOVAs.
//!
//! A [`Magazine`] is a small stack owned by one thread of control; nothing on its path is atomic. When it runs
//! empty or full, *half* of it is exchanged with the [`Depot`] that all owners share. Half, because then it takes
//! at least half a magazine of operations in one direction before the next exchange: an owner that goes to and fro
//! at the edge never goes to the depot at all (Bonwick and Adams, "Magazines and Vmem", USENIX 2001, section 3).
//!
//! The depot is two lock-free stacks over a fixed array of *shelves*, one of the full shelves and one of the empty
//! ones. A stack's head holds the shelf's index and a generation in one word, so that a head which was popped and
//! pushed again in between is not mistaken for the same head (the ABA problem), and no address is ever compared.
//!
//! The thread that popped a shelf owns it until it pushes it again; the release of the push and the acquire of the
//! pop hand the items over.

use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering, UnsafeCell};
use alloc::boxed::Box;

/// A stack of at most `2 * H` free things, owned by one thread of control.
#[derive(Debug)]
pub struct Magazine<T, const H: usize> {
    items: [[T; H]; 2],
    len: usize,
}

impl<T: Copy + Default, const H: usize> Magazine<T, H> {
    /// How many things a magazine holds at most.
    pub const CAPACITY: usize = 2 * H;

    /// An empty magazine.
    pub fn new() -> Self {
        const { assert!(H > 0, "a magazine of size 0 could never exchange anything") };
        Self { items: [[T::default(); H]; 2], len: 0 }
    }

    /// How many things are in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many more things fit.
    pub fn room(&self) -> usize {
        Self::CAPACITY - self.len
    }

    /// Takes the thing that was put in last. O(1).
    #[inline(always)]
    pub fn pop(&mut self) -> Option<T> {
        let last = self.len.checked_sub(1)?;
        let item = *self.items.as_flattened().get(last)?;
        self.len = last;
        Some(item)
    }

    /// Puts a thing in; gives it back where there is no room. O(1).
    ///
    /// # Errors
    /// The thing itself, where the magazine is full.
    #[inline(always)]
    pub fn push(&mut self, item: T) -> Result<(), T> {
        match self.items.as_flattened_mut().get_mut(self.len) {
            Some(slot) => {
                *slot = item;
                self.len += 1;
                Ok(())
            }
            None => Err(item),
        }
    }

    /// Takes at most `n` things, those put in last; the slice is in the order in which they were put in.
    pub fn pop_slice(&mut self, n: usize) -> &[T] {
        let old = self.len;
        self.len -= n.min(old);
        &self.items.as_flattened()[self.len..old]
    }

    /// Puts in as many of `items` as there is room for, first ones first, and returns how many.
    pub fn push_slice(&mut self, items: &[T]) -> usize {
        let n = items.len().min(self.room());
        self.items.as_flattened_mut()[self.len..self.len + n].copy_from_slice(&items[..n]);
        self.len += n;
        n
    }

    /// Puts in what the iterator yields while there is room, and returns how many; stops asking when full.
    #[inline(always)]
    pub fn push_from(&mut self, items: impl Iterator<Item = T>) -> usize {
        let mut pushed = 0;
        let room = self.items.as_flattened_mut().get_mut(self.len..).unwrap_or_default();
        for (slot, item) in room.iter_mut().zip(items) {
            *slot = item;
            pushed += 1;
        }
        self.len += pushed;
        pushed
    }

    /// What is in it, in the order in which it was put in.
    #[inline(always)]
    pub fn as_slice(&self) -> &[T] {
        self.items.as_flattened().get(..self.len).unwrap_or_default()
    }
}

impl<T: Copy + Default, const H: usize> Default for Magazine<T, H> {
    fn default() -> Self {
        Self::new()
    }
}

#[derive(Debug)]
struct Shelf<T, const H: usize> {
    /// The shelf below this one in its stack: its number plus one, 0 at the bottom.
    below: AtomicU32,
    items: UnsafeCell<[T; H]>,
}

/// The head of a stack: a shelf's number plus one in the low half (0: empty stack), a generation in the high half.
#[derive(Clone, Copy)]
struct Head(u64);

impl Head {
    fn top(self) -> Option<u32> {
        #[expect(clippy::cast_possible_truncation, reason = "the low half is the link")]
        (self.0 as u32).checked_sub(1)
    }

    /// A head with another top: the generation goes on, so that this word was never seen before (in 2^32 steps).
    fn with_top(self, link: u32) -> Self {
        let generation = (self.0 >> 32).wrapping_add(1) << 32;
        Self(generation | u64::from(link))
    }
}

/// Where magazines are exchanged: a fixed number of shelves, each full (`H` things) or empty.
///
/// All operations are lock-free, and take constant time but for retries while others exchange.
#[derive(Debug)]
pub struct Depot<T, const H: usize> {
    full: CachePadded<AtomicU64>,
    empty: CachePadded<AtomicU64>,
    shelves: Box<[Shelf<T, H>]>,
}

// SAFETY: the items of a shelf are reached only by the thread that popped it off a stack (see `pop`), and are copied
// values of `T: Send`; everything else is atomic or immutable.
unsafe impl<T: Send, const H: usize> Sync for Depot<T, H> {}

impl<T: Copy + Default, const H: usize> Depot<T, H> {
    /// A depot that holds at most `shelves * H` things. With 0 shelves it never takes any.
    pub fn new(shelves: u32) -> Self {
        let depot = Self {
            full: CachePadded(AtomicU64::new(0)),
            empty: CachePadded(AtomicU64::new(0)),
            shelves: (0..shelves)
                .map(|_| Shelf { below: AtomicU32::new(0), items: UnsafeCell::new([T::default(); H]) })
                .collect(),
        };
        for index in 0..shelves {
            depot.push(&depot.empty, index);
        }
        depot
    }

    /// Moves `H` things from the depot into `magazine`, if there is a full shelf and the room.
    /// Returns whether it did.
    pub fn take(&self, magazine: &mut Magazine<T, H>) -> bool {
        if magazine.room() < H {
            return false;
        }
        let Some(index) = self.pop(&self.full) else { return false };
        let shelf = &self.shelves[index as usize];
        shelf.items.with(|items| {
            // SAFETY: we popped the shelf, so no other thread reaches its items until we push it below; the acquire
            // in `pop` makes the writes of the thread that filled it visible.
            magazine.push_slice(unsafe { &*items });
        });
        self.push(&self.empty, index);
        true
    }

    /// Moves `H` things, those put in last, from `magazine` into the depot, if it has as many and an empty shelf
    /// is left. Returns whether it did.
    pub fn put(&self, magazine: &mut Magazine<T, H>) -> bool {
        if magazine.len() < H {
            return false;
        }
        let Some(index) = self.pop(&self.empty) else { return false };
        let shelf = &self.shelves[index as usize];
        shelf.items.with_mut(|items| {
            // SAFETY: we popped the shelf, so no other thread reaches its items until we push it below.
            unsafe { &mut *items }.copy_from_slice(magazine.pop_slice(H));
        });
        self.push(&self.full, index);
        true
    }

    /// Acquire: every change of a head is a read-modify-write, so all pops and pushes continue the release sequence
    /// of the push that stood the shelf there, and the shelf's content is seen however many came between.
    fn pop(&self, stack: &AtomicU64) -> Option<u32> {
        let mut head = Head(stack.load(Ordering::Acquire));
        loop {
            let index = head.top()?;
            // Another may take the shelf meanwhile and write `below` as it pushes it again. It can do so only
            // after a pop that moved the generation on, so a thread that reads the new `below` fails to exchange.
            let below = self.shelves[index as usize].below.load(Ordering::Relaxed);
            let next = head.with_top(below).0;
            match stack.compare_exchange_weak(head.0, next, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(index),
                Err(now) => head = Head(now),
            }
        }
    }

    fn push(&self, stack: &AtomicU64, index: u32) {
        let mut head = Head(stack.load(Ordering::Relaxed));
        loop {
            let below = head.top().map_or(0, |top| top + 1);
            self.shelves[index as usize].below.store(below, Ordering::Relaxed);
            let next = head.with_top(index + 1).0;
            // Release: the items (or our having read them) come before the shelf is seen on the stack.
            match stack.compare_exchange_weak(head.0, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = Head(now),
            }
        }
    }
}

#[cfg(test)]
mod tests;
