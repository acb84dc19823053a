//! The memory stack of one run: a domain, an arena for what the drivers need, and an arena for the data.

use crate::account::{DomainReport, MemoryReport, RefusedReport};
use crate::args::{Memory, Protect, StackArgs};
use crate::memory::Need;
use pinfold::arena::{AllocError, BuildError, NotLocked, Residency};
use pinfold::soft::Port;
use pinfold::uring::Fixed;
use pinfold::{Arena, Buffer, Domain, MappingPolicy, Source};
use pinfold_core::addr::PageSize;
use pinfold_core::domain::BackendError;

/// Why there is no memory stack.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StackError {
    /// No address space.
    #[error("no I/O address space: {0}")]
    Domain(#[from] BackendError),
    /// No memory.
    #[error(
        "no DMA memory for {purpose}: {error}; ask for less with --bs and --iodepth, or for other memory with --memory"
    )]
    Arena {
        /// `the data`, `the controllers' queues`.
        purpose: &'static str,
        /// Why not.
        error: BuildError,
    },
    /// No room in it.
    #[error("the data's memory has no room for its buffers: {0}")]
    Buffer(#[from] AllocError),
    /// More than can be counted.
    #[error(
        "{slots} buffers of {bytes} bytes are more than an arena can have (1 TiB): ask for less with --bs and --iodepth"
    )]
    TooMuch {
        /// How many buffers.
        slots: usize,
        /// Of how many bytes.
        bytes: usize,
    },
}

/// The memory stack of one run.
#[derive(Debug)]
pub(crate) struct Stack {
    /// The I/O address space that all controllers of the run are in.
    pub(crate) domain: Domain,
    /// Always exposed: queues and PRP lists.
    pub(crate) control: Option<Arena>,
    /// The data buffers; exposed as `--protect` says.
    pub(crate) data: Arena,
    /// What `--protect` said.
    pub(crate) protect: Protect,
    slots: usize,
    slot_bytes: usize,
}

const HUGE: usize = 2 << 20;

/// What a buffer of `bytes` bytes takes of an arena so that all of them fit: a power of two of frames below 2 MiB,
/// whole hugepages above.
fn slot_bytes(bytes: usize) -> Option<usize> {
    if bytes > HUGE {
        bytes.checked_next_multiple_of(HUGE)
    } else {
        Some(bytes.max(4096).next_power_of_two())
    }
}

/// What a controller's queues, identify buffers and PRP lists take of an arena, generously.
fn control_bytes(slots: usize, bytes: usize) -> u64 {
    let list_pages = (bytes as u64 / 4096).div_ceil(511) + 1;
    (slots as u64).saturating_mul(list_pages * 4096).saturating_add(4 << 20)
}

impl Stack {
    /// A stack in `domain` with room for `slots` buffers of `bytes` bytes, and for `controllers` controllers.
    pub(crate) fn build(
        args: StackArgs,
        domain: Domain,
        (slots, bytes): (usize, usize),
        controllers: u64,
    ) -> Result<Self, StackError> {
        let too_much = || StackError::TooMuch { slots, bytes };
        let slot_bytes = slot_bytes(bytes).ok_or_else(too_much)?;
        let data_bytes = slot_bytes.checked_mul(slots.max(1)).ok_or_else(too_much)?;
        let mapping_policy =
            if args.protect == Protect::Static { MappingPolicy::Whole } else { MappingPolicy::PerUse };
        let mut builder = Arena::builder().size(data_bytes as u64).mapping_policy(mapping_policy);
        if let Some(source) = source(args.memory) {
            builder = builder.source(source);
        }
        let purpose = "the data";
        let data = builder.build(&domain).map_err(|error| StackError::Arena { purpose, error })?;
        let control = if controllers > 0 {
            let size = controllers.saturating_mul(control_bytes(slots, bytes));
            let builder = Arena::builder().size(size).mapping_policy(MappingPolicy::Whole);
            let purpose = "the controllers' queues";
            Some(builder.build(&domain).map_err(|error| StackError::Arena { purpose, error })?)
        } else {
            None
        };
        Ok(Self { domain, control, data, protect: args.protect, slots, slot_bytes })
    }

    /// All of the data's memory, to be registered with a ring.
    pub(crate) fn fixed(&self) -> Fixed<'_> {
        self.data.fixed()
    }

    /// The data buffers.
    pub(crate) fn buffers(&self) -> Result<Vec<Buffer>, StackError> {
        (0..self.slots).map(|_| Ok(self.data.alloc(self.slot_bytes)?)).collect()
    }

    /// A new controller's way to memory.
    pub(crate) fn port(&self) -> Option<Port> {
        self.domain.port()
    }

    /// The arenas.
    pub(crate) fn arenas(&self) -> impl Iterator<Item = &Arena> {
        std::iter::once(&self.data).chain(&self.control)
    }

    /// What such a stack needs, beside targets that hold `targets` bytes in memory.
    pub(crate) fn need((slots, bytes): (usize, usize), controllers: u64, targets: u64) -> Need {
        let each = slot_bytes(bytes).map_or(u64::MAX, |bytes| bytes as u64);
        let data = each.saturating_mul(slots.max(1) as u64);
        let control =
            if controllers > 0 { controllers.saturating_mul(control_bytes(slots, bytes)) } else { 0 };
        Need { buffers: (slots, bytes), arenas: data.saturating_add(control), targets }
    }

    /// What the arenas got.
    pub(crate) fn memory_report(&self) -> Vec<MemoryReport> {
        let data = memory_report("data", &self.data);
        let control = self.control.iter().map(|control| memory_report("control", control));
        std::iter::once(data).chain(control).collect()
    }

    /// What the domain did.
    pub(crate) fn domain_report(&self) -> DomainReport {
        let stats = self.domain.stats();
        let invalidations = stats.backend.invalidations;
        DomainReport {
            backend: self.domain.name(),
            maps: stats.maps,
            maps_fixed: stats.maps_fixed,
            quarantined: stats.quarantined,
            iova_extents: stats.iova_extents,
            table_pages: stats.backend.table_pages,
            invalidations_asked: invalidations.requested,
            invalidations_of_tables: invalidations.requested_tables,
            invalidations_merged: invalidations.merged,
            invalidations_sent: invalidations.sent,
            invalidations_whole: invalidations.domain_flushes,
            waits_sent: invalidations.waits,
            waited: invalidations.waited,
            waited_ns: invalidations.wait_ns,
        }
    }
}

fn source(memory: Memory) -> Option<Source> {
    match memory {
        Memory::Auto => None,
        Memory::Hugetlb1g => Some(Source::Hugetlb1G),
        Memory::Hugetlb2m => Some(Source::Hugetlb2M),
        Memory::Thp => Some(Source::Transparent),
        Memory::Plain => Some(Source::Plain),
        Memory::Memfd => Some(Source::Memfd),
    }
}

/// The source as it is written behind `--memory`, where it can be.
fn word(source: Source) -> &'static str {
    match source {
        Source::Transparent => "thp",
        other => other.name(),
    }
}

/// What an arena of 2 MiB or more on small pages goes without.
const SMALL_PAGES_COST: &str =
    "an I/O page-table entry and an IOTLB entry for each 4 KiB; hugepages take one for 2 MiB";

fn memory_report(name: &'static str, arena: &Arena) -> MemoryReport {
    let (report, stats) = (arena.report(), arena.stats());
    let not_locked = match &report.residency {
        // What mends it is told once for all arenas.
        Residency::NotLocked(NotLocked::Limit { requested, used, allowed, .. }) => Some(format!(
            "RLIMIT_MEMLOCK: {requested} bytes requested, {used} locked already, {allowed} allowed"
        )),
        Residency::NotLocked(why) => Some(why.to_string()),
        _ => None,
    };
    let small = report.page_size == PageSize::Size4K && report.bytes >= HUGE as u64;
    let refused = |unavailable: &pinfold::arena::SourceUnavailable| RefusedReport {
        source: word(unavailable.source),
        why: unavailable.reason.to_string(),
    };
    MemoryReport {
        name,
        source: word(report.source),
        bytes: report.bytes,
        page_bytes: report.page_size.bytes(),
        always_exposed: arena.mapping_policy() == MappingPolicy::Whole,
        cost: small.then_some(SMALL_PAGES_COST),
        not_locked,
        frames: stats.frames,
        frames_in_use: stats.frames_in_use,
        frames_at_most: stats.frames_peak,
        frames_quarantined: stats.frames_quarantined,
        refused: report.unavailable.iter().map(refused).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_fill_an_arena_without_gaps() {
        for (bytes, slot) in [(1, 4096), (512, 4096), (4097, 8192), (1 << 20, 1 << 20), (3 << 19, 2 << 20)] {
            assert_eq!(slot_bytes(bytes), Some(slot));
        }
        assert_eq!(slot_bytes((2 << 20) + 1), Some(4 << 20));
        assert_eq!(slot_bytes(usize::MAX), None);
    }
}
