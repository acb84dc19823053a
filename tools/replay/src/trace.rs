//! A trace that has been read: per device, the maps and unmaps, in order.

use super::parse::Damage;
use pinfold_core::access::Access;
use serde::Serialize;
use std::collections::HashSet;

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

/// The kind of the next operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Operation {
    /// Since the first event of the trace.
    pub(super) time_ns: u64,
    /// The number of the mapping.
    pub(super) mapping: u32,
    pub(super) unmaps: bool,
}

/// The operations of a device, as recorded.
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
    /// The number of operations made when the most bytes are mapped.
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

/// The counts of one device.
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
    /// The number of times that it was attached to a domain.
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

/// The summary of the lines that were read.
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
    /// The number of times that events were lost.
    pub losses: u64,
    /// The number of lost events, as far as the kernel knew it.
    pub lost_events: u64,
    /// The line of the first loss; 0 if there is none.
    pub first_loss: u64,
    /// Calls of the IOMMU's driver that belong to no event of the DMA interface.
    pub iommu_unassigned: u64,
    /// Events that are earlier than the one before.
    pub out_of_order: u64,
    /// Processors.
    pub cpus: u64,
    /// The time from the first to the last event; `None` if the trace has no times in seconds.
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
    /// The summary of the lines that were read.
    pub summary: Summary,
}

// The needs of a sequence of mappings in an I/O address space: in the recorded one, and in each
// policy's.

/// The needs of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Footprint {
    /// The bytes from the lowest address ever used to the end of the highest.
    pub span_bytes: u64,
    /// Different pages ever used.
    pub pages: u64,
    /// Runs of adjacent addresses when the most bytes are mapped.
    pub extents_at_peak: u64,
    /// Pages of a four-level table that map those: what a table that frees empty pages has.
    pub table_pages_at_peak: u64,
    /// Pages of a four-level table that was ever used: what a table has that never frees pages, as
    /// Linux's.
    pub table_pages_ever: u64,
}

/// The addresses of a mapping: the recorded ones, or those of a policy.
pub(super) trait Addresses {
    /// Returns the runs of a mapping, by number.
    fn of(&self, mapping: u32) -> &[Run];
}

/// The addresses that the kernel chose.
pub(super) struct Recorded<'t>(pub(super) &'t Device);

impl Addresses for Recorded<'_> {
    fn of(&self, mapping: u32) -> &[Run] {
        let mapping = self.0.mappings.get(mapping as usize);
        mapping.map_or(&[], |mapping| self.0.addresses_of(mapping))
    }
}

/// Returns the addresses that are mapped after the first `count` operations, each page once, as
/// runs that do not abut. O(n log n).
pub(super) fn live_after(
    operations: &[Operation],
    count: usize,
    addresses: &dyn Addresses,
) -> Vec<Run> {
    let mut live = HashSet::new();
    for Operation { mapping, unmaps, .. } in operations.iter().take(count) {
        if *unmaps {
            live.remove(mapping);
        } else {
            live.insert(*mapping);
        }
    }
    merged(live.into_iter().flat_map(|mapping| addresses.of(mapping)).copied().collect())
}

/// Sorts runs, and joins those that abut or overlap, as those of one page do with the physical
/// address as address.
fn merged(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_unstable();
    runs.dedup_by(|next, run| {
        let joins = next.start <= run.end();
        if joins {
            run.len = run.end().max(next.end()) - run.start;
        }
        joins
    });
    runs
}

impl<T: Addresses> Addresses for &T {
    fn of(&self, mapping: u32) -> &[Run] {
        (*self).of(mapping)
    }
}

impl Device {
    /// Computes the tables for the addresses that the kernel chose. O(n log n).
    pub fn footprint(&self) -> Footprint {
        Footprint::of(self, &Recorded(self))
    }
}

impl Footprint {
    /// Computes what the mappings of a device need at `addresses`. O(n log n), however large the
    /// mappings are.
    pub(super) fn of(device: &Device, addresses: &dyn Addresses) -> Self {
        let maps = device.operations.iter().filter(|operation| !operation.unmaps);
        let ever =
            merged(maps.flat_map(|operation| addresses.of(operation.mapping)).copied().collect());
        let peak = live_after(&device.operations, device.peak_at, addresses);
        let (low, high) =
            (ever.first().map_or(0, |run| run.start), ever.last().map_or(0, |run| run.end()));
        Self {
            span_bytes: high - low,
            pages: ever.iter().map(|run| run.pages()).sum(),
            extents_at_peak: peak.len() as u64,
            table_pages_at_peak: table_pages(&peak),
            table_pages_ever: table_pages(&ever),
        }
    }
}

/// Returns how many pages a table of four levels has that maps these runs, which are sorted and do
/// not overlap.
fn table_pages(runs: &[Run]) -> u64 {
    // A page of the lowest level maps 2 MiB, one of the next 512 times as much. The root always
    // exists.
    let below_root: u64 = [21, 30, 39].map(|shift| covered(runs, shift)).iter().sum();
    below_root + 1
}

/// Returns how many aligned blocks of 2^`shift` bytes the runs touch.
fn covered(runs: &[Run], shift: u32) -> u64 {
    let mut last = None;
    let mut count = 0;
    for run in runs.iter().filter(|run| run.len > 0) {
        let (first, end) = (run.start >> shift, (run.end() - 1) >> shift);
        count += end - first + u64::from(last != Some(first));
        last = Some(end);
    }
    count
}

// The times of operations.

/// The times of operations in nanoseconds, each with one reading of the clock in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Times {
    /// The number of operations.
    pub count: u64,
    /// The minimum.
    pub min_ns: u32,
    /// The median.
    pub median_ns: u32,
    /// The time that 99 of 100 do not exceed.
    pub p99_ns: u32,
    /// The most; at 2^32 - 1, that or more.
    pub max_ns: u32,
    /// The sum.
    pub total_ns: u64,
}

impl Times {
    /// Summarises times. O(n log n).
    pub(super) fn of(mut times: Vec<u32>) -> Self {
        times.sort_unstable();
        let at = |index: usize| times.get(index).copied().unwrap_or(0);
        Self {
            count: times.len() as u64,
            min_ns: at(0),
            median_ns: at(times.len().div_ceil(2).saturating_sub(1)),
            p99_ns: at((times.len() * 99).div_ceil(100).saturating_sub(1)),
            max_ns: at(times.len().saturating_sub(1)),
            total_ns: times.iter().map(|time| u64::from(*time)).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    /// Returns a device whose mappings `runs` are mapped in order, and of which the first is
    /// unmapped in the end.
    fn device(runs: &[(u64, u64)]) -> Device {
        let mut device = Device { peak_at: runs.len(), ..Device::default() };
        for ((start, pages), at) in runs.iter().zip(0..) {
            device.addresses.push(Run { start: *start, len: pages * PAGE });
            let access = pinfold_core::access::Access::all();
            device.mappings.push(super::super::trace::Mapping {
                access,
                memory: (0, 0),
                addresses: (at, 1),
            });
            device.operations.push(Operation { time_ns: 0, mapping: at, unmaps: false });
        }
        device.operations.push(Operation { time_ns: 0, mapping: 0, unmaps: true });
        device
    }

    fn footprint(runs: &[(u64, u64)]) -> Footprint {
        device(runs).footprint()
    }

    #[test]
    fn ranges_that_abut_or_overlap_are_one_extent() {
        let found = footprint(&[(0x5000, 1), (0x1000, 2), (0x3000, 2), (0x3000, 1), (0x7000, 1)]);
        assert_eq!(found.extents_at_peak, 2, "0x1000 to 0x6000, and 0x7000");
        assert_eq!((found.span_bytes, found.pages), (0x7000, 6));
    }

    #[test]
    fn pages_are_counted_once_each() {
        assert_eq!(footprint(&[(0x3f000, 66), (0x3e000, 2), (0x40000, 64)]).pages, 67);
        assert_eq!(footprint(&[(0, 1), (0x3f000, 1), (0x20_0000, 512)]).pages, 514);
    }

    #[test]
    fn table_pages_are_counted_on_every_level() {
        // Two table pages of the lowest level next to each other; the root is the fourth level.
        assert_eq!(footprint(&[(0x1f_f000, 2)]).table_pages_at_peak, 2 + 1 + 1 + 1);
        // In different halves of the address space nothing is shared but the root.
        let far = footprint(&[(0x1000, 1), (1 << 47, 1)]);
        assert_eq!((far.table_pages_at_peak, far.table_pages_ever), (7, 7));
        // 4 GiB each, a thousand times: no memory for each page.
        let large: Vec<(u64, u64)> = (0..1000).map(|at| (at << 33, 1 << 20)).collect();
        assert_eq!(footprint(&large).table_pages_ever, 1000 * (2048 + 4) + 16 + 1);
    }

    #[test]
    fn only_what_is_live_at_the_peak_counts_there() {
        let mut device = device(&[(0x1000, 1), (1 << 40, 3)]);
        device.peak_at = 3;
        let found = device.footprint();
        assert_eq!(
            (found.extents_at_peak, found.table_pages_at_peak, found.table_pages_ever),
            (1, 4, 7)
        );
    }
}

#[cfg(test)]
mod tests_1 {
    use super::*;

    #[test]
    fn ranks_are_those_of_the_sorted_times() {
        assert_eq!(Times::of(Vec::new()), Times::default());
        let of = |times: &[u32]| {
            let times = Times::of(times.to_vec());
            (times.min_ns, times.median_ns, times.p99_ns, times.max_ns)
        };
        assert_eq!(of(&[7]), (7, 7, 7, 7));
        assert_eq!(of(&[9, 3]), (3, 3, 9, 9));
        let hundred: Vec<u32> = (1..=100).rev().collect();
        assert_eq!(of(&hundred), (1, 50, 99, 100));
        assert_eq!(Times::of(hundred).total_ns, 5050);
    }
}
