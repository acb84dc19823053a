//! [`Names`]: the requests of a loop, which a C program names by tokens of 64 bits.
//!
//! A token is a slot (the low 20 bits) and a number that no request of the process had before. The
//! slot stays the request's until its end is reported to the program, which is later than the loop
//! frees its own slot: so the tokens are not the loop's.

use std::collections::TryReserveError;
use std::sync::atomic::{AtomicU64, Ordering};

const SLOT_BITS: u32 = 20;
/// A loop takes so many numbers at a time from those of the process.
const RANGE: u64 = 1 << 16;

/// One slot.
struct Entry<T> {
    name: u64,
    value: Option<T>,
}

pub(super) struct Names<T> {
    entries: Vec<Entry<T>>,
    /// Slots without a request.
    free: Vec<u32>,
    /// The slot here of the request in each slot of the loop.
    of_loop: Vec<u32>,
    /// The next number, and the end of the range.
    next: u64,
    end: u64,
}

impl<T> Names<T> {
    /// Creates `slots` slots.
    ///
    /// # Errors
    /// There is no memory for them.
    pub(super) fn new(slots: usize) -> Result<Self, TryReserveError> {
        let (mut entries, mut free, mut of_loop) = (Vec::new(), Vec::new(), Vec::new());
        entries.try_reserve_exact(slots)?;
        free.try_reserve_exact(slots)?;
        of_loop.try_reserve_exact(slots)?;
        entries.extend((0..slots).map(|_| Entry { name: 0, value: None }));
        free.extend((0..u32::try_from(slots).unwrap_or(u32::MAX)).rev());
        of_loop.resize(slots, u32::MAX);
        Ok(Self { entries, free, of_loop, next: 0, end: 0 })
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Returns a number of 44 bits that is not 0. They are used up after 2^44 requests, and the
    /// first then comes again.
    fn number(&mut self) -> u64 {
        /// The first number that no loop has.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            if self.next == self.end {
                self.next = NEXT.fetch_add(RANGE, Ordering::Relaxed);
                self.end = self.next.wrapping_add(RANGE);
            }
            let number = self.next << SLOT_BITS >> SLOT_BITS;
            self.next = self.next.wrapping_add(1);
            if number != 0 {
                return number;
            }
        }
    }

    /// Adds a request that has a slot of the loop, and returns its name; `None` if no slot is free.
    pub(super) fn add(&mut self, of_loop: usize, value: T) -> Option<u64> {
        let slot = self.free.pop()?;
        let name = self.number() << SLOT_BITS | u64::from(slot);
        *self.of_loop.get_mut(of_loop)? = slot;
        *self.entries.get_mut(slot as usize)? = Entry { name, value: Some(value) };
        Some(name)
    }

    fn slot(name: u64) -> usize {
        usize::try_from(name & ((1 << SLOT_BITS) - 1)).unwrap_or(usize::MAX)
    }

    /// Returns the request with this name.
    pub(super) fn get(&self, name: u64) -> Option<&T> {
        let entry = self.entries.get(Self::slot(name)).filter(|entry| entry.name == name);
        entry.and_then(|entry| entry.value.as_ref())
    }

    pub(super) fn get_mut(&mut self, name: u64) -> Option<&mut T> {
        let entry = self.entries.get_mut(Self::slot(name)).filter(|entry| entry.name == name);
        entry.and_then(|entry| entry.value.as_mut())
    }

    /// Returns the request that was added last with this slot of the loop, and its name.
    pub(super) fn by_slot(&mut self, of_loop: usize) -> Option<(u64, &mut T)> {
        let slot = *self.of_loop.get(of_loop)?;
        let entry = self.entries.get_mut(slot as usize)?;
        entry.value.as_mut().map(|value| (entry.name, value))
    }

    /// Removes all requests.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.entries.drain(..).filter_map(|entry| entry.value)
    }

    /// Returns the number of slots.
    pub(super) fn slots(&self) -> usize {
        self.entries.len()
    }

    /// Returns the name of the request in a slot.
    pub(super) fn at(&self, slot: usize) -> Option<u64> {
        let entry = self.entries.get(slot)?;
        entry.value.as_ref().map(|_| entry.name)
    }

    /// Yields the names of all requests.
    pub(super) fn all(&self) -> impl Iterator<Item = u64> {
        (0..self.slots()).filter_map(|slot| self.at(slot))
    }

    /// Removes a request.
    pub(super) fn free(&mut self, name: u64) -> Option<T> {
        let slot = Self::slot(name);
        let entry = self.entries.get_mut(slot).filter(|entry| entry.name == name)?;
        let value = entry.value.take()?;
        self.free.extend(u32::try_from(slot));
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_never_given_twice_and_a_slot_not_before_it_is_free() {
        let mut names = Names::new(3).unwrap();
        let [a, b, c] = [0, 1, 2].map(|slot| names.add(slot, slot).unwrap());
        assert!(names.is_full());
        // The loop's slot is free before the name is.
        assert_eq!(names.add(1, 9), None);
        assert_eq!(names.free(b), Some(1));
        assert_eq!(names.get(b), None);
        assert_eq!(names.free(b), None);
        let d = names.add(1, 7).unwrap();
        assert_eq!((d ^ b) & 0xf_ffff, 0);
        assert_ne!(d, b);
        assert_eq!(
            (
                names.get(b).copied(),
                names.get(d).copied(),
                names.by_slot(1).map(|(name, value)| (name, *value))
            ),
            (None, Some(7), Some((d, 7)))
        );
        assert_eq!(names.all().collect::<Vec<_>>(), [a, d, c]);
        assert!([a, b, c, d].iter().all(|name| *name != 0));
        for forged in [0, u64::MAX, a ^ 1, a ^ 1 << 63, a + (1 << SLOT_BITS)] {
            assert_eq!(names.get(forged), None, "{forged:#x}");
        }
    }

    #[test]
    fn numbers_of_loops_differ_and_are_never_0() {
        let (mut one, mut two) = (Names::<()>::new(1).unwrap(), Names::<()>::new(1).unwrap());
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..3 * RANGE {
            assert!(seen.insert(one.number()));
            assert!(seen.insert(two.number()));
        }
        // The end of the 44 bits.
        (one.next, one.end) = ((1 << 44) - 1, (1 << 44) + 5);
        assert_eq!([one.number(), one.number(), one.number()], [(1 << 44) - 1, 1, 2]);
    }
}
