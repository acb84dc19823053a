//! The processor time of a workload.

use pinfold::CpuTime;
use serde::Serialize;

fn is_absent(ns: &f64) -> bool {
    *ns == 0.0
}

/// From how many requests on the time of one is stated: with fewer it is that of the start and of
/// waiting.
const ENOUGH: u64 = 1000;

/// The processor time of a workload.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct CpuReport {
    /// In the program, seconds.
    pub(crate) user_seconds: f64,
    /// In the kernel, seconds.
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
