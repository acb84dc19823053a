//! Descriptors: what an invalidation queue carries out.

use crate::addr::{Iova, IovaRange};

/// The size of a page, as a shift.
pub(super) const PAGE_SHIFT: u32 = 12;

/// An aligned block of 2^order pages of 4096 bytes: what one descriptor can invalidate (VT-d,
/// "Page-selective-within-Domain Invalidation": an address and an address mask).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Block {
    page: u64,
    order: u32,
}

impl Block {
    /// Creates the block of 2^`order` pages that contains page `page`.
    pub(super) const fn containing(page: u64, order: u32) -> Self {
        Self { page: page >> order << order, order }
    }

    /// Returns the first address, a multiple of the block's size.
    pub const fn start(&self) -> Iova {
        Iova::new(self.page << PAGE_SHIFT)
    }

    /// Returns the base-2 logarithm of the number of pages.
    pub const fn order(&self) -> u32 {
        self.order
    }

    /// Returns the number of pages of 4096 bytes.
    pub const fn pages(&self) -> u64 {
        1 << self.order
    }

    /// Returns the addresses. (A range ends below 2^64: there the last byte is left out.)
    pub fn range(&self) -> IovaRange {
        IovaRange::clamped(self.start(), self.pages() << PAGE_SHIFT)
    }
}

/// What a descriptor drops.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope {
    /// Everything cached for the domain.
    Domain,
    /// What is cached for a block of addresses.
    Block(Block),
}

impl Scope {
    /// Returns the addresses; `None` for those of the whole domain.
    pub fn range(&self) -> Option<IovaRange> {
        match self {
            Self::Domain => None,
            Self::Block(block) => Some(block.range()),
        }
    }
}

/// An entry of an [`InvalidationQueue`](super::InvalidationQueue).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Descriptor {
    /// Drops translations from the IOTLB.
    Iotlb {
        /// Which ones.
        scope: Scope,
        /// Whether only leaf entries changed. Otherwise cached table pages are dropped too.
        leaf_only: bool,
    },
    /// Holds back what follows until everything before it in the queue has been carried out (VT-d:
    /// an invalidation wait with the fence flag).
    Fence,
    /// Drops translations from the TLBs of all devices that have their own (ATS).
    DeviceTlb(Scope),
}
