//! `cargo run -p pinfold-core --example own_backend`
//!
//! A backend of one's own, written from the page of `Backend`: the translation unit of a small
//! device, with sixteen windows in static memory and no cache, so that a revocation has completed
//! when it returns. The buffers are static memory too: nothing here needs an operating system.

use pinfold_core::access::{Access, FromDevice};
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{
    Backend, BackendError, Domain, DomainId, Pinned, Properties, Revocation, Wait, WindowToken,
};
use pinfold_core::invalidate::Ticket;
use pinfold_core::iova::IovaSpace;
use pinfold_core::mem::DmaMemory;
use std::cell::UnsafeCell;
use std::error::Error;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

/// The memory that a device may be given: four pages.
const PAGES: usize = 4;
#[repr(C, align(4096))]
struct Memory(UnsafeCell<[u8; PAGES * 4096]>);
// SAFETY: each page is reached through the `Page` that has it alone, and by the device.
unsafe impl Sync for Memory {}
static MEMORY: Memory = Memory(UnsafeCell::new([0; PAGES * 4096]));
static IN_USE: [AtomicBool; PAGES] = [const { AtomicBool::new(false) }; PAGES];

/// One page of it, until it is dropped.
struct Page(usize);

impl Page {
    fn take() -> Option<Self> {
        IN_USE.iter().position(|used| !used.swap(true, Ordering::Acquire)).map(Self)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        IN_USE[self.0].store(false, Ordering::Release);
    }
}

fn memory() -> DmaMemory<'static> {
    let start = NonNull::from(&MEMORY.0).cast();
    // SAFETY: static memory, into which no reference is ever made.
    unsafe { DmaMemory::from_raw(start, PAGES * 4096) }
}

// SAFETY: the page is static memory, and this value's alone from `take` to its drop.
unsafe impl Pinned for Page {
    fn memory(&self) -> DmaMemory<'_> {
        memory().part(self.0 * 4096, 4096).unwrap_or_else(|_| memory())
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

/// An entry of the unit's table: each map has a window of its own.
struct Window {
    iova: IovaRange,
    addr: usize,
    access: Access,
}
static WINDOWS: Mutex<[Option<Window>; 16]> = Mutex::new([const { None }; 16]);
static REGISTERED: AtomicBool = AtomicBool::new(false);

fn windows() -> MutexGuard<'static, [Option<Window>; 16]> {
    WINDOWS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The device: returns where in memory it writes, if it reaches `at`.
fn device_writes(at: Iova) -> Option<usize> {
    let windows = windows();
    let window = windows.iter().flatten().find(|window| window.iova.contains(at))?;
    let offset = at.checked_offset_from(window.iova.start())?;
    (REGISTERED.load(Ordering::Acquire) && window.access.contains(Access::WRITE))
        .then(|| window.addr + usize::try_from(offset).unwrap_or(0))
}

struct Unit;

impl Backend for Unit {
    fn properties(&self) -> Properties {
        Properties::new("sixteen windows")
    }
    unsafe fn register_memory(&self, asked: DmaMemory) -> Result<(), BackendError> {
        let (addr, len) = (asked.addr(), asked.len());
        if addr != memory().addr() || len != memory().len() {
            return Err(BackendError::NotRegistered { addr, len });
        }
        match REGISTERED.swap(true, Ordering::AcqRel) {
            true => Err(BackendError::AlreadyRegistered { addr, len }),
            false => Ok(()),
        }
    }
    fn unregister_memory(&self, asked: DmaMemory) -> Result<(), BackendError> {
        let (addr, len) = (asked.addr(), asked.len());
        let all = addr == memory().addr() && len == memory().len();
        if all && REGISTERED.swap(false, Ordering::AcqRel) {
            windows().fill_with(|| None); // whatever was mapped
            return Ok(());
        }
        Err(BackendError::NotRegistered { addr, len })
    }
    fn map(
        &self,
        iova: IovaRange,
        mapped: DmaMemory,
        access: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        let (addr, len) = (mapped.addr(), mapped.len());
        let registered = addr.checked_sub(memory().addr()).is_some_and(|at| at < memory().len());
        if !registered || !REGISTERED.load(Ordering::Acquire) {
            return Err(BackendError::NotRegistered { addr, len });
        }
        let mut windows = windows();
        let reason = "all 16 windows are in use; unmap one first".into();
        let free = windows.iter_mut().find(|window| window.is_none());
        *free.ok_or(BackendError::Refused { iova, reason })? = Some(Window { iova, addr, access });
        Ok(())
    }
    fn revoke<'w>(
        &self,
        first: Revocation<'w>,
        rest: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        for Revocation { range, .. } in std::iter::once(first).chain(rest) {
            // A range is the union of whole maps: all windows inside end, not only the first.
            for window in windows().iter_mut() {
                window.take_if(|window| range.covers(&window.iova));
            }
        }
        Ok(Ticket::COMPLETED) // nothing is cached
    }
    fn wait(&self, ticket: Ticket, _: Wait<'_>) -> Poll<Result<(), BackendError>> {
        let completed = ticket == Ticket::COMPLETED;
        Poll::Ready(completed.then_some(()).ok_or(BackendError::NotRevoked))
    }
}

fn main() -> std::process::ExitCode {
    // Its message: an error that `main` returned would print its fields.
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let domain = Domain::new(Arc::new(Unit), IovaSpace::new(32)?);
    // SAFETY: the memory is static.
    unsafe { domain.register_memory(memory()) }?;
    let mut local = domain.local();
    let pages = [Page::take(), Page::take()].into_iter().flatten();
    let mapped = local.map_many(pages, FromDevice)?;
    let first = mapped.first().ok_or("two pages are free")?.iova();
    println!("the device reaches {first}: {}", device_writes(first.start()).is_some());
    let mut revoked = Vec::new();
    local.revoke_many(mapped, &mut revoked); // adjacent: one range for both
    for page in revoked {
        local.wait(page)?;
    }
    if windows().iter().any(Option::is_some) || device_writes(first.start()).is_some() {
        return Err("a window is left".into());
    }
    println!("no window is left");
    let one = domain.map(Page::take().ok_or("the pages have come back")?, FromDevice)?;
    domain.unmap(one)?;
    domain.unregister_memory(memory())?;
    Ok(())
}
