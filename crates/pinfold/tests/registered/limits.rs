//! Registrations that are refused: bad input and exceeded limits are errors with figures, and pin nothing.

use crate::common::*;
use crate::shapes::IntoIndex;
use pinfold::registered::{BufferIndex, Buffers, MemoryError, RegistrationError, View};
use pinfold_core::access::Access;
use pinfold_core::folio::{BufferError, IndexError, RegisterError};
use rustix::thread::CapabilitySet;

fn limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

#[test]
fn exceeding_memlock_names_the_command_and_pins_nothing() {
    let _alone = alone();
    // Pinning has to touch the pages, so a large limit is not worth its test.
    let Some(limit) = limit().filter(|limit| *limit <= 256 << 20) else {
        return skipped("RLIMIT_MEMLOCK is large, or there is none");
    };
    let asked = usize::try_from(limit).unwrap().next_multiple_of(PAGE) + (1 << 20);
    let area = Area::new(0, &[(Kind::Untouched, asked)]).unwrap();
    without(CapabilitySet::IPC_LOCK, || {
        let Some(mut buffers) = buffers(View::Process) else { return };
        assert!(!buffers.stats().lifted);
        let before = pinned_by_kernel();
        let small = register(&mut buffers, area.addr, PAGE).unwrap().into_index();
        let error = register(&mut buffers, area.addr + PAGE, asked - PAGE).unwrap_err();
        let RegistrationError::Memlock { requested: said, used, allowed, command } = &error else {
            panic!("{error}")
        };
        assert_eq!((*said, *used, *allowed), ((asked - PAGE) as u64, before + PAGE as u64, limit));
        assert!(command.contains("memlock") || command.contains("ulimit -l"), "{command}");
        assert!(
            error.to_string().contains(&format!("{said} bytes"))
                && error.to_string().contains(command)
        );
        assert_eq!(
            (pinned_by_kernel() - before, buffers.stats().pinned_bytes),
            (PAGE as u64, PAGE as u64)
        );
        assert!(buffers.get(small).is_ok());
    });
}

#[test]
fn a_hugepage_is_counted_whole_for_any_part_of_it() {
    let _alone = alone();
    let Some(limit) = limit().filter(|limit| (2 << 20..64 << 20).contains(limit)) else {
        return skipped("RLIMIT_MEMLOCK is small or large, or there is none");
    };
    let pages = limit / HUGE as u64 + 1;
    let Some(_pages) = Hugepages::reserve(pages) else {
        return skipped("may not reserve hugepages");
    };
    let area = Area::new(0, &[(Kind::Hugetlb, HUGE * usize::try_from(pages).unwrap())]).unwrap();
    without(CapabilitySet::IPC_LOCK, || {
        let Some(mut buffers) = buffers(View::Process) else { return };
        let before = pinned_by_kernel();
        let mut fit = 0;
        let refused = (area.addr..area.addr + area.bytes).step_by(HUGE).find_map(|page| {
            let registered = register(&mut buffers, page + 5, 10);
            fit += u64::from(registered.is_ok());
            registered.err()
        });
        let Some(RegistrationError::Memlock { requested, .. }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(requested, HUGE as u64, "for 10 bytes");
        assert_eq!(buffers.stats().charged_bytes, fit * HUGE as u64);
        assert_eq!(pinned_by_kernel() - before, fit * HUGE as u64, "as was predicted");
    });
}

#[test]
fn larger_pages_than_surveyed_are_refused_with_the_true_charge() {
    let _alone = alone();
    let Some(limit) = limit().filter(|limit| (4 << 20..64 << 20).contains(limit)) else {
        return skipped("RLIMIT_MEMLOCK is small or large, or there is none");
    };
    // Bytes here and there in memory that becomes hugepages only as it is touched.
    let pages = usize::try_from(limit).unwrap() / HUGE + 2;
    let area = Area::new(0, &[(Kind::Untouched, pages * HUGE)]).unwrap();
    advise(area.addr, area.bytes, libc::MADV_HUGEPAGE);
    without(CapabilitySet::IPC_LOCK, || {
        let Some(mut buffers) = buffers(View::Process) else { return };
        let before = pinned_by_kernel();
        let refused =
            (0..pages).find_map(|page| register(&mut buffers, area.addr + page * HUGE, PAGE).err());
        match refused {
            Some(RegistrationError::Memlock { requested, used, .. }) => {
                assert_eq!((requested, used), (HUGE as u64, pinned_by_kernel()));
            }
            Some(error) => panic!("{error}"),
            None => skipped("no transparent hugepages"),
        }
        assert_eq!(pinned_by_kernel() - before, buffers.stats().charged_bytes);
    });
}

fn memory(error: MemoryError) -> RegistrationError {
    RegistrationError::Memory(error)
}

#[test]
fn unregistrable_memory_is_an_error_that_changes_nothing() {
    let _alone = alone();
    let Some(mut buffers) = buffers(View::Process) else { return };
    let parts =
        [(Kind::Plain, 4 * PAGE), (Kind::Hole, PAGE), (Kind::Plain, PAGE), (Kind::ReadOnly, PAGE)];
    let area = Area::new(0, &parts).unwrap();
    let first = register(&mut buffers, area.addr, PAGE).unwrap().into_index();
    let before = pinned_by_kernel();
    let stats = buffers.stats();
    let hole = area.addr + 4 * PAGE;
    let read_only = area.addr + 6 * PAGE;
    let fence = area.addr + area.bytes;
    let extent = |error| memory(MemoryError::Extent(error));
    let cases = [
        (area.addr, 0, extent(BufferError::Empty { addr: area.addr })),
        (usize::MAX - 10, 11, extent(BufferError::Wraps { addr: usize::MAX - 10, len: 11 })),
        (usize::MAX - 10, 1, extent(BufferError::Wraps { addr: usize::MAX - 10, len: 1 })),
        (0, u64::MAX, extent(BufferError::TooLong { len: u64::MAX })),
        (area.addr, (1 << 40) + 1, extent(BufferError::TooLong { len: (1 << 40) + 1 })),
        (hole, 1, memory(MemoryError::Unmapped { addr: hole })),
        (area.addr + 2 * PAGE, 3 * PAGE as u64, memory(MemoryError::Unmapped { addr: hole })),
        (0, 1, memory(MemoryError::Unmapped { addr: 0 })),
        (read_only, 1, memory(MemoryError::ReadOnly { addr: read_only })),
        (read_only - 1, 2, memory(MemoryError::ReadOnly { addr: read_only })),
        (fence, 1, memory(MemoryError::ReadOnly { addr: fence })),
    ];
    for (addr, len, error) in cases {
        assert_eq!(register_for(&mut buffers, addr, len, BOTH), Err(error), "{addr:#x} {len:#x}");
    }
    let none = register_for(&mut buffers, fence, 1, Access::READ);
    assert_eq!(none, Err(memory(MemoryError::NoAccess { addr: fence })));
    let overlap =
        |addr, len| RegistrationError::Table(RegisterError::Overlaps { addr, len, with: first });
    for (addr, len) in [(area.addr, PAGE), (area.addr + PAGE - 1, 2), (area.addr + 5, 1)] {
        assert_eq!(register(&mut buffers, addr, len), Err(overlap(addr, len as u64)));
    }
    assert_eq!((buffers.stats(), pinned_by_kernel()), (stats, before));
    assert_eq!(buffers.locate(first, 0).unwrap().len, PAGE as u64);
}

#[test]
fn device_registers_and_kernel_pages_are_refused() {
    let _alone = alone();
    let Some(mut buffers) = buffers(View::Process) else { return };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let special: Vec<_> =
        maps.lines().filter(|line| line.contains("[v") && !line.contains("[vsyscall")).collect();
    for line in special {
        let addr = usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        let error = register_for(&mut buffers, addr, 8, Access::READ);
        assert_eq!(error, Err(memory(MemoryError::Special { addr })), "{line}");
    }
    let zero = Area::new(0, &[(Kind::ReadOnly, 2 * PAGE)]).unwrap();
    let index =
        register_for(&mut buffers, zero.addr + 5, PAGE as u64, Access::READ).unwrap().into_index();
    let registration = buffers.get(index).unwrap();
    assert!(!registration.is_pinned(), "what is read-only is locked, not pinned");
    assert_eq!((registration.charged_bytes(), buffers.stats().charged_bytes), (2 * PAGE as u64, 0));
    let next =
        register_for(&mut buffers, zero.addr + 5 + PAGE, 5, Access::READ).unwrap().into_index();
    let locked = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        status.lines().any(|line| line.starts_with("VmLck:") && !line.contains(" 0 kB"))
    };
    assert!(locked());
    buffers.unregister(index).unwrap();
    assert!(locked(), "the page that both are on");
    buffers.unregister(next).unwrap();
    assert!(!locked());
}

#[test]
fn invalid_indices_and_offsets_are_errors() {
    let _alone = alone();
    let table = |error| RegistrationError::Table(error);
    let bad = |capacity| Buffers::new(capacity, View::Process).map(drop);
    assert_eq!(bad(0), Err(table(RegisterError::Capacity { asked: 0 })));
    assert_eq!(bad(16_385), Err(table(RegisterError::Capacity { asked: 16_385 })));
    let mut buffers = match Buffers::new(2, View::Process) {
        Ok(buffers) => buffers,
        Err(error) => return skipped(&error.to_string()),
    };
    let area = Area::new(0, &[(Kind::Plain, 8 * PAGE)]).unwrap();
    let [one, two] = [0, 1]
        .map(|i| register(&mut buffers, area.addr + 2 * i * PAGE, PAGE).unwrap().into_index());
    let full = table(RegisterError::Full { capacity: 2 });
    assert_eq!(register(&mut buffers, area.addr + 5 * PAGE, PAGE), Err(full));
    let three = BufferIndex::new(2);
    let beyond = IndexError::Beyond { index: three, capacity: 2 };
    assert_eq!(buffers.hold(three), Err(RegistrationError::Index(beyond)));
    assert_eq!(buffers.unregister(three), Err(RegistrationError::Index(beyond)));
    let put = |buffers: &mut Buffers<'_>, at| {
        // SAFETY: the memory is the test's.
        unsafe { buffers.register_addresses(Some(at), area.addr + 6 * PAGE, 1, BOTH) }
    };
    assert_eq!(put(&mut buffers, three), Err(table(beyond.into())));
    for (offset, len) in [(PAGE as u64, 1), (0, PAGE as u64 + 1), (u64::MAX, 2), (0, 0)] {
        let outside = buffers.segments(two, offset, len).map(drop);
        assert!(matches!(outside, Err(RegistrationError::Index(IndexError::Outside(_)))));
    }
    buffers.unregister(two).unwrap();
    let vacant = RegistrationError::Index(IndexError::Vacant { index: two });
    assert_eq!(buffers.unregister(two), Err(vacant), "twice");
    assert_eq!(buffers.locate(one, 1).unwrap().len, PAGE as u64 - 1, "the other still is");
}

#[test]
fn a_closed_ring_is_an_error_and_its_memory_stays_pinned() {
    use std::os::fd::AsRawFd;
    let _alone = alone();
    let Some(mut buffers) = buffers(View::Process) else { return };
    let area = Area::new(0, &[(Kind::Plain, 4 * PAGE)]).unwrap();
    let index = register(&mut buffers, area.addr, PAGE).unwrap().into_index();
    let ring = buffers.ring(index).unwrap().unwrap().0.as_raw_fd();
    let null = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: `saved` keeps the ring open; its number becomes another file's for a while.
    let saved = unsafe { libc::dup(ring) };
    // SAFETY: as above.
    unsafe { libc::dup2(null.as_raw_fd(), ring) };
    let refused = register(&mut buffers, area.addr + 2 * PAGE, PAGE);
    assert!(matches!(refused, Err(RegistrationError::RingGone { .. })), "{refused:?}");
    assert!(buffers.get(index).is_ok());
    // SAFETY: as above.
    unsafe { libc::dup2(saved, ring) };
    // SAFETY: nothing else uses it.
    unsafe { libc::close(saved) };
    assert!(register(&mut buffers, area.addr + 2 * PAGE, PAGE).is_ok());
}
