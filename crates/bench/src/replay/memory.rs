//! The memory of a trace: its physical addresses, brought together so that one reservation contains
//! them.

use super::trace::{Run, Trace};
use crate::policy::{Memory, PolicyError};
use pinfold_core::addr::PhysRange;
use std::sync::Arc;

/// Addresses keep their places within 2 MiB, so that pages as large remain possible.
const PART: u64 = 2 << 20;

/// What runs of a trace's memory become. Parts of 2 MiB in which nothing was mapped are left out,
/// but for one between two others: what did not abut does not become neighbours.
///
/// No data is moved by a replay, so the memory is reserved and never touched.
#[derive(Debug)]
pub struct Places {
    memory: Arc<Memory>,
    /// The first address of each group of adjacent parts, ascending, and its offset in the memory.
    groups: Vec<(u64, u64)>,
}

impl Places {
    /// Reserves the memory for all devices of a trace. O(n log n) in its mappings.
    ///
    /// # Errors
    /// [`PolicyError::NoMemory`] if there is not so much address space.
    pub fn new(trace: &Trace) -> Result<Self, PolicyError> {
        let runs = trace.devices.iter().flat_map(|device| &device.memory);
        let mut parts: Vec<(u64, u64)> =
            runs.map(|run| (run.start / PART * PART, run.end().next_multiple_of(PART))).collect();
        parts.sort_unstable();
        let mut groups: Vec<(u64, u64)> = Vec::new();
        let (mut bytes, mut end) = (0u64, 0);
        for (first, behind) in parts {
            if groups.is_empty() || first > end {
                let gap = if groups.is_empty() { 0 } else { PART };
                groups.push((first, bytes + gap));
                bytes += gap;
                end = first;
            }
            bytes += behind.saturating_sub(end);
            end = end.max(behind);
        }
        let memory = Memory::new(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        Ok(Self { memory, groups })
    }

    /// Returns the memory for the policies.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns where a run of the trace is. O(log n).
    pub(super) fn range(&self, run: Run) -> Option<PhysRange> {
        let at = self.groups.partition_point(|(start, _)| *start <= run.start).checked_sub(1)?;
        let (start, offset) = self.groups.get(at)?;
        self.memory.range(run.start - start + offset, run.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::Device;

    #[test]
    fn neighbours_stay_neighbours_and_others_do_not_become_some() {
        let run = |start, len| Run { start, len };
        let memory = vec![
            run(0x7f_ffff_f000, 0x2000),
            run(3 * PART + 0x5000, 0x1000),
            run(1 << 60, 0x1000),
            run(4 * PART, PART),
            run(3 * PART + 0x5000, 0x1000),
        ];
        let device = Device { memory: memory.clone(), ..Device::default() };
        let places = Places::new(&Trace { devices: vec![device], ..Trace::default() }).unwrap();
        let base = places.memory().whole().start().raw();
        let at = |run| places.range(run).map(|range| (range.start().raw() - base, range.len()));
        assert_eq!(at(memory[1]), Some((0x5000, 0x1000)));
        assert_eq!(at(memory[3]), Some((PART, PART)));
        assert_eq!(at(memory[0]), Some((4 * PART - 0x1000, 0x2000)), "behind a gap, across 2 MiB");
        assert_eq!(at(memory[2]), Some((6 * PART, 0x1000)));
        assert_eq!(places.memory().whole().len(), 7 * PART);
        assert_eq!(
            (at(run(0, 0x1000)), at(run(1 << 61, 0x1000))),
            (None, None),
            "not of the trace"
        );
    }
}
