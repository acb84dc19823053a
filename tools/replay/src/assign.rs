//! The assignment of calls of the IOMMU's driver to mappings: the events of the IOMMU name no
//! device.
//!
//! They are not guessed. The kernel records a call in the same task on the same processor as the
//! DMA event that it is made for: before it (a map; most unmaps) or directly after it (a free),
//! within its addresses. A call for which there is no such event, such as those of VFIO, is
//! assigned to no device, and counted.

use std::collections::HashMap;

/// The most calls of one task that wait for their DMA event. A scatter list has more pieces only
/// above 1 MiB of scattered pages.
const WAITING: usize = 256;
/// The most tasks with waiting calls.
const TASKS: usize = 4096;

/// A range of I/O addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Hull {
    pub(super) start: u64,
    pub(super) end: u64,
}

impl Hull {
    fn contains(self, start: u64, len: u64) -> bool {
        start >= self.start && start.checked_add(len).is_some_and(|end| end <= self.end)
    }
}

/// A call of the IOMMU's driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Call {
    pub(super) iova: u64,
    pub(super) size: u64,
    /// The physical address of a map; `None` for an unmap.
    pub(super) memory: Option<u64>,
    /// The number of bytes mapped or unmapped: after an unmap of a part of a large page, more than
    /// requested.
    pub(super) done: u64,
}

/// A processor and the task that ran on it.
pub(super) type Context = (u32, u32);

#[derive(Debug, Default)]
struct Task {
    waiting: Vec<Call>,
    /// The addresses that a DMA event has freed before the call that unmaps them: a device's
    /// number, and the addresses.
    freed: Option<(usize, Hull)>,
}

/// The calls that wait for their DMA event.
#[derive(Debug, Default)]
pub(super) struct Assigner {
    tasks: HashMap<Context, Task>,
    /// The number of calls without a DMA event.
    unassigned: u64,
}

impl Assigner {
    /// Adds a call. Returns the device if it was freed by the DMA event before it.
    pub(super) fn add(&mut self, context: Context, call: Call) -> Option<usize> {
        if self.tasks.len() >= TASKS && !self.tasks.contains_key(&context) {
            self.drop_all();
        }
        let task = self.tasks.entry(context).or_default();
        if call.memory.is_none()
            && let Some((device, _)) =
                task.freed.take_if(|(_, hull)| hull.contains(call.iova, call.size))
        {
            return Some(device);
        }
        if task.waiting.len() == WAITING {
            task.waiting.remove(0);
            self.unassigned += 1;
        }
        task.waiting.push(call);
        None
    }

    /// Takes the maps, or else the unmaps, of the task within `hull`.
    pub(super) fn take(&mut self, context: Context, maps: bool, hull: Hull, found: &mut Vec<Call>) {
        found.clear();
        let Some(task) = self.tasks.get_mut(&context) else { return };
        let inside =
            |call: &mut Call| call.memory.is_some() == maps && hull.contains(call.iova, call.size);
        found.extend(task.waiting.extract_if(.., inside));
        if task.waiting.is_empty() && task.freed.is_none() {
            self.tasks.remove(&context);
        }
    }

    /// Records that the DMA event of an unmap had no call before it: the next one of this task
    /// within `hull` is its call.
    pub(super) fn expect(&mut self, context: Context, device: usize, hull: Hull) {
        if self.tasks.len() < TASKS {
            self.tasks.entry(context).or_default().freed = Some((device, hull));
        }
    }

    fn drop_all(&mut self) {
        self.unassigned += self.tasks.values().map(|task| task.waiting.len() as u64).sum::<u64>();
        self.tasks.clear();
    }

    /// Returns how many calls were assigned to no device.
    pub(super) fn finish(mut self) -> u64 {
        self.drop_all();
        self.unassigned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: Call = Call { iova: 0x3000, size: 0x1000, memory: Some(0x9000), done: 0x1000 };
    const UNMAP: Call = Call { memory: None, ..MAP };
    const HULL: Hull = Hull { start: 0x3000, end: 0x5000 };

    fn taken(assigner: &mut Assigner, context: Context, maps: bool, hull: Hull) -> Vec<Call> {
        let mut found = Vec::new();
        assigner.take(context, maps, hull, &mut found);
        found
    }

    #[test]
    fn a_call_goes_to_the_next_event_of_its_task_and_addresses() {
        let mut assigner = Assigner::default();
        for call in [MAP, UNMAP, Call { iova: 0x5000, ..MAP }] {
            assert_eq!(assigner.add((0, 1), call), None);
        }
        assert_eq!(taken(&mut assigner, (1, 1), true, HULL), [], "another processor");
        assert_eq!(
            taken(&mut assigner, (0, 1), true, Hull { start: 0x3001, end: 0x5000 }),
            [],
            "a part only"
        );
        assert_eq!(taken(&mut assigner, (0, 1), true, HULL), [MAP]);
        assert_eq!(taken(&mut assigner, (0, 1), true, HULL), [], "once");
        assert_eq!(taken(&mut assigner, (0, 1), false, HULL), [UNMAP]);
        assert_eq!(assigner.finish(), 1, "the map at 0x5000");
    }

    #[test]
    fn a_free_takes_the_unmap_behind_it() {
        let mut assigner = Assigner::default();
        assigner.expect((0, 1), 7, HULL);
        assert_eq!(assigner.add((0, 2), UNMAP), None);
        assert_eq!(assigner.add((0, 1), MAP), None, "a map is no unmap");
        assert_eq!(assigner.add((0, 1), UNMAP), Some(7));
        assert_eq!(assigner.add((0, 1), UNMAP), None, "once");
        assert_eq!(assigner.finish(), 3);
    }

    #[test]
    fn waiting_calls_are_bounded_and_counted() {
        let mut assigner = Assigner::default();
        for iova in 0..WAITING as u64 + 3 {
            assigner.add((0, 0), Call { iova: iova << 12, ..MAP });
        }
        for (_, pid) in (0..TASKS).zip(1..) {
            assigner.add((0, pid), MAP);
        }
        assert!(assigner.tasks.len() <= TASKS);
        assert_eq!(assigner.finish(), (WAITING + 3 + TASKS) as u64);
    }
}
