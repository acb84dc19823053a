//! The suites: what is measured, subject by subject.

pub mod pool;

use crate::baseline::BaselineError;
use crate::harness::{Harness, Options};
use crate::record::Record;
use pinfold_core::dma_pool;

/// The suites that there are, each with what it measures.
pub const SUITES: [(&str, &str); 1] = [("pool", "DMA pools: alloc and free, the 373,959-block workload")];

/// Why a suite could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// There is no suite of this name.
    #[error("no suite {name:?}: there are {known}", known = SUITES.map(|(name, _)| name).join(", "))]
    UnknownSuite {
        /// What was asked for.
        name: String,
    },
    /// A baseline failed.
    #[error("a baseline failed: {0}")]
    Baseline(#[from] BaselineError),
    /// The memory for the subjects could not be had.
    #[error("the memory for the measurement could not be had: {0}")]
    Arena(#[from] pinfold::arena::BuildError),
    /// A piece of that memory could not be had.
    #[error(transparent)]
    Buffer(#[from] pinfold::arena::AllocError),
    /// The domain for the subjects could not be had.
    #[error("the domain for the measurement could not be had: {0}")]
    Domain(#[from] pinfold_core::domain::BackendError),
    /// A pool was not made.
    #[error(transparent)]
    Create(#[from] dma_pool::CreateError),
    /// A pool handed nothing out.
    #[error(transparent)]
    Alloc(#[from] dma_pool::AllocError),
    /// A pool took a block not back.
    #[error(transparent)]
    Free(#[from] dma_pool::FreeError),
}

/// Measures a suite.
///
/// # Errors
/// [`BenchError::UnknownSuite`], or what went wrong on the way.
pub fn run(suite: &str, options: Options) -> Result<Vec<Record>, BenchError> {
    match suite {
        "pool" => pool::run(&Harness::new("pool", options)),
        name => Err(BenchError::UnknownSuite { name: name.to_owned() }),
    }
}
