//! Arenas on this machine's kernel. What a machine does not allow is skipped, and said so.

mod memory;
mod sources;
mod steps;

use super::*;
use crate::domain::Domain;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The tests that count what the whole process or machine has (hugepages, leaked bytes) run one at a time.
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

fn addr_of(arena: &Arena) -> usize {
    arena.inner().region.addr()
}
