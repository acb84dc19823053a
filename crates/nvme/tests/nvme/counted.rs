//! The locks of requests, counted (feature `count-rmw`).

use crate::common::{Buffer, bench, namespaces};
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::access::FromDevice;
use pinfold_core::domain::Revoked;
use pinfold_core::sync::{lock_count, rmw_reset};
use pinfold_nvme::driver::{Config, Controller, InFlight, Outcome};
use pinfold_nvme_model::{ModelConfig, ModelController};
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

/// A request as a program makes it: its buffer is mapped by the owner's handle, and what completes
/// together is revoked with one flush. Beside the one lock of a batch there are two for each window
/// of 2 MiB of addresses: one takes it from the domain, one returns it.
#[test]
fn counted_a_batch_takes_one_lock_and_a_window_two() {
    const WINDOW: usize = 2 << 20;
    const BATCHES: usize = 6_250;
    const DEPTH: usize = 16;
    const BLOCKS: u32 = 24;
    let domain = Domain::soft().unwrap();
    let arena =
        |size, policy| Arena::builder().size(size).mapping_policy(policy).build(&domain).unwrap();
    let (control, data) =
        (arena(4 << 20, MappingPolicy::Whole), arena(4 << 20, MappingPolicy::PerUse));
    let model =
        ModelController::spawn(domain.port().unwrap(), ModelConfig::new(namespaces(8 << 20)))
            .unwrap();
    let controller = Controller::start(model.registers(), control, Config::default()).unwrap();
    let mut queue = controller.create_queue(DEPTH).unwrap();
    let mut local = domain.local();
    let mut free: Vec<_> = (0..DEPTH).map(|_| data.alloc(BLOCKS as usize * 512).unwrap()).collect();
    let mut in_flight = Vec::with_capacity(DEPTH);
    let mut mappings = Vec::with_capacity(DEPTH);
    let mut revoked: Vec<Revoked<_>> = Vec::with_capacity(DEPTH);
    // Of the requests, of revoking them, and of waiting for the flush.
    let mut locks = [0; 3];
    let mut run = |batches: usize| {
        locks = [0; 3];
        for _ in 0..batches {
            rmw_reset();
            for buffer in free.drain(..) {
                let mapping = local.map(buffer, FromDevice).unwrap();
                in_flight.push(queue.read(1, 0, BLOCKS, mapping).unwrap());
            }
            while !in_flight.is_empty() {
                let completion = queue.wait().unwrap().unwrap();
                let tag = completion.tag();
                let at = in_flight.iter().position(|one: &InFlight<_>| one.tag() == tag).unwrap();
                match in_flight.swap_remove(at).finish(completion) {
                    Outcome::Completed { payload, result: Ok(()) } => mappings.push(payload),
                    _ => panic!("not completed"),
                }
            }
            locks[0] += lock_count();
            rmw_reset();
            local.revoke_many(mappings.drain(..), &mut revoked);
            locks[1] += lock_count();
            rmw_reset();
            free.extend(revoked.drain(..).map(|one| local.wait(one).unwrap()));
            locks[2] += lock_count();
        }
        locks
    };
    // The pool grows, and the handles are filled.
    run(256);
    let locks = run(BATCHES);
    let windows = (BATCHES * DEPTH * BLOCKS as usize * 512).div_ceil(WINDOW) as u64 + 1;
    println!("{locks:?} locks in {BATCHES} batches of {DEPTH} requests, {windows} windows");
    assert!(locks[1] <= BATCHES as u64, "{locks:?}");
    assert!(locks[0] <= windows && locks[2] <= windows, "{locks:?}, {windows} windows");
}
