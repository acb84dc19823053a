//! Registered memory that goes away: the pages stay pinned and are not reused, and where
//! userfaultfd is available the registration is revoked before the call returns.

use crate::common::*;
use crate::kernel::{cloned, transfer};
use crate::shapes::IntoIndex;
use pinfold::registered::{BufferIndex, Buffers, Gone, RegistrationError, View};

/// Returns a registered area of four pages, or hugepages.
fn registered(kind: Kind, len: usize) -> Option<(Buffers<'static>, Area, BufferIndex)> {
    let mut buffers = buffers(View::Process)?;
    let area = Area::new(0, &[(kind, len)])?;
    let index = area.register(&mut buffers).unwrap().into_index();
    Some((buffers, area, index))
}

fn gone(buffers: &mut Buffers<'_>, index: BufferIndex, why: Gone, addr: usize) {
    if let Err(errno) = buffers.iter().find(|(at, _)| *at == index).unwrap().1.revoked_on_unmap() {
        return skipped(&format!("no userfaultfd for this memory: {errno}"));
    }
    let error = RegistrationError::Gone { index, why, addr };
    assert_eq!(buffers.get(index).map(drop), Err(error.clone()));
    assert_eq!(buffers.hold(index), Err(error.clone()));
    assert_eq!(buffers.locate(index, 0), Err(error.clone()));
    assert!(error.to_string().contains("revoked"), "{error}");
}

#[test]
fn unmapped_or_moved_memory_is_revoked_before_the_call_returns() {
    let _alone = alone();
    let _pages = Hugepages::reserve(2);
    let kinds = [
        (Kind::Plain, 4 * PAGE, PAGE),
        (Kind::Memfd, 4 * PAGE, PAGE),
        (Kind::Hugetlb, 2 * HUGE, HUGE),
    ];
    for (kind, len, page) in kinds {
        for round in 0..4 {
            let Some((mut buffers, area, index)) = registered(kind, len) else {
                return skipped("may not reserve hugepages, or no io_uring");
            };
            let before = pinned_by_kernel();
            let at = area.addr + page;
            let why = match round {
                0 => {
                    unmap(at, page).unwrap();
                    Gone::Unmapped
                }
                1 => {
                    // Another mapping over it.
                    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                    map(at, page, libc::PROT_READ, flags, None).unwrap();
                    Gone::Unmapped
                }
                2 => {
                    advise(at, page, libc::MADV_DONTNEED);
                    Gone::Discarded
                }
                _ => {
                    let from = std::ptr::with_exposed_provenance_mut(at);
                    // SAFETY: the memory is the test's; where it goes is, too, and is unmapped
                    // below.
                    let to = unsafe {
                        libc::mremap(
                            from,
                            page,
                            page,
                            libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP,
                        )
                    };
                    if to == libc::MAP_FAILED {
                        continue; // Not of hugetlb pages, nor of shared memory before Linux 5.13.
                    }
                    unmap(to.expose_provenance(), page).unwrap();
                    Gone::Moved
                }
            };
            gone(&mut buffers, index, why, at);
            assert_eq!(pinned_by_kernel(), before, "pinned until it is unregistered");
            buffers.unregister(index).unwrap();
            assert_eq!(buffers.stats().pinned_bytes, 0);
            // Its place, and its addresses, can be used again.
            let fresh = Area::new(0, &[(Kind::Plain, PAGE)]).unwrap();
            assert_eq!(fresh.register(&mut buffers).unwrap().into_index(), index);
            assert!(buffers.get(index).is_ok());
        }
    }
}

#[test]
fn unmonitored_memory_is_reported_and_keeps_its_old_pages() {
    let _alone = alone();
    let Some((mut buffers, area, index)) = registered(Kind::Disk, 4 * PAGE) else { return };
    let registration = buffers.get(index).unwrap();
    assert!(registration.is_pinned() && registration.charged_bytes() == 4 * PAGE as u64);
    if registration.revoked_on_unmap().is_ok() {
        return skipped("the file's memory can be monitored");
    }
    let Some((mut ring, places)) = cloned(&buffers, index) else { return };
    poke(area.addr, 0x42);
    unmap(area.addr, 4 * PAGE).unwrap();
    assert!(buffers.get(index).is_ok(), "it is not detected");
    let file = tempfile::tempfile().unwrap();
    assert_eq!(transfer(&mut ring, &file, true, places[0], 0), 4 * i32::try_from(PAGE).unwrap());
    let mut written = [0];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut written, 0).unwrap();
    assert_eq!(written, [0x42]);
    buffers.unregister(index).unwrap();
}

#[test]
fn a_neighbour_on_the_same_page_stays_monitored() {
    let _alone = alone();
    let Some((mut buffers, area, one)) = registered(Kind::Plain, 4 * PAGE) else { return };
    buffers.unregister(one).unwrap();
    let one = register(&mut buffers, area.addr, PAGE + 5).unwrap().into_index();
    let two = register(&mut buffers, area.addr + PAGE + 5, 10).unwrap().into_index();
    buffers.unregister(one).unwrap();
    unmap(area.addr, PAGE).unwrap();
    assert!(buffers.get(two).is_ok(), "not its memory");
    unmap(area.addr + PAGE, PAGE).unwrap();
    gone(&mut buffers, two, Gone::Unmapped, area.addr + PAGE + 5);
}

#[test]
fn a_page_that_is_unmapped_while_pinned_is_not_reused() {
    let _alone = alone();
    let Some((mut buffers, area, index)) = registered(Kind::Plain, 64 * PAGE) else { return };
    let Some((mut ring, places)) = cloned(&buffers, index) else { return };
    (0..area.bytes).for_each(|at| poke(area.addr + at, 0x5a));
    let place = places[0];
    let (len, done) = (place.len, i32::try_from(place.len).unwrap());
    unmap(area.addr, area.bytes).unwrap();
    // Other memory comes to the addresses, and another program and this one take what is free.
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    map(area.addr, area.bytes, libc::PROT_READ | libc::PROT_WRITE, flags, None).unwrap();
    let grab = Area::new(0, &[(Kind::Plain, 16 << 20)]).unwrap();
    (0..grab.bytes).step_by(8).for_each(|at| poke(grab.addr + at, 0xee));
    let other = std::process::Command::new("sh")
        .args(["-c", "head -c 16777216 /dev/zero | tr '\\0' 'x' | sort -u | wc -c"])
        .output();
    drop(other);
    (0..area.bytes).for_each(|at| poke(area.addr + at, 0x11));
    // The kernel writes the old content to the file: the registration still has the pages.
    let file = tempfile::tempfile().unwrap();
    assert_eq!(transfer(&mut ring, &file, true, place, 0), done);
    let mut written = vec![0; len];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut written, 0).unwrap();
    assert!(written.iter().all(|byte| *byte == 0x5a));
    // And what it reads from the file goes to those pages, not to what is at the addresses now, nor
    // to anybody.
    std::os::unix::fs::FileExt::write_all_at(&file, &vec![0x77; len], 0).unwrap();
    assert_eq!(transfer(&mut ring, &file, false, place, 0), done);
    assert!((0..area.bytes).all(|at| peek(area.addr + at) == 0x11));
    assert!((0..grab.bytes).step_by(8).all(|at| peek(grab.addr + at) == 0xee));
    gone(&mut buffers, index, Gone::Unmapped, area.addr);
    buffers.unregister(index).unwrap();
}

#[test]
fn a_fork_leaves_the_pages_pinned_for_the_parent() {
    let _alone = alone();
    let Some((mut buffers, area, index)) = registered(Kind::Plain, 4 * PAGE) else { return };
    let before = pinned_by_kernel();
    let Some((mut ring, places)) = cloned(&buffers, index) else { return };
    poke(area.addr, 1);
    // SAFETY: the child writes to its own copy, frees what it has of the table, and ends; glibc's
    // allocator may be used after a fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        poke(area.addr, 2);
        let hold = buffers.hold(index).unwrap();
        let forked = buffers.unregister(index) == Err(RegistrationError::Forked)
            && area.register(&mut buffers) == Err(RegistrationError::Forked)
            && buffers.release(hold).is_ok();
        drop(buffers);
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(i32::from(peek(area.addr) != 2 || !forked)) };
    }
    poke(area.addr, 3);
    let mut status = 0;
    // SAFETY: the child is ours, and `status` outlives the call.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    let file = tempfile::tempfile().unwrap();
    let place = places[0];
    let done = i32::try_from(place.len).unwrap();
    assert_eq!(transfer(&mut ring, &file, true, place, 0), done);
    let mut written = [0];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut written, 0).unwrap();
    assert_eq!(written, [3], "what the parent wrote after the fork is what the device sees");
    assert_eq!(pinned_by_kernel(), before);
    unmap(area.addr, PAGE).unwrap();
    gone(&mut buffers, index, Gone::Unmapped, area.addr);
}

#[test]
fn stress_no_registration_is_used_after_an_unmap() {
    let _alone = alone();
    let Some(mut buffers) = buffers(View::Process) else { return };
    let until = std::time::Instant::now() + std::time::Duration::from_secs(1);
    let mut rounds = 0;
    while rounds <= 10 || std::time::Instant::now() < until {
        let area = Area::new(0, &[(Kind::Plain, 2 * PAGE)]).unwrap();
        let index = area.register(&mut buffers).unwrap().into_index();
        if buffers.get(index).unwrap().revoked_on_unmap().is_err() {
            return skipped("no userfaultfd");
        }
        let addr = area.addr;
        // Another thread unmaps it, and reports it: from then on it must be detected.
        std::thread::scope(|scope| {
            let done = scope.spawn(|| unmap(addr + PAGE, PAGE).unwrap());
            while !done.is_finished() {
                let _ = buffers.get(index);
            }
        });
        assert!(
            matches!(buffers.hold(index), Err(RegistrationError::Gone { .. })),
            "round {rounds}"
        );
        buffers.unregister(index).unwrap();
        rounds += 1;
    }
}
