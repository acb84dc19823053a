//! Loops over consecutive entries of one table page: the inside of every map and clear.

use core::sync::atomic::{AtomicU64, Ordering};

/// Entries that are checked without a branch between them: one cache line.
const BLOCK: usize = 8;

/// Returns how many entries from the first on are `wanted`.
#[inline]
pub(super) fn leading(entries: &[AtomicU64], wanted: impl Fn(u64) -> bool) -> usize {
    let wanted = |entry: &AtomicU64| wanted(entry.load(Ordering::Acquire));
    if let [entry] = entries {
        return usize::from(wanted(entry));
    }
    let blocks = entries.chunks_exact(BLOCK);
    let whole = blocks.take_while(|block| block.iter().fold(true, |all, entry| all & wanted(entry))).count();
    let checked = whole * BLOCK;
    checked + entries.iter().skip(checked).take_while(|entry| wanted(entry)).count()
}

/// Writes `entry(0)`, `entry(1)`, ... What was written before is visible to a walker that finds one of them.
#[inline]
pub(super) fn write(entries: &[AtomicU64], entry: impl Fn(u64) -> u64) {
    for (number, slot) in (0..).zip(entries) {
        slot.store(entry(number), Ordering::Release);
    }
}

/// Writes 0 to all of them.
#[inline]
pub(super) fn clear(entries: &[AtomicU64]) {
    for slot in entries {
        slot.store(0, Ordering::Release);
    }
}
