//! Threads that access the same bytes concurrently, by every operation and in every width.
//!
//! Under Miri and ThreadSanitizer these run on the portable accesses, otherwise on the machine's.

use super::DmaMemory;
use crate::testing::scope;
use core::ptr::NonNull;

const WORDS: usize = 8;
const BYTES: usize = WORDS * 8;
const STEPS: usize = if cfg!(miri) { 40 } else { 20_000 };
const ROUNDS: u32 = if cfg!(miri) { 20 } else { 2_000 };

/// Runs `act` over zeroed memory of `WORDS` words.
fn with_memory(act: impl FnOnce(DmaMemory<'_>)) {
    let mut words = [0u64; WORDS];
    let base = NonNull::from(&mut words).cast();
    // SAFETY: `words` is not used again before `act` has returned, so only the `DmaMemory` accesses
    // it until then.
    act(unsafe { DmaMemory::from_raw(base, BYTES) });
}

/// Whether every byte was written by one of the writers, or never.
fn are_known(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| matches!(byte, 0 | 0x11 | 0x22))
}

fn write_all_ways(memory: DmaMemory<'_>, byte: u8, salt: usize) {
    for step in 0..STEPS {
        let at = (step.wrapping_mul(7) + salt) % WORDS * 8;
        match step % 7 {
            0 => memory.write_u8(at + step % 8, byte).unwrap(),
            1 => memory.write_u16(at + step % 4 * 2, u16::from_ne_bytes([byte; 2])).unwrap(),
            2 => memory.write_u32(at + step % 2 * 4, u32::from_ne_bytes([byte; 4])).unwrap(),
            3 => memory.write_u64(at, u64::from_ne_bytes([byte; 8])).unwrap(),
            4 => memory.copy_from_slice(step % 13, &[byte; BYTES - 13]).unwrap(),
            5 => memory.fill(step % 13, BYTES - 13, byte).unwrap(),
            _ => memory.store_release_u32(at, u32::from_ne_bytes([byte; 4])).unwrap(),
        }
    }
}

fn read_all_ways(memory: DmaMemory<'_>) {
    let mut copy = [0; BYTES - 13];
    for step in 0..STEPS {
        let at = step.wrapping_mul(5) % WORDS * 8;
        let known = match step % 6 {
            0 => are_known(&[memory.read_u8(at + step % 8).unwrap()]),
            1 => are_known(&memory.read_u16(at + step % 4 * 2).unwrap().to_ne_bytes()),
            2 => are_known(&memory.read_u32(at + step % 2 * 4).unwrap().to_ne_bytes()),
            3 => are_known(&memory.read_u64(at).unwrap().to_ne_bytes()),
            4 => are_known(&memory.load_acquire_u32(at).unwrap().to_ne_bytes()),
            _ => {
                memory.copy_to_slice(step % 13, &mut copy).unwrap();
                are_known(&copy)
            }
        };
        assert!(known, "step {step} read a byte that no thread wrote");
    }
}

#[test]
fn stress_all_widths_at_once() {
    with_memory(|memory| {
        scope(|crew| {
            crew.spawn(move || write_all_ways(memory, 0x11, 0));
            crew.spawn(move || write_all_ways(memory, 0x22, 3));
            crew.spawn(move || read_all_ways(memory));
        });
    });
}

#[test]
fn stress_an_aligned_scalar_is_not_torn() {
    with_memory(|memory| {
        scope(|crew| {
            for byte in [0x11, 0x22] {
                crew.spawn(move || {
                    for _ in 0..STEPS {
                        memory.write_u64(0, u64::from_ne_bytes([byte; 8])).unwrap();
                        memory.write_u32(8, u32::from_ne_bytes([byte; 4])).unwrap();
                        memory.write_u16(16, u16::from_ne_bytes([byte; 2])).unwrap();
                    }
                });
            }
            for _ in 0..STEPS {
                let long = memory.read_u64(0).unwrap().to_ne_bytes();
                let int = memory.read_u32(8).unwrap().to_ne_bytes();
                let short = memory.read_u16(16).unwrap().to_ne_bytes();
                assert!(long == [long[0]; 8] && int == [int[0]; 4] && short == [short[0]; 2]);
            }
        });
    });
}

#[test]
fn stress_writes_before_a_release_are_seen_after_the_acquire() {
    with_memory(|memory| {
        scope(|crew| {
            crew.spawn(move || {
                for round in 1..=ROUNDS {
                    while memory.load_acquire_u32(4).unwrap() != round - 1 {
                        std::thread::yield_now();
                    }
                    memory.copy_from_slice(8, &[round.to_le_bytes()[0]; 24]).unwrap();
                    memory.store_release_u32(0, round).unwrap();
                }
            });
            let mut seen = [0; 24];
            for round in 1..=ROUNDS {
                while memory.load_acquire_u32(0).unwrap() != round {
                    std::thread::yield_now();
                }
                memory.copy_to_slice(8, &mut seen).unwrap();
                assert_eq!(seen, [round.to_le_bytes()[0]; 24]);
                memory.store_release_u32(4, round).unwrap();
            }
        });
    });
}
