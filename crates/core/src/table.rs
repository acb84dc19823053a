//! I/O page tables: radix trees that an IOMMU walks, over pages that the caller donates.
//! (The face is fixed; the inside is being written.)
#![allow(clippy::todo, dead_code, unused_variables)]

use core::marker::PhantomData;

use crate::access::Access;
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr};

mod error;
mod format;
mod pages;

pub use error::TableError;
pub use format::{Entry, Format, VtdSecondStage};
pub use pages::TablePages;

/// Table pages that have been taken out of a table and that a walker may still hold.
///
/// Flush first, then [`Table::reclaim`]. Dropping it loses the pages for good (they stay counted as retired): that is
/// the right end where a flush never finishes.
#[derive(Debug, Default)]
#[must_use = "flush, then give the pages back with `Table::reclaim`"]
pub struct Retired {
    len: u32,
}

impl Retired {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }
    /// Whether there is nothing to give back: then a flush of the cleared leaves alone will do.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// How many pages.
    pub fn len(&self) -> u32 {
        self.len
    }
    /// What the flush must cover *besides* the ranges that were cleared, leaves and links both (VT-d: invalidation
    /// hint 0): the addresses that went through the retired pages. `None` where there are none.
    pub fn range(&self) -> Option<IovaRange> {
        todo!()
    }
}

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
pub struct Table<F: Format> {
    format: PhantomData<F>,
}

impl<F: Format> Table<F> {
    /// An empty table of `levels` levels.
    ///
    /// # Errors
    /// [`TableError::Levels`] where the format has none such.
    pub fn new(pages: TablePages, levels: u8) -> Result<Self, TableError> {
        todo!()
    }
    /// Where the root is.
    pub fn root(&self) -> PhysAddr {
        todo!()
    }
    /// How many levels.
    pub fn levels(&self) -> u8 {
        todo!()
    }
    /// How many bits of address the table translates.
    pub fn bits(&self) -> u32 {
        todo!()
    }
    /// Maps `iova` to the memory from `phys`, with the largest leaves that fit.
    ///
    /// # Errors
    /// See [`TableError`]; nothing has changed.
    pub fn map(&self, iova: IovaRange, phys: PhysAddr, access: Access) -> Result<(), TableError> {
        todo!()
    }
    /// Clears `iova`, all of which must be mapped, in whole leaves. Pages that became empty are added to `retired`.
    ///
    /// # Errors
    /// See [`TableError`]; nothing has changed.
    pub fn clear(&self, iova: IovaRange, retired: &mut Retired) -> Result<(), TableError> {
        todo!()
    }
    /// Takes retired pages back, once the flush that followed their `clear` is over. Returns how many became free.
    ///
    /// # Errors
    /// The pages again, where they belong to another table.
    pub fn reclaim(&self, retired: Retired) -> Result<u32, Retired> {
        todo!()
    }
    /// Where `iova` leads, by a walk in software.
    pub fn translate(&self, iova: Iova) -> Option<Translation> {
        todo!()
    }
    /// What the table holds.
    pub fn stats(&self) -> TableStats {
        todo!()
    }
}
