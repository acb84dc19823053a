//! [`Zone`], the allocator of the frames of a range of memory.

use super::counters::{FrameStats, Watermarks};
use super::inner::Inner;
use super::number::{Frame, FrameError, MAX_ZONE, MIN_ZONE, Order};
use super::owner::ZoneLocal;
use crate::share::Shared;

/// The allocator of the frames of a range of memory. Its operations can be called from any thread,
/// and take no lock. Bulk calls are an owner's: [`ZoneLocal`].
///
/// A handle: a clone is the same zone, which lives as long as a handle, a
/// [`ZoneLocal`] or a [`FrameList`](super::FrameList). Calls on it share cache lines with all other
/// threads; those on a `ZoneLocal` mostly do not.
///
/// All operations are lock-free but one: to free *a part* of a run of 2 MiB or more waits for
/// threads that are within a few instructions of undoing a claim in it.
#[derive(Clone, Debug)]
pub struct Zone(pub(super) Shared<Inner>);

impl Zone {
    /// The fewest frames that a zone has: 2 MiB.
    pub const MIN_FRAMES: u32 = MIN_ZONE;
    /// The most frames that a zone has: 1 TiB.
    pub const MAX_FRAMES: u32 = MAX_ZONE;

    /// Creates a zone of `frames` frames, all free, with watermarks in proportion: `min` is 1/1024
    /// of the frames, at most 16,384 (64 MiB); `low` is 5/4 and `high` 3/2 of that. Zones under 64
    /// MiB have none.
    ///
    /// Its metadata is 0.13 byte per frame and about 2 KiB. The map is not touched before it is
    /// used, so even 1 TiB takes a fraction of a millisecond where the system provides zeroed
    /// memory.
    ///
    /// # Errors
    /// [`FrameError::ZoneSize`]; [`FrameError::NoMemory`] if there is none for the metadata.
    pub fn new(frames: u32) -> Result<Self, FrameError> {
        Self::with_watermarks(frames, Watermarks::for_frames(frames))
    }

    /// Creates a zone as [`new`](Self::new) does, with these watermarks.
    ///
    /// # Errors
    /// [`FrameError::ZoneSize`]; [`FrameError::NoMemory`] if there is none for the metadata.
    pub fn with_watermarks(frames: u32, watermarks: Watermarks) -> Result<Self, FrameError> {
        Ok(Self(Shared::new(Inner::new(frames, watermarks)?)))
    }

    /// Returns how many frames the zone has.
    pub(super) fn frames(&self) -> u32 {
        self.0.frames()
    }

    /// Returns how many bytes the metadata takes.
    #[cfg(all(test, not(loom)))]
    pub(super) fn metadata_bytes(&self) -> usize {
        self.0.metadata_bytes()
    }

    /// Returns the counters. They are exact while no call is being made, otherwise they may be some
    /// steps apart. O(owners), under a lock that only reports and owners that come and go share, and
    /// bulk calls near a watermark.
    pub fn stats(&self) -> FrameStats {
        self.0.counters.stats(self.frames().into())
    }

    /// Returns how many frames are in use, as far as owners have added their counts: off by about
    /// 1/256 of the zone, at most 4,608 frames, for each owner. O(1), and takes no lock: for values
    /// that every call updates, such as a peak.
    pub fn in_use_roughly(&self) -> u64 {
        self.0.counters.in_use().min(self.frames().into())
    }

    /// Returns a new owner's handle, for one thread of control. O(owners), and it allocates its
    /// magazine: 16 bytes for each 64 frames of the zone, at most 64 KiB.
    ///
    /// The magazine holds at most 1/32 of the zone, at least 512 frames and at most 32,768 (128
    /// MiB); less in zones of up to 16 MiB. They are unavailable to other owners.
    pub fn local(&self) -> ZoneLocal {
        ZoneLocal::new(self.0.stock())
    }

    /// Allocates a run of 2^order frames, aligned to its size. O(1) for order 0. For a run, a
    /// region where it was not found is looked at again only after a free there.
    ///
    /// Frames in the magazines of owners are unavailable.
    ///
    /// # Errors
    /// [`FrameError::Exhausted`]. For orders above 6 also if another thread tries the same run at
    /// the same moment and fails.
    #[inline]
    pub fn alloc(&self, order: Order) -> Result<Frame, FrameError> {
        let frame = self.0.alloc_uncounted(order);
        match frame {
            Ok(_) => self.0.counters.alloc(order.frames().into()),
            Err(_) => self.0.count_exhausted(),
        }
        frame
    }

    /// Frees a run, whichever owner allocated it. O(2^order / 64).
    ///
    /// Not detected: a second free of a single frame that is in the magazine of a
    /// [`ZoneLocal`] (see the [module](super)).
    ///
    /// # Errors
    /// [`FrameError::Foreign`], [`FrameError::Misaligned`], [`FrameError::DoubleFree`]; nothing has
    /// changed, unless another thread freed part of the same run at the same moment: then the
    /// frames before the one named are free.
    #[inline]
    pub fn free(&self, frame: Frame, order: Order) -> Result<(), FrameError> {
        self.0.free(frame, order)
    }

    /// Allocates a contiguous run of `run_frames` frames, of any length, that starts at a multiple
    /// of `align_frames` from the zone's start. For buffers: up to 256 frames come from partly free
    /// regions, more are the first fit of wholly free ones. O(regions).
    ///
    /// # Errors
    /// [`FrameError::NoRun`]; [`FrameError::Empty`] if `run_frames` is 0; [`FrameError::Alignment`]
    /// if `align_frames` is not a power of two.
    pub fn alloc_run(&self, run_frames: u32, align_frames: u32) -> Result<Frame, FrameError> {
        self.0.alloc_run(run_frames, align_frames)
    }

    /// Frees a run from [`alloc_run`](Self::alloc_run), or a part of it. O(`run_frames` / 64).
    ///
    /// # Errors
    /// [`FrameError::Foreign`], [`FrameError::DoubleFree`] as for [`free`](Self::free);
    /// [`FrameError::Empty`] if `run_frames` is 0.
    pub fn free_run(&self, first: Frame, run_frames: u32) -> Result<(), FrameError> {
        self.0.free_run(first, run_frames)
    }
}

/// The state that tests check.
#[cfg(test)]
impl Zone {
    /// Creates a zone without watermarks in which at most `slots` owners reserve regions.
    pub(super) fn with_slots(frames: u32, slots: u32) -> Self {
        let inner = Inner::with_slots(frames, Watermarks::NONE, slots);
        Self(Shared::new(inner.unwrap()))
    }

    pub(super) fn taken(&self) -> u64 {
        self.0.taken()
    }

    #[cfg(not(loom))]
    /// Returns how many regions of 2 MiB are wholly free.
    pub(super) fn whole_regions(&self) -> usize {
        (0..self.frames() / 512).filter(|&region| self.0.map.is_whole(region)).count()
    }

    #[cfg(not(loom))]
    pub(super) fn available(&self) -> u64 {
        let taken = self.0.counters.taken_exactly();
        u64::try_from(i64::from(self.frames()) - taken).unwrap()
    }

    pub(super) fn under_pressure(&self) -> bool {
        self.0.under_pressure()
    }

    #[cfg(not(loom))]
    pub(super) fn watermarks(&self) -> Watermarks {
        self.0.watermarks
    }
}
