//! The protected request loop: from the buffers of a request, through its mapping and its flush, to
//! the buffers again.
//!
//! [`Requests`] is a state machine beside a driver. It owns the payloads of requests for as long as
//! a device may reach them, and nothing else: it does not own the device, and knows neither
//! commands nor their retries and deadlines. The driver reports the progress of each request, and
//! gets the payloads back when no device reaches them.
//!
//! ```text
//!                     ┌─ refused ─▶ waits for the flush ────────────────▶ payloads
//! payloads ─ begin ─▶ at the device ─ completed ─▶ poll: revoked, held ─▶ poll, wait: payloads
//!                     └─ lost ─▶ quarantined ─ completed, stopped ─▶ as completed
//! ```
//!
//! ```
//! use pinfold::requests::{End, Limits, Policy, Requests};
//! use pinfold::{Access, Arena, Domain};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let device = domain.port().ok_or("only models have ports")?;
//! let arena = Arena::builder().size(4 << 20).build(&domain)?;
//! // At most 32 requests at the device, each of one buffer.
//! let mut requests = Requests::<_, 1>::new(&domain, Policy::Batch, 32, Limits::default())?;
//!
//! let token = requests.begin([(arena.alloc(4096)?, Access::WRITE)])?;
//! let segment = requests.segments(token)?.next().ok_or("a buffer has a segment")?;
//! device.write(segment.iova, b"a packet")?; // what the driver tells its device to do
//! requests.completed(token)?;
//!
//! let mut ended = Vec::new();
//! while ended.is_empty() {
//!     requests.poll(&mut ended);
//! }
//! for request in ended {
//!     assert!(matches!(request.end, End::Quiesced) && request.token == token);
//!     for mut buffer in request.payloads.into_iter().flatten() {
//!         assert_eq!(&buffer.as_slice()?[..8], b"a packet"); // no device reaches it
//!     }
//! }
//! assert!(device.write(segment.iova, b"too late").is_err());
//! # Ok(()) }
//! ```
//!
//! # The calls
//!
//! | call | effect |
//! | --- | --- |
//! | [`begin`](Requests::begin) | the payloads are mapped, all or none; the driver gets a [`Token`] and the [segments](Requests::segments) |
//! | [`refused`](Requests::refused): never submitted (a lost one was) | access is revoked, and the call waits for the flush: the payloads are returned |
//! | [`completed`](Requests::completed): the device no longer works on it | the next poll revokes access |
//! | [`lost`](Requests::lost): given up, and the device may still work on it | the payloads are quarantined: mapped, at addresses that nothing else gets |
//! | [`stopped`](Requests::stopped): the device is proven quiet | all requests at the device or lost are completed |
//! | [`poll`](Requests::poll), [`wait`](Requests::wait) | completed requests are revoked; quiesced ones are returned; late and lost ones are reported |
//!
//! # Rules
//!
//! - **Retries and deadlines of commands** are the driver's. The loop knows flushes only.
//! - **A token** is a slot and a generation, which tells the uses of a slot apart, and the number
//!   of its loop. The token of a request that has ended is refused by every call, and so is another
//!   loop's. A driver keeps its own record of a request in a table by [`Token::slot`]; the numbers
//!   that it gives to its device never come here.
//! - **`strict`** waits, in `poll`, until the flush has completed or [`Limits::flush`] has passed.
//!   The request is then *late*: it is reported as [`End::Late`] once, and returned by a later poll
//!   when its flush has completed. A late flush is not a lost request, under any policy: only a
//!   unit that has failed, or a revocation that has, makes one [`End::Lost`], and its payloads are
//!   quarantined by the domain.
//! - **`batch`** revokes all requests completed before a poll with one flush, **`revoke`** each
//!   with one of its own; neither waits. A request that is held for its flush does not count
//!   towards the depth. A driver of one request at a time therefore keeps its device busy with a
//!   second buffer: while the first is held, the second is at the device.
//! - **Static** payloads, which stay mapped for their lifetime, are not mapped, and come back
//!   without a flush. [`Policy::Static`] takes no others; the other policies take them beside
//!   others.
//! - **Directions** may be mixed, among requests and within one. A request has up to `N` payloads;
//!   one without any goes the same way, for the commands of a device that move no data.
//! - **A descriptor** ([`Requests::arm`]) becomes readable when a poll may find something, or when
//!   a flush has become late, on every backend.
//! - **Dropping the loop** quarantines and counts requests at the device and lost ones: nothing
//!   proves that the device has stopped. Completed requests are revoked; the drop waits
//!   [`DROP_LIMIT`] for all flushes together, and leaves the rest to the domain, which frees it
//!   when its flush has completed. (With [`Domain::set_held_limit`] the revocation itself may wait
//!   for the deadline of its flush.) While a thread unwinds it waits for nothing, and completed
//!   requests that are not revoked are quarantined too.
//! - **Memory** is allocated by [`Requests::new`], and by `arm` for its descriptor. `begin`, the
//!   calls of the driver, `poll` and `wait` allocate nothing, if the caller's `Vec` has room, the
//!   domain needs no further window or table page, and nothing fails.
//! - **A driver that takes payloads by value**, as that of an NVMe controller does, is
//!   [lent](Requests::begin_lent) those of a request, and gives them back with its completion.
//!
//! One thread at a time uses a loop; its calls take no lock of other threads' loops.
//!
//! [`Domain::set_held_limit`]: pinfold_core::domain::Domain::set_held_limit

mod lent;
mod release;
mod signal;
mod slots;
#[cfg(test)]
mod tests;

pub use lent::Lent;
pub use slots::{Token, TokenError};

use crate::{Access, Bidirectional, FromDevice, Segment, ToDevice, Unrevoked};
use pinfold_core::domain::{
    BackendError, Domain, DomainId, DomainLocal, MapError, Pinned, Revoked,
};
use pinfold_core::invalidate::WaitLimit;
use release::{Completed, Held};
use signal::Signal;
use slots::{Part, Parts, Slots, State};
use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

/// The longest wait of a dropped loop for the flushes of the requests that it holds, for all
/// together. A revocation that [`Domain::set_held_limit`] has wait is not part of it.
pub const DROP_LIMIT: Duration = Duration::from_millis(50);

/// When access to the payloads of a request ends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Policy {
    /// With its completion: a poll revokes completed requests by one flush, and waits for it.
    Strict,
    /// With its completion: one flush for each request; a later poll returns it.
    Revoke,
    /// With its completion: one flush for all that was completed before a poll; a later poll returns
    /// them.
    Batch,
    /// Never: the payloads stay mapped for their lifetime (memory of an arena with
    /// [`MappingPolicy::Whole`](crate::MappingPolicy::Whole)).
    Static,
}

/// The limits of a loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The number of requests beyond the depth that may be held for their flush, late or lost;
    /// `None`: as many as the depth.
    pub held: Option<usize>,
    /// The time limit of a flush, from the revocation, before its request is late.
    pub flush: Duration,
}

impl Default for Limits {
    /// Returns `held: None` and 5 s.
    fn default() -> Self {
        Self { held: None, flush: Duration::from_secs(5) }
    }
}

/// A request that has ended, or whose flush is late.
#[must_use = "it has the payloads"]
#[derive(Debug)]
pub struct Ended<P, const N: usize> {
    /// The request's. Unless it is [late](End::Late), all calls refuse it from now on.
    pub token: Token,
    /// The payloads in their order, if it is quiesced; `None` after the last.
    pub payloads: [Option<P>; N],
    /// The way it ended.
    pub end: End,
}

/// The end of a request for its payloads. Only the driver knows whether its command succeeded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum End {
    /// No device reaches its payloads, except those that stay mapped for their lifetime: they are
    /// returned.
    Quiesced,
    /// Its flush has not completed within [`Limits::flush`]. The loop holds the payloads: a later
    /// poll reports the request again, with another end.
    Late(BackendError),
    /// Its flush never completes: the payloads that are not returned are quarantined. After a panic
    /// in a call of the loop, of a backend or a payload's drop, it may also be that the domain drops
    /// them when their flush has completed.
    Lost(BackendError),
}

/// A request that was not begun, with its payloads.
#[derive(thiserror::Error)]
#[error("cannot begin a request: {refusal}")]
pub struct BeginError<P, const M: usize> {
    /// The payloads in their order. `None`: a device may still reach it
    /// ([`BackendError::stays_reachable`]), and the domain holds it until its flush completes, or it
    /// is quarantined.
    pub payloads: [Option<P>; M],
    /// The reason.
    #[source]
    pub refusal: Refusal,
}

impl<P, const M: usize> fmt::Debug for BeginError<P, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BeginError").field("refusal", &self.refusal).finish_non_exhaustive()
    }
}

/// Why a request was not begun.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The number of requests at the device has reached the depth.
    #[error("{depth} are at the device, the depth of the loop: end one first")]
    Depth {
        /// The depth.
        depth: usize,
    },
    /// All slots are in use.
    #[error(
        "all {slots} slots are in use: {in_flight} requests are at the device, {lost} are lost, and the others wait for \
         their flush: poll first, or reset the device and say that it has stopped"
    )]
    Slots {
        /// The number of slots.
        slots: usize,
        /// Requests at the device.
        in_flight: usize,
        /// Requests that are lost.
        lost: usize,
    },
    /// A payload has no access.
    #[error("payload {index} is for no access: pass Access::READ, Access::WRITE, or both")]
    NoAccess {
        /// Its number, from 0.
        index: usize,
    },
    /// A payload is not mapped for its lifetime, as [`Policy::Static`] requires.
    #[error(
        "payload {index} is not mapped for its lifetime and this access: allocate it from an arena of this domain with \
         MappingPolicy::Whole, or use another policy"
    )]
    NotStatic {
        /// Its number, from 0.
        index: usize,
    },
    /// The domain does not map a payload.
    #[error("payload {index}: {error}")]
    Map {
        /// Its number, from 0.
        index: usize,
        /// The domain's error.
        error: BackendError,
    },
}

/// A loop that cannot be created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NewError {
    /// The depth is 0, or there are too many slots.
    #[error(
        "a request loop of depth {depth} with {held} more requests held: the depth is at least 1, and both together are at most \
         {}",
        slots::MAX_SLOTS
    )]
    Slots {
        /// The depth.
        depth: usize,
        /// The number of further requests that may be held.
        held: usize,
    },
    /// There is no memory for its slots.
    #[error("cannot allocate {slots} slots of a request loop: use a smaller depth")]
    NoMemory {
        /// The number of requested slots.
        slots: usize,
    },
}

/// The requests of a driver: see the [module](self).
///
/// `N` is the number of payloads that a request has at most.
///
/// # Drop
/// A drop revokes what was completed, and waits for all flushes together for [`DROP_LIMIT`] at most.
/// Under a limit of the domain ([`Domain::set_held_limit`]) a revocation that exceeds it waits before
/// that, once, until the deadline of its flush: 5 s if the unit hangs and no other was set.
pub struct Requests<P: Pinned, const N: usize> {
    domain: DomainLocal,
    id: DomainId,
    policy: Policy,
    depth: usize,
    flush_limit: Duration,
    slots: Slots<P, N>,
    /// Requests that the next poll revokes.
    completed: VecDeque<Completed<P, N>>,
    /// Revoked, in the order of their flushes.
    held: VecDeque<Held<P, N>>,
    /// The number of those that were reported as late.
    late: usize,
    /// Empty between two calls: what one flush covers.
    revoked: Vec<Revoked<P>>,
    signal: Option<Signal>,
}

impl<P: Pinned, const N: usize> Requests<P, N> {
    /// Creates a loop for at most `depth` requests at the device, with a handle of `domain` of its
    /// own. Allocates all that it needs.
    ///
    /// # Errors
    /// [`NewError`].
    pub fn new(
        domain: &Domain,
        policy: Policy,
        depth: usize,
        limits: Limits,
    ) -> Result<Self, NewError> {
        let Limits { held, flush } = limits;
        let held = held.unwrap_or(depth);
        let slots = depth.saturating_add(held);
        if depth == 0 || slots > slots::MAX_SLOTS {
            return Err(NewError::Slots { depth, held });
        }
        let no_memory = |_| NewError::NoMemory { slots };
        let (mut completed, mut queue) = (VecDeque::new(), VecDeque::new());
        let mut revoked = Vec::new();
        completed.try_reserve_exact(slots).map_err(no_memory)?;
        queue.try_reserve_exact(slots).map_err(no_memory)?;
        revoked.try_reserve_exact(slots.saturating_mul(N)).map_err(no_memory)?;
        Ok(Self {
            domain: domain.local(),
            id: domain.id(),
            policy,
            depth,
            flush_limit: flush,
            slots: Slots::new(slots).map_err(no_memory)?,
            completed,
            held: queue,
            late: 0,
            revoked,
            signal: None,
        })
    }

    /// Returns how many requests are at the device: begun, and neither ended nor lost.
    pub fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }

    /// Returns how many requests the device no longer works on and the loop has neither returned nor
    /// reported as late: completed, or held for their flush.
    pub fn held(&self) -> usize {
        self.completed.len() + self.held.len() - self.late
    }

    /// Returns how many requests were reported as [late](End::Late), and have not been returned.
    pub fn late(&self) -> usize {
        self.late
    }

    /// Returns the number of slots: every [`Token::slot`] is below it.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Begins a request: maps each payload for its access, all or none.
    ///
    /// # Errors
    /// [`BeginError`], with the payloads: nothing has begun. Those that had been mapped are revoked
    /// with one flush, which is waited for up to [`Limits::flush`].
    #[inline]
    pub fn begin<const M: usize>(
        &mut self,
        payloads: [(P, Access); M],
    ) -> Result<Token, BeginError<P, M>> {
        let parts = self.map_all(payloads)?;
        Ok(self.slots.take(State::AtDevice(parts)))
    }

    /// Begins a request as [`begin`](Self::begin) does, and lends its payloads to a driver that takes
    /// them by value.
    ///
    /// # Errors
    /// As for `begin`.
    #[inline]
    pub fn begin_lent<const M: usize>(
        &mut self,
        payloads: [(P, Access); M],
    ) -> Result<Lent<P, N>, BeginError<P, M>> {
        let parts = self.map_all(payloads)?;
        let token = self.slots.take(State::Lent { is_lost: false });
        Ok(Lent::new(token, parts, self.id))
    }

    /// Maps all payloads of a request for which there is room.
    #[inline(always)]
    fn map_all<const M: usize>(
        &mut self,
        payloads: [(P, Access); M],
    ) -> Result<Parts<P, N>, BeginError<P, M>> {
        const { assert!(M <= N, "more payloads than a request of this loop has") };
        if let Some(refusal) = self.no_room() {
            return Err(BeginError {
                payloads: payloads.map(|(payload, _)| Some(payload)),
                refusal,
            });
        }
        let mut parts = self.slots.places();
        let (mut payloads, mut index) = (payloads.into_iter(), 0);
        while let Some((payload, access)) = payloads.next() {
            if let Err((payload, refusal)) = self.map(payload, access, index, &mut parts) {
                let rest = payloads.map(|(payload, _)| payload);
                return Err(self.undo(parts, index, payload, rest, refusal));
            }
            index += 1;
        }
        Ok(parts)
    }

    #[inline]
    fn no_room(&self) -> Option<Refusal> {
        if self.in_flight() >= self.depth {
            return Some(Refusal::Depth { depth: self.depth });
        }
        let (slots, in_flight, lost) = (self.slots(), self.in_flight(), self.slots.lost());
        self.slots.is_full().then_some(Refusal::Slots { slots, in_flight, lost })
    }

    /// Maps payload `index` into its place.
    #[inline(always)]
    fn map(
        &mut self,
        payload: P,
        access: Access,
        index: usize,
        parts: &mut Parts<P, N>,
    ) -> Result<(), (Option<P>, Refusal)> {
        if self.policy == Policy::Static && payload.fixed_iova(self.id).is_none() {
            return Err((Some(payload), Refusal::NotStatic { index }));
        }
        let mapped = if access == Access::READ {
            self.domain.map(payload, ToDevice).map(Unrevoked::from)
        } else if access == Access::WRITE {
            self.domain.map(payload, FromDevice).map(Unrevoked::from)
        } else if access == Access::all() {
            self.domain.map(payload, Bidirectional).map(Unrevoked::from)
        } else {
            return Err((Some(payload), Refusal::NoAccess { index }));
        };
        let mapping = match mapped {
            Ok(mapping) => mapping,
            Err(MapError { payload, error }) => {
                return Err((payload, Refusal::Map { index, error }));
            }
        };
        if self.policy == Policy::Static && !mapping.is_fixed() {
            let revoked = self.domain.revoke(mapping);
            // If its flush is late, the domain holds it.
            let ended = self.domain.wait_for(revoked, WaitLimit::within(self.flush_limit));
            return Err((ended.ok(), Refusal::NotStatic { index }));
        }
        parts.set(index, Part::Mapped(mapping, access));
        Ok(())
    }

    /// Ends the mappings of a request that is not begun, because payload `index` was refused.
    #[cold]
    fn undo<const M: usize>(
        &mut self,
        mut parts: Parts<P, N>,
        index: usize,
        refused: Option<P>,
        mut rest: impl Iterator<Item = P>,
        refusal: Refusal,
    ) -> BeginError<P, M> {
        let mut revoked = Vec::with_capacity(index);
        self.domain.revoke_many(parts.take_mapped(), &mut revoked);
        parts.drain().for_each(drop);
        self.slots.give_back(parts);
        let limit = WaitLimit::within(self.flush_limit);
        // Late mappings are dropped: the domain holds them.
        let mut ended = self.domain.wait_many_for(revoked, limit).map(Result::ok);
        let mut refused = Some(refused);
        let payloads = std::array::from_fn(|_| {
            ended.next().unwrap_or_else(|| refused.take().unwrap_or_else(|| rest.next()))
        });
        BeginError { payloads, refusal }
    }

    /// Yields where the device finds the payloads of a request, in their order.
    ///
    /// # Errors
    /// [`TokenError`]: it is not at the device, or its payloads are lent.
    pub fn segments(&self, token: Token) -> Result<impl Iterator<Item = Segment>, TokenError> {
        match self.slots.state(token)? {
            State::AtDevice(parts) | State::Lost(parts) => Ok(parts.segments()),
            State::Lent { .. } => Err(TokenError::Lent { token }),
            State::Free | State::Ended => Err(TokenError::Ended { token }),
        }
    }

    /// Takes the payloads of a request back from its driver, before the driver reports how it
    /// ended.
    ///
    /// # Errors
    /// `lent`, if it is another loop's, or its request has ended: dropping it quarantines the
    /// payloads.
    #[inline]
    pub fn take_back(&mut self, lent: Lent<P, N>) -> Result<Token, Lent<P, N>> {
        let token = lent.token();
        if !self.slots.is_lent(token) {
            return Err(lent);
        }
        if let Some(parts) = lent.into_parts() {
            self.slots.take_back(token, parts);
        }
        Ok(token)
    }

    /// Reports that a request was never submitted. Access is revoked, and the call waits for the
    /// flush, under any policy. If that does not complete within [`Limits::flush`], the request is
    /// [late](End::Late), and a later poll returns it.
    ///
    /// # Errors
    /// [`TokenError`], also for a request that is [lost](Self::lost), since it was submitted: nothing
    /// has changed.
    pub fn refused(&mut self, token: Token) -> Result<Ended<P, N>, TokenError> {
        let parts = self.slots.end_unsubmitted(token)?;
        Ok(self.end_now(Completed { token, parts }))
    }

    /// Says that the device no longer works on a request: the next poll revokes its access. One that
    /// was said to be lost may complete after all.
    ///
    /// # Errors
    /// [`TokenError`]: nothing has changed.
    #[inline]
    pub fn completed(&mut self, token: Token) -> Result<(), TokenError> {
        let parts = self.slots.end(token)?;
        self.completed.push_back(Completed { token, parts });
        Ok(())
    }

    /// Says that the device no longer works on a request whose payloads are lent: as
    /// [`take_back`](Self::take_back) and [`completed`](Self::completed).
    ///
    /// # Errors
    /// As for `take_back`.
    #[inline]
    pub fn completed_lent(&mut self, lent: Lent<P, N>) -> Result<(), Lent<P, N>> {
        let token = lent.token();
        if !self.slots.end_lent(token) {
            return Err(lent);
        }
        if let Some(parts) = lent.into_parts() {
            self.completed.push_back(Completed { token, parts });
        }
        Ok(())
    }

    /// Says that a request was given up, and the device may still work on it: the loop keeps its
    /// payloads mapped, so that the device's late access reaches nothing else. They are quarantined
    /// for good only if the loop is dropped before the request has ended.
    ///
    /// It takes no place of the depth any more, and keeps its slot until it is
    /// [completed](Self::completed) or the device is [stopped](Self::stopped). Where its payloads
    /// are lent, they stay with the driver.
    ///
    /// # Errors
    /// [`TokenError`]: nothing has changed.
    pub fn lost(&mut self, token: Token) -> Result<(), TokenError> {
        self.slots.lose(token)
    }

    /// Says that the device is proven quiet, as after a reset that has completed: every request that
    /// is at the device or lost is completed. Those whose payloads are lent are not: their driver
    /// gives them back first.
    pub fn stopped(&mut self) {
        let completed = &mut self.completed;
        self.slots.end_all(|token, parts| completed.push_back(Completed { token, parts }));
    }
}

impl<P: Pinned, const N: usize> Drop for Requests<P, N> {
    fn drop(&mut self) {
        // First, and without the backend: dropped as they are, they would be revoked and freed.
        self.slots.quarantine_all();
        match std::thread::panicking() {
            false => self.end_all_within(DROP_LIMIT),
            // A second panic, of the backend, would end the process.
            true => self.abandon_all(),
        }
    }
}

impl<P: Pinned, const N: usize> fmt::Debug for Requests<P, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Requests")
            .field("policy", &self.policy)
            .field("depth", &self.depth)
            .field("in_flight", &self.in_flight())
            .field("held", &self.held())
            .field("late", &self.late)
            .field("lost", &self.slots.lost())
            .finish_non_exhaustive()
    }
}
