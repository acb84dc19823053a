//! The unit and its memory. Needs `core` and `alloc` only, and allocates nothing itself.

use core::cell::UnsafeCell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use core::task::Poll;
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{
    Backend, BackendError, DomainId, Pinned, Properties, Revocation, Wait, WindowToken,
};
use pinfold_core::invalidate::Ticket;
use pinfold_core::mem::DmaMemory;

/// The memory that the device may be given: four pages.
const PAGES: usize = 4;
#[repr(C, align(4096))]
struct Memory(UnsafeCell<[u8; PAGES * 4096]>);
// SAFETY: it is accessed through `DmaMemory` only, whose accesses are atomic.
unsafe impl Sync for Memory {}
static MEMORY: Memory = Memory(UnsafeCell::new([0; PAGES * 4096]));
static IN_USE: [AtomicBool; PAGES] = [const { AtomicBool::new(false) }; PAGES];

/// Returns all of the memory.
pub(crate) fn memory() -> DmaMemory<'static> {
    // SAFETY: static memory, into which no reference is ever made.
    unsafe { DmaMemory::from_raw(NonNull::from(&MEMORY.0).cast(), PAGES * 4096) }
}

/// One page of it, until it is dropped.
pub(crate) struct Page(usize);

impl Page {
    /// Returns a page that is not in use, if there is one.
    pub(crate) fn take() -> Option<Self> {
        IN_USE.iter().position(|used| !used.swap(true, SeqCst)).map(Self)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        IN_USE[self.0].store(false, SeqCst);
    }
}

// SAFETY: the page is static memory, and this value's alone from `take` to its drop.
unsafe impl Pinned for Page {
    fn memory(&self) -> DmaMemory<'_> {
        // A page is inside of the memory.
        memory().part(self.0 * 4096, 4096).unwrap_or_else(|_| memory())
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

/// The unit has addresses of 22 bits.
pub(crate) const BITS: u32 = 22;
/// Its table: an entry for each 4 KiB of its addresses, the page there and how the device may
/// access it ([`Access::bits`]), or 0. The device reads an entry for each access and keeps none.
static ENTRIES: [AtomicU64; 1 << (BITS - 12)] = [const { AtomicU64::new(0) }; 1 << (BITS - 12)];
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// The device: writes `value` at `at`, if it reaches that.
pub(crate) fn device_writes(at: Iova, value: u8) -> bool {
    let entry = entries(at, 1).map_or(0, |entries| entries[0].load(SeqCst));
    let offset = (entry & !0xfff).checked_sub(memory().addr() as u64);
    let (true, Some(offset)) = (entry & u64::from(Access::WRITE.bits()) != 0, offset) else {
        return false;
    };
    usize::try_from(offset + (at.raw() & 0xfff))
        .is_ok_and(|offset| memory().write_u8(offset, value).is_ok())
}

/// Returns the entries of `pages` pages from an address, if the table has them all.
fn entries(at: Iova, pages: usize) -> Option<&'static [AtomicU64]> {
    let first = usize::try_from(at.raw() >> 12).ok()?;
    ENTRIES.get(first..first.checked_add(pages)?)
}

fn clear(entries: &[AtomicU64]) {
    entries.iter().for_each(|entry| entry.store(0, SeqCst));
}

/// The unit, as the owner of a domain's table.
pub(crate) struct Unit;

impl Backend for Unit {
    fn properties(&self) -> Properties {
        Properties::new("one table")
    }
    unsafe fn register_memory(&self, asked: DmaMemory) -> Result<(), BackendError> {
        let (addr, len) = (asked.addr(), asked.len());
        if (addr, len) != (memory().addr(), memory().len()) {
            return Err(BackendError::NotRegistered { addr, len });
        }
        let known = REGISTERED.swap(true, SeqCst);
        (!known).then_some(()).ok_or(BackendError::AlreadyRegistered { addr, len })
    }
    fn unregister_memory(&self, asked: DmaMemory) -> Result<(), BackendError> {
        let (addr, len) = (asked.addr(), asked.len());
        let all = (addr, len) == (memory().addr(), memory().len());
        if !all || !REGISTERED.swap(false, SeqCst) {
            return Err(BackendError::NotRegistered { addr, len });
        }
        clear(&ENTRIES); // whatever was mapped
        Ok(())
    }
    fn map(
        &self,
        iova: IovaRange,
        mapped: DmaMemory,
        access: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        let (addr, len) = (mapped.addr(), mapped.len());
        if addr < memory().addr() || addr + len > memory().addr() + memory().len() {
            return Err(BackendError::NotRegistered { addr, len });
        }
        let entries = entries(iova.start(), len >> 12).ok_or(BackendError::Unmappable { iova })?;
        for (page, entry) in entries.iter().enumerate() {
            entry.store((addr + (page << 12)) as u64 | u64::from(access.bits()), SeqCst);
        }
        // After the stores: what is unregistered meanwhile is cleared here or there.
        if !REGISTERED.load(SeqCst) {
            clear(entries);
            return Err(BackendError::NotRegistered { addr, len });
        }
        Ok(())
    }
    fn revoke<'w>(
        &self,
        first: Revocation<'w>,
        rest: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        for Revocation { range, .. } in core::iter::once(first).chain(rest) {
            // It is the union of whole maps, all of which end.
            let pages = usize::try_from(range.len() >> 12).unwrap_or(usize::MAX);
            clear(entries(range.start(), pages).ok_or(BackendError::NotRevoked)?);
        }
        Ok(Ticket::COMPLETED) // nothing is cached
    }
    fn wait(&self, ticket: Ticket, _: Wait<'_>) -> Poll<Result<(), BackendError>> {
        let completed = ticket == Ticket::COMPLETED;
        Poll::Ready(completed.then_some(()).ok_or(BackendError::NotRevoked))
    }
}
