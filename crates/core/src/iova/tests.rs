use super::node::{Extent, extent_of};
use super::space::{Counter, PIECE};
use super::*;
use crate::addr::{Iova, IovaRange};
use proptest::prelude::*;

const G: u64 = IovaSpace::GRANULE;
const HIGH: u64 = 1 << 20;

mod exhaustive;

fn range(start: u64, granules: u64) -> IovaRange {
    IovaRange::new(Iova::new(start * G), granules * G).unwrap()
}

/// A place in a list of `len` things.
fn below(any: u64, len: usize) -> usize {
    usize::try_from(any % len as u64).unwrap()
}

fn visits(space: &IovaSpace) -> u64 {
    space.space.lock().visits()
}

/// All of 33 bits is free, but the first page: a range across the line would have room.
#[test]
fn no_allocation_crosses_4_gib() {
    let space = IovaSpace::new(33).unwrap();
    let half = 1 << 32;
    let largest = |space: &IovaSpace, len, limit| match space.alloc(len, G, limit) {
        Err(IovaError::Exhausted { largest_free, .. }) => largest_free,
        other => panic!("{other:?}"),
    };
    assert_eq!(largest(&space, half + G, None), half);
    // Nor one with a limit that is above it.
    assert_eq!(largest(&space, half, Some(Iova::new(half + half / 2 - 1))), half - G);
    let [high, low] = [half, half - G].map(|len| space.alloc(len, G, None).unwrap());
    assert_eq!((high.start().raw(), low.end().raw()), (half, half));
    space.free(range(HIGH - 1, 2)).unwrap();
    assert_eq!(largest(&space, 2 * G, None), G);
    space.alloc_at(range(HIGH - 1, 2)).unwrap();
}

#[test]
fn what_is_exhausted_is_told_of_the_addresses_up_to_the_limit() {
    let space = IovaSpace::new(48).unwrap();
    space.alloc_at(range(1, 100)).unwrap();
    space.free(range(40, 3)).unwrap();
    for (last_granule, largest) in [(100, 3), (41, 2), (39, 0), (103, 3), (104, 4)] {
        let limit = Iova::new((last_granule + 1) * G - 1);
        let error = space.alloc(5 * G, G, Some(limit)).unwrap_err();
        let exhausted = IovaError::Exhausted {
            len: 5 * G,
            align: G,
            limit,
            in_use: 97 * G,
            largest_free: largest * G,
        };
        assert_eq!(error, exhausted);
        let text = error.to_string();
        assert!(
            text.contains(&format!("up to {limit}: the largest free range up to there has")),
            "{text}"
        );
    }
}

#[test]
fn an_invalid_width_length_or_alignment_is_refused() {
    assert_eq!(IovaSpace::new(12).unwrap_err(), IovaError::Width { bits: 12 });
    assert_eq!(IovaSpace::new(58).unwrap_err(), IovaError::Width { bits: 58 });
    let space = IovaSpace::new(39).unwrap();
    assert_eq!(space.alloc(0, 1, None), Err(IovaError::Length { len: 0, bits: 39 }));
    assert_eq!(space.alloc(u64::MAX, 1, None), Err(IovaError::Length { len: u64::MAX, bits: 39 }));
    for align in [0, 3, 1 << 31] {
        assert_eq!(space.alloc(1, align, None), Err(IovaError::Alignment { align }));
    }
    let crooked = IovaRange::new(Iova::new(1), G).unwrap();
    assert_eq!(space.alloc_at(crooked), Err(IovaError::Misaligned { range: crooked }));
    let outside = range((1 << 27) - 1, 2);
    assert_eq!(space.alloc_at(outside), Err(IovaError::Outside { range: outside, bits: 39 }));
    assert_eq!(space.free(outside), Err(IovaError::Outside { range: outside, bits: 39 }));
    assert_eq!(space.stats().bytes_in_use, 0);
}

#[test]
fn the_null_page_and_what_is_reserved_is_never_handed_out() {
    let space = IovaSpace::new(32).unwrap();
    assert!(matches!(space.alloc_at(range(0, 1)), Err(IovaError::Reserved { .. })));
    assert!(matches!(space.free(range(0, 1)), Err(IovaError::Reserved { .. })));
    let msi = range(0xfee00, 0x100);
    space.reserve(msi).unwrap();
    space.reserve(msi).unwrap();
    space.reserve(range(1 << 21, 7)).unwrap(); // beyond the width: nothing to keep
    assert_eq!(
        space.alloc_at(range(0xfedff, 2)),
        Err(IovaError::Reserved { range: range(0xfedff, 2), reserved: msi })
    );
    let mut taken = 0;
    while let Ok(got) = space.alloc(1 << 20, 1, None) {
        assert!(!got.overlaps(&msi) && got.start().raw() != 0);
        taken += 1;
    }
    assert_eq!(taken, 4096 - 2);
    let used = range(1, 1);
    assert_eq!(
        space.reserve(range(0, 2)),
        Err(IovaError::InUse { range: range(0, 2), used }),
        "an allocation cannot be reserved afterwards"
    );
}

#[test]
fn fifty_thousand_mappings_that_abut_are_a_handful_of_extents() {
    let space = IovaSpace::new(48).unwrap();
    let mut held: Vec<IovaRange> =
        (0..50_000u64).map(|i| space.alloc((1 + i % 7) * G, 1, None).unwrap()).collect();
    let full = space.stats();
    assert_eq!((full.free, full.allocated), (2, 1));
    assert_eq!(full.bytes_in_use, held.iter().map(IovaRange::len).sum::<u64>());
    assert!(space.metadata_bytes() <= 64 << 10, "{} bytes", space.metadata_bytes());
    // Freed in an order that makes as many extents as there can be, and then none.
    let (mut odd, mut even) = (Vec::new(), Vec::new());
    for (i, r) in held.drain(..).enumerate() {
        if i % 2 == 1 { odd.push(r) } else { even.push(r) }
    }
    for r in odd {
        space.free(r).unwrap();
    }
    assert!(space.stats().free > 25_000 - 2);
    for r in even {
        space.free(r).unwrap();
    }
    assert_eq!(space.stats(), IovaSpace::new(48).unwrap().stats());
}

/// The case that locked kernels up: low addresses full of small holes, none of which fits.
#[test]
fn a_search_under_a_32_bit_limit_visits_a_node_per_level_among_a_million_ranges() {
    let space = IovaSpace::new(48).unwrap();
    let below_4g = Some(Iova::new(u64::from(u32::MAX)));
    let held: Vec<_> = (0..1_000_000).map(|_| space.alloc(G, 1, below_4g).unwrap()).collect();
    for r in held.iter().step_by(2) {
        space.free(*r).unwrap();
    }
    space.alloc_at(range(1_000_001, HIGH - 1_000_001)).unwrap();
    let extents = space.stats().free;
    assert_eq!(extents, 500_001);
    // At most 12 levels in each half and a map, searched twice for an alignment that is no page
    // size, and once more for the longest run of a refusal.
    let most = 3 * 2 * (12 + 1) + 2;
    for (len, align) in [(2, 1), (1, 1 << 9), (1, 4), (3, 16), (1 << 12, 1), (1, 2)] {
        for limit in [below_4g, Some(Iova::new(0x3fff_ffff)), Some(Iova::new(0x1fff)), None] {
            let before = visits(&space);
            let got = space.alloc(len * G, align * G, limit);
            let steps = visits(&space) - before;
            assert!(steps <= most, "{steps} visits for {len} at {align} of {extents}");
            if let Ok(r) = got {
                space.free(r).unwrap();
            }
        }
    }
}

/// Other threads allocate and free between two pieces.
#[test]
fn statistics_hold_the_lock_for_a_few_maps_at_a_time() {
    let space = IovaSpace::new(40).unwrap();
    let held: Vec<_> = (0..100_000).map(|_| space.alloc(G, 1, None).unwrap()).collect();
    for r in held.iter().step_by(2) {
        space.free(*r).unwrap();
    }
    let (mut counter, mut from, mut pieces) = (Counter::default(), 0, 0);
    loop {
        let before = visits(&space);
        let next = space.space.lock().count(from, PIECE, &mut counter);
        let steps = visits(&space) - before;
        // The maps, 512 runs in each but the first and the last; and the nodes above them.
        assert!(steps <= (PIECE as u64 / 512 + 1) + 2 * 12, "{steps} visits from {from} on");
        let Some(next) = next else { break };
        (from, pieces) = (next, pieces + 1);
    }
    assert!(pieces > 100_000 / PIECE);
    assert_eq!(space.stats().allocated, 50_000);
}

#[test]
fn limits_hold_and_high_addresses_are_taken_first() {
    let space = IovaSpace::new(39).unwrap();
    assert!(space.alloc(G, 1, None).unwrap().start().raw() >= 1 << 32);
    let low = space.alloc(G, 1, Some(Iova::new(u64::from(u32::MAX)))).unwrap();
    assert!(low.last().raw() <= u64::from(u32::MAX));
    // A limit is the last address: 0x2fff lets the granule at 0x2000 end in time, 0x2ffe does not.
    assert_eq!(low, range(1, 1));
    assert!(space.alloc(G, 1, Some(Iova::new(0x2ffe))).is_err());
    assert_eq!(space.alloc(G, 1, Some(Iova::new(0x2fff))), Ok(range(2, 1)));
    // Across 4 GiB, and back.
    space.alloc_at(range(HIGH - 3, 3 + 1 + 3).part(0, 3 * G).unwrap()).unwrap();
    assert!(matches!(space.alloc_at(range(HIGH - 4, 8)), Err(IovaError::InUse { .. })));
    space.free(range(HIGH - 3, 4)).unwrap();
    assert_eq!(space.stats().allocated, 1);
}

/// For every width: up to its last granule, with all below it free and in use.
#[test]
fn the_last_address_of_every_width_can_be_allocated() {
    for bits in 32..=57 {
        let space = IovaSpace::new(bits).unwrap();
        let granules = 1u64 << (bits - 12);
        let end = range(granules - 1, 1);
        space.alloc_at(end).unwrap();
        space.free(end).unwrap();
        let half = range(granules / 2, granules / 2);
        space.alloc_at(half).unwrap();
        space.free(end).unwrap();
        space.alloc_at(end).unwrap();
        space.space.lock().check();
    }
}

#[test]
fn what_is_free_before_a_part_of_a_region_ends_with_what_is_used() {
    let all = super::node::REGION;
    for used in 0..all {
        let mut map = super::region::Region::new(true);
        map.set(extent_of(range(used, 1)), false);
        for part in 0..all {
            let expected = used >= part;
            assert_eq!(map.is_free_before(extent_of(range(part, 1))), expected, "{used} {part}");
        }
    }
}

/// Each piece shares a region of its own with the rest of the allocation.
#[test]
fn a_large_allocation_may_be_freed_in_any_pieces() {
    let space = IovaSpace::new(48).unwrap();
    let empty = space.stats();
    let large = space.alloc(2000 * 512 * G, 1, None).unwrap();
    for i in 0..2000 {
        space.free(large.part((512 * i + 7) * G, G).unwrap()).unwrap();
    }
    assert_eq!(space.stats().allocated, 2001);
    space.space.lock().check();
    assert!(matches!(space.free(large), Err(IovaError::PartlyFree { .. })));
    for i in 0..2000 {
        space.free(large.part(512 * i * G, 7 * G).unwrap()).unwrap();
        space.free(large.part((512 * i + 8) * G, 504 * G).unwrap()).unwrap();
    }
    assert_eq!(space.stats(), empty);
    space.space.lock().check();
}

/// Cut at one end only, in more regions than there are spare maps at any time.
#[test]
fn a_piece_cut_at_either_end_finds_a_map() {
    for (from, len) in [(0, 3), (509, 3), (300, 512), (0, 513), (511, 513)] {
        let space = IovaSpace::new(48).unwrap();
        let empty = space.stats();
        let large = space.alloc(1000 * 512 * G, 512 * G, None).unwrap();
        for i in (0..998).step_by(2) {
            space.free(large.part((512 * i + from) * G, len * G).unwrap()).unwrap();
        }
        assert_eq!(space.stats().free, 499 + empty.free);
        for i in (0..998).step_by(2) {
            let part = large.part((512 * i + from) * G, len * G).unwrap();
            space.alloc_at(part).unwrap();
        }
        space.space.lock().check();
        space.free(large).unwrap();
        assert_eq!(space.stats(), empty);
    }
}

#[test]
fn a_page_that_is_freed_at_once_leaves_no_map() {
    let space = IovaSpace::new(48).unwrap();
    for start in [HIGH, HIGH + 512 * 9 + 5, 1 << 30] {
        space.alloc_at(range(start, 1)).unwrap();
        space.free(range(start, 1)).unwrap();
        space.space.lock().check();
        // From here on the nodes above are there, or were.
        let beside = range(start + 512, 1);
        space.alloc_at(beside).unwrap();
        space.alloc_at(range(start, 1)).unwrap();
        space.free(range(start, 1)).unwrap();
        space.space.lock().check();
        space.free(beside).unwrap();
    }
    assert_eq!(space.stats(), IovaSpace::new(48).unwrap().stats());
}

#[test]
fn metadata_follows_the_regions_in_use() {
    let space = IovaSpace::new(48).unwrap();
    let empty = space.metadata_bytes();
    let held: Vec<_> = (0..1 << 18).map(|_| space.alloc(G, 1, None).unwrap()).collect();
    let dense = space.metadata_bytes();
    assert!(dense - empty <= 512 * 128 + 4096, "{dense} bytes for 512 regions");
    for r in held {
        space.free(r).unwrap();
    }
    // Whole regions take a slot each, and the existing nodes are used again.
    let windows: Vec<_> = (0..512).map(|_| space.alloc(512 * G, 512 * G, None).unwrap()).collect();
    assert_eq!(space.metadata_bytes(), dense);
    // One page in each region is the most that a page can cost where they are neighbours.
    for window in &windows {
        space.free(window.part(G, 511 * G).unwrap()).unwrap();
    }
    assert_eq!(space.stats().allocated, 512);
    assert!(space.metadata_bytes() - empty <= 512 * 128 + 4096);
    space.space.lock().check();
}

/// A granule each: what the account should say, by the simplest means.
struct Model {
    /// Granule to state (f free, a allocated); what is not in it is reserved.
    granules: std::collections::BTreeMap<u64, char>,
}

/// The stretches that are left free, around the border at 4 GiB and a few 2 MiB lines.
const WINDOWS: [(u64, u64); 6] = [
    (1, 70),
    (500, 530),
    (1000, 2100),
    (HIGH - 40, HIGH + 40),
    (HIGH + 512 * 3 - 9, HIGH + 512 * 4 + 5),
    (HIGH + 512 * 8 - 1000, HIGH + 512 * 8 + 1000), // two nodes
];
const END: u64 = 1 << 21;

impl Model {
    fn new() -> (IovaSpace, Self) {
        let space = IovaSpace::new(33).unwrap();
        let mut at = 0;
        for (start, end) in WINDOWS {
            space.reserve(range(at, start - at)).unwrap();
            at = end;
        }
        space.reserve(range(at, END - at)).unwrap();
        let granules = WINDOWS.iter().flat_map(|&(s, e)| (s..e).map(|g| (g, 'f'))).collect();
        (space, Self { granules })
    }

    fn is(&self, start: u64, len: u64, state: char) -> bool {
        (start..start + len).all(|g| self.granules.get(&g) == Some(&state))
    }

    fn set(&mut self, start: u64, len: u64, state: char) {
        (start..start + len).for_each(|g| {
            self.granules.insert(g, state);
        });
    }

    /// The runs of a state; a free one ends at 4 GiB.
    fn runs(&self, state: char) -> Vec<Extent> {
        let mut runs: Vec<Extent> = Vec::new();
        for (&g, _) in self.granules.iter().filter(|(_, s)| **s == state) {
            match runs.last_mut() {
                Some(run) if run.end == g && (state == 'a' || g != HIGH) => run.end += 1,
                _ => runs.push(Extent { start: g, end: g + 1 }),
            }
        }
        runs
    }

    fn first_fit(&self, len: u64, align: u64, end: u64) -> Option<u64> {
        let fits = |low: bool| {
            self.runs('f').into_iter().filter(|r| (r.start < HIGH) == low).find_map(|r| {
                let start = r.start.next_multiple_of(align);
                (start + len <= r.end && start + len <= end).then_some(start)
            })
        };
        if end > HIGH { fits(false).or_else(|| fits(true)) } else { fits(true) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: crate::testing::cases(48), ..ProptestConfig::default() })]
    #[test]
    fn agrees_with_a_map_of_granules(ops in proptest::collection::vec((0u8..10, any::<u64>(), any::<u64>(), any::<u64>()), 300)) {
        let (space, mut model) = Model::new();
        let mut held: Vec<(u64, u64)> = Vec::new();
        let anywhere = |a: u64, b: u64| {
            let (s, e) = WINDOWS[(a % 6) as usize];
            let len = if b.is_multiple_of(4) { b / 4 % 1200 } else { b / 4 % 12 };
            (s - 1 + (a / 6) % (e - s + 1), 1 + len)
        };
        for (kind, a, b, c) in ops {
            match kind {
                0..4 => {
                    let len = 1 + if b % 8 == 0 { b / 8 % 1300 } else { b / 8 % 9 };
                    let align = [1, 1, 1, 1, 2, 8, 64, 512][(a % 8) as usize];
                    let end = [END, END, HIGH, HIGH, 1500, HIGH + 20, 40, HIGH - 5][(c % 8) as usize];
                    let limit = (end < END).then(|| Iova::new(end * G - 1));
                    let got = space.alloc(len * G - b % 2, align * G, limit);
                    let want = model.first_fit(len, align, end);
                    match got {
                        Ok(r) => {
                            let start = r.start().raw() / G;
                            prop_assert_eq!(r.len(), len * G);
                            prop_assert!(model.is(start, len, 'f') && start.is_multiple_of(align) && start + len <= end);
                            if align == 1 || align == 512 {
                                prop_assert_eq!(Some(start), want);
                            }
                            model.set(start, len, 'a');
                            held.push((start, len));
                        }
                        Err(e) => {
                            let exhausted = matches!(e, IovaError::Exhausted { .. });
                            prop_assert!(exhausted, "{}", e);
                            let slack = if align == 1 || align == 512 { 0 } else { align - 1 };
                            prop_assert_eq!(model.first_fit(len + slack, if slack == 0 { align } else { 1 }, end), None);
                        }
                    }
                }
                4 => {
                    let (start, len) = anywhere(a, b);
                    let got = space.alloc_at(range(start, len));
                    prop_assert_eq!(got.is_ok(), model.is(start, len, 'f'), "{:?}", got);
                    if got.is_ok() {
                        model.set(start, len, 'a');
                        held.push((start, len));
                    }
                }
                5 => {
                    // The range may hit a part, a hole, or several.
                    let (start, len) = anywhere(a, b);
                    let got = space.free(range(start, len));
                    let (all, none) = (model.is(start, len, 'a'), model.is(start, len, 'f'));
                    let reserved = (start..start + len).any(|g| !model.granules.contains_key(&g));
                    match got {
                        Ok(()) => {
                            prop_assert!(all);
                            model.set(start, len, 'f');
                            held.retain(|&(s, l)| model.is(s, l, 'a'));
                        }
                        Err(IovaError::Reserved { .. }) => prop_assert!(reserved),
                        Err(IovaError::AlreadyFree { .. }) => prop_assert!(none),
                        Err(IovaError::PartlyFree { free, .. }) => {
                            prop_assert!(!all && !none && !reserved);
                            prop_assert!(model.is(free.start().raw() / G, free.len() / G, 'f'));
                        }
Err(e) => prop_assert!(false, "{e}"),
                    }
                }
                _ if !held.is_empty() => {
                    let (start, len) = held.swap_remove(below(a, held.len()));
                    prop_assert_eq!(space.free(range(start, len)), Ok(()));
                    model.set(start, len, 'f');
                    let again = space.free(range(start, len));
                    prop_assert_eq!(again, Err(IovaError::AlreadyFree { range: range(start, len) }));
                }
                _ => {}
            }
            prop_assert_eq!(space.space.lock().check(), model.runs('f'));
            let extents = space.stats();
            prop_assert_eq!(space.stats_in_pieces(1 + below(b, 9)), extents);
            prop_assert_eq!((extents.free, extents.allocated), (model.runs('f').len(), model.runs('a').len()));
            prop_assert_eq!(extents.largest_free, model.runs('f').iter().map(|r| r.len()).max().unwrap_or(0) * G);
            let limit = anywhere(a, b).0;
            let before = Extent { start: 0, end: limit };
            let runs = model.runs('f').into_iter().filter_map(|run| run.intersection(before));
            let longest = runs.map(Extent::len).max().unwrap_or(0);
            prop_assert_eq!(space.space.lock().largest_free(limit), longest * G, "before {}", limit);
            prop_assert_eq!(extents.bytes_in_use, model.granules.values().filter(|s| **s == 'a').count() as u64 * G);
        }
    }

    /// Whole allocations only: then a free is never refused, and needs no memory, whatever came
    /// before.
    #[test]
    fn freeing_a_whole_allocation_needs_no_memory(ops in proptest::collection::vec((any::<bool>(), 0u32..12, 0u32..10, any::<u64>()), 400)) {
        let space = IovaSpace::new(40).unwrap();
        let mut held: Vec<IovaRange> = Vec::new();
        for (take, len, order, pick) in ops {
            if take || held.is_empty() {
                let len = 1 + pick % (1 << len);
                held.push(space.alloc(len * G, G << order, None).unwrap());
            } else {
                let r = held.swap_remove(below(pick, held.len()));
                prop_assert!(!space.space.lock().needs_memory_to_free(extent_of(r)));
                prop_assert_eq!(space.free(r), Ok(()));
            }
        }
        for r in held {
            prop_assert!(!space.space.lock().needs_memory_to_free(extent_of(r)));
            prop_assert_eq!(space.free(r), Ok(()));
        }
        space.space.lock().check();
        prop_assert_eq!(space.stats().free, 2);
    }
}
