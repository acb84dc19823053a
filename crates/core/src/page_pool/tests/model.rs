//! The pool against a list of the pages in use, and expected counters. `harness` runs each step on
//! both.

use super::*;
use harness::{Harness, Held};
use proptest::prelude::*;
use proptest::sample::Index;

mod expected;
mod harness;

/// The size of the heap in bytes.
const HEAP: usize = 16 << 20;

/// Through which handle a page or a fragment is freed.
#[derive(Clone, Copy, Debug)]
enum FreeBy {
    Consumer,
    Remote,
}

#[derive(Clone, Debug)]
enum Step {
    Alloc(u8),
    AllocRaw(u8),
    Fragment(usize),
    Free(Index, FreeBy),
    Fill(usize, bool),
    /// Frees so many pages, raw or not, at once through a `Remote`.
    FreeMany(usize, bool),
    DoubleFree(Index, FreeBy),
    WrongFree(Index, isize, FreeBy),
    Tag(Index, u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = || any::<Index>();
    let by = || prop_oneof![Just(FreeBy::Consumer), Just(FreeBy::Remote)];
    let step = prop_oneof![
        6 => (0u8..3).prop_map(Step::Alloc),
        4 => (0u8..3).prop_map(Step::AllocRaw),
        4 => (1usize..3000).prop_map(Step::Fragment),
        10 => (index(), by()).prop_map(|(at, by)| Step::Free(at, by)),
        2 => (1usize..200, any::<bool>()).prop_map(|(n, raw)| Step::Fill(n, raw)),
        2 => (1usize..200, any::<bool>()).prop_map(|(n, raw)| Step::FreeMany(n, raw)),
        1 => (index(), by()).prop_map(|(at, by)| Step::DoubleFree(at, by)),
        1 => (index(), -9000isize..9000, by()).prop_map(|(at, offset, by)| Step::WrongFree(at, offset, by)),
        1 => (index(), 0u8..3).prop_map(|(at, tag)| Step::Tag(at, tag)),
    ];
    prop::collection::vec((step, 1usize..60), 50).prop_map(|runs| {
        runs.into_iter().flat_map(|(step, n)| std::iter::repeat_n(step, n)).collect()
    })
}

fn by_name(holders: Vec<Holder>) -> BTreeMap<Option<String>, u64> {
    holders.into_iter().map(|holder| (holder.name, holder.pages)).collect()
}

proptest! {
    // About 1,500 steps per case.
    #![proptest_config(ProptestConfig { cases: crate::testing::cases(80), max_shrink_iters: 500, ..ProptestConfig::default() })]
    #[test]
    fn agrees_with_a_list_of_pages_in_use(
        steps in steps(), order in 0u8..3, ring in 0u32..10, keep in any::<bool>(), destroy in any::<bool>(),
        limit in prop_oneof![Just(u64::MAX), 1u64..900],
    ) {
        let heap = Heap::new(HEAP);
        let mut harness = Harness::new(&heap, Order::new(order).unwrap(), 1 << ring, limit);
        for (number, step) in steps.into_iter().enumerate() {
            harness.step(step)?;
            if number % 16 == 0 {
                harness.check()?;
            }
        }
        harness.check()?;
        while !keep && !harness.in_use.is_empty() {
            harness.free_at(0, FreeBy::Remote)?;
        }
        if let Some(open) = harness.open.take() {
            // Taking the pool down closes the open page.
            let cut = harness.in_use.iter().any(|held| {
                matches!(held, Held::Fragment(fragment) if harness.start_of(fragment.iova()) == open)
            });
            if !cut {
                harness.pages.remove(&open);
            }
        }
        let expected = harness.holders();
        let held: u64 = expected.values().sum();
        let Harness { pool, remote, in_use, .. } = harness;
        let end = if destroy { pool.destroy() } else { pool.close() };
        prop_assert_eq!(by_name(end.holders()), expected);
        prop_assert_eq!(end.pages_out(), held);
        prop_assert_eq!(heap.count(if destroy { Use::Mapped } else { Use::Hidden }), 0);
        // Pages freed late are released; a second free is an error.
        for held in in_use {
            if let Held::Raw(page, _) = held {
                prop_assert_eq!(remote.free_raw(page), Ok(()));
                prop_assert!(remote.free_raw(page).is_err());
            }
        }
        prop_assert_eq!((end.pages_out(), end.counts().released_refcnt), (0, held));
        prop_assert_eq!(heap.count(Use::Free), HEAP / 4096);
        drop((end, remote));
        prop_assert_eq!(heap.handles(), 1, "the shared state is freed");
    }
}
