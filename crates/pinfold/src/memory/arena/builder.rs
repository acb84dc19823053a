//! The builder of an arena: its size, sources, policies and limits.

use super::error::{ArenaReport, BuildError};
use super::handle::{Arena, ArenaMemory};
use super::state::State;
use crate::domain::Domain;
use crate::memory::attachment::MappingPolicy;
use crate::memory::obtain::{self, Obtained, Request};
use crate::memory::source::{NotLocked, Residency, Source};
use crate::sys::limits::MemlockLimit;
use crate::sys::region::Region;
use std::ptr::NonNull;

/// The action if the memory cannot be locked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Pinning {
    /// Continue, and report it in [`ArenaReport::residency`].
    #[default]
    WhereAllowed,
    /// Fail with [`BuildError::NotLocked`].
    Required,
}

/// Collects the properties of an arena and builds it. See [`Arena::builder`].
#[derive(Clone, Debug)]
pub struct ArenaBuilder {
    size: u64,
    sources: Option<Vec<Source>>,
    mapping_policy: MappingPolicy,
    node: Option<u32>,
    pinning: Pinning,
    caller: Option<(NonNull<u8>, usize)>,
}

impl Arena {
    /// Returns a builder.
    pub fn builder() -> ArenaBuilder {
        ArenaBuilder {
            size: 0,
            sources: None,
            mapping_policy: MappingPolicy::default(),
            node: None,
            pinning: Pinning::default(),
            caller: None,
        }
    }
}

impl ArenaBuilder {
    /// The largest arena in bytes: 1 TiB.
    pub const MAX_BYTES: u64 = 1 << 40;

    /// Sets the size in bytes. It is rounded up to 4096, below 2 MiB to a power of two, and with a
    /// source of hugepages to their size; [`ArenaReport::bytes`] is the result.
    #[must_use]
    pub fn size(mut self, bytes: u64) -> Self {
        self.size = bytes;
        self
    }

    /// Sets the only source that the memory may come from.
    #[must_use]
    pub fn source(self, source: Source) -> Self {
        self.sources([source])
    }

    /// Sets the sources that the memory may come from, best first. Named sources are tried for any
    /// size; the default is [`Source::PREFERENCE`], as far as the size warrants it.
    #[must_use]
    pub fn sources(mut self, sources: impl IntoIterator<Item = Source>) -> Self {
        self.sources = Some(sources.into_iter().collect());
        self
    }

    /// Uses the caller's own memory; size and sources are ignored.
    ///
    /// The arena locks it, keeps it from children (`MADV_DONTFORK`) and binds it to a NUMA node if
    /// one is requested, and undoes this when it is dropped, except where the memory was locked or
    /// kept before. The contents are kept and count as recycled memory. All pages are faulted in,
    /// since one that is missing later would raise a signal; memory that cannot be read and written
    /// is [an error](BuildError::Inaccessible), and so is memory that [is in use](BuildError::InUse).
    ///
    /// # Safety
    /// From [`build`](Self::build) until the arena is dropped, with every handle, buffer and pool
    /// of it, `base..base + len` must stay mapped, readable and writable, and must be accessed only
    /// through the arena. If the arena is
    /// quarantined ([`quarantined_bytes`](crate::quarantined_bytes) has grown), this is permanent.
    #[must_use]
    pub unsafe fn caller(mut self, base: NonNull<u8>, len: usize) -> Self {
        self.caller = Some((base, len));
        self
    }

    /// Sets which part of the arena devices can reach; the default is [`MappingPolicy::PerUse`].
    #[must_use]
    pub fn mapping_policy(mut self, mapping_policy: MappingPolicy) -> Self {
        self.mapping_policy = mapping_policy;
        self
    }

    /// Sets the NUMA node of the memory. If that node has none, the build fails with
    /// [`BuildError::Node`].
    #[must_use]
    pub fn numa_node(mut self, node: u32) -> Self {
        self.node = Some(node);
        self
    }

    /// Sets what to do if the memory cannot be locked; the default is to continue.
    #[must_use]
    pub fn pinning(mut self, pinning: Pinning) -> Self {
        self.pinning = pinning;
        self
    }

    /// Obtains the memory and maps it into `domain`. Pages are allocated, zeroed by the kernel,
    /// when they are first touched; only those of a hugetlb source are allocated here
    /// (`MADV_POPULATE_WRITE`, since Linux 5.14; some 0.2 s a GiB), since a page that is missing
    /// later would raise a signal.
    ///
    /// # Errors
    /// [`BuildError`].
    pub fn build(self, domain: &Domain) -> Result<Arena, BuildError> {
        let memory = self.build_memory(domain.pins())?;
        Ok(memory.map_into(domain)?)
    }

    /// Obtains the memory, for a program that needs no domain or creates it later: see
    /// [`ArenaMemory::map_into`].
    ///
    /// # Errors
    /// [`BuildError`].
    pub fn build_unmapped(self) -> Result<ArenaMemory, BuildError> {
        self.build_memory(false)
    }

    /// `pins`: the domain that it will be mapped into pins its mappings.
    pub(super) fn build_memory(self, pins: bool) -> Result<ArenaMemory, BuildError> {
        let request = self.request()?;
        let Obtained { held, memfd, source, page_size, unavailable } = obtain::obtain(&request)?;
        let residency = self.residency(&held, source, pins)?;
        let bytes = held.len() as u64;
        if bytes > Self::MAX_BYTES {
            return Err(BuildError::TooLarge { requested: request.bytes, limit: Self::MAX_BYTES });
        }
        let report = ArenaReport {
            requested_bytes: request.bytes,
            bytes,
            source,
            page_size,
            numa_node: self.node,
            residency,
            unavailable,
        };
        Ok(ArenaMemory::new(State::new(held, memfd, self.mapping_policy, report)?))
    }

    fn request(&self) -> Result<Request, BuildError> {
        let bytes = self.caller.map_or(self.size, |(_, len)| len as u64);
        if bytes == 0 {
            return Err(BuildError::NoSize);
        }
        if bytes > Self::MAX_BYTES {
            return Err(BuildError::TooLarge { requested: bytes, limit: Self::MAX_BYTES });
        }
        let sources: Vec<Source> = match &self.sources {
            Some(named) => named.clone(),
            None => {
                Source::PREFERENCE.into_iter().filter(|source| source.is_warranted(bytes)).collect()
            }
        };
        if self.caller.is_none() && (sources.is_empty() || sources.contains(&Source::Caller)) {
            return Err(BuildError::NoSourceNamed);
        }
        Ok(Request { bytes, sources, node: self.node, caller: self.caller })
    }

    /// Locks the memory where that is allowed.
    fn residency(
        &self,
        region: &Region,
        source: Source,
        pins: bool,
    ) -> Result<Residency, BuildError> {
        if source.is_hugetlb() {
            return Ok(Residency::Hugetlb);
        }
        if pins {
            // Locked memory would count twice against RLIMIT_MEMLOCK, and fail at half of it.
            return Ok(Residency::ByMapping);
        }
        let limit = MemlockLimit::here();
        let Err(errno) = region.lock() else { return Ok(Residency::Locked) };
        let requested = region.len() as u64;
        let reason = match (limit.soft, limit.left()) {
            (Some(allowed), Some(left)) if left < requested => {
                NotLocked::Limit { requested, used: limit.used.unwrap_or(0), allowed, limit }
            }
            _ => NotLocked::Kernel(errno),
        };
        match self.pinning {
            Pinning::WhereAllowed => Ok(Residency::NotLocked(reason)),
            Pinning::Required => Err(BuildError::NotLocked(reason)),
        }
    }
}
