//! An I/O queue pair: one thread submits to it and polls it.

mod abort;
mod poll;
mod sleep;
mod submit;

use super::config::nanoseconds;
use super::controller::{Attached, Core, Grave, Namespace, Sizes};
use super::error::{Error, PollError};
use super::request::{CommandSlot, CommandState, Completion, Identifiers, RequestSlot};
use super::rings::{CompletionRing, SubmissionRing};
use super::span::Span;
use super::stats::QueueStats;
use crate::interrupt::Interrupt;
use crate::registers::Registers;
use crate::spec::Doorbell;
use pinfold_core::dma_pool::ChunkSource;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

pub use sleep::Vector;

/// The deepest queue: identifiers keep 6 bits for a generation.
pub(super) const MAX_DEPTH: usize = 1023;
/// Even a shallow queue has room for this many commands, if the controller has: a large request is many.
const COMMANDS: usize = 63;

/// A queue pair of a controller, for one owner at a time. Dropping it deletes it at the controller.
pub struct Queue<R: Registers, S: ChunkSource + Clone> {
    core: Arc<Core<R, S>>,
    id: u16,
    /// Tells this queue's requests from those of any other.
    serial: u32,
    /// Under which number of resets it was created.
    epoch: u64,
    namespaces: Arc<[Namespace]>,
    /// The number that went with them when they were looked at.
    namespaces_seen: u64,
    /// Namespaces that are not any more what they were when the queue was created.
    changed: Vec<u32>,
    max_transfer: u32,
    can_discard: bool,
    timeout_ns: u64,
    abort_timeout_ns: u64,
    sq: SubmissionRing<S>,
    cq: CompletionRing<S>,
    /// The rings' memory; taken when the queue is dropped.
    spans: Vec<Span<S>>,
    commands: Box<[CommandSlot]>,
    free_commands: Vec<u16>,
    identifiers: Identifiers,
    quarantined: usize,
    requests: Box<[RequestSlot]>,
    free_requests: Vec<u16>,
    /// Requests with commands that are not yet sent, in order.
    unsent: VecDeque<u16>,
    /// Completions to be handed out.
    ready: VecDeque<Completion>,
    /// Trigger the first request may be overdue, at the earliest.
    next_deadline_ns: u64,
    /// The time, as it was last looked up.
    now_ns: u64,
    last_status_ns: u64,
    /// Trigger the admin queue was last looked at by a submission.
    last_look_ns: u64,
    failed: Option<PollError>,
    /// What arrives when the controller has written completions; `None` where it is polled.
    interrupt: Option<Arc<dyn Interrupt>>,
    stats: QueueStats,
}

impl<R: Registers, S: ChunkSource + Clone> fmt::Debug for Queue<R, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue")
            .field("id", &self.id)
            .field("depth", &self.depth())
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    pub(super) fn create(core: Arc<Core<R, S>>, depth: usize, vector: Option<Vector>) -> Result<Self, Error> {
        let limit = core.max_depth();
        if depth == 0 || depth > limit {
            return Err(Error::Depth { depth, limit });
        }
        let slots = depth.max(COMMANDS).min(limit);
        let sizes = Sizes::new(slots + 1, usize::from(core.cap.mqes()) + 1);
        let number = vector.as_ref().map(|vector| vector.number);
        let Attached { id, epoch, facts, namespaces: namespaces_seen, sq, cq } =
            core.attach_queue(sizes, number)?;
        let now_ns = core.config.clock.now_ns();
        Ok(Self {
            id,
            serial: core.life.queue_serial(),
            epoch,
            namespaces: facts.namespaces,
            namespaces_seen,
            changed: Vec::new(),
            max_transfer: facts.identity.max_transfer_bytes,
            can_discard: facts.identity.can_discard,
            timeout_ns: nanoseconds(core.config.timeout),
            abort_timeout_ns: nanoseconds(core.config.abort_timeout),
            sq: SubmissionRing::new(Span::clone(&sq), sizes.submission),
            cq: CompletionRing::new(Span::clone(&cq), sizes.completion),
            spans: vec![sq, cq],
            commands: (0..slots).map(|_| CommandSlot::default()).collect(),
            free_commands: places(slots),
            identifiers: Identifiers::new(slots),
            quarantined: 0,
            requests: (0..depth).map(|_| RequestSlot::default()).collect(),
            free_requests: places(depth),
            unsent: VecDeque::with_capacity(depth),
            ready: VecDeque::with_capacity(depth),
            next_deadline_ns: u64::MAX,
            now_ns,
            last_status_ns: now_ns,
            last_look_ns: now_ns,
            failed: None,
            interrupt: vector.map(|vector| vector.interrupt),
            stats: QueueStats::default(),
            core,
        })
    }

    /// The queue's identifier at the controller.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// How many requests may be under way.
    pub fn depth(&self) -> usize {
        self.requests.len()
    }

    /// How many are: those whose completion has not been handed out.
    pub fn in_flight(&self) -> usize {
        self.requests.len() - self.free_requests.len()
    }

    /// What the queue did so far.
    pub fn stats(&self) -> QueueStats {
        self.stats
    }

    /// Tells the controller of everything that was submitted since the last call: one doorbell for all of it.
    /// [`poll`](Self::poll) does it too, so that a forgotten call costs time and nothing else.
    pub fn ring_doorbell(&mut self) {
        if let Some(tail) = self.sq.take_unrung() {
            let under_way = self.commands.len() - self.free_commands.len();
            if let Some(head) = self.cq.take_unrung_full(under_way) {
                self.ring_head(head);
            }
            self.core.ring(self.id, Doorbell::SubmissionTail, tail);
            self.stats.doorbells += 1;
        }
    }

    /// Whether the controller has been reset since the queue was created.
    fn is_stale(&self) -> bool {
        self.core.life.epoch() != self.epoch
    }
}

/// The numbers below `count`, so that 0 is taken first.
fn places(count: usize) -> Vec<u16> {
    (0..count).rev().filter_map(|place| u16::try_from(place).ok()).collect()
}

impl<R: Registers, S: ChunkSource + Clone> Drop for Queue<R, S> {
    fn drop(&mut self) {
        let mut grave = Grave::of(std::mem::take(&mut self.spans));
        for slot in &mut self.commands {
            if slot.state != CommandState::Free {
                grave.prps.extend(slot.prps.take());
                grave.pages.extend(slot.page.take());
            }
        }
        self.core.detach_queue(self.id, self.serial, self.epoch, grave);
    }
}
