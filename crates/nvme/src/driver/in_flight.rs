//! The caller's side of a request: its payload while it is in flight, its completion, its outcome.

use super::error::CommandError;
use super::overlap::Retries;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Identifies a request among all requests of the process: those of other controllers, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RequestId {
    /// The queue's serial number.
    pub(super) queue: u64,
    pub(super) tag: u16,
    /// The number of uses of the tag.
    pub(super) sequence: u64,
}

/// Reports that a request has completed or has been given up. [`InFlight::finish`] accepts it.
#[must_use = "the payload is returned by `InFlight::finish`"]
#[derive(Debug)]
pub struct Completion {
    pub(super) id: RequestId,
    pub(super) result: RequestResult,
    pub(super) value: u32,
}

impl Completion {
    /// Returns DW0 of the completion of the request's last command, which the controller chooses; 0
    /// where it has not completed.
    pub fn value(&self) -> u32 {
        self.value
    }

    /// Returns the [`InFlight::tag`] of the request.
    pub fn tag(&self) -> usize {
        self.id.tag.into()
    }

    /// Returns whether the request was given up, so that its payload is quarantined.
    pub fn timed_out(&self) -> bool {
        matches!(self.result, RequestResult::TimedOut)
    }
}

#[derive(Debug)]
pub(super) enum RequestResult {
    Completed(Result<(), CommandError>),
    TimedOut,
}

/// A request in flight, with its payload.
///
/// Dropping it before its completion quarantines the payload for the life of the process (and
/// counts it), unless the controller has been reset since.
#[must_use = "dropping a request in flight quarantines its payload"]
pub struct InFlight<P> {
    payload: Option<P>,
    id: RequestId,
    generation: u64,
    shared: Arc<SharedState>,
}

impl<P> fmt::Debug for InFlight<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The outcome of a request.
#[derive(Debug)]
pub enum Outcome<P> {
    /// The controller no longer accesses the payload.
    Completed {
        /// The payload of the request.
        payload: P,
        /// Whether the request succeeded.
        result: Result<(), CommandError>,
    },
    /// The request did not complete in time; the controller may still access the payload.
    TimedOut(Quarantined<P>),
    /// The completion belongs to another request; both are returned.
    Foreign(InFlight<P>, Completion),
}

impl<P> InFlight<P> {
    pub(super) fn new(
        payload: P,
        id: RequestId,
        generation: u64,
        shared: Arc<SharedState>,
    ) -> Self {
        Self { payload: Some(payload), id, generation, shared }
    }

    /// Returns a number below the queue's depth that no other request in flight in the queue has.
    pub fn tag(&self) -> usize {
        self.id.tag.into()
    }

    pub(super) fn id(&self) -> RequestId {
        self.id
    }

    /// Returns the payload and the result of the request. Constant time.
    pub fn finish(mut self, completion: Completion) -> Outcome<P> {
        if completion.id != self.id {
            return Outcome::Foreign(self, completion);
        }
        let Some(payload) = self.payload.take() else {
            // Unreachable: `payload` is taken here and on drop only, and both consume `self`.
            return Outcome::Foreign(self, completion);
        };
        match completion.result {
            RequestResult::Completed(result) => Outcome::Completed { payload, result },
            RequestResult::TimedOut => {
                self.shared.quarantined.fetch_add(1, Ordering::Relaxed);
                let (generation, shared) = (self.generation, self.shared.clone());
                Outcome::TimedOut(Quarantined { payload: Some(payload), generation, shared })
            }
        }
    }
}

impl<P> Drop for InFlight<P> {
    fn drop(&mut self) {
        if let Some(payload) = self.payload.take() {
            self.shared.drop_or_quarantine(payload, self.generation);
        }
    }
}

/// A payload that the controller may still access.
///
/// Dropping it before the controller has been reset quarantines the payload for the life of the
/// process, and counts it.
#[must_use = "dropping it quarantines the payload for the life of the process"]
pub struct Quarantined<P> {
    payload: Option<P>,
    generation: u64,
    shared: Arc<SharedState>,
}

impl<P> fmt::Debug for Quarantined<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quarantined")
            .field("recoverable", &self.is_recoverable())
            .finish_non_exhaustive()
    }
}

impl<P> Quarantined<P> {
    /// Returns whether the controller has been reset since the request was submitted.
    fn is_recoverable(&self) -> bool {
        self.shared.generation() > self.generation
    }

    /// Returns the payload.
    ///
    /// # Errors
    /// `self`, where the controller has not been reset since: call
    /// [`Controller::reset`](super::Controller::reset) first.
    pub fn recover(mut self) -> Result<P, Self> {
        if !self.is_recoverable() {
            return Err(self);
        }
        match self.payload.take() {
            Some(payload) => {
                self.shared.quarantined.fetch_sub(1, Ordering::Relaxed);
                Ok(payload)
            }
            // Unreachable: taken here and on drop only, and both consume `self`.
            None => Err(self),
        }
    }
}

impl<P> Drop for Quarantined<P> {
    fn drop(&mut self) {
        if let Some(payload) = self.payload.take() {
            self.shared.quarantined.fetch_sub(1, Ordering::Relaxed);
            self.shared.drop_or_quarantine(payload, self.generation);
        }
    }
}

// State that a controller shares with its queues and everything in flight: its generation, and
// counters.

static QUARANTINED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Returns how many bytes of rings, buffers and PRP lists of this process are quarantined because
/// their controller could not be disabled. Payloads are counted by
/// [`ControllerStats::quarantined_permanently`](super::ControllerStats::quarantined_permanently).
pub fn quarantined_bytes() -> u64 {
    QUARANTINED_BYTES.load(Ordering::Relaxed)
}

pub(super) fn count_quarantined_bytes(bytes: u64) {
    QUARANTINED_BYTES.fetch_add(bytes, Ordering::Relaxed);
}

/// Returns a serial number that is unique among the queues of the process, of all controllers: a
/// completion of one controller must not release a payload of another. 0 is not a queue's.
pub(super) fn next_queue_serial() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

#[derive(Debug, Default)]
pub(super) struct SharedState {
    /// Advances whenever the controller has been seen disabled: commands of a lower generation
    /// access no memory.
    generation: AtomicU64,
    /// Threads that are disabling or enabling the controller.
    transitions: AtomicU32,
    pub(super) quarantined: AtomicU64,
    pub(super) quarantined_permanently: AtomicU64,
    pub(super) quarantined_queues: AtomicU64,
    pub(super) events: AtomicU64,
    pub(super) events_lost: AtomicU64,
    pub(super) health_events: AtomicU64,
    pub(super) namespace_events: AtomicU64,
    pub(super) admin_retries: AtomicU64,
    pub(super) spurious_admin_completions: AtomicU64,
    pub(super) retries: Retries,
    /// Twice the number of namespace scans; odd where a namespace has changed since the last one.
    namespaces: AtomicU64,
}

impl SharedState {
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Begins a new generation. The controller is disabled and makes no more accesses.
    pub(super) fn next_generation(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Marks that CSTS.RDY may be 0 because of this thread, until the guard is dropped.
    pub(super) fn begin_transition(&self) -> TransitionGuard<'_> {
        self.transitions.fetch_add(1, Ordering::AcqRel);
        TransitionGuard(self)
    }

    /// Returns whether a thread of this process is disabling or enabling the controller.
    pub(super) fn in_transition(&self) -> bool {
        self.transitions.load(Ordering::Acquire) > 0
    }

    /// Returns the version of the namespaces: it changes when they do, and is odd until they are
    /// scanned again.
    pub(super) fn namespace_version(&self) -> u64 {
        self.namespaces.load(Ordering::Acquire)
    }

    /// Records that a namespace has changed.
    pub(super) fn namespaces_changed(&self) {
        self.namespaces.fetch_or(1, Ordering::AcqRel);
    }

    /// Records a namespace scan. Called under the control lock, as is
    /// [`namespaces_changed`](Self::namespaces_changed).
    pub(super) fn namespaces_scanned(&self) {
        self.namespaces.store((self.namespace_version() | 1).wrapping_add(1), Ordering::Release);
    }

    /// Drops a payload submitted in `generation`, or quarantines it if the controller may still
    /// access it.
    pub(super) fn drop_or_quarantine<P>(&self, payload: P, generation: u64) {
        if self.generation() > generation {
            drop(payload);
        } else {
            self.quarantined_permanently.fetch_add(1, Ordering::Relaxed);
            std::mem::forget(payload);
        }
    }
}

/// Held while the controller is being disabled or enabled.
pub(super) struct TransitionGuard<'s>(&'s SharedState);

impl Drop for TransitionGuard<'_> {
    fn drop(&mut self) {
        self.0.transitions.fetch_sub(1, Ordering::AcqRel);
    }
}
