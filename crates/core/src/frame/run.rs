//! Runs of more than one word: orders 7 and up, and contiguous runs of any length.

use super::error::{AlreadyFree, FrameError};
use super::map::{Part, REGION, parts};
use super::number::{Frame, Order};
use super::zone::{MAX_PARTIAL, Zone};

impl Zone {
    /// Allocates a contiguous run of `run_frames` frames, of any length, that starts at a multiple
    /// of `align_frames` from the zone's start. For buffers: up to 256 frames come from partly free
    /// regions, more are the first fit of wholly free ones. O(regions).
    ///
    /// # Errors
    /// [`FrameError::NoRun`]; [`FrameError::Empty`] if `run_frames` is 0; [`FrameError::Alignment`]
    /// if `align_frames` is not a power of two.
    pub fn alloc_run(&self, run_frames: u32, align_frames: u32) -> Result<Frame, FrameError> {
        if run_frames == 0 {
            return Err(FrameError::Empty { frame: None });
        }
        if !align_frames.is_power_of_two() {
            return Err(FrameError::Alignment { align_frames });
        }
        let Some(frame) = self.find_run(run_frames, align_frames) else {
            self.count_exhausted();
            return Err(FrameError::NoRun { run_frames, align_frames, frames: self.frames() });
        };
        self.counters().alloc(run_frames.into());
        Ok(frame)
    }

    /// Frees a run from [`alloc_run`](Self::alloc_run), or a part of it. O(`run_frames` / 64).
    ///
    /// # Errors
    /// [`FrameError::Foreign`], [`FrameError::DoubleFree`] as for [`free`](Self::free);
    /// [`FrameError::Empty`] if `run_frames` is 0.
    pub fn free_run(&self, first: Frame, run_frames: u32) -> Result<(), FrameError> {
        if run_frames == 0 {
            return Err(FrameError::Empty { frame: Some(first) });
        }
        self.check(first, run_frames)?;
        self.kept.refuse(first.index(), run_frames)?;
        self.release_range(first.index(), run_frames)?;
        self.count_free(run_frames.into());
        Ok(())
    }

    /// Allocates a run of order 7 and up.
    pub(super) fn alloc_large(&self, order: Order) -> Result<Frame, FrameError> {
        let run = order.frames();
        let found = match run {
            ..REGION => self.search(order.get(), MAX_PARTIAL, |region| {
                let mut places = (0..REGION / run).map(|i| region * REGION + i * run);
                places.find(|&first| self.claim_range(first, run)).map(Frame::inside)
            }),
            _ => self.first_fit(run, run),
        };
        found.ok_or_else(|| self.exhausted(order))
    }

    fn find_run(&self, run: u32, align: u32) -> Option<Frame> {
        let order = run.max(align).checked_next_power_of_two()?.trailing_zeros();
        match u8::try_from(order)
            .ok()
            .filter(|&order| order < Order::HUGE.get())
            .and_then(Order::new)
        {
            Some(order) => {
                let frame = self.alloc_uncounted(order).ok()?;
                let rest = order.frames() - run;
                if rest > 0 {
                    // Does not fail: only this call owns them.
                    _ = self.release_range(frame.index() + run, rest);
                }
                Some(frame)
            }
            None => self.first_fit(run, align.max(REGION)),
        }
    }

    /// Claims the first run that starts with a region: wholly free regions, and the front of one
    /// more.
    fn first_fit(&self, run: u32, align: u32) -> Option<Frame> {
        self.limits.use_from_now_on();
        self.update_rover_hints();
        let step = align / REGION;
        let (whole, rest) = (run / REGION, run % REGION);
        let mut region = 0_u32;
        loop {
            if whole > 0 {
                region = self.whole.next_from(region)?.checked_next_multiple_of(step)?;
            }
            if u64::from(region) * u64::from(REGION) + u64::from(run) > u64::from(self.frames()) {
                return None;
            }
            let first = region * REGION;
            let gap = (region..region + whole).rev().find(|&r| !self.whole.has(r));
            let taken = gap.or_else(|| {
                (rest > 0 && !self.all_free(first + whole * REGION, rest)).then_some(region + whole)
            });
            match taken {
                // No run can start before the last obstacle.
                Some(obstacle) => region = (obstacle + 1).checked_next_multiple_of(step)?,
                None if self.claim_range(first, run) => return Some(Frame::inside(first)),
                None => region = region.checked_add(step)?,
            }
        }
    }

    fn all_free(&self, first: u32, run: u32) -> bool {
        parts(first, run).all(|part| self.map.free_of(part) == part.mask)
    }

    /// Claims exactly these frames, or none.
    fn claim_range(&self, first: u32, run: u32) -> bool {
        if !self.all_free(first, run) {
            return false;
        }
        for (done, part) in parts(first, run).enumerate() {
            if !self.map.claim_exactly(part) {
                for part in parts(first, run).take(done) {
                    _ = self.release(part);
                }
                return false;
            }
        }
        for region in first / REGION..(first + run).div_ceil(REGION) {
            if first <= region * REGION && (region + 1) * REGION <= first + run {
                self.remove_hint(&self.whole, region);
                self.limits.note_claimed(region);
            } else {
                self.update_hints_after_claim(region);
            }
        }
        true
    }

    /// Frees exactly these frames, if all of them are allocated.
    pub(super) fn release_range(&self, first: u32, run: u32) -> Result<(), AlreadyFree> {
        let free = parts(first, run).map(|part| Part { mask: self.map.free_of(part), ..part });
        if let Some(free) = free.clone().find(|part| part.mask != 0) {
            return Err(AlreadyFree(free.first()));
        }
        parts(first, run).try_for_each(|part| self.release(part))
    }
}
