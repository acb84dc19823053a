//! The requests of one direction at one target.

use crate::engine::worker::RequestStats;
use crate::histogram::Latency;
use serde::Serialize;

/// The requests of one direction at one target.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct RequestReport {
    /// Completed requests.
    pub(crate) requests: u64,
    /// Bytes that they moved.
    pub(crate) bytes: u64,
    /// From the call until the request is submitted, with the system call or doorbell, which many
    /// requests share; of a file in `copy`, until it is queued.
    pub(crate) queueing: Latency,
    /// From there until the program owns the buffer again.
    pub(crate) completion: Latency,
    /// The sum of both.
    pub(crate) total: Latency,
}

impl RequestReport {
    /// Creates the report of `stats`.
    pub(crate) fn new(stats: &RequestStats, percentiles: &[f64]) -> Self {
        Self {
            requests: stats.requests,
            bytes: stats.bytes,
            queueing: stats.queueing.summary(percentiles),
            completion: stats.completion.summary(percentiles),
            total: stats.total.summary(percentiles),
        }
    }
}
