//! Arenas on hugepages. A test binary of its own: it changes the machine's pool and counts it, so
//! nothing else in the process may take pages from it meanwhile; other processes may, and what is
//! counted is counted again. Needs root; else it is skipped, and says so.
#![expect(clippy::unwrap_used, reason = "test code outside of test functions")]

use pinfold::arena::{Arena, BuildError, Residency, Source, UnavailableReason};
use pinfold::domain::Domain;
use pinfold::folios::{Backing, Survey};
use pinfold::probe::hugepages;
use pinfold_core::addr::PageSize;
use std::fs::File;
use std::panic::catch_unwind;
use std::path::Path;
use std::time::Duration;

const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";
/// Locked by all tests that change the pool.
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

fn pool() -> hugepages::HugetlbPool {
    hugepages::pool(Path::new("/sys"), PageSize::Size2M).unwrap()
}

/// Sets the pool of 2 MiB pages, and sets it back when dropped. One at a time on the machine.
struct Reserve(u64, #[expect(dead_code, reason = "held, not read")] File);

impl Reserve {
    fn pages(pages: u64) -> Option<Self> {
        let lock = File::open(POOL).ok()?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).ok()?;
        let before = hugepages::pool(Path::new("/sys"), PageSize::Size2M)?.total;
        std::fs::write(NR_HUGEPAGES, pages.to_string()).ok()?;
        let reserve = Self(before, lock);
        (pool().total == pages).then_some(reserve)
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        std::fs::write(NR_HUGEPAGES, self.0.to_string()).unwrap();
    }
}

fn soft() -> Domain {
    Domain::soft().unwrap()
}

fn skipped(why: &str) {
    eprintln!("SKIPPED: {why}");
}

/// Repeats a test that fails: a program of another process takes hugepages where some are free, and
/// has them for as long as it runs.
fn unless_disturbed(test: fn()) {
    for _ in 0..9 {
        if catch_unwind(test).is_ok() {
            return;
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    test();
}

fn build(bytes: u64, source: Source) -> Result<Arena, BuildError> {
    Arena::builder().size(bytes).source(source).build(&soft())
}

#[test]
fn hugepages_are_rounded_up_never_swapped_and_released() {
    unless_disturbed(rounded_up);
}

fn rounded_up() {
    let Some(_reserve) = Reserve::pages(8) else { return skipped("may not reserve hugepages") };
    for source in [Source::Hugetlb2M, Source::Memfd2M] {
        let arena = build((3 << 20) + 1, source).unwrap();
        let report = arena.report();
        assert_eq!(
            (report.requested_bytes, report.bytes),
            ((3 << 20) + 1, 4 << 20),
            "rounding is stated"
        );
        assert_eq!((report.source, report.page_size), (source, PageSize::Size2M));
        assert_eq!(report.residency, Residency::Hugetlb);
        assert_eq!(
            (pool().available(), pool().free),
            (6, 6),
            "two pages are taken, not only promised"
        );
        let buffer = arena.alloc(1).unwrap();
        buffer.memory().write_u8(0, 7).unwrap();
        let survey = Survey::new(buffer.memory().addr(), 4096).unwrap();
        assert!(survey.pieces().iter().all(|piece| piece.backing == Backing::Hugetlb));
        drop((arena, buffer));
        assert_eq!(pool().available(), 8);
    }
    let first = Arena::builder().size(4 << 20).build(&soft()).unwrap();
    assert_eq!(first.report().source, Source::Hugetlb2M, "best first");
}

#[test]
fn too_few_hugepages_name_the_command_or_use_the_next_source() {
    unless_disturbed(too_few);
}

fn too_few() {
    let Some(_reserve) = Reserve::pages(2) else { return skipped("may not reserve hugepages") };
    let _has_one = build(2 << 20, Source::Hugetlb2M).unwrap();
    let arena = Arena::builder().size(8 << 20).build(&soft()).unwrap();
    let refused = &arena.report().unavailable[0];
    assert_eq!(refused.source, Source::Hugetlb2M);
    assert_eq!(
        refused.reason,
        UnavailableReason::FewHugepages { page: PageSize::Size2M, needed: 4, free: 1, total: 2 }
    );
    let command = refused.fix.as_deref().unwrap();
    assert_eq!(command, "sudo sysctl vm.nr_hugepages=5");
    assert!(arena.report().source != Source::Hugetlb2M);
    let more = command.rsplit_once('=').unwrap().1;
    std::fs::write(NR_HUGEPAGES, more).unwrap();
    // The command mends it.
    build(8 << 20, Source::Hugetlb2M).unwrap();
}

#[test]
fn hugepages_of_a_node_are_taken_at_once() {
    unless_disturbed(of_a_node);
}

fn of_a_node() {
    let Some(_reserve) = Reserve::pages(2) else { return skipped("may not reserve hugepages") };
    let bound = Arena::builder().size(4 << 20).source(Source::Hugetlb2M).numa_node(0);
    match bound.build(&soft()) {
        Ok(_arena) => assert_eq!(pool().free, 0),
        Err(error) => skipped(&format!("node 0 gives no hugepages: {error}")),
    }
}
