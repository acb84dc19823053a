//! The memory of arenas and buffers: sizes, contents, access by devices, lifetimes; owners' handles with
//! bulk and caching.

use super::*;
use pinfold_core::access::Bidirectional;
use pinfold_core::dma_pool::{ChunkSource, Coherent};
use pinfold_core::domain::Pinned;
use proptest::prelude::*;
use std::ptr::NonNull;

fn plain(bytes: u64, mapping_policy: MappingPolicy) -> Arena {
    Arena::builder()
        .size(bytes)
        .source(Source::Plain)
        .mapping_policy(mapping_policy)
        .build(&soft())
        .unwrap()
}

#[test]
fn a_buffer_is_whole_frames_and_is_freed() {
    let arena = plain(8 << 20, MappingPolicy::PerUse);
    assert_eq!(arena.stats().frames, 2048);
    for (asked, len) in
        [(1, 4096), (4096, 4096), (4097, 8192), (5 << 12, 5 << 12), (3 << 20, 3 << 20)]
    {
        let buffer = arena.alloc(asked).unwrap();
        assert_eq!(buffer.len(), len);
        assert_eq!(Pinned::memory(&buffer).len(), len);
        assert_eq!(arena.stats().frames_in_use, len as u64 / 4096);
    }
    let stats = arena.stats();
    assert_eq!((stats.frames_in_use, stats.frames_peak), (0, 768));
}

#[test]
fn a_large_buffer_starts_at_a_large_page() {
    let arena = plain(16 << 20, MappingPolicy::PerUse);
    let _small = arena.alloc(4096).unwrap();
    let large = arena.alloc(5 << 20).unwrap();
    assert_eq!(large.memory().addr() % (2 << 20), 0);
}

#[test]
fn a_pool_keeps_its_boundary_even_in_a_small_arena() {
    let arena = plain(64 << 10, MappingPolicy::PerUse);
    let _first = arena.alloc(4096).unwrap();
    let builder =
        pinfold_core::dma_pool::DmaPool::builder("small").block(3000).align(8).boundary(8192);
    let pool = builder.build(&arena).unwrap();
    for _ in 0..12 {
        let block = pool.alloc_raw().unwrap();
        assert!(block.iova().raw() % 8192 + 3000 <= 8192, "{block:?}");
    }
}

#[test]
fn a_whole_arena_can_be_one_buffer() {
    for pages in [1, 2, 3, 5, 31, 100, 511, 512, 513, 700, 768, 1000, 1025, 1500] {
        let arena = plain(pages * 4096, MappingPolicy::PerUse);
        let got = arena.alloc(usize::try_from(pages).unwrap() * 4096);
        assert!(got.is_ok(), "{pages} pages: {got:?} of {:?}", arena.report());
    }
}

#[test]
fn an_impossible_request_is_an_error_and_changes_nothing() {
    let arena = plain(4 << 20, MappingPolicy::PerUse);
    assert_eq!(arena.alloc(0).unwrap_err(), AllocError::Length { len: 0, limit: 4 << 20 });
    let too_large = AllocError::TooLarge { requested: (4 << 20) + 1, arena: 4 << 20 };
    assert_eq!(arena.alloc((4 << 20) + 1).unwrap_err(), too_large);
    assert!(matches!(arena.alloc(usize::MAX).unwrap_err(), AllocError::TooLarge { .. }));
    let _held = arena.alloc(3 << 20).unwrap();
    let exhausted = AllocError::Exhausted { requested: 2 << 20, in_use: 3 << 20, arena: 4 << 20 };
    assert_eq!(arena.alloc(2 << 20).unwrap_err(), exhausted);
    assert_eq!(arena.stats().frames_in_use, 768);
    assert_eq!(arena.alloc(1 << 20).unwrap().len(), 1 << 20);
}

#[test]
fn fresh_memory_is_zero_and_recycled_memory_only_on_request() {
    let arena = plain(4096, MappingPolicy::PerUse);
    assert_eq!(arena.len(), 4096, "a small arena is small");
    let mut buffer = arena.alloc(4096).unwrap();
    assert!(buffer.as_slice().unwrap().iter().all(|byte| *byte == 0));
    buffer.as_mut_slice().unwrap().fill(0xa5);
    drop(buffer);
    let buffer = arena.alloc(1).unwrap();
    assert_eq!(buffer.memory().read_u8(4095).unwrap(), 0xa5);
    assert!(matches!(arena.alloc(1), Err(AllocError::Exhausted { .. })), "the one frame is in use");
    drop(buffer);
    let mut buffer = arena.alloc_zeroed(1).unwrap();
    assert!(buffer.as_slice().unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn an_arena_mapped_whole_lends_no_slices_and_can_be_copied() {
    let domain = soft();
    let port = domain.port().unwrap();
    let arena = Arena::builder()
        .size(2 << 20)
        .source(Source::Plain)
        .mapping_policy(MappingPolicy::Whole)
        .build(&domain)
        .unwrap();
    let mut buffer = arena.alloc_zeroed(4096).unwrap();
    assert_eq!(buffer.as_slice(), Err(NotExclusive));
    assert_eq!(buffer.as_mut_slice(), Err(NotExclusive));
    let iova = arena.iova_of(&buffer).unwrap();
    assert_eq!(
        iova.raw() - arena.iova().raw(),
        (buffer.memory().addr() - addr_of(&arena)) as u64,
        "the IOVA is an addition"
    );
    port.write(iova, b"stray").unwrap();
    let mut back = [0; 5];
    buffer.memory().copy_to_slice(0, &mut back).unwrap();
    assert_eq!(&back, b"stray");
    let mapped = domain.map(buffer, Bidirectional).unwrap();
    assert!(mapped.is_fixed(), "no table work");
    let buffer = mapped.unmap().unwrap();
    drop((buffer, arena));
    assert!(port.write(iova, b"stray").is_err(), "unmapped with the arena");
}

#[test]
fn a_device_reaches_only_the_mapped_part_of_a_per_use_arena() {
    let domain = soft();
    let port = domain.port().unwrap();
    let arena = Arena::builder().size(4 << 20).source(Source::Plain).build(&domain).unwrap();
    let buffer = arena.alloc(8192).unwrap();
    assert_eq!(arena.iova_of(&buffer), None);
    assert!(port.write(arena.iova(), b"stray").is_err());
    let mapped = domain.map(buffer, Bidirectional).unwrap();
    let iova = mapped.iova().start();
    port.write(iova, b"stray").unwrap();
    let mut buffer = mapped.unmap().unwrap();
    assert_eq!(&buffer.as_slice().unwrap()[..5], b"stray");
    assert!(port.write(iova, b"stray").is_err());
}

#[test]
fn a_chunk_is_reached_from_acquire_to_release() {
    for mapping_policy in [MappingPolicy::PerUse, MappingPolicy::Whole] {
        let domain = soft();
        let port = domain.port().unwrap();
        let arena = Arena::builder()
            .size(4 << 20)
            .source(Source::Plain)
            .mapping_policy(mapping_policy)
            .build(&domain)
            .unwrap();
        let chunk = Coherent::new(&arena, 4 * 4096).unwrap();
        let iova = chunk.iova();
        port.write(iova, b"stray").unwrap();
        let mut back = [0; 5];
        chunk.memory().copy_to_slice(0, &mut back).unwrap();
        assert_eq!(&back, b"stray");
        assert_eq!(arena.stats().frames_in_use, 4);
        drop(chunk);
        assert_eq!(arena.stats().frames_in_use, 0);
        assert_eq!(port.write(iova, b"stray").is_ok(), mapping_policy == MappingPolicy::Whole);
    }
}

#[test]
fn stress_owners_of_buffers_and_chunks_do_not_meet() {
    let domain = soft();
    let arena = Arena::builder().size(8 << 20).source(Source::Plain).build(&domain).unwrap();
    std::thread::scope(|scope| {
        for owner in 1..=4u8 {
            let arena = arena.clone();
            scope.spawn(move || {
                for round in 0..300usize {
                    if let Ok(mut buffer) = arena.alloc(1 + round * 997 % 300_000) {
                        buffer.as_mut_slice().unwrap().fill(owner);
                        assert!(buffer.as_slice().unwrap().iter().all(|byte| *byte == owner));
                    }
                    if let Ok(chunk) = Coherent::new(&arena, 4096 << (owner % 4)) {
                        chunk.memory().fill(0, chunk.memory().len(), 0xcc).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(arena.stats().frames_in_use, 0);
}

#[test]
fn the_memory_is_unmapped_with_the_last_handle_or_buffer() {
    let _alone = alone();
    let before = quarantined_here();
    let domain = soft();
    for mapping_policy in [MappingPolicy::PerUse, MappingPolicy::Whole] {
        assert!(is_gone(|| {
            let plain = Arena::builder().size(4 << 20).source(Source::Plain);
            let arena = plain.mapping_policy(mapping_policy).build(&domain).unwrap();
            let addr = addr_of(&arena);
            let buffer = arena.alloc(4096).unwrap();
            drop(arena);
            assert!(is_mapped(addr), "a buffer keeps its arena");
            buffer.memory().write_u8(0, 1).unwrap();
            drop(buffer);
            addr
        }));
    }
    assert_eq!(quarantined_here(), before);
    assert_eq!(domain.stats().static_mappings, 0);
}

#[test]
fn a_chunk_never_released_quarantines_the_arena() {
    let _alone = alone();
    let before = quarantined_here();
    let arena = plain(2 << 20, MappingPolicy::PerUse);
    let addr = addr_of(&arena);
    arena.acquire(Order::PAGE).unwrap();
    drop(arena);
    assert!(is_mapped(addr), "a device may reach it");
    assert_eq!(quarantined_here() - before, 2 << 20);
}

#[test]
fn children_get_no_copy() {
    let arena = plain(2 << 20, MappingPolicy::PerUse);
    let vma = pages::vma_of(addr_of(&arena), arena.len()).unwrap();
    assert!(vma.has_flag("dc"), "{vma:?}");
}

#[test]
fn an_arena_larger_than_memory_takes_only_touched_pages() {
    let arena = plain(64 << 30, MappingPolicy::PerUse);
    assert_eq!(arena.stats().frames, 16 << 20);
    let buffer = arena.alloc(1 << 30).unwrap();
    buffer.memory().write_u8(0, 1).unwrap();
    buffer.memory().write_u8(buffer.len() - 1, 1).unwrap();
    let resident = pages::vma_of(addr_of(&arena), arena.len()).unwrap().resident;
    assert!((8192..=4 << 20).contains(&resident), "{resident}");
    let all = arena.alloc(63 << 30).unwrap();
    assert_eq!(all.len(), 63 << 30);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    /// Each buffer is filled with its own byte, and keeps it while others are allocated and freed.
    #[test]
    fn live_buffers_never_overlap(steps in proptest::collection::vec((any::<bool>(), 1usize..200_000), 1..300)) {
        let arena = plain(4 << 20, MappingPolicy::PerUse);
        let mut live: Vec<(u8, Buffer)> = Vec::new();
        for (number, (free, size)) in steps.into_iter().enumerate() {
            if free && !live.is_empty() {
                let (byte, mut buffer) = live.swap_remove(size % live.len());
                prop_assert!(buffer.as_slice().unwrap().iter().all(|have| *have == byte));
            } else if let Ok(mut buffer) = arena.alloc(size) {
                prop_assert!(buffer.len() >= size && buffer.len() - size < 4096);
                let byte = u8::try_from(number % 256).unwrap();
                buffer.as_mut_slice().unwrap().fill(byte);
                live.push((byte, buffer));
            }
            let held: usize = live.iter().map(|(_, buffer)| buffer.len()).sum();
            prop_assert_eq!(arena.stats().frames_in_use, held as u64 / 4096);
        }
        for (byte, mut buffer) in live {
            prop_assert!(buffer.as_slice().unwrap().iter().all(|have| *have == byte));
        }
    }
}

#[test]
fn statistics_print_as_a_table_of_short_lines() {
    let arena = plain(2 << 20, MappingPolicy::Whole);
    let _buffer = arena.alloc(8192).unwrap();
    let text = arena.stats().to_string();
    assert!(text.lines().all(|line| line.len() <= 40), "{text}");
    assert!(text.lines().any(|line| line.split_whitespace().eq(["in", "use", "2"])));
}

fn unmapped(bytes: u64) -> ArenaMemory {
    Arena::builder().size(bytes).source(Source::Plain).build_unmapped().unwrap()
}

fn slots(n: usize) -> Vec<Option<Buffer>> {
    (0..n).map(|_| None).collect()
}

#[test]
fn fill_fills_only_empty_slots_with_distinct_buffers() {
    let memory = unmapped(4 << 20);
    let mut local = memory.local();
    let mut ring = slots(200);
    ring[7] = Some(memory.alloc(8192).unwrap());
    let kept = ring[7].as_ref().unwrap().memory().addr();
    assert_eq!(local.fill(&mut ring), 200);
    assert_eq!(
        (ring[7].as_ref().unwrap().memory().addr(), ring[7].as_ref().unwrap().len()),
        (kept, 8192)
    );
    for (number, slot) in ring.iter_mut().enumerate() {
        slot.as_mut().unwrap().as_mut_slice().unwrap().fill(u8::try_from(number).unwrap());
    }
    for (number, slot) in ring.iter_mut().enumerate() {
        let number = u8::try_from(number).unwrap();
        assert!(slot.as_mut().unwrap().as_slice().unwrap().iter().all(|byte| *byte == number));
    }
    local.free_all(&mut ring);
    assert!(ring.iter().all(Option::is_none));
    drop(local);
    assert_eq!(memory.stats().frames_in_use, 0);
}

#[test]
fn an_exhausted_arena_fills_what_it_can() {
    let memory = unmapped(2 << 20);
    let mut local = memory.local();
    let mut ring = slots(600);
    let mut filled = local.fill(&mut ring);
    assert!(filled > 400 && filled <= 512, "{filled}");
    // One frame per call below the watermark, to the last.
    while let now @ 1.. = local.fill(&mut ring) - filled {
        filled += now;
    }
    assert_eq!((filled, ring.iter().flatten().count()), (512, 512));
    assert!(matches!(local.alloc(), Err(AllocError::Exhausted { .. })));
    let one = ring.iter_mut().find_map(Option::take).unwrap();
    local.free(one);
    assert!(local.alloc().is_ok());
}

#[test]
fn buffers_of_other_arenas_and_sizes_are_freed_to_their_owner() {
    let (memory, other) = (unmapped(2 << 20), unmapped(2 << 20));
    let mut local = memory.local();
    local.free(other.alloc(4096).unwrap());
    local.free(memory.alloc(64 << 10).unwrap());
    assert_eq!(other.stats().frames_in_use, 0);
    drop(local);
    assert_eq!(memory.stats().frames_in_use, 0);
}

#[test]
fn frames_by_address_are_buffers_and_keep_the_arena() {
    let domain = soft();
    assert!(is_gone(|| {
        let memory = unmapped(2 << 20);
        let addr = memory.addr();
        let arena = memory.map_into(&domain).unwrap();
        let mut local = memory.local();
        let mut raw = Vec::new();
        assert_eq!(local.fill_raw(0, |frame| raw.push(frame)), 0);
        assert_eq!(local.fill_raw(200, |frame| raw.push(frame)), 200);
        raw.sort();
        raw.dedup();
        assert_eq!(raw.len(), 200);
        for frame in &raw {
            let offset = frame.addr().get() - addr;
            assert!(offset < 2 << 20 && offset.is_multiple_of(4096));
        }
        // Each form is freed as the other.
        let frame: NonNull<u8> = raw.pop().unwrap();
        // SAFETY: from `fill_raw`, and used nowhere else.
        let buffer =
            unsafe { Buffer::from_raw(&memory, NonNull::slice_from_raw_parts(frame, 4096)) };
        local.free(buffer.unwrap());
        raw.push(local.alloc().unwrap().into_raw().cast());
        // All of it, one below the watermark each time.
        while local.fill_raw(1000, |frame| raw.push(frame)) > 0 {}
        assert_eq!(raw.len(), 512);
        let last = raw.pop().unwrap();
        // SAFETY: from `fill_raw` or `into_raw`, once each.
        raw.into_iter().for_each(|frame| unsafe { local.free_raw(frame) });
        drop((arena, local));
        // SAFETY: as above.
        let last = unsafe { Buffer::from_raw(&memory, NonNull::slice_from_raw_parts(last, 4096)) };
        drop(memory);
        // The share that was lent for it keeps the arena.
        assert!(is_mapped(addr));
        drop(last);
        addr
    }));
}

/// The callback owns the buffers passed to it, also in the call that panics; everything else is
/// free, and nothing keeps the arena.
#[test]
fn a_callback_that_panics_keeps_only_what_it_was_given() {
    for panics_at in [1, 3, 64, 65, 130] {
        assert!(is_gone(|| {
            let memory = unmapped(2 << 20);
            let addr = memory.addr();
            let mut local = memory.local();
            let mut raw = Vec::new();
            let call = std::panic::AssertUnwindSafe(|| {
                local.fill_raw(130, |frame| {
                    raw.push(frame);
                    assert!(raw.len() < panics_at, "the callback panics");
                })
            });
            assert!(std::panic::catch_unwind(call).is_err());
            assert_eq!(raw.len(), panics_at);
            assert_eq!(memory.stats().frames_in_use, panics_at as u64);
            // SAFETY: from `fill_raw`, once each.
            raw.drain(..).for_each(|frame| unsafe { local.free_raw(frame) });
            assert_eq!(memory.stats().frames_in_use, 0);
            assert_eq!(local.fill_raw(400, |frame| raw.push(frame)), 400);
            // SAFETY: as above.
            raw.drain(..).for_each(|frame| unsafe { local.free_raw(frame) });
            addr
        }));
    }
}

#[test]
fn local_buffers_outlive_their_owner_and_keep_the_arena() {
    let domain = soft();
    assert!(is_gone(|| {
        let memory = unmapped(2 << 20);
        let addr = memory.addr();
        let arena = memory.map_into(&domain).unwrap();
        let mut local = memory.local();
        let mut ring = slots(16);
        local.fill(&mut ring);
        let last = local.alloc().unwrap();
        drop((memory, arena));
        std::thread::scope(|scope| {
            scope.spawn(|| ring.drain(..).for_each(drop));
            scope.spawn(move || drop(local));
        });
        let last = domain.map(last, Bidirectional).unwrap().unmap().unwrap();
        assert!(is_mapped(addr));
        drop(last);
        addr
    }));
}

#[test]
fn stress_owners_fill_and_free_each_others_buffers() {
    let memory = unmapped(8 << 20);
    let (send, receive) = std::sync::mpsc::channel::<Buffer>();
    std::thread::scope(|scope| {
        for owner in 1..=3u8 {
            let (memory, send) = (memory.clone(), send.clone());
            scope.spawn(move || {
                let mut local = memory.local();
                for _ in 0..300 {
                    let mut ring = slots(40);
                    local.fill(&mut ring);
                    for buffer in ring.iter_mut().flatten() {
                        buffer.as_mut_slice().unwrap().fill(owner);
                    }
                    for mut buffer in ring.drain(..20).flatten() {
                        assert!(buffer.as_slice().unwrap().iter().all(|byte| *byte == owner));
                        let _ = send.send(buffer);
                    }
                    local.free_all(&mut ring);
                }
            });
        }
        drop(send);
        let mut local = memory.local();
        for buffer in receive {
            local.free(buffer);
        }
    });
    assert_eq!(memory.stats().frames_in_use, 0);
}
