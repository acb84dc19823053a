//! Arenas on this machine's kernel. What a machine does not allow is skipped, and said so.

mod memory;
mod page_pool;
mod sources;
mod steps;

use super::*;
use crate::domain::Domain;
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

thread_local! {
    /// What this thread has leaked: the count of the whole process moves under a test when other tests leak, too.
    pub(super) static LEAKED_HERE: Cell<u64> = const { Cell::new(0) };
}

fn leaked_here() -> u64 {
    let all = quarantined_bytes();
    let here = LEAKED_HERE.get();
    assert!(all >= here, "what a thread leaked is in the count of the process: {all} {here}");
    here
}

/// The tests that count what the whole machine has (hugepages) run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn soft() -> Domain {
    Domain::soft().unwrap()
}

fn skipped(why: &str) {
    eprintln!("SKIPPED: {why}");
}

fn is_mapped(addr: usize) -> bool {
    smaps::of_range(addr, 4096).is_some()
}

/// Whether what `makes_and_drops` had mapped is gone afterwards. Tests that run beside this one may be given the very
/// addresses at once, so a second look is taken, each at other memory; what stays is found by all of them.
fn is_gone(makes_and_drops: impl Fn() -> usize) -> bool {
    (0..20).any(|_| !is_mapped(makes_and_drops()))
}

fn addr_of(arena: &Arena) -> usize {
    arena.inner().region.addr()
}
