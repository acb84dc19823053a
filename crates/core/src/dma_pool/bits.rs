//! Words of bits, one for each block of a row.

/// Returns a word whose lowest `count` bits are set, for 1 to 64.
#[inline(always)]
pub(super) fn lowest(count: usize) -> u64 {
    // Modulo 64, as the processors shift.
    u64::MAX >> (count.wrapping_neg() % 64)
}

/// Clears the lowest `most` set bits of a word.
pub(super) fn all_but_lowest(mut word: u64, most: usize) -> u64 {
    // First: a count takes 20 instructions without POPCNT.
    if most >= 64 || most >= word.count_ones() as usize {
        return 0;
    }
    for _ in 0..most {
        word &= word.wrapping_sub(1);
    }
    word
}
