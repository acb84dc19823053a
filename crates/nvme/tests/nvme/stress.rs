//! Several owners with a queue each, with and without concurrent resets.

use crate::common::*;
use pinfold_nvme::driver::{CommandError, Config, Error, Outcome, Reject};
use pinfold_nvme_model::{Fault, ModelConfig, Trigger};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const OWNERS: u64 = 3;
/// In how long each owner must have completed a round.
const LONGEST: Duration = Duration::from_secs(120);

/// Writes and reads back one owner's blocks until `stop`; counts the completed rounds.
fn owner(bench: &Bench, number: u64, stop: &AtomicBool, done: &AtomicU64) {
    let mut seed = number << 32;
    'queue: while !stop.load(Ordering::Relaxed) {
        let mut queue = match bench.controller.create_queue(4) {
            Ok(queue) => queue,
            // The controller is being reset.
            Err(Error::NeedsReset | Error::Admin { .. } | Error::NoQueueLeft { .. }) => {
                std::thread::yield_now();
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        while !stop.load(Ordering::Relaxed) {
            seed += 1;
            let blocks = 1 + (seed % 100) as u32;
            let len = blocks as usize * 512;
            let slba = number * 256;
            let bytes = pattern(seed, len);
            for write in [true, false] {
                let payload = Buffer::filled(&bench.arena, if write { &bytes } else { &[0] });
                let payload = if write { payload } else { Buffer::new(&bench.arena, len) };
                let sent = if write {
                    queue.write(1, slba, blocks, payload)
                } else {
                    queue.read(1, slba, blocks, payload)
                };
                let in_flight = match sent {
                    Ok(in_flight) => in_flight,
                    Err(rejected) => {
                        assert_eq!(rejected.reason, Reject::NeedsReset);
                        continue 'queue;
                    }
                };
                let completion = queue.wait().unwrap().unwrap();
                let Outcome::Completed { payload, result } = in_flight.finish(completion) else {
                    panic!()
                };
                match result {
                    Ok(()) if write => {}
                    Ok(()) => assert!(payload.bytes(len) == bytes, "owner {number}"),
                    Err(CommandError::Reset) => continue 'queue,
                    Err(error) => panic!("{error}"),
                }
            }
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn run(reset_every: Option<Duration>) {
    let bench = bench(2048, ModelConfig::new(namespaces(1 << 20)), Config::default());
    bench.model.faults().inject(Trigger::Every(5), Fault::Reorder(2));
    let stop = AtomicBool::new(false);
    let done = [const { AtomicU64::new(0) }; OWNERS as usize];
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (number, done) in (0..).zip(&done) {
            let (bench, stop) = (&bench, &stop);
            scope.spawn(move || owner(bench, number, stop, done));
        }
        let idle = || done.iter().any(|done| done.load(Ordering::Relaxed) == 0);
        while start.elapsed() < Duration::from_millis(600) || idle() && start.elapsed() < LONGEST {
            // Less often on a machine where a round takes long.
            std::thread::sleep(
                reset_every
                    .map_or(Duration::from_millis(100), |every| every + start.elapsed() / 50),
            );
            if reset_every.is_some() {
                bench.controller.reset().unwrap();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(done.iter().all(|done| done.load(Ordering::Relaxed) > 0), "{done:?} rounds");
    let stats = bench.controller.stats();
    assert_eq!(
        (stats.quarantined_permanently, stats.quarantined, stats.list_pages_used),
        (0, 0, 0)
    );
    drop(bench.controller);
    assert_eq!(bench.arena.0.used(), 0);
}

#[test]
fn stress_owners_with_a_queue_each() {
    run(None);
}

#[test]
fn stress_resets_while_owners_submit() {
    run(Some(Duration::from_millis(7)));
}
