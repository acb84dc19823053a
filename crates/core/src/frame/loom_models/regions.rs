//! Regions: claimed as a whole, reserved for an owner, and found by the hints above them.

use super::*;

/// A claim against the free that makes the region whole: the hints are correct afterwards in every
/// order.
#[test]
fn loom_a_claim_against_a_region_that_becomes_whole() {
    model(|| {
        let zone = Model::with_slots(512, 0);
        let frame = zone.alloc(Order::PAGE).unwrap();
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.free(frame, Order::PAGE).unwrap()
        });
        let mine = zone.alloc(Order::PAGE).unwrap();
        other.join().unwrap();
        assert_eq!(zone.taken(), 1);
        assert_eq!((zone.stats().allocs, zone.stats().frees), (2, 1));
        let next = zone.alloc(Order::PAGE).unwrap();
        assert_ne!(next, mine);
        zone.free(next, Order::PAGE).unwrap();
        zone.free(mine, Order::PAGE).unwrap();
        assert!(zone.alloc(Order::HUGE).is_ok(), "the region is whole, and is found");
    });
}

/// A search for a run lowers the limit of the region while a run is freed there: the run is found,
/// by it or afterwards.
#[test]
fn loom_a_limit_is_not_lowered_below_what_is_free() {
    model(|| {
        let (zone, first) = full(0);
        zone.free(first, Order::PAGE).unwrap();
        let other = thread::spawn({
            let zone = zone.clone();
            let neighbour = Frame::inside(first.index() + 1);
            move || zone.free(neighbour, Order::PAGE).unwrap()
        });
        let pair = Order::new(1).unwrap();
        let early = zone.alloc(pair).ok();
        other.join().unwrap();
        let late = zone.alloc(pair).ok();
        assert_eq!((early.is_some(), early.or(late)), (late.is_none(), Some(first)));
    });
}

/// The same where the limit is low already, and where two frees raise it.
#[test]
fn loom_a_limit_that_was_lowered_is_raised() {
    model(|| {
        let (zone, first) = full(0);
        let pair = Order::new(1).unwrap();
        assert!(zone.alloc(pair).is_err());
        let free = |index: u32| {
            let (zone, frame) = (zone.clone(), Frame::inside(first.index() + index));
            thread::spawn(move || zone.free(frame, Order::PAGE).unwrap())
        };
        let threads = [free(0), free(1)];
        let early = zone.alloc(pair).ok();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(early.or_else(|| zone.alloc(pair).ok()), Some(first));
    });
}

/// An owner leaves a region that it has filled while two neighbours are freed there, before any run
/// was asked for: they are found once both frees have returned.
#[test]
fn loom_a_region_that_is_left_full_against_frees() {
    model(|| {
        let (zone, first) = full(0);
        zone.0.limits.use_from_now_on();
        let other = thread::spawn({
            let zone = zone.clone();
            move || {
                zone.free(first, Order::PAGE).unwrap();
                zone.free(Frame::inside(first.index() + 1), Order::PAGE).unwrap();
            }
        });
        zone.0.leave_full(0);
        other.join().unwrap();
        assert_eq!(zone.alloc(Order::new(1).unwrap()), Ok(first));
    });
}

/// The current region is full, and becomes whole while a claim leaves it for another: a run of
/// several regions finds it, which are found by the hints of whole ones alone.
#[test]
fn loom_a_region_that_a_claim_leaves_while_it_becomes_whole() {
    model(|| {
        let zone = Model::with_slots(1024, 0);
        let first = zone.alloc(Order::HUGE).unwrap();
        assert_eq!(first.index(), 0, "that of the first claim");
        // Its words decide: the frees leave the hints of the current region to the claim.
        zone.0.split(0);
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.free(first, Order::HUGE).unwrap()
        });
        let mine = zone.alloc(Order::PAGE).unwrap();
        other.join().unwrap();
        zone.free(mine, Order::PAGE).unwrap();
        assert!(zone.alloc_run(1024, 512).is_ok(), "both regions are whole");
    });
}

/// A region claimed as a whole against a claim of one of its frames: no frame has two owners, and
/// the loser changes nothing.
#[test]
fn loom_a_region_against_a_single_claim() {
    model(|| {
        let zone = Model::with_slots(512, 0);
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.alloc(Order::HUGE).ok()
        });
        let single = zone.alloc(Order::PAGE).ok();
        let whole = other.join().unwrap();
        assert!(single.is_none() || whole.is_none(), "{single:?} is in {whole:?}");
        let taken = u64::from(single.is_some()) + 512 * u64::from(whole.is_some());
        assert_eq!(zone.taken(), taken);
        for (frame, order) in [(single, Order::PAGE), (whole, Order::HUGE)] {
            frame.into_iter().for_each(|frame| zone.free(frame, order).unwrap());
        }
        assert!(zone.alloc(Order::HUGE).is_ok(), "the region is whole, and is found");
    });
}

/// A region whose claim as a whole fails, because of a single claim that is undone because of it:
/// neither gets it, and it is found afterwards.
#[test]
fn loom_a_region_whose_claim_fails_is_found() {
    model_with(Some(3), || {
        let zone = Model::with_slots(1024, 0);
        // The second one: the hints of the current region are updated by the search.
        zone.alloc(Order::HUGE).unwrap();
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.alloc(Order::PAGE).ok()
        });
        let claimed = zone.0.claim_region(1);
        let single = other.join().unwrap();
        assert!(!claimed || single.is_none());
        assert_eq!(zone.alloc(Order::PAGE).is_ok(), !claimed);
    });
}

/// A region is added to a set while a search clears the bit above its word: it is found.
#[test]
fn loom_a_hint_is_added_while_the_bit_above_it_is_cleared() {
    model(|| {
        let hints = loom::sync::Arc::new(super::hints::Hints::new(128, 0).unwrap());
        hints.set(64);
        assert!(hints.take(64));
        let other = thread::spawn({
            let hints = loom::sync::Arc::clone(&hints);
            move || _ = hints.next_from(0)
        });
        hints.set(65);
        other.join().unwrap();
        assert_eq!(hints.next_from(0), Some(65));
    });
}

/// A region is freed as a whole while a claim of one of its frames is undone, which it sees: the
/// region is among the whole ones all the same.
#[test]
fn loom_a_region_that_is_freed_against_a_claim_that_is_undone() {
    model(|| {
        let zone = Model::with_slots(1024, 0);
        // The second one: the hints of the current region are updated by the search.
        let [_, second] = [zone.alloc(Order::HUGE).unwrap(), zone.alloc(Order::HUGE).unwrap()];
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.free(second, Order::HUGE).unwrap()
        });
        let single = zone.claim_in(1);
        other.join().unwrap();
        if single.is_some() {
            let more = zone.alloc(Order::PAGE).expect("511 frames are free, and are found");
            zone.free(more, Order::PAGE).unwrap();
        }
        single.into_iter().for_each(|part| zone.zone.0.release(part).unwrap());
        assert_eq!(zone.alloc(Order::HUGE), Ok(second), "the region is whole, and is found");
    });
}

/// A claim of one frame by a thread that found the region before it was claimed as a whole, and
/// that is split meanwhile: the claim is undone, and frees nothing of the owner's.
#[test]
fn loom_a_region_that_is_split_against_a_single_claim() {
    model(|| {
        let zone = Model::with_slots(512, 0);
        let other = thread::spawn({
            let zone = zone.clone();
            // One word: a split does the same with each.
            move || {
                let part = zone.zone.0.claim_at(0, 1);
                let claimed = Some(part).filter(|part| part.mask != 0);
                claimed.inspect(|part| zone.touch(part.first(), 1))
            }
        });
        let claimed = zone.0.claim_region(0);
        if claimed {
            zone.touch(Frame::inside(0), 512);
            zone.0.split(0);
        }
        let single = other.join().unwrap();
        let expected = if claimed { 512 } else { single.map_or(0, |part| part.len().into()) };
        assert_eq!((zone.taken(), claimed && single.is_some()), (expected, false));
    });
}

/// Two threads free parts of a run: both are free afterwards, and nothing else is.
#[test]
fn loom_two_parts_of_a_region() {
    model(|| {
        let (zone, first) = whole(0);
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.free(Frame::inside(first.index() + 1), Order::PAGE).unwrap()
        });
        zone.free(first, Order::PAGE).unwrap();
        other.join().unwrap();
        assert_eq!(zone.taken(), 510);
        assert_eq!(zone.alloc(Order::new(1).unwrap()), Ok(first));
    });
}

/// A run freed twice at once, as a whole and in part: one of the two is refused.
#[test]
fn loom_a_region_and_a_part_of_it_freed_at_once() {
    model(|| {
        let (zone, first) = whole(0);
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.zone.free(first, Order::HUGE).is_ok()
        });
        let mine = zone.zone.free(first, Order::PAGE).is_ok();
        let theirs = other.join().unwrap();
        assert!(mine ^ theirs);
        assert_eq!(zone.taken(), if mine { 511 } else { 0 });
    });
}

/// A run of 2 MiB that one thread frees and another allocates: the second owner's accesses come
/// after the first one's, whichever of the two regions it gets.
#[test]
fn loom_a_region_that_is_freed_has_one_owner_at_a_time() {
    for order in [Order::HUGE, Order::PAGE] {
        model(move || {
            let (zone, first) = whole(0);
            let other = thread::spawn({
                let zone = zone.clone();
                move || zone.free(first, Order::HUGE).unwrap()
            });
            let early = zone.alloc(order).ok();
            other.join().unwrap();
            let late = zone.alloc(order).ok();
            // A page may be of another word, if the free came after the claim of the first one.
            let got = early.or(late).expect("the region is free, and is found");
            assert!(order == Order::PAGE || got == first);
        });
    }
}

/// The last frame of a region, or of half of it, is freed while another thread claims all of that:
/// its accesses come after the last owner's.
#[test]
fn loom_a_region_that_becomes_whole_is_claimed() {
    for order in [9, 8].map(|order| Order::new(order).unwrap()) {
        model(move || {
            let zone = Model::with_slots(512, 0);
            let front = 512 - order.frames();
            assert!(front == 0 || zone.alloc_run(front, 1).is_ok());
            let last = zone.alloc(Order::PAGE).unwrap();
            let other = thread::spawn({
                let zone = zone.clone();
                move || zone.free(last, Order::PAGE).unwrap()
            });
            let early = zone.alloc(order).ok();
            other.join().unwrap();
            assert!(early.is_some() || zone.alloc(order).is_ok());
        });
    }
}

/// An owner reserves the only region with free frames while another caller looks for one: that
/// finds the region in its set, or in the owner's slot.
#[test]
fn loom_a_region_is_found_while_it_is_reserved() {
    model(|| {
        let zone = Model::with_slots(1024, 1);
        zone.alloc(Order::HUGE).unwrap();
        let slot = zone.0.slots.claim().unwrap();
        let race = Race::default();
        let other = thread::spawn({
            let (zone, race) = (zone.clone(), race.clone());
            move || {
                assert_eq!(zone.0.reserve(slot), Some(1));
                race.meet();
            }
        });
        race.meet();
        let found = zone.0.search(0, usize::MAX, |region| (region == 1).then_some(region));
        assert_eq!(found, Some(1));
        other.join().unwrap();
    });
}

/// The same where the owner goes on to claim a frame of it, which moves it between the sets.
#[test]
fn loom_a_region_is_found_while_its_owner_claims_there() {
    model(|| {
        let zone = Model::with_slots(1024, 1);
        // The region of the first claim, where a caller looks without hints.
        zone.alloc(Order::HUGE).unwrap();
        let other = thread::spawn({
            let zone = zone.clone();
            move || {
                let mut local = zone.local();
                let frame = local.alloc(Order::PAGE).unwrap();
                zone.touch(frame, 1);
            }
        });
        assert!(zone.alloc(Order::PAGE).is_ok(), "over 400 frames are free");
        other.join().unwrap();
    });
}

/// A part of a run of 2 MiB is freed while a wrong free of that part, which is refused, sets the
/// bits of the region: the part is found.
#[test]
fn loom_a_free_beside_a_refused_one_is_found() {
    model(|| {
        let zone = Model::with_slots(1024, 0);
        // The second one: the first is that of the first claim, and is looked at without hints.
        let [_, second] = [zone.alloc(Order::HUGE).unwrap(), zone.alloc(Order::HUGE).unwrap()];
        let part = Frame::inside(second.index() + 1);
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.zone.free(part, Order::PAGE).is_ok()
        });
        let mine = zone.zone.free_run(second, 2).is_ok();
        let theirs = other.join().unwrap();
        assert!(mine ^ theirs);
        let found = zone.alloc(Order::PAGE);
        assert_eq!(found, Ok(if mine { second } else { part }));
    });
}

/// The sets and slots of a zone without its map: region [`Sets::REGION`] alone has free frames.
struct Sets {
    hints: super::hints::Hints,
    slots: super::hints::Slots,
    race: Race,
}

impl Sets {
    /// In the second word of its set, so that searches from the start find it by the bit above.
    const REGION: u32 = 65;

    fn new(slots: u32) -> Arc<Self> {
        let hints = super::hints::Hints::new(192, 0).unwrap();
        let slots = super::hints::Slots::new(slots).unwrap();
        Arc::new(Self { hints, slots, race: Race::default() })
    }

    /// Starts a thread that calls `call` beside a search.
    fn beside(self: &Arc<Self>, call: impl FnOnce(&Self) + 'static) -> thread::JoinHandle<()> {
        let sets = Arc::clone(self);
        thread::spawn(move || {
            call(&sets);
            sets.race.meet();
        })
    }

    /// Like `Inner::reserve`.
    fn reserve(&self, slot: u32) {
        self.slots.publish(slot, Some(Self::REGION));
        assert!(self.hints.take(Self::REGION));
    }

    /// Whether a search of regions from `first` on finds it: as `Inner::search`.
    fn finds(&self, first: u32) -> bool {
        self.race.meet();
        (0..2).any(|_| {
            self.hints.next_from(first) == Some(Self::REGION)
                || self.slots.reserved().any(|region| region == Self::REGION)
        })
    }
}

/// An owner reserves a region beside a search, which begins before its word or in it.
#[test]
fn loom_a_reserved_region_is_in_its_set_or_in_its_slot() {
    for first in [0, 64] {
        model(move || {
            let sets = Sets::new(1);
            let slot = sets.slots.claim().unwrap();
            sets.hints.set(Sets::REGION);
            let other = sets.beside(move |sets| sets.reserve(slot));
            assert!(sets.finds(first), "from {first}");
            other.join().unwrap();
        });
    }
}

/// Another search has found the word of the region empty, and cleared the bit above it.
#[test]
fn loom_a_reserved_region_is_found_behind_a_bit_that_a_search_has_cleared() {
    model(|| {
        let sets = Sets::new(1);
        let slot = sets.slots.claim().unwrap();
        sets.hints.set(Sets::REGION);
        let owner = sets.beside(move |sets| sets.reserve(slot));
        let search = sets.beside(|sets| {
            sets.race.meet();
            sets.hints.next_from(0);
        });
        assert!(sets.finds(0));
        owner.join().unwrap();
        search.join().unwrap();
    });
}

/// An owner leaves a region that has a free frame again for another one, beside a search.
#[test]
fn loom_a_region_that_its_owner_leaves_is_found() {
    model(|| {
        let sets = Sets::new(1);
        let slot = sets.slots.claim().unwrap();
        sets.slots.publish(slot, Some(Sets::REGION));
        let other = sets.beside(move |sets| {
            sets.hints.set(Sets::REGION);
            sets.slots.publish(slot, Some(1));
        });
        assert!(sets.finds(0));
        other.join().unwrap();
    });
}

/// The owner ends instead, and another one has its slot: the search sees the region of that.
#[test]
fn loom_a_region_whose_owner_ends_is_found() {
    model(|| {
        let sets = Sets::new(1);
        let slot = sets.slots.claim().unwrap();
        sets.slots.publish(slot, Some(Sets::REGION));
        let ends = sets.beside(move |sets| {
            sets.hints.set(Sets::REGION);
            sets.slots.release(slot);
        });
        let begins = sets.beside(|sets| {
            sets.race.meet();
            if let Some(slot) = sets.slots.claim() {
                sets.slots.publish(slot, Some(1));
            }
        });
        assert!(sets.finds(0));
        ends.join().unwrap();
        begins.join().unwrap();
    });
}

/// A run of 2 MiB is freed while a search lowers the limit of its region: the limit is not below
/// what is free afterwards.
#[test]
fn loom_a_limit_is_not_lowered_below_a_region_that_is_freed() {
    model(|| {
        let (zone, first) = whole(0);
        let race = Race::default();
        let other = thread::spawn({
            let (zone, race) = (zone.clone(), race.clone());
            move || {
                race.meet();
                zone.free(first, Order::HUGE).unwrap();
            }
        });
        let inner = &zone.0;
        inner.limits.lower().unwrap().region(0, || inner.map.max_order(0));
        race.meet();
        other.join().unwrap();
        assert_eq!(zone.0.limits.skip(0, 8), None);
    });
}

/// A frame of a region, other than that of the first claim, is freed and makes it whole while
/// another is claimed there, in either order: its hints say what it is.
#[test]
fn loom_a_region_that_becomes_whole_beside_a_claim_is_in_the_right_set() {
    model_with(Some(3), || {
        let zone = Model::with_slots(1024, 0);
        zone.alloc(Order::HUGE).unwrap();
        let part = zone.claim_in(1).unwrap();
        let race = Race::default();
        let other = thread::spawn({
            let (zone, race) = (zone.clone(), race.clone());
            move || {
                zone.touch(part.first(), 1);
                zone.zone.0.release(part).unwrap();
                race.meet();
            }
        });
        race.meet();
        let mine = zone.claim_in(1).unwrap();
        other.join().unwrap();
        let sets = |zone: &Model| (zone.0.partial.has(1), zone.0.whole.has(1));
        assert_eq!(sets(&zone), (true, false));
        zone.touch(mine.first(), 1);
        zone.zone.0.release(mine).unwrap();
        assert_eq!(sets(&zone), (false, true));
    });
}

/// A search takes a region that it found full out of its set while a frame is freed there, by a
/// thread that still sees it in the set: the frame is found.
#[test]
fn loom_a_frame_that_is_freed_in_a_region_that_a_search_leaves_is_found() {
    model_with(Some(3), || {
        let zone = Model::with_slots(1024, 0);
        zone.alloc(Order::HUGE).unwrap();
        let first = zone.alloc(Order::HUGE).unwrap();
        zone.0.split(1);
        zone.0.partial.set(1);
        let race = Race::default();
        let other = thread::spawn({
            let (zone, race) = (zone.clone(), race.clone());
            move || {
                zone.free(first, Order::PAGE).unwrap();
                race.meet();
            }
        });
        let search = || zone.0.search(0, usize::MAX, |region| zone.0.claim_in(region, 1));
        let early = search();
        race.meet();
        other.join().unwrap();
        assert!(early.is_some() != search().is_some());
    });
}
