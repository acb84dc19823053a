//! The caches of a device: translations, and the table pages on the way to them.

use crate::memory::{PageNumber, to_usize};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange, PageSize};
use pinfold_core::mem::DmaMemory;

/// A cached translation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaf {
    /// All memory of the leaf; `None` caches that the entry is not present.
    pub(super) memory: Option<DmaMemory<'static>>,
    pub(super) access: Access,
    pub(super) size: PageSize,
}

/// Entries of a cache: more would model no hardware, and take all memory.
const MOST_SLOTS: usize = 1 << 20;

/// A direct-mapped cache, keyed by the number of a page or of a table page's reach.
#[derive(Debug)]
struct Cache<T> {
    shift: u32,
    slots: Box<[Option<(u64, T)>]>,
}

impl<T: Copy> Cache<T> {
    fn new(shift: u32, slots: usize) -> Self {
        let slots = slots.min(MOST_SLOTS).next_power_of_two();
        Self { shift, slots: vec![None; slots].into_boxed_slice() }
    }

    fn slot(&self, tag: u64) -> usize {
        // The number of slots is a power of two, so the mask keeps the index inside.
        to_usize(tag & (self.slots.len() as u64 - 1))
    }

    #[inline]
    fn get(&self, iova: Iova) -> Option<T> {
        let tag = iova.raw() >> self.shift;
        match self.slots.get(self.slot(tag)) {
            Some(Some((found, value))) if *found == tag => Some(*value),
            _ => None,
        }
    }

    fn put(&mut self, iova: Iova, value: T) {
        let tag = iova.raw() >> self.shift;
        let slot = self.slot(tag);
        if let Some(slot) = self.slots.get_mut(slot) {
            *slot = Some((tag, value));
        }
    }

    fn drop_range(&mut self, range: &IovaRange) {
        let (first, last) = (range.start().raw() >> self.shift, range.last().raw() >> self.shift);
        let hit =
            |entry: &Option<(u64, T)>| entry.is_some_and(|(tag, _)| (first..=last).contains(&tag));
        if last - first < self.slots.len() as u64 {
            for tag in first..=last {
                let slot = self.slot(tag);
                if let Some(entry) = self.slots.get_mut(slot).filter(|entry| hit(entry)) {
                    *entry = None;
                }
            }
        } else {
            self.drop_if(|tag, _| (first..=last).contains(&tag));
        }
    }

    fn drop_if(&mut self, mut doomed: impl FnMut(u64, &T) -> bool) {
        for entry in &mut self.slots {
            if entry.as_ref().is_some_and(|(tag, value)| doomed(*tag, value)) {
                *entry = None;
            }
        }
    }
}

/// A port's IOTLB: a cache for each size of leaf.
#[derive(Debug)]
pub(super) struct Iotlb {
    small: Cache<Leaf>,
    large: Cache<Leaf>,
    huge: Cache<Leaf>,
}

impl Iotlb {
    pub(super) fn new(entries: usize) -> Self {
        let entries = entries.clamp(1, 1 << 20);
        Self {
            small: Cache::new(PageSize::Size4K.shift(), entries),
            large: Cache::new(PageSize::Size2M.shift(), entries.div_ceil(4)),
            huge: Cache::new(PageSize::Size1G.shift(), 16),
        }
    }

    #[inline]
    pub(super) fn get(&self, iova: Iova) -> Option<Leaf> {
        self.large.get(iova).or_else(|| self.small.get(iova)).or_else(|| self.huge.get(iova))
    }

    pub(super) fn put(&mut self, iova: Iova, leaf: Leaf) {
        match leaf.size {
            PageSize::Size4K => self.small.put(iova, leaf),
            PageSize::Size2M => self.large.put(iova, leaf),
            PageSize::Size1G => self.huge.put(iova, leaf),
        }
    }

    pub(super) fn drop_range(&mut self, range: &IovaRange) {
        self.small.drop_range(range);
        self.large.drop_range(range);
        self.huge.drop_range(range);
    }

    pub(super) fn drop_all(&mut self) {
        self.drop_memory(|_| true);
    }

    /// Drops the translations to memory for which `doomed` is true, and those of entries that are
    /// not present.
    pub(super) fn drop_memory(&mut self, doomed: impl Fn(&DmaMemory<'_>) -> bool) {
        let doomed = |_, leaf: &Leaf| leaf.memory.as_ref().is_none_or(&doomed);
        self.small.drop_if(doomed);
        self.large.drop_if(doomed);
        self.huge.drop_if(doomed);
    }
}

/// A cached table page, by its number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) page: PageNumber,
    /// The access that the links on the way allow.
    pub(super) access: Access,
}

/// The table pages that a walker has cached, so that it need not start at the root. `None` caches
/// that the link to the page is not present.
#[derive(Debug)]
pub(super) struct WalkCache {
    /// Pages of level 1, 2, 3 and 4, whose reach is 2 MiB, 1 GiB, 512 GiB and 256 TiB.
    levels: [Cache<Option<Held>>; 4],
}

impl WalkCache {
    pub(super) fn new() -> Self {
        Self {
            levels: [Cache::new(21, 64), Cache::new(30, 16), Cache::new(39, 4), Cache::new(48, 2)],
        }
    }

    /// Returns the lowest cached page on the way to `iova`, and its level.
    pub(super) fn lowest(&self, iova: Iova) -> Option<(u8, Option<Held>)> {
        (1..).zip(&self.levels).find_map(|(level, cache)| Some((level, cache.get(iova)?)))
    }

    pub(super) fn put(&mut self, level: u8, iova: Iova, held: Option<Held>) {
        if let Some(cache) = usize::from(level).checked_sub(1).and_then(|i| self.levels.get_mut(i))
        {
            cache.put(iova, held);
        }
    }

    pub(super) fn drop_range(&mut self, range: &IovaRange) {
        self.levels.iter_mut().for_each(|cache| cache.drop_range(range));
    }

    pub(super) fn drop_all(&mut self) {
        self.levels.iter_mut().for_each(|cache| cache.drop_if(|_, _| true));
    }
}
