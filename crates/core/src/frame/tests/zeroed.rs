//! Zeroed memory.

use super::*;
use crate::mem::DmaMemory;

#[test]
fn only_requested_frames_are_zeroed() {
    let mut bytes = vec![u64::MAX; 16 * 512];
    let base = std::ptr::NonNull::new(bytes.as_mut_ptr().cast::<u8>()).unwrap();
    // SAFETY: `bytes` stays until the end of the test and is reached through the value only.
    let memory = unsafe { DmaMemory::from_raw(base, 16 * 4096) };
    let zeroes = |frame: Frame| {
        let at = frame.index() as usize * 4096;
        (0..512).filter(|i| memory.read_u64(at + i * 8) == Ok(0)).count()
    };
    let zone = Zone::new(512).unwrap();
    let kept = zone.alloc(Order::PAGE).unwrap();
    let mut slots = [None, Some(kept), None, None];
    assert_eq!(zone.fill_zeroed(&mut slots, &memory), Ok(4));
    assert_eq!(slots.map(|slot| zeroes(slot.unwrap())), [512, 0, 512, 512]);
    let run = zone.alloc_zeroed(order(2), &memory).unwrap();
    assert_eq!((0..4).map(|i| zeroes(frame(run.index() + i))).sum::<usize>(), 2048);
    assert_eq!((zone.taken(), (0..16).map(|i| zeroes(frame(i))).sum::<usize>()), (8, 7 * 512));
    // 16 frames of memory for 512 of the zone: what is outside is refused, and freed.
    let mut local = zone.local();
    let mut many = [None; 20];
    let refused = local.fill_zeroed(&mut many, &memory);
    assert!(matches!(refused, Err(ZeroError::Outside { frame, .. }) if frame.index() == 16));
    assert_eq!(many.iter().flatten().count(), 8);
    drop(local);
    assert_eq!(zone.taken(), 16);
    assert!(matches!(zone.alloc_zeroed(Order::PAGE, &memory), Err(ZeroError::Outside { .. })));
    assert_eq!((zone.taken(), zone.stats().in_use), (16, 16));
}
