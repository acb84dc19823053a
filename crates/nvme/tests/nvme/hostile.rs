//! Random garbage in the completion queue: nothing the device writes is trusted.

use crate::common::*;
use pinfold_nvme::driver::{CommandError, Config, Outcome};
use pinfold_nvme_model::{Fault, ModelConfig, Trigger};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// An entry as a hostile device may write it: garbage, or nearly right.
fn entry() -> impl Strategy<Value = [u8; 16]> {
    let near = (0u16..70, 0u16..4, 0u16..80, 0u16..3, any::<u16>()).prop_map(
        |(place, generation, head, sq, status)| {
            let mut bytes = [0; 16];
            bytes[8..10].copy_from_slice(&head.to_le_bytes());
            bytes[10..12].copy_from_slice(&sq.to_le_bytes());
            bytes[12..14].copy_from_slice(&(generation << 6 | place).to_le_bytes());
            bytes[14..].copy_from_slice(&(status | 1).to_le_bytes());
            bytes
        },
    );
    prop_oneof![any::<[u8; 16]>(), near]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn garbage_in_the_completion_queue_is_counted_and_loses_nothing(
        entries in proptest::collection::vec(entry(), 1..64),
        requests in 1usize..12,
        blocks in 1u32..200,
    ) {
        let clock = TestClock::default();
        let config = Config {
            timeout: Duration::from_secs(1), abort_timeout: Duration::ZERO,
            clock: Arc::new(clock.clone()),
            max_transfer_bytes: 32 << 10,
            ..Config::default()
        };
        let bench = bench(2048, ModelConfig::new(namespaces(1 << 20)), config);
        let before = bench.arena.0.used();
        let mut queue = bench.controller.create_queue(16).unwrap();
        prop_assert_eq!(bench.arena.0.used(), before + 2);
        // The two rings are a frame each, and the newest.
        let ring = bench.arena.0.whole().part((before + 1) * 4096, 4096).unwrap();
        bench.model.faults().inject(Trigger::Every(1), Fault::NeverComplete);
        let mut flying: Vec<_> = (0..requests)
            .map(|_| queue.write(1, 0, blocks, Buffer::new(&bench.arena, blocks as usize * 512)).unwrap())
            .collect();
        queue.ring_doorbell();
        for (i, entry) in entries.iter().enumerate() {
            ring.copy_from_slice(i * 16, entry).unwrap();
        }
        let mut held = Vec::new();
        let mut seen = 0;
        for round in 0..400 {
            if round == 200 {
                clock.advance(2_000_000_000);
            }
            if round == 300 {
                bench.controller.reset().unwrap();
            }
            let Some(completion) = queue.poll().unwrap() else { continue };
            seen += 1;
            let at = flying.iter().position(|f| f.tag() == completion.tag()).unwrap();
            match flying.swap_remove(at).finish(completion) {
                Outcome::Completed { result, .. } => prop_assert_ne!(result, Err(CommandError::NotSent)),
                Outcome::TimedOut(quarantined) => held.push(quarantined),
                Outcome::Foreign(..) => prop_assert!(false, "a request was reported twice"),
            }
        }
        prop_assert_eq!(seen, requests);
        prop_assert!(flying.is_empty());
        for quarantined in held {
            prop_assert!(quarantined.recover().is_ok());
        }
        let stats = queue.stats();
        prop_assert!(stats.completions + stats.late_completions <= stats.commands);
        drop(queue);
        let stats = bench.controller.stats();
        prop_assert_eq!((stats.quarantined_permanently, stats.quarantined, stats.list_pages_used), (0, 0, 0));
    }
}
