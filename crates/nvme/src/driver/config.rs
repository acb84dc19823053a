//! The configuration of the driver, and its counters.

use super::clock::{Clock, SystemClock, Unpaused};
use pinfold_core::counters;
use pinfold_core::counters::Counters;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Configures the driver; [`Config::default`] suits most programs.
#[derive(Clone)]
pub struct Config {
    /// The time limit of a request before it is aborted; a retry may take as long again, but all of
    /// a request with its retries at most twice that and [`retry_limit`](Self::retry_limit). The
    /// time for which it waits for older requests to the same blocks does not count. Default: 30 s.
    pub timeout: Duration,
    /// The time limit of an abort before its request is quarantined; 0 quarantines at once, without
    /// an abort. Default: 5 s.
    pub abort_timeout: Duration,
    /// For how long a command whose status permits a retry (DNR clear) is sent again, from its
    /// first failure: after the delay that the controller asks for (CRD), otherwise after 1 ms, 2
    /// ms, and so on up to a second; a media error at most 4 times. Commands that the controller
    /// wants to have later than that fail at once. 0 retries nothing. Default: 10 s.
    pub retry_limit: Duration,
    /// The time limit of an admin command. Default: 60 s.
    pub admin_timeout: Duration,
    /// The number of I/O queue pairs to request; the controller may grant fewer. Default: 16.
    pub queues: u16,
    /// The largest transfer of one command, further limited by MDTS and by 8 MiB. Default: 1 MiB.
    pub max_transfer_bytes: u32,
    /// Whether to use SGLs where the controller supports them and a command would need a PRP list.
    /// Default: true.
    pub use_sgls: bool,
    /// The clock. Default: the system's monotonic clock without the pauses of the process
    /// ([`Unpaused`]).
    pub clock: Arc<dyn Clock>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            abort_timeout: Duration::from_secs(5),
            retry_limit: Duration::from_secs(10),
            admin_timeout: Duration::from_secs(60),
            queues: 16,
            max_transfer_bytes: 1 << 20,
            use_sgls: true,
            clock: Arc::new(Unpaused::new(SystemClock::default())),
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            timeout,
            abort_timeout,
            retry_limit,
            admin_timeout,
            queues,
            max_transfer_bytes,
            use_sgls,
            clock: _,
        } = self;
        f.debug_struct("Config")
            .field("timeout", timeout)
            .field("abort_timeout", abort_timeout)
            .field("retry_limit", retry_limit)
            .field("admin_timeout", admin_timeout)
            .field("queues", queues)
            .field("max_transfer_bytes", max_transfer_bytes)
            .field("use_sgls", use_sgls)
            .finish_non_exhaustive()
    }
}

pub(super) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

// Counters of the driver.

counters! {
    /// Counters of a queue since it was created. It prints as a table.
    #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
    pub struct QueueStats {
        /// Requests accepted.
        requests: Total Count "requests",
        /// Requests of which a command was retried.
        retried_requests: Total Count "  retried",
        /// Requests that did not complete in time.
        timeouts: Total Count "  timed out",
        /// Requests that completed by being aborted.
        aborted: Total Count "  aborted",
        /// Commands sent; a request larger than the largest transfer has several.
        commands: Total Count "commands",
        /// Commands sent again because their status permits a retry.
        retries: Total Count "  sent again",
        /// Nanoseconds for which commands waited for their retry; commands that wait together
        /// count once.
        retry_wait_ns: Total Nanoseconds "  waiting, ns",
        /// Abort commands sent for commands that did not complete in time.
        aborts: Total Count "  to abort others",
        /// Completions of commands.
        completions: Total Count "completions",
        /// Completions with an error status.
        errors: Total Count "  with an error",
        /// Completions of quarantined commands.
        late_completions: Total Count "  late",
        /// Completions that belong to no command: unknown identifier, wrong queue, or a second one.
        spurious_completions: Total Count "  spurious",
        /// Submission queue heads outside the queue.
        bad_heads: Total Count "  with a bad head",
        /// Segments of all payloads; divided by the requests, segments per request.
        segments: Total Count "segments",
        /// The most segments of a payload.
        segments_max: Peak Count "  of a payload, most",
        /// PRP entries.
        prp_entries: Total Count "PRP entries",
        /// PRP list pages, over all commands.
        prp_list_pages: Total Count "PRP list pages",
        /// SGL data block descriptors.
        sgl_data_blocks: Total Count "SGL data blocks",
        /// Pages of SGL segments, over all commands.
        sgl_segment_pages: Total Count "SGL pages",
        /// Doorbell writes, of both kinds.
        doorbells: Total Count "doorbells",
        /// Sleeps until an interrupt.
        sleeps: Total Count "sleeps",
        /// Sleeps that an interrupt ended.
        interrupts: Total Count "  interrupted",
    }
}

impl QueueStats {
    /// Returns the sum of two queues' counters, and the greater of their maxima.
    #[must_use]
    pub fn merged(self, other: Self) -> Self {
        Self {
            requests: self.requests + other.requests,
            commands: self.commands + other.commands,
            completions: self.completions + other.completions,
            errors: self.errors + other.errors,
            retried_requests: self.retried_requests + other.retried_requests,
            retries: self.retries + other.retries,
            retry_wait_ns: self.retry_wait_ns + other.retry_wait_ns,
            segments: self.segments + other.segments,
            segments_max: self.segments_max.max(other.segments_max),
            prp_entries: self.prp_entries + other.prp_entries,
            prp_list_pages: self.prp_list_pages + other.prp_list_pages,
            sgl_data_blocks: self.sgl_data_blocks + other.sgl_data_blocks,
            sgl_segment_pages: self.sgl_segment_pages + other.sgl_segment_pages,
            doorbells: self.doorbells + other.doorbells,
            sleeps: self.sleeps + other.sleeps,
            interrupts: self.interrupts + other.interrupts,
            timeouts: self.timeouts + other.timeouts,
            aborts: self.aborts + other.aborts,
            aborted: self.aborted + other.aborted,
            late_completions: self.late_completions + other.late_completions,
            spurious_completions: self.spurious_completions + other.spurious_completions,
            bad_heads: self.bad_heads + other.bad_heads,
        }
    }
}

impl fmt::Display for QueueStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_rows(f)
    }
}

counters! {
    /// Counters of a controller beside those of its queues. It prints as a table.
    #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
    pub struct ControllerStats {
        /// Resets, the first start included.
        resets: Total Count "resets",
        /// Pages of PRP lists and SGL segments in use.
        list_pages_used: Level Count "list pages in use",
        /// The most such pages that were in use or kept by a queue pair for its next commands.
        list_pages_max: Peak Count "  peak",
        /// Payloads quarantined now.
        quarantined: Level Count "payloads quarantined",
        /// Payloads dropped while the controller might access them, and quarantined for the life
        /// of the process.
        quarantined_permanently: Total Count "  for ever",
        /// Queue pairs whose memory is quarantined now: the controller did not confirm their
        /// deletion.
        quarantined_queues: Level Count "queues quarantined",
        /// Asynchronous events reported by the controller.
        events: Total Count "events",
        /// Events about its health (reliability, temperature, spare).
        health_events: Total Count "  health",
        /// Events about a changed namespace.
        namespace_events: Total Count "  namespace",
        /// Events dropped because the program did not fetch them.
        events_lost: Total Count "  lost",
        /// Admin commands sent again because the controller was not ready.
        admin_retries: Total Count "admin retries",
        /// Admin completions that belong to no outstanding command.
        spurious_admin_completions: Total Count "admin spurious",
    }
}

impl fmt::Display for ControllerStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_rows(f)
    }
}
