//! The table that finds a chunk by its address.

use super::super::directory::{Chunk, Chunks, Directory};
use crate::frame::{Frame, Order};
use std::sync::atomic::{AtomicBool, Ordering};

const PIECE: u64 = 2 << 20;

fn run(offset: u64, order: Order) -> (Frame, Order) {
    (Frame::new(u32::try_from(offset / Frame::BYTES).unwrap()).unwrap(), order)
}

fn enter(chunks: &mut Chunks, directory: &Directory, offset: u64, order: Order) {
    chunks.enter(directory, run(offset, order), 64, true);
}

fn leave_all(chunks: &mut Chunks, directory: &Directory) -> usize {
    core::iter::from_fn(|| chunks.leave_next(directory, None, |_| true)).count()
}

/// Where the chunk starts that is found at an offset.
fn found(directory: &Directory, offset: u64) -> Option<u64> {
    directory.find(offset).map(Chunk::offset)
}

#[test]
fn small_chunks_and_large_ones_take_turns_at_one_place() {
    let (mut chunks, directory) = (Chunks::default(), Directory::new(4 * PIECE));
    for _ in 0..3 {
        enter(&mut chunks, &directory, PIECE, Order::new(0).unwrap());
        enter(&mut chunks, &directory, PIECE + 0x4000, Order::new(2).unwrap());
        assert_eq!(found(&directory, PIECE - 1), None, "the piece before");
        assert_eq!(found(&directory, PIECE + 0xfff), Some(PIECE));
        assert_eq!(found(&directory, PIECE + 0x1000), None, "between the two");
        assert_eq!(found(&directory, PIECE + 0x7fff), Some(PIECE + 0x4000));
        assert_eq!(found(&directory, PIECE + 0x8000), None, "after them");
        assert_eq!(leave_all(&mut chunks, &directory), 2);
        assert_eq!(found(&directory, PIECE), None);

        enter(&mut chunks, &directory, PIECE, Order::HUGE);
        enter(&mut chunks, &directory, 2 * PIECE, Order::HUGE);
        assert_eq!(found(&directory, PIECE - 1), None, "the piece before");
        for at in [PIECE, PIECE + 0x1000, 2 * PIECE - 1] {
            assert_eq!(found(&directory, at), Some(PIECE));
        }
        assert_eq!(found(&directory, 3 * PIECE - 1), Some(2 * PIECE));
        assert_eq!(found(&directory, 3 * PIECE), None, "the piece after");
        assert_eq!(leave_all(&mut chunks, &directory), 2);
        assert_eq!(found(&directory, PIECE), None);
    }
}

#[test]
fn nothing_is_found_beyond_the_span() {
    let (mut chunks, directory) = (Chunks::default(), Directory::new(PIECE + 1));
    enter(&mut chunks, &directory, PIECE, Order::new(0).unwrap());
    assert_eq!(found(&directory, PIECE), Some(PIECE), "the last word is for a part of its 2 MiB");
    for at in [2 * PIECE, 1 << 44, u64::MAX - 1, u64::MAX] {
        assert_eq!(found(&directory, at), None);
    }
}

#[test]
fn stress_look_ups_beside_changes_find_a_chunk_of_that_place_or_none() {
    let (mut chunks, directory) = (Chunks::default(), Directory::new(2 * PIECE));
    let (met, at) = (AtomicBool::new(false), PIECE + 0x3000);
    crate::testing::scope(|threads| {
        let (directory, met) = (&directory, &met);
        threads.spawn(move || {
            let (mut none, mut large, mut small) = (0, 0, 0);
            while none.min(large).min(small) < 1000 {
                match found(directory, at) {
                    None => none += 1,
                    Some(PIECE) => large += 1,
                    start => {
                        assert_eq!(start, Some(at), "a chunk of another place");
                        small += 1;
                    }
                }
            }
            met.store(true, Ordering::Relaxed);
        });
        // Ends if the other thread fails, too.
        for _ in 0..1_000_000 {
            if met.load(Ordering::Relaxed) {
                return;
            }
            enter(&mut chunks, directory, at, Order::new(0).unwrap());
            leave_all(&mut chunks, directory);
            enter(&mut chunks, directory, PIECE, Order::HUGE);
            leave_all(&mut chunks, directory);
        }
        panic!("the look-ups have not met all three");
    });
}
