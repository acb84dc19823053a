//! The arithmetic of levels: entries in a page, bytes below an entry.

/// Entries in a page.
pub(super) const ENTRIES: u16 = 512;

/// Returns how many bytes an entry at `level` covers.
pub(super) const fn span(level: u8) -> u64 {
    1 << (3 + 9 * level as u32)
}

/// Returns the number of the entry for `iova` in a page at `level`.
#[expect(clippy::cast_possible_truncation, reason = "masked to 9 bits")]
pub(super) const fn slot(iova: u64, level: u8) -> u16 {
    (iova / span(level)) as u16 & (ENTRIES - 1)
}
