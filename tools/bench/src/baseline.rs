//! The allocators that Pinfold replaces, written from public descriptions, and those that a program
//! could use instead.

pub(crate) mod block;
pub(crate) mod buddy;
pub(crate) mod inblock;
pub(crate) mod lifo;
pub(crate) mod mimalloc;
pub(crate) mod page_segments;
#[cfg(test)]
mod tests;

/// Why a baseline failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum BaselineError {
    /// No page is free.
    #[error("all {0} pages of the baseline's memory are in use")]
    NoPages(usize),
    /// No page has the address.
    #[error("no page contains address {0:#x}")]
    Foreign(u64),
    /// The device does not accept the range.
    #[error("the range needs more than {0} segments, or one that the device does not accept")]
    Segments(usize),
}

/// An allocator with the interface of a kernel: one object per call.
pub(crate) trait Blocks {
    /// The blocks that it allocates.
    type Block;
    /// Allocates an object.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    fn alloc(&mut self) -> Result<Self::Block, BaselineError>;
    /// Frees an object.
    ///
    /// # Errors
    /// None of the baselines has one today.
    fn free(&mut self, block: Self::Block) -> Result<(), BaselineError>;
}
