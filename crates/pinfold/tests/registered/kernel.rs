//! The kernel's view of registered buffers, and random sequences of operations against a model.

use crate::common::*;
use crate::shapes::IntoIndex;
use io_uring::{IoUring, opcode, types};
use pinfold::DmaMemory;
use pinfold::registered::{
    BufferIndex, Buffers, Hold, NotHeld, RegistrationError, Released, RingPlace, View,
};
use pinfold_core::folio::RegisterError;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

/// Returns a ring of the caller's, which has a buffer's places from ours without pinning again.
pub(crate) fn cloned(
    buffers: &Buffers<'_>,
    index: BufferIndex,
) -> Option<(IoUring, Vec<RingPlace>)> {
    let (fd, places) = buffers.ring(index).unwrap().unwrap();
    let ring = IoUring::new(8).unwrap();
    let before = pinned_by_kernel();
    match ring.submitter().register_buffers_clone(fd.as_raw_fd()) {
        Ok(()) => {
            assert_eq!(pinned_by_kernel(), before, "pinned and charged once");
            Some((ring, places.to_vec()))
        }
        Err(error) => {
            skipped(&format!("no cloning of registered buffers (Linux 6.12): {error}"));
            None
        }
    }
}

/// One transfer between a file and registered memory: the result as the kernel gives it.
pub(crate) fn transfer(
    ring: &mut IoUring,
    file: &File,
    write: bool,
    RingPlace { index, addr, len }: RingPlace,
    offset: u64,
) -> i32 {
    let fd = types::Fd(file.as_raw_fd());
    let (at, len) = (std::ptr::with_exposed_provenance_mut(addr), u32::try_from(len).unwrap());
    let place = u16::try_from(index).unwrap();
    let entry = match write {
        true => opcode::WriteFixed::new(fd, at, len, place).offset(offset).build(),
        false => opcode::ReadFixed::new(fd, at, len, place).offset(offset).build(),
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
    let Some(mut buffers) = buffers(View::Process) else { return };
    let (addr, len) = (area.addr + 100, area.bytes - 300);
    let index = register(&mut buffers, addr, len).unwrap().into_index();
    let Some((mut ring, places)) = cloned(&buffers, index) else { return };
    let file = tempfile::tempfile().unwrap();
    (0..len).for_each(|at| poke(addr + at, byte(at, 1)));
    let mut offset = 0;
    for &place in &places {
        assert_eq!(
            transfer(&mut ring, &file, true, place, offset),
            i32::try_from(place.len).unwrap()
        );
        offset += place.len as u64;
    }
    let mut written = vec![0; len];
    file.read_exact_at(&mut written, 0).unwrap();
    assert!(written.iter().enumerate().all(|(at, have)| *have == byte(at, 1)), "what the file has");
    let other: Vec<u8> = (0..len).map(|at| byte(at, 2)).collect();
    file.write_all_at(&other, 0).unwrap();
    offset = 0;
    for &place in &places {
        assert_eq!(
            transfer(&mut ring, &file, false, place, offset),
            i32::try_from(place.len).unwrap()
        );
        offset += place.len as u64;
    }
    assert!((0..len).all(|at| peek(addr + at) == byte(at, 2)), "what the memory has");
    // Beyond the end of what is registered the kernel refuses, too.
    let last = *places.last().unwrap();
    let beyond = RingPlace { addr: last.addr + last.len - 1, len: 2, ..last };
    assert_eq!(transfer(&mut ring, &file, false, beyond, 0), -libc::EFAULT);
}

#[test]
fn memory_unregistered_during_io_stays_pinned_until_the_end() {
    let _alone = alone();
    let Some(mut buffers) = buffers(View::Process) else { return };
    let area = Area::new(0, &[(Kind::Plain, 4 * PAGE)]).unwrap();
    let before = pinned_by_kernel();
    let index = area.register(&mut buffers).unwrap().into_index();
    let (one, two) = (buffers.hold(index).unwrap(), buffers.hold(index).unwrap());
    assert_eq!(buffers.unregister(index), Ok(Released::AfterIo { holds: 2 }));
    assert!(buffers.unregister(index).is_err(), "twice");
    assert!(buffers.get(index).is_err() && buffers.is_empty());
    assert_eq!(pinned_by_kernel() - before, 4 * PAGE as u64);
    // The same memory, and the same place, for a new one meanwhile.
    assert_eq!(area.register(&mut buffers).unwrap().into_index(), index);
    assert_eq!(buffers.stats().pinned_bytes, 4 * PAGE as u64, "once");
    buffers.release(one).unwrap();
    assert_eq!((buffers.stats().leaving, pinned_by_kernel() - before), (1, 8 * PAGE as u64));
    buffers.release(two).unwrap();
    assert_eq!((buffers.stats().leaving, pinned_by_kernel() - before), (0, 4 * PAGE as u64));
    assert_eq!(buffers.unregister(index), Ok(Released::Now));
    assert_eq!(pinned_by_kernel(), before);
}

/// A hold that a table refuses is not lost: the buffer can still be unpinned.
#[test]
fn a_hold_given_to_another_table_comes_back() {
    let _alone = alone();
    let (Some(mut one), Some(mut other)) = (buffers(View::Process), buffers(View::Process)) else {
        return;
    };
    let area = Area::new(0, &[(Kind::Plain, PAGE)]).unwrap();
    let before = pinned_by_kernel();
    let index = area.register(&mut one).unwrap().into_index();
    let hold = one.hold(index).unwrap();
    let NotHeld(hold) = other.release(hold).unwrap_err();
    assert!(one.unregister(index).is_ok_and(|left| left != Released::Now));
    let NotHeld(hold) = other.release(hold).unwrap_err();
    one.release(hold).unwrap();
    assert_eq!((one.stats().leaving, pinned_by_kernel()), (0, before));
}

#[test]
fn an_update_in_place_releases_the_previous_buffer() {
    let _alone = alone();
    let Some(mut buffers) = buffers(View::Process) else { return };
    let area = Area::new(0, &[(Kind::Plain, 4 * PAGE)]).unwrap();
    let before = pinned_by_kernel();
    let at = BufferIndex::new(40);
    // SAFETY: the memory is the test's.
    let mut put =
        |addr, len: usize| unsafe { buffers.register_addresses(Some(at), addr, len as u64, BOTH) };
    assert_eq!(put(area.addr, PAGE), Ok(at), "sparse");
    assert_eq!(put(area.addr, 3 * PAGE), Ok(at));
    assert!(put(area.addr, 0).is_err());
    assert_eq!(pinned_by_kernel() - before, 3 * PAGE as u64);
    assert_eq!((buffers.len(), buffers.get(at).unwrap().table().len()), (1, 3 * PAGE as u64));
    drop(buffers);
    assert_eq!(pinned_by_kernel(), before, "dropping unpins");
}

#[test]
fn a_table_dropped_during_io_keeps_its_memory_pinned() {
    let _alone = alone();
    let Some(mut buffers) = buffers(View::Process) else { return };
    let area = Area::new(0, &[(Kind::Plain, 4 * PAGE)]).unwrap();
    let (before, leaked) = (pinned_by_kernel(), pinfold::registered::quarantined_bytes());
    let index = area.register(&mut buffers).unwrap().into_index();
    let _hold = buffers.hold(index).unwrap();
    drop(buffers);
    assert_eq!(pinned_by_kernel() - before, 4 * PAGE as u64);
    assert_eq!(pinfold::registered::quarantined_bytes() - leaked, 4 * PAGE as u64);
}

#[test]
fn lent_memory_is_accessible_through_the_table() {
    let _alone = alone();
    let mut own = vec![7u8; 100_000];
    let Some(mut buffers) = buffers(View::Process) else { return };
    // SAFETY: the vector stays where it is, and is not accessed until the table is dropped.
    let lent = unsafe { DmaMemory::from_raw(NonNull::from(own.as_mut_slice()).cast(), 100_000) };
    let index = buffers.register(lent, BOTH).unwrap();
    let memory = buffers.memory(index).unwrap().unwrap();
    memory.write_u8(99_999, 9).unwrap();
    assert_eq!(buffers.find(memory.addr() + 5), Some((index, 5)));
    assert_eq!(buffers.segments(index, 1, 99_999).unwrap().count(), 1);
    drop(buffers);
    assert_eq!((own[0], own[99_999]), (7, 9));
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).unwrap()
    }
}

#[test]
fn random_registrations_are_charged_and_pinned_as_reported() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(3) else { return skipped("may not reserve hugepages") };
    let parts = [
        (Kind::Plain, 40 * PAGE),
        (Kind::Hugetlb, 2 * HUGE),
        (Kind::Memfd, 60 * PAGE),
        (Kind::Plain, HUGE - 60 * PAGE),
        (Kind::HugetlbMemfd, HUGE),
        (Kind::PrivateFile, 20 * PAGE),
    ];
    let area = Area::new(HUGE - 40 * PAGE, &parts).unwrap();
    let huge = |addr: usize| {
        let offset = addr - area.addr - 40 * PAGE.min(addr - area.addr);
        addr >= area.addr + 40 * PAGE && matches!(offset / HUGE, 0 | 1 | 3)
    };
    // The first address of each page that the buffer is on, and the page's size.
    let pages = |addr: usize, len: usize| {
        let mut found = BTreeMap::new();
        for at in (addr & !(PAGE - 1)..addr + len).step_by(PAGE) {
            let size = if huge(at) { HUGE } else { PAGE };
            found.insert(at & !(size - 1), size);
        }
        found
    };
    let Some(mut buffers) = buffers(View::Process) else { return };
    let before = pinned_by_kernel();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut live: BTreeMap<BufferIndex, (usize, usize)> = BTreeMap::new();
    let mut holds: Vec<(Hold, usize)> = Vec::new();
    // Buffers that have left and are held: a number, their place, the number of holds.
    let mut leaving: BTreeMap<usize, ((usize, usize), usize)> = BTreeMap::new();
    let mut held: BTreeMap<BufferIndex, Vec<usize>> = BTreeMap::new();
    let mut ticket = 0;
    for step in 0..400 {
        match random.below(5) {
            0 | 1 => {
                let addr = area.addr + random.below(area.bytes - 1);
                let most = if random.below(3) == 0 { 2 * HUGE } else { 9 * PAGE };
                let len = 1 + random.below(most.min(area.addr + area.bytes - addr));
                let overlaps =
                    live.values().any(|&(start, bytes)| start < addr + len && addr < start + bytes);
                match register(&mut buffers, addr, len) {
                    Ok(index) => {
                        assert!(!overlaps);
                        live.insert(index.into_index(), (addr, len));
                    }
                    Err(RegistrationError::Table(RegisterError::Overlaps { with, .. })) => {
                        let (start, bytes) = live[&with];
                        assert!(start < addr + len && addr < start + bytes);
                    }
                    Err(RegistrationError::Table(RegisterError::Full { .. })) => {
                        assert_eq!(live.len(), 64)
                    }
                    Err(error) => assert!(error.to_string().is_empty(), "{error}"),
                }
            }
            2 if !live.is_empty() => {
                let index = *live.keys().nth(random.below(live.len())).unwrap();
                let extent = live.remove(&index).unwrap();
                let tickets = held.remove(&index).unwrap_or_default();
                let left = buffers.unregister(index).unwrap();
                match u32::try_from(tickets.len()).unwrap() {
                    0 => assert_eq!(left, Released::Now),
                    holds => assert_eq!(left, Released::AfterIo { holds }),
                }
                if let Some(&first) = tickets.first() {
                    tickets.iter().for_each(|&ticket| {
                        leaving.insert(ticket, (extent, first));
                    });
                }
            }
            3 if !live.is_empty() => {
                let index = *live.keys().nth(random.below(live.len())).unwrap();
                ticket += 1;
                holds.push((buffers.hold(index).unwrap(), ticket));
                held.entry(index).or_default().push(ticket);
            }
            _ if !holds.is_empty() => {
                let (hold, ticket) = holds.swap_remove(random.below(holds.len()));
                buffers.release(hold).unwrap();
                leaving.remove(&ticket);
                held.values_mut().for_each(|tickets| tickets.retain(|have| *have != ticket));
            }
            _ => {}
        }
        let left: BTreeSet<(usize, (usize, usize))> =
            leaving.values().map(|&(e, first)| (first, e)).collect();
        let extents = live.values().copied().chain(left.iter().map(|&(_, extent)| extent));
        let on: BTreeMap<usize, usize> = extents.flat_map(|(addr, len)| pages(addr, len)).collect();
        let stats = buffers.stats();
        assert_eq!(stats.pinned_bytes, on.values().sum::<usize>() as u64, "step {step}");
        assert_eq!(stats.charged_bytes, pinned_by_kernel() - before, "step {step}");
        assert_eq!((stats.buffers, stats.leaving), (live.len(), left.len()), "step {step}");
    }
    holds.drain(..).for_each(|(hold, _)| buffers.release(hold).unwrap());
    drop(buffers);
    assert_eq!(pinned_by_kernel(), before);
}

#[test]
fn a_table_holds_at_most_16384_buffers() {
    let _alone = alone();
    let mut buffers = match Buffers::new(16_384, View::Process) {
        Ok(buffers) => buffers,
        Err(error) => return skipped(&error.to_string()),
    };
    let area = Area::new(0, &[(Kind::Plain, 8193 * PAGE)]).unwrap();
    let before = pinned_by_kernel();
    for i in 0..16_384 {
        match register(&mut buffers, area.addr + i * PAGE / 2 + 1, PAGE / 2) {
            Err(RegistrationError::Memlock { .. }) => {
                return skipped("this user may not pin 100 MiB");
            }
            index => assert_eq!(usize::from(index.unwrap()), i),
        }
    }
    let full = RegistrationError::Table(RegisterError::Full { capacity: 16_384 });
    assert_eq!(register(&mut buffers, area.addr, 1), Err(full));
    let stats = buffers.stats();
    assert_eq!(stats.pinned_bytes, 8193 * PAGE as u64, "each page once");
    // Every second buffer is on two pages.
    assert_eq!(stats.charged_bytes, (16_384 + 8192) * PAGE as u64);
    assert_eq!(pinned_by_kernel() - before, stats.charged_bytes);
    assert_eq!(buffers.find(area.addr + 4 * PAGE + 1), Some((BufferIndex::new(8), 0)));
}
