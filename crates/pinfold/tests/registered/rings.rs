//! Transfers through the table of a ring.

use crate::common::*;
use io_uring::{IoUring, opcode, types};
use pinfold::uring::{BufferIndex, RingBuffers};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// One transfer between a file and registered memory: the result as the kernel gives it.
fn transfer(
    ring: &mut IoUring,
    file: &File,
    write: bool,
    (index, addr, len): (BufferIndex, usize, usize),
) -> i32 {
    let fd = types::Fd(file.as_raw_fd());
    let (at, len) = (std::ptr::with_exposed_provenance_mut(addr), u32::try_from(len).unwrap());
    let entry = match write {
        true => opcode::WriteFixed::new(fd, at, len, index.get()).build(),
        false => opcode::ReadFixed::new(fd, at, len, index.get()).build(),
    };
    // SAFETY: the memory is registered, and the test's; the transfer is waited for.
    unsafe { ring.submission().push(&entry) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    ring.completion().next().unwrap().result()
}

fn byte(at: usize, seed: usize) -> u8 {
    (at.wrapping_mul(31) ^ (at >> 9) ^ seed).to_le_bytes()[0]
}

#[test]
fn data_goes_both_ways_through_fixed_buffers_of_a_mixture() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(2) else { return skipped("may not reserve hugepages") };
    let parts = [
        (Kind::Plain, 3 * PAGE),
        (Kind::Hugetlb, HUGE),
        (Kind::Transparent, HUGE),
        (Kind::Untouched, 7 * PAGE),
        (Kind::Memfd, HUGE - 7 * PAGE),
        (Kind::HugetlbMemfd, HUGE),
        (Kind::PrivateFile, 5 * PAGE),
    ];
    let area = Area::new(HUGE - 3 * PAGE, &parts).unwrap();
    let Some(mut ring) = ring() else { return };
    let memory = area.owned(0, area.bytes);
    let table = RingBuffers::register(&ring, &[memory.fixed()]).unwrap();
    let (addr, len) = (area.addr + 100, area.bytes - 300);
    let index = places(&table, addr, 1)[0];
    assert!(places(&table, area.addr, area.bytes).iter().all(|place| *place == index));
    let file = tempfile::tempfile().unwrap();
    (0..len).for_each(|at| poke(addr + at, byte(at, 1)));
    let done = i32::try_from(len).unwrap();
    assert_eq!(transfer(&mut ring, &file, true, (index, addr, len)), done);
    let mut written = vec![0; len];
    file.read_exact_at(&mut written, 0).unwrap();
    assert!(written.iter().enumerate().all(|(at, have)| *have == byte(at, 1)), "what the file has");
    let other: Vec<u8> = (0..len).map(|at| byte(at, 2)).collect();
    file.write_all_at(&other, 0).unwrap();
    assert_eq!(transfer(&mut ring, &file, false, (index, addr, len)), done);
    assert!((0..len).all(|at| peek(addr + at) == byte(at, 2)), "what the memory has");
    // Beyond the end of what is registered the kernel refuses, too.
    let beyond = (index, area.addr + area.bytes - 1, 2);
    assert_eq!(transfer(&mut ring, &file, false, beyond), -libc::EFAULT);
}

/// Their frames are not reused, whatever is at the addresses since.
#[test]
fn a_table_keeps_pages_that_are_unmapped() {
    let _alone = alone();
    let Some(mut ring) = ring() else { return };
    let area = Area::new(0, &[(Kind::Plain, 64 * PAGE)]).unwrap();
    let memory = area.owned(0, area.bytes);
    let table = RingBuffers::register(&ring, &[memory.fixed()]).unwrap();
    let place = (places(&table, area.addr, 1)[0], area.addr, area.bytes);
    let done = i32::try_from(area.bytes).unwrap();
    (0..area.bytes).for_each(|at| poke(area.addr + at, 0x5a));
    unmap(area.addr, area.bytes).unwrap();
    // Other memory comes to the addresses, and this program takes what is free.
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    map(area.addr, area.bytes, libc::PROT_READ | libc::PROT_WRITE, flags, None).unwrap();
    let grab = Area::new(0, &[(Kind::Plain, 16 << 20)]).unwrap();
    (0..grab.bytes).step_by(8).for_each(|at| poke(grab.addr + at, 0xee));
    (0..area.bytes).for_each(|at| poke(area.addr + at, 0x11));
    // The kernel writes the old content to the file: the table still has the pages.
    let file = tempfile::tempfile().unwrap();
    assert_eq!(transfer(&mut ring, &file, true, place), done);
    let mut written = vec![0; area.bytes];
    file.read_exact_at(&mut written, 0).unwrap();
    assert!(written.iter().all(|byte| *byte == 0x5a));
    // And what it reads from the file goes to those pages, not to what is at the addresses now.
    file.write_all_at(&vec![0x77; area.bytes], 0).unwrap();
    assert_eq!(transfer(&mut ring, &file, false, place), done);
    assert!((0..area.bytes).all(|at| peek(area.addr + at) == 0x11));
    assert!((0..grab.bytes).step_by(8).all(|at| peek(grab.addr + at) == 0xee));
}
