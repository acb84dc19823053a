//! The places of a ring's table, and the memory in them.

use super::index::{BufferIndex, RegisterError};
use crate::folios::{self, PLACE};
use crate::sys::uring;

/// The most places that a table has (Linux 5.13; 1,024 before).
pub(super) const MOST_PLACES: usize = 16_384;

/// The memory of a place: its address and its length.
pub(super) type Range = (usize, usize);

/// The places of a table.
#[derive(Clone, Debug)]
pub(super) struct Places {
    places: Vec<Option<Range>>,
    /// The places in use, by address; no two overlap.
    order: Vec<(Range, u16)>,
}

impl Places {
    /// Returns `capacity` vacant places.
    pub(super) fn vacant(capacity: usize) -> Result<Self, RegisterError> {
        if capacity == 0 || capacity > MOST_PLACES {
            return Err(RegisterError::Capacity { requested: capacity, limit: MOST_PLACES });
        }
        Ok(Self { places: vec![None; capacity], order: Vec::with_capacity(capacity) })
    }

    /// Returns places for these pieces of memory, in order, each in as many places as its length
    /// and its pages need.
    pub(super) fn of(memory: impl IntoIterator<Item = Range>) -> Result<Self, RegisterError> {
        let mut pieces: Vec<Range> = Vec::new();
        for (addr, len) in memory {
            pieces.extend(folios::places(addr, len));
        }
        let mut places = Self::vacant(pieces.len())?;
        for (index, piece) in pieces.into_iter().enumerate() {
            let index = BufferIndex::new(u16::try_from(index).unwrap_or(u16::MAX));
            places.check(index, piece)?;
            places.put(index, piece);
        }
        Ok(places)
    }

    pub(super) fn capacity(&self) -> usize {
        self.places.len()
    }

    pub(super) fn in_use(&self) -> usize {
        self.order.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.order.iter().map(|&((_, len), _)| len as u64).sum()
    }

    /// Returns the kernel's charge for the table; the number of bytes if its memory cannot be
    /// examined.
    pub(super) fn charge(&self) -> u64 {
        folios::ring_charge(self.order.iter().map(|&(range, _)| range)).unwrap_or(self.bytes())
    }

    pub(super) fn vectors(&self) -> Vec<libc::iovec> {
        self.places.iter().map(|place| uring::vector(*place)).collect()
    }

    /// Returns the place that contains all of the memory. Logarithmic in the number of places.
    #[inline]
    pub(super) fn of_memory(&self, addr: usize, len: usize) -> Option<BufferIndex> {
        let before = self.order.partition_point(|&((start, _), _)| start <= addr).checked_sub(1)?;
        let &((start, size), index) = self.order.get(before)?;
        let inside = (addr - start).checked_add(len)? <= size;
        inside.then_some(BufferIndex::new(index))
    }

    /// Checks that the memory may be set in this place, independent of its current memory.
    pub(super) fn check(
        &self,
        index: BufferIndex,
        (addr, len): Range,
    ) -> Result<(), RegisterError> {
        self.exists(index)?;
        if len == 0 || len > PLACE {
            return Err(RegisterError::Length { len, limit: PLACE });
        }
        let end = addr.checked_add(len).ok_or(RegisterError::Length { len, limit: PLACE })?;
        let at = self.order.partition_point(|&((start, _), _)| start < end);
        // The places do not overlap one another, so if one overlaps the memory, it is among the
        // last two that begin before its end (one of which may be the place to be replaced).
        let before = self.order.get(at.saturating_sub(2)..at).unwrap_or_default();
        let hit = before
            .iter()
            .find(|&&((start, size), other)| other != index.get() && start + size > addr);
        match hit {
            Some(&(_, with)) => {
                Err(RegisterError::Overlaps { addr, len, with: BufferIndex::new(with) })
            }
            None => Ok(()),
        }
    }

    pub(super) fn exists(&self, index: BufferIndex) -> Result<(), RegisterError> {
        let capacity = self.capacity();
        if usize::from(index.get()) < capacity {
            Ok(())
        } else {
            Err(RegisterError::Beyond { index, capacity })
        }
    }

    pub(super) fn is_in_use(&self, index: BufferIndex) -> bool {
        self.places.get(usize::from(index.get())).is_some_and(Option::is_some)
    }

    /// Sets the memory of a place, which [`check`](Self::check) has accepted.
    pub(super) fn put(&mut self, index: BufferIndex, range: Range) {
        self.clear(index);
        if let Some(place) = self.places.get_mut(usize::from(index.get())) {
            *place = Some(range);
            let at = self.order.partition_point(|&(other, _)| other < range);
            self.order.insert(at, (range, index.get()));
        }
    }

    pub(super) fn clear(&mut self, index: BufferIndex) {
        if self.places.get_mut(usize::from(index.get())).is_some_and(|place| place.take().is_some())
        {
            self.order.retain(|&(_, other)| other != index.get());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn memory_takes_as_many_places_as_its_length_asks_for() {
        let places = Places::of([(1 << 40, (2 << 30) + 5), (0x1000, 0x1000)]).unwrap();
        assert_eq!(
            (places.capacity(), places.in_use(), places.bytes()),
            (4, 4, (2 << 30) + 0x1005)
        );
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
            steps in prop::collection::vec((0u16..10, 0usize..100, 0usize..20, any::<bool>()), 1..200),
            addr in 0usize..110, len in 1usize..10,
        ) {
            let mut places = Places::vacant(8).unwrap();
            let mut model: [Option<Range>; 8] = [None; 8];
            for (place, start, size, put) in steps {
                let index = BufferIndex::new(place);
                if !put {
                    places.clear(index);
                    if let Some(slot) = model.get_mut(usize::from(place)) { *slot = None }
                    continue;
                }
                let clash = model.iter().enumerate().any(|(i, other)| {
                    i != usize::from(place) && other.is_some_and(|(a, l)| a < start + size && start < a + l)
                });
                let good = place < 8 && size > 0 && !clash;
                prop_assert_eq!(places.check(index, (start, size)).is_ok(), good);
                if good {
                    places.put(index, (start, size));
                    model[usize::from(place)] = Some((start, size));
                }
                prop_assert_eq!(places.in_use(), model.iter().flatten().count());
                let inside = model.iter().position(|p| p.is_some_and(|(a, l)| a <= addr && addr + len <= a + l));
                prop_assert_eq!(places.of_memory(addr, len).map(|i| usize::from(i.get())), inside);
            }
        }
    }
}
