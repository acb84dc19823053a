//! What is under way: requests, which callers see, and the commands that make them up.

use super::error::CommandError;
use super::life::Life;
use pinfold_core::addr::Segment;
use pinfold_core::dma_pool::RawBlock;
use pinfold_core::gather::prp::Prps;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A page of the pool of PRP list pages.
pub(super) type Page = RawBlock;
/// Room for PRP list pages in a command: 4 chained and a full one reach 2,556 pages, more than 8 MiB.
pub(super) const PRPS_LISTS: usize = 5;

/// Which request of which queue; no two are equal in the life of a controller (2^32 requests a slot).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RequestId {
    pub(super) queue: u32,
    pub(super) tag: u16,
    pub(super) sequence: u32,
}

/// A request that is over, or has been given up; [`InFlight::finish`] takes it.
#[must_use = "the payload comes back by `InFlight::finish`"]
#[derive(Debug)]
pub struct Completion {
    pub(super) id: RequestId,
    pub(super) outcome: RequestResult,
}

impl Completion {
    /// The same as the [`InFlight::tag`] of its request.
    pub fn tag(&self) -> usize {
        self.id.tag.into()
    }

    /// Whether the request was given up: its payload goes into quarantine.
    pub fn timed_out(&self) -> bool {
        matches!(self.outcome, RequestResult::TimedOut)
    }
}

#[derive(Debug)]
pub(super) enum RequestResult {
    Completed(Result<(), CommandError>),
    TimedOut,
}

/// A request under way, and the payload that it holds.
///
/// Dropping it before it is finished leaks the payload (and counts it), unless the controller has been reset since.
#[must_use = "dropping what is in flight leaks its payload"]
pub struct InFlight<P> {
    payload: Option<P>,
    id: RequestId,
    epoch: u64,
    life: Arc<Life>,
}

impl<P> fmt::Debug for InFlight<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("id", &self.id).finish_non_exhaustive()
    }
}

/// What became of a request.
#[derive(Debug)]
pub enum Outcome<P> {
    /// The controller is done with the payload.
    Completed {
        /// What was moved into the request.
        payload: P,
        /// Whether it succeeded.
        result: Result<(), CommandError>,
    },
    /// It did not complete in time; the controller may still reach the payload.
    TimedOut(Quarantined<P>),
    /// The completion belongs to another request; both come back.
    Foreign(InFlight<P>, Completion),
}

impl<P> InFlight<P> {
    pub(super) fn new(payload: P, id: RequestId, epoch: u64, life: Arc<Life>) -> Self {
        Self { payload: Some(payload), id, epoch, life }
    }

    /// A number below the queue's depth that no other request under way in the queue has.
    pub fn tag(&self) -> usize {
        self.id.tag.into()
    }

    /// Takes the payload back. Constant time.
    pub fn finish(mut self, completion: Completion) -> Outcome<P> {
        if completion.id != self.id {
            return Outcome::Foreign(self, completion);
        }
        let Some(payload) = self.payload.take() else {
            // `payload` is taken here and on drop only, and both consume `self`.
            return Outcome::Foreign(self, completion);
        };
        match completion.outcome {
            RequestResult::Completed(result) => Outcome::Completed { payload, result },
            RequestResult::TimedOut => {
                self.life.quarantined.fetch_add(1, Ordering::Relaxed);
                let (epoch, life) = (self.epoch, self.life.clone());
                Outcome::TimedOut(Quarantined { payload: Some(payload), epoch, life })
            }
        }
    }
}

impl<P> Drop for InFlight<P> {
    fn drop(&mut self) {
        if let Some(payload) = self.payload.take() {
            self.life.drop_or_leak(payload, self.epoch);
        }
    }
}

/// A payload that the controller may still reach.
///
/// Dropping it before the controller has been reset leaks the payload, and counts it.
#[must_use = "dropping what is quarantined leaks it"]
pub struct Quarantined<P> {
    payload: Option<P>,
    epoch: u64,
    life: Arc<Life>,
}

impl<P> fmt::Debug for Quarantined<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quarantined").field("recoverable", &self.is_recoverable()).finish_non_exhaustive()
    }
}

impl<P> Quarantined<P> {
    /// Whether the controller has been reset since.
    pub fn is_recoverable(&self) -> bool {
        self.life.epoch() > self.epoch
    }

    /// The payload.
    ///
    /// # Errors
    /// Itself, where the controller has not been reset since: call
    /// [`Controller::reset`](super::Controller::reset) first.
    pub fn recover(mut self) -> Result<P, Self> {
        if !self.is_recoverable() {
            return Err(self);
        }
        match self.payload.take() {
            Some(payload) => {
                self.life.quarantined.fetch_sub(1, Ordering::Relaxed);
                Ok(payload)
            }
            // Taken here and on drop only, and both consume `self`.
            None => Err(self),
        }
    }
}

impl<P> Drop for Quarantined<P> {
    fn drop(&mut self) {
        if let Some(payload) = self.payload.take() {
            self.life.quarantined.fetch_sub(1, Ordering::Relaxed);
            self.life.drop_or_leak(payload, self.epoch);
        }
    }
}

/// How a queue makes command identifiers: the place of the command, and above it as much of its generation as there is
/// room for. FFFFh is none: it stands for "no command" in the error log (Base 3.3.3.1).
#[derive(Clone, Copy, Debug)]
pub(super) struct Identifiers {
    place_bits: u32,
}

impl Identifiers {
    const RESERVED: u16 = 0xffff;

    /// For `places` places: at least 1, and at most 65,535, as a ring of 65,536 entries has.
    pub(super) fn new(places: usize) -> Self {
        Self { place_bits: (usize::BITS - (places - 1).leading_zeros()).min(16) }
    }

    /// The place that an identifier names, if it is one of this queue's.
    pub(super) fn place(self, cid: u16) -> u16 {
        let [a, b, ..] = (u32::from(cid) & ((1 << self.place_bits) - 1)).to_le_bytes();
        u16::from_le_bytes([a, b])
    }

    pub(super) fn encode(self, generation: u16, place: u16) -> u16 {
        // The generation's upper bits fall off: it is compared in the same way.
        let [a, b, ..] = (u32::from(generation) << self.place_bits | u32::from(place)).to_le_bytes();
        u16::from_le_bytes([a, b])
    }

    /// The generation of the next command in `place`.
    pub(super) fn next(self, generation: u16, place: u16) -> u16 {
        let next = generation.wrapping_add(1);
        if self.encode(next, place) == Self::RESERVED { next.wrapping_add(1) } else { next }
    }
}

/// The identifier after `cid`, of a queue that numbers its commands in order.
pub(super) fn next_identifier(cid: u16) -> u16 {
    if cid >= Identifiers::RESERVED - 1 { 0 } else { cid + 1 }
}

/// A command's place. Its identifier is the place and a generation, so that a second completion for an earlier
/// command in the same place is recognised.
#[derive(Debug, Default)]
pub(super) struct CommandSlot {
    pub(super) state: CommandState,
    pub(super) generation: u16,
    /// Whose command it is; meaningful while busy.
    pub(super) request: u16,
    /// Whether an abort was sent for it.
    pub(super) aborted: bool,
    pub(super) prps: Option<Prps<Page, PRPS_LISTS>>,
    pub(super) page: Option<Page>,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum CommandState {
    #[default]
    Free,
    Busy,
    /// Its request was given up; a late completion frees it, or a reset.
    Quarantined,
}

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Operation {
    Transfer { write: bool },
    Flush,
    Discard { blocks: u32 },
}

/// A request's place: the driver's own copy of what it asked for.
#[derive(Debug)]
pub(super) struct RequestSlot {
    pub(super) busy: bool,
    pub(super) sequence: u32,
    pub(super) operation: Operation,
    pub(super) nsid: u32,
    pub(super) block_shift: u32,
    /// The next block to send a command for.
    pub(super) slba: u64,
    /// Bytes (of a transfer) or commands (of others) that are not yet sent.
    pub(super) left: u64,
    /// Commands under way.
    pub(super) outstanding: u16,
    pub(super) deadline_ns: u64,
    /// Whether its time is over and its commands are being aborted, until `deadline_ns`.
    pub(super) aborting: bool,
    pub(super) error: Option<CommandError>,
    pub(super) cursor: Cursor,
}

impl Default for RequestSlot {
    fn default() -> Self {
        Self {
            busy: false,
            sequence: 0,
            operation: Operation::Flush,
            nsid: 0,
            block_shift: 0,
            slba: 0,
            left: 0,
            outstanding: 0,
            deadline_ns: 0,
            aborting: false,
            error: None,
            cursor: Cursor::default(),
        }
    }
}

/// A copy of a payload's segments, and how far commands have been sent for it. The room is kept from one request to
/// the next.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    segments: Vec<Segment>,
    index: usize,
    offset: u64,
}

impl Cursor {
    /// Takes segments until `bytes` bytes are reached; how many bytes there were, at most `bytes`.
    pub(super) fn set(&mut self, segments: impl Iterator<Item = Segment>, bytes: u64) -> u64 {
        self.segments.clear();
        (self.index, self.offset) = (0, 0);
        let mut has = 0;
        for segment in segments.filter(|segment| segment.len > 0) {
            if has == bytes {
                break;
            }
            let len = segment.len.min(bytes - has);
            has += len;
            self.segments.push(Segment { iova: segment.iova, len });
        }
        has
    }

    pub(super) fn segments(&self) -> u64 {
        self.segments.len() as u64
    }

    /// The next `bytes` bytes as segments, without going forward.
    pub(super) fn peek(&self, bytes: u64) -> impl Iterator<Item = Segment> + '_ {
        let mut left = bytes;
        let mut skip = self.offset;
        self.segments.iter().skip(self.index).map_while(move |segment| {
            if left == 0 {
                return None;
            }
            let len = (segment.len - skip).min(left);
            // A segment that would wrap is refused when it is laid out.
            let iova = segment.iova.checked_add(skip)?;
            (skip, left) = (0, left - len);
            Some(Segment { iova, len })
        })
    }

    /// Goes forward by `bytes`.
    pub(super) fn advance(&mut self, bytes: u64) {
        let mut left = bytes;
        while let Some(segment) = self.segments.get(self.index).filter(|_| left > 0) {
            let step = (segment.len - self.offset).min(left);
            self.offset += step;
            left -= step;
            if self.offset == segment.len {
                (self.index, self.offset) = (self.index + 1, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_core::addr::Iova;
    use proptest::prelude::*;

    #[test]
    fn no_identifier_is_ffff_whatever_the_number_of_places() {
        for places in [1, 2, 63, 64, 65, 1023, 1024, 4096, 32_768, 32_769, 65_535] {
            let identifiers = Identifiers::new(places);
            let last = u16::try_from(places - 1).unwrap();
            for place in [0, 1.min(last), last / 2, last] {
                let mut generation = 0;
                for _ in 0..70_000 {
                    let before = identifiers.encode(generation, place);
                    generation = identifiers.next(generation, place);
                    let cid = identifiers.encode(generation, place);
                    assert_ne!(cid, 0xffff, "{places} places");
                    assert_eq!(identifiers.place(cid), place);
                    // 15 and 16 bits of place leave none for a generation of the last place.
                    assert!(cid != before || places >= 32_768);
                }
            }
        }
        let mut cid = 0;
        for _ in 0..70_000 {
            cid = next_identifier(cid);
            assert_ne!(cid, 0xffff);
        }
    }

    proptest! {
        #[test]
        fn a_cursor_gives_each_byte_once(
            lens in proptest::collection::vec(0u64..50, 1..6),
            steps in proptest::collection::vec(1u64..40, 1..40),
            want in 1usize..200,
        ) {
            let segments: Vec<_> = (0..)
                .zip(&lens)
                .map(|(i, len)| Segment { iova: Iova::new(i * 1000), len: *len })
                .collect();
            let all: Vec<u64> =
                segments.iter().flat_map(|s| s.iova.raw()..s.iova.raw() + s.len).take(want).collect();
            let mut cursor = Cursor::default();
            prop_assert_eq!(cursor.set(segments.iter().copied(), want as u64), all.len() as u64);
            let mut seen = Vec::new();
            for step in steps {
                seen.extend(cursor.peek(step).flat_map(|s| s.iova.raw()..s.iova.raw() + s.len));
                cursor.advance(step);
                prop_assert_eq!(&seen[..], &all[..seen.len()]);
            }
        }
    }
}
