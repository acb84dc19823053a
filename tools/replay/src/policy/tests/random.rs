//! Random maps and unmaps, on one thread and on several.

use super::*;
use crate::policy::locked::Tree;
use crate::policy::magazines::Magazines;
use crate::policy::static_maps;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

/// The live mappings by their first address: two that overlap are a failure.
#[derive(Default)]
struct Live(BTreeMap<u64, u64>);

impl Live {
    fn add(&mut self, dma: &Dma) {
        let (start, end) = (dma.iova().start().raw(), dma.iova().end().raw());
        let below = self.0.range(..end).next_back();
        assert!(
            below.is_none_or(|(_, other)| *other <= start),
            "{} overlaps a live mapping",
            dma.iova()
        );
        self.0.insert(start, end);
    }

    fn remove(&mut self, dma: &Dma) {
        assert_eq!(self.0.remove(&dma.iova().start().raw()), Some(dma.iova().end().raw()));
    }
}

/// The operations of one thread in its part of the memory: no two mappings of the same memory, so
/// that addresses are unique under `identity` too.
fn run(
    policy: &dyn Policy,
    memory: &Memory,
    pages: std::ops::Range<u64>,
    steps: &[(bool, u64, u8)],
    live: &Mutex<Live>,
) {
    let (port, mut thread) = (policy.port(), policy.thread());
    let (mut free, mut mapped, mut freed): (Vec<u64>, Vec<Dma>, Vec<PhysRange>) =
        (pages.step_by(8).collect(), Vec::new(), Vec::new());
    let all = free.len();
    for (map, pages, pick) in steps {
        if *map && let Some(first) = free.pop() {
            let range = memory.range(first * 4096, pages * 4096).unwrap();
            let dma = thread.map(range, Access::WRITE).unwrap();
            live.lock().unwrap().add(&dma);
            assert_eq!(dma.iova().len(), range.len());
            assert!(
                reaches(&port, dma.iova().start())
                    && reaches(&port, Iova::new(dma.iova().end().raw() - 8))
            );
            mapped.push(dma);
        } else if !mapped.is_empty() {
            let dma = mapped.swap_remove(usize::from(*pick) % mapped.len());
            live.lock().unwrap().remove(&dma);
            thread.unmap(dma, &mut freed).unwrap();
        }
        let offset = |range: &PhysRange| range.start().raw() - memory.whole().start().raw();
        free.extend(freed.drain(..).map(|range| offset(&range) / 4096));
    }
    for dma in mapped.drain(..) {
        live.lock().unwrap().remove(&dma);
        thread.unmap(dma, &mut freed).unwrap();
    }
    thread.settle(&mut freed).unwrap();
    assert_eq!(free.len() + freed.len(), all, "memory was lost or freed twice");
}

fn steps(count: usize) -> impl Strategy<Value = Vec<(bool, u64, u8)>> {
    proptest::collection::vec((any::<bool>(), 1u64..=8, any::<u8>()), count)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3, ..ProptestConfig::default() })]

    #[test]
    fn no_two_live_mappings_overlap_and_all_memory_returns(steps in steps(300)) {
        for kind in PolicyKind::ALL {
            let memory = memory();
            let policy = create(kind, &memory);
            run(&*policy, &memory, 0..1024, &steps, &Mutex::default());
        }
    }
}

#[test]
fn stress_threads_share_a_policy() {
    for kind in PolicyKind::ALL {
        let memory = memory();
        let policy = create(kind, &memory);
        let live = Mutex::default();
        std::thread::scope(|scope| {
            for part in 0..4u64 {
                let (policy, memory, live) = (&policy, &memory, &live);
                scope.spawn(move || {
                    let mut random = pinfold::soft::Random::new(part + 1);
                    let steps: Vec<_> = (0..300)
                        .map(|_| {
                            (
                                random.below(2) == 0,
                                1 + random.below(8),
                                u8::try_from(random.below(256)).unwrap(),
                            )
                        })
                        .collect();
                    run(&**policy, memory, part * 256..(part + 1) * 256, &steps, live);
                });
            }
        });
        assert!(live.lock().unwrap().0.is_empty(), "{}", kind.name());
    }
}

proptest! {
    #[test]
    fn a_tree_never_allocates_a_page_twice(
        merges: bool,
        steps in proptest::collection::vec((0u8..5, 1u64..40, any::<u8>()), 1..100),
    ) {
        let (mut tree, mut used, mut live) = (Tree::new(merges), BTreeSet::new(), Vec::new());
        for (what, pages, pick) in steps {
            if what < 3 || live.is_empty() {
                let first = tree.alloc(pages).unwrap();
                prop_assert!(first > 0 && first + pages <= 1 << 20, "below 4 GiB while there is space");
                prop_assert_eq!(first % pages.next_power_of_two(), 0);
                for page in first..first + pages {
                    prop_assert!(used.insert(page), "page {:#x} is allocated twice", page);
                }
                live.push((first, pages));
            } else {
                let (first, pages) = live.swap_remove(usize::from(pick) % live.len());
                prop_assert!(tree.free(first, pages));
                used.retain(|page| !(first..first + pages).contains(page));
                prop_assert!(!tree.free(first, pages), "freed twice");
            }
            let runs = used.iter().filter(|page| !used.contains(&(**page + 1))).count();
            prop_assert_eq!(tree.entries(), if merges { runs } else { live.len() });
        }
    }
}

#[test]
fn a_tree_is_exhausted_and_recovers() {
    let mut tree = Tree::new(false);
    // 2^20 pages less the first: 15 ranges of 2^16 pages, and then every smaller power of two.
    let low: Vec<u64> = std::iter::from_fn(|| tree.alloc_low(1 << 16)).collect();
    assert_eq!((low.len(), tree.alloc_low(1 << 16)), (15, None));
    assert!(tree.alloc(1 << 16).unwrap() >= 1 << 20, "above 4 GiB where there is no space below");
    assert!(tree.free(low[7], 1 << 16));
    assert_eq!(tree.alloc_low(1 << 16), Some(low[7]), "the search starts at the top again");
    assert_eq!(
        (0..16).rev().map(|order| tree.alloc_low(1 << order).is_some()).filter(|got| *got).count(),
        16
    );
    assert_eq!((tree.alloc_low(1), Tree::new(true).alloc(1 << 37)), (None, None));
}

#[test]
fn a_tree_gives_up_low_addresses_at_the_first_refusal() {
    for gives_up in [false, true] {
        let tree = Tree::new(false);
        let mut tree = if gives_up { tree.giving_up_low() } else { tree };
        let low = tree.alloc(1 << 19).unwrap();
        assert!(low < 1 << 20 && tree.alloc(1 << 19).unwrap() >= 1 << 20);
        assert!(tree.free(low, 1 << 19));
        assert_eq!(tree.alloc(1).unwrap() >= 1 << 20, gives_up);
    }
}

/// The observation of 2015: merged, the mappings that drivers keep are a handful of entries.
#[test]
fn static_mappings_are_a_handful_of_entries_when_merged() {
    let entries = |merges| {
        let mut tree = Tree::new(merges);
        assert!(static_maps(50_000).all(|pages| tree.alloc(pages).is_some()));
        tree.entries()
    };
    assert_eq!(entries(false), 50_000);
    assert!((2..=10).contains(&entries(true)), "{} entries", entries(true));
}

#[test]
fn magazines_cache_and_return_all() {
    let addresses = Magazines::new();
    let mut live = BTreeSet::new();
    // More than the two magazines of a CPU and the depot hold.
    let count = 127 * 40;
    for pages in [1u64, 3, 32, 33] {
        for _ in 0..count {
            let first = addresses.alloc(pages).unwrap();
            assert!(live.insert((first, pages)));
        }
    }
    let ranges: Vec<_> = live.iter().map(|(first, pages)| (*first, first + pages)).collect();
    assert!(ranges.windows(2).all(|two| two[0].1 <= two[1].0), "two ranges overlap");
    for (first, pages) in std::mem::take(&mut live) {
        assert!(addresses.free(first, pages));
    }
    let cached = addresses.entries();
    assert!(
        cached > 127 * 30 && cached < 3 * count,
        "{cached} addresses are cached, none of them of 33 pages"
    );
    let again: BTreeSet<u64> = (0..count).map(|_| addresses.alloc(2).unwrap()).collect();
    assert_eq!(again.len(), count);
    for first in again {
        assert!(addresses.free(first, 2));
    }
    addresses.purge();
    assert_eq!(addresses.entries(), 0);
}
