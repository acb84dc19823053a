//! Policies: how DMA addresses are made for memory, and taken back. The policies of Linux in 2015,
//! of Linux since, and of Pinfold, each over the same software IOMMU, so that they can be compared
//! on one workload (`pinfold-bench iommu`) or on a recorded trace. The baselines have the locks and
//! the per-CPU state of the originals and are written from public descriptions.
//!
//! | policy | addresses | after an unmap |
//! | --- | --- | --- |
//! | `tree-2015` | one tree per device, one entry per mapping | a queue of 250 ranges; when it is full, or after 10 ms, a flush of each with the tree locked |
//! | `tree-merged` | the same, entries that abut merged | the same |
//! | `lazy` | per-CPU caches over a locked tree | a flush of the whole domain per 256 unmaps of a CPU, or after 10 ms |
//! | `linux-strict` | the same | a flush and a wait for each |
//! | `identity` | the physical address, counted per page | a flush and a wait when a page's count reaches 0 |
//! | `strict` | an owner of a domain | waits |
//! | `revoke` | the same | holds the memory until its flush has completed |
//! | `batch` | the same, 16 mappings revoked at a time | the same |
//! | `static` | all memory mapped for the lifetime of the policy | nothing |
//! | `none` | the physical address, all memory mapped once | nothing: the device reaches everything, always |
//!
//! With `tree-2015`, `tree-merged` and `lazy` memory is reused while a device can still reach
//! it; that time is reported ([`PolicyStats::reachable_ns`]). Flushes are those of a model: they
//! cost time, as configured.
//!
//! ```
//! use pinfold::soft::SoftConfig;
//! use pinfold_replay::policy::{Memory, PolicyKind};
//! use pinfold_core::access::Access;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = Memory::new(1 << 20)?;
//! let page = memory.range(0x3000, 0x1000).ok_or("outside")?;
//! for kind in PolicyKind::ALL {
//!     let policy = kind.create(&memory, &SoftConfig::default())?;
//!     let device = policy.port();
//!     let mut thread = policy.thread();
//!     let dma = thread.map(page, Access::WRITE)?;
//!     device.write(dma.iova().start(), b"from the device")?;
//!     let mut freed = Vec::new();
//!     thread.unmap(dma, &mut freed)?;
//!     thread.settle(&mut freed)?; // waits for what is still held
//!     assert_eq!(freed, [page]);
//!     println!("{}: {}", kind.name(), policy.stats());
//! }
//! # Ok(())
//! # }
//! ```

mod api;
mod flush_queue;
mod identity;
mod iommu;
mod locked;
mod magazines;
mod memory;
mod owned;
#[cfg(test)]
mod tests;

pub use api::{Dma, Policy, PolicyError, PolicyStats, PolicyThread};
pub use memory::{Memory, static_maps};

use identity::{Identity, Unprotected};
use locked::Locked;
use magazines::Cached;
use owned::{Pinfold, Unmap};
use pinfold::soft::SoftConfig;
use std::sync::Arc;

/// A policy that can be created.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PolicyKind {
    /// One tree per device, one entry per mapping, locked across invalidations.
    Tree2015,
    /// The same with entries that abut merged.
    TreeMerged,
    /// Per-CPU caches over a locked tree, flushed lazily.
    Lazy,
    /// The same with a flush and a wait per unmap.
    LinuxStrict,
    /// The physical address, counted per page; strict.
    Identity,
    /// Pinfold: an unmap waits.
    Strict,
    /// Pinfold: an unmap revokes, and the memory is held until the flush has completed.
    Revoke,
    /// Pinfold: the same, 16 at a time.
    Batch,
    /// Pinfold: all memory is mapped for the lifetime of the policy.
    Static,
    /// No protection.
    None,
}

impl PolicyKind {
    /// All policies that map and unmap, from the oldest to the ceiling: without `static`.
    pub const ALL: [Self; 9] = [
        Self::Tree2015,
        Self::TreeMerged,
        Self::Lazy,
        Self::LinuxStrict,
        Self::Identity,
        Self::Strict,
        Self::Revoke,
        Self::Batch,
        Self::None,
    ];

    /// Returns the name in records and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tree2015 => "tree-2015",
            Self::TreeMerged => "tree-merged",
            Self::Lazy => "lazy",
            Self::LinuxStrict => "linux-strict",
            Self::Identity => "identity",
            Self::Strict => "strict",
            Self::Revoke => "revoke",
            Self::Batch => "batch",
            Self::Static => "static",
            Self::None => "none",
        }
    }

    /// Returns the policy of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns whether no device reaches memory after its unmap has returned.
    #[cfg(test)]
    pub(crate) fn is_strict(self) -> bool {
        matches!(self, Self::LinuxStrict | Self::Identity | Self::Strict)
    }

    /// Creates the policy over a software IOMMU of its own, which reaches `memory` alone. The
    /// configuration's number of levels is ignored: addresses have 48 bits.
    ///
    /// # Errors
    /// [`PolicyError::Backend`] if the IOMMU cannot be created, [`PolicyError::NoTimer`],
    /// [`PolicyError::NoTablePages`].
    pub fn create(
        self,
        memory: &Arc<Memory>,
        config: &SoftConfig,
    ) -> Result<Box<dyn Policy>, PolicyError> {
        Ok(match self {
            Self::Tree2015 => Box::new(Locked::new(memory, config, false)?),
            Self::TreeMerged => Box::new(Locked::new(memory, config, true)?),
            Self::Lazy => Box::new(Cached::new(memory, config, true)?),
            Self::LinuxStrict => Box::new(Cached::new(memory, config, false)?),
            Self::Identity => Box::new(Identity::new(memory, config)?),
            Self::Strict => Box::new(Pinfold::new(memory, config, Unmap::Wait)?),
            Self::Revoke => Box::new(Pinfold::new(memory, config, Unmap::Revoke)?),
            Self::Batch => Box::new(Pinfold::new(memory, config, Unmap::RevokeMany)?),
            Self::Static => Box::new(Pinfold::new(memory, config, Unmap::Never)?),
            Self::None => Box::new(Unprotected::new(memory, config)?),
        })
    }
}
