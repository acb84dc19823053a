//! Replays the operations of one device through one policy.

use super::error::ReplayError;
use super::trace::{Addresses, Device, Footprint, Run, Times, Trace};
use crate::policy::{Dma, Memory, Policy, PolicyError, PolicyKind, PolicyStats, PolicyThread};
use pinfold::Signals;
use pinfold::soft::SoftConfig;
use pinfold_core::addr::PhysRange;
use pinfold_core::table::MappedRun;
use std::collections::HashMap;
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

/// When the operations are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Timing {
    /// One after the other.
    Fast,
    /// At the times of the trace, relative to its first event.
    Original,
}

/// The amount of work between two reports of progress: runs of memory that are mapped or unmapped,
/// and their pages.
const REPORT_EVERY: u64 = 1 << 12;
/// The number of pages that count as much as one run.
const PAGES: u64 = 64;
/// The last part of the wait for the time of an operation, for which a thread does not sleep,
/// because a sleep may take longer.
const SPIN: Duration = Duration::from_micros(100);
/// The longest sleep before it asks whether to go on.
const ASK: Duration = Duration::from_millis(50);

/// The outcome of the operations of one device under one policy.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The policy.
    pub policy: PolicyKind,
    /// The needs of its addresses.
    pub footprint: Footprint,
    /// Its statistics, those of amounts in use when the most bytes are mapped.
    pub at_peak: PolicyStats,
    /// Its statistics after the last operation, once nothing that was unmapped is reachable.
    pub stats: PolicyStats,
    /// The time of each map.
    pub maps: Times,
    /// The time of each unmap.
    pub unmaps: Times,
    /// The delay of the latest operation in nanoseconds, with [`Timing::Original`].
    pub late_ns: u64,
    /// The mappings in its table after the last operation, which the trace never unmaps; `None` if
    /// the table cannot be read.
    pub mapped: Option<Vec<MappedRun>>,
    pub(super) addresses: Chosen,
}

/// The addresses that a policy chose, by the runs of a device's memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Chosen {
    runs: Vec<Run>,
    /// The runs of each mapping.
    mappings: Vec<(u32, u32)>,
}

impl Outcome {
    /// Drops the addresses, of which only a [picture](Self::picture) is drawn.
    pub fn forget_addresses(&mut self) {
        self.addresses = Chosen::default();
    }
}

impl Addresses for Chosen {
    fn of(&self, mapping: u32) -> &[Run] {
        let runs = self.mappings.get(mapping as usize);
        let runs = runs.map(|(first, count)| *first as usize..*first as usize + *count as usize);
        runs.and_then(|runs| self.runs.get(runs)).unwrap_or_default()
    }
}

/// Replays all devices of a trace through policies of one kind, calling `keep_going` with the
/// number of operations that a device has made now and then, which returns whether to go on.
/// [`Timing::Fast`] replays one device after the other, [`Timing::Original`] all at the same time,
/// each on a thread of its own. Returns the outcomes in the order of the devices.
///
/// # Errors
/// [`ReplayError`]; [`ReplayError::Stopped`] if `keep_going` returned false; without times in the
/// trace [`Timing::Original`] is [`ReplayError::NoTimes`].
pub fn replay_all(
    trace: &Trace,
    kind: PolicyKind,
    places: &Places,
    config: &SoftConfig,
    timing: Timing,
    keep_going: &(dyn Fn(usize) -> bool + Sync),
) -> Result<Vec<Outcome>, ReplayError> {
    let one = |device| replay(device, kind, places, config, timing, keep_going);
    if timing == Timing::Fast {
        return trace.devices.iter().map(one).collect();
    }
    if trace.summary.duration_ns.is_none() {
        return Err(ReplayError::NoTimes);
    }
    std::thread::scope(|scope| {
        let start = |device| {
            let builder = Builder::new();
            let started =
                Signals::blocked_while(|| builder.spawn_scoped(scope, move || one(device)));
            started.map_err(|error| ReplayError::NoThread { device: device.name.clone(), error })
        };
        let running: Vec<_> = trace.devices.iter().map(start).collect::<Result<_, _>>()?;
        running
            .into_iter()
            .map(|thread| thread.join().unwrap_or(Err(ReplayError::Thread)))
            .collect()
    })
}

/// Replays the operations of a device through a policy of its own, calling `keep_going` with the
/// number of operations made now and then, which returns whether to go on. A mapping in several
/// runs of memory is mapped run by run.
///
/// The policy's mappings that the trace never unmaps are left when it ends.
///
/// # Errors
/// [`ReplayError::Prepare`], [`ReplayError::Policy`], [`ReplayError::Stopped`].
pub fn replay(
    device: &Device,
    kind: PolicyKind,
    places: &Places,
    config: &SoftConfig,
    timing: Timing,
    keep_going: &(dyn Fn(usize) -> bool + Sync),
) -> Result<Outcome, ReplayError> {
    let policy = kind.create(places.memory(), config).map_err(ReplayError::Prepare)?;
    let mut replay = Replay::new(device, places, &*policy);
    let mut done = 0;
    let made = replay.all(timing, &mut done, keep_going);
    let made = made.map_err(|error| ReplayError::Policy {
        policy: kind.name(),
        device: device.name.clone(),
        operation: done + 1,
        operations: device.operations.len(),
        error,
    })?;
    if !made {
        return Err(ReplayError::Stopped);
    }
    let Replay { maps, unmaps, late_ns, at_peak, addresses, thread, .. } = replay;
    let (stats, mapped) = (policy.stats(), policy.mapped());
    // The counts of a thread are complete when it ends; the remaining mappings are then unmapped.
    drop(thread);
    let PolicyStats { held_bytes_peak, reachable_ns, .. } = policy.stats();
    let stats = PolicyStats { held_bytes_peak, reachable_ns, ..stats };
    let footprint = Footprint::of(device, &addresses);
    let (maps, unmaps) = (Times::of(maps), Times::of(unmaps));
    Ok(Outcome {
        policy: kind,
        footprint,
        at_peak,
        stats,
        maps,
        unmaps,
        late_ns,
        mapped,
        addresses,
    })
}

struct Replay<'r> {
    device: &'r Device,
    places: &'r Places,
    policy: &'r dyn Policy,
    thread: Box<dyn PolicyThread + 'r>,
    /// The live mappings, by number, and the vectors of those that no longer are.
    live: HashMap<u32, Vec<Dma>>,
    spare: Vec<Vec<Dma>>,
    freed: Vec<PhysRange>,
    addresses: Chosen,
    /// The times in nanoseconds.
    maps: Vec<u32>,
    unmaps: Vec<u32>,
    late_ns: u64,
    at_peak: PolicyStats,
}

impl<'r> Replay<'r> {
    fn new(device: &'r Device, places: &'r Places, policy: &'r dyn Policy) -> Self {
        let (maps, runs) = (device.mappings.len(), device.memory.len());
        Self {
            device,
            places,
            policy,
            thread: policy.thread(),
            live: HashMap::new(),
            spare: Vec::new(),
            freed: Vec::new(),
            addresses: Chosen {
                runs: Vec::with_capacity(runs),
                mappings: Vec::with_capacity(maps),
            },
            maps: Vec::with_capacity(maps),
            unmaps: Vec::with_capacity(maps),
            late_ns: 0,
            at_peak: PolicyStats::default(),
        }
    }

    /// Executes all operations; `done` counts them. Returns false if `keep_going` stopped it.
    fn all(
        &mut self,
        timing: Timing,
        done: &mut usize,
        keep_going: &(dyn Fn(usize) -> bool + Sync),
    ) -> Result<bool, PolicyError> {
        let began = Instant::now();
        let mut since_report = 0;
        for operation in &self.device.operations {
            if timing == Timing::Original {
                let Some(late) = sleep_until(began, operation.time_ns, &|| keep_going(*done))
                else {
                    return Ok(false);
                };
                self.late_ns = self.late_ns.max(late);
            }
            if operation.unmaps {
                self.unmap(operation.mapping)?
            } else {
                self.map(operation.mapping)?
            }
            *done += 1;
            if *done == self.device.peak_at {
                self.at_peak = self.policy.stats();
            }
            since_report = self.work(operation.mapping).saturating_add(since_report);
            if since_report >= REPORT_EVERY {
                since_report = 0;
                if !keep_going(*done) {
                    return Ok(false);
                }
            }
        }
        self.thread.settle(&mut self.freed)?;
        Ok(true)
    }

    /// Returns how much work an operation on a mapping is: one may have thousands of runs, and a
    /// run gigabytes.
    fn work(&self, number: u32) -> u64 {
        let mapping = self.device.mappings.get(number as usize);
        let runs = mapping.map(|mapping| self.device.memory_of(mapping)).unwrap_or_default();
        runs.iter().map(|run| 1 + run.pages() / PAGES).fold(1, u64::saturating_add)
    }

    /// Maps a mapping. Only the calls of the policy are timed.
    fn map(&mut self, number: u32) -> Result<(), PolicyError> {
        let Some(mapping) = self.device.mappings.get(number as usize) else { return Ok(()) };
        let runs = self.device.memory_of(mapping);
        let mut mapped = self.spare.pop().unwrap_or_default();
        // Most mappings are a single run.
        mapped.reserve_exact(runs.len());
        let mut took = Duration::ZERO;
        for run in runs {
            let whole = self.places.memory().whole();
            let range = self
                .places
                .range(*run)
                .ok_or(PolicyError::Outside { range: whole, memory: whole })?;
            let start = Instant::now();
            let dma = self.thread.map(range, mapping.access)?;
            took += start.elapsed();
            mapped.push(dma);
        }
        self.maps.push(nanoseconds(took));
        let place = (index(self.addresses.runs.len()), index(mapped.len()));
        // Mappings are numbered in the order of their maps.
        self.addresses.mappings.push(place);
        let runs =
            mapped.iter().map(|dma| Run { start: dma.iova().start().raw(), len: dma.iova().len() });
        self.addresses.runs.extend(runs);
        self.live.insert(number, mapped);
        Ok(())
    }

    fn unmap(&mut self, number: u32) -> Result<(), PolicyError> {
        let Some(mut mapped) = self.live.remove(&number) else { return Ok(()) };
        let start = Instant::now();
        for dma in mapped.drain(..) {
            self.thread.unmap(dma, &mut self.freed)?;
        }
        self.unmaps.push(nanoseconds(start.elapsed()));
        // When memory is used again is what the trace says.
        self.freed.clear();
        self.spare.push(mapped);
        Ok(())
    }
}

/// Waits until `time_ns` after `began`, and returns how late that was noticed, in nanoseconds;
/// `None` if `goes_on` says no meanwhile.
fn sleep_until(began: Instant, time_ns: u64, goes_on: &dyn Fn() -> bool) -> Option<u64> {
    let until = Duration::from_nanos(time_ns);
    while let Some(left) = until.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
        match left.checked_sub(SPIN) {
            Some(sleep) if sleep > ASK => {
                std::thread::sleep(ASK);
                if !goes_on() {
                    return None;
                }
            }
            Some(sleep) if !sleep.is_zero() => std::thread::sleep(sleep),
            _ => std::thread::yield_now(),
        }
    }
    Some(u64::try_from(began.elapsed().saturating_sub(until).as_nanos()).unwrap_or(u64::MAX))
}

fn nanoseconds(time: Duration) -> u32 {
    u32::try_from(time.as_nanos()).unwrap_or(u32::MAX)
}

/// Returns an index as 32 bits: a trace has fewer than 2^32 runs, since its builder leaves out
/// more.
fn index(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

// The memory of a trace: its physical addresses, brought together so that one reservation contains
// them.

/// Addresses keep their places within 2 MiB, so that pages as large remain possible.
const PART: u64 = 2 << 20;

/// The places of the runs of a trace's memory. Parts of 2 MiB in which nothing was mapped are left
/// out, but for one between two others: runs that did not abut do not become neighbours.
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
    fn memory(&self) -> &Arc<Memory> {
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
    use crate::Device;

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
