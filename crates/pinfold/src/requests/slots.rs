//! The slots of a loop: a request's payloads while they are at the device, and the [`Token`] that
//! names it.

use crate::{Access, Segment, Unrevoked};
use pinfold_core::domain::{Pinned, Revoked};
use std::collections::TryReserveError;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most slots of a loop.
pub(super) const MAX_SLOTS: usize = 1 << 20;

/// Names a request of a loop.
///
/// It refers to a slot, and to one use of it: after the request has ended, no call mistakes it for
/// the next request there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use = "its request stays at the device until it is completed, refused or lost"]
pub struct Token {
    /// The loop's number in the process.
    requests: u64,
    slot: u32,
    generation: u64,
}

impl Token {
    /// Returns a number below [`Requests::slots`](super::Requests::slots) that no other request of
    /// the loop has until this one has been returned.
    pub fn slot(self) -> usize {
        self.slot as usize
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}:{}", self.slot, self.generation)
    }
}

/// Why a call refuses a token. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// The request has ended: it was completed or refused, or the device has stopped.
    #[error("{token} has ended: say once what has become of a request")]
    Ended {
        /// The token.
        token: Token,
    },
    /// The request was given up, so it was submitted: it cannot be refused or lost again.
    #[error(
        "{token} was given up, so that the device may work on it: it ends with `completed` or `stopped`"
    )]
    Lost {
        /// The token.
        token: Token,
    },
    /// The payloads of the request are lent.
    #[error("the payloads of {token} are lent to the driver: take them back first")]
    Lent {
        /// The token.
        token: Token,
    },
    /// It is another loop's.
    #[error("{token} is of another loop: pass it to the loop that began it")]
    OtherLoop {
        /// The token.
        token: Token,
    },
}

/// A payload of a request.
pub(super) enum Part<P: Pinned> {
    /// The device reaches it, or may.
    Mapped(Unrevoked<P>, Access),
    Revoked(Revoked<P>),
    /// No device reaches it.
    Quiesced(P),
    /// It is quarantined.
    Lost,
}

/// The payloads of a request: as many places as it has payloads are full, the first ones.
///
/// They stay in place until they are returned: a mapping is larger than a cache line, and a request
/// passes through many functions.
pub(super) struct Parts<P: Pinned, const N: usize>(Box<[Option<Part<P>>; N]>);

impl<P: Pinned, const N: usize> Parts<P, N> {
    fn new() -> Self {
        Self(Box::new([const { None }; N]))
    }

    /// Allocates places for the payloads of a request.
    fn try_new() -> Result<Self, TryReserveError> {
        let mut places = Vec::new();
        places.try_reserve_exact(N)?;
        places.extend((0..N).map(|_| None));
        Ok(places.try_into().map_or_else(|_| Self::new(), Self))
    }

    #[inline(always)]
    pub(super) fn set(&mut self, index: usize, part: Part<P>) {
        if let Some(place) = self.0.get_mut(index) {
            *place = Some(part);
        }
    }

    #[inline(always)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &Part<P>> {
        self.0.iter().flatten()
    }

    #[inline(always)]
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Part<P>> {
        self.0.iter_mut().flatten()
    }

    /// Removes and returns the payloads, in their order.
    #[inline(always)]
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Part<P>> {
        self.0.iter_mut().map_while(Option::take)
    }

    /// Removes and returns the mapped payloads, in their order: the places of those that were
    /// yielded are lost ones until they are [set](Self::set).
    #[inline(always)]
    pub(super) fn take_mapped(&mut self) -> impl Iterator<Item = Unrevoked<P>> {
        self.iter_mut().filter_map(|part| match std::mem::replace(part, Part::Lost) {
            Part::Mapped(mapping, _) => Some(mapping),
            other => {
                *part = other;
                None
            }
        })
    }

    /// Yields those that are mapped, each with its access.
    #[inline(always)]
    pub(super) fn mapped(&self) -> impl Iterator<Item = (&Unrevoked<P>, Access)> {
        self.iter().filter_map(|part| match part {
            Part::Mapped(mapping, access) => Some((mapping, *access)),
            Part::Revoked(_) | Part::Quiesced(_) | Part::Lost => None,
        })
    }

    pub(super) fn segments(&self) -> impl Iterator<Item = Segment> {
        self.mapped().flat_map(|(mapping, _)| (0..).map_while(|index| mapping.extent(index)))
    }

    pub(super) fn quarantine(mut self) {
        self.take_mapped().for_each(Unrevoked::quarantine);
    }
}

/// The state of the request of a slot.
pub(super) enum State<P: Pinned, const N: usize> {
    Free,
    AtDevice(Parts<P, N>),
    /// At the device; the driver has the payloads. It may be lost, too.
    Lent {
        is_lost: bool,
    },
    /// Given up, and perhaps still at the device.
    Lost(Parts<P, N>),
    /// The device no longer works on it; the payloads have not been returned.
    Ended,
}

struct Slot<P: Pinned, const N: usize> {
    /// The number of times that the slot was freed.
    generation: u64,
    state: State<P, N>,
}

pub(super) struct Slots<P: Pinned, const N: usize> {
    /// The loop's number in the process.
    requests: u64,
    all: Vec<Slot<P, N>>,
    /// The free ones.
    free: Vec<u32>,
    /// Places without payloads: as many as slots are free, less those that a panic has dropped.
    spare: Vec<Parts<P, N>>,
    /// The number of requests at the device, and of lost ones.
    in_flight: usize,
    lost: usize,
}

impl<P: Pinned, const N: usize> Slots<P, N> {
    pub(super) fn new(count: usize) -> Result<Self, TryReserveError> {
        static LOOPS: AtomicU64 = AtomicU64::new(0);
        let (mut all, mut free, mut spare) = (Vec::new(), Vec::new(), Vec::new());
        all.try_reserve_exact(count)?;
        free.try_reserve_exact(count)?;
        spare.try_reserve_exact(count)?;
        for _ in 0..count {
            spare.push(Parts::try_new()?);
        }
        all.extend((0..count).map(|_| Slot { generation: 0, state: State::Free }));
        free.extend((0..u32::try_from(count).unwrap_or(u32::MAX)).rev());
        let requests = LOOPS.fetch_add(1, Ordering::Relaxed);
        Ok(Self { requests, all, free, spare, in_flight: 0, lost: 0 })
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(super) fn lost(&self) -> usize {
        self.lost
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Returns places for the payloads of a request, to be [given back](Self::give_back) without them.
    #[inline(always)]
    pub(super) fn places(&mut self) -> Parts<P, N> {
        // Allocates after a panic only.
        self.spare.pop().unwrap_or_else(Parts::new)
    }

    #[inline(always)]
    pub(super) fn give_back(&mut self, parts: Parts<P, N>) {
        // Allocates nothing: there are no more than slots.
        self.spare.push(parts);
    }

    /// Uses a free slot for a request at the device. Only where one [is free](Self::is_full).
    #[inline(always)]
    pub(super) fn take(&mut self, state: State<P, N>) -> Token {
        // If none is free, which cannot be, `state` is dropped with its payloads, and its token is
        // refused.
        let slot = self.free.pop().unwrap_or(u32::MAX);
        let mut generation = u64::MAX;
        if let Some(at) = self.all.get_mut(slot as usize) {
            at.state = state;
            generation = at.generation;
            self.in_flight += 1;
        }
        Token { requests: self.requests, slot, generation }
    }

    /// Returns the slot of a request that has not been returned.
    #[inline(always)]
    fn slot_mut(&mut self, token: Token) -> Result<&mut Slot<P, N>, TokenError> {
        if token.requests != self.requests {
            return Err(TokenError::OtherLoop { token });
        }
        let slot = self.all.get_mut(token.slot());
        let slot = slot.filter(|slot| slot.generation == token.generation);
        slot.ok_or(TokenError::Ended { token })
    }

    pub(super) fn state(&self, token: Token) -> Result<&State<P, N>, TokenError> {
        if token.requests != self.requests {
            return Err(TokenError::OtherLoop { token });
        }
        let slot = self.all.get(token.slot());
        let slot = slot.filter(|slot| slot.generation == token.generation);
        slot.map(|slot| &slot.state).ok_or(TokenError::Ended { token })
    }

    pub(super) fn is_lent(&self, token: Token) -> bool {
        matches!(self.state(token), Ok(State::Lent { .. }))
    }

    /// Ends a request that was never submitted, and so is not lost, as [`end`](Self::end) does.
    pub(super) fn end_unsubmitted(&mut self, token: Token) -> Result<Parts<P, N>, TokenError> {
        match self.state(token)? {
            State::Lost(_) | State::Lent { is_lost: true } => Err(TokenError::Lost { token }),
            _ => self.end(token),
        }
    }

    /// Ends a request that is at the device or lost, and returns its payloads. Its slot stays in use
    /// until they have been returned.
    #[inline(always)]
    pub(super) fn end(&mut self, token: Token) -> Result<Parts<P, N>, TokenError> {
        let slot = self.slot_mut(token)?;
        match std::mem::replace(&mut slot.state, State::Ended) {
            State::AtDevice(parts) => {
                self.in_flight -= 1;
                Ok(parts)
            }
            State::Lost(parts) => {
                self.lost -= 1;
                Ok(parts)
            }
            lent @ State::Lent { .. } => {
                slot.state = lent;
                Err(TokenError::Lent { token })
            }
            other @ (State::Free | State::Ended) => {
                slot.state = other;
                Err(TokenError::Ended { token })
            }
        }
    }

    /// Ends a request whose payloads are lent. Returns whether there is one.
    #[inline(always)]
    pub(super) fn end_lent(&mut self, token: Token) -> bool {
        let Ok(slot) = self.slot_mut(token) else { return false };
        let State::Lent { is_lost } = slot.state else { return false };
        slot.state = State::Ended;
        match is_lost {
            true => self.lost -= 1,
            false => self.in_flight -= 1,
        }
        true
    }

    /// Ends all requests that are at the device, and not lent, or lost.
    pub(super) fn end_all(&mut self, mut each: impl FnMut(Token, Parts<P, N>)) {
        let requests = self.requests;
        for (slot, at) in (0..).zip(&mut self.all) {
            let count = match at.state {
                State::AtDevice(_) => &mut self.in_flight,
                State::Lost(_) => &mut self.lost,
                State::Free | State::Lent { .. } | State::Ended => continue,
            };
            *count -= 1;
            if let State::AtDevice(parts) | State::Lost(parts) =
                std::mem::replace(&mut at.state, State::Ended)
            {
                each(Token { requests, slot, generation: at.generation }, parts);
            }
        }
    }

    /// Takes back the payloads of a request that [is lent](Self::is_lent).
    #[inline(always)]
    pub(super) fn take_back(&mut self, token: Token, parts: Parts<P, N>) {
        match self.all.get_mut(token.slot()) {
            Some(slot) if matches!(slot.state, State::Lent { is_lost: true }) => {
                slot.state = State::Lost(parts);
            }
            Some(slot) => slot.state = State::AtDevice(parts),
            None => parts.quarantine(),
        }
    }

    /// Records that a request at the device is lost.
    pub(super) fn lose(&mut self, token: Token) -> Result<(), TokenError> {
        let slot = self.slot_mut(token)?;
        slot.state = match std::mem::replace(&mut slot.state, State::Ended) {
            State::AtDevice(parts) => State::Lost(parts),
            State::Lent { is_lost: false } => State::Lent { is_lost: true },
            other => {
                slot.state = other;
                return Err(match slot.state {
                    State::Lost(_) | State::Lent { .. } => TokenError::Lost { token },
                    _ => TokenError::Ended { token },
                });
            }
        };
        self.in_flight -= 1;
        self.lost += 1;
        Ok(())
    }

    /// Frees the slot of a request that has been returned.
    #[inline(always)]
    pub(super) fn free(&mut self, token: Token) {
        if let Some(slot) = self.all.get_mut(token.slot()) {
            slot.state = State::Free;
            slot.generation += 1;
            self.free.push(token.slot);
        }
    }

    /// Quarantines the payloads of all requests that are at the device or lost.
    pub(super) fn quarantine_all(&mut self) {
        self.end_all(|_, parts| parts.quarantine());
    }
}
