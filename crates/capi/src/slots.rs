//! `Slots`: an owner's mappings, which a C program names by [`pf_map_t`]s.
//!
//! A name is a slot and the slot's generation, which changes when the mapping ends: a name that is
//! used again, or twice in one call, is recognized. The generations of different owners differ, so
//! a name used with another owner is recognized too.

use std::collections::TryReserveError;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};

/// The name of a mapping, from pf_map(), for the owner that made it. All zeros name none.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct pf_map_t {
    /// The owner's slot, and half of the owner's number.
    pub id: u64,
    /// The slot's generation, and the other half.
    pub r#gen: u64,
}

/// The low bits of a generation, which count; the others are the high bits of the owner's number.
const COUNT_BITS: u32 = 40;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
/// The low bits of an identifier, which are the slot's; the others are the low bits of the owner's
/// number. So that number has 56 bits, which no process uses up.
const SLOT_BITS: u32 = 32;
/// No slot.
const NONE: u32 = u32::MAX;

/// A mapping, with what the program passed for it.
struct Slot<M> {
    /// The generation of the mapping, or of the next one in a vacant slot.
    generation: u64,
    live: bool,
    /// Initialized while it is live. No `Option`: to take a value out of one, the compiler moves it
    /// field by field.
    mapping: MaybeUninit<M>,
    addr: usize,
    len: usize,
    /// Devices reach the memory after the mapping has ended.
    stays: bool,
    /// The next vacant slot.
    next: u32,
}

/// Why names were refused: the first that names no mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stale {
    /// Its index among those of the call.
    pub(crate) index: usize,
    pub(crate) name: pf_map_t,
    /// An earlier one of the call is the same.
    pub(crate) repeated: bool,
}

/// Mappings of one owner.
pub(crate) struct Slots<M> {
    slots: Vec<Slot<M>>,
    /// The first vacant slot: the last one that became vacant.
    vacant: u32,
    live: usize,
    /// The slots that [`claim`](Self::claim) has claimed.
    claimed: Vec<u32>,
    /// The owner's bits of an identifier.
    owner: u64,
    first_generation: u64,
}

impl<M> Slots<M> {
    pub(crate) fn new() -> Self {
        static OWNERS: AtomicU64 = AtomicU64::new(1);
        Self::of(OWNERS.fetch_add(1, Ordering::Relaxed))
    }

    /// Creates those of the owner with this number.
    fn of(number: u64) -> Self {
        let owner = number << SLOT_BITS;
        let first_generation = number >> SLOT_BITS << COUNT_BITS | 1;
        Self {
            slots: Vec::new(),
            vacant: NONE,
            live: 0,
            claimed: Vec::new(),
            owner,
            first_generation,
        }
    }

    /// Returns how many mappings there are.
    pub(crate) fn live(&self) -> usize {
        self.live
    }

    /// Makes room for `more` mappings: as many [`add`](Self::add)s allocate nothing.
    ///
    /// # Errors
    /// There is no memory for them; nothing has changed.
    #[inline(always)]
    pub(crate) fn reserve(&mut self, more: usize) -> Result<(), TryReserveError> {
        // Most often one, for which there is a vacant slot.
        if more == 1 && self.vacant != NONE { Ok(()) } else { self.slots.try_reserve(more) }
    }

    /// Makes room for a claim of `names` names.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    #[inline(always)]
    pub(crate) fn reserve_claims(&mut self, names: usize) -> Result<(), TryReserveError> {
        self.claimed.clear();
        // Each mapping is claimed once.
        self.claimed.try_reserve(names.min(self.live))
    }

    /// Adds a mapping of `len` bytes at `addr`, which devices reach after its end if it `stays`.
    pub(crate) fn add(&mut self, mapping: M, addr: usize, len: usize, stays: bool) -> pf_map_t {
        self.live += 1;
        if let Some(slot) = self.slots.get_mut(self.vacant as usize) {
            let id = u64::from(std::mem::replace(&mut self.vacant, slot.next));
            slot.mapping.write(mapping);
            (slot.live, slot.addr, slot.len, slot.stays) = (true, addr, len, stays);
            return pf_map_t { id: self.owner | id, r#gen: slot.generation };
        }
        let (id, generation) = (self.slots.len() as u64, self.first_generation);
        let mapping = MaybeUninit::new(mapping);
        self.slots.push(Slot { generation, live: true, mapping, addr, len, stays, next: NONE });
        pf_map_t { id: self.owner | id, r#gen: generation }
    }

    /// Claims the mappings of all `names`: they are to be [taken](Self::take_claimed).
    ///
    /// # Errors
    /// [`Stale`]: nothing has changed.
    #[inline(always)]
    pub(crate) fn claim(&mut self, names: impl Iterator<Item = pf_map_t>) -> Result<(), Stale> {
        self.claimed.clear();
        for (index, name) in names.enumerate() {
            // Another owner's is beyond all slots.
            let id = name.id ^ self.owner;
            let slot = usize::try_from(id).ok().and_then(|id| self.slots.get_mut(id));
            match slot {
                Some(slot) if slot.generation == name.r#gen && slot.live => {
                    // From here on the name is stale.
                    slot.generation += 1;
                    // There are fewer slots.
                    self.claimed.push(u32::try_from(id).unwrap_or(NONE));
                }
                _ => return Err(self.refuse(index, name)),
            }
        }
        Ok(())
    }

    /// Releases the claims.
    #[cold]
    fn refuse(&mut self, index: usize, name: pf_map_t) -> Stale {
        let mut repeated = false;
        for id in self.claimed.drain(..) {
            if let Some(slot) = self.slots.get_mut(id as usize) {
                slot.generation -= 1;
                repeated |= self.owner | u64::from(id) == name.id && slot.generation == name.r#gen;
            }
        }
        Stale { index, name, repeated }
    }

    /// Yields the mappings that were claimed, in their order, and makes their slots vacant: to be
    /// called once for each claim, and read to the end.
    #[inline(always)]
    pub(crate) fn take_claimed(&mut self) -> impl Iterator<Item = M> {
        let Self { slots, vacant, live, claimed, .. } = self;
        *live -= claimed.len();
        claimed.iter().filter_map(|&id| {
            let slot = slots.get_mut(id as usize)?;
            if !std::mem::replace(&mut slot.live, false) {
                return None;
            }
            // Else its generations are used up: it stays vacant.
            if slot.generation & COUNT != 0 {
                slot.next = std::mem::replace(vacant, id);
            }
            // SAFETY: it was live, and is not any more: the value is read once.
            Some(unsafe { slot.mapping.assume_init_read() })
        })
    }

    /// Yields the address and the length of the mappings that were claimed, until another is added.
    pub(crate) fn claimed_parts(&self) -> impl Iterator<Item = (usize, usize)> {
        let slots = self.claimed.iter().filter_map(|&id| self.slots.get(id as usize));
        slots.map(|slot| (slot.addr, slot.len))
    }

    /// Returns whether devices reach the memory of one that was claimed after its end.
    pub(crate) fn claimed_stays(&self) -> bool {
        self.claimed.iter().any(|&id| self.slots.get(id as usize).is_some_and(|slot| slot.stays))
    }
}

impl<M> Drop for Slots<M> {
    fn drop(&mut self) {
        for slot in self.slots.iter_mut().filter(|slot| slot.live) {
            // SAFETY: it is live, so it is initialized, and nothing uses it afterwards.
            unsafe { slot.mapping.assume_init_drop() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn name(id: u64, generation: u64) -> pf_map_t {
        pf_map_t { id, r#gen: generation }
    }

    #[test]
    fn a_name_of_another_owner_is_stale() {
        let (mut one, mut other) = (Slots::new(), Slots::new());
        let (first, second) = (one.add('a', 0, 1, false), other.add('b', 0, 1, false));
        assert_eq!(first.id ^ second.id, (one.owner ^ other.owner));
        let stale = Stale { index: 0, name: second, repeated: false };
        assert_eq!(one.claim([second].into_iter()), Err(stale));
        assert!(one.claim([name(0, 0)].into_iter()).is_err());
        assert!(one.claim([name(u64::MAX, first.r#gen)].into_iter()).is_err());
        assert!(one.claim([first].into_iter()).is_ok());
    }

    #[test]
    fn the_names_of_any_two_owners_differ() {
        // Numbers that differ in one bit: each has its place in the name.
        for bit in 0..56 {
            for number in [1, (1 << 56) - 1 - (1 << bit)] {
                let (mut one, mut other) = (Slots::of(number), Slots::of(number ^ 1 << bit));
                let (first, second) = (one.add('a', 0, 1, false), other.add('b', 0, 1, false));
                assert!(one.claim([second].into_iter()).is_err(), "{number:#x}, bit {bit}");
                assert!(other.claim([first].into_iter()).is_err(), "{number:#x}, bit {bit}");
            }
        }
    }

    #[test]
    fn a_slot_is_retired_before_its_generations_repeat() {
        let mut slots = Slots::new();
        let first = slots.add(0, 0, 1, false);
        slots.slots[0].generation |= COUNT;
        let last = name(first.id, first.r#gen | COUNT);
        slots.claim([last].into_iter()).unwrap();
        assert_eq!(slots.take_claimed().count(), 1);
        assert_eq!(slots.add(1, 0, 1, false).id ^ first.id, 1);
        assert!(slots.claim([last].into_iter()).is_err());
    }

    #[test]
    fn adds_and_claims_for_which_there_is_room_allocate_nothing() {
        let mut slots = Slots::new();
        slots.reserve(100).unwrap();
        let before = slots.slots.as_ptr();
        let names: Vec<_> = (0..100).map(|at| slots.add(at, at, 1, false)).collect();
        assert_eq!(slots.slots.as_ptr(), before);
        slots.reserve_claims(names.len()).unwrap();
        let room = slots.claimed.capacity();
        slots.claim(names[..50].iter().copied()).unwrap();
        assert_eq!(slots.claimed.capacity(), room);
        slots.take_claimed().for_each(drop);
        // No more names than there are mappings can be claimed, however many are passed.
        slots.reserve_claims(usize::MAX).unwrap();
        // Vacant slots are used.
        slots.reserve(1).unwrap();
        assert!((slots.add(7, 7, 1, false).id ^ names[0].id) < 100);
        assert!(slots.reserve(usize::MAX).is_err());
    }

    #[test]
    fn what_is_live_is_dropped_with_the_slots() {
        let shared = std::rc::Rc::new(());
        let mut slots = Slots::new();
        let names: Vec<_> =
            (0..3).map(|_| slots.add(std::rc::Rc::clone(&shared), 0, 1, false)).collect();
        slots.claim(names[1..2].iter().copied()).unwrap();
        slots.take_claimed().for_each(drop);
        assert_eq!(std::rc::Rc::strong_count(&shared), 3);
        drop(slots);
        assert_eq!(std::rc::Rc::strong_count(&shared), 1);
    }

    proptest! {
        #[test]
        fn slots_agree_with_a_map(
            steps in prop::collection::vec((any::<bool>(), prop::collection::vec(0usize..40, 0..6)), 1..100),
        ) {
            let mut slots = Slots::new();
            let (mut names, mut model) = (Vec::new(), HashMap::new());
            for (number, (add, picks)) in steps.into_iter().enumerate() {
                if add {
                    let name = slots.add(number, number * 2, number + 1, number % 3 == 0);
                    prop_assert!(model.insert((name.id, name.r#gen), number).is_none());
                    names.push(name);
                    continue;
                }
                let picked: Vec<_> = picks.iter().filter_map(|&at| names.get(at).copied()).collect();
                let bad = picked.iter().enumerate().position(|(at, name)| {
                    picked[..at].contains(name) || !model.contains_key(&(name.id, name.r#gen))
                });
                let claimed = slots.claim(picked.iter().copied());
                prop_assert_eq!(claimed.err().map(|stale| stale.index), bad);
                if let Err(stale) = claimed {
                    prop_assert_eq!(stale.repeated, picked[..stale.index].contains(&stale.name));
                    continue;
                }
                let expected: Vec<_> =
                    picked.iter().filter_map(|name| model.remove(&(name.id, name.r#gen))).collect();
                let parts: Vec<_> = expected.iter().map(|number| (number * 2, number + 1)).collect();
                prop_assert_eq!(slots.take_claimed().collect::<Vec<_>>(), expected.clone());
                prop_assert_eq!(slots.claimed_parts().collect::<Vec<_>>(), parts);
                prop_assert_eq!(slots.claimed_stays(), expected.iter().any(|number| number % 3 == 0));
                prop_assert_eq!(slots.live(), model.len());
            }
        }
    }
}
