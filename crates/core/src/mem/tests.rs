//! Bounds and alignment checks, and agreement with slices and between the two implementations.

use super::*;
use proptest::prelude::*;

fn over(bytes: &mut [u64]) -> DmaMemory<'_> {
    let base = NonNull::new(bytes.as_mut_ptr().cast::<u8>()).unwrap();
    // SAFETY: while the value is alive, the tests access `bytes` through it only.
    unsafe { DmaMemory::from_raw(base, bytes.len() * 8) }
}

#[test]
fn accesses_outside_or_misaligned_are_refused() {
    let mut bytes = [0u64; 4];
    let mem = over(&mut bytes);
    assert!(mem.read_u64(24).is_ok());
    assert_eq!(mem.read_u64(25), Err(AccessError { offset: 25, len: 8, size: 32, aligned: false }));
    assert!(mem.read_u8(32).is_err());
    assert!(mem.write_u32(usize::MAX - 3, 0).is_err());
    assert!(mem.part(32, 0).is_ok());
    assert!(mem.part(33, 0).is_err());
}

proptest! {
    #[test]
    fn copies_agree_with_slices(offset in 0usize..40, data in proptest::collection::vec(any::<u8>(), 0..80)) {
        let mut bytes = [0x5555_5555_5555_5555u64; 8];
        let mem = over(&mut bytes);
        let mut model = [0x55u8; 64];
        let fits = offset + data.len() <= 64;
        prop_assert_eq!(mem.copy_from_slice(offset, &data).is_ok(), fits);
        if fits {
            model[offset..offset + data.len()].copy_from_slice(&data);
        }
        let mut back = [0u8; 64];
        mem.copy_to_slice(0, &mut back).unwrap();
        prop_assert_eq!(back, model);
        if fits {
            mem.fill(offset, data.len(), 7).unwrap();
            model[offset..offset + data.len()].fill(7);
            let mut part = vec![0; 64 - offset];
            mem.copy_to_slice(offset, &mut part).unwrap();
            prop_assert_eq!(&part[..], &model[offset..]);
        }
    }
}

/// The bytes that one implementation has written and read.
#[derive(PartialEq, Eq, Debug)]
struct Seen {
    memory: [u64; 8],
    copy: Vec<u8>,
    scalars: (u8, u16, u32, u64),
}

macro_rules! run {
    ($implementation:ident, $at:expr, $data:expr, $fill:expr) => {{
        let mut memory = [0x5555_5555_5555_5555u64; 8];
        let base = NonNull::from(&mut memory).cast::<u8>();
        let at = |offset: usize| {
            // SAFETY: the offsets below are less than the 64 bytes of `memory`.
            unsafe { base.add(offset) }
        };
        let mut copy = vec![0; 64 - $at];
        // SAFETY: at most 24 bytes from less than 40.
        unsafe { $implementation::copy_in(at($at), $data) };
        // SAFETY: at most 24 bytes from less than 40.
        unsafe { $implementation::fill(at(63 - $at), $data.len().min($at), $fill) };
        // SAFETY: the rest of the memory.
        unsafe { $implementation::copy_out(at($at), &mut copy) };
        let word = $at & !7;
        let scalars = (
            // SAFETY: inside, and a byte is always aligned.
            unsafe { $implementation::read_u8(at($at)) },
            // SAFETY: inside, at a multiple of 8.
            unsafe { $implementation::read_u16(at(word)) },
            // SAFETY: inside, at a multiple of 8.
            unsafe { $implementation::read_u32(at(word)) },
            // SAFETY: inside, at a multiple of 8.
            unsafe { $implementation::read_u64(at(word)) },
        );
        // SAFETY: inside, and a byte is always aligned.
        unsafe { $implementation::write_u8(at(word + 1), 0xa1) };
        // SAFETY: inside, at a multiple of 2.
        unsafe { $implementation::write_u16(at(word + 2), 0xb1b2) };
        // SAFETY: inside, at a multiple of 4.
        unsafe { $implementation::write_u32(at(word + 4), 0xc1c2_c3c4) };
        // SAFETY: inside, at a multiple of 8.
        unsafe { $implementation::write_u64(at(word + 8), 0xd1d2_d3d4_d5d6_d7d8) };
        Seen { memory, copy, scalars }
    }};
}

proptest! {
    #[test]
    fn machine_accesses_agree_with_portable_ones(
        at in 0usize..40,
        data in proptest::collection::vec(any::<u8>(), 0..24),
        fill in any::<u8>(),
    ) {
        prop_assert_eq!(run!(bytes, at, &data, fill), run!(portable, at, &data, fill));
    }
}

#[test]
fn large_copies_and_fills_agree_with_slices() {
    let sizes: &[usize] =
        if cfg!(miri) { &[1, 300] } else { &[1, 63, 64, 65, 511, 4096, 70_001, 3 << 20] };
    for &size in sizes {
        for skew in [0, 1, 7] {
            let mut words = vec![0u64; size / 8 + 3];
            let mem = over(&mut words);
            let data: Vec<u8> = (0..size).map(|i| (i * 31 + i / 251).to_le_bytes()[0]).collect();
            let mut back = vec![0; size];
            mem.copy_from_slice(skew, &data).unwrap();
            mem.copy_to_slice(skew, &mut back).unwrap();
            assert!(back == data, "{size} bytes at {skew}");
            mem.fill(skew, size, 0x3c).unwrap();
            mem.copy_to_slice(skew, &mut back).unwrap();
            assert!(back.iter().all(|&byte| byte == 0x3c), "{size} bytes at {skew}");
            assert!(skew == 0 || mem.read_u8(skew - 1) == Ok(0), "the byte before");
            assert_eq!(mem.read_u8(skew + size), Ok(0), "the byte after");
        }
    }
}

#[test]
fn a_touched_byte_keeps_its_value() {
    let mut words = [0x0102_0304_0506_0708u64; 1];
    let mem = over(&mut words);
    assert_eq!(mem.touch(7), Ok(()));
    assert_eq!(mem.touch(8), Err(AccessError { offset: 8, len: 1, size: 8, aligned: true }));
    assert_eq!(words, [0x0102_0304_0506_0708]);
}
