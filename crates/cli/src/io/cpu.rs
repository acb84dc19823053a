//! What a workload cost the processor.

use pinfold::CpuTime;
use serde::Serialize;
use std::fmt::Write;

/// Processor time of a workload: the program's and the kernel's for it.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct CpuReport {
    /// In the program, seconds.
    pub(crate) user_seconds: f64,
    /// In the kernel, seconds.
    pub(crate) system_seconds: f64,
    /// Both for one request, ns.
    pub(crate) ns_per_request: f64,
}

impl CpuReport {
    /// What was computed since `before`, for so many requests.
    pub(crate) fn since(before: CpuTime, requests: u64) -> Self {
        let time = CpuTime::here().since(before);
        let (user_seconds, system_seconds) = (time.user.as_secs_f64(), time.system.as_secs_f64());
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 requests")]
        let ns_per_request = (user_seconds + system_seconds) * 1e9 / requests.max(1) as f64;
        Self { user_seconds, system_seconds, ns_per_request }
    }

    pub(crate) fn to_text(self, out: &mut String, seconds: f64) {
        let percent = |part: f64| if seconds > 0.0 { part * 100.0 / seconds } else { 0.0 };
        let (usr, sys) = (percent(self.user_seconds), percent(self.system_seconds));
        // Writing to a `String` does not fail.
        let _ = writeln!(
            out,
            "  cpu          : usr={usr:.2}%, sys={sys:.2}%, {:.2} usec for a request",
            self.ns_per_request / 1e3
        );
    }
}
