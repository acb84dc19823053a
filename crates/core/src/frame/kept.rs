//! [`Kept`]: the regions that an owner keeps for its next alloc of a whole one.

use super::kept_marks::Marks;
use super::map::REGION;
use super::zone::Zone;

/// The most regions that an owner keeps.
const MOST: u32 = 4;

/// Regions that an owner has freed as a whole and may allocate again without touching the map,
/// where their bits stay set.
///
/// No way of the magazine is one of their words, so a free of one of their frames takes the slow
/// path, which looks here.
#[derive(Debug)]
pub(super) struct Kept {
    regions: [u32; MOST as usize],
    len: u32,
    /// The most that are kept.
    most: u32,
}

impl Kept {
    /// Creates an empty set for an owner of a zone: for at most 1/32 of the zone.
    pub(super) fn new(zone: &Zone) -> Self {
        Self { regions: [0; MOST as usize], len: 0, most: (zone.frames() / REGION / 32).min(MOST) }
    }

    /// Returns how many frames are kept.
    pub(super) fn frames(&self) -> u32 {
        self.len * REGION
    }

    /// Adds a region. Returns false if there is no room.
    pub(super) fn push(&mut self, region: u32, marks: &Marks) -> bool {
        match self.regions.get_mut(self.len as usize).filter(|_| self.len < self.most) {
            Some(slot) => {
                *slot = region;
                self.len += 1;
                marks.set(region, true);
                true
            }
            None => false,
        }
    }

    /// Removes the region that was added last.
    pub(super) fn pop(&mut self, marks: &Marks) -> Option<u32> {
        self.len = self.len.checked_sub(1)?;
        let region = self.regions.get(self.len as usize).copied()?;
        marks.set(region, false);
        Some(region)
    }
}
