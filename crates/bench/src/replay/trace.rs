//! A trace that has been read: per device, what was mapped and unmapped, in order.

use super::parse::Damage;
use pinfold_core::access::Access;
use serde::Serialize;

const PAGE: u64 = 4096;

/// Pages that lie side by side, in an address space of either side.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Run {
    /// The first address, of a page.
    pub start: u64,
    /// The size in bytes, whole pages.
    pub len: u64,
}

impl Run {
    /// Returns the pages that contain a range of bytes, whose end has been checked.
    pub(super) fn covering(start: u64, size: u64) -> Self {
        let first = start / PAGE * PAGE;
        let end = start
            .saturating_add(size)
            .checked_next_multiple_of(PAGE)
            .unwrap_or(u64::MAX / PAGE * PAGE);
        Self { start: first, len: end - first }
    }

    /// Returns the address behind the last byte.
    pub fn end(self) -> u64 {
        self.start.saturating_add(self.len)
    }

    /// Returns the number of pages.
    pub fn pages(self) -> u64 {
        self.len / PAGE
    }
}

/// A mapping of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mapping {
    pub(super) access: Access,
    /// Its memory: runs of `Device::memory`.
    pub(super) memory: (u32, u32),
    /// Its recorded addresses: runs of `Device::addresses`.
    pub(super) addresses: (u32, u32),
}

/// What happens next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Operation {
    /// Since the first event of the trace.
    pub(super) time_ns: u64,
    /// The number of the mapping.
    pub(super) mapping: u32,
    pub(super) unmaps: bool,
}

/// What a device did, as recorded.
#[derive(Clone, Debug, Default)]
pub struct Device {
    /// The name, for instance `0000:00:02.0`.
    pub name: String,
    /// The counts.
    pub counts: Counts,
    pub(super) mappings: Vec<Mapping>,
    pub(super) memory: Vec<Run>,
    pub(super) addresses: Vec<Run>,
    pub(super) operations: Vec<Operation>,
    /// How many operations have been made when the most bytes are mapped.
    pub(super) peak_at: usize,
}

impl Device {
    /// Returns the number of maps and unmaps that are replayed.
    pub fn operations(&self) -> usize {
        self.operations.len()
    }

    pub(super) fn memory_of(&self, mapping: &Mapping) -> &[Run] {
        slice(&self.memory, mapping.memory)
    }

    pub(super) fn addresses_of(&self, mapping: &Mapping) -> &[Run] {
        slice(&self.addresses, mapping.addresses)
    }
}

fn slice(runs: &[Run], (first, count): (u32, u32)) -> &[Run] {
    let first = first as usize;
    runs.get(first..first + count as usize).unwrap_or_default()
}

/// What was counted of one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Counts {
    /// Mappings made: by `dma_map_*` and `dma_alloc*`.
    pub maps: u64,
    /// Of these, scatter lists.
    pub lists: u64,
    /// Of these, scatter lists of which the kernel recorded the first segments only: the others are
    /// left out.
    pub truncated: u64,
    /// Of these, scatter lists (and allocations in segments) for which the sizes of the segments
    /// are not recorded: they are taken to be equal.
    pub split_evenly: u64,
    /// Of these, allocations whose physical address is not recorded: each is given memory of its
    /// own.
    pub without_memory: u64,
    /// Of these, at an address that was still in use: where two processors record a map and an
    /// unmap in the other order.
    pub overlapping: u64,
    /// Mappings removed.
    pub unmaps: u64,
    /// Unmaps of what the trace has not mapped: they are left out.
    pub unmaps_without_map: u64,
    /// Mappings that the trace does not unmap.
    pub never_unmapped: u64,
    /// Maps that failed.
    pub failed: u64,
    /// The most mappings at a time.
    pub peak_mappings: u64,
    /// The most bytes mapped at a time, in whole pages.
    pub peak_bytes: u64,
    /// Pages that were unmapped.
    pub pages_unmapped: u64,
    /// Accesses to addresses that were not mapped.
    pub faults: u64,
    /// How often it was attached to a domain.
    pub attached: u64,
    /// Calls of the IOMMU's driver that map.
    pub iommu_maps: u64,
    /// Calls of the IOMMU's driver that unmap.
    pub iommu_unmaps: u64,
    /// The pages of these unmaps.
    pub iommu_unmapped_pages: u64,
    /// The pages that VT-d would flush for these unmaps in strict mode: each range becomes one
    /// aligned power of two.
    pub strict_flush_pages: u64,
    /// Unmaps that removed another size than was asked for.
    pub iommu_unmaps_partial: u64,
}

/// What was read.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Summary {
    /// Lines.
    pub lines: u64,
    /// Lines that are events of the DMA interface.
    pub dma_events: u64,
    /// Lines that are events of the IOMMU.
    pub iommu_events: u64,
    /// Lines that are other events: they map nothing.
    pub other_events: u64,
    /// Lines that cannot be read.
    pub damaged: u64,
    /// The first of them, with their numbers.
    #[serde(serialize_with = "damage_lines")]
    pub first_damaged: Vec<(u64, Damage)>,
    /// How often events were lost.
    pub losses: u64,
    /// How many events were lost, as far as the kernel knew it.
    pub lost_events: u64,
    /// The line of the first loss; 0 if there is none.
    pub first_loss: u64,
    /// Calls of the IOMMU's driver that belong to no event of the DMA interface.
    pub iommu_unassigned: u64,
    /// Events that are earlier than the one before.
    pub out_of_order: u64,
    /// Processors.
    pub cpus: u64,
    /// From the first to the last event; `None` if the trace has no times in seconds.
    pub duration_ns: Option<u64>,
    /// Why the input ended early, for instance because a compressed file is truncated.
    pub ended_early: Option<String>,
    /// Whether there is more than was to be read.
    pub limited: bool,
}

fn damage_lines<S: serde::Serializer>(lines: &[(u64, Damage)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(lines.iter().map(|(line, damage)| format!("line {line}: {damage}")))
}

/// A trace.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The devices, in the order in which they first map something.
    pub devices: Vec<Device>,
    /// What was read.
    pub summary: Summary,
}
