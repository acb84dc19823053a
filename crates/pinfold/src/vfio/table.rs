//! A backend whose table the kernel keeps: an account of what is mapped, above a [`Mapper`].
//!
//! The kernel's unmap is synchronous and strict: when the call returns the entries are cleared, the IOMMU has been
//! flushed, and the pages are unpinned. So the ticket of a revocation is done when it is given out.

use super::mapper::Mapper;
use crate::sys::Errno;
use crate::sys::limits::MemlockLimit;
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{Backend, BackendError, BackendStats};
use pinfold_core::invalidate::Ticket;
use pinfold_core::mem::DmaMemory;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(test)]
mod tests;

/// A [`Backend`] above the calls of `M`.
pub(crate) struct KernelTable<M> {
    mapper: M,
    account: Mutex<MappedRanges>,
    /// How many entries the kernel allows.
    limit: Option<u64>,
}

/// What is mapped, and what may be.
#[derive(Default)]
struct MappedRanges {
    /// Lengths of admitted memory by its address.
    admitted: BTreeMap<usize, usize>,
    /// Mappings by their first I/O virtual address.
    live: BTreeMap<u64, Entry>,
    pinned: u64,
    peak: u64,
    /// Whether somebody was told that the limits are near.
    warned: bool,
}

#[derive(Clone, Copy)]
struct Entry {
    len: u64,
    addr: usize,
}

impl<M: Mapper> KernelTable<M> {
    /// An empty one, of which the kernel allows `limit` entries.
    pub(crate) fn new(mapper: M, limit: Option<u64>) -> Self {
        Self { mapper, account: Mutex::new(MappedRanges::default()), limit }
    }

    /// A panic while it was held left every step of it whole.
    fn account(&self) -> MutexGuard<'_, MappedRanges> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the mapping before it is made, so that two threads can not both take the last entry.
    fn note(&self, iova: IovaRange, memory: DmaMemory) -> Result<(), BackendError> {
        let mut account = self.account();
        if !account.is_registered(memory) {
            return Err(BackendError::NotRegistered { addr: memory.addr(), len: memory.len() });
        }
        if account.overlaps(iova) {
            return Err(BackendError::Unmappable { iova });
        }
        let entries = account.live.len() as u64;
        if let Some(limit) = self.limit.filter(|limit| entries >= *limit) {
            return Err(BackendError::NoEntries { limit, remedy: self.mapper.more_entries().to_owned() });
        }
        if self.mapper.is_charged() {
            refuse_hopeless(account.pinned, iova.len())?;
        }
        account.live.insert(iova.start().raw(), Entry { len: iova.len(), addr: memory.addr() });
        account.pinned = account.pinned.saturating_add(iova.len());
        account.peak = account.peak.max(entries + 1);
        let near = self.limit.is_some_and(|limit| entries + 1 > limit - limit / 10);
        if near && !std::mem::replace(&mut account.warned, true) {
            tracing::warn!(
                entries = entries + 1,
                limit = self.limit,
                "nine of ten entries of the kernel's I/O table are in use: map fewer and larger pieces, or raise the \
                 limit: {}",
                self.mapper.more_entries()
            );
        }
        Ok(())
    }

    /// Takes one range of whole entries back.
    fn unmap(&self, range: IovaRange) -> Result<(), BackendError> {
        let unmapped = self.mapper.unmap(range);
        let mut account = self.account();
        match unmapped {
            Ok(bytes) => {
                account.forget(range);
                if bytes == range.len() {
                    return Ok(());
                }
                // Somebody took back what was not all mapped. What was, is not any more; but who is so wrong about
                // what is where is not told that all is well.
                tracing::error!(%range, bytes, "the kernel unmapped another number of bytes");
                Err(BackendError::NotRevoked)
            }
            Err(errno) => {
                tracing::error!(%range, %errno, "the kernel did not take access back");
                Err(BackendError::NotRevoked)
            }
        }
    }

    /// What the kernel's refusal of a map means. The account has forgotten the mapping.
    fn refusal(&self, iova: IovaRange, errno: Errno) -> BackendError {
        let asked = iova.len();
        match errno.raw() {
            libc::ENOSPC => BackendError::NoEntries {
                limit: self.limit.unwrap_or_else(|| self.account().live.len() as u64),
                remedy: self.mapper.more_entries().to_owned(),
            },
            libc::EEXIST | libc::EINVAL | libc::EADDRINUSE => BackendError::Unmappable { iova },
            code => locked(&MemlockLimit::here(), asked, self.account().pinned)
                .filter(|_| code == libc::ENOMEM || code == libc::EDQUOT)
                .unwrap_or(BackendError::System { call: self.mapper.call(), iova, code }),
        }
    }
}

/// Refuses what the kernel would refuse for sure, before it pins the first page: what this table alone has pinned and is
/// about to pin is over the limit. Two system calls of a fraction of a microsecond.
fn refuse_hopeless(pinned: u64, asked: u64) -> Result<(), BackendError> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let over = limit.is_some_and(|limit| pinned.saturating_add(asked) > limit);
    if over && !crate::sys::limits::has_ipc_lock() {
        return locked(&MemlockLimit::here(), asked, pinned).map_or(Ok(()), Err);
    }
    Ok(())
}

/// The error of going over the limit of locked memory, if `asked` more bytes are over it.
fn locked(limit: &MemlockLimit, asked: u64, pinned: u64) -> Option<BackendError> {
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
        let before = self.admitted.range(..=memory.addr()).next_back();
        before.is_some_and(|(start, len)| end <= start.saturating_add(*len))
    }

    fn overlaps(&self, iova: IovaRange) -> bool {
        let before = self.live.range(..iova.end().raw()).next_back();
        before.is_some_and(|(start, entry)| start.saturating_add(entry.len) > iova.start().raw())
    }

    /// Forgets the entries that begin in `range`. Frees memory and takes none.
    fn forget(&mut self, range: IovaRange) {
        while let Some((&start, entry)) = self.live.range(range.start().raw()..range.end().raw()).next() {
            self.pinned = self.pinned.saturating_sub(entry.len);
            self.live.remove(&start);
        }
    }

    /// A mapping into the memory, if there is one.
    fn mapping_of(&self, addr: usize, len: usize) -> Option<IovaRange> {
        let into = |entry: &Entry| entry.addr < addr.saturating_add(len) && entry.end() > addr;
        let (start, entry) = self.live.iter().find(|(_, entry)| into(entry))?;
        IovaRange::new(Iova::new(*start), entry.len).ok()
    }
}

impl Entry {
    fn end(&self) -> usize {
        self.addr.saturating_add(usize::try_from(self.len).unwrap_or(usize::MAX))
    }
}

impl<M: Mapper> Backend for KernelTable<M> {
    fn name(&self) -> &'static str {
        self.mapper.name()
    }

    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        let mut account = self.account();
        // Of the entries that begin before the end of `memory`, the last one reaches furthest.
        let before = account.admitted.range(..addr.saturating_add(len)).next_back();
        if before.is_some_and(|(start, len)| start.saturating_add(*len) > addr) {
            return Err(BackendError::AlreadyRegistered { addr, len });
        }
        account.admitted.insert(addr, len);
        Ok(())
    }

    /// What is still mapped of the memory (a mapping that was forgotten) is taken back here.
    ///
    /// Where the kernel refuses even that, the device keeps pages that the kernel has pinned: they are nobody else's until
    /// the device is closed, so what the process does with its addresses afterwards is out of the device's reach.
    fn unregister_memory(&self, memory: DmaMemory) {
        let (addr, len) = (memory.addr(), memory.len());
        if self.account().admitted.get(&addr) == Some(&len) {
            self.account().admitted.remove(&addr);
        }
        loop {
            // The guard is gone before the call is made.
            let mapped = self.account().mapping_of(addr, len);
            let Some(range) = mapped else { return };
            if self.unmap(range).is_err() {
                self.account().forget(range);
            }
        }
    }

    fn map(&self, iova: IovaRange, memory: DmaMemory, access: Access) -> Result<(), BackendError> {
        if iova.len() != memory.len() as u64 {
            return Err(BackendError::LengthsDiffer { iova, memory_bytes: memory.len() });
        }
        self.note(iova, memory)?;
        // SAFETY: the memory is admitted, so whoever did that keeps it valid until `unregister_memory` has returned, which unmaps
        // whatever is left; that no reference into it is made meanwhile is what `Domain`'s callers promise.
        let mapped = unsafe { self.mapper.map(iova, memory.as_ptr(), access) };
        mapped.map_err(|errno| {
            self.account().forget(iova);
            self.refusal(iova, errno)
        })
    }

    fn translates(&self) -> bool {
        self.mapper.translates()
    }

    fn pins(&self) -> bool {
        self.mapper.translates()
    }

    fn required_iova(&self, memory: DmaMemory) -> Result<Option<IovaRange>, BackendError> {
        self.mapper.place(memory)
    }

    /// Neighbours in the order of `ranges` are taken back by one call.
    fn revoke(&self, ranges: &mut dyn Iterator<Item = IovaRange>) -> Result<Ticket, BackendError> {
        let mut open: Option<IovaRange> = None;
        let mut result = Ok(Ticket::COMPLETED);
        for range in ranges {
            let joined = open.map_or(Some(range), |open| open.merged(&range));
            if let (None, Some(done)) = (joined, open)
                && let Err(error) = self.unmap(done)
            {
                result = Err(error);
            }
            open = Some(joined.unwrap_or(range));
        }
        if let Some(Err(error)) = open.map(|last| self.unmap(last)) {
            result = Err(error);
        }
        result
    }

    fn is_completed(&self, ticket: Ticket) -> bool {
        ticket != Ticket::NEVER
    }

    fn wait(&self, ticket: Ticket) -> Result<(), BackendError> {
        if self.is_completed(ticket) { Ok(()) } else { Err(BackendError::NotRevoked) }
    }

    fn stats(&self) -> BackendStats {
        let account = self.account();
        let mut stats = BackendStats::default();
        stats.entries = account.live.len() as u64;
        stats.entries_limit = self.limit;
        stats.entries_peak = account.peak;
        stats.pinned_bytes = account.pinned;
        stats
    }
}
