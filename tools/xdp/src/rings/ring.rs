//! One ring: a bounded queue with one producer and one consumer, of which one is the kernel.
//!
//! Both indices only ever increase, modulo 2^32; an entry's place is its index modulo the number of
//! entries, a power of two. The owner of a side keeps its own index, and the last index that it has
//! seen of the other side, so that the other's cache line is read once for many entries.

use crate::system::RingMemory;
use pinfold::DmaMemory;
use pinfold::page_pool::{Fragment, Page, PagePool};
use std::sync::atomic::Ordering;

/// The memory of a ring. The real one is [`RingMemory`]; models have another.
pub(super) trait Shared {
    /// Reads the producer's index (acquire: the entries below it have been written).
    fn load_producer(&self) -> u32;
    /// Publishes the producer's index (release: after its entries).
    fn store_producer(&self, index: u32);
    /// Reads the consumer's index (acquire: the entries below it have been read).
    fn load_consumer(&self) -> u32;
    /// Publishes the consumer's index (release: after its entries were read).
    fn store_consumer(&self, index: u32);
    /// Reads a word of the entries.
    fn word(&self, at: usize) -> u64;
    /// Writes a word of the entries.
    fn set_word(&self, at: usize, word: u64);
    /// Returns the number of words of all entries.
    fn words(&self) -> usize;
}

impl Shared for RingMemory {
    #[inline]
    fn load_producer(&self) -> u32 {
        self.producer().load(Ordering::Acquire)
    }
    #[inline]
    fn store_producer(&self, index: u32) {
        self.producer().store(index, Ordering::Release);
    }
    #[inline]
    fn load_consumer(&self) -> u32 {
        self.consumer().load(Ordering::Acquire)
    }
    #[inline]
    fn store_consumer(&self, index: u32) {
        self.consumer().store(index, Ordering::Release);
    }
    #[inline]
    fn word(&self, at: usize) -> u64 {
        // Relaxed: ordered by the indices.
        RingMemory::words(self).get(at).map_or(0, |word| word.load(Ordering::Relaxed))
    }
    #[inline]
    fn set_word(&self, at: usize, word: u64) {
        if let Some(slot) = RingMemory::words(self).get(at) {
            slot.store(word, Ordering::Relaxed);
        }
    }
    fn words(&self) -> usize {
        RingMemory::words(self).len()
    }
}

/// Returns the number of entries of `N` words.
fn entries<M: Shared, const N: usize>(memory: &M) -> u32 {
    // At most 2^31, as the kernel makes them.
    u32::try_from(memory.words() / N).unwrap_or(0)
}

/// The side of a ring that enters: the fill and transmit rings. `N` words are an entry.
#[derive(Debug)]
pub(super) struct Producer<M, const N: usize> {
    memory: M,
    entries: u32,
    /// The index of the next entry, and the one up to which entries are published.
    next: u32,
    published: u32,
    /// The consumer's index when it was last read.
    consumed: u32,
}

impl<M: Shared, const N: usize> Producer<M, N> {
    pub(super) fn new(memory: M) -> Self {
        let (entries, next, consumed) =
            (entries::<M, N>(&memory), memory.load_producer(), memory.load_consumer());
        Self { memory, entries, next, published: next, consumed }
    }

    pub(super) fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns how many entries fit now; reads the consumer's index only if fewer than `wanted` are
    /// known to.
    #[inline]
    pub(super) fn room(&mut self, wanted: u32) -> u32 {
        let known = self.entries.saturating_sub(self.next.wrapping_sub(self.consumed));
        if known >= wanted {
            return known;
        }
        self.consumed = self.memory.load_consumer();
        self.entries.saturating_sub(self.next.wrapping_sub(self.consumed))
    }

    /// Enters an entry, which [`publish`](Self::publish) makes visible; returns false if there is
    /// no room.
    #[inline]
    pub(super) fn push(&mut self, entry: [u64; N]) -> bool {
        if self.room(1) == 0 {
            return false;
        }
        let at = (self.next & (self.entries - 1)) as usize * N;
        for (offset, word) in entry.into_iter().enumerate() {
            self.memory.set_word(at + offset, word);
        }
        self.next = self.next.wrapping_add(1);
        true
    }

    /// Returns the entries that the consumer has not taken.
    pub(super) fn untaken(&self) -> impl Iterator<Item = [u64; N]> + '_ {
        let first = self.memory.load_consumer();
        // None for a consumer that is ahead of the entries.
        let count =
            Some(self.next.wrapping_sub(first)).filter(|count| *count <= self.entries).unwrap_or(0);
        (0..count).map(move |offset| {
            let at = (first.wrapping_add(offset) & (self.entries - 1)) as usize * N;
            std::array::from_fn(|word| self.memory.word(at + word))
        })
    }

    /// Passes the entries to the consumer; returns how many.
    #[inline]
    pub(super) fn publish(&mut self) -> u32 {
        let count = self.next.wrapping_sub(self.published);
        if count != 0 {
            self.memory.store_producer(self.next);
            self.published = self.next;
        }
        count
    }
}

/// The side of a ring that takes: the receive and completion rings. `N` words are an entry.
#[derive(Debug)]
pub(super) struct Consumer<M, const N: usize> {
    memory: M,
    entries: u32,
    /// The index of the next entry, and the one up to which places have been released.
    next: u32,
    released: u32,
    /// The producer's index when it was last read.
    produced: u32,
}

impl<M: Shared, const N: usize> Consumer<M, N> {
    pub(super) fn new(memory: M) -> Self {
        let (entries, next, produced) =
            (entries::<M, N>(&memory), memory.load_consumer(), memory.load_producer());
        Self { memory, entries, next, released: next, produced }
    }

    /// Returns whether there is an entry; reads the producer's index only if none is known.
    #[inline]
    pub(super) fn has_next(&mut self) -> bool {
        if self.next == self.produced {
            self.produced = self.memory.load_producer();
        }
        self.next != self.produced
    }

    /// Takes the next entry if there is one; its place is reused after [`release`](Self::release).
    #[inline]
    pub(super) fn pop(&mut self) -> Option<[u64; N]> {
        if !self.has_next() {
            return None;
        }
        let at = (self.next & (self.entries - 1)) as usize * N;
        let mut entry = [0; N];
        for (offset, word) in entry.iter_mut().enumerate() {
            *word = self.memory.word(at + offset);
        }
        self.next = self.next.wrapping_add(1);
        Some(entry)
    }

    /// Returns the places of the entries taken to the producer.
    #[inline]
    pub(super) fn release(&mut self) {
        if self.next != self.released {
            self.memory.store_consumer(self.next);
            self.released = self.next;
        }
    }
}

// A chunk: the memory that one entry of a ring refers to.

/// The memory of one packet: a page, or a part of one.
#[derive(Debug)]
pub(crate) enum Chunk {
    Page(Page),
    Part(Fragment),
}

/// The memory of a [`Chunk`].
pub(crate) trait Piece {
    fn memory(&self) -> DmaMemory<'_>;
    fn into_chunk(self) -> Chunk;
}

impl Piece for Page {
    #[inline]
    fn memory(&self) -> DmaMemory<'_> {
        Page::memory(self)
    }
    #[inline]
    fn into_chunk(self) -> Chunk {
        Chunk::Page(self)
    }
}

impl Piece for Fragment {
    #[inline]
    fn memory(&self) -> DmaMemory<'_> {
        Fragment::memory(self)
    }
    #[inline]
    fn into_chunk(self) -> Chunk {
        Chunk::Part(self)
    }
}

impl Chunk {
    #[inline]
    pub(crate) fn memory(&self) -> DmaMemory<'_> {
        match self {
            Self::Page(page) => page.memory(),
            Self::Part(part) => part.memory(),
        }
    }

    /// Returns the chunk to `pool`, by its consumer.
    #[inline]
    pub(crate) fn recycle(self, pool: &mut PagePool) {
        match self {
            Self::Page(page) => pool.recycle(page),
            Self::Part(part) => pool.recycle_fragment(part),
        }
    }
}
