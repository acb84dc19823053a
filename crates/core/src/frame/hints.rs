//! [`Hints`], a set of regions that may have free frames, in two levels; and [`Slots`], where
//! owners publish the regions that they have reserved.

use super::map::total_order;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use alloc::boxed::Box;

/// A set of regions that may have free frames; the map decides.
///
/// The invariant: *a region with a free frame is in one of the zone's sets, or in the slot of the
/// owner that has reserved it*. A free changes the map and then reads the sets; a removal changes
/// the set and then reads the map. All four are sequentially consistent, so one of the two sees the
/// other.
#[derive(Debug)]
pub(super) struct Hints {
    /// A bit per region.
    bits: Box<[AtomicU64]>,
    /// A bit for each word of `bits` that is not 0, and for some that are.
    above: Box<[AtomicU64]>,
}

impl Hints {
    /// Creates a set over `regions` regions that contains the first `members` of them.
    pub(super) fn new(regions: u32, members: u32) -> Self {
        Self {
            bits: first_set(regions, members),
            above: first_set(regions.div_ceil(64), members.div_ceil(64)),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.bits) + size_of_val(&*self.above)
    }

    #[inline(always)]
    pub(super) fn has(&self, region: u32) -> bool {
        self.bits[(region / 64) as usize].load(Ordering::SeqCst) & (1 << (region % 64)) != 0
    }

    /// Adds a region.
    pub(super) fn set(&self, region: u32) {
        if self.has(region) {
            return;
        }
        let word = region / 64;
        self.bits[word as usize].fetch_or(1 << (region % 64), Ordering::SeqCst);
        self.set_above(word);
    }

    fn set_above(&self, word: u32) {
        total_order();
        let (above, bit) = (&self.above[(word / 64) as usize], 1 << (word % 64));
        if above.load(Ordering::SeqCst) & bit == 0 {
            above.fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// Removes a region. Returns true for exactly one of several concurrent callers, if the region
    /// was in the set.
    pub(super) fn take(&self, region: u32) -> bool {
        if !self.has(region) {
            return false;
        }
        let (word, bit) = (region / 64, 1_u64 << (region % 64));
        let bits = &self.bits[word as usize];
        let old = bits.fetch_and(!bit, Ordering::SeqCst);
        total_order();
        old & bit != 0
    }

    /// Clears the bit above a word that is 0. Done by later searches, so that a set of one region
    /// does not pay for it each time.
    fn clear_above(&self, word: u32) {
        self.above[(word / 64) as usize].fetch_and(!(1 << (word % 64)), Ordering::SeqCst);
        total_order();
        if self.bits[word as usize].load(Ordering::SeqCst) != 0 {
            self.set_above(word);
        }
    }

    /// Returns the first region of the set from `start` on. Reads at most 128 words to skip 1 TiB.
    pub(super) fn next_from(&self, start: u32) -> Option<u32> {
        let mut word = start / 64;
        let here = self.bits.get(word as usize)?.load(Ordering::Acquire) & (!0 << (start % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros());
        }
        word += 1;
        let mut mask = !0 << (word % 64);
        for index in word / 64.. {
            let mut above = self.above.get(index as usize)?.load(Ordering::Acquire) & mask;
            mask = !0;
            while above != 0 {
                let word = index * 64 + above.trailing_zeros();
                let bits = self.bits[word as usize].load(Ordering::Acquire);
                if bits != 0 {
                    return Some(word * 64 + bits.trailing_zeros());
                }
                self.clear_above(word);
                above &= above - 1;
            }
        }
        None
    }
}

/// Returns `len` bits of which the first `set` are 1.
fn first_set(len: u32, set: u32) -> Box<[AtomicU64]> {
    (0..len.div_ceil(64))
        .map(|word| match set.saturating_sub(word * 64) {
            0 => AtomicU64::new(0),
            n => AtomicU64::new(!0 >> (64 - n.min(64))),
        })
        .collect()
}

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
