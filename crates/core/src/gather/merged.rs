//! Merges segments that are adjacent for the device, before they are cut.

use super::error::GatherError;
use crate::addr::{Address, Iova, IovaRange, RangeError, Segment};

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
