//! What a namespace's queue has done.

use pinfold_nvme::driver::{ControllerStats, QueueStats};

/// The statistics of a namespace's queue.
#[derive(Clone, Debug)]
pub(crate) struct NvmeStats {
    /// The target's name.
    pub(crate) name: String,
    /// How many queues are counted.
    pub(crate) queues: u64,
    /// Requests that the driver accepted.
    pub(crate) requests: u64,
    /// Whether a wait sleeps until an interrupt.
    pub(crate) by_interrupt: bool,
    /// The driver's figures for the queue.
    pub(crate) queue: QueueStats,
    /// The driver's figures for the controller.
    pub(crate) controller: ControllerStats,
}

impl NvmeStats {
    /// Adds another queue of the same controller.
    pub(crate) fn add(&mut self, other: &Self) {
        self.queues += other.queues;
        self.requests += other.requests;
        let (sum, queue) = (&mut self.queue, &other.queue);
        sum.commands += queue.commands;
        sum.errors += queue.errors;
        sum.retried_requests += queue.retried_requests;
        sum.retries += queue.retries;
        sum.retry_wait_ns += queue.retry_wait_ns;
        sum.timeouts += queue.timeouts;
        sum.doorbells += queue.doorbells;
        sum.sleeps += queue.sleeps;
        sum.interrupts += queue.interrupts;
        sum.segments += queue.segments;
        sum.prp_entries += queue.prp_entries;
        sum.prp_list_pages += queue.prp_list_pages;
    }
}
