//! A domain beside a model of it, and beside other threads.

use super::*;
use crate::share::Shared;
use crate::sync::Mutex;
use crate::testing::Random;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Map(usize),
    Revoke(usize),
    RevokeAll,
    Unmap(usize),
    Poll(usize),
    DropMapped(usize),
    Complete,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1usize..10).prop_map(Step::Map),
        2 => any::<usize>().prop_map(Step::Revoke),
        1 => Just(Step::RevokeAll),
        1 => any::<usize>().prop_map(Step::Unmap),
        3 => any::<usize>().prop_map(Step::Poll),
        1 => any::<usize>().prop_map(Step::DropMapped),
        2 => Just(Step::Complete),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn a_domain_agrees_with_lists_of_what_is_mapped_and_held(steps in steps()) {
        let (mock, domain, drops) = domain();
        set(&mock.obliging);
        let empty = domain.space.iovas.stats();
        let (mut mapped, mut revoked) = (Vec::new(), Vec::new());
        let mut made = 0usize;
        for step in steps {
            match step {
                Step::Map(pages) => match domain.map(Buf::new(pages, &drops), Bidirectional) {
                    Ok(one) => { made += 1; prop_assert!(pages <= 8); mapped.push(one); }
                    Err(refused) => { made += 1; prop_assert!(pages > 8 && refused.payload.is_some()); }
                },
                Step::Revoke(i) if !mapped.is_empty() => {
                    revoked.push(mapped.swap_remove(i % mapped.len()).revoke());
                }
                Step::RevokeAll => domain.revoke_many(mapped.drain(..), &mut revoked),
                Step::Unmap(i) if !mapped.is_empty() => {
                    prop_assert!(mapped.swap_remove(i % mapped.len()).unmap().is_ok());
                }
                Step::Poll(i) if !revoked.is_empty() => {
                    let one = revoked.swap_remove(i % revoked.len());
                    let done = mock.done.load(Ordering::SeqCst) >= one.ticket().0;
                    match one.poll() {
                        Ok(_) => prop_assert!(done),
                        Err(held) => { prop_assert!(!done); revoked.push(held); }
                    }
                }
                Step::DropMapped(i) if !mapped.is_empty() => drop(mapped.swap_remove(i % mapped.len())),
                Step::Complete => { mock.done.store(mock.last.load(Ordering::SeqCst), Ordering::SeqCst); }
                _ => {}
            }
            // The table contains exactly the mappings of the model ...
            let table: Vec<u64> = mock.pages.lock().keys().copied().collect();
            let mut model: Vec<u64> = mapped.iter().flat_map(|m| numbers(m.iova())).collect();
            model.sort_unstable();
            prop_assert_eq!(table, model);
            // ... no address is given out twice while it is mapped or held ...
            let ranges = mapped.iter().map(Mapping::iova).chain(revoked.iter().map(Revoked::iova));
            let mut pages: Vec<u64> = ranges.flat_map(numbers).collect();
            let held = pages.len();
            pages.sort_unstable();
            pages.dedup();
            prop_assert_eq!(pages.len(), held);
            prop_assert_eq!(domain.space.iovas.stats().bytes_in_use, held as u64 * 4096);
            // ... and no buffer is lost.
            prop_assert_eq!(drops.load(Ordering::SeqCst), made - mapped.len() - revoked.len());
            prop_assert_eq!(domain.stats().live, mapped.len() as u64);
        }
        drop((mapped, revoked));
        prop_assert_eq!(drops.load(Ordering::SeqCst), made);
        prop_assert_eq!(domain.space.iovas.stats(), empty);
    }
}

#[test]
fn stress_mappings_wander_between_owners_that_come_and_go() {
    const THREADS: usize = 4;
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let empty = domain.space.iovas.stats();
    let domain = Shared::new(domain);
    let rounds = if cfg!(miri) { 20 } else { 600 };
    let hands: [Mutex<Vec<Revoked<Buf>>>; THREADS] = Default::default();
    let made = AtomicUsize::new(0);
    crate::testing::scope(|scope| {
        for me in 0..THREADS {
            let (domain, hands, drops, made) = (&domain, &hands, &drops, &made);
            scope.spawn(move || {
                let mut local = domain.local();
                let mut random = Random::new(me as u64 + 1);
                for round in 0..rounds {
                    let sizes: Vec<usize> =
                        (0..1 + random.below(8)).map(|_| 1 + random.below(3)).collect();
                    made.fetch_add(sizes.len(), Ordering::Relaxed);
                    let buffers = sizes.into_iter().map(|pages| Buf::new(pages, drops));
                    let mut mappings = local.map_many(buffers, Bidirectional).unwrap();
                    drop(mappings.pop().filter(|_| round % 3 == 0));
                    let mut revoked = Vec::new();
                    local.revoke_many(mappings, &mut revoked);
                    let to = random.below(THREADS);
                    hands[to].lock().extend(revoked);
                    let mine = std::mem::take(&mut *hands[me].lock());
                    for (i, one) in mine.into_iter().enumerate() {
                        match i % 3 {
                            0 => drop(local.wait(one).unwrap()),
                            1 => drop(one.wait().unwrap()),
                            _ => drop(one),
                        }
                    }
                    if round % 100 == 99 {
                        local = domain.local();
                    }
                }
            });
        }
    });
    drop(hands);
    let stats = domain.stats();
    assert_eq!((stats.live, stats.held_bytes, stats.windows, stats.owners), (0, 0, 0, 0));
    assert_eq!((stats.quarantined, stats.maps), (0, made.load(Ordering::Relaxed) as u64));
    assert_eq!(drops.load(Ordering::SeqCst), made.load(Ordering::Relaxed));
    assert_eq!(domain.space.iovas.stats(), empty);
}
