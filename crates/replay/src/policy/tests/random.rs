//! Random maps and unmaps, on one thread and on several.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
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
