//! [`Slots`]: where owners publish the regions that they have reserved.

use crate::sync::{AtomicU32, Ordering};
use alloc::boxed::Box;

/// A slot's value: no owner, an owner without a region, or the number of the reserved region
/// plus 2.
const FREE: u32 = 0;
const IDLE: u32 = 1;
const FIRST: u32 = 2;

/// One slot per owner.
#[derive(Debug)]
pub(super) struct Slots(Box<[AtomicU32]>);

impl Slots {
    pub(super) fn new(slots: u32) -> Self {
        Self((0..slots).map(|_| AtomicU32::new(FREE)).collect())
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    /// Claims a slot, if one is left; an owner without one reserves nothing.
    pub(super) fn claim(&self) -> Option<u32> {
        (0..).zip(&*self.0).find_map(|(index, slot)| {
            slot.compare_exchange(FREE, IDLE, Ordering::AcqRel, Ordering::Relaxed)
                .ok()
                .map(|_| index)
        })
    }

    /// Releases a slot. The caller has made its region visible again.
    pub(super) fn release(&self, index: u32) {
        self.store(index, FREE);
    }

    /// Publishes that the owner of the slot has reserved a region, or none.
    pub(super) fn publish(&self, index: u32, region: Option<u32>) {
        self.store(index, region.map_or(IDLE, |region| region + FIRST));
    }

    fn store(&self, index: u32, value: u32) {
        if let Some(slot) = self.0.get(index as usize) {
            slot.store(value, Ordering::SeqCst);
        }
    }

    /// Returns the reserved regions.
    pub(super) fn reserved(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().filter_map(|slot| slot.load(Ordering::SeqCst).checked_sub(FIRST))
    }
}
