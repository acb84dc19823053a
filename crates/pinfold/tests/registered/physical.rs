//! The physical addresses of memory, and the pin that keeps them.

use crate::common::*;
use crate::shapes::mixture;
use pinfold::OwnedMemory;
use pinfold::folios::{Folios, PinError};
use rustix::thread::CapabilitySet;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Returns the folios of memory; `None` where this process may not see frames, or has no ring.
fn folios(memory: &OwnedMemory) -> Option<&Folios> {
    let found = memory.folios();
    if let Err(error @ (PinError::FramesUnknown { .. } | PinError::NoRing(_))) = &found {
        assert_eq!(pinned_by_kernel(), 0, "and nothing stays pinned");
        skipped(&error.to_string());
        return None;
    }
    Some(found.unwrap())
}

/// Returns the physical address of the page at an address, as the kernel tells it.
fn frame(addr: usize) -> u64 {
    let mut entry = [0; 8];
    let at = (addr / PAGE * 8) as u64;
    File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut entry, at).unwrap();
    (u64::from_ne_bytes(entry) & ((1 << 55) - 1)) * PAGE as u64
}

#[test]
fn eight_mebibytes_on_hugepages_are_four_segments_at_most() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(7) else { return skipped("may not reserve hugepages") };
    let area = Area::new(0, &[(Kind::Hugetlb, 4 * HUGE)]).unwrap();
    let memory = area.owned(0, area.bytes);
    let Some(table) = folios(&memory) else { return };
    let segments = table.segments(0, table.len()).unwrap().count();
    assert!(segments <= 4, "8 MiB on 2 MiB pages: {segments}");
    assert!(table.table_bytes() <= 32);
    assert!(table.folio_shift() >= 21);
}

#[test]
fn each_byte_of_a_mixture_is_where_the_kernel_says() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(7) else { return skipped("may not reserve hugepages") };
    let area = mixture().unwrap();
    let memory = area.owned(0, area.bytes);
    let before = pinned_by_kernel();
    let Some(table) = folios(&memory) else { return };
    assert_eq!(pinned_by_kernel() - before, memory.survey().unwrap().forecast().ring);
    assert_eq!(table.len(), area.bytes as u64);
    for offset in (0..area.bytes).step_by(PAGE) {
        let located = table.locate(offset as u64 + 5).unwrap();
        assert_eq!(located.iova.raw(), frame(area.addr + offset) + 5, "{offset}");
    }
    assert_eq!(memory.folios().unwrap(), table, "looked up once");
    assert_eq!(pinned_by_kernel() - before, memory.survey().unwrap().forecast().ring);
    memory.reclaim::<()>().unwrap();
    assert_eq!(pinned_by_kernel(), before);
}

#[test]
fn the_pin_ends_with_the_memory() {
    let _alone = alone();
    let area = Area::new(0, &[(Kind::Untouched, 64 * PAGE)]).unwrap();
    let memory = area.owned(0, area.bytes);
    if folios(&memory).is_none() {
        return;
    }
    assert_eq!(pinned_by_kernel(), 64 * PAGE as u64);
    let piece = memory.take().unwrap();
    drop(memory);
    assert_eq!(pinned_by_kernel(), 64 * PAGE as u64, "a piece keeps it");
    drop(piece);
    assert_eq!(pinned_by_kernel(), 0);
}

/// Their frames are the old ones, whatever is at the addresses since.
#[test]
fn pages_that_are_unmapped_while_pinned_are_not_reused() {
    let _alone = alone();
    let area = Area::new(0, &[(Kind::Plain, 64 * PAGE)]).unwrap();
    let memory = area.owned(0, area.bytes);
    let Some(table) = folios(&memory) else { return };
    unmap(area.addr, area.bytes).unwrap();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    map(area.addr, area.bytes, libc::PROT_READ | libc::PROT_WRITE, flags, None).unwrap();
    let grab = Area::new(0, &[(Kind::Plain, 16 << 20)]).unwrap();
    (0..area.bytes).step_by(PAGE).for_each(|at| poke(area.addr + at, 1));
    let taken: std::collections::BTreeSet<u64> = [(area.addr, area.bytes), (grab.addr, grab.bytes)]
        .into_iter()
        .flat_map(|(addr, len)| (addr..addr + len).step_by(PAGE).map(frame))
        .collect();
    let pinned =
        (0..area.bytes).step_by(PAGE).map(|at| table.locate(at as u64).unwrap().iova.raw());
    assert!(pinned.into_iter().all(|frame| !taken.contains(&frame)));
}

#[test]
fn hidden_frames_are_an_error_that_pins_nothing() {
    let _alone = alone();
    let area = Area::new(0, &[(Kind::Plain, 4 * PAGE)]).unwrap();
    let memory = area.owned(0, area.bytes);
    without(CapabilitySet::SYS_ADMIN, || match memory.folios() {
        Err(PinError::FramesUnknown { addr }) => assert_eq!(addr, area.addr),
        Err(PinError::NoRing(refusal)) => skipped(&refusal.to_string()),
        other => panic!("{other:?}"),
    });
    assert_eq!(pinned_by_kernel(), 0);
}

#[test]
fn a_fork_leaves_the_pages_pinned_for_the_parent() {
    let _alone = alone();
    let area = Area::new(0, &[(Kind::Plain, 4 * PAGE)]).unwrap();
    let memory = area.owned(0, area.bytes);
    let Some(table) = folios(&memory) else { return };
    let first = table.locate(0).unwrap().iova.raw();
    // SAFETY: the child frees what it has of the memory, and ends; glibc's allocator may be used
    // after a fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(memory);
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: the child is ours, and `status` outlives the call.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    assert_eq!(pinned_by_kernel(), 4 * PAGE as u64);
    poke(area.addr, 3);
    assert_eq!(frame(area.addr), first, "not copied on write");
}
