//! The page that fragments are cut from.

/// See the [module](self).
#[derive(Clone, Copy)]
pub(super) struct OpenPage {
    pub(super) frame: u32,
    /// The offset of the next fragment in bytes.
    pub(super) at: usize,
    /// How many fragments were cut.
    pub(super) cut: u32,
}
