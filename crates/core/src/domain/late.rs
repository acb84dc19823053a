//! Buffers whose flush is late: held by the domain until it completes, and only then dropped.
//!
//! Maps, revocations and waits check whether the oldest ticket here has completed, which costs them
//! one load while nothing is held.

use super::owner::{Anyone, Caller};
use super::space::{Domain, Space};
use super::window::{Addresses, Origin};
use crate::drop_guard::{CleanUp, DropGuard};
use crate::invalidate::Ticket;
use crate::known_bad::{self, Mistake};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::collections::btree_map::OccupiedEntry;
use core::mem::ManuallyDrop;
use core::task::Poll;

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
    /// Whether it was mapped. Otherwise it was refused, and this is what is left of the attempt.
    pub(super) mapped: bool,
}

pub(super) struct PendingReleases {
    held: Mutex<Queue>,
    /// The first ticket of those held; [`Ticket::NEVER`] if there are none.
    first: AtomicU64,
    /// Whether a thread is releasing: a payload that is dropped may release others, which would
    /// nest without a bound.
    releasing: AtomicBool,
}

type Key = (Ticket, u64);

#[derive(Default)]
struct Queue {
    /// By their tickets, and a number that tells those of one ticket apart.
    by_ticket: BTreeMap<Key, PendingRelease>,
    next: u64,
    bytes: u64,
}

/// The right to release, until it is dropped.
pub(super) struct Releasing<'p>(&'p AtomicBool);

impl Drop for Releasing<'_> {
    fn drop(&mut self) {
        // A read-modify-write: who looks for what is due from here on sees what a caller saw that
        // was refused before.
        self.0.swap(false, Ordering::AcqRel);
    }
}

impl PendingReleases {
    pub(super) fn new() -> Self {
        Self {
            held: Mutex::new(Queue::default()),
            first: AtomicU64::new(Ticket::NEVER.0),
            releasing: AtomicBool::new(false),
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
        held.bytes += release.addresses.iova.len();
        held.by_ticket.insert(key, release);
        self.update_first(&held);
    }

    /// Returns the right to release, unless another call has it: that one looks again after it has
    /// ended.
    pub(super) fn try_begin(&self) -> Option<Releasing<'_>> {
        (!self.releasing.swap(true, Ordering::AcqRel)).then(|| Releasing(&self.releasing))
    }

    /// Removes the first for which something is to be done before it has a ticket. O(log buffers
    /// held).
    pub(super) fn pop_unfinished(&self) -> Option<PendingRelease> {
        let mut held = self.held.lock();
        let unfinished =
            |first: &OccupiedEntry<'_, Key, PendingRelease>| first.get().due.is_unfinished();
        let release = held.by_ticket.first_entry().filter(unfinished)?.remove();
        held.bytes -= release.addresses.iova.len();
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
        held.bytes -= release.addresses.iova.len();
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

/// A buffer of the domain while the backend is called for it.
struct Abandoned<'d>(&'d Space, PendingRelease);

impl CleanUp for Abandoned<'_> {
    fn clean_up(self) {
        // What is dropped stays leaked.
        self.0.count_quarantined(self.1.addresses.iova.len());
    }
}

impl Domain {
    /// Drops the buffers whose late flush has completed, and returns how many are still held. O(1)
    /// while none is.
    ///
    /// Maps, revocations and waits do this too; a program that makes none calls it to recover its
    /// memory.
    pub fn release_late(&self) -> u64 {
        self.space.release_late()
    }
}

impl Space {
    /// Returns the addresses of a mapping that no device can reach.
    #[inline(always)]
    pub(super) fn finish_unmap(&self, caller: &mut impl Caller, addresses: Addresses) {
        match addresses.origin {
            Origin::Space if known_bad::makes(Mistake::IovaEarly) => {}
            Origin::Window(share) if known_bad::makes(Mistake::WindowEarly) => {
                self.close_window(share.into_shared().into_inner());
            }
            _ => caller.release(self, addresses),
        }
    }

    /// Releases the addresses of a mapping that is not quiesced, if that mistake is switched on.
    pub(super) fn release_if_mistaken(&self, Addresses { iova, origin }: &Addresses) {
        match origin {
            Origin::Space if known_bad::makes(Mistake::IovaEarly) => self.free_iova(*iova),
            Origin::Window(share) if known_bad::makes(Mistake::WindowEarly) => {
                share.window().give_back(*iova)
            }
            _ => {}
        }
    }

    /// Takes over a buffer that a device may still reach: until it is `due`, or for good
    /// (quarantined). `mapped` is false for what is left of a map that was refused.
    pub(super) fn keep_reachable<P: Send + 'static>(
        &self,
        payload: P,
        addresses: Addresses,
        due: Due,
        mapped: bool,
    ) {
        if matches!(due, Due::Never) {
            core::mem::forget(payload);
            return self.count_quarantined(addresses.iova.len());
        }
        let payload = ManuallyDrop::new(Box::new(payload) as Box<dyn Send>);
        self.pending.push(PendingRelease { payload, addresses, due, mapped });
    }

    /// Does what a panic of the backend has left undone, and returns the buffer. Should it
    /// panic again, the buffer is quarantined.
    fn make_up_for(&self, release: PendingRelease) -> PendingRelease {
        let mut release = DropGuard::new(Abandoned(self, release));
        let PendingRelease { addresses, due, .. } = &mut release.1;
        *due = match *due {
            Due::Revocation => {
                self.counts().count_revoked(0);
                let revoked = self.call(|backend| {
                    backend.revoke(&mut core::iter::once((addresses.iova, addresses.pin())))
                });
                revoked.map_or(Due::Never, Due::At)
            }
            known => known,
        };
        release.into_inner().1
    }

    /// Drops what is late and has completed, as [`Domain::release_late`] does.
    #[inline]
    pub(super) fn release_late(&self) -> u64 {
        match self.pending.first() {
            Ticket::NEVER => 0,
            first => self.release_from(first),
        }
    }

    /// Drops what is late and has completed, if the `first` of it has.
    #[cold]
    fn release_from(&self, mut first: Ticket) -> u64 {
        while first != Ticket::NEVER {
            let failed = match self.call(|backend| backend.check(first)) {
                Poll::Ready(Ok(())) => false,
                Poll::Ready(Err(error)) if error.late_ticket().is_none() => true,
                Poll::Ready(Err(_)) | Poll::Pending => break,
            };
            let Some(releasing) = self.pending.try_begin() else { break };
            while let Some(release) = self.pending.pop_unfinished() {
                let release = self.make_up_for(release);
                if matches!(release.due, Due::Never) {
                    self.count_quarantined(release.addresses.iova.len());
                } else {
                    self.pending.push(release);
                }
            }
            // One by one: a drop may do anything, so it runs without the lock.
            while let Some(release) = self.pending.pop(|ticket| self.has_completed(ticket)) {
                if release.mapped {
                    self.counts().count_unmapped();
                }
                // Dropped after its addresses are returned, also if the backend panics meanwhile.
                let _payload = ManuallyDrop::into_inner(release.payload);
                self.finish_unmap(&mut Anyone, release.addresses);
            }
            while failed && let Some(release) = self.pending.pop(|_| true) {
                self.count_quarantined(release.addresses.iova.len());
            }
            drop(releasing);
            // What another call found due meanwhile, it left to this one.
            first = self.pending.first();
        }
        self.pending.len()
    }
}
