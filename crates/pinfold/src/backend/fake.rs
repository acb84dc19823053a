//! A fake kernel that keeps a table as type1 version 2 does, and records its calls.

use super::context::{DeviceFd, IommuContext, IommuInterface, Limits, iova_space};
use super::error::OpenError;
use super::kernel_table::KernelTable;
use crate::domain::Domain;
use crate::pci::NoDevice;
use crate::pci::lookup::PciDevice;
use crate::sys::Errno;
use crate::sys::files::Roots;
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use pinfold_core::domain::BackendError;
use pinfold_core::mem::DmaMemory;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

/// A call, and whether it succeeded.
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
    /// The limit of entries.
    pub(crate) entries: Option<usize>,
    /// The limit of pinned bytes.
    pub(crate) bytes: Option<u64>,
    /// The addresses of registered memory.
    pub(crate) registered: Mutex<Vec<usize>>,
    /// The number of entries after each registration ended.
    pub(crate) left: Mutex<Vec<usize>>,
    /// Registered memory cannot be pinned.
    pub(crate) pins_nothing: Mutex<bool>,
    /// The error of every unmap.
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

/// Returns a domain whose table that kernel keeps.
pub(crate) fn domain_of(kernel: &Arc<Fake>) -> Domain {
    let limits = kernel.limits().unwrap();
    let table = KernelTable::new(Arc::clone(kernel) as Arc<dyn IommuContext>, limits.entries_left);
    let iovas = iova_space(&limits, 64).unwrap();
    Domain::new(pinfold_core::domain::Domain::new(Arc::new(table), iovas), ())
}

impl IommuContext for Fake {
    fn interface(&self) -> IommuInterface {
        IommuInterface::Type1
    }
    fn open_device(&self, _: &Roots, device: &PciDevice) -> Result<Option<DeviceFd>, OpenError> {
        Err(NoDevice(device.bdf).into())
    }
    fn name(&self) -> &'static str {
        "vfio"
    }
    fn map_call(&self) -> &'static str {
        "VFIO_IOMMU_MAP_DMA"
    }
    fn raise_entries(&self, _limit: u64) -> String {
        "more".to_owned()
    }
    /// It pins nothing: tests map more than their user may lock.
    fn is_charged(&self) -> bool {
        false
    }

    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, _: Access) -> Result<(), Errno> {
        let (start, len) = (iova.start().raw(), iova.len());
        let mut state = self.state.lock().unwrap();
        let overlaps =
            state.table.range(..iova.end().raw()).next_back().is_some_and(|(s, l)| s + l > start);
        let pinned: u64 = state.table.values().sum();
        let result = if overlaps {
            Err(Errno::new(libc::EEXIST))
        } else if self.entries.is_some_and(|limit| state.table.len() >= limit) {
            Err(Errno::new(libc::ENOSPC))
        } else if self.bytes.is_some_and(|limit| pinned + len > limit) {
            Err(Errno::new(libc::ENOMEM))
        } else {
            state.table.insert(start, len);
            Ok(())
        };
        state.calls.push(Call::Map {
            iova: start,
            addr: addr.as_ptr().addr(),
            len,
            ok: result.is_ok(),
        });
        result
    }

    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno> {
        let (start, end) = (iova.start().raw(), iova.end().raw());
        let mut state = self.state.lock().unwrap();
        let cuts = |at: u64| state.table.range(..at).next_back().is_some_and(|(s, l)| s + l > at);
        let result = match *self.unmap_fails.lock().unwrap() {
            Some(code) => Err(Errno::new(code)),
            // An unmap that would cut an entry is refused whole.
            None if cuts(start) || cuts(end) => Err(Errno::new(libc::EINVAL)),
            None => {
                let inside: Vec<u64> = state.table.range(start..end).map(|(s, _)| *s).collect();
                Ok(inside.iter().filter_map(|s| state.table.remove(s)).sum())
            }
        };
        state.calls.push(Call::Unmap { iova: start, len: iova.len(), ok: result.is_ok() });
        result
    }

    fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        if *self.pins_nothing.lock().unwrap() {
            return Err(BackendError::Movable { addr: memory.addr(), len: memory.len() });
        }
        self.registered.lock().unwrap().push(memory.addr());
        Ok(())
    }

    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        self.left.lock().unwrap().push(self.entries());
        self.registered.lock().unwrap().retain(|addr| *addr != memory.addr());
        Ok(())
    }

    fn limits(&self) -> Result<Limits, Errno> {
        Ok(Limits {
            ranges: Some(vec![(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)]),
            page_sizes: 0x4020_1000,
            entries_left: self.entries.map(|entries| entries as u64),
        })
    }
}
