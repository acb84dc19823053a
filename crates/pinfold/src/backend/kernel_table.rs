//! A backend whose table the kernel keeps: records what is mapped, above an [`IommuContext`].
//!
//! The kernel's unmap is synchronous and strict: when the call returns, the entries are cleared,
//! the IOMMU has been flushed, and the pages are unpinned. The ticket of a revocation is therefore
//! completed from the start.

use super::context::IommuContext;
use crate::sys::Errno;
use crate::sys::limits::MemlockLimit;
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{
    Backend, BackendError, BackendStats, Properties, Revocation, Wait, WindowToken,
};
use pinfold_core::invalidate::Ticket;
use pinfold_core::mem::DmaMemory;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

#[cfg(test)]
mod tests;

/// A [`Backend`] above an [`IommuContext`].
pub(crate) struct KernelTable {
    context: Arc<dyn IommuContext>,
    ranges: Mutex<MappedRanges>,
    /// The limit of entries.
    limit: Option<u64>,
}

/// The ranges that are mapped, and those that may be mapped.
#[derive(Default)]
struct MappedRanges {
    /// Lengths of registered memory by address.
    registered: BTreeMap<usize, usize>,
    /// Mappings by their first I/O virtual address.
    mapped: BTreeMap<u64, Entry>,
    pinned: u64,
    peak: u64,
    /// Whether the warning about the limit was logged.
    warned: bool,
}

#[derive(Clone, Copy)]
struct Entry {
    len: u64,
    addr: usize,
}

impl KernelTable {
    /// Creates an empty table, of which the kernel allows `limit` entries.
    pub(crate) fn new(context: Arc<dyn IommuContext>, limit: Option<u64>) -> Self {
        Self { context, ranges: Mutex::new(MappedRanges::default()), limit }
    }

    /// Ignores poisoning: a panic under the lock leaves every step complete.
    fn lock(&self) -> MutexGuard<'_, MappedRanges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the mapping before it is made, so that two threads cannot both use the last entry.
    fn record(&self, iova: IovaRange, memory: DmaMemory) -> Result<(), BackendError> {
        let mut ranges = self.lock();
        if !ranges.is_registered(memory) {
            return Err(BackendError::NotRegistered { addr: memory.addr(), len: memory.len() });
        }
        if ranges.overlaps(iova) {
            return Err(BackendError::Unmappable { iova });
        }
        let entries = ranges.mapped.len() as u64;
        if let Some(limit) = self.limit.filter(|limit| entries >= *limit) {
            return Err(BackendError::NoEntries {
                limit,
                remedy: self.context.raise_entries(limit),
            });
        }
        if self.context.is_charged() {
            check_memlock(ranges.pinned, iova.len())?;
        }
        ranges.mapped.insert(iova.start().raw(), Entry { len: iova.len(), addr: memory.addr() });
        ranges.pinned = ranges.pinned.saturating_add(iova.len());
        ranges.peak = ranges.peak.max(entries + 1);
        let near = self.limit.is_some_and(|limit| entries + 1 > limit - limit / 10);
        if near && !std::mem::replace(&mut ranges.warned, true) {
            tracing::warn!(
                entries = entries + 1,
                limit = self.limit,
                "nine of ten entries of the kernel's I/O table are in use: map fewer and larger pieces, or raise the \
                 limit: {}",
                self.context.raise_entries(self.limit.unwrap_or(0))
            );
        }
        Ok(())
    }

    /// Unmaps one range of whole entries.
    fn unmap(&self, range: IovaRange) -> Result<(), BackendError> {
        let unmapped = self.context.unmap(range);
        let mut ranges = self.lock();
        match unmapped {
            Ok(bytes) => {
                ranges.forget(range);
                if bytes == range.len() {
                    return Ok(());
                }
                // The caller revoked a range that was mapped only in part. The part is unmapped
                // now, but a caller so wrong about what is mapped must not see a success.
                tracing::error!(%range, bytes, "the kernel unmapped a different number of bytes than were revoked");
                Err(BackendError::NotRevoked)
            }
            Err(errno) => {
                tracing::error!(%range, %errno, "the kernel failed to unmap");
                Err(BackendError::NotRevoked)
            }
        }
    }

    /// Returns the meaning of a failed map, whose record has been removed.
    fn map_error(&self, iova: IovaRange, errno: Errno) -> BackendError {
        let asked = iova.len();
        match errno.raw() {
            libc::ENOSPC => {
                let limit = self.limit.unwrap_or_else(|| self.lock().mapped.len() as u64);
                BackendError::NoEntries { limit, remedy: self.context.raise_entries(limit) }
            }
            libc::EEXIST | libc::EINVAL | libc::EADDRINUSE => BackendError::Unmappable { iova },
            code => memlock_error(&MemlockLimit::here(), asked, self.lock().pinned)
                .filter(|_| code == libc::ENOMEM || code == libc::EDQUOT)
                .unwrap_or(BackendError::System { call: self.context.map_call(), iova, code }),
        }
    }
}

/// Refuses early a map that the kernel would refuse only after pinning many pages: this table alone
/// has pinned, and is about to pin, more than the limit. Two system calls of a fraction of a
/// microsecond.
fn check_memlock(pinned: u64, asked: u64) -> Result<(), BackendError> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let over = limit.is_some_and(|limit| pinned.saturating_add(asked) > limit);
    if over && !crate::sys::limits::has_ipc_lock() {
        return memlock_error(&MemlockLimit::here(), asked, pinned).map_or(Ok(()), Err);
    }
    Ok(())
}

/// Returns the error of exceeding the limit of locked memory, if `asked` more bytes exceed it.
fn memlock_error(limit: &MemlockLimit, asked: u64, pinned: u64) -> Option<BackendError> {
    let soft = limit.soft.filter(|_| !limit.lifted)?;
    let used = limit.used.unwrap_or(0).max(pinned);
    let remedy = MemlockLimit { used: Some(used), ..*limit }.raise_command(asked);
    (used.saturating_add(asked) > soft).then_some(BackendError::LockedMemory {
        asked,
        used,
        limit: soft,
        remedy,
    })
}

impl MappedRanges {
    fn is_registered(&self, memory: DmaMemory) -> bool {
        let end = memory.addr().saturating_add(memory.len());
        let before = self.registered.range(..=memory.addr()).next_back();
        before.is_some_and(|(start, len)| end <= start.saturating_add(*len))
    }

    fn overlaps(&self, iova: IovaRange) -> bool {
        let before = self.mapped.range(..iova.end().raw()).next_back();
        before.is_some_and(|(start, entry)| start.saturating_add(entry.len) > iova.start().raw())
    }

    /// Removes the entries that begin in `range`. Never allocates.
    fn forget(&mut self, range: IovaRange) {
        while let Some((&start, entry)) =
            self.mapped.range(range.start().raw()..range.end().raw()).next()
        {
            self.pinned = self.pinned.saturating_sub(entry.len);
            self.mapped.remove(&start);
        }
    }

    /// Returns a mapping of a part of the memory, if there is one.
    fn mapping_of(&self, addr: usize, len: usize) -> Option<IovaRange> {
        let into = |entry: &Entry| entry.addr < addr.saturating_add(len) && entry.end() > addr;
        let (start, entry) = self.mapped.iter().find(|(_, entry)| into(entry))?;
        IovaRange::new(Iova::new(*start), entry.len).ok()
    }
}

impl Entry {
    fn end(&self) -> usize {
        self.addr.saturating_add(usize::try_from(self.len).unwrap_or(usize::MAX))
    }
}

impl Backend for KernelTable {
    fn properties(&self) -> Properties {
        let translates = self.context.translates();
        Properties { name: self.context.name(), translates, pins: translates }
    }

    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        let mut ranges = self.lock();
        // The last of the entries that begin before the end of `memory` reaches furthest.
        let before = ranges.registered.range(..addr.saturating_add(len)).next_back();
        if before.is_some_and(|(start, len)| start.saturating_add(*len) > addr) {
            return Err(BackendError::AlreadyRegistered { addr, len });
        }
        // Entered first, so that no other thread registers a part of it meanwhile.
        ranges.registered.insert(addr, len);
        drop(ranges);
        self.context.register_memory(memory).inspect_err(|_| {
            self.lock().registered.remove(&addr);
        })
    }

    /// Unmaps the remaining mappings of the memory (a leaked mapping).
    ///
    /// If the kernel refuses even that, the device keeps pages that the kernel has pinned until the
    /// device is closed. It does not reach memory that the process maps at these addresses
    /// afterwards.
    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        let mut ranges = self.lock();
        if ranges.registered.get(&addr) != Some(&len) {
            return Err(BackendError::NotRegistered { addr, len });
        }
        ranges.registered.remove(&addr);
        drop(ranges);
        let mut unmapped = Ok(());
        loop {
            // The lock is released before the call.
            let mapped = self.lock().mapping_of(addr, len);
            let Some(range) = mapped else { break };
            if let Err(error) = self.unmap(range) {
                unmapped = Err(error);
                self.lock().forget(range);
            }
        }
        // While something is still mapped, its pinned memory stays pinned.
        unmapped.and_then(|()| self.context.unregister_memory(memory))
    }

    fn map(
        &self,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        if iova.len() != memory.len() as u64 {
            return Err(BackendError::LengthsDiffer { iova, memory_bytes: memory.len() });
        }
        self.record(iova, memory)?;
        // SAFETY: the memory is registered, so its owner keeps it valid until `unregister_memory`
        // has returned, which unmaps what is left; `Domain`'s callers promise that no reference
        // into it exists meanwhile.
        let mapped = unsafe { self.context.map(iova, memory.as_ptr(), access) };
        mapped.map_err(|errno| {
            self.lock().forget(iova);
            self.map_error(iova, errno)
        })
    }

    fn required_iova(&self, memory: DmaMemory) -> Result<Option<IovaRange>, BackendError> {
        self.context.required_iova(memory)
    }

    /// Unmaps ranges that are adjacent in their order with one call.
    fn revoke<'w>(
        &self,
        first: Revocation<'w>,
        rest: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        let (mut open, mut result) = (first.range, Ok(Ticket::COMPLETED));
        for Revocation { range, .. } in rest {
            open = match open.merged(&range) {
                Some(joined) => joined,
                None => {
                    result = self.unmap(open).and(result);
                    range
                }
            };
        }
        self.unmap(open).and(result)
    }

    fn wait(&self, ticket: Ticket, _: Wait<'_>) -> Poll<Result<(), BackendError>> {
        let never = ticket == Ticket::NEVER;
        Poll::Ready(if never { Err(BackendError::NotRevoked) } else { Ok(()) })
    }

    fn stats(&self) -> BackendStats {
        let ranges = self.lock();
        let mut stats = BackendStats::default();
        stats.entries = ranges.mapped.len() as u64;
        stats.entries_limit = self.limit;
        stats.entries_peak = ranges.peak;
        stats.pinned_bytes = ranges.pinned;
        stats
    }
}
