//! The data pointer of a command (Base 3.3.3.1, DPTR): PRP entries or an SGL, with the list pages
//! behind it.

use super::config::QueueStats;
use super::error::LayoutError;
use crate::spec::{Command, PAGE};
use pinfold_core::addr::Segment;
use pinfold_core::dma_pool::{AllocError, Block};
use pinfold_core::gather::Profile;
use pinfold_core::gather::prp::{ControllerPage, ListPage, ListPages, Prps};
use pinfold_core::gather::sgl::Sgl;
use zerocopy::little_endian::U64;

/// List pages of one command. As PRP lists, 4 chained and a full one reach 2,556 pages, more than 8
/// MiB; as SGL segments they hold 1,276 data blocks.
const LIST_PAGES: usize = 5;

/// The data pointer of a command: how it describes its memory. Its pages belong to the pool
/// `nvme lists`.
#[derive(Debug)]
pub(super) enum DataPointer {
    Prp(Prps<Block, LIST_PAGES>),
    Sgl(Sgl<Block, LIST_PAGES>),
    /// The ranges of a dataset management command.
    Page(Page),
}

/// A list page. Dropping it quarantines it, as the pages of a list are.
#[derive(Debug)]
pub(super) struct Page(Option<Block>);

impl Drop for Page {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(ListPage::quarantine);
    }
}

impl DataPointer {
    /// Describes `segments`, of `bytes` bytes in all: by PRP entries where the command itself holds
    /// them, by an SGL where the controller supports `sgl`, else by a PRP list. Linear in the pages
    /// or segments.
    ///
    /// # Errors
    /// [`LayoutError`]; no list page is held.
    pub(super) fn new<L: ListPages<Page = Block, TakeError = AllocError>>(
        segments: impl Iterator<Item = Segment> + Clone,
        bytes: u64,
        sgl: Option<&Profile>,
        lists: &mut L,
    ) -> Result<Self, LayoutError> {
        let prps = |segments, lists: &mut L| {
            Prps::new(ControllerPage::SIZE_4K, segments, lists).map(Self::Prp)
        };
        let Some(profile) = sgl else { return prps(segments, lists) };
        let first = segments.clone().next().map_or(0, |segment| segment.iova.raw() % PAGE);
        if first + bytes <= 2 * PAGE
            && let Ok(prps) = prps(segments.clone(), lists)
        {
            return Ok(prps);
        }
        match Sgl::new(profile, segments.clone(), lists) {
            Ok(sgl) => Ok(Self::Sgl(sgl)),
            // Many small segments: where they are whole pages, PRP lists reach twice as far.
            Err(error @ LayoutError::TooLong { .. }) => match prps(segments, lists) {
                Err(LayoutError::Ragged { .. } | LayoutError::Offset { .. }) => Err(error),
                prps => prps,
            },
            Err(error) => Err(error),
        }
    }

    /// Copies `bytes`, at most a page, to a list page.
    ///
    /// # Errors
    /// [`LayoutError`]; no list page is held.
    pub(super) fn page<L: ListPages<Page = Block, TakeError = AllocError>>(
        bytes: &[u8],
        lists: &mut L,
    ) -> Result<Self, LayoutError> {
        let page = lists.take().map_err(LayoutError::Take)?;
        match page.memory().copy_from_slice(0, bytes) {
            Ok(()) => Ok(Self::Page(Page(Some(page)))),
            Err(error) => {
                lists.give(page);
                Err(LayoutError::Memory(error))
            }
        }
    }

    /// Adds the entries and list pages to `stats`.
    pub(super) fn count(&self, stats: &mut QueueStats) {
        match self {
            Self::Prp(prps) => {
                stats.prp_entries += prps.entries();
                stats.prp_list_pages += prps.list_pages() as u64;
            }
            Self::Sgl(sgl) => {
                stats.sgl_data_blocks += sgl.data_blocks();
                stats.sgl_segment_pages += sgl.list_pages() as u64;
            }
            Self::Page(_) => {}
        }
    }

    /// Sets DPTR and PSDT of `command`.
    pub(super) fn set(&self, command: &mut Command) {
        match self {
            Self::Prp(prps) => {
                (command.prp1, command.prp2) = (U64::new(prps.prp1()), U64::new(prps.prp2()))
            }
            Self::Sgl(sgl) => command.set_sgl1(sgl.sgl1().words()),
            Self::Page(page) => {
                command.prp1 = U64::new(page.0.as_ref().map_or(0, |page| page.iova().raw()));
            }
        }
    }

    /// Frees the list pages. The controller no longer reads them.
    pub(super) fn release<L: ListPages<Page = Block>>(self, lists: &mut L) {
        match self {
            Self::Prp(prps) => prps.release(lists),
            Self::Sgl(sgl) => sgl.release(lists),
            Self::Page(mut page) => page.0.take().into_iter().for_each(|page| lists.give(page)),
        }
    }
}

// The segments of a payload, and how much of them has been sent.

/// A copy of a payload's segments and the position up to which commands have been built. The
/// allocation is kept from one request to the next.
#[derive(Debug, Default)]
pub(super) struct SegmentCursor {
    segments: Vec<Segment>,
    index: usize,
    offset: u64,
}

impl SegmentCursor {
    /// Copies segments up to `bytes` bytes; returns how many bytes they have, at most `bytes`.
    pub(super) fn set(&mut self, segments: impl Iterator<Item = Segment>, bytes: u64) -> u64 {
        self.segments.clear();
        (self.index, self.offset) = (0, 0);
        let mut total = 0;
        for segment in segments.filter(|segment| segment.len > 0) {
            if total == bytes {
                break;
            }
            let len = segment.len.min(bytes - total);
            total += len;
            self.segments.push(Segment { iova: segment.iova, len });
        }
        total
    }

    pub(super) fn count(&self) -> u64 {
        self.segments.len() as u64
    }

    /// Returns the next `bytes` bytes as segments, without advancing.
    pub(super) fn peek(&self, bytes: u64) -> impl Iterator<Item = Segment> + Clone + '_ {
        let mut left = bytes;
        let mut skip = self.offset;
        self.segments.iter().skip(self.index).map_while(move |segment| {
            if left == 0 {
                return None;
            }
            let len = (segment.len - skip).min(left);
            // A segment that wraps is rejected by the layout.
            let iova = segment.iova.checked_add(skip)?;
            (skip, left) = (0, left - len);
            Some(Segment { iova, len })
        })
    }

    /// Advances by `bytes`.
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

    proptest! {
        #[test]
        fn a_cursor_returns_each_byte_once(
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
            let mut cursor = SegmentCursor::default();
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
