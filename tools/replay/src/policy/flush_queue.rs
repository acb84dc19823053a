//! The flush queues of lazy mode: one per CPU.
//!
//! An entry notes how many flushes of the whole domain had *started* when it was added, and its
//! addresses are freed once more than that have *finished*: only a flush that started later has
//! invalidated them. A CPU whose queue is full flushes; so does a timer, for all of them.

use super::api::PolicyError;
use super::iommu::Iommu;
use crate::lock::KernelLock;
use pinfold::Signals;
use pinfold_core::addr::IovaRange;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, available_parallelism};
use std::time::{Duration, Instant};

/// The number of entries in the queue of a CPU.
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
    /// The number of flushes started before.
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

    /// Adds a range whose entries are cleared, and frees by `free` the ranges that a flush has
    /// covered.
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

    /// Flushes if a range was added since the last call, and frees covered ranges, on all CPUs.
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

// The timer of lazy policies.

/// The longest wait of an unmap for the flush of a lazy policy.
pub(super) const LAZY_FOR: Duration = Duration::from_millis(10);

/// Calls a function every [`LAZY_FOR`], on a thread of its own, until it is dropped.
#[derive(Debug)]
pub(super) struct Timer {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Timer {
    pub(super) fn start(mut tick: impl FnMut() + Send + 'static) -> Result<Self, PolicyError> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let seen = Arc::clone(&stop);
        let work = move || {
            let (flag, wake) = &*seen;
            let mut stopped = flag.lock().unwrap_or_else(PoisonError::into_inner);
            while !*stopped {
                let waited =
                    wake.wait_timeout(stopped, LAZY_FOR).unwrap_or_else(PoisonError::into_inner);
                stopped = waited.0;
                if waited.1.timed_out() && !*stopped {
                    tick();
                }
            }
        };
        let thread = Builder::new().name("flush timer".to_owned());
        let thread = Signals::blocked_while(|| thread.spawn(work)).map_err(PolicyError::NoTimer)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let (flag, wake) = &*self.stop;
        *flag.lock().unwrap_or_else(PoisonError::into_inner) = true;
        wake.notify_one();
        if let Some(thread) = self.thread.take() {
            // Fails only if a tick panicked; the policy ends in any case.
            let _ = thread.join();
        }
    }
}

// Per-CPU state, as kernels have it.

/// One value per processor, each on cache lines of its own.
///
/// A kernel disables preemption while it uses such state. A program cannot, so each value has a
/// lock, as Linux's caches and flush queues have too; it is contended only where a thread was
/// preempted in between.
#[derive(Debug)]
pub(super) struct PerCpu<T>(Box<[Padded<T>]>);

/// 128 bytes: processors fetch cache lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Padded<T>(T);

impl<T> PerCpu<T> {
    pub(super) fn new(mut make: impl FnMut() -> T) -> Self {
        let cpus = available_parallelism().map_or(1, usize::from);
        Self((0..cpus).map(|_| Padded(make())).collect())
    }

    /// Returns the value of the processor that this thread runs on.
    #[inline]
    pub(super) fn here(&self) -> &T {
        // The numbers may have gaps; two processors may then share a value.
        let at = rustix::thread::sched_getcpu() % self.0.len();
        // `available_parallelism` is at least 1, and the remainder is inside.
        &self.0[at].0
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|padded| &padded.0)
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
