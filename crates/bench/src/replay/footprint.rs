//! What a sequence of mappings needs of an I/O address space: of the recorded one, and of each
//! policy's.

use super::trace::{Device, Operation, Run};
use serde::Serialize;
use std::collections::HashSet;

/// What addresses need.
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

/// Where a mapping is: the recorded addresses, or those of a policy.
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
    /// Computes what the addresses need that the kernel chose. O(n log n).
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

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    /// A device whose mappings `runs` are mapped in order, and of which the first is unmapped in
    /// the end.
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
    fn what_abuts_or_overlaps_is_one_extent() {
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
