//! Buffers without a handle that are held until a flush completes, and dropped only then.
//!
//! Their wait ended early, or their future was dropped; their map was refused and could not be
//! undone in time; or a panic ended their clean-up, and they may have to be revoked first.
//!
//! Maps, revocations and waits check whether the oldest ticket here has completed, which costs them
//! one load while nothing is held.

use super::window::Addresses;
use crate::invalidate::Ticket;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::collections::btree_map::OccupiedEntry;
use core::mem::ManuallyDrop;
// Not those of `sync`: totals of the process, which order nothing.
use core::sync::atomic::AtomicU64 as Total;

/// When a device no longer reaches a buffer.
#[derive(Clone, Copy)]
pub(super) enum Due {
    /// When this ticket has completed.
    At(Ticket),
    /// It is mapped: a backend that panicked could not be asked to revoke it while the thread
    /// unwound.
    Revocation,
    /// Unknown: it is quarantined.
    Never,
}

impl Due {
    /// Returns the ticket, or one that has completed if there is something to be done first.
    fn ticket(self) -> Ticket {
        match self {
            Self::At(ticket) => ticket,
            Self::Revocation | Self::Never => Ticket::COMPLETED,
        }
    }

    fn is_unfinished(self) -> bool {
        !matches!(self, Self::At(_))
    }
}

/// A buffer that a device may reach until it is due. Dropping it leaks the buffer.
pub(super) struct PendingRelease {
    pub(super) payload: ManuallyDrop<Box<dyn Send>>,
    pub(super) addresses: Addresses,
    pub(super) due: Due,
    /// Whether it was mapped. Otherwise its map was refused, and this is the rest of the attempt.
    pub(super) mapped: bool,
}

/// Buffers of all domains that are held until a flush completes, in bytes.
static DEFERRED: Total = Total::new(0);
/// Buffers of all domains that are never released, in bytes.
static QUARANTINED: Total = Total::new(0);

/// Returns how many bytes of buffers all domains of this process hold until a late flush completes:
/// the sum of [`DomainStats::deferred_bytes`](super::DomainStats::deferred_bytes), including
/// domains to which the program no longer has a handle. Each buffer keeps its owner alive, such as
/// its arena.
pub fn deferred_bytes() -> u64 {
    DEFERRED.load(Ordering::Relaxed)
}

/// Returns how many bytes of buffers all domains of this process have quarantined: a device may
/// reach them for good. What owners of memory have quarantined by themselves
/// ([`Domain::count_quarantined`](super::Domain::count_quarantined)) is not in it.
pub fn quarantined_bytes() -> u64 {
    QUARANTINED.load(Ordering::Relaxed)
}

/// Counts a buffer that a domain never releases.
pub(super) fn count_quarantined(bytes: u64) {
    QUARANTINED.fetch_add(bytes, Ordering::Relaxed);
}

pub(super) struct PendingReleases {
    held: Mutex<Queue>,
    /// The first ticket of those held; [`Ticket::NEVER`] if there are none.
    first: AtomicU64,
    /// Whether a thread is releasing: a payload that is dropped may release others, which would
    /// nest without a bound.
    releasing: AtomicBool,
    /// Whether the domain is to be woken by the backend, or a thread is arranging that.
    watched: AtomicBool,
}

type Key = (Ticket, u64);

#[derive(Default)]
struct Queue {
    /// Keyed by ticket, and a number that distinguishes the entries of one ticket.
    by_ticket: BTreeMap<Key, PendingRelease>,
    next: u64,
    bytes: u64,
}

impl Queue {
    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        DEFERRED.fetch_add(bytes, Ordering::Relaxed);
    }

    fn remove(&mut self, bytes: u64) {
        self.bytes -= bytes;
        DEFERRED.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Queue {
    /// Leaves the buffers leaked: the flushes that they wait for can no longer be observed.
    fn drop(&mut self) {
        count_quarantined(self.bytes);
        self.remove(self.bytes);
    }
}

/// The right to release, until it is dropped.
pub(super) struct Releasing<'p>(&'p AtomicBool);

impl Drop for Releasing<'_> {
    fn drop(&mut self) {
        // A read-modify-write: a thread that looks for due buffers from here on sees what a caller
        // that was refused before saw.
        self.0.swap(false, Ordering::AcqRel);
    }
}

impl PendingReleases {
    pub(super) fn new() -> Self {
        Self {
            held: Mutex::new(Queue::default()),
            first: AtomicU64::new(Ticket::NEVER.0),
            releasing: AtomicBool::new(false),
            watched: AtomicBool::new(false),
        }
    }

    #[inline]
    pub(super) fn first(&self) -> Ticket {
        Ticket(self.first.load(Ordering::Acquire))
    }

    pub(super) fn push(&self, release: PendingRelease) {
        let mut held = self.held.lock();
        let key = (release.due.ticket(), held.next);
        held.next += 1;
        held.add(release.addresses.iova.len());
        held.by_ticket.insert(key, release);
        self.update_first(&held);
    }

    /// Returns the right to release, unless another call has it, which checks again after it has
    /// ended.
    pub(super) fn try_begin(&self) -> Option<Releasing<'_>> {
        (!self.releasing.swap(true, Ordering::AcqRel)).then(|| Releasing(&self.releasing))
    }

    /// Returns whether the caller is to arrange that the domain is woken: to exactly one thread
    /// until [`unwatch`](Self::unwatch).
    pub(super) fn try_watch(&self) -> bool {
        !self.watched.swap(true, Ordering::AcqRel)
    }

    /// Ends the watch. The caller checks for held buffers afterwards: others have left that to it.
    pub(super) fn unwatch(&self) {
        // A read-modify-write, as in `Releasing`.
        self.watched.swap(false, Ordering::AcqRel);
    }

    /// Removes the first for which something is to be done before it has a ticket. O(log buffers
    /// held).
    pub(super) fn pop_unfinished(&self) -> Option<PendingRelease> {
        let mut held = self.held.lock();
        let unfinished =
            |first: &OccupiedEntry<'_, Key, PendingRelease>| first.get().due.is_unfinished();
        let release = held.by_ticket.first_entry().filter(unfinished)?.remove();
        held.remove(release.addresses.iova.len());
        self.update_first(&held);
        Some(release)
    }

    /// Removes the one with the first ticket, if that is `ready` and nothing is to be done before.
    /// O(log buffers held).
    pub(super) fn pop(&self, ready: impl Fn(Ticket) -> bool) -> Option<PendingRelease> {
        let mut held = self.held.lock();
        let ready = |first: &OccupiedEntry<'_, Key, PendingRelease>| {
            !first.get().due.is_unfinished() && ready(first.key().0)
        };
        let first = held.by_ticket.first_entry().filter(ready)?;
        let release = first.remove();
        held.remove(release.addresses.iova.len());
        self.update_first(&held);
        Some(release)
    }

    fn update_first(&self, held: &Queue) {
        let first =
            held.by_ticket.first_key_value().map_or(Ticket::NEVER, |((ticket, _), _)| *ticket);
        self.first.store(first.0, Ordering::Release);
    }

    /// Returns the number of buffers.
    pub(super) fn len(&self) -> u64 {
        self.held.lock().by_ticket.len() as u64
    }

    /// Returns the number of buffers and their bytes.
    pub(super) fn counts(&self) -> (u64, u64) {
        let held = self.held.lock();
        (held.by_ticket.len() as u64, held.bytes)
    }
}
