//! Owners' handles: bulk, caching, lifetimes.

use super::*;
use pinfold_core::access::Bidirectional;

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
