//! A window: 2 MiB of I/O virtual addresses that one owner allocates from, and what the owner
//! shares with other threads.

use super::counts::{Counts, Writers};
use super::granules::{FreeRuns, GRANULES, Granules, WORDS, words};
use crate::addr::{Iova, IovaRange};
use crate::iova::IovaSpace;
use crate::share::{Shared, Stock};
use crate::sync::{AtomicU64, CachePadded, Ordering, SpinLock};
use crate::table::PinnedLeaf;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::Range;

/// The length of a window, and its alignment: what one table page of the lowest level maps.
pub(super) const WINDOW_BYTES: u64 = GRANULES as u64 * IovaSpace::GRANULE;

/// How many windows without any live address an owner keeps; more return to the address space.
pub(super) const IDLE: usize = 16;

/// What an owner shares with other threads.
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
            // For as many as are kept: returning addresses allocates nothing.
            idle: SpinLock::new(Vec::with_capacity(IDLE)),
        }
    }
}

/// What the owner of a window shares with those that return addresses to it.
///
/// Each mapping in a window has one share of it, and the owner a stock. The last share closes the
/// window: while a mapping lives its addresses stay allocated, whether its owner still exists or
/// not.
#[derive(Debug)]
pub(super) struct Window {
    range: IovaRange,
    /// The table page that translates the window, if its backend has it pinned.
    pin: Option<PinnedLeaf>,
    owner: Arc<OwnerShared>,
    /// Granules that others than the owner have returned and the owner has not collected.
    returned: CachePadded<[AtomicU64; WORDS]>,
}

impl Window {
    /// `range` is one window, aligned.
    pub(super) fn new(range: IovaRange, pin: Option<PinnedLeaf>, owner: Arc<OwnerShared>) -> Self {
        Self {
            range,
            pin,
            owner,
            returned: CachePadded(core::array::from_fn(|_| AtomicU64::new(0))),
        }
    }

    #[inline(always)]
    pub(super) fn pin(&self) -> Option<&PinnedLeaf> {
        self.pin.as_ref()
    }

    /// Returns the range and the pin of a window that is closed.
    pub(super) fn into_parts(self) -> (IovaRange, Option<PinnedLeaf>) {
        (self.range, self.pin)
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
        // By the address alone, because a window is aligned: its header may not be in the cache.
        (granules(iova.start().raw() % WINDOW_BYTES), granules(iova.len()))
    }

    /// Returns `iova` to the owner, from any thread, when no device can reach anything there.
    pub(super) fn give_back(&self, iova: IovaRange) {
        let (first, count) = self.granules(iova);
        for (word, bits) in words(first, count) {
            if let Some(word) = self.returned.get(word) {
                // Release: what the last mapping did with the addresses comes before the next one.
                word.fetch_or(bits, Ordering::Release);
            }
        }
        self.owner.returned.fetch_add(count.into(), Ordering::Release);
    }

    /// Takes the granules that others have returned since the last call. For the owner alone.
    pub(super) fn collect(&self) -> Granules {
        let take = |word: &AtomicU64| match word.load(Ordering::Relaxed) {
            0 => 0,
            _ => word.swap(0, Ordering::Acquire),
        };
        Granules(core::array::from_fn(|word| self.returned.get(word).map_or(0, take)))
    }
}

/// A mapping's share of the window that its addresses are in. Dropping it leaves the window open
/// for good, and with it the addresses in use: it is taken by what returns them.
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
    /// What is not free is live, or part of the current run.
    pub(super) granules: FreeRuns,
    /// How many are live: handed out and neither returned here nor collected. All of the current
    /// run count as live.
    pub(super) live: u32,
}

/// By pointer: a list of them moves eight bytes for each, and not its map.
pub(super) type SlotBox = Box<Slot>;

impl Slot {
    /// Returns the window of a slot that is given up, unless a mapping still has a share of it,
    /// which closes it then.
    pub(super) fn into_window(self) -> Option<Window> {
        self.stock.into_inner()
    }
}
