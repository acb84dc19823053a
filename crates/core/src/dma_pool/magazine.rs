//! [`Owner`], which has two [magazines](crate::magazine), of a size that [`Cap`] limits; [`Depot`],
//! where they are exchanged, which also has the list of chunks, the pool's totals and the owners'
//! numbers.

use super::directory::Chunk;
use crate::sync::count_steps;
use alloc::boxed::Box;
use alloc::collections::{TryReserveError, VecDeque};
use alloc::vec;
use alloc::vec::Vec;
use core::mem::swap;
use core::ops::Range;

/// The most numbers of a magazine.
pub(super) const MOST: usize = 512;
const _: () = assert!(MOST <= crate::magazine::LIMIT);

/// An array of the numbers of free blocks, of the size that [`Cap`] limits.
pub(super) type Magazine = crate::magazine::Magazine<Box<[u32]>, false>;

/// Returns an empty one.
pub(super) fn magazine(capacity: usize) -> Magazine {
    Magazine::empty(vec![0; capacity].into())
}

/// The most blocks that an owner may cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cap {
    /// The numbers of one magazine.
    magazine: usize,
    /// Whether an owner has two.
    two: bool,
}

impl Cap {
    /// As many blocks of `size` bytes as fit in `bytes`, at least one and at most `2 * MOST`.
    pub(super) fn new(bytes: u64, size: u64) -> Self {
        let blocks = usize::try_from(bytes / size).unwrap_or(usize::MAX);
        Self { magazine: (blocks / 2).clamp(1, MOST), two: blocks >= 2 }
    }
}

/// One owner of a pool, which alone has the blocks in its magazines.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) current: Magazine,
    /// Full or empty, except after a flush or a short exchange.
    pub(super) previous: Magazine,
    /// The pool's pressure when the owner last looked.
    pub(super) pressure: u64,
    /// The name of the owner in reports.
    pub(super) number: u32,
}

impl Owner {
    pub(super) fn new(cap: Cap, pressure: u64, number: u32) -> Self {
        Self {
            current: magazine(cap.magazine),
            previous: magazine(if cap.two { cap.magazine } else { 0 }),
            pressure,
            number,
        }
    }

    /// Uses the other magazine, if that has numbers. The current one is empty.
    pub(super) fn swap_for_alloc(&mut self) -> bool {
        swap(&mut self.current, &mut self.previous);
        if self.current.is_empty() {
            swap(&mut self.current, &mut self.previous);
        }
        !self.current.is_empty()
    }

    /// Uses the other magazine, if that is empty. The current one is full.
    pub(super) fn swap_for_free(&mut self) -> bool {
        let can = self.previous.is_empty() && self.previous.capacity() > 0;
        if can {
            swap(&mut self.current, &mut self.previous);
        }
        can
    }
}

/// The part of a pool that its owners share, under one lock: free blocks, chunks and limits.
///
/// Arrays in it are full, empty, or the one that is partly full. They have places for all numbers
/// that were ever cut, so that a free finds an empty array to exchange its full one for, and
/// allocates no memory.
#[derive(Debug)]
pub(super) struct Depot {
    cap: Cap,
    /// The last one is exchanged first.
    full: VecDeque<Box<[u32]>>,
    part: Magazine,
    empty: Vec<Box<[u32]>>,
    /// Numbers of each chunk that no owner has had yet, in the order in which the chunks were
    /// acquired.
    pub(super) fresh: VecDeque<Range<u32>>,
    pub(super) fresh_blocks: u64,
    /// The number of blocks that were taken from `fresh` and still belong to the pool.
    pub(super) cut: u64,
    /// The number of those that a shrink has set aside.
    pub(super) aside: u64,
    pub(super) chunks: Vec<Chunk>,
    /// How often chunks were removed.
    pub(super) removals: u64,
    /// Blocks and bytes of all chunks.
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    /// The most blocks that were outside the depot.
    pub(super) peak: u64,
    /// The number of calls that walk all blocks; no chunk is released meanwhile.
    pub(super) visits: u64,
    next_owner: u32,
    free_owners: Vec<u32>,
}

impl Depot {
    pub(super) fn new(cap: Cap) -> Self {
        Self {
            cap,
            full: VecDeque::new(),
            part: magazine(cap.magazine),
            empty: Vec::new(),
            fresh: VecDeque::new(),
            fresh_blocks: 0,
            cut: 0,
            aside: 0,
            chunks: Vec::new(),
            removals: 0,
            blocks: 0,
            bytes: 0,
            peak: 0,
            visits: 0,
            next_owner: 0,
            free_owners: Vec::new(),
        }
    }

    /// Reserves space for `chunks` more chunks.
    pub(super) fn reserve(&mut self, chunks: usize) -> Result<(), TryReserveError> {
        self.chunks.try_reserve(chunks)?;
        self.fresh.try_reserve(chunks)
    }

    /// Adds a chunk whose blocks are free. Allocates no memory where room was
    /// [made](Self::reserve).
    pub(super) fn add(&mut self, chunk: Chunk) {
        self.blocks += u64::from(chunk.blocks());
        self.bytes += chunk.bytes();
        self.fresh.push_back(chunk.first()..chunk.first() + chunk.blocks());
        self.fresh_blocks += u64::from(chunk.blocks());
        self.chunks.push(chunk);
    }

    /// Fills an empty magazine with numbers: used ones first, else fresh ones. `false` if there are
    /// none. Allocates memory for the return of fresh ones.
    pub(super) fn refill(&mut self, magazine: &mut Magazine) -> bool {
        debug_assert!(magazine.is_empty());
        if let Some(full) = self.full.pop_back() {
            let empty = core::mem::replace(magazine, Magazine::full(full));
            self.empty.push(empty.into_array());
        } else if !self.part.is_empty() && self.part.capacity() == magazine.capacity() {
            swap(&mut self.part, magazine);
        } else {
            self.cut(magazine);
        }
        // Not in `cut` alone: a block may be cut while a shrink has others aside, which then come
        // back and leave the depot, too.
        self.peak = self.peak.max(self.blocks - self.free());
        !magazine.is_empty()
    }

    fn cut(&mut self, magazine: &mut Magazine) {
        let Some(fresh) = self.fresh.front_mut() else { return };
        let count = magazine.fill(fresh.clone());
        // At most the length of the range.
        fresh.start = fresh.start.wrapping_add(u32::try_from(count).unwrap_or(u32::MAX));
        if fresh.start == fresh.end {
            self.fresh.pop_front();
        }
        self.cut += count as u64;
        self.fresh_blocks -= count as u64;
        let arrays = self.arrays();
        let more = usize::try_from(self.cut)
            .unwrap_or(usize::MAX)
            .div_ceil(self.cap.magazine)
            .saturating_sub(arrays);
        self.empty.extend((0..more).map(|_| vec![0; self.cap.magazine].into()));
        // Blocks are cut when no array is full; all of them can be from now on.
        self.full.reserve(arrays + more);
    }

    fn arrays(&self) -> usize {
        self.full.len() + self.empty.len()
    }

    /// Takes the numbers of a magazine, and leaves it empty. A full one is exchanged as a whole.
    pub(super) fn take_all(&mut self, magazine: &mut Magazine) {
        if magazine.len() == self.cap.magazine
            && let Some(empty) = self.empty.pop()
        {
            let full = core::mem::replace(magazine, Magazine::empty(empty));
            self.full.push_back(full.into_array());
            return;
        }
        while let Some(number) = magazine.pop() {
            self.take_one(number);
        }
    }

    fn take_one(&mut self, number: u32) {
        if !self.part.push(number) {
            if let Some(empty) = self.empty.pop() {
                let full = core::mem::replace(&mut self.part, Magazine::empty(empty));
                self.full.push_back(full.into_array());
            }
            let pushed = self.part.push(number);
            debug_assert!(pushed, "there is an array for each number that was cut");
        }
    }

    /// Returns how many free blocks are in the depot.
    pub(super) fn free(&self) -> u64 {
        let in_arrays = self.full.len() * self.cap.magazine + self.part.len();
        in_arrays as u64 + self.aside + self.fresh_blocks
    }

    /// Calls `each` with every number in the depot.
    pub(super) fn for_each(&self, mut each: impl FnMut(u32)) {
        self.full.iter().flat_map(|full| full.iter()).for_each(|&number| each(number));
        self.part.as_slice().iter().for_each(|&number| each(number));
        self.fresh.iter().cloned().flatten().for_each(each);
    }

    /// Returns how many arrays are full.
    pub(super) fn full_arrays(&self) -> usize {
        self.full.len()
    }

    /// Removes the full array that has been there longest.
    pub(super) fn take_oldest(&mut self) -> Option<Box<[u32]>> {
        let array = self.full.pop_front()?;
        self.aside += array.len() as u64;
        Some(array)
    }

    /// Puts an array back that was [taken out](Self::take_oldest), with these of its numbers.
    pub(super) fn put_back(&mut self, array: Box<[u32]>, numbers: &[u32]) {
        if numbers.len() == array.len() {
            self.aside -= numbers.len() as u64;
            self.full.push_back(array);
        } else {
            self.empty.push(array);
            self.take_numbers(numbers);
        }
    }

    /// Returns numbers that were set aside.
    pub(super) fn take_numbers(&mut self, numbers: &[u32]) {
        count_steps(numbers.len());
        self.aside -= numbers.len() as u64;
        numbers.iter().for_each(|&number| self.take_one(number));
    }

    /// Removes the numbers of the array that is partly full for which `keep` returns false.
    pub(super) fn keep_in_part(&mut self, keep: impl FnMut(u32) -> bool) {
        let before = self.part.len();
        count_steps(before);
        self.part.retain(keep);
        self.aside += (before - self.part.len()) as u64;
    }

    /// Returns the arrays that are more than the numbers that were cut need: as many as there is
    /// memory for a list of.
    pub(super) fn surplus(&mut self) -> Vec<Box<[u32]>> {
        let needed = usize::try_from(self.cut).unwrap_or(usize::MAX).div_ceil(self.cap.magazine);
        let empty = needed.saturating_sub(self.full.len()).min(self.empty.len());
        let mut surplus = Vec::new();
        if surplus.try_reserve_exact(self.empty.len() - empty).is_ok() {
            surplus.extend(self.empty.drain(empty..));
        }
        // Not by `shrink_to`, which ends the process where it fails.
        let (mut list, mut deque) = (Vec::new(), VecDeque::new());
        let room = needed.max(self.empty.len());
        if room < self.empty.capacity() && list.try_reserve_exact(room).is_ok() {
            list.append(&mut self.empty);
            self.empty = list;
        }
        let room = needed.max(self.full.len());
        if room < self.full.capacity() && deque.try_reserve_exact(room).is_ok() {
            deque.append(&mut self.full);
            self.full = deque;
        }
        surplus
    }

    /// Returns a new owner.
    pub(super) fn new_owner(&mut self, pressure: u64) -> Owner {
        let number = self.free_owners.pop().unwrap_or_else(|| {
            let number = self.next_owner;
            // A number of a report, not of a right: it may wrap after 2^32 owners that were
            // forgotten.
            self.next_owner = self.next_owner.wrapping_add(1);
            self.free_owners.reserve(number as usize);
            number
        });
        Owner::new(self.cap, pressure, number)
    }

    /// Takes back an owner's blocks, and its number.
    pub(super) fn retire(&mut self, owner: &mut Owner) {
        self.flush(owner);
        self.free_owners.push(owner.number);
    }

    pub(super) fn flush(&mut self, owner: &mut Owner) {
        self.take_all(&mut owner.current);
        self.take_all(&mut owner.previous);
    }

    /// The bytes that it and its owners have allocated.
    #[cfg(any(feature = "bench-internals", all(test, not(loom))))]
    pub(super) fn metadata_bytes(&self) -> usize {
        let owners = (self.next_owner as usize).saturating_sub(self.free_owners.len());
        let of_owners = owners * if self.cap.two { 2 } else { 1 };
        // The depot has one more, which is partly full.
        let arrays = (self.arrays() + of_owners + 1) * self.cap.magazine * 4;
        let lists = (self.full.capacity() + self.empty.capacity()) * size_of::<Box<[u32]>>();
        arrays + lists + self.chunks.capacity() * size_of::<Chunk>()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A depot of `blocks` blocks, which no owner has had, and of arrays of two numbers.
    fn depot(blocks: u32) -> Depot {
        let mut depot = Depot::new(Cap::new(4, 1));
        depot.fresh.push_back(0..blocks);
        depot.fresh_blocks = blocks.into();
        depot.blocks = blocks.into();
        depot
    }

    /// Returns `count` full magazines from the depot.
    fn refilled(depot: &mut Depot, count: usize) -> Vec<Magazine> {
        let mut magazines: Vec<_> = (0..count).map(|_| magazine(2)).collect();
        for magazine in &mut magazines {
            assert!(depot.refill(magazine));
            assert_eq!(magazine.len(), 2);
        }
        magazines
    }

    #[test]
    fn the_peak_is_the_most_blocks_that_were_outside() {
        let mut depot = depot(10);
        let mut first = refilled(&mut depot, 1);
        depot.take_all(&mut first[0]);
        let aside = depot.take_oldest().unwrap();
        // Fresh ones are cut, because the others are set aside.
        let mut second = refilled(&mut depot, 1);
        assert_eq!((depot.cut, depot.peak), (4, 2), "not those that are set aside");
        let numbers = aside.to_vec();
        depot.put_back(aside, &numbers);
        let mut third = refilled(&mut depot, 1);
        assert_eq!((depot.cut, depot.peak), (4, 4), "they have left the depot again");
        depot.take_all(&mut second[0]);
        depot.take_all(&mut third[0]);
        refilled(&mut depot, 1);
        assert_eq!(depot.peak, 4, "it does not fall");
    }

    #[test]
    fn a_free_finds_room_for_each_full_array() {
        let mut depot = depot(64);
        let mut magazines = refilled(&mut depot, 32);
        let room = (depot.full.capacity(), depot.empty.capacity());
        magazines.iter_mut().for_each(|magazine| depot.take_all(magazine));
        assert_eq!((depot.full.len(), depot.empty.len()), (32, 0));
        assert_eq!((depot.full.capacity(), depot.empty.capacity()), room, "a list has grown");
    }

    #[test]
    fn a_shrink_leaves_arrays_for_what_is_still_cut() {
        let mut depot = depot(64);
        let mut magazines = refilled(&mut depot, 32);
        magazines.iter_mut().skip(2).for_each(|magazine| depot.take_all(magazine));
        for _ in 0..29 {
            let array = depot.take_oldest().unwrap();
            depot.put_back(array, &[]);
        }
        // As if the chunks of those were removed.
        depot.cut -= depot.aside;
        depot.blocks -= depot.aside;
        depot.aside = 0;
        assert_eq!((depot.cut, depot.full.len(), depot.empty.len()), (6, 1, 31));
        assert_eq!(depot.surplus().len(), 29);
        let room = (depot.full.capacity(), depot.empty.capacity());
        assert!(room.0 < 32 && room.1 < 32, "the lists shrink, too: {room:?}");
        magazines.iter_mut().take(2).for_each(|magazine| depot.take_all(magazine));
        assert_eq!((depot.full.len(), depot.empty.len()), (3, 0));
        assert_eq!((depot.full.capacity(), depot.empty.capacity()), room, "a list has grown");
    }
}
