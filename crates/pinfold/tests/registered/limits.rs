//! Memory that is refused: bad input and exceeded limits are errors with figures, and pin nothing.

use crate::common::*;
use pinfold::folios::{MemoryError, PinError, Survey};
use pinfold::uring::{FileQueue, Note, Options, RegisterError, RingBuffers};
use pinfold::{Buffer, OwnedMemory};
use pinfold_core::folio::BufferError;
use rustix::thread::CapabilitySet;

const LIMIT: u64 = 1 << 20;

/// The number that the command has to raise the limit by is what the kernel charges, not the length.
#[test]
fn a_refusal_of_a_ring_names_the_charge_of_whole_folios() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(2) else { return skipped("may not reserve hugepages") };
    let area = Area::new(0, &[(Kind::Hugetlb, 2 * HUGE)]).unwrap();
    let page = |at: usize| area.owned(at, PAGE);
    let [one, beside, other] = [page(0), page(5 * PAGE), page(HUGE)];
    let Some(ring) = ring() else { return };
    let _limit = Memlock::of(LIMIT);
    without(CapabilitySet::IPC_LOCK, || {
        let Some(bound) = self::ring() else { return };
        let refused = |memory: &[&OwnedMemory]| {
            let fixed: Vec<_> = memory.iter().map(|memory| memory.fixed()).collect();
            match RingBuffers::register(&bound, &fixed).unwrap_err() {
                RegisterError::Memlock { requested, .. } => requested,
                error => panic!("{error}"),
            }
        };
        assert_eq!(refused(&[&one]), HUGE as u64);
        assert_eq!(refused(&[&one, &beside]), HUGE as u64, "once for a table");
        assert_eq!(refused(&[&one, &beside, &other]), 2 * HUGE as u64);
        assert_eq!(pinned_by_kernel(), 0);
        let options = Options { fixed: &[one.fixed()], ..Options::default() };
        let file = std::env::current_exe().unwrap();
        let queue: FileQueue<'_, Buffer> =
            FileQueue::open(&file, std::fs::OpenOptions::new().read(true), &options).unwrap();
        let noted = queue.notes().iter().find_map(Note::memlock).unwrap();
        assert_eq!((noted.requested, noted.limit), (HUGE as u64, LIMIT));
    });
    // A ring of a thread with the capability is not charged.
    RingBuffers::register(&ring, &[one.fixed()]).unwrap();
}

#[test]
fn a_refusal_of_a_pin_names_the_charge_and_the_command() {
    let _alone = alone();
    let area = Area::new(0, &[(Kind::Untouched, 2 << 20)]).unwrap();
    let memory = area.owned(0, area.bytes);
    let _limit = Memlock::of(LIMIT);
    without(CapabilitySet::IPC_LOCK, || {
        let error = match memory.folios() {
            Err(PinError::NoRing(refusal)) => return skipped(&refusal.to_string()),
            refused => refused.unwrap_err(),
        };
        let text = error.to_string();
        let PinError::Memlock { requested, limit } = error else { panic!("{text}") };
        assert_eq!((requested, limit.soft), (2 << 20, Some(LIMIT)));
        assert!(text.contains("2097152 bytes more") && text.contains("ulimit -l"), "{text}");
        assert_eq!(pinned_by_kernel(), 0);
    });
    // The limit is not asked again once it is lifted.
    if let Err(error) = memory.folios() {
        assert!(matches!(error, PinError::FramesUnknown { .. }), "{error}");
    }
}

/// The kernel does not move them, so they need no pin that is charged.
#[test]
fn hugepages_of_a_pool_need_no_pin() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(2) else { return skipped("may not reserve hugepages") };
    let area = Area::new(0, &[(Kind::Hugetlb, 2 * HUGE)]).unwrap();
    // They are faulted in anyway.
    advise(area.addr, area.bytes, libc::MADV_DONTNEED);
    let memory = area.owned(0, area.bytes);
    let _limit = Memlock::of(LIMIT);
    without(CapabilitySet::IPC_LOCK, || match memory.folios() {
        Ok(table) => {
            assert_eq!((table.len(), pinned_by_kernel()), (area.bytes as u64, 0));
        }
        Err(error) => assert!(matches!(error, PinError::FramesUnknown { .. }), "{error}"),
    });
}

#[test]
fn memory_that_no_device_may_reach_is_an_error() {
    let _alone = alone();
    let parts = [
        (Kind::Plain, 4 * PAGE),
        (Kind::Hole, PAGE),
        (Kind::Plain, PAGE),
        (Kind::ReadOnly, PAGE),
        (Kind::Denied, PAGE),
    ];
    let area = Area::new(0, &parts).unwrap();
    let hole = area.addr + 4 * PAGE;
    let read_only = area.addr + 6 * PAGE;
    let cases = [
        (area.addr, 0, MemoryError::Extent(BufferError::Empty { addr: area.addr })),
        (
            usize::MAX - 10,
            11,
            MemoryError::Extent(BufferError::Wraps { addr: usize::MAX - 10, len: 11 }),
        ),
        (
            usize::MAX - 10,
            1,
            MemoryError::Extent(BufferError::Wraps { addr: usize::MAX - 10, len: 1 }),
        ),
        (0, u64::MAX, MemoryError::Extent(BufferError::TooLong { len: u64::MAX })),
        (
            area.addr,
            (1 << 40) + 1,
            MemoryError::Extent(BufferError::TooLong { len: (1 << 40) + 1 }),
        ),
        (hole, 1, MemoryError::Unmapped { addr: hole }),
        (area.addr + 2 * PAGE, 3 * PAGE as u64, MemoryError::Unmapped { addr: hole }),
        (0, 1, MemoryError::Unmapped { addr: 0 }),
        (read_only, 1, MemoryError::NoAccess { addr: read_only }),
        (read_only - 1, 2, MemoryError::NoAccess { addr: read_only }),
        (read_only + PAGE, 1, MemoryError::NoAccess { addr: read_only + PAGE }),
    ];
    for (addr, len, error) in cases {
        assert_eq!(Survey::new(addr, len), Err(error), "{addr:#x} {len:#x}");
    }
    let unpinned = area.owned(6 * PAGE, PAGE).folios().unwrap_err();
    assert_eq!(unpinned, PinError::Memory(MemoryError::NoAccess { addr: read_only }));
    assert_eq!(pinned_by_kernel(), 0);
}

#[test]
fn device_registers_and_kernel_pages_are_refused() {
    let _alone = alone();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let special: Vec<_> =
        maps.lines().filter(|line| line.contains("[v") && !line.contains("[vsyscall")).collect();
    for line in special {
        let addr = usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        assert_eq!(Survey::new(addr, 8), Err(MemoryError::Special { addr }), "{line}");
    }
}
