//! The arithmetic of a ring against a model, and its ordering under the model checker, with the
//! kernel's side played by the same code.

use super::ring::{Consumer, Producer, Shared};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;

macro_rules! memory {
    ($name:ident, $($atomics:tt)*) => {
        /// A ring in the memory of the process.
        struct $name {
            producer: $($atomics)*::AtomicU32,
            consumer: $($atomics)*::AtomicU32,
            words: Vec<$($atomics)*::AtomicU64>,
        }

        impl $name {
            fn new(words: usize, start: u32) -> Arc<Self> {
                let index = || $($atomics)*::AtomicU32::new(start);
                let words = (0..words).map(|_| $($atomics)*::AtomicU64::new(u64::MAX)).collect();
                Arc::new(Self { producer: index(), consumer: index(), words })
            }
        }

        impl Shared for Arc<$name> {
            fn load_producer(&self) -> u32 {
                self.producer.load($($atomics)*::Ordering::Acquire)
            }
            fn store_producer(&self, index: u32) {
                self.producer.store(index, $($atomics)*::Ordering::Release);
            }
            fn load_consumer(&self) -> u32 {
                self.consumer.load($($atomics)*::Ordering::Acquire)
            }
            fn store_consumer(&self, index: u32) {
                self.consumer.store(index, $($atomics)*::Ordering::Release);
            }
            fn word(&self, at: usize) -> u64 {
                self.words[at].load($($atomics)*::Ordering::Relaxed)
            }
            fn set_word(&self, at: usize, word: u64) {
                self.words[at].store(word, $($atomics)*::Ordering::Relaxed);
            }
            fn words(&self) -> usize {
                self.words.len()
            }
        }
    };
}

memory!(Plain, std::sync::atomic);
#[cfg(ring_model)]
memory!(Modelled, loom::sync::atomic);

#[derive(Clone, Copy, Debug)]
enum Step {
    Push,
    Publish,
    Pop,
    Release,
    Room(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => Just(Step::Push),
        2 => Just(Step::Publish),
        4 => Just(Step::Pop),
        2 => Just(Step::Release),
        1 => (0u32..10).prop_map(Step::Room),
    ];
    proptest::collection::vec(step, 0..400)
}

proptest! {
    /// Every entry arrives once and in order, none is overwritten, and both sides see what the
    /// other has published.
    #[test]
    fn a_ring_is_a_bounded_queue(steps in steps(), log in 0u32..4, start in any::<u32>()) {
        let entries = 1u32 << log;
        let memory = Plain::new(2 * entries as usize, start);
        let mut producer = Producer::<_, 2>::new(memory.clone());
        let mut consumer = Consumer::<_, 2>::new(memory);
        // The entries that were pushed and are not published, those published and not taken, and
        // those taken and not released.
        let (mut pending, mut published, mut taken) = (VecDeque::new(), VecDeque::new(), 0);
        let mut next = 0u64;
        for step in steps {
            let used = pending.len() + published.len() + taken;
            match step {
                Step::Push => {
                    let fits = used < entries as usize;
                    prop_assert_eq!(producer.push([next, !next]), fits);
                    if fits {
                        pending.push_back(next);
                        next += 1;
                    }
                }
                Step::Publish => {
                    prop_assert_eq!(producer.publish() as usize, pending.len());
                    published.append(&mut pending);
                }
                Step::Pop => {
                    let expected = published.pop_front();
                    taken += usize::from(expected.is_some());
                    prop_assert_eq!(consumer.pop(), expected.map(|n| [n, !n]));
                }
                Step::Release => {
                    consumer.release();
                    taken = 0;
                }
                Step::Room(wanted) => {
                    let room = producer.room(wanted) as usize;
                    let free = entries as usize - used;
                    // The known count may be old, but is never above the entries present, nor below
                    // those wanted and present.
                    prop_assert!(room <= free && room >= free.min(wanted as usize), "{} of {}", room, free);
                }
            }
        }
    }
}

/// A ring of two entries, with the words written relaxed: the consumer sees each entry whole, once
/// and in order, and the producer reuses a place only after it was read.
#[cfg(ring_model)]
#[test]
fn loom_entries_are_ordered_by_the_indices_alone() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        // The indices wrap on the way.
        let memory = Modelled::new(4, u32::MAX);
        let mut producer = Producer::<_, 2>::new(memory.clone());
        let mut consumer = Consumer::<_, 2>::new(memory);
        let kernel = loom::thread::spawn(move || {
            for n in 1..=3u64 {
                while !producer.push([n, n << 32]) {
                    loom::thread::yield_now();
                }
                producer.publish();
            }
        });
        let mut expected = 1;
        while expected <= 3 {
            match consumer.pop() {
                Some(entry) => {
                    assert_eq!(entry, [expected, expected << 32]);
                    consumer.release();
                    expected += 1;
                }
                None => loom::thread::yield_now(),
            }
        }
        kernel.join().unwrap();
    });
}

/// The same, with real threads and batches.
#[test]
fn stress_a_ring_between_two_threads() {
    const ENTRIES: u64 = 200_000;
    let memory = Plain::new(64, u32::MAX - 1000);
    let mut producer = Producer::<_, 1>::new(memory.clone());
    let mut consumer = Consumer::<_, 1>::new(memory);
    let kernel = std::thread::spawn(move || {
        let mut next = 0;
        while next < ENTRIES {
            let room = u64::from(producer.room(16)).min(ENTRIES - next);
            for _ in 0..room {
                assert!(producer.push([next]));
                next += 1;
            }
            producer.publish();
            std::thread::yield_now();
        }
    });
    let mut expected = 0;
    while expected < ENTRIES {
        while let Some([n]) = consumer.pop() {
            assert_eq!(n, expected);
            expected += 1;
        }
        consumer.release();
        std::thread::yield_now();
    }
    kernel.join().unwrap();
}
