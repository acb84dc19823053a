//! The locks of requests, counted (feature `count-rmw`).

use crate::common::*;
use pinfold_core::sync::{lock_count, rmw_reset};
use pinfold_nvme::driver::{Config, InFlight, Outcome};
use pinfold_nvme_model::ModelConfig;
use std::collections::VecDeque;

/// A request has a PRP list of one page. The queue pair takes and frees it through its own handle
/// of the pool.
#[test]
fn counted_no_request_takes_a_lock_of_the_list_pool() {
    const REQUESTS: usize = 100_000;
    const DEPTH: usize = 16;
    const BLOCKS: u32 = 24;
    let bench = bench(2000, ModelConfig::new(namespaces(8 << 20)), Config::default());
    let mut queue = bench.controller.create_queue(DEPTH).unwrap();
    let mut free: Vec<_> =
        (0..DEPTH).map(|_| Buffer::new(&bench.arena, BLOCKS as usize * 512)).collect();
    let mut in_flight = VecDeque::new();
    let mut completed = 0;
    let mut run = |requests: usize| {
        let end = completed + requests;
        let mut sent = completed;
        while completed < end {
            while let Some(buffer) = (sent < end).then(|| free.pop()).flatten() {
                in_flight.push_back(queue.read(1, 0, BLOCKS, buffer).unwrap());
                sent += 1;
            }
            let completion = queue.wait().unwrap().unwrap();
            let at =
                in_flight.iter().position(|one: &InFlight<Buffer>| one.tag() == completion.tag());
            let Outcome::Completed { payload, result } =
                in_flight.remove(at.unwrap()).unwrap().finish(completion)
            else {
                panic!("not completed")
            };
            result.unwrap();
            free.push(payload);
            completed += 1;
        }
    };
    // The pool grows, and the handle is filled.
    run(4 * DEPTH);
    rmw_reset();
    run(REQUESTS);
    assert_eq!(lock_count(), 0, "locks in {REQUESTS} requests");
    assert!(bench.controller.stats().list_pages_max >= 1);
    assert_eq!(queue.stats().prp_list_pages as usize, REQUESTS + 4 * DEPTH);
}
