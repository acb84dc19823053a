//! Frees that are far apart bypass the magazine.

use super::*;
use crate::testing::Random;

/// Allocates `count` frames and frees them in random order; calls `step` after each free.
fn free_at_random(
    zone: &Zone,
    local: &mut Local<&Zone>,
    count: usize,
    mut step: impl FnMut(&Local<&Zone>),
) {
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
    free_at_random(&zone, &mut local, zone.frames() as usize, |local| {
        held = held.max(local.held())
    });
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

/// Frees three frames of each of `words` words, one word after another, into the empty magazine of
/// a new owner with a limit of 1,600 frames. Returns the owner and the first frame behind the
/// words, which are all allocated.
fn owner_after_scattered_frees(zone: &Zone, words: u32) -> (Local<&Zone>, u32) {
    assert_eq!(zone.frames() / 32, 1600);
    let first = zone.alloc_run(200 * 64, 64).unwrap().index();
    let mut local = zone.local();
    for index in (0..3).flat_map(|i| (0..words).map(move |word| first + 64 * word + i)) {
        local.free(frame(index), Order::PAGE).unwrap();
    }
    (local, first + 64 * words)
}

#[test]
fn a_magazine_with_sixteen_frames_a_word_when_full_is_used() {
    let zone = Zone::new(100 * 512).unwrap();
    let (local, _) = owner_after_scattered_frees(&zone, 100);
    assert_eq!(local.held(), 300);
    drop(local);
    let zone = Zone::new(100 * 512).unwrap();
    let (local, _) = owner_after_scattered_frees(&zone, 101);
    assert_eq!(local.held(), 0);
}

#[test]
fn the_third_of_neighbouring_frees_ends_the_bypass() {
    let zone = Zone::new(100 * 512).unwrap();
    let (mut local, next) = owner_after_scattered_frees(&zone, 101);
    let free = |local: &mut Local<&Zone>, index| {
        local.free(frame(index), Order::PAGE).unwrap();
        local.held()
    };
    // Two of a word do not end it, however often.
    for word in 1..40 {
        assert_eq!([0, 1].map(|i| free(&mut local, next + 64 * word + i)), [0; 2], "word {word}");
    }
    assert_eq!([0, 1, 2, 3, 4].map(|i| free(&mut local, next + i)), [0, 0, 0, 1, 2]);
}

#[test]
fn sixteen_frames_of_a_word_freed_by_one_call_end_the_bypass() {
    let zone = Zone::new(100 * 512).unwrap();
    let (mut local, next) = owner_after_scattered_frees(&zone, 101);
    for (index, count, held) in [(next, 2, 0), (next + 64, 15, 0), (next + 128, 16, 16)] {
        let mut slots: Vec<_> = covered(frame(index), count).map(Frame::new).collect();
        assert_eq!(local.free_bulk(&mut slots), Ok(count as usize));
        assert_eq!(local.held(), held, "{count} frames");
    }
}

/// Words that share a way with those freed before evict 1, 2 or 3 frames each.
#[test]
fn the_64th_eviction_of_two_frames_or_fewer_begins_the_bypass() {
    for (evicted, dense, bypasses) in
        [(1, None, true), (2, None, true), (3, None, false), (2, Some(40), false)]
    {
        let zone = Zone::new(1024 * 512).unwrap();
        let first = zone.alloc_run(5000 * 64, 64).unwrap().index();
        let mut local = zone.local();
        for word in 0..100 {
            let count = if Some(word) == dense { 3 } else { evicted };
            for index in covered(frame(first + 64 * word), count) {
                local.free(frame(index), Order::PAGE).unwrap();
            }
        }
        for word in 0..64 {
            assert!(local.held() > 64, "before eviction {word} of {evicted}");
            local.free(frame(first + 64 * (4096 + word)), Order::PAGE).unwrap();
        }
        assert_eq!(local.held() == 0, bypasses, "{evicted} evicted, {dense:?}");
    }
}
