//! The count of the memory that is never returned to the system, since a device may still reach it.

use std::sync::atomic::{AtomicU64, Ordering};

static QUARANTINED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Returns how many bytes of arenas and of [`OwnedMemory`](super::OwnedMemory) this process has
/// quarantined: memory that was in use when its arena was dropped, or that a device may still
/// reach.
pub fn quarantined_bytes() -> u64 {
    QUARANTINED_BYTES.load(Ordering::Relaxed)
}

/// Counts memory that is leaked from here on.
pub(super) fn count_quarantined(bytes: u64) {
    QUARANTINED_BYTES.fetch_add(bytes, Ordering::Relaxed);
    #[cfg(test)]
    QUARANTINED_HERE.set(QUARANTINED_HERE.get() + bytes);
}

#[cfg(test)]
thread_local! {
    static QUARANTINED_HERE: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// What this thread has quarantined: the count of the process moves while other tests quarantine
/// memory, too.
#[cfg(test)]
pub(super) fn quarantined_here() -> u64 {
    let (all, here) = (quarantined_bytes(), QUARANTINED_HERE.get());
    assert!(all >= here, "the count of the process includes this thread's: {all} {here}");
    here
}
