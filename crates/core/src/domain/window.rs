//! The addresses of a mapping; the window that they come from (2 MiB of I/O virtual addresses that
//! one owner allocates from), what its owner shares with other threads, and its free granules.

use super::backend::{Revocation, WindowToken};
use super::stats::{Counts, Writers};
use crate::addr::{Iova, IovaRange};
use crate::iova::IovaSpace;
use crate::share::{Shared, Stock};
use crate::sync::{AtomicU64, CachePadded, Ordering, SpinLock};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::Range;

/// The addresses of a mapping. Dropping them leaves them in use for good.
#[derive(Debug)]
#[must_use = "what is dropped stays in use"]
pub(super) struct Addresses {
    pub(super) iova: IovaRange,
    pub(super) origin: Origin,
}

/// The source of addresses.
#[derive(Debug)]
pub(super) enum Origin {
    /// The memory stays mapped there for its lifetime: nothing is returned.
    Fixed,
    /// The domain's address space.
    Space,
    /// An owner's window.
    Window(WindowShare),
}

impl Addresses {
    #[inline(always)]
    pub(super) fn is_fixed(&self) -> bool {
        matches!(self.origin, Origin::Fixed)
    }

    /// Returns the backend's token for the window that they are in, if it keeps one.
    #[inline(always)]
    pub(super) fn token(&self) -> Option<&WindowToken> {
        match &self.origin {
            Origin::Window(share) => share.window().token(),
            Origin::Fixed | Origin::Space => None,
        }
    }

    /// Returns the range that the backend has to revoke for them.
    #[inline(always)]
    pub(super) fn revocation(&self) -> Revocation<'_> {
        Revocation { range: self.iova, window: self.token() }
    }

    /// Prefetches the table entry of the first of them, if they are in a window.
    #[inline(always)]
    pub(super) fn prefetch(&self) {
        if let Some(token) = self.token() {
            token.prefetch(self.iova.start());
        }
    }

    /// Returns how many bytes a revocation holds: none of memory that stays mapped.
    #[inline(always)]
    pub(super) fn held_bytes(&self) -> u64 {
        if self.is_fixed() { 0 } else { self.iova.len() }
    }
}

/// The length of a window, and its alignment: what one table page of the lowest level maps.
pub(super) const WINDOW_BYTES: u64 = GRANULES as u64 * IovaSpace::GRANULE;

/// The number of windows without live addresses that an owner keeps; more return to the address
/// space. A batch of 256 mappings of 1 MiB finds the windows of the previous batch.
pub(super) const IDLE: usize = 128;

/// The state that an owner shares with other threads.
pub(super) struct OwnerShared {
    /// Changed by the owner alone.
    pub(super) counts: CachePadded<Counts>,
    /// Granules of its windows that others have returned so far.
    pub(super) returned: CachePadded<AtomicU64>,
    /// The owner's windows in which nothing is live. Others close them where addresses or table
    /// pages have run out.
    pub(super) idle: SpinLock<Vec<SlotBox>>,
}

impl fmt::Debug for OwnerShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnerShared").field("counts", &*self.counts).finish_non_exhaustive()
    }
}

impl OwnerShared {
    pub(super) fn new() -> Self {
        Self {
            counts: CachePadded(Counts::new(Writers::One)),
            returned: CachePadded(AtomicU64::new(0)),
            // Room for all that are kept, so that keeping a window allocates nothing.
            idle: SpinLock::new(Vec::with_capacity(IDLE)),
        }
    }
}

/// The state that the owner of a window shares with threads that return addresses to it.
///
/// Each mapping in a window has one share of it, and the owner a stock. The last share closes the
/// window: while a mapping lives its addresses stay allocated, whether its owner still exists or
/// not.
#[derive(Debug)]
pub(super) struct Window {
    range: IovaRange,
    /// The token that the backend keeps for it.
    token: Option<WindowToken>,
    owner: Arc<OwnerShared>,
    /// Granules that others than the owner have returned and the owner has not collected.
    returned: CachePadded<[AtomicU64; WORDS]>,
}

impl Window {
    /// `range` is one window, aligned.
    pub(super) fn new(
        range: IovaRange,
        token: Option<WindowToken>,
        owner: Arc<OwnerShared>,
    ) -> Self {
        Self {
            range,
            token,
            owner,
            returned: CachePadded(core::array::from_fn(|_| AtomicU64::new(0))),
        }
    }

    #[inline(always)]
    pub(super) fn token(&self) -> Option<&WindowToken> {
        self.token.as_ref()
    }

    /// Returns the range and the token of a window that is closed.
    pub(super) fn into_parts(self) -> (IovaRange, Option<WindowToken>) {
        (self.range, self.token)
    }

    /// Returns the addresses of `granules`; `None` if they are not in the window, or none at all.
    pub(super) fn part(&self, granules: &Range<u32>) -> Option<IovaRange> {
        let bytes = |granules: u32| u64::from(granules) * IovaSpace::GRANULE;
        self.range.part(bytes(granules.start), bytes(granules.end.checked_sub(granules.start)?))
    }

    /// Returns the number of the granule at `iova`, or how many there are if it is behind the
    /// window.
    pub(super) fn granule(&self, iova: Iova) -> u32 {
        let offset = iova.checked_offset_from(self.range.start()).unwrap_or(0);
        u32::try_from(offset / IovaSpace::GRANULE).map_or(GRANULES, |granule| granule.min(GRANULES))
    }

    /// Returns the first granule of `iova` in the window, and their number.
    #[inline(always)]
    pub(super) fn granules(&self, iova: IovaRange) -> (u32, u32) {
        let granules = |bytes: u64| u32::try_from(bytes / IovaSpace::GRANULE).unwrap_or(GRANULES);
        // Computed from the address alone, because a window is aligned: its header may not be in
        // the cache.
        (granules(iova.start().raw() % WINDOW_BYTES), granules(iova.len()))
    }

    /// Returns `iova` to the owner, from any thread, when no device can reach anything there.
    pub(super) fn give_back(&self, iova: IovaRange) {
        let (first, count) = self.granules(iova);
        for (word, bits) in words(first, count) {
            if let Some(word) = self.returned.get(word) {
                // Release: uses of the addresses by the last mapping come before the next one.
                word.fetch_or(bits, Ordering::Release);
            }
        }
        self.owner.returned.fetch_add(count.into(), Ordering::Release);
    }

    /// Collects the granules that others have returned since the last call. For the owner alone.
    pub(super) fn collect(&self) -> Granules {
        let take = |word: &AtomicU64| match word.load(Ordering::Relaxed) {
            0 => 0,
            _ => word.swap(0, Ordering::Acquire),
        };
        Granules(core::array::from_fn(|word| self.returned.get(word).map_or(0, take)))
    }
}

/// A mapping's share of the window that its addresses are in. Dropping it leaves the window open
/// for good, and with it the addresses in use: the call that returns them takes it.
#[derive(Debug)]
pub(super) struct WindowShare {
    window: ManuallyDrop<Shared<Window>>,
    /// The window's place among those of its owner.
    slot: u32,
}

impl WindowShare {
    pub(super) fn new(window: Shared<Window>, slot: u32) -> Self {
        Self { window: ManuallyDrop::new(window), slot }
    }

    #[inline(always)]
    pub(super) fn window(&self) -> &Window {
        &self.window
    }

    #[inline(always)]
    pub(super) fn slot(&self) -> u32 {
        self.slot
    }

    /// Whether it is a share of the window that `stock` is of.
    #[inline(always)]
    pub(super) fn is_of(&self, stock: &Stock<Window>) -> bool {
        stock.is_same(&self.window)
    }

    #[inline(always)]
    pub(super) fn into_shared(self) -> Shared<Window> {
        ManuallyDrop::into_inner(self.window)
    }
}

/// A window, as its owner sees it.
pub(super) struct Slot {
    pub(super) stock: Stock<Window>,
    /// The others are live, or part of the current run.
    pub(super) granules: FreeRuns,
    /// The number of live granules: allocated and neither returned here nor collected. All of the
    /// current run count as live.
    pub(super) live: u32,
}

/// Boxed: a list of them moves eight bytes for each, and not its map.
pub(super) type SlotBox = Box<Slot>;

impl Slot {
    /// Returns the window of a slot that is given up, unless a mapping still has a share of it,
    /// which closes it then.
    pub(super) fn into_window(self) -> Option<Window> {
        self.stock.into_inner()
    }
}

/// Granules in a window.
pub(super) const GRANULES: u32 = 512;
/// Words of a map of granules.
pub(super) const WORDS: usize = (GRANULES / 64) as usize;

/// The granules of a window that are in use: a bit for each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Granules(pub(super) [u64; WORDS]);

/// Yields the words that `count` granules from `first` on are in, with their bits in each.
pub(super) fn words(first: u32, count: u32) -> impl Iterator<Item = (usize, u64)> {
    let end = first.saturating_add(count).min(GRANULES);
    let mut at = first;
    core::iter::from_fn(move || {
        let bits = end.checked_sub(at).filter(|&left| left > 0)?.min(64 - at % 64);
        let word = ((at / 64) as usize, (u64::MAX >> (64 - bits)) << (at % 64));
        at += bits;
        Some(word)
    })
}

impl Granules {
    /// Marks `count` granules from `first` on as in use.
    #[inline]
    pub(super) fn set(&mut self, first: u32, count: u32) {
        for (word, bits) in words(first, count) {
            if let Some(word) = self.0.get_mut(word) {
                *word |= bits;
            }
        }
    }

    /// Marks them as free.
    #[inline]
    pub(super) fn clear(&mut self, first: u32, count: u32) {
        let bit = first % 64;
        if bit + count < 64
            && let Some(word) = self.0.get_mut((first / 64) as usize)
        {
            // All in one word, as most are.
            *word &= !(((1 << count) - 1) << bit);
            return;
        }
        for (word, bits) in words(first, count) {
            if let Some(word) = self.0.get_mut(word) {
                *word &= !bits;
            }
        }
    }

    /// Marks all that `others` contains as free, and returns how many it contains.
    pub(super) fn clear_all(&mut self, others: &Self) -> u32 {
        let mut cleared = 0;
        for (word, bits) in self.0.iter_mut().zip(others.0) {
            *word &= !bits;
            cleared += bits.count_ones();
        }
        cleared
    }

    /// Returns the first run of at least `count` free granules at or behind `from`, in full.
    ///
    /// # Errors
    /// The length of the longest run there.
    pub(super) fn free_run(&self, from: u32, count: u32) -> Result<Range<u32>, u32> {
        let mut longest = 0;
        let mut start = self.next(from, 0);
        while start < GRANULES {
            let end = self.next(start, u64::MAX);
            if end - start >= count {
                return Ok(start..end);
            }
            longest = longest.max(end - start);
            start = self.next(end, 0);
        }
        Err(longest)
    }

    /// Returns the first granule at or behind `from` that is free, if `wanted` is 0, or in use, if
    /// it is all ones; 512 if there is none.
    fn next(&self, from: u32, wanted: u64) -> u32 {
        let mut at = from;
        while let Some(&word) = self.0.get((at / 64) as usize) {
            let found = !(word ^ wanted) & (u64::MAX << (at % 64));
            if found != 0 {
                return at - at % 64 + found.trailing_zeros();
            }
            at = at - at % 64 + 64;
        }
        GRANULES
    }
}

/// The granules of a window, of which runs that are free are taken. It remembers how long a run can
/// be at most, so that a window full of short ones is searched once, and not for each longer run
/// that is wanted.
#[derive(Debug)]
pub(super) struct FreeRuns {
    used: Granules,
    /// An upper bound of the longest free run.
    longest: u32,
}

impl FreeRuns {
    /// Returns those of a window that is free.
    pub(super) fn new() -> Self {
        Self { used: Granules::default(), longest: GRANULES }
    }

    /// Marks `count` granules from `first` on as free.
    #[inline(always)]
    pub(super) fn free(&mut self, first: u32, count: u32) {
        self.used.clear(first, count);
        if self.longest < GRANULES {
            // At worst they join two of the longest.
            self.longest = (2 * self.longest + count).min(GRANULES);
        }
    }

    /// Marks all that `others` contains as free, and returns how many it contains.
    pub(super) fn free_all(&mut self, others: &Granules) -> u32 {
        let freed = self.used.clear_all(others);
        if freed > 0 {
            self.longest = GRANULES;
        }
        freed
    }

    /// Takes the first run of at least `count` granules at or behind `from`, all of it. O(1) if too
    /// little has become free since a search of the whole window found none.
    pub(super) fn take(&mut self, from: u32, count: u32) -> Option<Range<u32>> {
        if self.longest < count {
            return None;
        }
        match self.used.free_run(from, count) {
            Ok(run) => {
                self.used.set(run.start, run.end - run.start);
                Some(run)
            }
            Err(longest) => {
                if from == 0 {
                    self.longest = longest;
                }
                None
            }
        }
    }
}
