//! Counters of a domain: its own, which any thread changes, and one set for each owner, which only
//! that owner changes.

use crate::sync::{AtomicU64, Ordering};

/// Who changes a set of counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Writers {
    /// One thread at a time: by plain loads and stores.
    One,
    /// Any thread: by read-modify-writes.
    Many,
}

/// What has been done, and by it what is held. The sum over all sets is that of the domain; a
/// mapping that is made through one and ends through another counts in both.
#[derive(Debug)]
pub(super) struct Counts {
    writers: Writers,
    maps: AtomicU64,
    maps_fixed: AtomicU64,
    revokes: AtomicU64,
    unmaps: AtomicU64,
    /// Bytes revoked and not returned. It wraps: what is revoked here may be returned through
    /// another set.
    held_bytes: AtomicU64,
    limited: AtomicU64,
    refused: AtomicU64,
}

/// A sum of counters.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Sum {
    pub(super) maps: u64,
    pub(super) maps_fixed: u64,
    pub(super) revokes: u64,
    pub(super) unmaps: u64,
    pub(super) held_bytes: u64,
    pub(super) limited: u64,
    pub(super) refused: u64,
}

impl Counts {
    pub(super) fn new(writers: Writers) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            writers,
            maps: zero(),
            maps_fixed: zero(),
            revokes: zero(),
            unmaps: zero(),
            held_bytes: zero(),
            limited: zero(),
            refused: zero(),
        }
    }

    /// Release: a revocation that is seen comes after its map, which is then seen too, so that no
    /// more are revoked than mapped.
    #[inline]
    fn add(&self, counter: &AtomicU64, n: u64) {
        if self.writers == Writers::One {
            counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Release);
        } else {
            counter.fetch_add(n, Ordering::Release);
        }
    }

    #[inline]
    pub(super) fn count_map(&self, fixed: bool) {
        if fixed {
            self.add(&self.maps_fixed, 1);
        }
        self.add(&self.maps, 1);
    }

    /// Counts a revocation after which `bytes` are held until they are returned.
    #[inline]
    pub(super) fn count_revoked(&self, bytes: u64) {
        self.add(&self.revokes, 1);
        self.add(&self.held_bytes, bytes);
    }

    #[inline]
    pub(super) fn count_unmapped(&self) {
        self.add(&self.unmaps, 1);
    }

    /// Counts `bytes` as no longer held: returned, or left with the domain.
    #[inline]
    pub(super) fn count_no_longer_held(&self, bytes: u64) {
        self.add(&self.held_bytes, bytes.wrapping_neg());
    }

    /// Counts a revocation that waited because too many bytes were held.
    pub(super) fn count_limited(&self) {
        self.add(&self.limited, 1);
    }

    /// Counts a payload that was not mapped.
    pub(super) fn count_refused(&self) {
        self.add(&self.refused, 1);
    }

    /// Adds all of `sum`: the counters of an owner that is dropped.
    pub(super) fn add_all(&self, sum: &Sum) {
        let Sum { maps, maps_fixed, revokes, unmaps, held_bytes, limited, refused } = *sum;
        let counters = [
            (&self.maps, maps),
            (&self.maps_fixed, maps_fixed),
            (&self.revokes, revokes),
            (&self.unmaps, unmaps),
            (&self.held_bytes, held_bytes),
            (&self.limited, limited),
            (&self.refused, refused),
        ];
        counters.into_iter().for_each(|(counter, n)| self.add(counter, n));
    }

    /// Adds the revocations to `sum`. Before any [`add_rest_to`](Self::add_rest_to), so that no
    /// more are seen than maps.
    pub(super) fn add_revokes_to(&self, sum: &mut Sum) {
        sum.revokes += self.revokes.load(Ordering::Acquire);
    }

    /// Adds all others to `sum`.
    pub(super) fn add_rest_to(&self, sum: &mut Sum) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Acquire);
        sum.maps += get(&self.maps);
        sum.maps_fixed += get(&self.maps_fixed);
        sum.unmaps += get(&self.unmaps);
        sum.held_bytes = sum.held_bytes.wrapping_add(get(&self.held_bytes));
        sum.limited += get(&self.limited);
        sum.refused += get(&self.refused);
    }
}
