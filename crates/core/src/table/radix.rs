//! [`Table`], the interface of the module, over the tree that does the work: maps, clears,
//! translates and reclaims; [`Retired`], the pages that a clear has retired; [`TableStats`].

use super::directory::{List, PAGES_A_HOLD};
use super::error::TableError;
use super::format::{Format, span};
use super::pages::{PageIndex, TableMemory, TablePages};
use super::tree::Tree;
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr};
use alloc::boxed::Box;
use core::fmt;
use core::marker::PhantomData;

/// The translation of an address.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Translation {
    /// The memory behind the address (not behind the start of its page).
    pub(crate) phys: PhysAddr,
    /// The size of the leaf.
    pub(crate) size: PageSize,
    /// The access that the device has.
    pub(crate) access: Access,
}

/// One I/O page table. See the [module](super).
#[derive(Debug)]
pub struct Table<F: Format>(pub(super) Tree<F>);

impl<F: Format> Table<F> {
    /// Creates an empty table of `levels` levels (VT-d: 3 for 39 bits, 4 for 48, 5 for 57). One
    /// page becomes its root.
    ///
    /// # Errors
    /// [`TableError::Levels`] if the format has no such table; [`TableError::NoMemory`] if the
    /// metadata of the pages (28 bytes each) cannot be allocated. The pages are dropped then, and
    /// no table has them: they may be used for another one.
    pub fn new(pages: TablePages, levels: u8) -> Result<Self, TableError> {
        let (format, min, max) = (F::NAME, F::MIN_LEVELS, F::MAX_LEVELS);
        if !(min..=max).contains(&levels) {
            return Err(TableError::Levels { format, levels, min, max });
        }
        Ok(Self(Tree::new(pages, levels)?))
    }

    /// Returns the table with no leaf larger than `size`, for hardware without larger ones (VT-d:
    /// capability register, "Second Stage Large Page Support").
    #[must_use]
    pub fn with_max_leaf(mut self, size: PageSize) -> Self {
        self.0.max_leaf = size;
        self
    }

    /// Returns the table for a machine whose physical addresses have `bits` bits: fewer than an
    /// entry holds, and the others are reserved (VT-d: the host address width; x86: `MAXPHYADDR`).
    /// No more than an entry holds.
    ///
    /// # Errors
    /// [`TableError::PhysOutside`] if pages of the table lie beyond. A map for which it grows by
    /// such pages fails likewise.
    pub fn with_phys_bits(mut self, bits: u32) -> Result<Self, TableError> {
        let bits = bits.min(F::PHYS_BITS);
        self.0.store.limit_phys(bits)?;
        Ok(self)
    }

    /// Returns the table with a source of more pages, which it asks when it has none left.
    #[must_use]
    pub fn with_memory(mut self, memory: Box<dyn TableMemory>) -> Self {
        self.0.memory = Some(memory);
        self
    }

    /// Returns the physical address of the root.
    pub fn root(&self) -> PhysAddr {
        self.0.store.root_phys()
    }

    /// Returns how many bits of address the table translates.
    pub fn bits(&self) -> u32 {
        self.0.store.bits()
    }

    /// Maps `iova` to the memory from `phys`, with the largest leaves that fit. O(leaves + table
    /// pages touched).
    ///
    /// A leaf of 2 MiB or 1 GiB is used where both addresses are multiples of it, unless a table
    /// page that holds no mapping still waits there to be reclaimed.
    ///
    /// The caller owns `iova` and needs no flush (unless the hardware caches entries that are not
    /// present: VT-d caching mode).
    ///
    /// # Errors
    /// [`TableError::Misaligned`], [`TableError::Outside`], [`TableError::PhysOutside`],
    /// [`TableError::NoAccess`], [`TableError::AlreadyMapped`], [`TableError::Pinned`],
    /// [`TableError::NoPages`]. No mapping has changed, and the device has seen nothing; table
    /// pages linked on the way are retired ([`collect_retired`](Self::collect_retired)).
    pub fn map(&self, iova: IovaRange, phys: PhysAddr, access: Access) -> Result<(), TableError> {
        self.check(iova, phys)?;
        self.check_memory(iova, phys, access)?;
        self.0.map(iova, phys, access)
    }

    /// Clears `iova`, all of which must be mapped, in whole leaves. O(leaves + table pages
    /// touched); allocates nothing.
    ///
    /// Pages that became empty are added to `retired`. The device can reach the memory until the
    /// flush that the caller requests next has completed: of the leaves of `iova` alone if
    /// `retired` is empty, else of leaves and links of `iova` and of
    /// [`retired_ranges`](Self::retired_ranges).
    ///
    /// # Errors
    /// [`TableError::Misaligned`], [`TableError::Outside`]; [`TableError::NotMapped`] if part of it
    /// is not mapped; [`TableError::PartOfLeaf`] if it covers only part of a larger leaf;
    /// [`TableError::Pinned`] if part of it is in a pinned page; [`TableError::OtherTable`] if
    /// `retired` holds another table's pages. Nothing has changed (unless another thread clears
    /// part of a range of several table pages at the same time, against the contract: then some of
    /// it may have been cleared).
    pub fn clear(&self, iova: IovaRange, retired: &mut Retired) -> Result<(), TableError> {
        self.check(iova, PhysAddr::new(0))?;
        self.adopt(retired)?;
        self.0.clear(iova, &mut retired.list)?;
        self.0.collect_pending(&mut retired.list);
        Ok(())
    }

    /// Whether retired pages are in the place of 2 MiB leaves of a mapping of `iova` from `phys`:
    /// once they have been flushed and reclaimed, the mapping gets these leaves. O(2 MiB pieces);
    /// takes the lock if the mapping can have any.
    ///
    /// # Errors
    /// [`TableError::Misaligned`], [`TableError::Outside`].
    pub(crate) fn awaits_room(&self, iova: IovaRange, phys: PhysAddr) -> Result<bool, TableError> {
        self.check(iova, phys)?;
        Ok(self.0.awaits_room(iova, phys))
    }

    /// Adds to `retired` what failed maps and reclaims have retired, without clearing anything.
    ///
    /// For the owner of a table that ran out of pages, or that recovers the last of them at the
    /// end.
    ///
    /// # Errors
    /// [`TableError::OtherTable`] if `retired` holds another table's pages.
    pub fn collect_retired(&self, retired: &mut Retired) -> Result<(), TableError> {
        self.adopt(retired)?;
        self.0.collect_pending(&mut retired.list);
        Ok(())
    }

    /// Puts back pages that were collected and could not be flushed: they are collected again with
    /// the next.
    ///
    /// # Errors
    /// [`TableError::OtherTable`] if they belong to another table.
    pub(crate) fn put_back_retired(&self, retired: Retired) -> Result<(), TableError> {
        let mut retired = retired;
        self.adopt(&mut retired)?;
        self.0.put_back_pending(&mut retired.list);
        Ok(())
    }

    /// Returns the ranges that the flush must cover *besides* those that were cleared, leaves and
    /// links both (VT-d: invalidation hint 0): the addresses that each of the retired pages
    /// translated, neighbours on the list merged. O(pages).
    ///
    /// Each is the whole range that the page translated, aligned: a link that a unit has cached may
    /// serve any address in it, and only a flush with hint 0 that names the address drops it (VT-d,
    /// "IOTLB Invalidate": leaf and non-leaf entries that correspond to the addresses given by ADDR
    /// and AM).
    ///
    /// They need not be near the cleared ranges: pages of a failed map, or of higher levels that
    /// became empty by a [`reclaim`](Self::reclaim), are added to the next `clear`.
    ///
    /// # Errors
    /// [`TableError::OtherTable`] if the pages belong to another table.
    pub fn retired_ranges<'a>(
        &'a self,
        retired: &'a Retired,
    ) -> Result<RetiredRanges<'a, F>, TableError> {
        let other =
            retired.owner.filter(|(number, _)| *number != self.0.number && !retired.is_empty());
        if let Some((_, owner)) = other {
            return Err(TableError::OtherTable { owner, this: self.root() });
        }
        Ok(RetiredRanges { tree: &self.0, next: retired.list.head, retired: PhantomData })
    }

    /// Adds the pages of `from` to `into`. O(1); allocates nothing.
    ///
    /// # Errors
    /// [`TableError::OtherTable`] if either holds another table's pages; then those of `from` stay
    /// retired for good.
    pub(crate) fn append(&self, into: &mut Retired, mut from: Retired) -> Result<(), TableError> {
        self.adopt(into)?;
        self.adopt(&mut from)?;
        self.0.directory.lock().move_all(&mut from.list, &mut into.list);
        Ok(())
    }

    /// Frees retired pages after the flush that followed their `clear` has completed. Returns how
    /// many. O(pages), of which the lock is held for at most 64 at a time; allocates nothing.
    ///
    /// Pages that a map has relinked meanwhile stay in the table.
    ///
    /// # Errors
    /// The pages, if they belong to another table.
    pub fn reclaim(&self, retired: Retired) -> Result<u32, Retired> {
        if !retired.is_empty() && retired.owner.is_none_or(|(number, _)| number != self.0.number) {
            return Err(retired);
        }
        if retired.is_empty() {
            return Ok(0);
        }
        Ok(self.0.reclaim(retired.list))
    }

    /// Translates `iova` by a walk in software.
    #[cfg(test)]
    pub(crate) fn translate(&self, iova: Iova) -> Option<Translation> {
        use super::format::{Entry, slot};
        if iova.raw() >> self.bits() != 0 {
            return None;
        }
        // The lock keeps the shape, so that no page changes its meaning under the walk.
        let _shape = self.0.directory.lock();
        let place = self.0.store.descend(iova.raw(), 1).ok()?;
        let Entry::Leaf { phys, access } = self.0.store.load(place, slot(iova.raw(), place.level))
        else {
            return None;
        };
        let size = PageSize::from_bytes(span(place.level))?;
        Some(Translation { phys: phys.checked_add(iova.raw() & size.mask())?, size, access })
    }

    /// Returns the statistics.
    pub fn stats(&self) -> TableStats {
        let directory = self.0.directory.lock();
        TableStats {
            capacity: self.0.store.chunks().capacity(),
            in_use: directory.in_use(),
            high_water: directory.high_water,
            retired: directory.retired,
        }
    }

    /// Checks the memory and the access that a range is to be mapped with.
    #[inline]
    pub(super) fn check_memory(
        &self,
        iova: IovaRange,
        phys: PhysAddr,
        access: Access,
    ) -> Result<(), TableError> {
        if access.is_empty() {
            return Err(TableError::NoAccess { range: iova });
        }
        let bits = self.0.store.phys_bits();
        // No wrap: the range of addresses is inside the table, so its length is at most 2^57.
        if phys.raw() >> bits != 0 || (phys.raw() + (iova.len() - 1)) >> bits != 0 {
            return Err(TableError::PhysOutside { phys, len: iova.len(), bits });
        }
        Ok(())
    }

    /// Checks that a range is whole pages inside this table.
    #[inline]
    pub(super) fn check(&self, range: IovaRange, phys: PhysAddr) -> Result<(), TableError> {
        let (start, len) = (range.start().raw(), range.len());
        if (start | len | phys.raw()) & 0xfff != 0 {
            return Err(TableError::Misaligned { iova: range, phys });
        }
        if range.last().raw() >> self.bits() != 0 {
            return Err(TableError::Outside { range, bits: self.bits() });
        }
        Ok(())
    }

    /// Makes a list this table's, if it is empty or already is.
    #[inline]
    pub(super) fn adopt(&self, retired: &mut Retired) -> Result<(), TableError> {
        match retired.owner {
            // Not the root: a later table may have the same one.
            Some((number, _)) if number == self.0.number => Ok(()),
            Some((_, owner)) if !retired.is_empty() => {
                Err(TableError::OtherTable { owner, this: self.root() })
            }
            _ => {
                retired.owner = Some((self.0.number, self.root()));
                Ok(())
            }
        }
    }
}

/// Table pages that have been unlinked and that a walker may still hold.
///
/// Flush first, then [`Table::reclaim`](super::Table::reclaim). Dropping it leaves the pages
/// retired for good: the right end if a flush never completes. Those that a map has linked again
/// meanwhile then stay linked for good.
///
/// The pages are a list threaded through the table's directory, so that collecting them allocates
/// nothing.
#[derive(Debug, Default)]
#[must_use = "flush, then free the pages with `Table::reclaim`"]
pub struct Retired {
    pub(super) list: List,
    /// The number of the table that the pages belong to, and its root.
    pub(super) owner: Option<(u64, PhysAddr)>,
}

impl Retired {
    /// Creates an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there are none: then a flush of the cleared leaves alone suffices.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the number of pages.
    pub fn len(&self) -> u32 {
        self.list.len
    }
}

/// The addresses that retired pages translated, neighbours merged: at most 64 pages into one range.
/// See [`Table::retired_ranges`](super::Table::retired_ranges).
///
/// It takes the table's lock once for each range, and does not hold it in between.
#[derive(Debug)]
pub struct RetiredRanges<'a, F: Format> {
    pub(super) tree: &'a Tree<F>,
    pub(super) next: PageIndex,
    /// While they are borrowed, the pages stay on their list.
    pub(super) retired: PhantomData<&'a Retired>,
}

impl<F: Format> Iterator for RetiredRanges<'_, F> {
    type Item = IovaRange;

    fn next(&mut self) -> Option<IovaRange> {
        let mut directory = self.tree.directory.lock();
        let mut merged: Option<(u64, u64)> = None;
        for _ in 0..PAGES_A_HOLD {
            if self.next == PageIndex::NONE {
                break;
            }
            let meta = directory.of(self.next);
            let page = self.tree.store.page(self.next);
            let (start, end) = (page.base(), page.base() + span(page.level() + 1));
            merged = match merged {
                None => Some((start, end)),
                Some((first, last)) if start <= last && first <= end => {
                    Some((first.min(start), last.max(end)))
                }
                Some(_) => break,
            };
            self.next = meta.next;
        }
        let (start, end) = merged?;
        IovaRange::new(Iova::new(start), end - start).ok()
    }
}

/// The pages of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TableStats {
    /// Pages donated.
    pub capacity: u32,
    /// Pages that are part of the table, its root included.
    pub in_use: u32,
    /// The largest number of pages in use or retired so far.
    pub high_water: u32,
    /// Pages that have been unlinked and wait for a flush.
    pub retired: u32,
}

impl fmt::Display for TableStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { capacity, in_use, high_water, retired } = self;
        write!(
            f,
            "{in_use} of {capacity} table pages in use (peak {high_water}), {retired} retired"
        )
    }
}
