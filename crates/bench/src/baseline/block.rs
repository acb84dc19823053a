//! The baselines' blocks: exclusive access to memory, and lists of them threaded through the blocks themselves.
//!
//! A link is a plain pointer, read and written without a check, as in a kernel. That it is sound rests on ownership: a
//! [`Block`] cannot be copied, and its memory is borrowed exclusively for as long as blocks of it exist.
#![expect(unsafe_code, reason = "links in blocks are raw pointers")]

use std::marker::PhantomData;
use std::ptr::NonNull;

/// What a block's first two words are while it is free. Any bytes are a valid one.
#[derive(Debug)]
#[repr(C)]
struct Node {
    next: Option<NonNull<Node>>,
    word: u64,
}

/// The least bytes of a block.
pub const LEAST: usize = size_of::<Node>();

/// A block that is out: exclusive access to its first two words for `'m`. It is neither copied nor forged.
#[derive(Debug)]
pub struct Block<'m>(NonNull<Node>, PhantomData<&'m mut [u64; 2]>);

// SAFETY: it owns the memory that it points to, which is plain words.
unsafe impl Send for Block<'_> {}

impl<'m> Block<'m> {
    /// The block that these bytes are; `None` where they are fewer than [`LEAST`] or not aligned to 8. Writes nothing.
    pub fn of(bytes: &'m mut [u8]) -> Option<Self> {
        let node = NonNull::from(bytes.first_chunk_mut::<LEAST>()?).cast::<Node>();
        node.is_aligned().then_some(Self(node, PhantomData))
    }

    /// Its address, which stands for both its addresses.
    #[inline(always)]
    pub fn number(&self) -> u64 {
        self.0.as_ptr().addr() as u64
    }

    /// Writes its second word.
    #[inline(always)]
    pub fn write(&mut self, word: u64) {
        // SAFETY: `of` had exclusive access to 16 aligned bytes for `'m`, which passed into this value alone.
        let node = unsafe { self.0.as_mut() };
        node.word = word;
    }
}

/// A list of free blocks, last in first out; each link is in its block.
#[derive(Debug, Default)]
pub struct FreeList<'m> {
    head: Option<NonNull<Node>>,
    own: PhantomData<&'m mut [u64; 2]>,
}

// SAFETY: it owns the blocks in it, as `Block` does.
unsafe impl Send for FreeList<'_> {}

impl<'m> FreeList<'m> {
    /// Whether no block is in it.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.head.is_none()
    }

    /// Puts a block at its head.
    #[inline(always)]
    pub fn push(&mut self, mut block: Block<'m>) {
        // SAFETY: a block is exclusive access to its memory, and the list takes it over with the block.
        let node = unsafe { block.0.as_mut() };
        node.next = self.head;
        self.head = Some(block.0);
    }

    /// Takes the block at its head.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<Block<'m>> {
        let at = self.head?;
        // SAFETY: what is in the list came in by `push`, which took over a `Block<'m>`; nothing else has written there.
        let node = unsafe { at.as_ref() };
        self.head = node.next;
        Some(Block(at, PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_gives_back_what_it_took_last_first() {
        let mut words = [0u64; 8];
        // SAFETY: every `u64` is eight valid bytes; the slice borrows all of them exclusively.
        let (_, bytes, _) = unsafe { words.align_to_mut::<u8>() };
        let (one, two) = bytes.split_at_mut(32);
        let (mut one, two) = (Block::of(one).unwrap(), Block::of(two).unwrap());
        let numbers = (one.number(), two.number());
        one.write(u64::MAX);
        let mut list = FreeList::default();
        list.push(one);
        list.push(two);
        let taken = (list.pop().unwrap().number(), list.pop().unwrap().number());
        assert_eq!(taken, (numbers.1, numbers.0));
        assert!(list.is_empty() && list.pop().is_none());
        assert_eq!(words[1], u64::MAX);
    }

    #[test]
    fn what_is_too_short_or_crooked_is_no_block() {
        let mut words = [0u64; 4];
        // SAFETY: as above.
        let (_, bytes, _) = unsafe { words.align_to_mut::<u8>() };
        assert!(Block::of(&mut bytes[..15]).is_none());
        assert!(Block::of(&mut bytes[1..]).is_none());
    }
}
