//! Which regions owners have reserved.

use super::zone::Zone;
use crate::sync::Ordering;

/// What a slot says: nobody's, an owner's that has reserved nothing, or the reserved region's number plus 2.
pub(super) mod slot {
    pub(in crate::frame) const FREE: u32 = 0;
    pub(in crate::frame) const IDLE: u32 = 1;
    pub(in crate::frame) const FIRST: u32 = 2;
}

/// Reservations. An owner that has a slot takes a region out of the sets and notes it in its slot, so that others
/// leave it alone as long as they find anything else.
impl Zone {
    /// A slot, if one is left; without one an owner works as if it were none.
    pub(super) fn enter(&self) -> Option<u32> {
        (0..).zip(&*self.slots).find_map(|(index, slot)| {
            slot.compare_exchange(slot::FREE, slot::IDLE, Ordering::AcqRel, Ordering::Relaxed)
                .ok()
                .map(|_| index)
        })
    }

    /// Gives a slot back; a region that was reserved must be visible again.
    pub(super) fn exit(&self, index: u32) {
        self.note(index, slot::FREE);
    }

    fn note(&self, index: u32, value: u32) {
        if let Some(slot) = self.slots.get(index as usize) {
            slot.store(value, Ordering::SeqCst);
        }
    }

    /// Reserves a region with free frames, a partly free one first.
    pub(super) fn reserve(&self, index: u32) -> Option<u32> {
        for set in [&self.partial, &self.whole] {
            let mut from = 0;
            while let Some(region) = set.next_from(from) {
                // Noted first: whoever no longer finds the region in the set finds it here.
                self.note(index, region + slot::FIRST);
                if set.take(region) && self.map.has_free(region) {
                    return Some(region);
                }
                from = region + 1;
            }
        }
        self.note(index, slot::IDLE);
        None
    }

    pub(super) fn reserved(&self) -> impl Iterator<Item = u32> + '_ {
        self.slots.iter().filter_map(|slot| slot.load(Ordering::SeqCst).checked_sub(slot::FIRST))
    }
}
