//! Without memory for what follows a caller's number, a call fails and the process goes on.

use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::frame::{FrameError, Order, Zone};
use pinfold_core::iova::{IovaError, IovaSpace};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Limited;

// Of the thread, since the one that runs the tests allocates at any time.
thread_local! {
    /// Larger ones fail.
    static LARGEST: Cell<usize> = const { Cell::new(usize::MAX) };
    /// The number of further allocations that succeed.
    static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
}

// SAFETY: every call is forwarded to the system's allocator, or fails.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let left = LEFT.get();
        let fails = layout.size() > LARGEST.get() || left == 0;
        if !fails && left != u64::MAX {
            LEFT.set(left - 1);
        }
        // SAFETY: the caller upholds the same contract.
        if fails { std::ptr::null_mut() } else { unsafe { System.alloc(layout) } }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// Calls `f` while no more than `largest` bytes can be allocated at once, and `left` times.
fn with<R>(largest: usize, left: u64, f: impl FnOnce() -> R) -> R {
    LARGEST.set(largest);
    LEFT.set(left);
    let result = f();
    LARGEST.set(usize::MAX);
    LEFT.set(u64::MAX);
    result
}

#[test]
fn what_follows_a_callers_number_is_refused_without_memory() {
    // Each allocation of a zone in turn: two of the map, four of the hints, owners' slots, and three
    // of the limits. The last is the zone itself, of a fixed size.
    for left in 0..10 {
        let refused = with(usize::MAX, left, || Zone::new(1 << 22).err());
        assert!(
            matches!(refused, Some(FrameError::NoMemory { bytes }) if bytes > 0),
            "{left}: {refused:?}"
        );
    }
    with(usize::MAX, 11, || Zone::new(1 << 22)).unwrap();
    let bytes = with(1 << 20, u64::MAX, || Zone::new(Zone::MAX_FRAMES).err());
    let bytes = bytes.map(|error| error.to_string()).unwrap();
    assert!(bytes.starts_with("no memory for 33554496 bytes"), "{bytes}");

    // Lists of frames, which are scattered, so that each takes a place.
    let zone = Zone::new(1 << 15).unwrap();
    let run = zone.alloc_run(1 << 15, 1).unwrap();
    for index in (0..1 << 15).step_by(64) {
        zone.free_run(pinfold_core::frame::Frame::new(run.index() + index).unwrap(), 1).unwrap();
    }
    let mut local = zone.local();
    let mut slots = vec![None; 400];
    let before = zone.stats();
    let got = with(usize::MAX, 0, || local.fill_all(&mut slots));
    assert!(matches!(got, Err(FrameError::NoMemory { .. })), "{got:?}");
    assert!(slots.iter().all(Option::is_none));
    let after = zone.stats();
    assert_eq!((after.in_use, after.held), (before.in_use, before.held));
    let list = with(usize::MAX, 0, || local.take_list(400));
    assert_eq!(list.len(), 12, "as many as need no memory");
    drop(list);
    assert_eq!(local.fill_all(&mut slots), Ok(()));
    assert!(local.alloc(Order::PAGE).is_ok());

    // Address spaces: their nodes and maps.
    for left in 0..2 {
        let refused = with(usize::MAX, left, || IovaSpace::new(48).err());
        assert!(matches!(refused, Some(IovaError::NoMemory { .. })), "{left}: {refused:?}");
    }
    let space = IovaSpace::new(48).unwrap();
    let range = IovaRange::new(Iova::new(1 << 40), 4096).unwrap();
    let refused = with(usize::MAX, 0, || space.alloc_at(range));
    assert!(refused.is_ok() || matches!(refused, Err(IovaError::NoMemory { .. })), "{refused:?}");
}
