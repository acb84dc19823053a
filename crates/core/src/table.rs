//! I/O page tables: radix trees that an IOMMU walks, over pages that the caller donates.
//!
//! # Who may do what at the same time
//! Whoever owns a range of I/O virtual addresses has exclusive rights to its entries; any number of owners may map and
//! clear *their* ranges at once. Leaves are plain release stores. Linking, retiring and reclaiming table pages is
//! done under one lock a table; an owner whose table pages exist and stay in use never takes it.
//!
//! Two threads that map or clear the *same* addresses at once break the contract. What they can do is bounded: of two
//! clears of one range each leaf is cleared and counted out by one, and the other is told that it is not mapped; of two
//! maps one overwrites the other's leaves, and the table page stays in use for good. No page that holds a leaf is ever
//! retired, and no address that was never mapped translates. `Domain` releases ranges by owned handles, so that its
//! callers cannot do either.
//!
//! # The life of a table page
//! All state is out of band. A page counts what it holds; when that is nothing, the page is *retired*: its link
//! becomes an entry that is not present (and remembers the page), and the page waits in a [`Retired`] for the flush
//! after which no walker can hold it. Only then does [`Table::reclaim`] make it free. A map that comes in between
//! brings it back *at the same place*, where a stale walk cache and the table agree again. A parent whose last
//! child was reclaimed is retired in its turn and handed to the next `clear`: so one level a flush.
//!
//! # A map is all or nothing, and was never seen
//! All table pages are made and all entries counted before the first leaf is written. A map that fails has given the
//! device nothing, not for a moment, so no flush is owed for it.
//!
//! # What a walker reads
//! A page has 512 entries of 64 bits in native order (little-endian where there are IOMMUs). The entry for
//! `iova` at level *l* is number `(iova >> (3 + 9 l)) & 511`; the root is at the highest level, leaves of 4 KiB are at
//! level 1, of 2 MiB at level 2, of 1 GiB at level 3. What the bits mean is the [`Format`]'s; for [`VtdSecondStage`]
//! an entry with R = W = 0 is not present **whatever the other bits say**: do not compare with 0.

use crate::access::Access;
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr};
use crate::sync::{AtomicBool, Mutex};
use change::Locked;
use directory::PageDirectory;
use store::{Store, slot, span};

mod change;
mod directory;
mod error;
mod format;
#[cfg(all(test, loom))]
mod loom_model;
mod pages;
mod retired;
mod runs;
mod store;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use error::TableError;
pub use format::{Entry, Format, VtdSecondStage};
pub use pages::{TablePage, TablePages};
pub use retired::Retired;

/// Where an address leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Translation {
    /// The memory behind the address (not behind the start of its page).
    pub phys: PhysAddr,
    /// The size of the leaf.
    pub size: PageSize,
    /// What the device may do.
    pub access: Access,
}

/// What a table holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TableStats {
    /// How many pages were donated.
    pub capacity: u32,
    /// How many are part of the table, its root among them.
    pub in_use: u32,
    /// How many were in use or retired at most.
    pub high_water: u32,
    /// How many have been taken out and wait for a flush.
    pub retired: u32,
}

/// One I/O page table.
#[derive(Debug)]
pub struct Table<F: Format> {
    store: Store<F>,
    account: Mutex<PageDirectory>,
    /// Whether pages wait for the next `clear` to take them along.
    pending: AtomicBool,
    /// The highest level at which leaves may be.
    max_leaf: PageSize,
}

impl<F: Format> Table<F> {
    /// An empty table of `levels` levels (VT-d: 3 for 39 bits, 4 for 48, 5 for 57). One page becomes its root.
    ///
    /// # Errors
    /// [`TableError::Levels`] where the format has none such; [`TableError::NoMemory`] where the account of the pages
    /// (40 bytes each) can not be had.
    pub fn new(pages: TablePages, levels: u8) -> Result<Self, TableError> {
        let (format, min, max) = (F::NAME, F::MIN_LEVELS, F::MAX_LEVELS);
        if !(min..=max).contains(&levels) {
            return Err(TableError::Levels { format, levels, min, max });
        }
        let no_memory = TableError::NoMemory { pages: pages.count };
        let mut account = PageDirectory::new(pages.count).ok_or(no_memory)?;
        let store = Store::<F>::new(pages, levels).ok_or(no_memory)?;
        // The first page taken is page 0, the root; it counts one more than it holds and is never empty.
        let root = store.root();
        account.take(root.page, 0, levels, 0);
        store.fill(root.page, 0);
        store.renew(root.page);
        store.count(root.page, 1);
        let (account, pending) = (Mutex::new(account), AtomicBool::new(false));
        Ok(Self { store, account, pending, max_leaf: PageSize::Size1G })
    }

    /// The same table with no leaf larger than `size`, for hardware that has no larger ones (VT-d: capability
    /// register, "Second Stage Large Page Support").
    #[must_use]
    pub fn with_max_leaf(mut self, size: PageSize) -> Self {
        self.max_leaf = size;
        self
    }

    /// Where the root is.
    pub fn root(&self) -> PhysAddr {
        self.store.phys(self.store.root().page)
    }

    /// How many levels.
    pub fn levels(&self) -> u8 {
        self.store.levels()
    }

    /// How many bits of address the table translates.
    pub fn bits(&self) -> u32 {
        12 + 9 * u32::from(self.levels())
    }

    /// Maps `iova` to the memory from `phys`, with the largest leaves that fit. O(leaves + table pages touched).
    ///
    /// A leaf of 2 MiB or 1 GiB is used where both addresses are multiples of it; only where a table page that holds
    /// no mapping still waits to be reclaimed, smaller ones take its place.
    ///
    /// The caller owns `iova` and flushes nothing (unless the hardware caches entries that are not present: VT-d
    /// caching mode).
    ///
    /// # Errors
    /// [`TableError::Misaligned`], [`TableError::Outside`], [`TableError::PhysOutside`], [`TableError::NoAccess`],
    /// [`TableError::AlreadyMapped`], [`TableError::NoPages`]. No mapping has changed then, and the device has seen
    /// nothing; table pages that were made on the way are retired ([`collect`](Self::collect)).
    pub fn map(&self, iova: IovaRange, phys: PhysAddr, access: Access) -> Result<(), TableError> {
        self.check(iova, phys)?;
        if access.is_empty() {
            return Err(TableError::NoAccess { range: iova });
        }
        let end = phys.checked_add(iova.len()).map_or(u64::MAX, PhysAddr::raw);
        if end > 1 << F::PHYS_BITS {
            return Err(TableError::PhysOutside { phys, len: iova.len(), bits: F::PHYS_BITS });
        }
        let mut done = 0;
        while done < iova.len() {
            match self.reserve(iova, phys, done) {
                // The usual case, all in one table page: no second look.
                Ok(run) if run.bytes() == iova.len() => {
                    self.write(run, phys, access);
                    return Ok(());
                }
                Ok(run) => done += run.bytes(),
                Err(error) => {
                    self.unreserve(iova, done);
                    return Err(error);
                }
            }
        }
        let mut done = 0;
        while done < iova.len() {
            let run = self.reserved_run(iova, done)?;
            self.write(run, PhysAddr::new(phys.raw() + done), access);
            done += run.bytes();
        }
        Ok(())
    }

    /// Clears `iova`, all of which must be mapped, in whole leaves. O(leaves + table pages touched); allocates nothing.
    ///
    /// Pages that became empty are added to `retired`. The device can reach the memory until the flush that the caller
    /// asks for next is over: of the leaves of `iova` alone if `retired` is empty, else of leaves and links of
    /// `iova` and of [`Retired::range`].
    ///
    /// # Errors
    /// [`TableError::Misaligned`], [`TableError::Outside`]; [`TableError::NotMapped`] where some of it is not mapped;
    /// [`TableError::PartOfLeaf`] where it holds only a part of a larger leaf; [`TableError::OtherTable`] where
    /// `retired` holds another table's pages. Nothing has changed then (only where another thread clears part of a range
    /// of several table pages at the same time, against the contract, some of it may have been cleared).
    pub fn clear(&self, iova: IovaRange, retired: &mut Retired) -> Result<(), TableError> {
        self.check(iova, PhysAddr::new(0))?;
        self.adopt(retired)?;
        // The usual case: all in one table page.
        if self.clear_run(iova, 0, iova.len(), retired)? == 0 {
            let mut done = 0;
            while done < iova.len() {
                done += self.mapped_run(iova, done)?.bytes();
            }
            // All of it is mapped, and the caller owns it: from here on nothing can go wrong.
            let mut done = 0;
            while done < iova.len() {
                done += self.clear_run(iova, done, 0, retired)?;
            }
        }
        self.collect_pending(retired);
        Ok(())
    }

    /// Adds to `retired` what failed maps and reclaims have retired, without clearing anything.
    ///
    /// For an owner of a table that ran out of pages, and for one that wants the last of them back at the end.
    ///
    /// # Errors
    /// [`TableError::OtherTable`] where `retired` holds another table's pages.
    pub fn collect(&self, retired: &mut Retired) -> Result<(), TableError> {
        self.adopt(retired)?;
        self.collect_pending(retired);
        Ok(())
    }

    /// Adds the pages of `from` to `into`. O(pages of `from`); allocates nothing.
    ///
    /// # Errors
    /// [`TableError::OtherTable`] where either holds another table's pages; then those of `from` stay retired for good.
    pub fn append(&self, into: &mut Retired, mut from: Retired) -> Result<(), TableError> {
        self.adopt(into)?;
        self.adopt(&mut from)?;
        let mut account = self.account.lock();
        account.move_all(&mut from.list, &mut into.list);
        Ok(())
    }

    /// Takes retired pages back, once the flush that followed their `clear` is over. Returns how many became free.
    /// O(pages); allocates nothing.
    ///
    /// Pages that a map has brought back meanwhile stay in the table.
    ///
    /// # Errors
    /// The pages again, where they belong to another table.
    pub fn reclaim(&self, retired: Retired) -> Result<u32, Retired> {
        if !retired.is_empty() && retired.owner != Some(self.root()) {
            return Err(retired);
        }
        if retired.is_empty() {
            return Ok(0);
        }
        let mut account = self.account.lock();
        let freed = Locked { store: &self.store, account: &mut account }.reclaim(retired.list);
        self.note_pending(&account);
        Ok(freed)
    }

    /// Where `iova` leads, by a walk in software. For tests and diagnostics.
    pub fn translate(&self, iova: Iova) -> Option<Translation> {
        if iova.raw() >> self.bits() != 0 {
            return None;
        }
        // The lock keeps the shape as it is, so that no page changes its meaning under the walk.
        let _shape = self.account.lock();
        let place = self.store.descend(iova.raw(), 1).ok()?;
        let Entry::Leaf { phys, access } = self.store.load(place, slot(iova.raw(), place.level)) else {
            return None;
        };
        let size = PageSize::from_bytes(span(place.level))?;
        Some(Translation { phys: phys.checked_add(iova.raw() & size.mask())?, size, access })
    }

    /// What the table holds.
    pub fn stats(&self) -> TableStats {
        let account = self.account.lock();
        TableStats {
            capacity: self.store.capacity(),
            in_use: account.in_use(),
            high_water: account.high_water,
            retired: account.retired,
        }
    }

    /// The door: after it a range is whole pages of this table.
    fn check(&self, range: IovaRange, phys: PhysAddr) -> Result<(), TableError> {
        if !range.is_aligned(4096) || !phys.is_aligned(4096) {
            return Err(TableError::Misaligned { iova: range, phys });
        }
        if range.end().raw() > 1 << self.bits() {
            return Err(TableError::Outside { range, bits: self.bits() });
        }
        Ok(())
    }

    fn adopt(&self, retired: &mut Retired) -> Result<(), TableError> {
        let this = self.root();
        match retired.owner {
            Some(owner) if owner != this && !retired.is_empty() => {
                Err(TableError::OtherTable { owner, this })
            }
            _ => {
                retired.owner = Some(this);
                Ok(())
            }
        }
    }
}
