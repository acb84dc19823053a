//! Gather: cuts memory into what a device takes.
//!
//! What goes in are [`Segment`]s, in order: a part of a [registered](crate::registered) buffer, a mapping, or any
//! list of them. Neighbours are merged first; then a [`Profile`] cuts them by the device's largest segment, its
//! boundary, its alignment and its number of segments. [`prp`] and [`sgl`] lay them out for an NVMe controller, in
//! lists whose pages come from a DMA pool.
//!
//! Nothing here allocates.

mod list;
pub mod prp;
pub mod sgl;
#[cfg(test)]
mod tests;

use crate::addr::{Address, Iova, IovaRange, RangeError, Segment};
use core::iter::FusedIterator;

/// What a device takes: how many segments, how long, and where they may lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Profile {
    max_segments: u32,
    max_segment_bytes: u64,
    /// A power of two; 0 for none.
    boundary: u64,
    align: u64,
}

/// Why a profile is impossible.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// A device takes at least one segment.
    #[error("a device that takes 0 segments takes nothing")]
    NoSegments,
    /// The alignment is a power of two.
    #[error("segments aligned to {align} bytes: not a power of two (1 for any address)")]
    Align {
        /// What was asked for.
        align: u64,
    },
    /// The boundary is a power of two, at least the alignment.
    #[error("a boundary of {boundary} bytes: not 0 (for none) nor a power of two of at least {align}")]
    Boundary {
        /// What was asked for.
        boundary: u64,
        /// The alignment.
        align: u64,
    },
    /// A segment has room for at least one aligned unit.
    #[error("segments of at most {max_segment_bytes} bytes, aligned to {align}: there are none")]
    SegmentBytes {
        /// What was asked for.
        max_segment_bytes: u64,
        /// The alignment.
        align: u64,
    },
}

/// Why a device can not take some memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatherError {
    /// A segment is no range of addresses.
    #[error("a segment to gather: {0}")]
    Range(#[from] RangeError),
    /// A segment begins or ends where the device can not.
    #[error("{len} bytes at {iova}: the device takes start and length in multiples of {align} bytes")]
    Misaligned {
        /// Where it starts, after merging with its neighbours.
        iova: Iova,
        /// How many bytes it has.
        len: u64,
        /// The alignment of the profile.
        align: u64,
    },
    /// The device takes fewer segments.
    #[error("{needed} segments, but at most {limit} are taken at once: split the transfer")]
    TooMany {
        /// How many there are.
        needed: u64,
        /// How many the device, or the caller's array, has room for.
        limit: u64,
    },
}

impl Profile {
    /// A device that takes at most `max_segments` segments of at most `max_segment_bytes` bytes, none of which crosses
    /// a multiple of `boundary` (a power of two; 0: no such rule), start and length a multiple of `align` (a power of
    /// two; 1: any).
    ///
    /// # Errors
    /// [`ProfileError`] where no memory could satisfy it, or a power of two is none.
    pub fn new(
        max_segments: u32,
        max_segment_bytes: u64,
        boundary: u64,
        align: u64,
    ) -> Result<Self, ProfileError> {
        if max_segments == 0 {
            return Err(ProfileError::NoSegments);
        }
        if !align.is_power_of_two() {
            return Err(ProfileError::Align { align });
        }
        if boundary != 0 && !(boundary.is_power_of_two() && boundary >= align) {
            return Err(ProfileError::Boundary { boundary, align });
        }
        // Cuts are made at the largest multiple of the alignment, so that what follows is aligned again.
        let cut = max_segment_bytes & !(align - 1);
        if cut == 0 {
            return Err(ProfileError::SegmentBytes { max_segment_bytes, align });
        }
        Ok(Self { max_segments, max_segment_bytes: cut, boundary, align })
    }

    /// How many segments the device takes at once.
    pub fn max_segments(&self) -> u32 {
        self.max_segments
    }

    /// The longest segment, in bytes: a multiple of the alignment.
    pub fn max_segment_bytes(&self) -> u64 {
        self.max_segment_bytes
    }

    /// The power of two of which no segment crosses a multiple; 0 for none.
    pub fn boundary(&self) -> u64 {
        self.boundary
    }

    /// Of what start and length of a segment are multiples.
    pub fn align(&self) -> u64 {
        self.align
    }

    /// Cuts the segments, which are in order, into what the device takes.
    ///
    /// What comes out is as long as what went in, in the same order, and in no more pieces than the profile makes
    /// necessary. Constant time for each. The iterator ends after the first error.
    #[inline]
    pub fn gather<I>(&self, segments: I) -> Gather<I::IntoIter>
    where
        I: IntoIterator<Item = Segment>,
    {
        self.gather_at_most(segments, u64::from(self.max_segments))
    }

    /// [`gather`](Self::gather) into the caller's array: gives back the part that was filled.
    ///
    /// # Errors
    /// [`GatherError`]; one of too many also where the array is too short. The array's content is unspecified then.
    pub fn gather_into<'s>(
        &self,
        segments: impl IntoIterator<Item = Segment>,
        slots: &'s mut [Segment],
    ) -> Result<&'s mut [Segment], GatherError> {
        let room = usize::try_from(self.max_segments).unwrap_or(usize::MAX).min(slots.len());
        let (slots, _) = slots.split_at_mut(room);
        let mut segments = segments.into_iter();
        let mut filled = 0;
        // Where the run that grows begins and ends; nowhere before the first.
        let (mut start, mut end) = (0, 0);
        while let Some(Segment { iova, len }) = segments.next() {
            let next = iova.raw().checked_add(len).filter(|_| len > 0);
            let next = next.ok_or(Wild(Segment { iova, len }))?;
            if iova.raw() != end {
                let whole = self.cut_into(slots, &mut filled, (start, end))?;
                if let Err(left) = whole {
                    let ahead = IovaRange::new(iova, len).ok();
                    return Err(self.too_many(Merged { inner: segments, ahead }, left, room as u64));
                }
                start = iova.raw();
            }
            end = next;
        }
        match self.cut_into(slots, &mut filled, (start, end))? {
            Ok(()) => {}
            Err(left) => return Err(self.too_many(Merged::new(segments), left, room as u64)),
        }
        let (full, _) = slots.split_at_mut(filled);
        Ok(full)
    }

    /// Cuts one run, or none, into the slots behind those that are filled; gives back where what finds no slot begins, and
    /// how long it is.
    #[inline]
    fn cut_into(
        &self,
        slots: &mut [Segment],
        filled: &mut usize,
        (mut start, end): (u64, u64),
    ) -> Result<Result<(), (u64, u64)>, GatherError> {
        if (start | end) & (self.align - 1) != 0 {
            return Err(self.misaligned(start, end - start));
        }
        while start != end {
            let left = end - start;
            let Some(slot) = slots.get_mut(*filled) else { return Ok(Err((start, left))) };
            let len = left.min(self.reach(start));
            *slot = Segment { iova: Iova::new(start), len };
            *filled += 1;
            start += len;
        }
        Ok(Ok(()))
    }

    /// How many segments the device would be given, however many it takes. Linear in the segments that go in, not
    /// in what comes out.
    ///
    /// # Errors
    /// [`GatherError::Range`], [`GatherError::Misaligned`].
    pub fn count(&self, segments: impl IntoIterator<Item = Segment>) -> Result<u64, GatherError> {
        let mut merged = Merged::new(segments);
        let mut count = 0u64;
        while let Some(run) = merged.next().transpose()? {
            self.check(&run)?;
            count = count.saturating_add(self.pieces(run.start().raw(), run.len()));
        }
        Ok(count)
    }

    fn gather_at_most<I>(&self, segments: I, limit: u64) -> Gather<I::IntoIter>
    where
        I: IntoIterator<Item = Segment>,
    {
        Gather { profile: *self, limit, merged: Merged::new(segments), rest: None, given: 0, over: false }
    }

    /// What to say where `filled` are given and a run from `start` is left, and what follows it.
    #[cold]
    fn too_many<I>(&self, merged: Merged<I>, (start, left): (u64, u64), filled: u64) -> GatherError
    where
        I: Iterator<Item = Segment>,
    {
        let mut needed = filled.saturating_add(self.pieces(start, left));
        for run in merged.map_while(Result::ok) {
            needed = needed.saturating_add(self.pieces(run.start().raw(), run.len()));
        }
        GatherError::TooMany { needed, limit: filled }
    }

    #[inline]
    fn check(&self, run: &IovaRange) -> Result<(), GatherError> {
        if run.is_aligned(self.align) {
            return Ok(());
        }
        Err(self.misaligned(run.start().raw(), run.len()))
    }

    #[cold]
    fn misaligned(&self, start: u64, len: u64) -> GatherError {
        GatherError::Misaligned { iova: Iova::new(start), len, align: self.align }
    }

    /// How long a segment from `start` can be.
    #[inline]
    fn reach(&self, start: u64) -> u64 {
        if self.boundary == 0 {
            return self.max_segment_bytes;
        }
        self.max_segment_bytes.min(self.boundary - (start & (self.boundary - 1)))
    }

    /// In how many pieces a run is cut, by reckoning.
    fn pieces(&self, start: u64, len: u64) -> u64 {
        let max = self.max_segment_bytes;
        if self.boundary == 0 {
            return len.div_ceil(max);
        }
        let first = (self.boundary - (start & (self.boundary - 1))).min(len);
        let (whole, last) = ((len - first) / self.boundary, (len - first) % self.boundary);
        // No wrap: each is at most the number of bytes that it counts the pieces of.
        first.div_ceil(max) + whole * self.boundary.div_ceil(max) + last.div_ceil(max)
    }
}

/// The segments that a device is given: [`Profile::gather`].
#[derive(Clone, Debug)]
pub struct Gather<I> {
    profile: Profile,
    limit: u64,
    merged: Merged<I>,
    rest: Option<Segment>,
    given: u64,
    over: bool,
}

impl<I: Iterator<Item = Segment>> Gather<I> {
    #[inline]
    fn cut(&mut self) -> Result<Option<Segment>, GatherError> {
        let rest = match self.rest {
            Some(rest) => rest,
            None => match self.merged.next().transpose()? {
                Some(run) => {
                    self.profile.check(&run)?;
                    Segment { iova: run.start(), len: run.len() }
                }
                None => return Ok(None),
            },
        };
        if self.given == self.limit {
            let merged = Merged { inner: self.merged.inner.by_ref(), ahead: self.merged.ahead.take() };
            return Err(self.profile.too_many(merged, (rest.iova.raw(), rest.len), self.given));
        }
        self.given += 1;
        let len = rest.len.min(self.profile.reach(rest.iova.raw()));
        let after = rest.iova.checked_add(len).filter(|_| len < rest.len);
        self.rest = after.map(|iova| Segment { iova, len: rest.len - len });
        Ok(Some(Segment { iova: rest.iova, len }))
    }
}

impl<I: Iterator<Item = Segment>> Iterator for Gather<I> {
    type Item = Result<Segment, GatherError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let item = self.cut().transpose();
        self.over = !matches!(item, Some(Ok(_)));
        item
    }
}

impl<I: Iterator<Item = Segment>> FusedIterator for Gather<I> {}

/// Joins segments that follow one another in the device's addresses too.
#[derive(Clone, Debug)]
struct Merged<I> {
    inner: I,
    ahead: Option<IovaRange>,
}

/// A segment that is no range: what is wrong with it is said when somebody asks.
#[derive(Clone, Copy, Debug)]
struct Wild(Segment);

impl From<Wild> for RangeError {
    #[cold]
    fn from(Wild(Segment { iova, len }): Wild) -> Self {
        match len {
            0 => Self::Empty { kind: Iova::KIND, start: iova.raw() },
            len => Self::Wraps { kind: Iova::KIND, start: iova.raw(), len },
        }
    }
}

impl From<Wild> for GatherError {
    #[cold]
    fn from(wild: Wild) -> Self {
        Self::Range(wild.into())
    }
}

impl<I: Iterator<Item = Segment>> Merged<I> {
    #[inline]
    fn new(segments: impl IntoIterator<IntoIter = I>) -> Self {
        Self { inner: segments.into_iter(), ahead: None }
    }

    #[inline]
    fn one(&mut self) -> Option<Result<IovaRange, Wild>> {
        let segment = self.inner.next()?;
        Some(IovaRange::new(segment.iova, segment.len).map_err(|_| Wild(segment)))
    }
}

impl<I: Iterator<Item = Segment>> Iterator for Merged<I> {
    type Item = Result<IovaRange, Wild>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let mut run = match self.ahead.take() {
            Some(ahead) => ahead,
            None => match self.one()? {
                Ok(first) => first,
                Err(wild) => return Some(Err(wild)),
            },
        };
        while let Some(next) = self.one() {
            let next = match next {
                Ok(next) => next,
                Err(wild) => return Some(Err(wild)),
            };
            if run.end() != next.start() {
                self.ahead = Some(next);
                break;
            }
            // Both end below 2^64, so together they do, too.
            run = run.merged(&next).unwrap_or(run);
        }
        Some(Ok(run))
    }
}
