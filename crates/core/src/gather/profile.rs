//! [`Profile`]: the segments that a device accepts, and cutting memory into them.

use crate::addr::{Address, Iova, IovaRange, RangeError, Segment};
use core::iter::FusedIterator;

/// The segments that a device accepts: how many, how long, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Profile {
    pub(super) max_segments: u32,
    pub(super) max_segment_bytes: u64,
    /// A power of two; 0 for none.
    pub(super) boundary: u64,
    pub(super) align: u64,
}

impl Profile {
    /// Creates the profile of a device that accepts at most `max_segments` segments of at most
    /// `max_segment_bytes` bytes, none of which crosses a multiple of `boundary` (a power of two;
    /// 0: none), start and length multiples of `align` (a power of two; 1: any).
    ///
    /// # Errors
    /// [`ProfileError`] if no memory could satisfy it, or a value is not a power of two.
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
        // Cuts are made at the largest multiple of the alignment, so that what follows is aligned
        // again.
        let cut = max_segment_bytes & !(align - 1);
        if cut == 0 {
            return Err(ProfileError::SegmentBytes { max_segment_bytes, align });
        }
        Ok(Self { max_segments, max_segment_bytes: cut, boundary, align })
    }

    /// Returns the length of the longest segment in bytes: a multiple of the alignment.
    pub fn max_segment_bytes(&self) -> u64 {
        self.max_segment_bytes
    }

    /// Returns the power of two of which no segment crosses a multiple; 0 for none.
    pub fn boundary(&self) -> u64 {
        self.boundary
    }

    /// Returns the alignment of a segment's start and length.
    pub fn align(&self) -> u64 {
        self.align
    }

    /// Cuts the segments, in order, into segments that the device accepts.
    ///
    /// The output covers the input in the same order, in as few segments as the profile allows.
    /// Constant time for each. The iterator ends after the first error.
    #[inline]
    pub fn gather<I>(&self, segments: I) -> Gather<I::IntoIter>
    where
        I: IntoIterator<Item = Segment>,
    {
        self.gather_at_most(segments, u64::from(self.max_segments))
    }

    /// Like [`gather`](Self::gather), into the caller's array: returns the part that was filled.
    ///
    /// # Errors
    /// [`GatherError`]; [`GatherError::TooMany`] also if the array is too short. The array's
    /// content is then unspecified.
    pub fn gather_into<'s>(
        &self,
        segments: impl IntoIterator<Item = Segment>,
        slots: &'s mut [Segment],
    ) -> Result<&'s mut [Segment], GatherError> {
        let room = usize::try_from(self.max_segments).unwrap_or(usize::MAX).min(slots.len());
        let (slots, _) = slots.split_at_mut(room);
        let mut segments = segments.into_iter();
        let mut filled = 0;
        // The run that is being extended; empty before the first.
        let (mut start, mut end) = (0, 0);
        while let Some(Segment { iova, len }) = segments.next() {
            let next = iova.raw().checked_add(len).filter(|_| len > 0);
            let next = next.ok_or(Invalid(Segment { iova, len }))?;
            if iova.raw() != end {
                let whole = self.cut_into(slots, &mut filled, (start, end))?;
                if let Err(left) = whole {
                    let ahead = IovaRange::new(iova, len).ok();
                    return Err(self.too_many(
                        Merged { inner: segments, ahead },
                        left,
                        room as u64,
                    ));
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

    /// Cuts one run, which may be empty, into the slots after the filled ones; returns start and
    /// length of the rest that does not fit.
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

    /// Counts the segments, without a limit on their number. Linear in the input, not in the
    /// output.
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
        Gather {
            profile: *self,
            limit,
            merged: Merged::new(segments),
            rest: None,
            issued: 0,
            ended: false,
        }
    }

    /// Returns the error for `filled` full slots when a run from `start` and all of `merged` are
    /// left.
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

    /// Returns the longest segment from `start`.
    #[inline]
    fn reach(&self, start: u64) -> u64 {
        if self.boundary == 0 {
            return self.max_segment_bytes;
        }
        self.max_segment_bytes.min(self.boundary - (start & (self.boundary - 1)))
    }

    /// Computes into how many segments a run is cut.
    fn pieces(&self, start: u64, len: u64) -> u64 {
        let max = self.max_segment_bytes;
        if self.boundary == 0 {
            return len.div_ceil(max);
        }
        let first = (self.boundary - (start & (self.boundary - 1))).min(len);
        let (whole, last) = ((len - first) / self.boundary, (len - first) % self.boundary);
        // Does not wrap: each is at most the number of bytes that it divides.
        first.div_ceil(max) + whole * self.boundary.div_ceil(max) + last.div_ceil(max)
    }
}

/// An iterator over the segments for a device: [`Profile::gather`].
#[derive(Clone, Debug)]
pub struct Gather<I> {
    profile: Profile,
    limit: u64,
    merged: Merged<I>,
    rest: Option<Segment>,
    issued: u64,
    ended: bool,
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
        if self.issued == self.limit {
            let merged =
                Merged { inner: self.merged.inner.by_ref(), ahead: self.merged.ahead.take() };
            return Err(self.profile.too_many(merged, (rest.iova.raw(), rest.len), self.issued));
        }
        self.issued += 1;
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
        if self.ended {
            return None;
        }
        let item = self.cut().transpose();
        self.ended = !matches!(item, Some(Ok(_)));
        item
    }
}

impl<I: Iterator<Item = Segment>> FusedIterator for Gather<I> {}

/// Merges adjacent segments.
#[derive(Clone, Debug)]
pub(super) struct Merged<I> {
    pub(super) inner: I,
    pub(super) ahead: Option<IovaRange>,
}

/// A segment that is not a range; the error is built only when needed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Invalid(pub(super) Segment);

impl From<Invalid> for RangeError {
    #[cold]
    fn from(Invalid(Segment { iova, len }): Invalid) -> Self {
        match len {
            0 => Self::Empty { kind: Iova::KIND, start: iova.raw() },
            len => Self::Wraps { kind: Iova::KIND, start: iova.raw(), len },
        }
    }
}

impl From<Invalid> for GatherError {
    #[cold]
    fn from(invalid: Invalid) -> Self {
        Self::Range(invalid.into())
    }
}

impl<I: Iterator<Item = Segment>> Merged<I> {
    #[inline]
    pub(super) fn new(segments: impl IntoIterator<IntoIter = I>) -> Self {
        Self { inner: segments.into_iter(), ahead: None }
    }

    #[inline]
    fn read(&mut self) -> Option<Result<IovaRange, Invalid>> {
        let segment = self.inner.next()?;
        Some(IovaRange::new(segment.iova, segment.len).map_err(|_| Invalid(segment)))
    }
}

impl<I: Iterator<Item = Segment>> Iterator for Merged<I> {
    type Item = Result<IovaRange, Invalid>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let mut run = match self.ahead.take() {
            Some(ahead) => ahead,
            None => match self.read()? {
                Ok(first) => first,
                Err(invalid) => return Some(Err(invalid)),
            },
        };
        while let Some(next) = self.read() {
            let next = match next {
                Ok(next) => next,
                Err(invalid) => return Some(Err(invalid)),
            };
            if run.end() != next.start() {
                self.ahead = Some(next);
                break;
            }
            // Does not fail: both end within 64 bits, so their union does.
            run = run.merged(&next).unwrap_or(run);
        }
        Some(Ok(run))
    }
}

/// Why a profile is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// A device accepts at least one segment.
    #[error("a device must accept at least 1 segment, not 0")]
    NoSegments,
    /// The alignment is a power of two.
    #[error("alignment {align} is invalid: it must be a power of two, or 1 for none")]
    Align {
        /// The value.
        align: u64,
    },
    /// The boundary is a power of two, at least the alignment.
    #[error(
        "boundary {boundary} is invalid: it must be 0 for none, or a power of two of at least {align}"
    )]
    Boundary {
        /// The value.
        boundary: u64,
        /// The alignment.
        align: u64,
    },
    /// A segment has room for at least one aligned unit.
    #[error("segments of at most {max_segment_bytes} bytes cannot be aligned to {align} bytes")]
    SegmentBytes {
        /// The value.
        max_segment_bytes: u64,
        /// The alignment.
        align: u64,
    },
}

/// Why a device cannot accept the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatherError {
    /// A segment is not a range of addresses.
    #[error("cannot gather a segment: {0}")]
    Range(#[from] RangeError),
    /// A segment begins or ends where the device does not accept it.
    #[error(
        "{len} bytes at {iova}: the device accepts multiples of {align} bytes for start and length"
    )]
    Misaligned {
        /// Its start, after merging with its neighbours.
        iova: Iova,
        /// Its length in bytes.
        len: u64,
        /// The alignment of the profile.
        align: u64,
    },
    /// The device accepts fewer segments.
    #[error("{needed} segments, but at most {limit} are accepted at once: split the transfer")]
    TooMany {
        /// The number of segments.
        needed: u64,
        /// The limit of the device, or of the caller's array.
        limit: u64,
    },
}
