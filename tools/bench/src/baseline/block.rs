//! The memory of the baselines: pages of one range, blocks of them with exclusive access, and lists
//! that are linked through the blocks themselves.
//!
//! A link is a plain pointer, read and written without a check, as in a kernel. Ownership makes
//! this sound: a [`Block`] cannot be copied, and its memory is borrowed exclusively for as long as
//! blocks of it exist.
#![expect(unsafe_code, reason = "links in blocks are raw pointers")]

use super::BaselineError;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// The first two words of a free block. Any bytes are a valid value.
#[derive(Debug)]
#[repr(C)]
struct Node {
    next: Option<NonNull<Node>>,
    word: u64,
}

/// The minimum size of a block.
pub(crate) const LEAST: usize = size_of::<Node>();

/// An allocated block: exclusive access to its first two words for `'m`. It cannot be copied or
/// forged.
#[derive(Debug)]
pub(crate) struct Block<'m>(NonNull<Node>, PhantomData<&'m mut [u64; 2]>);

// SAFETY: it owns the memory that it points to, which is plain words.
unsafe impl Send for Block<'_> {}

impl<'m> Block<'m> {
    /// Creates a block of these bytes; `None` if they are fewer than [`LEAST`] or not aligned to 8.
    /// Writes nothing.
    pub(crate) fn of(bytes: &'m mut [u8]) -> Option<Self> {
        let node = (bytes.len() >= LEAST).then(|| NonNull::from(bytes).cast::<Node>())?;
        node.is_aligned().then_some(Self(node, PhantomData))
    }

    /// Returns its address, which serves as the device address as well.
    #[inline(always)]
    pub(crate) fn address(&self) -> u64 {
        self.0.as_ptr().addr() as u64
    }

    /// Writes the second word.
    #[inline(always)]
    pub(crate) fn write(&mut self, word: u64) {
        // SAFETY: `of` had exclusive access to 16 aligned bytes for `'m`, and passed it to this
        // value alone.
        let node = unsafe { self.0.as_mut() };
        node.word = word;
    }
}

/// A list of free blocks, last in first out, linked through the blocks.
#[derive(Debug, Default)]
pub(crate) struct FreeList<'m> {
    head: Option<NonNull<Node>>,
    own: PhantomData<&'m mut [u64; 2]>,
}

// SAFETY: it owns the blocks in it, as `Block` does.
unsafe impl Send for FreeList<'_> {}

impl<'m> FreeList<'m> {
    /// Adds a block at the head.
    #[inline(always)]
    pub(crate) fn push(&mut self, mut block: Block<'m>) {
        // SAFETY: a block is exclusive access to its memory, which passes to the list with the
        // block.
        let node = unsafe { block.0.as_mut() };
        node.next = self.head;
        self.head = Some(block.0);
    }

    /// Removes the block at the head.
    #[inline(always)]
    pub(crate) fn pop(&mut self) -> Option<Block<'m>> {
        let at = self.head?;
        // SAFETY: the node was added by `push`, which consumed its `Block<'m>`; nothing else has
        // written there since.
        let node = unsafe { at.as_ref() };
        self.head = node.next;
        Some(Block(at, PhantomData))
    }
}

/// The bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// Pages of one memory range. It models `dma_alloc_coherent` at its cheapest, a push and a pop, so
/// that a comparison is about the pools.
#[derive(Debug)]
pub(crate) struct Pages<'m> {
    fresh: Vec<&'m mut [u8]>,
    total: usize,
}

impl<'m> Pages<'m> {
    /// Creates an allocator of all pages of `memory`, lowest first.
    pub(crate) fn new(memory: &'m mut [u8]) -> Self {
        let fresh: Vec<_> = memory.chunks_exact_mut(PAGE).rev().collect();
        Self { total: fresh.len(), fresh }
    }

    /// Allocates a page.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    pub(crate) fn alloc(&mut self) -> Result<&'m mut [u8], BaselineError> {
        self.fresh.pop().ok_or(BaselineError::NoPages(self.total))
    }
}

/// Cuts memory into blocks of `size` bytes, highest first, so a list they are pushed to returns the
/// lowest first.
pub(crate) fn blocks(memory: &mut [u8], size: usize) -> impl Iterator<Item = Block<'_>> {
    memory.chunks_exact_mut(size).rev().filter_map(Block::of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_last_in_first_out() {
        let mut words = [0u64; 8];
        // SAFETY: every `u64` is eight valid bytes; the slice borrows all of them exclusively.
        let (_, bytes, _) = unsafe { words.align_to_mut::<u8>() };
        let (one, two) = bytes.split_at_mut(32);
        let (mut one, two) = (Block::of(one).unwrap(), Block::of(two).unwrap());
        let addresses = (one.address(), two.address());
        one.write(u64::MAX);
        let mut list = FreeList::default();
        list.push(one);
        list.push(two);
        let popped = (list.pop().unwrap().address(), list.pop().unwrap().address());
        assert_eq!(popped, (addresses.1, addresses.0));
        assert!(list.pop().is_none());
        assert_eq!(words[1], u64::MAX);
    }

    #[test]
    fn short_or_misaligned_memory_is_rejected() {
        let mut words = [0u64; 4];
        // SAFETY: as above.
        let (_, bytes, _) = unsafe { words.align_to_mut::<u8>() };
        assert!(Block::of(&mut bytes[..15]).is_none());
        assert!(Block::of(&mut bytes[1..]).is_none());
    }
}
