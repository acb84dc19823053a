//! Runs through an owner: whole regions that it keeps, and others that it passes on to the zone.

use super::error::FrameError;
use super::local::Local;
use super::map::{Part, REGION, parts};
use super::number::{Frame, Order};
use super::zone::Zone;
use core::ops::Deref;

impl<H: Deref<Target = Zone>> Local<H> {
    pub(super) fn alloc_run_of(&mut self, order: Order) -> Result<Frame, FrameError> {
        if order == Order::HUGE
            && let Some(region) = self.kept.pop(&self.zone.kept)
        {
            return Ok(Frame::inside(region * REGION));
        }
        self.release_kept_under_pressure();
        self.fold_if_due();
        let near = match order.get() {
            1..=6 => self.region.and_then(|region| self.zone.claim_order_in(region, order.get())),
            _ => None,
        };
        let found = match near {
            Some(part) => Ok(part.first()),
            None => self.zone.alloc_uncounted(order).or_else(|error| {
                if self.flush() { self.zone.alloc_uncounted(order) } else { Err(error) }
            }),
        };
        if found.is_ok() {
            self.tally.claimed += i64::from(order.frames());
        }
        found
    }

    pub(super) fn free_run_of(&mut self, frame: Frame, order: Order) -> Result<(), FrameError> {
        let known = self.refuse_held(frame, order.frames())?;
        if order == Order::HUGE && self.keep(frame, known) {
            // Nothing was added to the magazine.
            self.trim_at += u64::from(REGION);
        } else {
            self.zone.free_checked(frame, order)?;
            self.tally.claimed -= i64::from(order.frames());
        }
        self.count_frees(order.frames().into());
        Ok(())
    }

    /// Keeps a region that is allocated as a whole, if there is room and the zone is not under
    /// pressure. The caller has checked that the run lies in the zone and that no frame of it is in
    /// the magazine; `known` is whether a word of it has a way there.
    fn keep(&mut self, first: Frame, known: bool) -> bool {
        let region = first.index() / REGION;
        let may = first.index().is_multiple_of(REGION)
            && self.zone.map.is_taken(region)
            && !self.zone.under_pressure()
            && self.kept.push(region, &self.zone.kept);
        if may && known {
            self.magazine.forget_region(region);
        }
        may
    }

    /// Moves the frames of a kept region into the magazine, for an alloc that finds no others.
    /// Returns whether there was one.
    pub(super) fn break_kept(&mut self) -> bool {
        let Some(region) = self.kept.pop(&self.zone.kept) else { return false };
        parts(region * REGION, REGION).for_each(|part| self.restore(part));
        // The magazine has more frames than were freed into it.
        self.trim_at = self.trim_at.saturating_sub(REGION.into());
        self.check_at = self.check_at.min(self.trim_at);
        true
    }

    /// Releases the kept regions. Returns whether there were any.
    pub(super) fn release_kept(&mut self) -> bool {
        let mut any = false;
        while let Some(region) = self.kept.pop(&self.zone.kept) {
            self.tally.claimed -= i64::from(REGION);
            // Fails only after a wrong free elsewhere, which cannot be reported here.
            _ = self.zone.release_range(region * REGION, REGION);
            any = true;
        }
        any
    }

    /// Releases the kept regions if the zone is under pressure, for an owner that allocates and
    /// frees nothing.
    pub(super) fn release_kept_under_pressure(&mut self) {
        if self.kept.frames() != 0 && self.zone.under_pressure() && self.release_kept() {
            // Folded at once, so that the zone detects its recovery.
            self.fold();
        }
    }

    /// Refuses a run that is not in the zone, or has a frame in the magazine or in a kept region.
    /// Returns whether the magazine has a way for one of its words.
    fn refuse_held(&self, first: Frame, run: u32) -> Result<bool, FrameError> {
        self.zone.check(first, run)?;
        self.zone.kept.refuse(first.index(), run)?;
        let mut known = false;
        for part in parts(first.index(), run) {
            if let Some(held) = self.magazine.held_of(part.word) {
                known = true;
                let held = Part { mask: held & part.mask, ..part };
                if held.mask != 0 {
                    return Err(FrameError::DoubleFree { frame: held.first() });
                }
            }
        }
        Ok(known)
    }
}
