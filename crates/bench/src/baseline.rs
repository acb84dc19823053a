//! What Pinfold replaces, written afresh from its description.

pub mod block;
pub mod buddy;
pub mod inblock;
pub mod lifo;
pub mod linear;
pub mod lock;
pub mod malloc;
pub mod page_segments;
pub mod pages;
pub mod rbtree;

/// Why a baseline failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BaselineError {
    /// There is no page left.
    #[error("all {0} pages of the baseline's memory are used")]
    NoPages(usize),
    /// An address that no page holds. (The real ones log it or corrupt their lists.)
    #[error("no page holds address {0:#x}")]
    Foreign(u64),
    /// A part of a buffer was more than the device takes.
    #[error("more segments than the {0} that there is room for, or one that the device does not take")]
    Segments(usize),
}

/// A pool as a kernel has it: one call, one block.
pub trait Blocks {
    /// What it hands out.
    type Block;
    /// Returns one.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    fn alloc(&mut self) -> Result<Self::Block, BaselineError>;
    /// Takes one back.
    ///
    /// # Errors
    /// [`BaselineError::Foreign`].
    fn free(&mut self, block: Self::Block) -> Result<(), BaselineError>;
    /// Gives all pages back, as when the pool is destroyed.
    fn destroy(&mut self);
}

#[cfg(test)]
mod tests;
