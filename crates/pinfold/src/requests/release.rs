//! The release of a request, from its completion to the return of its payloads: revoked, held until
//! the flush has completed, returned; late, if it does not complete in time.

use super::signal::{Signal, Time};
use super::slots::{Part, Parts, Token};
use super::{End, Ended, Policy, Requests};
use pinfold_core::domain::{BackendError, DomainLocal, NotQuiesced, Pinned, Revoked};
use pinfold_core::invalidate::{Ticket, WaitError, WaitLimit};
use std::io;
use std::os::fd::BorrowedFd;
use std::task::Poll;
use std::time::{Duration, Instant};

/// A request that the device no longer works on, until it is revoked.
pub(super) struct Completed<P: Pinned, const N: usize> {
    pub(super) token: Token,
    pub(super) parts: Parts<P, N>,
}

/// A request that has been revoked, until its flush has completed.
pub(super) struct Held<P: Pinned, const N: usize> {
    token: Token,
    /// When it was revoked.
    since: Time,
    /// Whether it has been reported as late.
    is_late: bool,
    /// Payloads left mapped by a panicking call of the domain are quarantined.
    parts: Parts<P, N>,
    /// Why payloads of it are lost, if any are.
    lost: Option<Box<BackendError>>,
}

impl<P: Pinned, const N: usize> Held<P, N> {
    /// Returns one whose payloads are to be revoked.
    #[inline(always)]
    fn new(Completed { token, parts }: Completed<P, N>, since: Time) -> Self {
        Self { token, since, is_late: false, parts, lost: None }
    }

    fn revoked(&self) -> impl Iterator<Item = &Revoked<P>> {
        self.parts.iter().filter_map(|part| match part {
            Part::Revoked(revoked) => Some(revoked),
            Part::Mapped(..) | Part::Quiesced(_) | Part::Lost => None,
        })
    }

    /// Whether no flush is to be waited for: it has none, or none that was requested.
    fn waits_for_nothing(&self) -> bool {
        let known = [Ticket::COMPLETED, Ticket::NEVER];
        self.revoked().all(|revoked| known.contains(&revoked.ticket()))
    }

    /// Whether all flushes have ended: completed, or failed.
    fn has_ended(&self) -> bool {
        self.revoked().all(|revoked| match revoked.check() {
            Poll::Ready(Ok(())) => true,
            // The deadline of the backend: the loop has its own.
            Poll::Ready(Err(error)) => error.late_ticket().is_none(),
            Poll::Pending => false,
        })
    }

    /// Waits for all flushes, for at most `limit`. Returns whether all have ended.
    ///
    /// Also of those behind a late one each is waited for, without further time: what no wait has
    /// found late waits when it is dropped, and is woken by the deadline of the backend.
    fn wait(&mut self, domain: &mut DomainLocal, limit: WaitLimit) -> bool {
        let (mut limit, mut all_ended) = (limit, true);
        for place in self.parts.iter_mut() {
            let revoked = match std::mem::replace(place, Part::Lost) {
                Part::Revoked(revoked) => revoked,
                other @ (Part::Mapped(..) | Part::Quiesced(_) | Part::Lost) => {
                    *place = other;
                    continue;
                }
            };
            match domain.wait_for(revoked, limit) {
                Ok(payload) => *place = Part::Quiesced(payload),
                Err(NotQuiesced { revoked: Some(revoked), .. }) => {
                    *place = Part::Revoked(revoked);
                    (limit, all_ended) = (NO_TIME, false);
                }
                Err(NotQuiesced { revoked: None, error }) => self.lost = Some(Box::new(error)),
            }
        }
        all_ended
    }

    /// Returns the report of one whose flush has ended: takes its payloads out.
    #[inline]
    fn end(&mut self, domain: &mut DomainLocal) -> Ended<P, N> {
        let (mut lost, mut is_kept) = (self.lost.take().map(|error| *error), false);
        let mut payloads = [const { None }; N];
        for (place, part) in payloads.iter_mut().zip(self.parts.drain()) {
            match part {
                Part::Quiesced(payload) => *place = Some(payload),
                Part::Lost => is_kept = true,
                Part::Mapped(mapping, _) => {
                    is_kept = true;
                    mapping.quarantine();
                }
                Part::Revoked(revoked) => {
                    let waited = domain.poll(revoked).or_else(|revoked| {
                        // Its flush has failed, and it is quarantined.
                        domain.wait_for(revoked, NO_TIME)
                    });
                    *place = waited.map_err(|failed| lost = Some(failed.error)).ok();
                }
            }
        }
        if is_kept && lost.is_none() {
            // A call of the domain has panicked with it, or before it.
            lost = Some(BackendError::NotRevoked);
        }
        Ended { token: self.token, payloads, end: lost.map_or(End::Quiesced, End::Lost) }
    }

    fn report_late(&mut self) -> Ended<P, N> {
        self.is_late = true;
        let ticket = self.revoked().map(Revoked::ticket).max().unwrap_or(Ticket::NEVER);
        let waited_ns = u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let error = WaitError::TimedOut { ticket, waited_ns, polls: 0 }.into();
        Ended { token: self.token, payloads: [const { None }; N], end: End::Late(error) }
    }
}

impl<P, const N: usize> Ended<P, N> {
    /// Returns the report of a request whose payloads a call of the domain has kept.
    fn lost(token: Token) -> Self {
        Self { token, payloads: [const { None }; N], end: End::Lost(BackendError::NotRevoked) }
    }
}

/// A request whose slot is free. Dropped only where the domain panics before its report.
struct Unreported<'e, P, const N: usize>(Token, &'e mut Vec<Ended<P, N>>);

impl<P, const N: usize> Drop for Unreported<'_, P, N> {
    #[cold]
    fn drop(&mut self) {
        self.1.push(Ended::lost(self.0));
    }
}

/// Appends what `end` returns, or, should it panic, that the request is lost.
#[inline]
fn report<P, const N: usize>(
    token: Token,
    ended: &mut Vec<Ended<P, N>>,
    end: impl FnOnce() -> Ended<P, N>,
) {
    let unreported = Unreported(token, ended);
    let report = end();
    unreported.1.push(report);
    std::mem::forget(unreported);
}

/// A look without a wait.
const NO_TIME: WaitLimit = WaitLimit::within(Duration::ZERO);

impl<P: Pinned, const N: usize> Requests<P, N> {
    /// Revokes completed requests, as the policy says, and appends requests that have ended or
    /// become late to `ended`.
    ///
    /// With [`Policy::Strict`] it waits for the flush of these revocations, up to
    /// [`Limits::flush`](super::Limits::flush); else it never waits. (A limit of the domain on held
    /// memory may make a revocation wait.)
    #[inline]
    pub fn poll(&mut self, ended: &mut Vec<Ended<P, N>>) {
        self.poll_within(self.flush_limit, ended);
    }

    /// Polls; `limit` is that of a strict wait, from now.
    #[inline]
    fn poll_within(&mut self, limit: Duration, ended: &mut Vec<Ended<P, N>>) {
        if self.revoke(ended) && self.policy == Policy::Strict {
            self.await_all(limit, ended);
        }
        self.release(ended);
    }

    /// Polls, and if that finds nothing waits until the first flush has completed, a request has
    /// become late, or `limit` has passed, which also ends the wait of [`Policy::Strict`]. Returns at
    /// once while nothing is held: it does not wait for the device.
    pub fn wait(&mut self, limit: Duration, ended: &mut Vec<Ended<P, N>>) {
        let (began, before) = (Instant::now(), ended.len());
        self.poll_within(limit.min(self.flush_limit), ended);
        if ended.len() > before {
            return;
        }
        let due = self.until_late().unwrap_or(Duration::MAX);
        if let Some(first) = self.held.front_mut() {
            let left = limit.saturating_sub(began.elapsed());
            first.wait(&mut self.domain, WaitLimit::within(left.min(due)));
            self.release(ended);
        }
    }

    /// Prepares for a sleep, and returns the loop's descriptor, always the same: it becomes readable
    /// when a poll may find something, or when a flush has become late; at once, where that is so
    /// already. The driver then polls, and calls this again before it sleeps again, which also clears
    /// the descriptor.
    ///
    /// It does not tell of the device. The loop owns the descriptor: it is not to be read.
    ///
    /// # Errors
    /// The system's: the process has too many descriptors open. Only the first call returns one.
    pub fn arm(&mut self) -> io::Result<BorrowedFd<'_>> {
        // A wait that has found the flush late has the backend wake at its end, and not, over and
        // over, because its own deadline has passed.
        let first = self.held.front_mut();
        let has_ended = first.is_some_and(|first| first.wait(&mut self.domain, NO_TIME));
        let now = Some(Duration::ZERO);
        let due = if has_ended || !self.completed.is_empty() { now } else { self.until_late() };
        let signal = Signal::set_in(&mut self.signal, due)?;
        if let Some(first) = self.held.front().filter(|_| due != now) {
            first.revoked().for_each(|revoked| revoked.wake(signal.waker()));
            // It may have ended before the waker was registered.
            if first.has_ended() {
                signal.set(now)?;
            }
        }
        Ok(signal.fd())
    }

    /// Like [`arm`](Self::arm), for a driver that has kept reports for its next poll: the
    /// descriptor is readable at once.
    ///
    /// # Errors
    /// As for `arm`.
    pub fn arm_now(&mut self) -> io::Result<BorrowedFd<'_>> {
        Ok(Signal::set_in(&mut self.signal, Some(Duration::ZERO))?.fd())
    }

    /// Revokes completed requests. Returns whether anything has to be waited for.
    #[inline]
    fn revoke(&mut self, ended: &mut Vec<Ended<P, N>>) -> bool {
        if self.completed.is_empty() {
            return false;
        }
        let held = self.held.len();
        match self.policy {
            Policy::Static => {
                while let Some(one) = self.completed.pop_front() {
                    self.end_fixed(one, ended);
                }
            }
            Policy::Revoke => {
                let since = Time::now();
                while !self.completed.is_empty() {
                    self.revoke_by_one_flush(1, since, ended);
                }
            }
            Policy::Strict | Policy::Batch => {
                self.revoke_by_one_flush(self.completed.len(), Time::now(), ended);
            }
        }
        self.held.len() > held
    }

    /// Returns the payloads of a request that stay mapped.
    #[inline]
    fn end_fixed(&mut self, request: Completed<P, N>, ended: &mut Vec<Ended<P, N>>) {
        let Completed { token, mut parts } = request;
        self.slots.free(token);
        report(token, ended, || {
            let (mut payloads, mut end) = ([const { None }; N], End::Quiesced);
            for (place, part) in payloads.iter_mut().zip(parts.drain()) {
                if let Part::Mapped(mapping, _) = part {
                    let unmapped = self.domain.unmap(mapping);
                    *place = unmapped.map_err(|error| end = End::Lost(error)).ok();
                }
            }
            Ended { token, payloads, end }
        });
        self.slots.give_back(parts);
    }

    /// Revokes the access of the first `count` completed requests. Those that wait for no flush end,
    /// the others are held.
    #[inline]
    fn revoke_by_one_flush(&mut self, count: usize, since: Time, ended: &mut Vec<Ended<P, N>>) {
        let first = self.held.len();
        // A request is held before its payloads are revoked: should the domain panic meanwhile, a
        // later poll still reports it.
        self.held.extend(self.completed.drain(..count).map(|one| Held::new(one, since)));
        let mappings = self.held.range_mut(first..).flat_map(|held| held.parts.take_mapped());
        self.domain.revoke_many(mappings, &mut self.revoked);
        let places = self.held.range_mut(first..).flat_map(|held| held.parts.iter_mut());
        for (place, revoked) in places.zip(self.revoked.drain(..)) {
            *place = Part::Revoked(revoked);
        }
        let mut at = first;
        while let Some(held) = self.held.get(at) {
            match held.waits_for_nothing().then(|| self.held.remove(at)).flatten() {
                Some(held) => self.finish(held, ended),
                None => at += 1,
            }
        }
    }

    /// Returns the payloads of a request whose flush has ended.
    #[inline]
    fn finish(&mut self, mut held: Held<P, N>, ended: &mut Vec<Ended<P, N>>) {
        self.slots.free(held.token);
        self.late -= usize::from(held.is_late);
        report(held.token, ended, || held.end(&mut self.domain));
        self.slots.give_back(held.parts);
    }

    /// Returns requests that have ended, and reports those that have become late. Flushes complete
    /// in the order of their requests, so one check is enough if the first has not.
    #[inline]
    fn release(&mut self, ended: &mut Vec<Ended<P, N>>) {
        while let Some(first) = self.held.pop_front_if(|first| first.has_ended()) {
            self.finish(first, ended);
        }
        if self.late < self.held.len() && self.is_any_late() {
            let limit = self.flush_limit;
            let late = self.held.iter_mut().filter(|held| !held.is_late);
            let late = late.take_while(|held| held.since.elapsed() >= limit);
            let before = ended.len();
            ended.extend(late.map(Held::report_late));
            self.late += ended.len() - before;
        }
    }

    /// Whether a request is late that was not reported. Reads the exact clock only where that may
    /// be.
    fn is_any_late(&self) -> bool {
        let next = self.held.iter().find(|held| !held.is_late);
        next.is_some_and(|next| {
            next.since.may_be_older_than(self.flush_limit)
                && next.since.elapsed() >= self.flush_limit
        })
    }

    /// Returns how long it takes until the next request is late; `None` if none can become late.
    fn until_late(&self) -> Option<Duration> {
        if self.late == self.held.len() {
            return None;
        }
        let next = self.held.iter().find(|held| !held.is_late)?;
        Some(self.flush_limit.saturating_sub(next.since.elapsed()))
    }

    /// Waits for all that is held, up to `limit` from now.
    fn await_all(&mut self, limit: Duration, ended: &mut Vec<Ended<P, N>>) {
        let began = Instant::now();
        while let Some(first) = self.held.pop_front_if(|first| {
            let left = || WaitLimit::within(limit.saturating_sub(began.elapsed()));
            // Waited for in place: should the domain panic, a later poll reports it.
            first.has_ended() || first.wait(&mut self.domain, left())
        }) {
            self.finish(first, ended);
        }
    }

    /// Revokes one request, waits for its flush, and reports how it ended.
    pub(super) fn end_now(&mut self, request: Completed<P, N>) -> Ended<P, N> {
        let token = request.token;
        // Before the domain is called: should that panic, a later poll reports the request.
        self.held.push_back(Held::new(request, Time::now()));
        let limit = WaitLimit::within(self.flush_limit);
        let (domain, revoked) = (&mut self.domain, &mut self.revoked);
        let ended = self.held.pop_back_if(|held| {
            domain.revoke_many(held.parts.take_mapped(), revoked);
            for (place, revoked) in held.parts.iter_mut().zip(revoked.drain(..)) {
                *place = Part::Revoked(revoked);
            }
            held.wait(domain, limit)
        });
        match (ended, self.held.back_mut()) {
            (Some(mut held), _) => {
                self.slots.free(token);
                let ended = held.end(&mut self.domain);
                self.slots.give_back(held.parts);
                ended
            }
            (None, Some(held)) => {
                self.late += 1;
                held.report_late()
            }
            // It was held.
            (None, None) => Ended::lost(token),
        }
    }

    /// Revokes all completed requests, waits for all flushes, for at most `limit` altogether, and
    /// drops the payloads. Late ones stay with the domain.
    pub(super) fn end_all_within(&mut self, limit: Duration) {
        let began = Instant::now();
        let mut ended = Vec::new();
        // One flush for all: each may wait for the domain's limit on held memory.
        match self.policy {
            Policy::Static => _ = self.revoke(&mut ended),
            _ => self.revoke_by_one_flush(self.completed.len(), Time::now(), &mut ended),
        }
        for mut held in std::mem::take(&mut self.held) {
            let left = limit.saturating_sub(began.elapsed());
            // A flush that a wait has found late is not waited for again on drop.
            held.wait(&mut self.domain, WaitLimit::within(left));
            held.parts.quarantine();
        }
    }

    /// Abandons all completed and held requests without a wait, and without a call of a backend
    /// that has panicked: those not revoked are quarantined, the rest stays with the domain.
    pub(super) fn abandon_all(&mut self) {
        self.completed.drain(..).for_each(|one| one.parts.quarantine());
        for mut held in self.held.drain(..) {
            for part in held.parts.drain() {
                match part {
                    // Its future does not wait.
                    Part::Revoked(revoked) => drop(revoked.quiesced()),
                    Part::Mapped(mapping, _) => mapping.quarantine(),
                    Part::Quiesced(_) | Part::Lost => {}
                }
            }
        }
    }
}
