//! [`Lent`]: the payloads of a request in the hands of a driver that takes them by value.

use super::slots::{Parts, Token};
use crate::{Access, DmaMemory, Segment, Unrevoked};
use pinfold_core::access::Direction;
use pinfold_core::domain::{DomainId, Payload, Pinned};
use std::fmt;

/// The payloads of a request at the device, mapped: a [`Payload`] for a driver that holds its
/// payloads itself, for the directions that all of them are mapped for.
///
/// [`Requests::take_back`](super::Requests::take_back) returns them to their loop. Dropping it
/// quarantines them, and counts them: the device may still work on them. Their request then never
/// ends, and keeps its slot; its place of the depth too, unless it is [lost](super::Requests::lost).
#[must_use = "dropping it quarantines the payloads"]
pub struct Lent<P: Pinned, const N: usize> {
    token: Token,
    /// `None` once they were taken out.
    parts: Option<Parts<P, N>>,
    domain: DomainId,
}

impl<P: Pinned, const N: usize> Lent<P, N> {
    #[inline(always)]
    pub(super) fn new(token: Token, parts: Parts<P, N>, domain: DomainId) -> Self {
        Self { token, parts: Some(parts), domain }
    }

    /// Returns the request's token.
    pub fn token(&self) -> Token {
        self.token
    }

    /// Yields where the device finds the payloads, each piece with its memory, in their order.
    pub fn pieces(&self) -> impl Iterator<Item = (Segment, Option<DmaMemory<'_>>)> {
        self.mapped().flat_map(|(mapping, _)| {
            let piece = |index| Some((mapping.extent(index)?, mapping.piece(index)));
            (0..).map_while(piece)
        })
    }

    /// Ends the mappings of payloads whose device is proven quiet, as after a reset, where their loop
    /// has ended before: revokes access, waits for the flush as dropping a
    /// [`Mapping`](crate::Mapping) does, and drops the payloads.
    pub fn release(self) {
        drop(self.into_parts());
    }

    /// Returns the payloads, for their loop.
    #[inline(always)]
    pub(super) fn into_parts(mut self) -> Option<Parts<P, N>> {
        self.parts.take()
    }

    fn mapped(&self) -> impl Iterator<Item = (&Unrevoked<P>, Access)> {
        self.parts.iter().flat_map(Parts::mapped)
    }
}

impl<P: Pinned, const N: usize> Drop for Lent<P, N> {
    fn drop(&mut self) {
        if let Some(parts) = self.parts.take() {
            parts.quarantine();
        }
    }
}

// SAFETY: each segment is part of a mapping in `domain` that the value holds and never changes: it
// is live until the value is taken back, which takes it by value, and for good if it is dropped.
// All of the mappings are for an access that contains that of `D`.
unsafe impl<P: Pinned, D: Direction, const N: usize> Payload<D> for Lent<P, N> {
    fn segment(&self, index: usize) -> Option<Segment> {
        if !self.mapped().all(|(_, access)| access.contains(D::ACCESS)) {
            return None;
        }
        let (mut index, mut parts) = (index, self.mapped().peekable());
        while let Some((mapping, _)) = parts.next() {
            // The last payload, like a single one, needs no count.
            if parts.peek().is_none() {
                return mapping.extent(index);
            }
            let before = (0..index + 1).map_while(|at| mapping.extent(at)).count();
            if before > index {
                return mapping.extent(index);
            }
            index -= before;
        }
        None
    }

    fn domain(&self) -> Option<DomainId> {
        Some(self.domain)
    }
}

impl<P: Pinned, const N: usize> fmt::Debug for Lent<P, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent").field("token", &self.token).finish_non_exhaustive()
    }
}
