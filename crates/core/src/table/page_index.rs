//! The number of a table page.

/// The most pieces of memory that one table consists of. Pieces that double in size reach 2^27
/// pages, 512 GiB, long before.
pub const MAX_CHUNKS: usize = 32;

/// The number of a page among those donated to a table: its chunk in the upper 5 bits, its place
/// there in the lower 27.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageIndex(u32);

const OFFSET_BITS: u32 = 27;
const _: () = assert!(MAX_CHUNKS == 1 << (u32::BITS - OFFSET_BITS));

impl PageIndex {
    /// The number of no page.
    pub(super) const NONE: Self = Self(u32::MAX);
    /// The most pages of a chunk; the last number is that of no page.
    pub(super) const MAX_OFFSET: u32 = (1 << OFFSET_BITS) - 1;

    /// Returns the number of a page, unless there is no such.
    #[inline]
    pub(super) fn new(chunk: usize, offset: usize) -> Option<Self> {
        let (chunk, offset) = (u32::try_from(chunk).ok()?, u32::try_from(offset).ok()?);
        (chunk < 1 << (u32::BITS - OFFSET_BITS) && offset < Self::MAX_OFFSET)
            .then_some(Self(chunk << OFFSET_BITS | offset))
    }

    #[inline]
    pub(super) const fn chunk(self) -> usize {
        (self.0 >> OFFSET_BITS) as usize
    }

    #[inline]
    pub(super) const fn offset(self) -> usize {
        (self.0 & Self::MAX_OFFSET) as usize
    }
}
