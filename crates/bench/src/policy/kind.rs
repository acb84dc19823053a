//! The policies by name.

use super::api::{Policy, PolicyError};
use super::identity::Identity;
use super::locked::Locked;
use super::magazines::Cached;
use super::memory::Memory;
use super::none::Unprotected;
use super::owned::{Pinfold, Unmap};
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
    Magazines,
    /// The same with a flush and a wait per unmap.
    MagazinesStrict,
    /// The physical address, counted per page; strict.
    Identity,
    /// Pinfold: an unmap waits.
    PinfoldStrict,
    /// Pinfold: an unmap revokes, and the memory is held until the flush has completed.
    PinfoldRevoke,
    /// Pinfold: the same, 16 at a time.
    PinfoldBatch,
    /// No protection.
    None,
}

impl PolicyKind {
    /// All policies, from the oldest to the ceiling.
    pub const ALL: [Self; 9] = [
        Self::Tree2015,
        Self::TreeMerged,
        Self::Magazines,
        Self::MagazinesStrict,
        Self::Identity,
        Self::PinfoldStrict,
        Self::PinfoldRevoke,
        Self::PinfoldBatch,
        Self::None,
    ];

    /// Returns the name in records and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tree2015 => "tree-2015",
            Self::TreeMerged => "tree-merged",
            Self::Magazines => "magazines",
            Self::MagazinesStrict => "magazines-strict",
            Self::Identity => "identity",
            Self::PinfoldStrict => "pinfold-strict",
            Self::PinfoldRevoke => "pinfold-revoke",
            Self::PinfoldBatch => "pinfold-batch",
            Self::None => "none",
        }
    }

    /// Returns the policy of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether no device reaches memory after its unmap has returned.
    pub fn is_strict(self) -> bool {
        matches!(self, Self::MagazinesStrict | Self::Identity | Self::PinfoldStrict)
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
            Self::Magazines => Box::new(Cached::new(memory, config, true)?),
            Self::MagazinesStrict => Box::new(Cached::new(memory, config, false)?),
            Self::Identity => Box::new(Identity::new(memory, config)?),
            Self::PinfoldStrict => Box::new(Pinfold::new(memory, config, Unmap::Wait)?),
            Self::PinfoldRevoke => Box::new(Pinfold::new(memory, config, Unmap::Revoke)?),
            Self::PinfoldBatch => Box::new(Pinfold::new(memory, config, Unmap::RevokeMany)?),
            Self::None => Box::new(Unprotected::new(memory, config)?),
        })
    }
}
