//! The page that fragments are cut from.

/// The page of which fragments are cut.
#[derive(Clone, Copy)]
pub(super) struct Open {
    pub(super) frame: u32,
    /// Where the next fragment starts, from the start of the page.
    pub(super) at: usize,
    /// How many were cut.
    pub(super) cut: u32,
}
