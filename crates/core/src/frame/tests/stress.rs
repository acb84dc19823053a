//! With threads.

use super::*;
use crate::testing::Random;

/// Each frame carries who owns it; an owner that finds another's mark has been given what was not
/// free.
#[test]
fn stress_no_frame_has_two_owners() {
    use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
    let zone = Zone::with_watermarks(512 * 64 + 100, Watermarks::NONE).unwrap();
    let owners: Vec<AtomicU8> = (0..zone.frames()).map(|_| AtomicU8::new(0)).collect();
    let mark = |first: Frame, order: Order, from: u8, to: u8| {
        for index in covered(first, order.frames()) {
            assert_eq!(owners[index as usize].swap(to, Relaxed), from);
        }
    };
    crate::testing::scope(|scope| {
        for me in 1..=8_u8 {
            let (zone, mark) = (&zone, &mark);
            scope.spawn(move || {
                let mut local = zone.local();
                let mut mine: Vec<(Frame, Order)> = Vec::new();
                let mut random = Random::new(me.into());
                for step in 0..20_000 {
                    let order = order([0, 0, 0, 0, 0, 0, 1, 3, 6, 7, 8, 9][random.below(12)]);
                    let shared = me % 2 == 0 && step % 2 == 0;
                    if random.below(5) < 3 && mine.len() < 400 {
                        let got = if shared { zone.alloc(order) } else { local.alloc(order) };
                        if let Ok(frame) = got {
                            mark(frame, order, 0, me);
                            mine.push((frame, order));
                        }
                    } else if !mine.is_empty() {
                        let (frame, order) = mine.swap_remove(random.below(mine.len()));
                        mark(frame, order, me, 0);
                        let freed =
                            if shared { zone.free(frame, order) } else { local.free(frame, order) };
                        freed.unwrap();
                    }
                }
                for (frame, order) in mine {
                    mark(frame, order, me, 0);
                    zone.free(frame, order).unwrap();
                }
            });
        }
    });
    assert_eq!((zone.taken(), zone.stats().in_use), (0, 0));
    for _ in 0..64 {
        zone.alloc(Order::HUGE).unwrap();
    }
    assert_eq!(zone.take_list(1000).len(), 100);
}
