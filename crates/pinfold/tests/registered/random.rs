//! Random registrations over a mixture, checked after each step against what the kernel reports and
//! against a set of pages.

use crate::common::*;
use crate::shapes::IntoIndex;
use pinfold::registered::{BufferIndex, Buffers, Hold, RegistrationError, Released, View};
use pinfold_core::folio::RegisterError;
use std::collections::{BTreeMap, BTreeSet};

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
