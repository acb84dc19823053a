//! Loops over consecutive entries of one table page: the inside of every map and clear.

use core::sync::atomic::{AtomicU64, Ordering};

/// Entries that a loop handles in one step: one cache line.
const BLOCK: usize = 8;

/// Returns how many entries from the first on are `wanted`, which is true of any entry that has all
/// bits of a wanted one.
#[inline(always)]
pub(super) fn leading(entries: &[AtomicU64], wanted: impl Fn(u64) -> bool) -> usize {
    match entries {
        [entry] => usize::from(wanted(entry.load(Ordering::Acquire))),
        _ => leading_many(entries, wanted),
    }
}

#[inline(never)]
fn leading_many(entries: &[AtomicU64], wanted: impl Fn(u64) -> bool) -> usize {
    let one = |entry: &AtomicU64| wanted(entry.load(Ordering::Acquire));
    // A test that holds for the bits that all entries have holds for each: one test, where they are
    // leaves of one mapping.
    let common = |block: &[AtomicU64; BLOCK]| {
        block.iter().fold(u64::MAX, |bits, entry| bits & entry.load(Ordering::Acquire))
    };
    count(entries, |block| wanted(common(block)) || block.iter().all(one), one)
}

/// Returns how many entries from the first on are 0.
#[inline]
pub(super) fn leading_zeros(entries: &[AtomicU64]) -> usize {
    let load = |entry: &AtomicU64| entry.load(Ordering::Acquire);
    let empty =
        |block: &[AtomicU64; BLOCK]| block.iter().fold(0, |any, entry| any | load(entry)) == 0;
    count(entries, empty, |entry| load(entry) == 0)
}

/// Returns how many entries from the first on are wanted, by whole blocks as long as all of one
/// are.
#[inline]
fn count(
    entries: &[AtomicU64],
    all: impl Fn(&[AtomicU64; BLOCK]) -> bool,
    one: impl Fn(&AtomicU64) -> bool,
) -> usize {
    if let [entry] = entries {
        return usize::from(one(entry));
    }
    let (blocks, _) = entries.as_chunks();
    let counted = blocks.iter().take_while(|block| all(block)).count() * BLOCK;
    counted + entries.iter().skip(counted).take_while(|entry| one(entry)).count()
}

/// Writes `first`, `first + step`, ... Earlier stores are visible to a walker that finds one of
/// them.
#[inline(always)]
pub(super) fn write(entries: &[AtomicU64], first: u64, step: u64) {
    match entries {
        [entry] => entry.store(first, Ordering::Release),
        _ => write_many(entries, first, step),
    }
}

// Plain loops: a closure that both share is not inlined in every build, and a call per entry takes
// longer than all the rest.
#[inline(never)]
fn write_many(entries: &[AtomicU64], first: u64, step: u64) {
    let (blocks, rest) = entries.as_chunks::<BLOCK>();
    let mut next = first;
    for block in blocks {
        for entry in block {
            entry.store(next, Ordering::Release);
            next = next.wrapping_add(step);
        }
    }
    for entry in rest {
        entry.store(next, Ordering::Release);
        next = next.wrapping_add(step);
    }
}

/// Writes 0 to all of them.
#[inline(always)]
pub(super) fn clear(entries: &[AtomicU64]) {
    match entries {
        [entry] => entry.store(0, Ordering::Release),
        _ => clear_many(entries),
    }
}

#[inline(never)]
fn clear_many(entries: &[AtomicU64]) {
    let (blocks, rest) = entries.as_chunks::<BLOCK>();
    for block in blocks {
        for entry in block {
            entry.store(0, Ordering::Release);
        }
    }
    for entry in rest {
        entry.store(0, Ordering::Release);
    }
}
