#[cfg(not(loom))]
mod plain {
    use super::super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn a_magazine_is_a_stack_with_an_end() {
        let mut magazine = Magazine::<u32, 2>::new();
        assert_eq!((magazine.pop(), magazine.len(), magazine.room()), (None, 0, 4));
        for item in 1..=4 {
            assert_eq!(magazine.push(item), Ok(()));
        }
        assert_eq!(magazine.push(5), Err(5));
        assert_eq!((magazine.len(), magazine.room()), (4, 0));
        assert_eq!((magazine.pop(), magazine.pop()), (Some(4), Some(3)));
        assert_eq!(magazine.push_slice(&[6, 7, 8]), 2);
        assert_eq!(magazine.pop_slice(3), [2, 6, 7]);
        assert_eq!(magazine.pop_slice(3), [1]);
        assert!(magazine.is_empty());
    }

    #[test]
    fn half_a_magazine_is_exchanged() {
        let depot = Depot::<u32, 2>::new(1);
        let mut magazine = Magazine::new();
        assert_eq!(magazine.push_slice(&[1]), 1);
        assert!(!depot.put(&mut magazine), "less than half is not taken");
        assert_eq!(magazine.push_slice(&[2, 3]), 2);
        assert!(depot.put(&mut magazine));
        assert_eq!(magazine.len(), 1);
        assert_eq!(magazine.push_slice(&[4, 5]), 2);
        assert!(!depot.put(&mut magazine), "there is one shelf, and it is full");
        assert_eq!(magazine.len(), 3);
        assert!(!depot.take(&mut magazine), "there is room for one only");
        assert_eq!(magazine.pop_slice(3), [1, 4, 5]);
        assert!(depot.take(&mut magazine));
        assert!(!depot.take(&mut magazine), "nothing is left");
        assert_eq!(magazine.pop_slice(4), [2, 3]);
    }

    #[test]
    fn a_depot_without_shelves_takes_nothing() {
        let depot = Depot::<u32, 1>::new(0);
        let mut magazine = Magazine::new();
        assert_eq!(magazine.push(1), Ok(()));
        assert!(!depot.put(&mut magazine) && !depot.take(&mut magazine));
        assert_eq!(magazine.pop(), Some(1));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        /// Two magazines over one depot against two vectors over a stack of pairs.
        #[test]
        fn magazines_agree_with_vectors(steps in prop::collection::vec((0..2usize, 0..4u8), 400)) {
            let depot = Depot::<u32, 2>::new(3);
            let mut magazines = [Magazine::<u32, 2>::new(), Magazine::new()];
            let (mut model, mut shelves) = ([Vec::<u32>::new(), Vec::new()], VecDeque::<[u32; 2]>::new());
            for (item, (owner, verb)) in steps.into_iter().enumerate() {
                let (magazine, model) = (&mut magazines[owner], &mut model[owner]);
                let item = u32::try_from(item).unwrap();
                match verb {
                    0 => {
                        let fits = model.len() < 4;
                        prop_assert_eq!(magazine.push(item), if fits { Ok(()) } else { Err(item) });
                        if fits { model.push(item) }
                    }
                    1 => prop_assert_eq!(magazine.pop(), model.pop()),
                    2 => {
                        let fits = model.len() >= 2 && shelves.len() < 3;
                        prop_assert_eq!(depot.put(magazine), fits);
                        if fits {
                            let (b, a) = (model.pop().unwrap(), model.pop().unwrap());
                            shelves.push_back([a, b]);
                        }
                    }
                    _ => {
                        let fits = model.len() <= 2 && !shelves.is_empty();
                        prop_assert_eq!(depot.take(magazine), fits);
                        if fits { model.extend(shelves.pop_back().unwrap()) }
                    }
                }
                prop_assert_eq!(magazine.len(), model.len());
            }
        }
    }

    #[test]
    fn stress_no_item_is_lost_or_doubled() {
        const OWNERS: u32 = 8;
        const EACH: u32 = 64;
        let depot = Depot::<u32, 8>::new(40);
        let mut items: Vec<u32> = std::thread::scope(|scope| {
            let owners: Vec<_> = (0..OWNERS)
                .map(|owner| {
                    let depot = &depot;
                    scope.spawn(move || churn(depot, owner * EACH..(owner + 1) * EACH))
                })
                .collect();
            owners.into_iter().flat_map(|owner| owner.join().unwrap()).collect()
        });
        let mut magazine = Magazine::new();
        while depot.take(&mut magazine) {
            items.extend(magazine.pop_slice(8));
        }
        items.sort_unstable();
        assert_eq!(items, (0..OWNERS * EACH).collect::<Vec<_>>());
    }

    /// Puts the items in and exchanges as chance has it; returns what the owner has at the end.
    fn churn(depot: &Depot<u32, 8>, mine: std::ops::Range<u32>) -> Vec<u32> {
        let mut random = crate::testing::Random::new(u64::from(mine.start) + 1);
        let mut magazine = Magazine::new();
        let mut aside: Vec<u32> = mine.collect();
        for _ in 0..20_000 {
            match random.below(4) {
                0 => _ = depot.put(&mut magazine),
                1 => _ = depot.take(&mut magazine),
                2 => aside.extend(magazine.pop()),
                _ => {
                    if let Some(Err(item)) = aside.pop().map(|item| magazine.push(item)) {
                        aside.push(item);
                    }
                }
            }
        }
        aside.extend(magazine.pop_slice(16));
        aside
    }
}

#[cfg(loom)]
mod loom_models {
    use super::super::*;
    use loom::sync::Arc;
    use loom::thread;

    type Small = Depot<u32, 1>;

    fn model(check: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(check);
    }

    fn drain(depot: &Small, items: &mut Vec<u32>) {
        let mut magazine = Magazine::new();
        while depot.take(&mut magazine) {
            items.extend(magazine.pop());
        }
    }

    /// Each owner pushes an item and pops one; no item is lost or duplicated, whichever owner pops it.
    #[test]
    fn loom_two_owners_exchange() {
        model(|| {
            let depot = Arc::new(Small::new(2));
            let owner = |depot: Arc<Small>, item: u32| {
                move || {
                    let mut magazine = Magazine::<u32, 1>::new();
                    magazine.push(item).unwrap();
                    depot.put(&mut magazine);
                    depot.take(&mut magazine);
                    magazine.pop_slice(2).to_vec()
                }
            };
            let other = thread::spawn(owner(depot.clone(), 1));
            let mut items = owner(depot.clone(), 2)();
            items.extend(other.join().unwrap());
            drain(&depot, &mut items);
            items.sort_unstable();
            assert_eq!(items, [1, 2]);
        });
    }

    /// ABA: one owner is about to pop the top shelf while the other pops two and pushes the first one back. With
    /// a head that held the shelf's number alone the first would now put a shelf on top that is not there.
    #[test]
    fn loom_a_head_that_came_back_is_another_head() {
        model(|| {
            let depot = Arc::new(Small::new(2));
            let mut magazine = Magazine::<u32, 1>::new();
            for item in [1, 2] {
                magazine.push(item).unwrap();
                assert!(depot.put(&mut magazine));
            }
            let other = thread::spawn({
                let depot = depot.clone();
                move || {
                    let mut magazine = Magazine::<u32, 1>::new();
                    depot.take(&mut magazine);
                    magazine.pop_slice(2).to_vec()
                }
            });
            depot.take(&mut magazine);
            depot.take(&mut magazine);
            depot.put(&mut magazine);
            let mut items = magazine.pop_slice(2).to_vec();
            items.extend(other.join().unwrap());
            drain(&depot, &mut items);
            items.sort_unstable();
            assert_eq!(items, [1, 2]);
        });
    }
}
