//! Owners: one thread's handle of a domain, with its mappings and its tickets.
//!
//! A ticket stands for the mappings of one pf_revoke_many() until no device can reach their memory.
//! They are kept here by the ticket's number: pf_quiesced() and pf_wait() hand the memory back, that
//! is, end its use, after which pf_free() accepts it. Where the flush never completes the domain
//! quarantines it: its use does not end, so it can neither be freed nor unregistered.

use crate::domain::{DOMAINS, Lookup, State, pf_domain_t};
use crate::failure::{Counted, Failure, call, check_out, fail, store};
use crate::handed::Handed;
use crate::handle::Table;
use crate::region::Span;
use crate::slots::Slots;
use pinfold::{BackendError, DomainLocal, NotQuiesced, Revoked, Ticket, Unrevoked, WaitLimit};
use pinfold_nvme::EventFd;
use std::collections::{TryReserveError, VecDeque};
use std::ffi::c_int;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Wake, Waker};
use std::time::Duration;

/// One thread's handle of a domain, for mappings.
pub struct pf_owner_t {
    /// The descriptor of pf_quiesce_fd(). Before the tickets, whose descriptor it is.
    handed: Option<Handed>,
    /// Before `state`, the domain of which it is.
    pub(crate) local: DomainLocal,
    pub(crate) mappings: Slots<Unrevoked<Span>>,
    tickets: Tickets,
    pub(crate) lookup: Lookup,
    pub(crate) state: Arc<State>,
}

/// A ticket, which a thread waits for until memory is its own again: see pf_revoke_many(). Valid
/// for the owner that made it. 0 is none.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct pf_ticket_t {
    /// Its number, greater than that of the owner's ticket before. No two tickets have one number.
    pub seq: u64,
}

pub(crate) static OWNERS: Table<pf_owner_t> = Table::new(7, "owner");

/// A wait that only looks.
const NOW: WaitLimit = WaitLimit::within(Duration::ZERO);

/// The mappings of one ticket. None if their memory was quarantined, which is reported for good.
struct Batch {
    seq: u64,
    revoked: Vec<Revoked<Span>>,
    /// The index of a mapping whose ticket is the last to complete.
    last: usize,
    /// Mappings that were quarantined.
    lost: usize,
    /// The announcement of the ticket by the file descriptor.
    announced: Announced,
}

/// The announcement of a ticket by an owner's file descriptor, in the order in which it happens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Announced {
    Nothing,
    /// The flush is past its deadline; its end is announced, too.
    Late,
    End,
}

impl Batch {
    /// Returns how a wait for all would end now.
    fn check(&self) -> Poll<Result<(), BackendError>> {
        self.revoked.get(self.last).map_or(Poll::Ready(Ok(())), Revoked::check)
    }

    fn is_lost(&self) -> bool {
        self.lost > 0 && self.revoked.is_empty()
    }

    /// Returns the current announcement of it.
    fn news(&self) -> Announced {
        match self.check() {
            Poll::Pending => Announced::Nothing,
            Poll::Ready(Err(error)) if error.late_ticket().is_some() => Announced::Late,
            Poll::Ready(_) => Announced::End,
        }
    }

    /// Waits for its last mapping, which then counts as late where it has not ended. Returns
    /// whether it has.
    fn wait(&mut self, local: &mut DomainLocal, limit: WaitLimit) -> bool {
        if self.last >= self.revoked.len() {
            return true;
        }
        match local.wait_for(self.revoked.swap_remove(self.last), limit) {
            Ok(span) => drop(span),
            Err(NotQuiesced { revoked: Some(late), .. }) => {
                self.last = self.revoked.len();
                self.revoked.push(late);
                return false;
            }
            Err(NotQuiesced { revoked: None, .. }) => self.lost += 1,
        }
        self.last = last_of(&self.revoked);
        true
    }
}

/// An owner's tickets that have not been handed back.
struct Tickets {
    /// In ascending order of their numbers.
    batches: VecDeque<Batch>,
    numbers: Numbers,
    /// Empty lists for the next batches.
    spare: Vec<Vec<Revoked<Span>>>,
    announcer: Option<(Arc<Announcer>, Waker)>,
}

/// The numbers of an owner's tickets, in ranges that no other owner has. Each is a thousand times
/// as long as the one before, so that there are few, and that a process does not use them up: the
/// shortest is for 2^54 owners, and what is taken is at most a thousand times what is used.
struct Numbers {
    /// The numbers that were given, and the end of what is reserved.
    ranges: Vec<(Range<u64>, u64)>,
}

impl Numbers {
    const FIRST: u64 = 1 << 10;

    /// Returns a number that none was before.
    fn next(&mut self) -> u64 {
        /// The first number that no owner has. 0 is none.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        match self.ranges.last_mut() {
            Some((given, end)) if given.end < *end => {
                given.end += 1;
                given.end - 1
            }
            last => {
                let len = last.map_or(Self::FIRST, |(given, _)| {
                    (given.end - given.start).saturating_mul(1 << 10).min(1 << 40)
                });
                let start = NEXT.fetch_add(len, Ordering::Relaxed);
                self.ranges.push((start..start + 1, start + len));
                start
            }
        }
    }

    /// Returns whether it is the number of a ticket of this owner.
    fn were_given(&self, number: u64) -> bool {
        self.ranges.iter().rev().any(|(given, _)| given.contains(&number))
    }
}

/// Wakes by signalling an eventfd.
struct Announcer(EventFd);

impl Wake for Announcer {
    fn wake(self: Arc<Self>) {
        self.0.signal();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.signal();
    }
}

impl Announcer {
    fn new() -> Result<Self, Failure> {
        EventFd::new().map(Self).map_err(|error| no_eventfd(&error))
    }
}

#[cold]
fn no_eventfd(error: &std::io::Error) -> Failure {
    let errno = error.raw_os_error().unwrap_or(libc::EMFILE);
    Failure::new(errno, format!("cannot create an eventfd: {error}"))
}

impl Tickets {
    fn new() -> Self {
        let numbers = Numbers { ranges: Vec::new() };
        Self { batches: VecDeque::new(), numbers, spare: Vec::new(), announcer: None }
    }

    /// Finds a ticket. `None`: its memory has been handed back.
    ///
    /// # Errors
    /// `ESTALE`: it is none of this owner's.
    fn find(&self, ticket: pf_ticket_t) -> Result<Option<usize>, Failure> {
        let seq = ticket.seq;
        if !self.numbers.were_given(seq) {
            return Err(fail!(
                ESTALE,
                "ticket {seq:#x} is none of this owner: pass what pf_revoke_many stored"
            ));
        }
        // The oldest, most often.
        if self.batches.front().is_some_and(|batch| batch.seq == seq) {
            return Ok(Some(0));
        }
        Ok(self.batches.binary_search_by_key(&seq, |batch| batch.seq).ok())
    }

    /// Returns tickets and mappings whose memory has not been handed back, without lost ones.
    fn pending(&self) -> (usize, usize) {
        let pending = self.batches.iter().filter(|batch| !batch.is_lost());
        pending.fold((0, 0), |(tickets, mappings), batch| {
            (tickets + 1, mappings + batch.revoked.len())
        })
    }

    /// Hands the memory of a ticket back if no device can reach it. Returns whether it was.
    ///
    /// # Errors
    /// `EIO`: it is quarantined. `ETIMEDOUT`: the flush is past its deadline.
    fn settle(&mut self, local: &mut DomainLocal, at: usize) -> Result<bool, Failure> {
        let Some(batch) = self.batches.get_mut(at) else { return Ok(true) };
        if batch.is_lost() {
            return Err(lost(batch));
        }
        match batch.check() {
            Poll::Pending => return Ok(false),
            Poll::Ready(Ok(())) => {
                for revoked in batch.revoked.drain(..) {
                    // It has completed, as the last has.
                    drop(local.poll(revoked));
                }
            }
            Poll::Ready(Err(error)) if error.late_ticket().is_some() => return Err(late(batch)),
            Poll::Ready(Err(_)) => {
                for revoked in batch.revoked.drain(..) {
                    // Some may have completed before.
                    batch.lost += usize::from(local.wait_for(revoked, NOW).is_err());
                }
            }
        }
        self.finish(at).map(|()| true)
    }

    /// Ends a ticket of which nothing is left to wait for.
    fn finish(&mut self, at: usize) -> Result<(), Failure> {
        if let Some(batch) = self.batches.get(at).filter(|batch| batch.lost > 0) {
            return Err(lost(batch));
        }
        self.spare.extend(self.batches.remove(at).map(|batch| batch.revoked));
        Ok(())
    }

    /// Waits for a ticket for at most `limit`, and hands its memory back.
    ///
    /// # Errors
    /// As [`settle`](Self::settle); `ETIMEDOUT` also after `limit`.
    fn wait(
        &mut self,
        local: &mut DomainLocal,
        at: usize,
        limit: WaitLimit,
    ) -> Result<(), Failure> {
        let Some(batch) = self.batches.get_mut(at) else { return Ok(()) };
        if !batch.wait(local, limit) {
            return Err(late(batch));
        }
        // The others have completed before it, or with it.
        self.settle(local, at).map(drop)
    }

    /// Arms the descriptor: announces tickets that have ended or are late, and the next one that
    /// does. Tickets end in order. A late ticket is announced again when it ends.
    fn arm(&mut self, local: &mut DomainLocal) {
        let Some((announcer, waker)) = &self.announcer else { return };
        for batch in self.batches.iter_mut().filter(|batch| !batch.is_lost()) {
            while batch.announced != Announced::End {
                // Asked once: its deadline may pass between two questions.
                let news = batch.news();
                if news > batch.announced {
                    if news == Announced::Late {
                        // From now on only its end wakes.
                        batch.wait(local, NOW);
                    }
                    batch.announced = news;
                    announcer.0.signal();
                    continue;
                }
                if let Some(last) = batch.revoked.get(batch.last) {
                    last.wake(waker);
                }
                // It may have happened before it was to be woken.
                if batch.news() > batch.announced {
                    continue;
                }
                if batch.announced == Announced::Nothing {
                    return;
                }
                // The deadlines of the next ones are their own.
                break;
            }
        }
    }
}

/// Returns the index of one that completes last, if ever: those that need a flush have one ticket,
/// and the others have completed.
fn last_of(revoked: &[Revoked<Span>]) -> usize {
    revoked.iter().position(|one| one.ticket() != Ticket::COMPLETED).unwrap_or(0)
}

/// Refuses a number of mappings for which there is no memory.
#[cold]
pub(crate) fn no_room(what: &str, count: usize, error: &TryReserveError) -> Failure {
    fail!(ENOMEM, "cannot {what} {count} mappings: {error}; pass fewer in one call, or free memory")
}

#[cold]
fn late(batch: &Batch) -> Failure {
    let (seq, count) = (batch.seq, batch.revoked.len());
    fail!(
        ETIMEDOUT,
        "ticket {seq:#x}: its flush has not completed in time, and a device may still reach the memory of {}: it stays \
         in use; call pf_wait again",
        Counted(count as u64, "mapping")
    )
}

#[cold]
fn lost(batch: &Batch) -> Failure {
    let Batch { seq, lost, .. } = batch;
    fail!(
        EIO,
        "ticket {seq:#x}: its flush never completes, so a device may reach the memory of {} for good: it is \
         quarantined, and pf_free and pf_reg_destroy refuse it; pf_quarantine counts it",
        Counted(*lost as u64, "mapping")
    )
}

impl pf_owner_t {
    /// Makes room for a ticket of `names` mappings.
    ///
    /// # Errors
    /// `ENOMEM`: nothing has changed.
    #[inline(always)]
    pub(crate) fn reserve_ticket(&mut self, names: usize) -> Result<(), Failure> {
        let Tickets { spare, batches, .. } = &mut self.tickets;
        let most = names.min(self.mappings.live());
        let room = batches.try_reserve(1).and_then(|()| {
            // Each ticket's list is spare in the end.
            spare.try_reserve(batches.len() + 1)?;
            if spare.is_empty() {
                spare.push(Vec::new());
            }
            spare.last_mut().map_or(Ok(()), |list| list.try_reserve(most))
        });
        room.and_then(|()| self.mappings.reserve_claims(names))
            .map_err(|error| no_room("revoke", names, &error))
    }

    /// Revokes the mappings that were claimed, with one flush, and returns their ticket.
    pub(crate) fn revoke_claimed(&mut self) -> pf_ticket_t {
        let tickets = &mut self.tickets;
        let mut revoked = tickets.spare.pop().unwrap_or_default();
        self.local.revoke_many(self.mappings.take_claimed(), &mut revoked);
        let (seq, last) = (tickets.numbers.next(), last_of(&revoked));
        tickets.batches.push_back(Batch {
            seq,
            revoked,
            last,
            lost: 0,
            announced: Announced::Nothing,
        });
        tickets.arm(&mut self.local);
        pf_ticket_t { seq }
    }

    /// Yields the addresses of the mappings of the last ticket.
    pub(crate) fn last_revoked(&self) -> impl Iterator<Item = u64> {
        let last = self.tickets.batches.back();
        last.into_iter().flat_map(|batch| &batch.revoked).map(|one| one.iova().start().raw())
    }
}

/// Creates a thread's handle of a domain, for its mappings: no lock, and addresses of its own.
///
/// @domain: the domain.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EBADF; EFAULT (`out` is NULL); ENFILE (65,536 owners exist).
/// Thread: any. An owner is used by one thread at a time: a call beside another's gives EBUSY.
/// Ownership: it keeps the domain. Allocates. Ends with pf_owner_destroy(). Since 0.2.
///
/// # Safety
/// `out` is null, or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_owner_create(
    domain: *mut pf_domain_t,
    out: *mut *mut pf_owner_t,
) -> c_int {
    call(|| {
        check_out(out, "out")?;
        let state = Arc::clone(&DOMAINS.get(domain)?.state);
        let local = state.domain.local();
        let (mappings, tickets) = (Slots::new(), Tickets::new());
        let lookup = state.lookup();
        let owner = pf_owner_t { handed: None, local, mappings, tickets, lookup, state };
        let handle = OWNERS.insert(owner)?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// Destroys an owner. Memory of tickets that have completed is handed back; quarantined memory
/// stays so. The descriptor of pf_quiesce_fd() is closed.
///
/// @owner: the owner; NULL does nothing.
///
/// Return: 0, or -errno: EBUSY (mappings are live or tickets have not completed, and the message
/// counts them; or another thread is in a call with it); EBADF.
/// Thread: any. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_owner_destroy(owner: *mut pf_owner_t) -> c_int {
    call(|| {
        if owner.is_null() {
            return Ok(0);
        }
        drop(OWNERS.remove(owner, |owner| {
            let live = owner.mappings.live();
            if live == 0 {
                // From the back, because finished batches are removed from the list.
                for at in (0..owner.tickets.batches.len()).rev() {
                    // Late and lost mappings are counted below, or stay quarantined.
                    let _ = owner.tickets.settle(&mut owner.local, at);
                }
            }
            let (tickets, revoked) = owner.tickets.pending();
            if live == 0 && tickets == 0 {
                return Ok(());
            }
            Err(fail!(
                EBUSY,
                "the owner has {}, and {} with {} not handed back: call pf_unmap or pf_revoke_many, and pf_wait, first",
                Counted(live as u64, "live mapping"),
                Counted(tickets as u64, "ticket"),
                Counted(revoked as u64, "mapping")
            ))
        })?);
        Ok(0)
    })
}

/// Returns whether no device can reach the memory of a ticket any more, and then hands it back: it
/// can be read as the device left it, mapped again, and freed. Never waits.
///
/// @owner: the owner that revoked the mappings.
/// @ticket: what pf_revoke_many() stored. One that was handed back before stays 1.
///
/// Return: 1; 0: not yet; or -errno: ETIMEDOUT (the flush is past its deadline; it may still
/// complete, so ask again or call pf_wait()); EIO (it never completes: the memory is quarantined,
/// see pf_quarantine(); pf_free() of it stays EBUSY); ESTALE (no ticket of this owner); EBADF;
/// EBUSY (another thread is in a call with the owner).
/// Thread: the owner's. May allocate in a software domain. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_quiesced(owner: *mut pf_owner_t, ticket: pf_ticket_t) -> c_int {
    call(|| {
        let mut owner = OWNERS.get_mut(owner)?;
        let owner = &mut *owner;
        let Some(at) = owner.tickets.find(ticket)? else { return Ok(1) };
        let settled = owner.tickets.settle(&mut owner.local, at);
        owner.tickets.arm(&mut owner.local);
        settled.map(c_int::from)
    })
}

/// Waits until no device can reach the memory of a ticket, and hands it back.
///
/// @owner: the owner that revoked the mappings.
/// @ticket: what pf_revoke_many() stored. One that was handed back before needs no wait.
/// @ns: the longest wait in nanoseconds; UINT64_MAX: as long as it takes.
///
/// Return: 0, or -errno: ETIMEDOUT (the memory stays in use: call again); EIO (the flush never
/// completes: the memory is quarantined, see pf_quarantine(); pf_free() of it stays EBUSY); ESTALE
/// (no ticket of this owner); EBADF; EBUSY (another thread is in a call with the owner).
/// Thread: the owner's. May allocate in a software domain. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_wait(owner: *mut pf_owner_t, ticket: pf_ticket_t, ns: u64) -> c_int {
    call(|| {
        let mut owner = OWNERS.get_mut(owner)?;
        let owner = &mut *owner;
        let Some(at) = owner.tickets.find(ticket)? else { return Ok(0) };
        let limit = WaitLimit::within(Duration::from_nanos(ns));
        let waited = owner.tickets.wait(&mut owner.local, at, limit);
        owner.tickets.arm(&mut owner.local);
        waited.map(|()| 0)
    })
}

/// Returns an eventfd that becomes readable when a ticket of this owner has completed, failed, or
/// passed its deadline: for a program's own event loop. Nothing polls meanwhile.
///
/// When it is readable, read its 8 bytes and then ask pf_quiesced() about the oldest tickets, until
/// one is not 1. It may be readable although nothing has completed. A ticket that was ETIMEDOUT is
/// announced again when its flush completes or fails.
///
/// @owner: the owner.
///
/// Return: the file descriptor, each time the same, non-blocking; or -errno: EMFILE, ENFILE, EBADF,
/// EBUSY (another thread is in a call with the owner).
/// Thread: the owner's; the descriptor may be polled by any. Allocates the first time. Ownership:
/// the owner's, which closes it. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_quiesce_fd(owner: *mut pf_owner_t) -> c_int {
    call(|| {
        let mut owner = OWNERS.get_mut(owner)?;
        let pf_owner_t { tickets, local, handed, .. } = &mut *owner;
        if let Some(handed) = handed {
            return Ok(handed.fd());
        }
        let announcer = Arc::new(Announcer::new()?);
        let fd = Handed::of(handed, announcer.0.as_fd()).map_err(|error| no_eventfd(&error))?;
        tickets.announcer = Some((Arc::clone(&announcer), Waker::from(announcer)));
        tickets.arm(local);
        Ok(fd)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_tickets_have_one_number() {
        let (mut one, mut other) = (Numbers { ranges: Vec::new() }, Numbers { ranges: Vec::new() });
        let mut before = (0, 0);
        for _ in 0..3 * Numbers::FIRST {
            let (first, second) = (one.next(), other.next());
            assert!(first > before.0 && second > before.1);
            assert!(one.were_given(first) && !one.were_given(second) && !other.were_given(first));
            before = (first, second);
        }
        let (given, end) = one.ranges[0].clone();
        assert!(one.were_given(given.start) && given.end == end && !one.were_given(end));
        assert!(!one.were_given(0) && !one.were_given(before.0 + 1));
        assert_eq!(one.ranges.len(), 2);
    }
}
