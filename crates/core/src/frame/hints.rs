//! The hints of a search: [`Hints`], a set of regions that may have free frames, in two levels;
//! [`Slots`], where owners publish the regions that they have reserved; and [`Limits`], the largest
//! run that a region may have free, so that a search skips regions that have none.

use super::map::{MAX_INNER, Part, max_order_of};
use super::number::FrameError;
use super::storage::collect;
use crate::sync::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
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
    pub(super) fn new(regions: u32, members: u32) -> Result<Self, FrameError> {
        Ok(Self {
            bits: first_set(regions, members)?,
            above: first_set(regions.div_ceil(64), members.div_ceil(64))?,
        })
    }

    #[cfg(all(test, not(loom)))]
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
        old & bit != 0
    }

    /// Clears the bit above a word that is 0. Done by later searches, so that a set of one region
    /// does not pay for it each time.
    fn clear_above(&self, word: u32) {
        self.above[(word / 64) as usize].fetch_and(!(1 << (word % 64)), Ordering::SeqCst);
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
fn first_set(len: u32, set: u32) -> Result<Box<[AtomicU64]>, FrameError> {
    collect(len.div_ceil(64), |word| match set.saturating_sub(word * 64) {
        0 => AtomicU64::new(0),
        n => AtomicU64::new(!0 >> (64 - n.min(64))),
    })
}

/// A slot's value: no owner, an owner without a region, or the number of the reserved region
/// plus 2.
const FREE: u32 = 0;
const IDLE: u32 = 1;
const FIRST: u32 = 2;

/// One slot per owner.
///
/// A region that an owner reserves is in its slot before it is taken from its set, and in a set
/// again before the slot says anything else. A search reads the sets and then the slots, twice. All
/// of these release and acquire: a search that no longer finds the region in the one finds it in
/// the other, if not at once then the second time.
#[derive(Debug)]
pub(super) struct Slots(Box<[AtomicU32]>);

impl Slots {
    pub(super) fn new(slots: u32) -> Result<Self, FrameError> {
        Ok(Self(collect(slots, |_| AtomicU32::new(FREE))?))
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    /// Claims a slot, if one is left; an owner without one reserves nothing.
    pub(super) fn claim(&self) -> Option<u32> {
        (0..).zip(&*self.0).find_map(|(index, slot)| {
            // Acquire: who sees the region of the new owner sees that of the old one in its set.
            slot.compare_exchange(FREE, IDLE, Ordering::Acquire, Ordering::Relaxed)
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
            slot.store(value, Ordering::Release);
        }
    }

    /// Returns the reserved regions.
    pub(super) fn reserved(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().filter_map(|slot| slot.load(Ordering::Acquire).checked_sub(FIRST))
    }
}

/// The largest order that a limit distinguishes: half a region. Wholly free ones are found by their
/// hints.
const TOP: u8 = 8;
/// The bits of a limit.
const LIMIT: u8 = 0x0f;
/// The levels above have not been raised yet. For regions only.
const PENDING: u8 = 0x40;
/// A thread computes a new limit.
const LOWERING: u8 = 0x80;
/// The number of items of a level that one item of the next level covers: regions in a group.
pub(super) const FAN_OUT: u32 = 64;
/// The number of groups before the last one that may not be full yet: owners reserve up to 256
/// regions.
const GROUPS_BEFORE: u32 = 256 / FAN_OUT;
/// The number of regions (1 GiB) up to which a zone lowers no limit before they are used: a search
/// of all of them takes 16 us.
const MAX_UNUSED: u32 = 512;
/// Regions, groups of 64, and groups of 4,096: at most 128 of these in a zone.
const LEVELS: usize = 3;

/// For each region, and for groups of them, an upper bound on the order of the runs that are free
/// in it.
///
/// The invariant: *a limit is never below the longest free run*, so a search that skips by limits
/// misses nothing. A free changes the map, reads the region's limit, and raises it if that is too
/// low, then those above. A thread that lowers a limit marks it, reads the map (or the level
/// below), and replaces the mark by the result; a free that sees the mark removes it, so the limit
/// stays. All of these are sequentially consistent: either the free sees the mark, or the map was
/// read after it. One thread at a time lowers; others continue without.
///
/// Single frames do not need them, and pay five read-modify-writes for each region that is filled
/// and freed. So a small zone lowers them only once a run has been requested: its first search
/// reads every region. In a larger one that would take too long (some 16 ms for 1 TiB),
/// so it lowers them from the start.
#[derive(Debug)]
pub(super) struct Limits {
    levels: [Box<[AtomicU8]>; LEVELS],
    /// Whether they are lowered.
    used: AtomicBool,
    lowering: AtomicBool,
}

impl Limits {
    pub(super) fn new(regions: u32) -> Result<Self, FrameError> {
        let level = |count: u32| collect(count, |_| AtomicU8::new(TOP));
        let groups = regions.div_ceil(FAN_OUT);
        Ok(Self {
            levels: [level(regions)?, level(groups)?, level(groups.div_ceil(FAN_OUT))?],
            used: AtomicBool::new(regions > MAX_UNUSED),
            lowering: AtomicBool::new(false),
        })
    }

    /// Records that a run is requested.
    pub(super) fn use_from_now_on(&self) {
        if !self.is_used() {
            self.used.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn is_used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn bytes(&self) -> usize {
        self.levels.iter().map(|level| size_of_val(&**level)).sum()
    }

    fn byte(&self, level: usize, index: u32) -> Option<&AtomicU8> {
        self.levels.get(level)?.get(index as usize)
    }

    /// Lowers the limit of a region of which no frame is free, nor can be freed before this
    /// returns.
    pub(super) fn note_claimed(&self, region: u32) {
        if self.is_used()
            && let Some(byte) = self.byte(0, region)
        {
            // A limit that is being raised or lowered becomes no lower than it should: those who do
            // it look again.
            byte.store(0, Ordering::SeqCst);
            self.note_last_of_group(region);
        }
    }

    /// Lowers the limits of the groups that `region` is in, if it is the last of one, and of those
    /// before: regions mostly fill in order, so by then all of these have, also if several owners
    /// fill them side by side.
    fn note_last_of_group(&self, region: u32) {
        if region % FAN_OUT != FAN_OUT - 1 {
            return;
        }
        let Some(lowering) = self.lower() else { return };
        for before in 0..=GROUPS_BEFORE {
            let Some(region) = region.checked_sub(before * FAN_OUT) else { return };
            lowering.groups(region);
        }
    }

    /// Lowers the limit of a region that is full to what `find` finds in the map.
    pub(super) fn note_full(&self, region: u32, find: impl FnOnce() -> u8) {
        let is_low = self.byte(0, region).is_none_or(|byte| byte.load(Ordering::Relaxed) == 0);
        if !is_low && let Some(lowering) = self.lower() {
            lowering.region(region, find);
        }
        self.note_last_of_group(region);
    }

    /// Returns whether the limits may be below the run that the free of `freed` has created: `free`
    /// are the free frames of its word now.
    #[inline(always)]
    pub(super) fn is_too_low(&self, freed: Part, free: u64) -> bool {
        let Some(limit) = self.byte(0, freed.region()).map(|byte| byte.load(Ordering::SeqCst))
        else {
            return false;
        };
        // A mark is above every limit, and has no longer run.
        limit != TOP && has_longer_run(freed.mask, free, limit)
    }

    /// Raises the limits that are below a free run of a word.
    #[inline(never)]
    pub(super) fn note_free(&self, freed: Part, free: u64) {
        // A free word may be part of a longer run.
        let order = if free == !0 { TOP } else { max_order_of(free).unwrap_or(0) };
        self.raise(freed.region(), order);
    }

    /// Raises the limits of a region in which any run may have become free.
    pub(super) fn note_free_region(&self, region: u32) {
        self.raise(region, TOP);
    }

    fn raise(&self, region: u32, order: u8) {
        let Some(byte) = self.byte(0, region) else { return };
        let mut old = byte.load(Ordering::SeqCst);
        while old & LIMIT < order || old & (PENDING | LOWERING) != 0 {
            let new = (old & LIMIT).max(order) | PENDING;
            if new != old
                && let Err(now) =
                    byte.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst)
            {
                old = now;
                continue;
            }
            self.raise_above(region, new & LIMIT);
            // Fails if another free has raised it further, which is then above all of this.
            match byte.compare_exchange(new, new & LIMIT, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return,
                Err(now) => old = now,
            }
        }
    }

    fn raise_above(&self, region: u32, order: u8) {
        let mut index = region;
        for level in 1..LEVELS {
            index /= FAN_OUT;
            let Some(byte) = self.byte(level, index) else { return };
            let mut old = byte.load(Ordering::SeqCst);
            while old & LIMIT < order || old & LOWERING != 0 {
                let new = (old & LIMIT).max(order);
                match byte.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst) {
                    Ok(_) => break,
                    Err(now) => old = now,
                }
            }
        }
    }

    /// Returns the next region that may have a run of `order`, if `region` has none.
    pub(super) fn skip(&self, region: u32, order: u8) -> Option<u32> {
        let mut width = FAN_OUT.pow(2);
        for level in (0..LEVELS).rev() {
            let limit = self.byte(level, region / width)?.load(Ordering::SeqCst) & LIMIT;
            if limit < order {
                return Some((region / width + 1) * width);
            }
            width /= FAN_OUT;
        }
        None
    }

    /// Returns the right to lower limits, unless another thread has it. Never waits.
    pub(super) fn lower(&self) -> Option<Lowering<'_>> {
        let claimed =
            self.lowering.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        claimed.ok().map(|_| Lowering(self))
    }
}

/// The right to lower limits, until it is dropped.
pub(super) struct Lowering<'l>(&'l Limits);

impl Lowering<'_> {
    /// Lowers the limit of a region to what `find` finds in the map.
    pub(super) fn region(&self, region: u32, find: impl FnOnce() -> u8) {
        self.replace(0, region, find);
    }

    /// Lowers the limits of the groups that `region` is in to the highest below them.
    pub(super) fn groups(&self, region: u32) {
        let mut index = region;
        for level in 1..LEVELS {
            index /= FAN_OUT;
            self.replace(level, index, || {
                let below = self.0.levels.get(level - 1).map(|below| &**below).unwrap_or_default();
                let members = below.iter().skip((index * FAN_OUT) as usize).take(FAN_OUT as usize);
                members.map(|byte| byte.load(Ordering::SeqCst) & LIMIT).max().unwrap_or(TOP)
            });
        }
    }

    fn replace(&self, level: usize, index: u32, find: impl FnOnce() -> u8) {
        let Some(byte) = self.0.byte(level, index) else { return };
        let old = byte.load(Ordering::SeqCst);
        // A region whose groups are being raised is left alone.
        if old & LIMIT == 0 || old & PENDING != 0 {
            return;
        }
        let marked = old | LOWERING;
        if byte.compare_exchange(old, marked, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            let new = find().min(TOP);
            // Fails if a free has removed the mark.
            _ = byte.compare_exchange(marked, new, Ordering::SeqCst, Ordering::SeqCst);
        }
    }
}

impl Drop for Lowering<'_> {
    fn drop(&mut self) {
        self.0.lowering.store(false, Ordering::Release);
    }
}

/// Whether one of the frames that were just freed in a word is part of an aligned run of an order
/// above `limit`. May be wrongly true where several were freed; true if `limit` is marked. Runs
/// that do not contain a freed frame were noted before.
#[inline(always)]
fn has_longer_run(freed: u64, free: u64, limit: u8) -> bool {
    match LONGER.get(usize::from(limit)) {
        Some(&(run, start)) => {
            let from = freed.trailing_zeros() & start;
            !(free >> from) & run == 0 || freed & freed.wrapping_sub(1) != 0
        }
        None => limit > LIMIT || free == !0,
    }
}

/// For each limit below that of a word, the bits of an aligned run of the order above it, and those
/// of the number of its first bit that may be set.
const LONGER: [(u64, u32); MAX_INNER as usize] =
    [(0x3, !1), (0xf, !3), (0xff, !7), (0xffff, !15), (0xffff_ffff, !31), (!0, 0)];

const _: () = assert!(MAX_INNER < TOP, "a free word counts as half a region");

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against the longest run of the whole word, before and after the free: the recorded run
        /// is the added one.
        #[test]
        fn a_free_is_noted_where_it_makes_a_longer_run(sparse in any::<[u64; 3]>(), dense in any::<bool>(), bit in 0_u32..64) {
            let [a, b, c] = sparse;
            let before = if dense { a | b | c } else { a & b & c } & !(1 << bit);
            let after = before | 1 << bit;
            let longest = |free| max_order_of(free).unwrap_or(0);
            for limit in longest(before)..=TOP {
                prop_assert_eq!(has_longer_run(1 << bit, after, limit), longest(after) > limit || limit >= MAX_INNER && after == !0);
            }
            prop_assert!(has_longer_run(1 << bit, after, limit_marked(PENDING)) && has_longer_run(1 << bit, after, limit_marked(LOWERING)));
        }
    }

    /// Returns limits of a region that a free has raised, and whose groups it has not raised yet.
    #[expect(clippy::unwrap_used, reason = "a test")]
    fn half_raised() -> Limits {
        let limits = Limits::new(1).unwrap();
        let set = |level: usize, limit| limits.levels[level][0].store(limit, Ordering::SeqCst);
        (1..LEVELS).for_each(|level| set(level, 0));
        set(0, limit_marked(PENDING));
        limits
    }

    fn limit_of_region(limits: &Limits) -> u8 {
        limits.levels[0][0].load(Ordering::SeqCst)
    }

    /// Otherwise the freed run would be missed until the other thread continues.
    #[test]
    fn a_free_raises_the_groups_that_another_one_has_not_raised_yet() {
        let (limits, behind) = (half_raised(), Some(FAN_OUT.pow(2)));
        assert_eq!(limits.skip(0, 1), behind);
        limits.raise(0, 2);
        assert_eq!((limits.skip(0, 3), limits.skip(0, 4)), (None, behind));
        assert_eq!(limit_of_region(&limits), 3, "no mark is left");
    }

    /// The mark tells other frees that the groups are too low.
    #[test]
    fn a_region_whose_groups_are_not_raised_yet_keeps_its_mark() {
        let limits = half_raised();
        limits.lower().unwrap().region(0, || 3);
        assert_eq!(limit_of_region(&limits), limit_marked(PENDING));
    }

    fn limit_marked(mark: u8) -> u8 {
        3 | mark
    }
}
