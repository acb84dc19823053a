//! Against a list of what is out, and a count of what is where.

use super::*;
use proptest::prelude::*;
use proptest::sample::Index;
use world::{Thing, World};

mod count;
mod world;

/// How much memory there is.
const HEAP: usize = 16 << 20;

/// How a page or a fragment comes back.
#[derive(Clone, Copy, Debug)]
enum Way {
    Consumer,
    Remote,
}

#[derive(Clone, Debug)]
enum Step {
    Alloc(u8),
    AllocRaw(u8),
    Fragment(usize),
    Free(Index, Way),
    Fill(usize, bool),
    /// How many of the pages at once, by a `Remote`.
    FreeMany(usize, bool),
    DoubleFree(Index, Way),
    Crooked(Index, isize, Way),
    Tag(Index, u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = || any::<Index>();
    let way = || prop_oneof![Just(Way::Consumer), Just(Way::Remote)];
    let step = prop_oneof![
        6 => (0u8..3).prop_map(Step::Alloc),
        4 => (0u8..3).prop_map(Step::AllocRaw),
        4 => (1usize..3000).prop_map(Step::Fragment),
        10 => (index(), way()).prop_map(|(at, way)| Step::Free(at, way)),
        2 => (1usize..200, any::<bool>()).prop_map(|(n, raw)| Step::Fill(n, raw)),
        2 => (1usize..200, any::<bool>()).prop_map(|(n, raw)| Step::FreeMany(n, raw)),
        1 => (index(), way()).prop_map(|(at, way)| Step::DoubleFree(at, way)),
        1 => (index(), -9000isize..9000, way()).prop_map(|(at, by, way)| Step::Crooked(at, by, way)),
        1 => (index(), 0u8..3).prop_map(|(at, tag)| Step::Tag(at, tag)),
    ];
    prop::collection::vec((step, 1usize..60), 50)
        .prop_map(|runs| runs.into_iter().flat_map(|(step, n)| std::iter::repeat_n(step, n)).collect())
}

fn told(holders: Vec<Holder>) -> BTreeMap<Option<String>, u64> {
    holders.into_iter().map(|holder| (holder.name, holder.pages)).collect()
}

proptest! {
    // About 1,500 steps per case.
    #![proptest_config(ProptestConfig { cases: 80, max_shrink_iters: 500, ..ProptestConfig::default() })]
    #[test]
    fn agrees_with_a_list_of_what_is_out(
        steps in steps(), order in 0u8..3, ring in 0u32..10, keep in any::<bool>(), destroy in any::<bool>(),
    ) {
        let heap = Heap::new(HEAP);
        let mut world = World::new(&heap, Order::new(order).unwrap(), 1 << ring);
        for (number, step) in steps.into_iter().enumerate() {
            world.step(step)?;
            if number % 16 == 0 {
                world.check()?;
            }
        }
        world.check()?;
        while !keep && !world.out.is_empty() {
            world.take_back(0, Way::Remote)?;
        }
        if let Some(open) = world.open.take() {
            // The end of the pool: nothing more is cut of it.
            let cut = world.out.iter().any(|thing| {
                matches!(thing, Thing::Fragment(fragment) if world.start_of(fragment.iova()) == open)
            });
            if !cut {
                world.pages.remove(&open);
            }
        }
        let expected = world.holders();
        let held: u64 = expected.values().sum();
        let World { pool, remote, out, .. } = world;
        let end = if destroy { pool.destroy() } else { pool.close() };
        prop_assert_eq!(told(end.holders()), expected);
        prop_assert_eq!(end.pages_out(), held);
        prop_assert_eq!(heap.count(if destroy { Use::Mapping } else { Use::Hidden }), 0);
        // What is freed late is released; a second free of it is an error.
        for thing in out {
            if let Thing::Raw(page, _) = thing {
                prop_assert_eq!(remote.free_raw(page), Ok(()));
                prop_assert!(remote.free_raw(page).is_err());
            }
        }
        prop_assert_eq!((end.pages_out(), end.counts().released_refcnt), (0, held));
        prop_assert_eq!(heap.count(Use::Free), HEAP / 4096);
        drop((end, remote));
        prop_assert_eq!(heap.handles(), 1, "what was shared is gone");
    }
}
