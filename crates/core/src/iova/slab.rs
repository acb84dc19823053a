//! Memory for nodes and maps, in chunks: it grows without moving what it holds, and a release needs
//! no memory.

use super::error::IovaError;
use super::node::{NIL, Node};
use super::region::Region;
use alloc::boxed::Box;
use alloc::vec::Vec;

const CHUNK_SHIFT: u32 = 4;
/// How many items a chunk has.
const CHUNK: usize = 1 << CHUNK_SHIFT;

/// What a slab can hold: something that stores the index of another one while it is spare.
pub(super) trait Item: Copy {
    /// A spare item, followed by `next` in the list.
    fn spare(next: u32) -> Self;
    /// The spare item after this one.
    fn next(&mut self) -> u32;
}

impl Item for Node {
    fn spare(next: u32) -> Self {
        let mut node = Self::new(1, 0, false);
        node.kids[0] = next;
        node
    }
    fn next(&mut self) -> u32 {
        self.kids[0]
    }
}

impl Item for Region {
    fn spare(next: u32) -> Self {
        let mut map = Self::new(false);
        *map.word() = u64::from(next);
        map
    }
    fn next(&mut self) -> u32 {
        u32::try_from(*self.word()).unwrap_or(NIL)
    }
}

/// Items by index, and the spare ones in a list.
#[derive(Debug)]
pub(super) struct Slab<T> {
    chunks: Vec<Box<[T; CHUNK]>>,
    spare: u32,
    spares: usize,
}

impl<T: Item> Slab<T> {
    pub(super) fn new() -> Self {
        Self { chunks: Vec::new(), spare: NIL, spares: 0 }
    }

    /// Makes at least `spares` items spare. O(1) for each, and no more at a time than is asked for
    /// and a chunk.
    pub(super) fn reserve(&mut self, spares: usize) -> Result<(), IovaError> {
        while self.spares < spares {
            let no_memory = IovaError::NoMemory { bytes: CHUNK * size_of::<T>() };
            let first = u32::try_from(self.chunks.len() << CHUNK_SHIFT).map_err(|_| no_memory)?;
            let last = first.checked_add(1 << CHUNK_SHIFT).ok_or(no_memory)?;
            self.chunks.try_reserve(1).map_err(|_| no_memory)?;
            let mut chunk = Vec::new();
            chunk.try_reserve_exact(CHUNK).map_err(|_| no_memory)?;
            // In ascending order, the last one before the spare ones that there are.
            chunk.extend((first + 1..last).map(T::spare).chain([T::spare(self.spare)]));
            self.chunks.push(chunk.into_boxed_slice().try_into().map_err(|_| no_memory)?);
            self.spare = first;
            self.spares += CHUNK;
        }
        Ok(())
    }

    /// Uses a spare item. The caller reserved it: without one nothing is stored, and the result is
    /// `NIL`.
    pub(super) fn take(&mut self, item: T) -> u32 {
        let at = self.spare;
        debug_assert_ne!(at, NIL, "not reserved");
        if at != NIL {
            self.spare = self.get_mut(at).next();
            self.spares -= 1;
            *self.get_mut(at) = item;
        }
        at
    }

    /// Makes an item spare.
    pub(super) fn release(&mut self, at: u32) {
        *self.get_mut(at) = T::spare(self.spare);
        self.spare = at;
        self.spares += 1;
    }

    // Every index is one that this slab made, and the slab never shrinks.
    #[inline]
    pub(super) fn get(&self, at: u32) -> &T {
        &self.chunks[(at >> CHUNK_SHIFT) as usize][at as usize % CHUNK]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: u32) -> &mut T {
        &mut self.chunks[(at >> CHUNK_SHIFT) as usize][at as usize % CHUNK]
    }

    /// How much memory the slab has allocated.
    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<T>()
            + self.chunks.capacity() * size_of::<Box<[T; CHUNK]>>()
    }

    /// How many items are in use.
    #[cfg(all(test, not(loom)))]
    pub(super) fn used(&self) -> usize {
        self.chunks.len() * CHUNK - self.spares
    }
}
