//! `RLIMIT_MEMLOCK`, as it applies without `CAP_IPC_LOCK`.

use crate::common::*;
use crate::shapes::IntoIndex;
use pinfold::registered::{RegistrationError, View};
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
