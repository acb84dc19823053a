//! The flush queues of lazy mode: one per CPU.
//!
//! An entry notes how many flushes of the whole domain had *started* when it was added, and its
//! addresses are freed once more than that have *finished*: only a flush that started later has
//! invalidated them. A CPU whose queue is full flushes; so does a timer, for all of them.

use super::api::PolicyError;
use super::cpu::PerCpu;
use super::iommu::Iommu;
use crate::baseline::lock::KernelLock;
use pinfold_core::addr::IovaRange;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// How many entries the queue of a CPU holds.
const ENTRIES: usize = 256;

/// The queues of all CPUs.
#[derive(Debug)]
pub(super) struct FlushQueues {
    cpus: PerCpu<KernelLock<Queue>>,
    started: AtomicU64,
    finished: AtomicU64,
    /// Whether there is something that the timer has to flush.
    armed: AtomicBool,
}

#[derive(Debug)]
struct Queue {
    entries: VecDeque<Entry>,
    bytes: u64,
    peak_bytes: u64,
    reachable_ns: u64,
}

#[derive(Debug)]
struct Entry {
    iova: IovaRange,
    /// How many flushes had started.
    started: u64,
    /// When it was added, if the queue was empty: no other entry waits longer.
    since: Option<Instant>,
}

impl FlushQueues {
    pub(super) fn new() -> Self {
        let queue = || Queue {
            entries: VecDeque::with_capacity(ENTRIES),
            bytes: 0,
            peak_bytes: 0,
            reachable_ns: 0,
        };
        Self {
            cpus: PerCpu::new(|| KernelLock::new(queue())),
            started: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            armed: AtomicBool::new(false),
        }
    }

    /// Adds a range whose entries are cleared, and frees by `free` what a flush has covered.
    pub(super) fn add(
        &self,
        iommu: &Iommu,
        iova: IovaRange,
        free: impl Fn(IovaRange) -> Result<(), PolicyError>,
    ) -> Result<(), PolicyError> {
        let mut queue = self.cpus.here().lock();
        self.free_finished(&mut queue, &free)?;
        // While another CPU's flush has started and not finished, ours finishes as one that is too
        // early for the latest entries.
        while queue.entries.len() >= ENTRIES {
            self.flush(iommu)?;
            self.free_finished(&mut queue, &free)?;
        }
        let since = queue.entries.is_empty().then(Instant::now);
        let started = self.started.load(Ordering::Acquire);
        queue.entries.push_back(Entry { iova, started, since });
        queue.bytes += iova.len();
        queue.peak_bytes = queue.peak_bytes.max(queue.bytes);
        drop(queue);
        if !self.armed.load(Ordering::Relaxed) {
            self.armed.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Flushes the whole domain.
    fn flush(&self, iommu: &Iommu) -> Result<(), PolicyError> {
        self.started.fetch_add(1, Ordering::AcqRel);
        iommu.flush_all()?;
        self.finished.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Flushes if something was added since the last call, and frees what is covered, on all CPUs.
    pub(super) fn tick(
        &self,
        iommu: &Iommu,
        free: impl Fn(IovaRange) -> Result<(), PolicyError>,
    ) -> Result<(), PolicyError> {
        if !self.armed.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        self.flush(iommu)?;
        self.cpus.iter().try_for_each(|queue| self.free_finished(&mut queue.lock(), &free))
    }

    fn free_finished(
        &self,
        queue: &mut Queue,
        free: impl Fn(IovaRange) -> Result<(), PolicyError>,
    ) -> Result<(), PolicyError> {
        let finished = self.finished.load(Ordering::Acquire);
        while let Some(entry) = queue.entries.pop_front_if(|entry| entry.started < finished) {
            queue.bytes -= entry.iova.len();
            let reachable = entry.since.map_or(0, |since| since.elapsed().as_nanos());
            queue.reachable_ns =
                queue.reachable_ns.max(u64::try_from(reachable).unwrap_or(u64::MAX));
            free(entry.iova)?;
        }
        Ok(())
    }

    /// Returns the sum of the peaks of held bytes, and the longest time until an entry was freed.
    pub(super) fn peaks(&self) -> (u64, u64) {
        self.cpus.iter().fold((0, 0), |(bytes, ns), queue| {
            let queue = queue.lock();
            (bytes + queue.peak_bytes, ns.max(queue.reachable_ns))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Memory;
    use pinfold::soft::SoftConfig;
    use pinfold_core::addr::Iova;

    #[test]
    fn a_queue_is_bounded_while_the_flush_of_another_cpu_hangs() {
        let iommu = Iommu::new(&Memory::new(4096).unwrap(), &SoftConfig::default()).unwrap();
        let queues = FlushQueues::new();
        queues.started.fetch_add(1, Ordering::AcqRel);
        for page in 1..=4 * ENTRIES as u64 {
            let iova = IovaRange::new(Iova::new(page * 4096), 4096).unwrap();
            queues.add(&iommu, iova, |_| Ok(())).unwrap();
            for queue in queues.cpus.iter() {
                assert!(queue.lock().entries.len() <= ENTRIES, "after {page} entries");
            }
        }
    }
}
