//! Freed frames on their way into an owner's magazine, or past it.

use super::error::AlreadyFree;
use super::local::Local;
use super::map::Part;
use super::zone::Zone;
use core::ops::Deref;

impl<H: Deref<Target = Zone>> Local<H> {
    /// Puts freed frames of one word into the magazine; `frames` is how many.
    #[inline(always)]
    pub(super) fn cache(&mut self, part: Part, frames: u32) -> Result<(), AlreadyFree> {
        let current = self.magazine.current();
        if part.word == current.word && current.mask != 0 {
            let already = self.zone.map.free_of(part) | (current.mask & part.mask);
            if already == 0 {
                self.magazine.add_current(part.mask);
                return Ok(());
            }
        }
        self.cache_elsewhere(part, frames)
    }

    /// As `cache`, for any word. First what frees in random order need.
    #[inline(never)]
    fn cache_elsewhere(&mut self, part: Part, frames: u32) -> Result<(), AlreadyFree> {
        if self.scatter.bypasses() {
            return self.bypass(part, frames);
        }
        let free = self.zone.map.free_of(part);
        if self.magazine.add_elsewhere(part, free) { Ok(()) } else { self.cache_rest(part, frames) }
    }

    /// As `cache`, for what is left.
    #[inline(never)]
    fn cache_rest(&mut self, part: Part, frames: u32) -> Result<(), AlreadyFree> {
        let Some(held) = self.magazine.held_of(part.word) else {
            return self.cache_new(part, frames);
        };
        if self.is_free(part, held) {
            return Err(self.already_free(part, held));
        }
        self.magazine.add(part);
        Ok(())
    }

    /// Whether one of these frames is free: in the map, among those `held` of its word in the
    /// magazine, or in a run that an owner keeps. No frame of a kept run is in a magazine, so only
    /// an empty word has to be looked for there.
    #[inline(always)]
    fn is_free(&self, part: Part, held: u64) -> bool {
        self.zone.map.free_of(part) | (held & part.mask) != 0
            || (held == 0 && self.zone.kept.has(part.region()))
    }

    /// Returns the first of these frames that is free.
    #[cold]
    fn already_free(&self, part: Part, held: u64) -> AlreadyFree {
        let kept = if self.zone.kept.has(part.region()) { part.mask } else { 0 };
        let mask = self.zone.map.free_of(part) | (held & part.mask) | kept;
        AlreadyFree(Part { mask, ..part }.first())
    }

    /// As `cache`, where the word has no way.
    #[inline(never)]
    fn cache_new(&mut self, part: Part, frames: u32) -> Result<(), AlreadyFree> {
        if self.is_free(part, 0) {
            return Err(self.already_free(part, 0));
        }
        if self.zone.under_pressure() {
            self.flush();
            self.zone.release(part)?;
            self.tally.claimed -= i64::from(frames);
            // Folded at once, so that the zone detects its recovery.
            self.fold();
            return Ok(());
        }
        let evicted = self.magazine.peek(self.magazine.index_of(part.word)).mask;
        self.restore(part);
        if evicted != 0 && self.scatter.note_evicted(evicted.count_ones()) {
            self.flush_magazine();
        }
        Ok(())
    }

    /// Frees frames in the map, while the magazine is empty.
    #[inline(never)]
    fn bypass(&mut self, part: Part, frames: u32) -> Result<(), AlreadyFree> {
        debug_assert!(self.magazine.is_blank(), "frees bypass a magazine with frames");
        if frames != 1 || self.zone.under_pressure() {
            return self.bypass_many(part, frames);
        }
        self.zone.refuse_kept(part)?;
        let free = self.zone.map.release(part)?;
        self.tally.claimed -= 1;
        self.scatter.note_bypassed(part.word, self.tally.frees);
        self.zone.note_released_at_random(part, free);
        Ok(())
    }

    #[inline(never)]
    fn bypass_many(&mut self, part: Part, frames: u32) -> Result<(), AlreadyFree> {
        if self.scatter.is_dense(frames) || self.zone.under_pressure() {
            return self.cache_new(part, frames);
        }
        self.zone.refuse_kept(part)?;
        self.zone.release(part)?;
        self.tally.claimed -= i64::from(frames);
        Ok(())
    }
}
