//! `cargo run -p pinfold --example fixed_pools`
//!
//! A driver whose memory is fixed when it starts: its descriptors are acquired at once, on the
//! device's NUMA node, and registered with the device before the first request; a request gets all
//! the descriptors that it needs or none; receivers hold at most as many pages as they may.

use pinfold::arena::BuildError;
use pinfold::core::dma_pool::{BulkAllocError, PoolLocal, RawBlock};
use pinfold::core::page_pool::AllocError;
use pinfold::page_pool::{Config, PagePool};
use pinfold::{Arena, DmaPool, Domain};
use std::collections::HashMap;
use std::error::Error;

/// The number of descriptors in the device's ring.
const DESCRIPTORS: u64 = 256;
const DESCRIPTOR_BYTES: usize = 64;
/// The first word of each descriptor holds its number, as long as the driver runs.
const NUMBER: usize = 0;

/// Returns an arena on the device's node, or on any where the machine has no such node.
fn arena_on(node: u32, domain: &Domain) -> Result<Arena, BuildError> {
    let builder = Arena::builder().size(16 << 20);
    match builder.clone().numa_node(node).build(domain) {
        Err(BuildError::Node { .. }) => builder.build(domain),
        built => built,
    }
}

/// Allocates `count` descriptors of one request, all or none.
fn request(local: &mut PoolLocal, count: usize) -> Result<Vec<RawBlock>, BulkAllocError> {
    let mut slots = vec![None; count];
    local.fill_all(&mut slots)?;
    Ok(slots.into_iter().flatten().collect())
}

fn main() -> std::process::ExitCode {
    // Its message: an error that `main` returned would print its fields.
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let domain = Domain::soft()?;
    let arena = arena_on(0, &domain)?;

    // A fixed number: from here on no request waits for the arena, and none grows the pool.
    let builder = DmaPool::builder("descriptors").block(DESCRIPTOR_BYTES).align(64);
    let pool = builder.minimum(DESCRIPTORS).maximum(DESCRIPTORS).build(&arena)?;
    let mut numbers = HashMap::new();
    pool.for_each_block(|descriptor, memory| {
        let number = numbers.len() as u64;
        // Eight bytes of 64.
        let _ = memory.write_u64(NUMBER, number);
        numbers.insert(descriptor.iova(), number);
    });
    println!("{} descriptors registered with the device", numbers.len());

    let mut local = pool.local();
    let mut requests = Vec::new();
    let refused = loop {
        match request(&mut local, 24) {
            Ok(chain) => requests.push(chain),
            Err(refused) => break refused,
        }
    };
    println!("{} requests of 24 descriptors in flight; the next one: {refused}", requests.len());
    let completed = requests.pop().ok_or("no request was possible")?;
    let first = completed.first().ok_or("an empty request")?;
    println!("the device completed the request of descriptor {}", numbers[&first.iova()]);
    local.free_bulk(&completed)?;
    requests.push(request(&mut local, 24)?);

    // A pool of another kind: it grows as needed, and is shrunk while its handles and some blocks
    // are held.
    let packets = DmaPool::builder("packets").block(2048).build(&arena)?;
    let mut sender = packets.local();
    let first = sender.alloc()?;
    let burst = (0..2000).map(|_| sender.alloc()).collect::<Result<Vec<_>, _>>()?;
    burst.into_iter().for_each(|packet| sender.free(packet));
    let before = packets.stats().bytes;
    sender.flush(); // what this owner has cached
    let released = packets.shrink();
    println!(
        "after a burst of {before} bytes {released} were released, while packets are in flight"
    );
    first.memory().write_u64(0, 1)?;

    // Receivers that return pages too slowly are stopped at a limit, not at the end of the memory.
    let limited = Config { max_in_use: 128, ..Config::default() };
    let mut receive = PagePool::new(arena.clone(), "receive", limited)?;
    let mut held = Vec::new();
    let refused = loop {
        match receive.alloc() {
            Ok(page) => held.push(page),
            Err(refused) => break refused,
        }
    };
    assert_eq!((refused.clone(), held.len()), (AllocError::Limit { limit: 128 }, 128));
    println!("{refused}; {} refused so far", receive.stats().limited);
    held.truncate(100);
    println!("28 returned: a page is available again: {}", receive.alloc().is_ok());

    // Short messages share a page, which is free with the last of them.
    let mut replies = PagePool::new(arena, "replies", Config::default())?;
    let parts = (0..8).map(|_| replies.alloc_fragment(256)).collect::<Result<Vec<_>, _>>()?;
    let addresses: Vec<_> = parts.iter().map(|part| part.iova()).collect();
    println!("replies in {} page, at {addresses:?}", replies.stats().in_use);

    // The device is stopped while receivers still hold pages: it loses them now, and they stay
    // valid memory until each is dropped.
    let end = receive.destroy();
    match end.reachable() {
        None => println!("{} pages are held, and no device reaches them", end.pages_out()),
        Some((bytes, why)) => println!("{bytes} bytes stay mapped: {why}"),
    }
    drop(held);
    println!("{} pages came back after the end", end.counts().released_refcnt);

    for chain in requests {
        local.free_bulk(&chain)?;
    }
    Ok(())
}
