//! Frees that are far apart bypass the magazine.

use super::*;
use crate::testing::Random;

/// Allocates `count` frames and frees them in random order; calls `step` after each free.
fn free_at_random(zone: &Zone, local: &mut Local<&Zone>, count: usize, mut step: impl FnMut(&Local<&Zone>)) {
    let mut frames: Vec<_> = (0..count).map(|_| local.alloc(Order::PAGE).unwrap()).collect();
    let mut random = Random::new(1);
    while !frames.is_empty() {
        let freed = frames.swap_remove(random.below(frames.len()));
        local.free(freed, Order::PAGE).unwrap();
        let refused = Err(FrameError::DoubleFree { frame: freed });
        assert_eq!(local.free(freed, Order::PAGE), refused);
        step(local);
    }
    assert_eq!(zone.taken(), local.held().into());
}

#[test]
fn a_random_order_bypasses_the_magazine_and_an_ordered_one_returns_to_it() {
    let zone = Zone::new(64 * 512).unwrap();
    let mut local = zone.local();
    let mut held = 0;
    free_at_random(&zone, &mut local, zone.frames() as usize, |local| held = held.max(local.held()));
    assert!(local.held() < held / 4, "{} of {held}", local.held());
    // An ordered free of a word is cached from its third frame on.
    let frames: Vec<_> = (0..640).map(|_| local.alloc(Order::PAGE).unwrap()).collect();
    let before = local.held();
    frames.into_iter().for_each(|frame| local.free(frame, Order::PAGE).unwrap());
    assert!(local.held() >= before + 600, "{} after {before}", local.held());
    drop(local);
    assert_eq!((zone.taken(), zone.stats().in_use, zone.whole_regions()), (0, 0, 64));
}

#[test]
fn words_that_share_a_way_end_in_the_zone_too() {
    // More words than ways: frees evict each other's words before the magazine is full.
    let zone = Zone::new(2048 * 512).unwrap();
    let mut local = zone.local();
    let mut frames: Vec<_> = (0..zone.frames()).map(|_| zone.alloc(Order::PAGE).unwrap()).collect();
    let mut random = Random::new(2);
    for freed in 0..60_000_u32 {
        let frame = frames.swap_remove(random.below(frames.len()));
        local.free(frame, Order::PAGE).unwrap();
        assert!(local.held() <= 8192, "{} held after {freed} frees", local.held());
    }
    assert!(local.held() < 2048, "{} held", local.held());
    assert_eq!(zone.taken(), frames.len() as u64 + u64::from(local.held()));
}
