//! Where the table pages of level 1 were that walks found last, so that most maps and clears need
//! no walk.
//!
//! A hint may be wrong: the page that it names may be free, retired, or used elsewhere by now.
//! Whether it is the one wanted is decided by its record alone, which says so of a page that a walk
//! found as well ([`Store::descend_unlocked`](super::store::Store::descend_unlocked)). So hints are
//! ordered with nothing but the addition of the memory that they point into, and loom need not see
//! them.

use super::levels::span;
use super::page_index::PageIndex;
use core::sync::atomic::{AtomicU64, Ordering};

const HINTS: usize = 64;

/// One hint for each of the windows of 2 MiB whose numbers agree in the lowest bits: the rest of
/// the window's number in the upper half, the page in the lower one. All zero is the root, which is
/// no page of level 1.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Hints([AtomicU64; HINTS]);

impl Hints {
    pub(super) const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; HINTS])
    }

    /// Returns the page that may translate the window of `iova`.
    #[inline]
    pub(super) fn get(&self, iova: u64) -> Option<PageIndex> {
        let (hint, tag) = self.place(iova)?;
        // Acquire: the chunk of the page was added before.
        let found = hint.load(Ordering::Acquire);
        #[expect(clippy::cast_possible_truncation, reason = "the lower half of what was noted")]
        let page = PageIndex::from_raw(found as u32);
        (found >> u32::BITS == tag).then_some(page)
    }

    /// Notes the page that translates the window of `iova`.
    #[inline]
    pub(super) fn set(&self, iova: u64, page: PageIndex) {
        if let Some((hint, tag)) = self.place(iova) {
            hint.store(tag << u32::BITS | u64::from(page.raw()), Ordering::Release);
        }
    }

    /// Returns the hint of a window, and what tells the window from the others that share it: 30
    /// bits, if addresses have 57.
    #[inline]
    fn place(&self, iova: u64) -> Option<(&AtomicU64, u64)> {
        let window = iova / span(2);
        #[expect(clippy::cast_possible_truncation, reason = "less than the number of hints")]
        let place = (window % HINTS as u64) as usize;
        Some((self.0.get(place)?, window / HINTS as u64))
    }
}
