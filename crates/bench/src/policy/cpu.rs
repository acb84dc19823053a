//! Per-CPU state, as kernels have it.

use std::thread::available_parallelism;

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
