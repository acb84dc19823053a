//! The configuration of the driver, and its counters.

use super::clock::{Clock, SystemClock, Unpaused};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Configures the driver; [`Config::default`] suits most programs.
#[derive(Clone)]
pub struct Config {
    /// How long a request may take before it is aborted; a retry may take as long again. Default:
    /// 30 s.
    pub timeout: Duration,
    /// How long an abort may take before its request is quarantined; 0 quarantines at once, without
    /// an abort. Default: 5 s.
    pub abort_timeout: Duration,
    /// For how long a command whose status permits a retry (DNR clear) is sent again, from its
    /// first failure: after the delay that the controller asks for (CRD), otherwise after 1 ms, 2
    /// ms, and so on up to a second; a media error at most 4 times. Commands that the controller
    /// wants to have later than that fail at once. 0 retries nothing. Default: 10 s.
    pub retry_limit: Duration,
    /// How long an admin command may take. Default: 60 s.
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

/// Counters of a queue since it was created.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct QueueStats {
    /// Requests accepted.
    pub requests: u64,
    /// Commands sent; a request larger than the largest transfer has several.
    pub commands: u64,
    /// Completions of commands.
    pub completions: u64,
    /// Completions with an error status.
    pub errors: u64,
    /// Requests of which a command was retried.
    pub retried_requests: u64,
    /// Commands sent again because their status permits a retry.
    pub retries: u64,
    /// Nanoseconds for which commands waited for their retry; commands that wait together count
    /// once.
    pub retry_wait_ns: u64,
    /// Segments of all payloads; divided by `requests`, segments per request.
    pub segments: u64,
    /// The most segments of a payload.
    pub segments_max: u64,
    /// PRP entries.
    pub prp_entries: u64,
    /// PRP list pages, over all commands.
    pub prp_list_pages: u64,
    /// SGL data block descriptors.
    pub sgl_data_blocks: u64,
    /// Pages of SGL segments, over all commands.
    pub sgl_segment_pages: u64,
    /// Doorbell writes, of both kinds.
    pub doorbells: u64,
    /// Sleeps until an interrupt.
    pub sleeps: u64,
    /// Sleeps that an interrupt ended.
    pub interrupts: u64,
    /// Requests that did not complete in time.
    pub timeouts: u64,
    /// Abort commands sent for their commands.
    pub aborts: u64,
    /// Requests that completed by being aborted.
    pub aborted: u64,
    /// Completions of quarantined commands.
    pub late_completions: u64,
    /// Completions that belong to no command: unknown identifier, wrong queue, or a second one.
    pub spurious_completions: u64,
    /// Submission queue heads outside the queue.
    pub bad_heads: u64,
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
        rows(
            f,
            &[
                ("requests", self.requests),
                ("requests retried", self.retried_requests),
                ("  waiting, ms", self.retry_wait_ns / 1_000_000),
                ("commands", self.commands),
                ("completions", self.completions),
                ("  with an error", self.errors),
                ("  late", self.late_completions),
                ("  spurious", self.spurious_completions),
                ("  with a bad head", self.bad_heads),
                ("segments", self.segments),
                ("PRP entries", self.prp_entries),
                ("PRP list pages", self.prp_list_pages),
                ("SGL data blocks", self.sgl_data_blocks),
                ("SGL pages", self.sgl_segment_pages),
                ("doorbells", self.doorbells),
                ("sleeps", self.sleeps),
                ("  interrupted", self.interrupts),
                ("timeouts", self.timeouts),
                ("aborts", self.aborts),
                ("requests aborted", self.aborted),
            ],
        )
    }
}

/// Counters of a controller beside those of its queues.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ControllerStats {
    /// Resets, the first start included.
    pub resets: u64,
    /// Pages of PRP lists and SGL segments in use.
    pub list_pages_used: u64,
    /// The most such pages that were in use or kept by a queue pair for its next commands.
    pub list_pages_max: u64,
    /// Payloads quarantined now.
    pub quarantined: u64,
    /// Queue pairs whose memory is quarantined now: the controller did not confirm their deletion.
    pub quarantined_queues: u64,
    /// Payloads dropped while the controller might access them, and quarantined for the life of the
    /// process.
    pub quarantined_permanently: u64,
    /// Asynchronous events reported by the controller.
    pub events: u64,
    /// Events about its health (reliability, temperature, spare).
    pub health_events: u64,
    /// Events about a changed namespace.
    pub namespace_events: u64,
    /// Events dropped because [`Controller::events`](super::Controller::events) was not called.
    pub events_lost: u64,
    /// Admin commands sent again because the controller was not ready.
    pub admin_retries: u64,
    /// Admin completions that belong to no outstanding command.
    pub spurious_admin_completions: u64,
}

impl fmt::Display for ControllerStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        rows(
            f,
            &[
                ("resets", self.resets),
                ("list pages in use", self.list_pages_used),
                ("  at the peak", self.list_pages_max),
                ("payloads quarantined", self.quarantined),
                ("  for ever", self.quarantined_permanently),
                ("queues quarantined", self.quarantined_queues),
                ("events", self.events),
                ("  health", self.health_events),
                ("  namespace", self.namespace_events),
                ("  lost", self.events_lost),
                ("admin retries", self.admin_retries),
                ("admin spurious", self.spurious_admin_completions),
            ],
        )
    }
}

/// Prints a line for each counter.
fn rows(f: &mut fmt::Formatter<'_>, rows: &[(&str, u64)]) -> fmt::Result {
    rows.iter().enumerate().try_for_each(|(at, (name, count))| {
        let line_end = if at == 0 { "" } else { "\n" };
        write!(f, "{line_end}{name:<20} {count:>14}")
    })
}
