//! Statistics of a table.

use core::fmt;

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
