//! An I/O queue pair, with its interrupt vector: one thread submits to it and polls it.

use crate::driver::clock::RetryDelays;
use crate::driver::config::{QueueStats, nanoseconds};
use crate::driver::error::{Error, PollError};
use crate::driver::in_flight::{self, Completion};
use crate::driver::inner::{CreatedQueuePair, Inner, PendingRelease, RingSizes};
use crate::driver::namespace::Namespace;
use crate::driver::overlap::{Extent, Extents};
use crate::driver::slots::{
    CommandIds, CommandSlot, CompletionRing, DmaBuffer, RequestSlot, SubmissionRing, list, room,
};
use crate::interrupt::Interrupt;
use crate::registers::Registers;
use crate::spec::{Doorbell, SglSupport};
use pinfold_core::dma_pool::{ChunkSource, PoolLocal};
use pinfold_core::gather::Profile;
use std::collections::{TryReserveError, VecDeque};
use std::fmt;
use std::sync::Arc;

/// Command slots of a shallow queue, if the controller allows them: a large request has many
/// commands.
const MIN_SLOTS: usize = 63;

/// A queue pair of a controller, for one owner at a time. Dropping it deletes it at the controller.
///
/// # Order
/// Two requests conflict if they have a block in common and at least one of them changes it (a
/// write, a discard, a write of zeroes). A queue carries conflicting requests out in the order of
/// their submission: the later one is not sent before the older one has completed, with all of its
/// retries. All others, and flushes, are carried out in any order.
///
/// Of several queues of a controller: from when a command of a request was found to need a retry
/// ([`poll`](Self::poll)) until the request has completed, no queue sends what conflicts with it,
/// nor what conflicts with a request that waits for it (and so on), for as long as that has not
/// completed. If several queues have such requests, the one that failed first is sent again first,
/// unless a request behind it is waited for already. Conflicting
/// requests that two queues have in flight at the same time are in no order, as in NVMe itself.
///
/// A request that timed out ([`Outcome::TimedOut`](crate::driver::Outcome::TimedOut)) is not sent
/// again, but the controller may still carry it out, until it is reset.
pub struct Queue<R: Registers, S: ChunkSource + Clone> {
    pub(super) inner: Arc<Inner<R, S>>,
    pub(super) id: u16,
    /// Distinguishes this queue's requests from those of any other.
    pub(super) serial: u64,
    /// This owner's list pages.
    pub(super) lists: PoolLocal,
    /// The generation of the controller that has the queue.
    pub(super) generation: u64,
    pub(super) namespaces: Arc<[Namespace]>,
    /// The version of `namespaces`.
    pub(super) namespace_version: u64,
    /// Namespaces that changed since the queue was created.
    pub(super) changed: Vec<u32>,
    pub(super) max_transfer: u32,
    pub(super) can_discard: bool,
    pub(super) can_write_zeroes: bool,
    /// The permitted contents of the controller's SGLs, if it supports them.
    pub(super) sgl: Option<Profile>,
    pub(super) timeout_ns: u64,
    pub(super) retry_limit_ns: u64,
    pub(super) retry_delays: RetryDelays,
    pub(super) abort_timeout_ns: u64,
    pub(super) sq: SubmissionRing<S>,
    pub(super) cq: CompletionRing<S>,
    /// The rings' memory; taken when the queue is dropped.
    rings: Vec<DmaBuffer<S>>,
    pub(super) commands: Box<[CommandSlot]>,
    pub(super) free_commands: Vec<u16>,
    pub(super) ids: CommandIds,
    /// Command slots that are quarantined.
    pub(super) quarantined: usize,
    /// Command slots with an abort that has not been answered.
    pub(super) aborts: usize,
    pub(super) requests: Box<[RequestSlot]>,
    pub(super) free_requests: Vec<u16>,
    /// Requests with commands that have not been sent, in order.
    pub(super) unsent: VecDeque<u16>,
    /// The blocks of the requests that have not completed.
    pub(super) extents: Extents,
    /// Requests that conflict with older ones of this queue, in order. Nothing of them was sent.
    pub(super) held: Vec<u16>,
    /// Requests that only conflict with retries of other queues, if with any. Nothing of them was
    /// sent.
    pub(super) unblocked: Vec<u16>,
    /// The number of requests that other queues wait for.
    pub(super) listed: usize,
    /// Room for the extents of requests; empty between two calls.
    pub(super) behind: Vec<Extent>,
    /// Commands that wait for a retry.
    pub(super) retrying: Vec<u16>,
    /// Whether the owner has given up: nothing is retried any more.
    pub(super) retries_abandoned: bool,
    /// The earliest time at which one of them is due.
    pub(super) next_retry_ns: u64,
    /// Since when there are any; `u64::MAX` where there are none.
    pub(super) retrying_since_ns: u64,
    /// Completions that have not been returned.
    pub(super) completions: VecDeque<Completion>,
    /// The earliest time at which a request may be overdue.
    pub(super) next_deadline_ns: u64,
    /// The time when the clock was last read.
    pub(super) now_ns: u64,
    pub(super) last_status_ns: u64,
    /// When a submission last polled the admin queue.
    pub(super) last_admin_poll_ns: u64,
    pub(super) failed: Option<PollError>,
    /// `None` where the queue is polled.
    pub(super) interrupt: Option<Arc<dyn Interrupt>>,
    pub(super) stats: QueueStats,
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
    pub(in crate::driver) fn create(
        inner: Arc<Inner<R, S>>,
        depth: usize,
        vector: Option<Vector>,
    ) -> Result<Self, Error> {
        let limit = inner.max_depth();
        if depth == 0 || depth > limit {
            return Err(Error::Depth { depth, limit });
        }
        let slots = depth.max(MIN_SLOTS).min(limit);
        // Before the controller knows of it.
        let no_memory = |_| Error::NoMemory { depth };
        let commands = list(slots, |_| CommandSlot::default()).map_err(no_memory)?;
        let requests = list(depth, |_| RequestSlot::default()).map_err(no_memory)?;
        let extents = Extents::new(depth).map_err(no_memory)?;
        let completions = room(depth).map_err(no_memory)?;
        let free_commands = free_list(slots).map_err(no_memory)?;
        let free_requests = free_list(depth).map_err(no_memory)?;
        let unsent = room(depth).map_err(no_memory)?;
        let (held, unblocked) = (room(depth).map_err(no_memory)?, room(depth).map_err(no_memory)?);
        let behind = room(depth).map_err(no_memory)?;
        let retrying = room(slots).map_err(no_memory)?;
        let sizes = RingSizes::new(slots + 1, usize::from(inner.registers.cap().mqes()) + 1);
        let number = vector.as_ref().map(|vector| vector.number);
        let (serial, retries) = (in_flight::next_queue_serial(), &inner.shared.retries);
        retries.add_queue(depth).map_err(no_memory)?;
        let created = inner.create_queue_pair(sizes, number);
        let CreatedQueuePair { id, generation, info, namespace_version, sq, cq } =
            created.inspect_err(|_| retries.remove_queue(serial, depth))?;
        let identity = info.identity;
        let sgl_align = match identity.sgls {
            SglSupport::AnyAlignment if inner.config.use_sgls => Some(1),
            SglSupport::DwordAligned if inner.config.use_sgls => Some(4),
            _ => None,
        };
        let now_ns = inner.config.clock.now_ns();
        Ok(Self {
            id,
            serial,
            lists: inner.lists.local(),
            generation,
            namespaces: info.namespaces,
            namespace_version,
            changed: Vec::new(),
            max_transfer: identity.max_transfer_bytes,
            can_discard: identity.can_discard,
            can_write_zeroes: identity.can_write_zeroes,
            sgl: sgl_align.and_then(|align| Profile::new(u32::MAX, u32::MAX.into(), 0, align).ok()),
            timeout_ns: nanoseconds(inner.config.timeout),
            retry_limit_ns: nanoseconds(inner.config.retry_limit),
            retry_delays: info.retry_delays,
            abort_timeout_ns: nanoseconds(inner.config.abort_timeout),
            sq: SubmissionRing::new(DmaBuffer::clone(&sq), sizes.submission),
            cq: CompletionRing::new(DmaBuffer::clone(&cq), sizes.completion),
            rings: vec![sq, cq],
            commands: commands.into(),
            free_commands,
            ids: CommandIds::new(slots),
            quarantined: 0,
            aborts: 0,
            requests: requests.into(),
            free_requests,
            unsent: VecDeque::from(unsent),
            extents,
            held,
            unblocked,
            listed: 0,
            behind,
            retrying,
            retries_abandoned: false,
            next_retry_ns: u64::MAX,
            retrying_since_ns: u64::MAX,
            completions: VecDeque::from(completions),
            next_deadline_ns: u64::MAX,
            now_ns,
            last_status_ns: now_ns,
            last_admin_poll_ns: now_ns,
            failed: None,
            interrupt: vector.map(|vector| vector.interrupt),
            stats: QueueStats::default(),
            inner,
        })
    }

    /// Returns the queue identifier.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Returns the queue depth: the most requests in flight.
    pub fn depth(&self) -> usize {
        self.requests.len()
    }

    /// Returns the number of requests in flight: those whose completion has not been returned.
    pub fn in_flight(&self) -> usize {
        self.requests.len() - self.free_requests.len()
    }

    /// Returns the counters of the queue.
    pub fn stats(&self) -> QueueStats {
        self.stats
    }

    /// Submits everything since the last call to the controller with one doorbell write.
    /// [`poll`](Self::poll) does it too, so that a forgotten call only costs time.
    pub fn ring_doorbell(&mut self) {
        if let Some(tail) = self.sq.take_tail() {
            let in_flight = self.commands.len() - self.free_commands.len();
            if let Some(head) = self.cq.take_head_if_full(in_flight) {
                self.write_head(head);
            }
            self.inner.registers.ring_doorbell(self.id, Doorbell::SubmissionTail, tail);
            self.stats.doorbells += 1;
        }
    }

    pub(super) fn write_head(&mut self, head: u32) {
        self.inner.registers.ring_doorbell(self.id, Doorbell::CompletionHead, head);
        self.stats.doorbells += 1;
    }

    /// Returns whether the controller has been reset since the queue was created.
    pub(super) fn is_stale(&self) -> bool {
        self.inner.shared.generation() != self.generation
    }
}

/// Returns the numbers below `count`, 0 last, so that it is popped first.
fn free_list(count: usize) -> Result<Vec<u16>, TryReserveError> {
    let mut free = room(count)?;
    free.extend((0..count).rev().filter_map(|slot| u16::try_from(slot).ok()));
    Ok(free)
}

impl<R: Registers, S: ChunkSource + Clone> Drop for Queue<R, S> {
    fn drop(&mut self) {
        // First: the deletion may take as long as an admin command.
        self.inner.shared.retries.remove_queue(self.serial, self.requests.len());
        let mut memory = PendingRelease::new(std::mem::take(&mut self.rings));
        memory.data.extend(self.commands.iter_mut().filter_map(|slot| slot.data.take()));
        self.inner.delete_queue_pair(self.id, self.serial, self.generation, memory);
    }
}

// The interrupt vector of a queue.

/// An interrupt vector of the controller.
#[derive(Clone)]
pub struct Vector {
    /// The index into the controller's MSI-X table.
    pub number: u16,
    /// The object that receives the interrupt.
    pub interrupt: Arc<dyn Interrupt>,
}

impl fmt::Debug for Vector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vector").field("number", &self.number).finish_non_exhaustive()
    }
}
