//! Blocks that are freed twice, or where they do not belong.

use crate::report::Report;
use pinfold::core::dma_pool::{FreeError, RawBlock};
use pinfold::{Arena, DmaPool, Domain};
use std::collections::HashSet;
use std::error::Error;

const BLOCKS: usize = 4096;
const SIZE: usize = 128;

pub(super) fn run(report: &mut Report) -> Result<(), Box<dyn Error>> {
    report.section("there, in a model of a free list without checks, linked through the blocks");
    there(report);
    report.section("here");
    report.note(match cfg!(debug_assertions) {
        true => "a debug build: add --release for one without debug assertions",
        false => "a build without debug assertions",
    });
    here(report)
}

/// A free list that is linked through the free blocks.
struct Unchecked {
    next: Vec<usize>,
    head: usize,
}

impl Unchecked {
    fn free(&mut self, block: usize) {
        if let Some(next) = self.next.get_mut(block) {
            *next = self.head;
            self.head = block;
        }
    }

    fn alloc(&mut self) -> usize {
        let block = self.head;
        self.head = self.next.get(block).copied().unwrap_or(block);
        block
    }
}

fn there(report: &mut Report) {
    let mut list = Unchecked { next: (1..=BLOCKS).collect(), head: 0 };
    let block = list.alloc();
    list.free(block);
    list.free(block);
    let handed_out: HashSet<usize> = (0..BLOCKS).map(|_| list.alloc()).collect();
    report.figure("blocks freed twice", 1, "");
    report.figure("allocations afterwards", BLOCKS, "");
    report.figure("different blocks that they returned", handed_out.len(), "");
}

fn here(report: &mut Report) -> Result<(), Box<dyn Error>> {
    let domain = Domain::soft()?;
    let arena = Arena::builder().size(8 << 20).build(&domain)?;
    let pool = DmaPool::builder("blocks").block(SIZE).align(SIZE).build(&arena)?;
    let other = DmaPool::builder("others").block(SIZE).align(SIZE).build(&arena)?;
    let mut local = pool.local();
    let held = (0..BLOCKS).map(|_| local.alloc_raw()).collect::<Result<Vec<_>, _>>()?;
    let (freed, kept) = held.split_at(BLOCKS / 2);
    for block in freed {
        local.free_raw(*block)?;
    }

    // Each of them again, in the middle of blocks, and blocks of another pool.
    let mut refused = [0_usize; 3];
    let mut first = None;
    for block in freed {
        let error = local.free_raw(*block).err();
        refused[0] += usize::from(matches!(error, Some(FreeError::DoubleFree { .. })));
        first = first.or(error);
    }
    report.said("the second free", first.ok_or("a block was freed twice")?);
    for block in kept {
        // SAFETY: the result is inside the block.
        let inside = unsafe { block.as_ptr().add(SIZE / 2) };
        let crooked = RawBlock::from_parts(inside, block.iova());
        let error = local.free_raw(crooked).err();
        refused[1] += usize::from(matches!(error, Some(FreeError::Misaligned { .. })));
    }
    let foreign = (0..BLOCKS).map(|_| other.alloc_raw()).collect::<Result<Vec<_>, _>>()?;
    for block in &foreign {
        let error = local.free_raw(*block).err();
        refused[2] += usize::from(matches!(error, Some(FreeError::Foreign { .. })));
    }
    report.figure("frees of free blocks", freed.len(), "");
    report.figure("  refused", refused[0], "");
    report.figure("frees of addresses inside blocks", kept.len(), "");
    report.figure("  refused", refused[1], "");
    report.figure("frees of another pool's blocks", foreign.len(), "");
    report.figure("  refused", refused[2], "");

    // A list with one block twice: those before it are freed, and it is named.
    let mut slots = [None; 8];
    local.fill_all(&mut slots)?;
    let mut list: Vec<RawBlock> = slots.into_iter().flatten().collect();
    let again = *list.get(2).ok_or("too few blocks")?;
    list.insert(5, again);
    let bulk = local.free_bulk(&list).err().ok_or("a block was freed twice by one call")?;
    report.said("a list with one block twice", bulk);
    let rest = list.get(6..).ok_or("too few blocks")?;
    local.free_bulk(rest)?;

    let fresh = (0..BLOCKS).map(|_| local.alloc_raw()).collect::<Result<Vec<_>, _>>()?;
    let live: HashSet<usize> =
        fresh.iter().chain(kept).map(|block| block.as_ptr().addr().get()).collect();
    report.figure("blocks in use after further allocations", fresh.len() + kept.len(), "");
    report.figure("different blocks among them", live.len(), "");
    let all = refused == [freed.len(), kept.len(), foreign.len()];
    report.promise("every wrong free is refused, by an error of its own", all);
    report.promise(
        "a list stops at the wrong block, and says which it is",
        bulk.freed == 5 && matches!(bulk.error, FreeError::DoubleFree { .. }),
    );
    report.promise("no block has two users", live.len() == fresh.len() + kept.len());
    for block in fresh.iter().chain(kept) {
        local.free_raw(*block)?;
    }
    for block in &foreign {
        other.free_raw(*block)?;
    }
    Ok(())
}
