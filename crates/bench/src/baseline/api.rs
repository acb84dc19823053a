//! The interface and the error of the baselines.

/// Why a baseline failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BaselineError {
    /// No page is free.
    #[error("all {0} pages of the baseline's memory are in use")]
    NoPages(usize),
    /// No page contains the address. (The originals log it or corrupt their lists.)
    #[error("no page contains address {0:#x}")]
    Foreign(u64),
    /// The device does not accept the range.
    #[error("the range needs more than {0} segments, or one that the device does not accept")]
    Segments(usize),
}

/// A pool with the interface of a kernel: one block per call.
pub trait Blocks {
    /// What it allocates.
    type Block;
    /// Allocates a block.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    fn alloc(&mut self) -> Result<Self::Block, BaselineError>;
    /// Frees a block.
    ///
    /// # Errors
    /// [`BaselineError::Foreign`].
    fn free(&mut self, block: Self::Block) -> Result<(), BaselineError>;
    /// Frees all pages, as the destruction of the pool does.
    fn destroy(&mut self);
}
