//! The number of a table page.

/// The number of a page among those donated to a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageIndex(pub(super) u32);

impl PageIndex {
    /// The number of no page.
    pub(super) const NONE: Self = Self(u32::MAX);

    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }
}
