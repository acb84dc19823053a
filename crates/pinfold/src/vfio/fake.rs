//! A kernel that keeps a table as type1's second version does, and writes down what it is asked for.

use super::mapper::{Limits, Mapper, iova_space};
use super::table::KernelTable;
use crate::domain::{Behind, Domain};
use crate::sys::Errno;
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

/// What it was asked for, and whether it did it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    Map { iova: u64, addr: usize, len: u64, ok: bool },
    Unmap { iova: u64, len: u64, ok: bool },
}

#[derive(Default)]
pub(crate) struct State {
    table: BTreeMap<u64, u64>,
    calls: Vec<Call>,
}

/// The kernel.
#[derive(Default)]
pub(crate) struct Fake {
    pub(crate) state: Mutex<State>,
    /// How many entries it allows.
    pub(crate) entries: Option<usize>,
    /// How many bytes it pins.
    pub(crate) bytes: Option<u64>,
    /// What it says to every unmap.
    pub(crate) unmap_fails: Mutex<Option<i32>>,
}

impl Fake {
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.state.lock().unwrap().calls.clone()
    }

    pub(crate) fn entries(&self) -> usize {
        self.state.lock().unwrap().table.len()
    }

    pub(crate) fn mapped(&self) -> Vec<(u64, u64)> {
        self.state.lock().unwrap().table.iter().map(|(start, len)| (*start, *len)).collect()
    }
}

/// A domain whose table that kernel keeps.
pub(crate) fn domain_of(kernel: &Arc<Fake>) -> Domain {
    let limits = kernel.limits().unwrap();
    let table = KernelTable::new(Arc::clone(kernel), limits.entries_left);
    let iovas = iova_space(&limits, 64).unwrap();
    Domain::new(pinfold_core::domain::Domain::new(Box::new(table), iovas), Behind::Fake)
}

impl Mapper for Fake {
    fn name(&self) -> &'static str {
        "vfio"
    }
    fn call(&self) -> &'static str {
        "VFIO_IOMMU_MAP_DMA"
    }
    fn more_entries(&self) -> &'static str {
        "more"
    }
    /// It pins nothing: tests ask it for more than who runs them may lock.
    fn is_charged(&self) -> bool {
        false
    }

    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, _: Access) -> Result<(), Errno> {
        let (start, len) = (iova.start().raw(), iova.len());
        let mut state = self.state.lock().unwrap();
        let overlaps = state.table.range(..iova.end().raw()).next_back().is_some_and(|(s, l)| s + l > start);
        let pinned: u64 = state.table.values().sum();
        let said = if overlaps {
            Err(Errno::new(libc::EEXIST))
        } else if self.entries.is_some_and(|limit| state.table.len() >= limit) {
            Err(Errno::new(libc::ENOSPC))
        } else if self.bytes.is_some_and(|limit| pinned + len > limit) {
            Err(Errno::new(libc::ENOMEM))
        } else {
            state.table.insert(start, len);
            Ok(())
        };
        state.calls.push(Call::Map { iova: start, addr: addr.as_ptr().addr(), len, ok: said.is_ok() });
        said
    }

    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno> {
        let (start, end) = (iova.start().raw(), iova.end().raw());
        let mut state = self.state.lock().unwrap();
        let cuts = |at: u64| state.table.range(..at).next_back().is_some_and(|(s, l)| s + l > at);
        let said = match *self.unmap_fails.lock().unwrap() {
            Some(code) => Err(Errno::new(code)),
            // An unmap that would cut an entry is refused whole.
            None if cuts(start) || cuts(end) => Err(Errno::new(libc::EINVAL)),
            None => {
                let inside: Vec<u64> = state.table.range(start..end).map(|(s, _)| *s).collect();
                Ok(inside.iter().filter_map(|s| state.table.remove(s)).sum())
            }
        };
        state.calls.push(Call::Unmap { iova: start, len: iova.len(), ok: said.is_ok() });
        said
    }

    fn limits(&self) -> Result<Limits, Errno> {
        Ok(Limits {
            ranges: Some(vec![(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)]),
            page_sizes: 0x4020_1000,
            entries_left: self.entries.map(|entries| entries as u64),
        })
    }
}
