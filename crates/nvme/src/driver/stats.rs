//! What the driver counts.

/// What a queue did since it was created.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct QueueStats {
    /// Requests accepted: what the callers asked for.
    pub requests: u64,
    /// Commands sent: a request larger than the controller's largest transfer is several.
    pub commands: u64,
    /// Completions that belonged to a command.
    pub completions: u64,
    /// Of these, with an error status.
    pub errors: u64,
    /// Segments of all payloads: divided by `requests`, segments per I/O.
    pub segments: u64,
    /// The payload with most segments.
    pub segments_max: u64,
    /// Pages named to the controller, in all PRP entries.
    pub prp_entries: u64,
    /// PRP list pages taken, over all commands.
    pub prp_list_pages: u64,
    /// Doorbell writes, of both kinds.
    pub doorbells: u64,
    /// How often the owner slept until an interrupt.
    pub sleeps: u64,
    /// Of these, how often the interrupt came.
    pub interrupts: u64,
    /// Requests that did not complete in time.
    pub timeouts: u64,
    /// Abort commands sent for their commands.
    pub aborts: u64,
    /// Requests that ended by being aborted, with their payload given back.
    pub aborted: u64,
    /// Completions of commands that had been given up.
    pub late_completions: u64,
    /// Completions that belonged to no command: unknown identifier, wrong queue, or a second one.
    pub spurious_completions: u64,
    /// Submission-queue heads outside the queue.
    pub bad_heads: u64,
}

impl QueueStats {
    /// The sum of two queues' counts, and the greater of their maxima.
    #[must_use]
    pub fn merged(self, other: Self) -> Self {
        Self {
            requests: self.requests + other.requests,
            commands: self.commands + other.commands,
            completions: self.completions + other.completions,
            errors: self.errors + other.errors,
            segments: self.segments + other.segments,
            segments_max: self.segments_max.max(other.segments_max),
            prp_entries: self.prp_entries + other.prp_entries,
            prp_list_pages: self.prp_list_pages + other.prp_list_pages,
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

/// What a controller has to tell besides its queues.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ControllerStats {
    /// How often it was reset, the first time included.
    pub resets: u64,
    /// PRP list pages in use now.
    pub list_pages_used: u64,
    /// The most that were.
    pub list_pages_max: u64,
    /// Payloads that are quarantined now.
    pub quarantined: u64,
    /// Queue pairs whose memory is quarantined now: the controller did not confirm that it deleted them.
    pub quarantined_queues: u64,
    /// Payloads that were dropped while the controller might still reach them, and therefore leaked.
    pub quarantined_permanently: u64,
    /// Asynchronous events that the controller reported.
    pub events: u64,
    /// Of these, about its health (reliability, temperature, spare).
    pub health_events: u64,
    /// Of these, that a namespace changed.
    pub namespace_events: u64,
    /// Events dropped because [`Controller::events`](super::Controller::events) was not called.
    pub events_lost: u64,
    /// Admin completions that belonged to no outstanding command.
    pub spurious_admin_completions: u64,
}
