//! The memory of a request as its device gets it, [`Scattered`] or [`Fixed`], and [`Attempt`], the
//! request at its controller.
//!
//! A C program names memory by iovecs. Each becomes a [`Span`], which keeps the allocation that it
//! is in counted as used for as long as a device may reach it: `pf_free` refuses it meanwhile.

use crate::failure::{Failure, fail};
use crate::owner::no_room;
use crate::region::Span;
use crate::trace::{Site, Tracer, pf_event_kind};
use pinfold::core::access::Direction;
use pinfold::core::addr::Segment;
use pinfold::core::domain::{DomainId, Payload};
use pinfold::core::frame::Frame;
use pinfold::requests::Lent;
use pinfold::{DmaMemory, Iova, Pinned};
use pinfold_nvme::driver::{CommandError, Completion, InFlight, Outcome, Quarantined};

/// The parts of one entry of a request's `iov`, which need no allocation, or of several.
pub(crate) enum Parts<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> Parts<T> {
    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        match self {
            Self::One(part) => (index == 0).then_some(part),
            Self::Many(parts) => parts.get(index),
        }
    }

    /// Returns what `part` makes of each, in their order; the first that fails ends it.
    #[inline]
    pub(crate) fn try_map<U>(
        self,
        mut part: impl FnMut(T) -> Result<U, Failure>,
    ) -> Result<Parts<U>, Failure> {
        Ok(match self {
            Self::One(one) => Parts::One(part(one)?),
            Self::Many(many) => {
                let mut parts = parts(many.len())?;
                for each in many {
                    parts.push(part(each)?);
                }
                Parts::Many(parts)
            }
        })
    }
}

/// Returns a list for the parts of a request.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn parts<T>(count: usize) -> Result<Vec<T>, Failure> {
    let mut parts = Vec::new();
    match parts.try_reserve_exact(count) {
        Ok(()) => Ok(parts),
        Err(error) => Err(no_room("submit a request of", count, &error)),
    }
}

/// Memory to be mapped for one request: its parts are mapped one behind the other.
pub(crate) struct Scattered(Parts<Part>);

pub(crate) struct Part {
    span: Span,
    /// The offset of its pages in the range at which all are mapped.
    start: u64,
}

impl Scattered {
    /// # Errors
    /// `EINVAL`: one stays mapped, so that it could not be revoked.
    #[inline]
    pub(crate) fn new(spans: Parts<Span>, domain: DomainId) -> Result<Self, Failure> {
        let mut end = 0;
        let parts = spans.try_map(|span| {
            if span.fixed(domain).is_some() {
                return Err(fail!(
                    EINVAL,
                    "the memory at {:#x} stays mapped (the arena's, the registration's, or the pool's), so that \
                     its access could not be revoked: allocate it with pf_alloc from an arena of PF_POLICY_PER_USE, or \
                     create the queue with PF_PROTECT_STATIC",
                    span.addr()
                ));
            }
            let start = end;
            end += span.memory().len() as u64;
            Ok(Part { span, start })
        })?;
        Ok(Self(parts))
    }
}

// SAFETY: as for each of the spans, which the value keeps and never changes. `Many` have no
// fixed address.
unsafe impl Pinned for Scattered {
    fn memory(&self) -> DmaMemory<'_> {
        self.0.get(0).map_or(DmaMemory::EMPTY, |part| part.span.memory())
    }

    fn fixed_iova(&self, domain: DomainId) -> Option<Iova> {
        match &self.0 {
            Parts::One(part) => part.span.fixed_iova(domain),
            Parts::Many(_) => None,
        }
    }

    fn piece(&self, index: usize) -> Option<DmaMemory<'_>> {
        self.0.get(index).map(|part| part.span.memory())
    }

    fn extent(&self, index: usize) -> Option<(u64, u64)> {
        let part = self.0.get(index)?;
        let (before, len) = part.span.part();
        Some((part.start + before as u64, len as u64))
    }
}

/// Memory that is mapped as a whole, for as long as its region lives: a span keeps the region.
pub(crate) struct Fixed {
    parts: Parts<(Span, Segment)>,
    domain: DomainId,
}

impl Fixed {
    /// Looks the addresses up.
    ///
    /// # Errors
    /// `ENXIO`: one is not mapped as a whole.
    #[inline]
    pub(crate) fn new(spans: Parts<Span>, domain: DomainId) -> Result<Self, Failure> {
        let parts = spans.try_map(|span| {
            let (_, len) = span.part();
            match span.fixed(domain) {
                Some(iova) => Ok((span, Segment { iova, len: len as u64 })),
                None => Err(fail!(
                    ENXIO,
                    "{len} bytes at {:#x} are not mapped as a whole, as PF_PROTECT_STATIC requires: allocate them from \
                     an arena of PF_POLICY_WHOLE, or create the queue with another protection",
                    span.addr()
                )),
            }
        })?;
        Ok(Self { parts, domain })
    }
}

// SAFETY: the segments are of whole mappings in `domain`, which are for both directions and last
// until the region is dropped, which each span keeps; they were computed once.
unsafe impl<D: Direction> Payload<D> for Fixed {
    fn segment(&self, index: usize) -> Option<Segment> {
        self.parts.get(index).map(|(_, segment)| *segment)
    }

    fn domain(&self) -> Option<DomainId> {
        Some(self.domain)
    }
}

/// The memory of a request, mapped for it: the loop's, while the driver has it.
pub(crate) type Mapped = Lent<Scattered, 1>;

/// Reports an event for each part.
pub(crate) fn report(mapped: &Mapped, hook: Tracer, kind: pf_event_kind, site: Site) {
    for (part, pages) in mapped.pieces() {
        let Some(pages) = pages else { return };
        // Pages are mapped at multiples of their size.
        let before = usize::try_from(part.iova.raw() % Frame::BYTES).unwrap_or(0);
        let va = pages.as_ptr().as_ptr().wrapping_add(before);
        hook.report(kind, va, part.iova.raw(), part.len, site);
    }
}

/// A request at the controller.
pub(crate) enum Attempt {
    /// A read or a write of memory that is mapped for it.
    Mapped(InFlight<Mapped>),
    /// A read or a write of memory that stays mapped.
    Fixed(InFlight<Fixed>),
    /// A flush or a discard.
    Bare(InFlight<()>),
}

/// The result of a transfer.
pub(crate) enum Ended {
    /// The controller no longer accesses the memory; what was mapped for the request is returned.
    Completed(Option<Mapped>, Result<(), CommandError>),
    /// It was given up: the controller may still access the memory.
    Lost(Option<Lost>),
    /// The completion is another request's.
    Foreign(Attempt),
}

/// The memory of a request that was given up.
pub(crate) enum Lost {
    Mapped(Quarantined<Mapped>),
    Fixed(Quarantined<Fixed>),
}

impl Lost {
    /// Whether the loop has lent the memory, which is mapped for the request.
    pub(crate) fn is_lent(&self) -> bool {
        matches!(self, Self::Mapped(_))
    }

    /// Frees the memory if the controller has been disabled since. What cannot be recovered stays
    /// counted as used, as does what it is part of.
    pub(crate) fn end(self) {
        match self {
            Self::Mapped(mapped) => drop(mapped.recover().map(Mapped::release)),
            Self::Fixed(fixed) => drop(fixed.recover()),
        }
    }
}

impl Attempt {
    /// Returns the driver's number of it, below the queue's depth.
    pub(crate) fn tag(&self) -> usize {
        match self {
            Self::Mapped(in_flight) => in_flight.tag(),
            Self::Fixed(in_flight) => in_flight.tag(),
            Self::Bare(in_flight) => in_flight.tag(),
        }
    }

    /// Whether the loop has lent the memory of it; `None` if it has none.
    pub(crate) fn is_lent(&self) -> Option<bool> {
        match self {
            Self::Mapped(_) => Some(true),
            Self::Fixed(_) => Some(false),
            Self::Bare(_) => None,
        }
    }

    /// Applies `completion`.
    pub(crate) fn finish(self, completion: Completion) -> Ended {
        match self {
            Self::Mapped(in_flight) => match in_flight.finish(completion) {
                Outcome::Completed { payload, result } => Ended::Completed(Some(payload), result),
                Outcome::TimedOut(payload) => Ended::Lost(Some(Lost::Mapped(payload))),
                Outcome::Foreign(in_flight, _) => Ended::Foreign(Self::Mapped(in_flight)),
            },
            Self::Fixed(in_flight) => match in_flight.finish(completion) {
                Outcome::Completed { result, .. } => Ended::Completed(None, result),
                Outcome::TimedOut(payload) => Ended::Lost(Some(Lost::Fixed(payload))),
                Outcome::Foreign(in_flight, _) => Ended::Foreign(Self::Fixed(in_flight)),
            },
            Self::Bare(in_flight) => match in_flight.finish(completion) {
                Outcome::Completed { result, .. } => Ended::Completed(None, result),
                Outcome::TimedOut(_) => Ended::Lost(None),
                Outcome::Foreign(in_flight, _) => Ended::Foreign(Self::Bare(in_flight)),
            },
        }
    }
}
