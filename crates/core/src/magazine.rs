//! [`Magazine`]: the numbers of free objects that one owner caches, of a DMA pool or a page pool.
//!
//! Owners of frames have another magazine (`frame/magazine.rs`): words of the zone's bitmap,
//! because it frees many neighbours by one compare-and-swap, and detects a number that is freed
//! twice.

/// The most numbers of a magazine.
pub(crate) const LIMIT: usize = (1 << COUNT_SHIFT) - 1;

const COUNT_SHIFT: u32 = 10;

/// A stack of up to [`LIMIT`] numbers in an array whose length does not change: in its owner, or in
/// a box that is exchanged as a whole. `COUNTS`: whether it knows how many were pushed.
#[derive(Debug)]
pub(crate) struct Magazine<S, const COUNTS: bool> {
    numbers: S,
    /// The number of entries; with `COUNTS`, the upper bits are the number of pushes, so that a
    /// counted push is one addition.
    word: u64,
}

impl<S: AsRef<[u32]> + AsMut<[u32]>> Magazine<S, true> {
    /// Returns how many numbers were ever pushed, of those that are counted.
    pub(crate) fn pushed(&self) -> u64 {
        self.word >> COUNT_SHIFT
    }

    /// Adds a number without counting it; `false` if it is full.
    #[inline(always)]
    pub(crate) fn push_uncounted(&mut self, number: u32) -> bool {
        self.push_adding(number, 1)
    }
}

impl<S: AsRef<[u32]> + AsMut<[u32]>, const COUNTS: bool> Magazine<S, COUNTS> {
    /// The bits of the word that hold how many numbers there are.
    const LEN: u64 = if COUNTS { LIMIT as u64 } else { u64::MAX };
    /// One number more, and one more that was pushed.
    const PUSHED: u64 = if COUNTS { 1 << COUNT_SHIFT | 1 } else { 1 };

    /// Creates an empty magazine, whose capacity is the array's length.
    pub(crate) fn empty(numbers: S) -> Self {
        Self { numbers, word: 0 }
    }

    /// Creates a full magazine.
    pub(crate) fn full(numbers: S) -> Self {
        Self { word: numbers.as_ref().len() as u64, numbers }
    }

    /// Returns the array: all numbers of a full magazine, arbitrary ones of an empty one.
    pub(crate) fn into_array(self) -> S {
        self.numbers
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "at most the array's length")]
    pub(crate) fn len(&self) -> usize {
        (self.word & Self::LEN) as usize
    }

    fn set_len(&mut self, len: usize) {
        self.word = (self.word & !Self::LEN) | len as u64;
    }

    pub(crate) fn capacity(&self) -> usize {
        self.numbers.as_ref().len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns its numbers; the last one is popped first.
    pub(crate) fn as_slice(&self) -> &[u32] {
        self.numbers.as_ref().get(..self.len()).unwrap_or_default()
    }

    #[inline(always)]
    pub(crate) fn pop(&mut self) -> Option<u32> {
        // An empty magazine has no such place either.
        let number = *self.numbers.as_ref().get(self.len().wrapping_sub(1))?;
        self.word -= 1;
        Some(number)
    }

    /// Adds a number; `false` if it is full.
    #[inline(always)]
    pub(crate) fn push(&mut self, number: u32) -> bool {
        self.push_adding(number, Self::PUSHED)
    }

    #[inline(always)]
    fn push_adding(&mut self, number: u32, added: u64) -> bool {
        let len = self.len();
        let Some(place) = self.numbers.as_mut().get_mut(len) else { return false };
        *place = number;
        self.word = self.word.wrapping_add(added);
        true
    }

    /// Removes up to `count` numbers, those that would be popped first, and returns them in the
    /// order in which they were pushed.
    pub(crate) fn pop_many(&mut self, count: usize) -> &[u32] {
        let end = self.len();
        let start = end.saturating_sub(count);
        self.set_len(start);
        self.numbers.as_ref().get(start..end).unwrap_or_default()
    }

    /// Fills an empty magazine with as many of `numbers` as it has room for, so that they are
    /// popped in this order. Returns how many those are.
    pub(crate) fn fill(&mut self, numbers: impl ExactSizeIterator<Item = u32>) -> usize {
        debug_assert!(self.is_empty());
        let count = numbers.len().min(self.capacity());
        let places = self.numbers.as_mut().get_mut(..count).unwrap_or_default();
        // A slice: `take(count).rev()` computes its place anew for each number, which is half of a
        // fresh alloc's time.
        places.iter_mut().rev().zip(numbers).for_each(|(place, number)| *place = number);
        self.set_len(count);
        count
    }

    /// Removes the numbers for which `keep` returns false. The others stay in their order.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(u32) -> bool) {
        let mut kept = 0;
        for at in 0..self.len() {
            if let Some(&number) = self.numbers.as_ref().get(at)
                && keep(number)
                && let Some(place) = self.numbers.as_mut().get_mut(kept)
            {
                *place = number;
                kept += 1;
            }
        }
        self.set_len(kept);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_magazine_is_a_stack_of_its_capacity() {
        let mut magazine = Magazine::<_, true>::empty([0; 3]);
        assert!(magazine.is_empty() && magazine.pop().is_none());
        assert!([7, 8, 9].into_iter().all(|number| magazine.push(number)));
        assert!(!magazine.push(10), "it is full");
        assert_eq!(
            (magazine.len(), magazine.capacity(), magazine.as_slice()),
            (3, 3, &[7, 8, 9][..])
        );
        assert_eq!(magazine.pop(), Some(9));
        assert_eq!(magazine.pop_many(1), [8]);
        assert_eq!(magazine.pop_many(2), [7], "there are no more");
        assert_eq!(magazine.pop_many(2), []);
        assert_eq!(magazine.pushed(), 3, "one was refused");
    }

    #[test]
    fn an_array_is_exchanged_as_a_whole() {
        let mut magazine = Magazine::<_, true>::full([1, 2]);
        assert!(!magazine.push(3));
        assert_eq!((magazine.pop(), magazine.pop(), magazine.pop()), (Some(2), Some(1), None));
        assert_eq!(Magazine::<_, true>::full([1, 2]).into_array(), [1, 2]);
    }

    #[test]
    fn numbers_are_filled_in_to_be_popped_in_their_order() {
        for (numbers, expected) in [(4..6, 2), (4..7, 3), (4..9, 3), (4..4, 0)] {
            let mut magazine = Magazine::<_, true>::empty([0; 3]);
            assert_eq!(magazine.fill(numbers.clone()), expected);
            let popped: std::vec::Vec<_> = core::iter::from_fn(|| magazine.pop()).collect();
            assert_eq!(popped, numbers.take(expected).collect::<std::vec::Vec<_>>());
        }
    }

    #[test]
    fn what_is_kept_stays_in_order() {
        let mut magazine = Magazine::<_, true>::full([1, 2, 3, 4, 5]);
        magazine.pop();
        magazine.retain(|number| number != 1 && number != 3);
        assert_eq!(magazine.as_slice(), [2, 4]);
        assert!(magazine.push(6) && magazine.push_uncounted(7) && magazine.pushed() == 1);
        assert!(magazine.push_uncounted(8) && !magazine.push_uncounted(9), "it is full");
        assert_eq!((magazine.as_slice(), magazine.pushed()), (&[2, 4, 6, 7, 8][..], 1));
    }
}
