//! The places of a ring's table, and the memory in them.

use super::index::{BufferIndex, RegisterError};
use crate::folios;
use crate::sys::uring;

/// The most places that a table has (Linux 5.13; 1,024 before).
pub(super) const MOST_PLACES: usize = 16_384;

/// The memory of a place: its address and its length.
pub(super) type Range = (usize, usize);

/// The places of a table, all in use.
#[derive(Debug)]
pub(super) struct Places {
    places: Vec<Range>,
    /// The same by address; no two overlap.
    order: Vec<(Range, u16)>,
}

impl Places {
    /// Returns places for these pieces of memory, in order, each in as many places as its length
    /// and its pages need.
    pub(super) fn of(memory: impl IntoIterator<Item = Range>) -> Result<Self, RegisterError> {
        let mut places: Vec<Range> = Vec::new();
        for (addr, len) in memory {
            places.extend(folios::places(addr, len));
        }
        let requested = places.len();
        if requested == 0 || requested > MOST_PLACES {
            return Err(RegisterError::Capacity { requested, limit: MOST_PLACES });
        }
        // None is empty, longer than a place or wraps.
        let mut order: Vec<(Range, u16)> = places.iter().copied().zip(0..).collect();
        order.sort_unstable();
        let mut before: Option<(Range, u16)> = None;
        for &((addr, len), index) in &order {
            if let Some(((start, size), other)) = before.filter(|((at, len), _)| at + len > addr) {
                // The later of the two in the caller's order is refused.
                let ((addr, len), with) =
                    if index > other { ((addr, len), other) } else { ((start, size), index) };
                return Err(RegisterError::Overlaps { addr, len, with: BufferIndex::new(with) });
            }
            before = Some(((addr, len), index));
        }
        Ok(Self { places, order })
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.places.iter().map(|&(_, len)| len as u64).sum()
    }

    /// Returns the kernel's charge for the table; the number of bytes if its memory cannot be
    /// examined.
    pub(super) fn charge(&self) -> u64 {
        folios::ring_charge(self.places.iter().copied()).unwrap_or(self.bytes())
    }

    pub(super) fn vectors(&self) -> Vec<libc::iovec> {
        self.places.iter().map(|&place| uring::vector(Some(place))).collect()
    }

    /// Returns the place that contains all of the memory. Logarithmic in the number of places.
    #[inline]
    pub(super) fn of_memory(&self, addr: usize, len: usize) -> Option<BufferIndex> {
        let before = self.order.partition_point(|&((start, _), _)| start <= addr).checked_sub(1)?;
        let &((start, size), index) = self.order.get(before)?;
        let inside = (addr - start).checked_add(len)? <= size;
        inside.then_some(BufferIndex::new(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn memory_takes_as_many_places_as_its_length_asks_for() {
        let places = Places::of([(1 << 40, (2 << 30) + 5), (0x1000, 0x1000)]).unwrap();
        assert_eq!((places.len(), places.bytes()), (4, (2 << 30) + 0x1005));
        let index = |addr, len| places.of_memory(addr, len).map(BufferIndex::get);
        assert_eq!(index(0x1fff, 1), Some(3));
        assert_eq!(index(0x1fff, 2), None);
        assert_eq!(index((1 << 40) + (1 << 30), 1 << 30), Some(1));
        assert_eq!(index((1 << 40) + (1 << 30) - 1, 2), None, "across two places");
        assert!(matches!(Places::of([]), Err(RegisterError::Capacity { requested: 0, .. })));
        assert!(matches!(
            Places::of([(0, 8), (4, 8)]),
            Err(RegisterError::Overlaps { addr: 4, .. })
        ));
    }

    /// Without pages that are known to be larger, a place ends at one of 4 KiB.
    #[test]
    fn no_page_is_in_two_places() {
        let places = Places::of([(5, (1 << 30) + 4096)]).unwrap();
        assert_eq!(places.order, [((5, (1 << 30) - 5), 0), (((1 << 30), 4101), 1)]);
    }

    proptest! {
        #[test]
        fn places_agree_with_a_list(
            memory in prop::collection::vec((0usize..200, 1usize..20), 1..8),
            addr in 0usize..220, len in 1usize..10,
        ) {
            let overlap = |&(a, m): &Range, &(b, n): &Range| a < b + n && b < a + m;
            let clash = (0..memory.len()).any(|i| memory[..i].iter().any(|one| overlap(one, &memory[i])));
            let places = match Places::of(memory.iter().copied()) {
                Ok(places) => places,
                Err(RegisterError::Overlaps { addr, len, with }) => {
                    let with = memory[usize::from(with.get())];
                    prop_assert!(clash && memory.contains(&(addr, len)) && overlap(&(addr, len), &with));
                    return Ok(());
                }
                Err(error) => panic!("{error}"),
            };
            prop_assert!(!clash);
            prop_assert_eq!(places.len(), memory.len());
            let inside = memory.iter().position(|&(a, l)| a <= addr && addr + len <= a + l);
            prop_assert_eq!(places.of_memory(addr, len).map(|i| usize::from(i.get())), inside);
        }
    }
}
