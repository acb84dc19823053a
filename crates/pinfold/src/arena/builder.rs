//! What is asked of an arena, and the steps that make one.

use super::obtain::{self, Obtained, Plan};
use super::source::{Account, NotLocked, Residency, Source};
use super::space::{self, NotAttached, Space};
use super::{Arena, BuildError, Inner, MappingPolicy};
use crate::domain::Domain;
use crate::sys::limits::MemlockLimit;
use crate::sys::region::Region;
use pinfold_core::frame::{Frame, FrameError, Zone};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// What to do where memory can not be locked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Pinning {
    /// Go on, and say so in [`Account::residency`].
    #[default]
    WhereAllowed,
    /// Build nothing: [`BuildError::NotLocked`].
    Required,
}

/// What is asked of an arena.
#[derive(Clone, Debug)]
pub struct ArenaBuilder {
    size: u64,
    sources: Option<Vec<Source>>,
    mapping_policy: MappingPolicy,
    node: Option<u32>,
    pinning: Pinning,
    lent: Option<(NonNull<u8>, usize)>,
}

impl ArenaBuilder {
    /// How many bytes an arena can have: 1 TiB.
    pub const MAX_BYTES: u64 = 1 << 40;

    pub(super) fn new() -> Self {
        Self {
            size: 0,
            sources: None,
            mapping_policy: MappingPolicy::default(),
            node: None,
            pinning: Pinning::default(),
            lent: None,
        }
    }

    /// How many bytes. Rounded up to 4096, below 2 MiB to a power of two, and with a hugetlb source to its page size;
    /// [`Account::bytes`] says what it came to.
    #[must_use]
    pub fn size(mut self, bytes: u64) -> Self {
        self.size = bytes;
        self
    }

    /// Where the memory must come from: it or nothing.
    #[must_use]
    pub fn source(self, source: Source) -> Self {
        self.sources([source])
    }

    /// Where the memory may come from, best first. Named sources are tried whatever the size is; where none is named,
    /// [`Source::PREFERENCE`] is tried as far as the size warrants it.
    #[must_use]
    pub fn sources(mut self, sources: impl IntoIterator<Item = Source>) -> Self {
        self.sources = Some(sources.into_iter().collect());
        self
    }

    /// The caller's own memory; size and sources are not looked at then.
    ///
    /// What the arena does to it, and takes back when it goes: locks it, keeps it from children (`MADV_DONTFORK`),
    /// binds it to a NUMA node where one is asked for. What is in it stays there: it counts as recycled memory.
    ///
    /// # Safety
    /// From [`build`](Self::build) until the arena is gone, with every handle, buffer and pool of it
    /// ([`quarantined_bytes`](super::quarantined_bytes) has not grown), `base..base + len` must stay mapped, readable and
    /// writable, and must be reached by nobody but the arena; what was locked or bound in it before is so no more
    /// afterwards. An arena that is kept for ever keeps this memory for ever too.
    #[must_use]
    pub unsafe fn caller(mut self, base: NonNull<u8>, len: usize) -> Self {
        self.lent = Some((base, len));
        self
    }

    /// What of it devices can reach; [`MappingPolicy::PerUse`] where nothing is said.
    #[must_use]
    pub fn mapping_policy(mut self, mapping_policy: MappingPolicy) -> Self {
        self.mapping_policy = mapping_policy;
        self
    }

    /// The NUMA node whose memory it must have: that or [`BuildError::Node`], never another one.
    #[must_use]
    pub fn numa_node(mut self, node: u32) -> Self {
        self.node = Some(node);
        self
    }

    /// What to do where the memory can not be locked; go on, where nothing is said.
    #[must_use]
    pub fn pinning(mut self, pinning: Pinning) -> Self {
        self.pinning = pinning;
        self
    }

    /// Gets the memory and brings it into `domain`. Pages come, zeroed by the kernel, when they are first touched; only
    /// those of a hugetlb source all come here (`MADV_POPULATE_WRITE`, since Linux 5.14), since one that is missing
    /// later would be a signal: some 0.2 s a GiB.
    ///
    /// # Errors
    /// [`BuildError`]; nothing is left behind then.
    pub fn build(self, domain: &Domain) -> Result<Arena, BuildError> {
        self.build_in(Box::new(domain.clone()))
    }

    pub(super) fn build_in(self, space: Box<dyn Space>) -> Result<Arena, BuildError> {
        let plan = self.plan()?;
        let Obtained { region, memfd, source, page_size, refused } = obtain::obtain(&plan)?;
        let residency = self.residency(&region, source, space.pins())?;
        let bytes = region.len() as u64;
        let frames = u32::try_from(bytes / Frame::BYTES)
            .map_err(|_| BuildError::TooLarge { asked: plan.bytes, limit: Self::MAX_BYTES })?;
        let (zone, fenced) = zone(frames)?;
        let region = ManuallyDrop::new(region);
        let place = match space::attach(&*space, region.memory(), self.mapping_policy) {
            Ok(place) => place,
            Err(failed) => return Err(detached(region, failed)),
        };
        let account = Account {
            asked_bytes: plan.bytes,
            bytes,
            source,
            page_size,
            numa_node: self.node,
            residency,
            refused,
        };
        Ok(Arena(Arc::new(Inner {
            region,
            memfd,
            zone,
            space,
            iova: place.iova(),
            place: Some(place),
            chunks: std::sync::Mutex::default(),
            mapping_policy: self.mapping_policy,
            account,
            fenced,
            peak: AtomicU64::new(0),
            quarantined: AtomicU64::new(0),
        })))
    }

    fn plan(&self) -> Result<Plan, BuildError> {
        let bytes = self.lent.map_or(self.size, |(_, len)| len as u64);
        if bytes == 0 {
            return Err(BuildError::NoSize);
        }
        if bytes > Self::MAX_BYTES {
            return Err(BuildError::TooLarge { asked: bytes, limit: Self::MAX_BYTES });
        }
        let sources: Vec<Source> = match &self.sources {
            Some(named) => named.clone(),
            None => Source::PREFERENCE.into_iter().filter(|source| source.is_warranted(bytes)).collect(),
        };
        if self.lent.is_none() && (sources.is_empty() || sources.contains(&Source::Caller)) {
            return Err(BuildError::NoSourceNamed);
        }
        Ok(Plan { bytes, sources, node: self.node, lent: self.lent })
    }

    /// Locks the memory where that is allowed.
    fn residency(&self, region: &Region, source: Source, pins: bool) -> Result<Residency, BuildError> {
        if source.is_hugetlb() {
            return Ok(Residency::Hugetlb);
        }
        if pins {
            // Locked as well it would count twice against RLIMIT_MEMLOCK, and fail at half of it.
            return Ok(Residency::ByMapping);
        }
        let limit = MemlockLimit::here();
        let Err(errno) = region.lock() else { return Ok(Residency::Locked) };
        let asked = region.len() as u64;
        let why = match (limit.soft, limit.left()) {
            (Some(allowed), Some(left)) if left < asked => {
                NotLocked::Limit { asked, used: limit.used.unwrap_or(0), allowed, limit }
            }
            _ => NotLocked::Kernel(errno),
        };
        match self.pinning {
            Pinning::WhereAllowed => Ok(Residency::NotLocked(why)),
            Pinning::Required => Err(BuildError::NotLocked(why)),
        }
    }
}

/// A zone of `frames` frames. It has at least 2 MiB, so what a smaller arena does not have of it is taken out for
/// ever; how many frames those are comes beside it.
fn zone(frames: u32) -> Result<(Zone, u64), FrameError> {
    let all = frames.max(Zone::MIN_FRAMES);
    let zone = Zone::new(all)?;
    if all > frames {
        let first = zone.alloc_run(all, 1)?;
        zone.free_run(first, frames)?;
    }
    Ok((zone, u64::from(all - frames)))
}

/// The memory goes back to the system, unless a device may reach it for ever.
fn detached(region: ManuallyDrop<Region>, failed: NotAttached) -> BuildError {
    if failed.stuck {
        super::count_quarantined(region.len() as u64);
    } else {
        drop(ManuallyDrop::into_inner(region));
    }
    BuildError::Domain(failed.error)
}
