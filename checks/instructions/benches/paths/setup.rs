//! The states that the paths start from. They live until the process ends, so no destruction is
//! counted.

use pinfold::soft::{Effect, SoftConfig};
use pinfold::{Arena, Buffer, DmaPool, Domain, MappingPolicy, PagePool, Source};
use pinfold_core::dma_pool::{self, Block};
use pinfold_core::domain;
use pinfold_core::frame::{self, Frame, Zone};
use pinfold_core::page_pool::Config;
use pinfold_instructions::OPERATIONS;
use std::time::Duration;

/// The size of a block in bytes.
const BLOCK: usize = 64;
/// The memory of each path.
const MEMORY: u64 = 8 << 20;

fn forever<T>(value: T) -> &'static mut T {
    Box::leak(Box::new(value))
}

/// Creates a domain whose flushes take no time: no wait depends on the clock.
fn domain() -> Domain {
    let free =
        SoftConfig { flush_cost: Duration::ZERO, effect: Effect::AtLast, ..SoftConfig::default() };
    Domain::soft_with(free).expect("memory for tables")
}

/// Allocates an arena of 4 KiB pages, which every machine has.
fn arena(domain: &Domain, policy: MappingPolicy) -> Arena {
    let builder = Arena::builder().size(MEMORY).source(Source::Plain).mapping_policy(policy);
    builder.build(domain).expect("an arena of 8 MiB")
}

/// Returns the same pseudo-random numbers in every run (xorshift, Marsaglia 2003), each below
/// [`OPERATIONS`].
fn random() -> impl Iterator<Item = usize> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as usize % OPERATIONS
    })
}

/// One owner of a pool, and its blocks.
pub struct Blocks {
    pub owner: dma_pool::PoolLocal,
    pub slots: Vec<Option<Block>>,
    /// Each slot once, in random order.
    pub order: Vec<usize>,
    /// Any slots.
    pub any: Vec<usize>,
}

/// The first blocks of a new pool.
pub fn blocks_empty() -> &'static mut Blocks {
    let arena = arena(&domain(), MappingPolicy::Whole);
    let pool = DmaPool::builder("counted").block(BLOCK).build(&arena).expect("valid sizes");
    let mut order: Vec<usize> = (0..OPERATIONS).collect();
    random().zip(0..OPERATIONS).for_each(|(a, b)| order.swap(a, b));
    let any = random().take(OPERATIONS).collect();
    let slots = (0..OPERATIONS).map(|_| None).collect();
    forever(Blocks { owner: pool.local(), slots, order, any })
}

/// With all blocks allocated.
pub fn blocks_full() -> &'static mut Blocks {
    let blocks = blocks_empty();
    assert_eq!(blocks.owner.fill_blocks(&mut blocks.slots), OPERATIONS);
    blocks
}

/// With all blocks freed again.
pub fn blocks_warm() -> &'static mut Blocks {
    let blocks = blocks_full();
    blocks.owner.free_many(blocks.slots.iter_mut().filter_map(Option::take));
    blocks
}

pub fn zone() -> &'static Zone {
    let frames = u32::try_from(2 * OPERATIONS).expect("a small number");
    let zone = forever(Zone::new(frames).expect("memory for a zone"));
    let mut slots = vec![None; OPERATIONS];
    let mut owner = zone.local();
    owner.fill_all(&mut slots).expect("enough frames");
    owner.free_bulk(&mut slots).expect("the frames are allocated");
    drop(owner);
    zone
}

/// One owner of a zone, and its frames.
pub struct Frames {
    pub owner: frame::ZoneLocal,
    pub slots: Vec<Option<Frame>>,
}

pub fn frames() -> &'static mut Frames {
    let mut frames = Frames { owner: zone().local(), slots: vec![None; OPERATIONS] };
    frames.owner.fill_all(&mut frames.slots).expect("enough frames");
    frames.owner.free_bulk(&mut frames.slots).expect("the frames are allocated");
    forever(frames)
}

pub type Pages = PagePool;

pub fn pages() -> &'static mut Pages {
    let arena: &Arena = forever(arena(&domain(), MappingPolicy::PerUse));
    let pool = forever(
        PagePool::new(arena.clone(), "counted", Config::default()).expect("a valid configuration"),
    );
    let mut slots = vec![None; 512];
    assert_eq!(pool.fill_raw(&mut slots), slots.len());
    slots.drain(..).flatten().for_each(|page| pool.free_raw(page).expect("the page is allocated"));
    pool
}

/// One owner of a domain, and what it maps.
pub struct Owner {
    pub owner: domain::DomainLocal,
    pub buffer: Option<Buffer>,
}

/// One that has a window, and whose table has its page.
pub fn owner() -> &'static mut Owner {
    let domain = forever(domain());
    let arena = forever(arena(domain, MappingPolicy::PerUse));
    let mut owner = domain.local();
    let buffer = arena.alloc(4096).expect("the arena is empty");
    let mapping = owner.map(buffer, pinfold::FromDevice).expect("addresses are free");
    let buffer = Some(owner.unmap(mapping).expect("the IOMMU works"));
    forever(Owner { owner, buffer })
}

/// One owner of a domain, and the buffers, mappings and revocations of a batch.
pub struct Batch {
    pub owner: domain::DomainLocal,
    pub buffers: Vec<Buffer>,
    pub mappings: Vec<domain::Mapping<Buffer, pinfold::FromDevice>>,
    pub revoked: Vec<domain::Revoked<Buffer>>,
}

/// One that has carried out a batch of 32.
pub fn batch() -> &'static mut Batch {
    let domain = forever(domain());
    let arena = forever(arena(domain, MappingPolicy::PerUse));
    let mut batch = Batch {
        owner: domain.local(),
        buffers: (0..32).map(|_| arena.alloc(4096).expect("the arena is large enough")).collect(),
        mappings: Vec::with_capacity(32),
        revoked: Vec::with_capacity(32),
    };
    let Batch { owner, buffers, mappings, revoked } = &mut batch;
    let map = |buffer| owner.map(buffer, pinfold::FromDevice).expect("addresses are free");
    mappings.extend(buffers.drain(..).map(map));
    owner.revoke_many(mappings.drain(..), revoked);
    buffers.extend(revoked.drain(..).map(|one| owner.wait(one).expect("the IOMMU works")));
    forever(batch)
}
