//! The hottest paths, each carried out [`OPERATIONS`] times. Set-up, warm-up and destruction are
//! not counted.
//!
//! Allocated addresses pass through `black_box`, and the calls are inlined into the loops, as in
//! `pinfold-bench`.

mod setup;

use gungraun::{library_benchmark, library_benchmark_group, main};
use pinfold::{Buffer, FromDevice};
use pinfold_core::frame::{Order, Zone};
use pinfold_core::page_pool::RawPage;
use pinfold_instructions::OPERATIONS;
use setup::{Batch, Blocks, Frames, Owner, Pages};
use std::hint::black_box;

#[library_benchmark]
#[bench::warm(setup = setup::blocks_warm)]
fn pool_pair(blocks: &'static mut Blocks) {
    for _ in 0..OPERATIONS {
        let block = blocks.owner.alloc().expect("a block was freed before");
        black_box(block.iova());
        blocks.owner.free(block);
    }
}

#[library_benchmark]
#[bench::empty(setup = setup::blocks_empty)]
fn pool_alloc_new(blocks: &'static mut Blocks) {
    for slot in &mut blocks.slots {
        *slot = Some(blocks.owner.alloc().expect("the arena is large enough"));
    }
}

#[library_benchmark]
#[bench::full(setup = setup::blocks_full)]
fn pool_free_in_order(blocks: &'static mut Blocks) {
    for block in blocks.slots.iter_mut().filter_map(Option::take) {
        blocks.owner.free(block);
    }
}

#[library_benchmark]
#[bench::full(setup = setup::blocks_full)]
fn pool_free_random(blocks: &'static mut Blocks) {
    for &at in &blocks.order {
        let block = blocks.slots[at].take().expect("each slot once");
        blocks.owner.free(block);
    }
}

#[library_benchmark]
#[bench::full(setup = setup::blocks_full)]
fn pool_replace_random(blocks: &'static mut Blocks) {
    for &at in &blocks.any {
        let slot = &mut blocks.slots[at];
        blocks.owner.free(slot.take().expect("all slots are full"));
        *slot = Some(blocks.owner.alloc().expect("a block was freed before"));
    }
}

#[library_benchmark]
#[bench::warm(setup = setup::blocks_warm)]
fn pool_bulk_512(blocks: &'static mut Blocks) {
    for slots in blocks.slots.chunks_exact_mut(512) {
        assert_eq!(blocks.owner.fill_blocks(slots), slots.len());
        black_box(&*slots);
        blocks.owner.free_many(slots.iter_mut().filter_map(Option::take));
    }
}

#[library_benchmark]
#[bench::warm(setup = setup::zone)]
fn zone_pair(zone: &'static Zone) {
    for _ in 0..OPERATIONS {
        let frame = zone.alloc(Order::PAGE).expect("all frames are free");
        black_box(frame.offset());
        zone.free(frame, Order::PAGE).expect("the frame is allocated");
    }
}

#[library_benchmark]
#[bench::warm(setup = setup::frames)]
fn frames_pair(frames: &'static mut Frames) {
    for _ in 0..OPERATIONS {
        let frame = frames.owner.alloc(Order::PAGE).expect("all frames are free");
        black_box(frame.offset());
        frames.owner.free(frame, Order::PAGE).expect("the frame is allocated");
    }
}

#[library_benchmark]
#[bench::warm(setup = setup::frames)]
fn frames_bulk_64(frames: &'static mut Frames) {
    for slots in frames.slots.chunks_exact_mut(64) {
        assert_eq!(frames.owner.fill(slots), slots.len());
    }
    black_box(&frames.slots);
    for slots in frames.slots.chunks_exact_mut(64).rev() {
        frames.owner.free_bulk(slots).expect("the frames are allocated");
    }
}

#[library_benchmark]
#[bench::warm(setup = setup::pages)]
fn pages_pair(pool: &'static mut Pages) {
    for _ in 0..OPERATIONS {
        let page = pool.alloc_raw().expect("a page was freed before");
        black_box(page.iova());
        pool.free_raw(page).expect("the page is allocated");
    }
}

#[library_benchmark]
#[bench::warm(setup = setup::pages)]
fn pages_refill_256(pool: &'static mut Pages) {
    let mut slots: [Option<RawPage>; 256] = [const { None }; 256];
    for _ in 0..OPERATIONS / slots.len() {
        assert_eq!(pool.fill_raw(&mut slots), slots.len());
        for page in black_box(&mut slots).iter_mut().filter_map(Option::take) {
            pool.free_raw(page).expect("the page is allocated");
        }
    }
}

#[library_benchmark]
#[bench::warm(setup = setup::owner)]
fn domain_map_unmap(owner: &'static mut Owner) {
    let mut buffer: Option<Buffer> = owner.buffer.take();
    for _ in 0..OPERATIONS {
        let mapping = owner
            .owner
            .map(buffer.take().expect("returned"), FromDevice)
            .expect("addresses are free");
        black_box(mapping.iova().start());
        buffer = Some(owner.owner.unmap(mapping).expect("the IOMMU works"));
    }
    owner.buffer = buffer;
}

#[library_benchmark]
#[bench::warm(setup = setup::batch)]
fn domain_revoke_many_32(batch: &'static mut Batch) {
    let Batch { owner, buffers, mappings, revoked } = batch;
    for _ in 0..OPERATIONS / buffers.len() {
        for buffer in buffers.drain(..) {
            mappings.push(owner.map(buffer, FromDevice).expect("addresses are free"));
        }
        black_box(&*mappings);
        owner.revoke_many(mappings.drain(..), revoked);
        for one in revoked.drain(..) {
            buffers.push(owner.wait(one).expect("the IOMMU works"));
        }
    }
}

#[library_benchmark]
#[bench::warm(setup = setup::owner)]
fn iova_pair(owner: &'static mut Owner) {
    for _ in 0..OPERATIONS {
        let addresses = owner.owner.alloc_addresses(4096).expect("addresses are free");
        black_box(addresses.range().start());
        owner.owner.free_addresses(addresses);
    }
}

library_benchmark_group!(
    name = paths,
    benchmarks = [
        pool_pair,
        pool_alloc_new,
        pool_free_in_order,
        pool_free_random,
        pool_replace_random,
        pool_bulk_512,
        zone_pair,
        frames_pair,
        frames_bulk_64,
        pages_pair,
        pages_refill_256,
        domain_map_unmap,
        domain_revoke_many_32,
        iova_pair,
    ]
);

main!(library_benchmark_groups = paths);
