//! Arenas on this machine's kernel. Cases that the machine does not allow are skipped with a
//! message.

mod domains;
mod memory;
mod sources;

use super::*;
use crate::domain::Domain;
use crate::memory::Buffer;
use crate::memory::attachment::quarantined_here;
use crate::sys::pages;
use crate::sys::region::Region;
use pinfold_core::addr::Iova;
use pinfold_core::domain::BackendError;
use pinfold_core::frame::Order;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks out other tests that count resources of the whole machine (hugepages).
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
    pages::vma_of(addr, 4096).is_some()
}

/// Returns whether the memory that `build_and_drop` built is unmapped afterwards. Concurrent tests
/// may map the same addresses at once, so this is tried several times, with other memory each;
/// memory that stays is found each time.
fn is_gone(build_and_drop: impl Fn() -> usize) -> bool {
    (0..20).any(|_| !is_mapped(build_and_drop()))
}

fn addr_of(arena: &ArenaMemory) -> usize {
    arena.addr()
}
