//! An owner's windows: their free granules, the bound on what is held, and idle ones.

use super::*;
use crate::domain::owner::{Anyone, Caller, MAX_BYTES, Owner};
use crate::domain::window::{Addresses, FreeRuns, GRANULES, Granules, IDLE, WINDOW_BYTES};
use crate::iova::IovaError;
use crate::testing::Random;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The bytes that an owner may hold besides a multiple of those that are live.
const SPARE_BYTES: u64 = 64 * WINDOW_BYTES;

#[derive(Clone, Debug)]
enum Change {
    Alloc(u64),
    Free(usize),
    FreeElsewhere(usize),
    FreeMany(usize),
    Prepare(u64),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        6 => (1u64..=16).prop_map(Change::Alloc),
        2 => (1u64..=257).prop_map(Change::Alloc),
        3 => any::<usize>().prop_map(Change::Free),
        2 => any::<usize>().prop_map(Change::FreeElsewhere),
        1 => (1usize..40).prop_map(Change::FreeMany),
        1 => (1u64..=257).prop_map(Change::Prepare),
    ];
    proptest::collection::vec(change, 1..400)
}

fn is_in_window(addresses: &Addresses) -> bool {
    matches!(addresses.origin, crate::domain::window::Origin::Window(_))
}

/// The live ranges, none of which overlap.
#[derive(Default)]
struct Model {
    live: BTreeMap<u64, u64>,
    bytes: u64,
    peak: u64,
}

impl Model {
    fn add(&mut self, addresses: &Addresses) -> bool {
        let (start, end) = (addresses.iova.start().raw(), addresses.iova.end().raw());
        let below = self.live.range(..end).next_back();
        let free = below.is_none_or(|(_, &last)| last <= start);
        self.live.insert(start, end);
        self.bytes += if is_in_window(addresses) { end - start } else { 0 };
        self.peak = self.peak.max(self.bytes);
        free
    }

    fn remove(&mut self, addresses: &Addresses) {
        self.live.remove(&addresses.iova.start().raw());
        self.bytes -= if is_in_window(addresses) { addresses.iova.len() } else { 0 };
    }
}

/// Returns whether no address was allocated twice, and the owner never held more than documented.
fn run(domain: &Domain, owner: &mut Owner, changes: impl IntoIterator<Item = Change>) -> bool {
    let (mut model, mut all, mut good) = (Model::default(), Vec::new(), true);
    for change in changes {
        match change {
            Change::Alloc(pages) => {
                let addresses = owner.alloc(&domain.space, pages * 4096, || 4096).unwrap();
                good &= model.add(&addresses) && addresses.iova.len() == pages * 4096;
                all.push(addresses);
            }
            Change::Prepare(pages) => owner.prepare(&domain.space, pages * 4096),
            Change::Free(i) | Change::FreeElsewhere(i) if !all.is_empty() => {
                let addresses: Addresses = all.swap_remove(i % all.len());
                model.remove(&addresses);
                match change {
                    Change::Free(_) => owner.release(&domain.space, addresses),
                    _ => Anyone.release(&domain.space, addresses),
                }
            }
            Change::FreeMany(count) => {
                for addresses in all.drain(..count.min(all.len())) {
                    model.remove(&addresses);
                    owner.release(&domain.space, addresses);
                }
            }
            _ => {}
        }
        let held = domain.space.windows.load(Ordering::Relaxed) * WINDOW_BYTES;
        good &= held <= 2 * model.peak + SPARE_BYTES + WINDOW_BYTES;
    }
    all.into_iter().for_each(|addresses| owner.release(&domain.space, addresses));
    good
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]
    #[test]
    fn no_address_is_handed_out_twice_before_it_returns(changes in changes(), bits in 13u32..30) {
        let mock = Arc::new(Mock::default());
        let domain = Domain::new(mock, IovaSpace::new(bits.max(25)).unwrap());
        let empty = domain.space.iovas.stats();
        let mut owner = domain.space.register_owner();
        prop_assert!(run(&domain, &mut owner, changes));
        domain.space.retire_owner(&mut owner);
        prop_assert_eq!(domain.space.iovas.stats(), empty);
        prop_assert_eq!((domain.stats().windows, domain.stats().quarantined), (0, 0));
    }
}

/// Returned at random, and partly by others, no window is ever entirely free: parts of them are
/// used again.
#[test]
fn what_an_owner_holds_is_bounded_however_it_returns() {
    for elsewhere in [0, 2, 9] {
        let (_mock, domain, _) = domain();
        let mut owner = domain.space.register_owner();
        let (mut random, mut live) = (Random::new(7), 0);
        let changes = std::iter::from_fn(|| {
            let grows = live < 20_000 && random.below(64) != 0;
            live += if grows { 1 } else { -1 };
            Some(match grows {
                true => Change::Alloc(1 + random.below(2) as u64),
                false if random.below(10) < elsewhere => {
                    Change::FreeElsewhere(random.below(usize::MAX >> 1))
                }
                false => Change::Free(random.below(usize::MAX >> 1)),
            })
        });
        assert!(
            run(&domain, &mut owner, changes.take(150_000)),
            "{elsewhere} of 10 returned elsewhere"
        );
        // Returned addresses are collected when the owner needs some.
        let kept = domain.stats().windows;
        assert!(
            elsewhere > 0 || kept == IDLE as u64 + 1,
            "{kept} windows are kept without anything in them"
        );
        domain.space.retire_owner(&mut owner);
        assert_eq!(domain.stats().windows, 0);
    }
}

#[test]
fn addresses_are_in_order_and_a_window_is_recycled_as_a_whole() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    let alloc = |owner: &mut Owner, bytes| owner.alloc(&domain.space, bytes, || 4096).unwrap();
    let first: Vec<_> = (0..512).map(|_| alloc(&mut owner, 4096)).collect();
    assert!(first.windows(2).all(|pair| pair[0].iova.end() == pair[1].iova.start()));
    assert!(first[0].iova.start().is_aligned(WINDOW_BYTES));
    let start = first[0].iova.start();
    let mut rest = first.into_iter();
    let last = rest.next_back().unwrap();
    rest.for_each(|addresses| owner.release(&domain.space, addresses));
    // One page of it is live: all others are left alone.
    let second = alloc(&mut owner, 4096);
    assert!(!IovaRange::new(start, WINDOW_BYTES).unwrap().overlaps(&second.iova));
    Anyone.release(&domain.space, last);
    // Half a window does not fit behind `second` twice.
    let large: Vec<_> = (0..2).map(|_| alloc(&mut owner, MAX_BYTES)).collect();
    assert_eq!(large[1].iova.start(), start, "recycled, once what others returned is collected");
    assert_eq!(domain.stats().windows, 2);
    assert!(
        !is_in_window(&alloc(&mut owner, MAX_BYTES + 4096)),
        "longer than what comes from windows"
    );
}

/// If the address space has no window left, single pages come from the owner's windows, and from
/// the space.
#[test]
fn a_space_without_windows_still_serves_its_owners() {
    let mock = Arc::new(Mock::default());
    let domain = Domain::new(mock, IovaSpace::new(23).unwrap()); // four windows, without the first page
    let mut owner = domain.space.register_owner();
    let all: Vec<_> =
        (0..2047).map(|_| owner.alloc(&domain.space, 4096, || 4096).unwrap()).collect();
    assert_eq!(all.iter().filter(|addresses| is_in_window(addresses)).count(), 3 * 512);
    assert!(owner.alloc(&domain.space, 4096, || 4096).is_err());
    let odd =
        all.into_iter().enumerate().filter(|(i, _)| i % 2 == 1).map(|(_, addresses)| addresses);
    odd.for_each(|addresses| Anyone.release(&domain.space, addresses));
    for _ in 0..1023 {
        drop(owner.alloc(&domain.space, 4096, || 4096).unwrap());
    }
    assert!(owner.alloc(&domain.space, 4096, || 4096).is_err());
}

/// The rest of a window that the next allocation does not fit in is used again with the window.
#[test]
fn the_rest_of_a_window_is_not_lost() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    for _ in 0..100 {
        let all =
            [256, 255, 2].map(|pages| owner.alloc(&domain.space, pages * 4096, || 4096).unwrap());
        all.into_iter().for_each(|addresses| owner.release(&domain.space, addresses));
    }
    assert!(domain.stats().windows <= 3, "{}", domain.stats().windows);
}

/// The address space rounds it up. A window, which counts whole granules, would hand out the rest
/// of one again.
#[test]
fn a_length_that_is_not_whole_granules_never_comes_from_a_window() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    let before = owner.alloc(&domain.space, 4096, || 4096).unwrap();
    for bytes in [1, 4095, 4097, 6144] {
        assert!(
            !owner
                .alloc(&domain.space, bytes, || 4096)
                .is_ok_and(|addresses| is_in_window(&addresses))
        );
    }
    let after = owner.alloc(&domain.space, 4096, || 4096).unwrap();
    assert_eq!(after.iova.start(), before.iova.end());
}

/// An owner that may hold no more windows, and has no hole of that size: the range comes from the
/// address space, whole.
#[test]
fn a_batch_is_contiguous_although_all_windows_are_full_of_holes() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    let all: Vec<_> =
        (0..400 * 512).map(|_| owner.alloc(&domain.space, 4096, || 4096).unwrap()).collect();
    let (mut kept, mut rest) = (Vec::new(), Vec::new());
    for (n, addresses) in all.into_iter().enumerate() {
        if n % 128 == 5 { kept.push(addresses) } else { rest.push(addresses) }
    }
    rest.into_iter().for_each(|addresses| owner.release(&domain.space, addresses));
    let held = domain.stats().windows;
    let in_use = domain.space.iovas.stats().bytes_in_use;
    for pages in [256, 200, 130] {
        owner.prepare(&domain.space, pages * 4096);
        let batch: Vec<_> =
            (0..pages).map(|_| owner.alloc(&domain.space, 4096, || 4096).unwrap()).collect();
        owner.end_batch(&domain.space);
        let contiguous = batch.windows(2).all(|pair| pair[0].iova.end() == pair[1].iova.start());
        assert!(contiguous, "{pages} pages in the windows' holes");
        // Addresses that a batch does not take return, and the next alloc comes from a window.
        owner.prepare(&domain.space, pages * 4096);
        let one = owner.alloc(&domain.space, 4096, || 4096).unwrap();
        owner.end_batch(&domain.space);
        let next = owner.alloc(&domain.space, 4096, || 4096).unwrap();
        assert!(is_in_window(&next) && !is_in_window(&one));
        batch
            .into_iter()
            .chain([one, next])
            .for_each(|addresses| owner.release(&domain.space, addresses));
        assert_eq!(domain.stats().windows, held);
    }
    assert_eq!(domain.space.iovas.stats().bytes_in_use, in_use);
    // One that never ended, because its caller panicked, ends with the owner.
    owner.prepare(&domain.space, MAX_BYTES);
    kept.into_iter().for_each(|addresses| owner.release(&domain.space, addresses));
    domain.space.retire_owner(&mut owner);
    assert_eq!(domain.space.iovas.stats().bytes_in_use, 0);
}

/// Windows that an owner keeps for later are given up, also that of the current run and those that
/// others have returned; but not one that a mapping is in.
#[test]
fn idle_windows_are_given_up_and_a_run_goes_on() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    assert!(!owner.give_up_idle(&domain.space), "there is none");
    for elsewhere in [false, true] {
        for pages in [1, 3 * 512] {
            let all: Vec<_> =
                (0..pages).map(|_| owner.alloc(&domain.space, 4096, || 4096).unwrap()).collect();
            for addresses in all {
                if elsewhere {
                    Anyone.release(&domain.space, addresses);
                } else {
                    owner.release(&domain.space, addresses);
                }
            }
            assert!(owner.give_up_idle(&domain.space));
            assert_eq!((domain.stats().windows, domain.space.iovas.stats().bytes_in_use), (0, 0));
        }
    }
    let (first, idle) = (
        owner.alloc(&domain.space, MAX_BYTES, || 4096),
        owner.alloc(&domain.space, MAX_BYTES, || 4096),
    );
    let behind = owner.alloc(&domain.space, 4096, || 4096).unwrap();
    [first, idle]
        .into_iter()
        .for_each(|addresses| owner.release(&domain.space, addresses.unwrap()));
    assert!(owner.give_up_idle(&domain.space));
    let next = owner.alloc(&domain.space, 4096, || 4096).unwrap();
    assert_eq!((next.iova.start(), domain.stats().windows), (behind.iova.end(), 1));
    // Nothing is left but that one, and the rest of it.
    assert!(!owner.give_up_idle(&domain.space));
    [behind, next].into_iter().for_each(|addresses| owner.release(&domain.space, addresses));
    domain.space.retire_owner(&mut owner);
    assert_eq!(domain.stats().windows, 0);
}

/// Allocates `count` single pages.
fn pages(domain: &Domain, owner: &mut Owner, count: usize) -> Vec<Addresses> {
    (0..count).map(|_| owner.alloc(&domain.space, 4096, || 4096).unwrap()).collect()
}

/// Opens a window, returns its only mapping, and closes it.
fn open_and_close(domain: &Domain, owner: &mut Owner) {
    let one = pages(domain, owner, 1).remove(0);
    assert!(is_in_window(&one));
    owner.release(&domain.space, one);
    assert!(owner.give_up_idle(&domain.space));
}

/// Free granules there count as live as long as they may be allocated next.
#[test]
fn the_window_of_the_current_run_is_given_up_when_nothing_else_is_live_in_it() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    let one = pages(&domain, &mut owner, 1).remove(0);
    owner.release(&domain.space, one);
    assert_eq!(domain.stats().windows, 1);
    assert!(owner.give_up_idle(&domain.space));
    assert_eq!(domain.stats().windows, 0);
}

#[test]
fn a_window_that_others_have_emptied_is_given_up() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    let all = pages(&domain, &mut owner, 512 + 1);
    let mut all = all.into_iter();
    all.by_ref().take(512).for_each(|addresses| Anyone.release(&domain.space, addresses));
    assert_eq!(domain.stats().windows, 2);
    assert!(owner.give_up_idle(&domain.space));
    assert_eq!(domain.stats().windows, 1, "that of the last page");
    all.for_each(|addresses| owner.release(&domain.space, addresses));
}

/// A map that fails tries again only where something was given up.
#[test]
fn a_window_is_given_up_once() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    assert!(!owner.give_up_idle(&domain.space), "there is none");
    open_and_close(&domain, &mut owner);
    assert!(!owner.give_up_idle(&domain.space), "it is closed");
    let one = pages(&domain, &mut owner, 1).remove(0);
    assert!(!owner.give_up_idle(&domain.space), "it is in use");
    owner.release(&domain.space, one);
    assert!(owner.give_up_idle(&domain.space));
}

/// As many as an owner may hold at once, and more: it holds none of them.
#[test]
fn windows_that_were_closed_do_not_count_as_held() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    (0..200).for_each(|_| open_and_close(&domain, &mut owner));
    assert_eq!(domain.stats().windows, 0);
}

/// An owner of few windows looks for what others have returned before it opens another one, however
/// many it has closed.
#[test]
fn the_places_of_windows_that_were_closed_are_used_again() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    (0..32).for_each(|_| open_and_close(&domain, &mut owner));
    let mut first = pages(&domain, &mut owner, 512);
    let start = first[0].iova.start();
    let last = first.pop().unwrap();
    first.into_iter().for_each(|addresses| owner.release(&domain.space, addresses));
    let second = pages(&domain, &mut owner, 512);
    Anyone.release(&domain.space, last);
    let third = pages(&domain, &mut owner, 1);
    assert_eq!((third[0].iova.start(), domain.stats().windows), (start, 2), "recycled");
    second.into_iter().chain(third).for_each(|addresses| owner.release(&domain.space, addresses));
}

/// Their windows have the same place, each among those of its owner.
#[test]
fn what_an_owner_returns_for_another_one_does_not_become_free_in_its_own_window() {
    let (_mock, domain, _) = domain();
    let (mut first, mut second) = (domain.space.register_owner(), domain.space.register_owner());
    let sent = pages(&domain, &mut first, 1).remove(0);
    let mut own = pages(&domain, &mut second, 512).into_iter();
    let kept = own.next().unwrap();
    second.release(&domain.space, sent);
    own.for_each(|addresses| second.release(&domain.space, addresses));
    let next = pages(&domain, &mut second, 512);
    assert!(next.iter().all(|addresses| !addresses.iova.overlaps(&kept.iova)), "it is in use");
    assert!(first.give_up_idle(&domain.space), "it has returned to its owner");
    next.into_iter().chain([kept]).for_each(|addresses| second.release(&domain.space, addresses));
    domain.space.retire_owner(&mut first);
    domain.space.retire_owner(&mut second);
    assert_eq!((domain.stats().windows, domain.stats().quarantined), (0, 0));
}

/// Too little to be worth a look at every window, as long as the domain has others.
#[test]
fn what_others_return_is_used_where_the_space_is_exhausted() {
    let mock = Arc::new(Mock::default());
    let domain = Domain::new(mock, IovaSpace::new(26).unwrap()); // 32 windows, without the first page
    let mut owner = domain.space.register_owner();
    let mut all = pages(&domain, &mut owner, 32 * 512 - 1);
    assert_eq!(domain.stats().windows * WINDOW_BYTES, 31 * WINDOW_BYTES);
    assert!(owner.alloc(&domain.space, 4096, || 4096).is_err());
    let returned = all.swap_remove(5 * 512 + 7);
    assert!(is_in_window(&returned));
    let at = returned.iova;
    Anyone.release(&domain.space, returned);
    assert_eq!(pages(&domain, &mut owner, 1)[0].iova, at);
    all.into_iter().for_each(|addresses| owner.release(&domain.space, addresses));
}

/// An owner that makes no calls keeps one window, that of its next map; the others are any owner's.
#[test]
fn idle_owners_leave_a_space_of_32_bits_to_others() {
    const MIB: u64 = 1 << 20;
    let domain = Domain::new(Arc::new(Mock::default()), IovaSpace::new(32).unwrap());
    let mut owners: Vec<_> = (0..128).map(|_| domain.space.register_owner()).collect();
    for owner in &mut owners {
        let all: Vec<_> =
            (0..32).map(|_| owner.alloc(&domain.space, MIB, || 4096).unwrap()).collect();
        all.into_iter().for_each(|addresses| owner.release(&domain.space, addresses));
    }
    // Anyone, another owner, and one of them.
    let long = Anyone.alloc(&domain.space, 24 * MIB, || 2 * MIB).unwrap();
    let mut other = domain.space.register_owner();
    let more: Vec<_> =
        (0..2048).map(|_| other.alloc(&domain.space, MIB, || 4096).unwrap()).collect();
    let own = owners[0].alloc(&domain.space, 24 * MIB, || 2 * MIB).unwrap();
    for addresses in more.into_iter().chain([long, own]) {
        other.release(&domain.space, addresses);
    }
    owners.iter_mut().chain([&mut other]).for_each(|owner| domain.space.retire_owner(owner));
    assert_eq!((domain.stats().windows, domain.space.iovas.stats().bytes_in_use), (0, 0));
}

/// The whole space is the windows of one owner: it gives up that of its current run too.
#[test]
fn an_owner_does_not_stand_in_its_own_way() {
    let domain = Domain::new(Arc::new(Mock::default()), IovaSpace::new(22).unwrap());
    let mut owner = domain.space.register_owner();
    let one = pages(&domain, &mut owner, 1).remove(0);
    owner.release(&domain.space, one);
    assert_eq!(domain.stats().windows, 1);
    let bytes = 3 << 20; // more than is left
    let memory = Buf::new(usize::try_from(bytes).unwrap() / PAGE, &Arc::default());
    let all = domain.space.map_fresh(&mut owner, memory.memory(), Access::READ, None);
    let (reachable, error) = all.expect_err("the backend maps no more than 8 pages");
    assert!(reachable.is_none() && matches!(error, BackendError::NotRegistered { .. }), "{error}");
    assert_eq!(domain.stats().windows, 0);
}

/// Memory that large leaves could map is mapped by smaller ones where no address is aligned for
/// them; first by the largest that do, and the caller's idle windows are given up before.
#[test]
fn the_alignment_of_large_leaves_is_no_condition() {
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    let domain = |bits| Domain::new(Arc::new(Mock::default()), IovaSpace::new(bits).unwrap());
    let start = |addresses: Result<Addresses, BackendError>| {
        addresses.map(|addresses| addresses.iova.start().raw())
    };
    let last = |bytes: u64| Some(Iova::new(bytes - 1));

    // All is free but the pages at 0, at 1 GiB, and the last one before 2 GiB.
    let large = domain(31);
    for page in [GIB, 2 * GIB - 4096] {
        large.reserve_range(IovaRange::new(Iova::new(page), 4096).unwrap()).unwrap();
    }
    let mut owner = large.space.register_owner();
    for (len, limit, expected) in [
        (GIB / 2, None, 2 * MIB),
        (GIB / 2, last(GIB / 2 + 2 * MIB), 2 * MIB),
        (GIB / 2, last(GIB / 2 + 4096), 4096),
        (GIB - 4096, None, 4096),
    ] {
        for by_owner in [true, false] {
            let got = match by_owner {
                true => large.space.alloc_up_to(&mut owner, len, || GIB, limit),
                false => large.space.alloc_up_to(&mut Anyone, len, || GIB, limit),
            };
            let got = got.unwrap();
            assert_eq!(got.iova.start().raw(), expected, "{len:#x} up to {limit:?}");
            Anyone.release(&large.space, got);
        }
    }
    // A request that fits nowhere is refused at once.
    let refused = start(large.space.alloc_up_to(&mut owner, GIB, || GIB, None));
    let Err(BackendError::Iova(IovaError::Exhausted { align: GIB, largest_free, .. })) = refused
    else {
        panic!("{refused:?}")
    };
    assert_eq!(largest_free, GIB - 4096);
    large.space.retire_owner(&mut owner);

    // The caller's own idle window is at the only aligned address; the one at 4 KiB is free.
    let small = domain(23);
    let taken = IovaRange::new(Iova::new(4 * MIB), 4 * MIB).unwrap();
    small.reserve_range(taken).unwrap();
    let mut owner = small.space.register_owner();
    let one = pages(&small, &mut owner, 1).remove(0);
    assert_eq!(one.iova.start().raw(), 2 * MIB);
    owner.release(&small.space, one);
    let len = 2 * MIB - 4096;
    let whole = small.space.alloc_up_to(&mut owner, len, || 2 * MIB, None);
    assert_eq!(start(whole), Ok(2 * MIB));
    small.space.retire_owner(&mut owner);

    // A map asks for the alignment that its memory allows.
    let memory = Buf::aligned((3 << 20) / PAGE, 2 << 20, &Arc::default());
    let memory = memory.memory();
    let small = domain(22);
    let mapped = small.space.map_fresh(&mut Anyone, memory, Access::READ, None);
    let (_, error) = mapped.expect_err("the backend maps no more than 8 pages");
    assert!(matches!(error, BackendError::NotRegistered { .. }), "{error}");
}

proptest! {
    #[test]
    fn a_map_agrees_with_a_list_of_flags(
        changes in proptest::collection::vec((any::<bool>(), 0..GRANULES, 1..300u32), 1..40),
        from in 0..=GRANULES,
        count in 1..300u32,
    ) {
        let (mut map, mut model) = (Granules::default(), [false; GRANULES as usize]);
        for (set, first, count) in changes {
            let count = count.min(GRANULES - first);
            if set { map.set(first, count) } else { map.clear(first, count) }
            model[first as usize..(first + count) as usize].fill(set);
        }
        let bit = |at: u32| map.0[(at / 64) as usize] >> (at % 64) & 1 == 1;
        prop_assert!((0..GRANULES).all(|at| bit(at) == model[at as usize]));
        let is_free = |at: u32| at < GRANULES && !model[at as usize];
        let first = (from..GRANULES).find(|&at| {
            (at == from || !is_free(at - 1)) && (at..at + count).all(is_free)
        });
        let expected = first.map(|at| at..(at..).find(|&end| !is_free(end)).unwrap());
        prop_assert_eq!(map.free_run(from, count).ok(), expected);
    }

    /// The remembered places hide no run, whatever was taken, and freed in whole or in part.
    #[test]
    fn every_run_that_is_free_is_found(
        steps in proptest::collection::vec((0..3u8, 0..GRANULES, 1..200u32), 1..120),
    ) {
        let (mut runs, mut model) = (FreeRuns::new(), Granules::default());
        for (step, at, count) in steps {
            let count = count.min(GRANULES - at);
            match step {
                0 => {
                    let from = if at % 4 == 0 { at } else { 0 };
                    let expected = model.free_run(from, count).ok();
                    prop_assert_eq!(runs.take(from, count), expected.clone());
                    // Short runs stay free, as between mappings that live.
                    if let Some(run) = expected {
                        let kept = run.start + count;
                        runs.free(kept, run.end - kept);
                        model.set(run.start, count);
                    }
                }
                1 => {
                    runs.free(at, count);
                    model.clear(at, count);
                }
                _ => {
                    let mut others = Granules::default();
                    others.set(at, count);
                    runs.free_all(&others);
                    model.clear_all(&others);
                }
            }
        }
    }
}

#[test]
fn what_is_cleared_is_counted() {
    let (mut map, mut others) = (Granules::default(), Granules::default());
    map.set(60, 200);
    others.set(63, 66);
    assert_eq!(map.clear_all(&others), 66);
    assert_eq!(map.free_run(0, 61), Ok(63..129));
    assert_eq!(map.clear_all(&Granules::default()), 0);
}
