//! Builds one device of a trace from its events.

use super::assign::{Call, Hull};
use super::parse::{Action, List, MAX_ADDRESS, Recorded};
use super::trace::{Counts, Device, Mapping, Operation, Run};
use pinfold_core::access::Access;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

const PAGE: u64 = 4096;
/// The number of segments of a scatter list that newer kernels record.
const RECORDED_SEGMENTS: usize = 128;

/// The addresses that an unmap names.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Key {
    Mapped(u64),
    Allocated(u64),
    /// The physical addresses: the unmap of a scatter list names no others.
    List(Box<[u64]>),
}

impl Key {
    /// Returns the memory that a live mapping with this key takes.
    fn live_bytes(&self) -> u64 {
        let named = if let Self::List(list) = self { list.len() } else { 0 };
        LIVE_BYTES + NAMED_BYTES * named as u64
    }
}

/// The bytes of memory that a mapping takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Taken {
    /// Kept as long as the trace.
    pub(super) kept: u64,
    /// Kept while it is mapped.
    pub(super) live: u64,
}

/// A mapping that has not been unmapped.
#[derive(Clone, Copy, Debug)]
struct Live {
    mapping: u32,
    /// Its memory is not the trace's.
    is_synthetic: bool,
}

/// The memory of a map while the trace is read and replayed, in bytes, beside its runs: its entries
/// in the lists of mappings, operations and times, with what lists allocate in advance.
pub(super) const MAP_BYTES: u64 = 160;
/// The memory of each run of its memory and of its addresses: read, chosen by a policy, and sorted
/// for a footprint.
pub(super) const RUN_BYTES: u64 = 100;
/// The memory of an unmap.
pub(super) const UNMAP_BYTES: u64 = 40;
/// The memory of a live mapping: an entry in a hash table, which has both its old and its new size
/// while it grows, and the record of a policy.
pub(super) const LIVE_BYTES: u64 = 400;
/// The memory of each segment of a scatter list while it is mapped: the addresses that its unmap
/// will name.
const NAMED_BYTES: u64 = 16;

/// Physical memory for allocations whose address is not recorded: above all that is recorded, each
/// in pages of its own.
#[derive(Debug, Default)]
pub(super) struct SyntheticMemory {
    /// Pages that were handed out.
    used: u64,
    /// Free ones, by their number of pages.
    free: HashMap<u64, Vec<Run>>,
}

impl SyntheticMemory {
    const BASE: u64 = MAX_ADDRESS;

    fn take(&mut self, len: u64) -> Run {
        if let Some(run) = self.free.get_mut(&(len / PAGE)).and_then(Vec::pop) {
            return run;
        }
        let start = Self::BASE + self.used * PAGE;
        self.used += len / PAGE;
        Run { start, len }
    }

    fn give_back(&mut self, run: Run) {
        self.free.entry(run.pages()).or_default().push(run);
    }
}

/// A device, and its live mappings.
#[derive(Debug, Default)]
pub(super) struct Builder {
    device: Device,
    live: HashMap<Key, Live>,
    /// The later ones of several that an unmap may mean, which few traces have.
    overlapping: HashMap<Key, VecDeque<Live>>,
    live_mappings: u64,
    live_pages: u64,
    /// Synthetic memory that was freed, until the next map returns it.
    returned: Vec<Run>,
}

impl Builder {
    pub(super) fn new(name: &str) -> Self {
        Self { device: Device { name: name.to_owned(), ..Device::default() }, ..Self::default() }
    }

    pub(super) fn counts(&mut self) -> &mut Counts {
        &mut self.device.counts
    }

    pub(super) fn live_mappings(&self) -> u64 {
        self.live_mappings
    }

    /// Returns the pages that a map gives addresses to, from the first to the last.
    pub(super) fn hull_of(action: &Action<'_>) -> Option<Hull> {
        let mut runs = Vec::new();
        addresses(action, &mut runs)?;
        hull(&runs)
    }

    /// Adds a mapping, and returns how many bytes it takes, from now on and while it is mapped.
    /// `calls` are those of the IOMMU's driver for it, which tell its memory where the event does
    /// not.
    pub(super) fn map(
        &mut self,
        action: &Action<'_>,
        time_ns: u64,
        calls: &mut [Call],
        synthetic: &mut SyntheticMemory,
    ) -> Taken {
        self.returned.drain(..).for_each(|run| synthetic.give_back(run));
        let mut runs = Vec::new();
        let Some((key, access)) = addresses(action, &mut runs) else { return Taken::default() };
        let counts = &mut self.device.counts;
        counts.maps += 1;
        counts.lists += u64::from(matches!(action, Action::MapList { .. }));
        counts.truncated += u64::from(matches!(action, Action::MapList { truncated: true, .. }));
        counts.iommu_maps += calls.len() as u64;
        let pages: u64 = runs.iter().map(|run| run.pages()).sum();
        calls.sort_unstable_by_key(|call| call.iova);
        let mut memory = Vec::new();
        let mut is_synthetic = false;
        if !recorded(action, &mut memory) && !from_calls(calls, &runs, &mut memory) {
            if estimated(action, &mut memory) {
                counts.split_evenly += 1;
            } else {
                counts.without_memory += 1;
                is_synthetic = true;
                memory.push(synthetic.take(pages * PAGE));
            }
        }
        let device = &mut self.device;
        let runs_kept = (memory.len() + runs.len()) as u64;
        // A trace has at most `MAX_OPERATIONS`, and of runs what its memory is limited to.
        let Ok(number) = u32::try_from(device.mappings.len()) else { return Taken::default() };
        let Some(memory) = append(&mut device.memory, &memory) else { return Taken::default() };
        let Some(addresses) = append(&mut device.addresses, &runs) else { return Taken::default() };
        device.mappings.push(Mapping { access, memory, addresses });
        device.operations.push(Operation { time_ns, mapping: number, unmaps: false });
        let live_bytes = key.live_bytes();
        let live = Live { mapping: number, is_synthetic };
        match self.live.entry(key) {
            Entry::Vacant(vacant) => drop(vacant.insert(live)),
            Entry::Occupied(occupied) => {
                device.counts.overlapping += 1;
                self.overlapping.entry(occupied.key().clone()).or_default().push_back(live);
            }
        }
        self.live_mappings += 1;
        self.live_pages += pages;
        let counts = &mut device.counts;
        counts.peak_mappings = counts.peak_mappings.max(self.live_mappings);
        if self.live_pages * PAGE > counts.peak_bytes {
            counts.peak_bytes = self.live_pages * PAGE;
            device.peak_at = device.operations.len();
        }
        Taken { kept: MAP_BYTES + RUN_BYTES * runs_kept, live: live_bytes }
    }

    /// Removes a mapping, the oldest of those that the event may mean, and returns its addresses,
    /// and how many bytes it no longer takes; `None` if there is none.
    pub(super) fn unmap(&mut self, action: &Action<'_>, time_ns: u64) -> Option<(Hull, u64)> {
        let key = match *action {
            Action::Unmap { allocated: false, address, .. } => Key::Mapped(address),
            Action::Unmap { allocated: true, address, .. } => Key::Allocated(address),
            Action::UnmapList { memory, .. } => self.list(memory),
            _ => return None,
        };
        let Some(live) = self.live.remove(&key) else {
            self.device.counts.unmaps_without_map += 1;
            return None;
        };
        let live_bytes = key.live_bytes();
        if let Some(later) = self.overlapping.get_mut(&key) {
            // No queue is empty.
            let next = later.pop_front();
            if later.is_empty() {
                self.overlapping.remove(&key);
            }
            self.live.extend(next.map(|next| (key, next)));
        }
        let mapping = self.device.mappings.get(live.mapping as usize)?;
        let pages: u64 = self.device.addresses_of(mapping).iter().map(|run| run.pages()).sum();
        if live.is_synthetic {
            self.returned.extend(self.device.memory_of(mapping));
        }
        let hull = hull(self.device.addresses_of(mapping));
        self.live_mappings -= 1;
        self.live_pages -= pages;
        self.device.counts.unmaps += 1;
        self.device.counts.pages_unmapped += pages;
        self.device.operations.push(Operation { time_ns, mapping: live.mapping, unmaps: true });
        Some((hull?, live_bytes))
    }

    /// Returns what the unmap of a scatter list names. Kernels that truncate the list of a long map
    /// do not truncate that of its unmap.
    fn list(&self, memory: List<'_>) -> Key {
        let all = Key::List(memory.iter().collect());
        if memory.count() <= RECORDED_SEGMENTS || self.live.contains_key(&all) {
            return all;
        }
        Key::List(memory.iter().take(RECORDED_SEGMENTS).collect())
    }

    /// Counts an unmap of the IOMMU's driver that belongs to this device.
    pub(super) fn count_unmap(&mut self, call: Call) {
        let counts = &mut self.device.counts;
        let run = Run::covering(call.iova, call.size);
        counts.iommu_unmaps += 1;
        // The pages of a scatter list may be anywhere, so the calls between its first and its last
        // may be of any size.
        counts.iommu_unmapped_pages = counts.iommu_unmapped_pages.saturating_add(run.pages());
        counts.strict_flush_pages = counts.strict_flush_pages.saturating_add(aligned_pages(run));
        counts.iommu_unmaps_partial += u64::from(call.done != call.size);
    }

    /// Returns the device, if it has mapped anything.
    pub(super) fn finish(mut self) -> Option<Device> {
        self.device.counts.never_unmapped = self.live_mappings;
        (!self.device.mappings.is_empty()).then_some(self.device)
    }
}

fn hull(runs: &[Run]) -> Option<Hull> {
    let start = runs.iter().map(|run| run.start).min()?;
    let end = runs.iter().map(|run| run.end()).max()?;
    Some(Hull { start, end })
}

/// Returns the pages of the smallest aligned block, a power of two in size, that covers a run.
fn aligned_pages(run: Run) -> u64 {
    let (first, last) = (run.start / PAGE, (run.end() / PAGE).saturating_sub(1));
    let bits = u64::BITS - (first ^ last.max(first)).leading_zeros();
    1u64.checked_shl(bits).unwrap_or(u64::MAX)
}

/// Appends runs, and returns where they are; `None` if there are more than 2^32.
fn append(all: &mut Vec<Run>, runs: &[Run]) -> Option<(u32, u32)> {
    let place = (u32::try_from(all.len()).ok()?, u32::try_from(runs.len()).ok()?);
    all.extend_from_slice(runs);
    Some(place)
}

/// Adds a run, or extends the last one if it begins where that ends.
fn push(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.end() == run.start => last.len += run.len,
        _ => runs.push(run),
    }
}

/// Collects the addresses of a map, and returns what its unmap will name.
fn addresses(action: &Action<'_>, runs: &mut Vec<Run>) -> Option<(Key, Access)> {
    match *action {
        Action::Map { allocated, access, address, size, .. } => {
            runs.push(Run::covering(address, size));
            Some((if allocated { Key::Allocated(address) } else { Key::Mapped(address) }, access))
        }
        Action::MapList { access, addresses, sizes, memory, .. } => {
            addresses
                .iter()
                .zip(sizes.iter())
                .for_each(|(at, size)| push(runs, Run::covering(at, size)));
            Some((Key::List(memory.iter().collect()), access))
        }
        _ => None,
    }
}

/// Collects the memory of a map if the event tells it.
fn recorded(action: &Action<'_>, memory: &mut Vec<Run>) -> bool {
    match *action {
        Action::Map { memory: Recorded::At(at), size, .. } => memory.push(Run::covering(at, size)),
        Action::MapList { addresses, sizes, memory: list, .. }
            if addresses.count() == list.count() =>
        {
            list.iter()
                .zip(sizes.iter())
                .for_each(|(at, size)| push(memory, Run::covering(at, size)));
        }
        _ => return false,
    }
    true
}

/// Collects the memory from the calls of the IOMMU's driver, if they map all of the addresses.
fn from_calls(calls: &[Call], addresses: &[Run], memory: &mut Vec<Run>) -> bool {
    let mut mapped = Vec::new();
    calls.iter().for_each(|call| push(&mut mapped, Run::covering(call.iova, call.size)));
    if calls.is_empty() || mapped != addresses {
        return false;
    }
    for call in calls {
        push(memory, Run::covering(call.memory.unwrap_or_default(), call.size));
    }
    true
}

/// Collects segments of equal sizes, the last one with what remains.
fn estimated(action: &Action<'_>, memory: &mut Vec<Run>) -> bool {
    let (list, size): (List<'_>, u64) = match *action {
        Action::Map { memory: Recorded::Segments(list), size, .. } => (list, size),
        Action::MapList { sizes, memory, .. } => (memory, sizes.iter().sum()),
        _ => return false,
    };
    let count = list.count() as u64;
    let each = (size / count.max(1)).max(1);
    for (at, start) in (0..count).zip(list.iter()) {
        let size = if at + 1 == count { size.saturating_sub(each * at).max(1) } else { each };
        push(memory, Run::covering(start, size));
    }
    count > 0
}
