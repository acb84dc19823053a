//! What Pinfold replaces, written afresh from its description.

pub mod buddy;
pub mod inblock;
pub mod lifo;
pub mod linear;
pub mod malloc;
pub mod page_segments;
pub mod pages;
pub mod rbtree;

use pinfold_core::mem::AccessError;

/// A block as a kernel's pool hands it out: an offset of the memory, which stands for both its addresses.
pub type Offset = u64;

/// Why a baseline failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BaselineError {
    /// There is no page left.
    #[error("all {0} pages of the baseline's memory are used")]
    NoPages(usize),
    /// An address that no page holds. (The real ones log it or corrupt their lists.)
    #[error("no page holds offset {0:#x}")]
    Foreign(Offset),
    /// A part of a buffer was more than the device takes.
    #[error("more segments than the {0} that there is room for, or one that the device does not take")]
    Segments(usize),
    /// A link in a block pointed outside the memory.
    #[error(transparent)]
    Access(#[from] AccessError),
}

/// A pool of blocks as the kernel has it: one call, one block.
pub trait Blocks {
    /// One block.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    fn alloc(&mut self) -> Result<Offset, BaselineError>;
    /// Takes a block back.
    ///
    /// # Errors
    /// [`BaselineError::Foreign`].
    fn free(&mut self, block: Offset) -> Result<(), BaselineError>;
    /// Gives all pages back.
    fn destroy(self);
}

#[cfg(test)]
mod tests;
