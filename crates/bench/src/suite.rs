//! The suites: what is measured, subject by subject.

pub mod buffer;
pub mod frame;
mod hand;
pub mod page_pool;
pub mod pool;
pub mod vfio;

use crate::baseline::BaselineError;
use crate::harness::{Harness, Options, Turn};
use crate::record::Record;
use pinfold_core::frame::FrameError;
use pinfold_core::mem::AccessError;
use pinfold_core::{dma_pool, gather, page_pool as pages};

/// A suite.
#[derive(Clone, Copy)]
pub struct Suite {
    /// Its name in the records and on the command line.
    pub name: &'static str,
    /// What it measures.
    pub about: &'static str,
    run: fn(&Harness<'_>) -> Result<Vec<Record>, BenchError>,
    /// Why it can not be measured on this machine, if it can not.
    unable: fn() -> Option<String>,
}

impl std::fmt::Debug for Suite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Suite").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The suites that there are.
pub const SUITES: &[Suite] = &[
    Suite {
        name: "pool",
        about: "DMA pools: the 373,959-block workload, pairs, bulk, two threads",
        run: pool::run,
        unable: || None,
    },
    Suite {
        name: "frame",
        about: "page frames: pairs, bulk, 2 MiB runs, the RPC server's refill",
        run: frame::run,
        unable: || None,
    },
    Suite {
        name: "vfio",
        about: "mappings by the kernel's table: map and unmap by size and page size, beside an arena mapped whole",
        run: vfio::run,
        unable: vfio::unable,
    },
    Suite {
        name: "page-pool",
        about: "pages that keep their mapping: the consumer's pairs, the ring, from below, a receive path",
        run: page_pool::run,
        unable: || None,
    },
    Suite {
        name: "buffer",
        about: "registered buffers: describing 1 GiB, finding an offset, 8 MiB to a device, a read of 8 MiB",
        run: buffer::run,
        unable: || None,
    },
];

impl Suite {
    /// The suite of this name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        SUITES.iter().find(|suite| suite.name == name).copied()
    }

    /// Why it can not be measured on this machine, if it can not: it lacks a device, say.
    pub fn unable(&self) -> Option<String> {
        (self.unable)()
    }

    /// Measures it; `watch` is told of each run before it is made.
    ///
    /// # Errors
    /// What went wrong on the way.
    pub fn run(&self, options: Options, watch: &dyn Fn(Turn)) -> Result<Vec<Record>, BenchError> {
        (self.run)(&Harness::new(self.name, options, watch))
    }
}

/// Why a suite could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A baseline failed.
    #[error("a baseline failed: {0}")]
    Baseline(#[from] BaselineError),
    /// The memory for the subjects could not be had.
    #[error("the memory for the measurement could not be had: {0}")]
    Arena(#[from] pinfold::arena::BuildError),
    /// A piece of that memory could not be had.
    #[error(transparent)]
    Buffer(#[from] pinfold::arena::AllocError),
    /// That memory cannot be the baselines' alone.
    #[error(transparent)]
    NotExclusive(#[from] pinfold::arena::NotExclusive),
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
    /// A pool took many blocks not back.
    #[error(transparent)]
    FreeBulk(#[from] dma_pool::BulkFreeError),
    /// A zone refused frames.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A page pool was not made.
    #[error(transparent)]
    CreatePages(#[from] pages::CreateError),
    /// A page pool handed nothing out.
    #[error(transparent)]
    AllocPage(#[from] pages::AllocError),
    /// A page pool took a page not back.
    #[error(transparent)]
    FreePage(#[from] pages::FreeError),
    /// A packet lies outside its page.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// A buffer was not described.
    #[error(transparent)]
    Register(#[from] pinfold_core::registered::BufferError),
    /// An offset was not found.
    #[error(transparent)]
    Outside(#[from] pinfold_core::registered::OutsideBuffer),
    /// A device's profile is impossible.
    #[error(transparent)]
    Profile(#[from] gather::ProfileError),
    /// A part of a buffer was not cut into what a device takes.
    #[error(transparent)]
    Gather(#[from] gather::GatherError),
    /// A PRP list was not laid out.
    #[error(transparent)]
    Prp(#[from] gather::prp::PrpError<gather::prp::PoolTakeError>),
    /// A file's queue failed.
    #[error(transparent)]
    File(#[from] pinfold::uring::FileError),
    /// The file that is read for the measurement is gone.
    #[error("the file made for the measurement: {0}")]
    Scratch(#[source] std::io::Error),
    /// A bulk call got less than the subject has.
    #[error("{got} of {asked} were handed out, although all are there")]
    Short {
        /// How many were asked for.
        asked: usize,
        /// How many came.
        got: usize,
    },
    /// There is nothing to measure with.
    #[error("no device is bound to VFIO: `sudo pinfold bind BDF` gives it one (BDF: a device's address)")]
    NoDevice,
    /// No device that is bound to VFIO can be opened.
    #[error(transparent)]
    Device(#[from] pinfold::vfio::OpenError),
    /// A second thread could not be started.
    #[error("a second thread for the measurement could not be started: {0}")]
    NoThread(#[source] std::io::Error),
    /// A thread of the measurement ended early.
    #[error("a thread of the measurement ended before it was done")]
    Thread,
}

#[cfg(test)]
mod tests;
