//! [`Claim`]: a process-wide table of the users of memory, across all domains.
//!
//! A device reaches memory until its mapping has ended in its own domain. If two owners had the
//! same bytes, in unrelated domains, the first could free them while the second's device still
//! reaches them. So each arena and each [`OwnedMemory`](super::OwnedMemory) claims its bytes here
//! before it exists, until the memory is returned: quarantined memory stays claimed. Memory that is
//! shared between domains has one owner, which is mapped into each.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The purpose of claimed bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClaimedFor {
    /// An arena.
    Arena,
    /// [`OwnedMemory`](super::OwnedMemory).
    Owned,
    /// [Joint](super::OwnedMemory::joint) memory, which may be claimed again as the same range.
    Registration,
    /// The blocks of a pool.
    Pool,
}

impl fmt::Display for ClaimedFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Arena => "are an arena's",
            Self::Owned => "are owned memory",
            Self::Registration => "are registered",
            Self::Pool => "are a pool's",
        })
    }
}

/// Memory that is in use by another owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "cannot take {len:#x} bytes at {addr:#x}: {other_len:#x} bytes at {other:#x} {by} already; end that use first, or \
     map that memory into the other domain as well"
)]
pub struct InUse {
    /// The requested address.
    pub addr: usize,
    /// The requested length in bytes.
    pub len: usize,
    /// The address of the memory in use.
    pub other: usize,
    /// Its length in bytes.
    pub other_len: usize,
    /// Its user.
    pub by: ClaimedFor,
}

/// The claims of the process. Those of one map do not overlap.
struct Claims {
    /// The memory of arenas and owners, by its first address.
    memory: BTreeMap<usize, Entry>,
    /// The memory of pools, by its first address: its end. It may lie in memory of the other map.
    pools: BTreeMap<usize, usize>,
}

struct Entry {
    end: usize,
    by: ClaimedFor,
    /// More than one for a registration only.
    claims: usize,
}

static CLAIMS: Mutex<Claims> =
    Mutex::new(Claims { memory: BTreeMap::new(), pools: BTreeMap::new() });

/// Locks the table, which a panic while the lock was held has left consistent.
fn claims() -> MutexGuard<'static, Claims> {
    CLAIMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of this process that one owner uses until the value is dropped.
#[derive(Debug)]
pub struct Claim {
    start: usize,
    by: ClaimedFor,
}

impl Claim {
    /// Claims memory for a new owner.
    ///
    /// # Errors
    /// [`InUse`]: it overlaps with memory of another, and is not the same registration.
    pub(super) fn memory(range: Range<usize>, by: ClaimedFor) -> Result<Self, InUse> {
        let Range { start, end } = range;
        let Claims { memory, pools } = &mut *claims();
        if let Some((other, entry)) = overlapping(memory, &range, |entry| entry.end) {
            let same = (other, entry.end) == (start, end);
            if !same || by != ClaimedFor::Registration || entry.by != by {
                return Err(in_use(&range, other..entry.end, entry.by));
            }
            if let Some(entry) = memory.get_mut(&start) {
                entry.claims += 1;
            }
            return Ok(Self { start, by });
        }
        // A registration hands out nothing.
        let pool = overlapping(pools, &range, |end| *end);
        if let Some((other, &end)) = pool.filter(|_| by != ClaimedFor::Registration) {
            return Err(in_use(&range, other..end, ClaimedFor::Pool));
        }
        memory.insert(start, Entry { end, by, claims: 1 });
        Ok(Self { start, by })
    }

    /// Claims the memory that a pool of the program cuts into blocks: `len` bytes at `addr`, at
    /// least 1. Returns the claim that contains it, if there is one: the caller keeps that from
    /// ending meanwhile.
    ///
    /// # Errors
    /// [`InUse`]: it overlaps with another pool's, or with memory that it does not lie in.
    pub fn pool(addr: usize, len: usize) -> Result<(Self, Option<ClaimedFor>), InUse> {
        let range = addr..addr.saturating_add(len);
        let Claims { memory, pools } = &mut *claims();
        if let Some((other, &end)) = overlapping(pools, &range, |end| *end) {
            return Err(in_use(&range, other..end, ClaimedFor::Pool));
        }
        let around = overlapping(memory, &range, |entry| entry.end);
        if let Some((other, entry)) = around
            && (range.start < other || entry.end < range.end)
        {
            return Err(in_use(&range, other..entry.end, entry.by));
        }
        pools.insert(addr, range.end);
        Ok((Self { start: addr, by: ClaimedFor::Pool }, around.map(|(_, entry)| entry.by)))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Claims { memory, pools } = &mut *claims();
        if self.by == ClaimedFor::Pool {
            pools.remove(&self.start);
        } else if let Some(entry) = memory.get_mut(&self.start) {
            entry.claims -= 1;
            if entry.claims == 0 {
                memory.remove(&self.start);
            }
        }
    }
}

/// Returns an entry that overlaps with the range, and where it begins.
fn overlapping<'m, E>(
    map: &'m BTreeMap<usize, E>,
    range: &Range<usize>,
    end: impl Fn(&E) -> usize,
) -> Option<(usize, &'m E)> {
    // No two overlap, so the last one that begins before the end reaches furthest.
    let (&start, entry) = map.range(..range.end).next_back()?;
    (end(entry) > range.start).then_some((start, entry))
}

#[cold]
fn in_use(range: &Range<usize>, other: Range<usize>, by: ClaimedFor) -> InUse {
    InUse {
        addr: range.start,
        len: range.end - range.start,
        other: other.start,
        other_len: other.end - other.start,
        by,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Addresses that no test's memory has: each call returns others.
    fn addresses() -> usize {
        static NEXT: Mutex<usize> = Mutex::new(1 << 60);
        let mut next = NEXT.lock().unwrap();
        *next += 1 << 20;
        *next
    }

    const KINDS: [ClaimedFor; 4] =
        [ClaimedFor::Arena, ClaimedFor::Owned, ClaimedFor::Registration, ClaimedFor::Pool];

    proptest! {
        /// The model: bytes 0..16, each with its users.
        #[test]
        fn claims_agree_with_a_map_of_bytes(
            steps in prop::collection::vec(
                (0usize..4, 0usize..16, 1usize..6, any::<prop::sample::Index>(), any::<bool>()),
                1..60,
            ),
        ) {
            let base = addresses();
            let mut live: Vec<(Claim, ClaimedFor, Range<usize>)> = Vec::new();
            for (kind, at, len, pick, end) in steps {
                if end && !live.is_empty() {
                    let at = pick.index(live.len());
                    live.swap_remove(at);
                    continue;
                }
                let (by, range) = (KINDS[kind], at..at + len);
                let absolute = base + range.start..base + range.end;
                let overlaps = |other: &Range<usize>| other.start < range.end && range.start < other.end;
                let allowed = live.iter().filter(|(_, _, other)| overlaps(other)).all(|(_, with, other)| {
                    match (by, with) {
                        (ClaimedFor::Pool, ClaimedFor::Pool) => false,
                        (ClaimedFor::Pool, _) => other.start <= range.start && range.end <= other.end,
                        (ClaimedFor::Registration, ClaimedFor::Registration) => *other == range,
                        (ClaimedFor::Registration, ClaimedFor::Pool) => true,
                        _ => false,
                    }
                });
                let claim = match by {
                    ClaimedFor::Pool => Claim::pool(absolute.start, len).map(|(claim, inside)| {
                        let around = live.iter().find(|(_, _, other)| overlaps(other));
                        assert_eq!(inside, around.map(|(_, with, _)| *with));
                        claim
                    }),
                    _ => Claim::memory(absolute, by),
                };
                prop_assert_eq!(claim.is_ok(), allowed, "{:?} {:?}", by, claim);
                match claim {
                    Ok(claim) => live.push((claim, by, range)),
                    Err(refused) => {
                        let other = refused.other - base..refused.other - base + refused.other_len;
                        let with = live.iter().find(|(_, with, theirs)| (*with, theirs) == (refused.by, &other));
                        prop_assert!(with.is_some() && overlaps(&other), "{}", refused);
                    }
                }
            }
        }
    }

    #[test]
    fn one_of_several_threads_has_the_bytes() {
        let base = addresses();
        let barrier = std::sync::Barrier::new(4);
        let barrier = &barrier;
        let round = move |thread: usize| {
            (0..200).filter(move |_| {
                barrier.wait();
                let claim = Claim::memory(base + thread..base + 8, ClaimedFor::Owned);
                barrier.wait();
                claim.is_ok()
            })
        };
        let total: usize = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..4).map(|thread| scope.spawn(move || round(thread).count())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(total, 200);
    }
}
