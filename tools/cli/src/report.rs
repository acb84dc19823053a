//! The reports of runs: the statistics of their parts, as text and as JSON.

pub(crate) mod copy;
pub(crate) mod io;
pub(crate) mod nvme;
pub(crate) mod receive;
mod remedies;
pub(crate) mod replay;
pub(crate) mod serve;
pub(crate) mod stack;

use crate::engine::worker::RequestStats;
use crate::histogram::{Latency, PERCENTILES};
use pinfold::CpuTime;
use serde::Serialize;
use std::fmt::{self, Write};

fn is_absent(ns: &f64) -> bool {
    *ns == 0.0
}

/// The number of requests from which on the time of one is stated: with fewer it is dominated by
/// the start and by waiting.
const ENOUGH: u64 = 1000;

/// The processor time of a workload.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct CpuReport {
    /// The time in the program, seconds.
    pub(crate) user_seconds: f64,
    /// The time in the kernel, seconds.
    pub(crate) system_seconds: f64,
    /// Both per request, ns; absent with too few of them.
    #[serde(skip_serializing_if = "is_absent")]
    pub(crate) ns_per_request: f64,
}

impl CpuReport {
    /// Creates the report of the time since `before`, for `requests` requests.
    pub(crate) fn since(before: CpuTime, requests: u64) -> Self {
        let time = CpuTime::here().since(before);
        let (user_seconds, system_seconds) = (time.user.as_secs_f64(), time.system.as_secs_f64());
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 requests")]
        let ns_per_request = if requests >= ENOUGH {
            (user_seconds + system_seconds) * 1e9 / requests as f64
        } else {
            0.0
        };
        Self { user_seconds, system_seconds, ns_per_request }
    }

    /// Returns user and system time in per cent of `seconds`.
    pub(crate) fn percent_of(self, seconds: f64) -> (f64, f64) {
        let percent = |part: f64| if seconds > 0.0 { part * 100.0 / seconds } else { 0.0 };
        (percent(self.user_seconds), percent(self.system_seconds))
    }
}

/// The requests of one direction at one target.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct RequestReport {
    /// Completed requests.
    pub(crate) requests: u64,
    /// Bytes that they moved.
    pub(crate) bytes: u64,
    /// The time from the call until the request is submitted, with the system call or doorbell,
    /// which many requests share; for a file in `copy`, until it is queued.
    pub(crate) queueing: Latency,
    /// The time from there until the program owns the buffer again.
    pub(crate) completion: Latency,
    /// The sum of both.
    pub(crate) total: Latency,
}

impl RequestReport {
    /// Creates the report of `stats`.
    pub(crate) fn new(stats: &RequestStats) -> Self {
        Self {
            requests: stats.requests,
            bytes: stats.bytes,
            queueing: stats.queueing.summary(&PERCENTILES),
            completion: stats.completion.summary(&PERCENTILES),
            total: stats.total.summary(&PERCENTILES),
        }
    }
}

/// The width of the first column.
const LABEL: usize = 14;

/// Appends a line with `label` in the first column.
pub(super) fn line(out: &mut String, label: &str, value: fmt::Arguments<'_>) {
    // Writing to a `String` does not fail, here and in the reports.
    let _ = writeln!(out, "  {label:<LABEL$}{value}");
}
