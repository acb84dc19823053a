//! The identity of a domain.

use core::num::NonZeroU64;
use core::sync::atomic::{AtomicU64, Ordering};

/// Identifies a domain; unique within the process, and never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DomainId(NonZeroU64);

impl DomainId {
    pub(super) fn next() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        // Does not wrap: a process does not create 2^64 domains.
        Self(NonZeroU64::MIN.saturating_add(LAST.fetch_add(1, Ordering::Relaxed)))
    }
}
