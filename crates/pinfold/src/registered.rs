//! Memory that the program already has, pinned and described.
//!
//! [`Buffers`] takes any memory of this process: hugepages of a pool (2 MiB, 1 GiB; private, shared, memfd),
//! transparent hugepages, plain pages, files' pages, mixtures of these, beginning and ending anywhere. It finds the
//! real size of the pages ([`Survey`]), pins them, counts what is pinned, and keeps a table of where every byte is
//! ([`Registered`]).
//!
//! # What pins
//!
//! An io_uring of our own, in whose table the memory stands. Its pages stay where they are and are nobody else's until
//! they leave the table. The kernel can clone the table to other rings without pinning, or charging, again
//! ([`Buffers::ring`]; Linux 6.12). Memory that is mapped read-only (to be read by devices) can not be pinned that way,
//! for the kernel pins for writing: it is locked (`mlock`), which keeps it in memory but not in its frame;
//! [`Registration::is_pinned`] says so.
//!
//! # What it costs of `RLIMIT_MEMLOCK`
//!
//! The kernel charges plain pages to each registration that touches them, and larger ones (hugepages, and every other
//! page of several frames) whole, once a table. [`PinnedStats`] has that, and the bytes that are really pinned, each once.
//! A process with `CAP_IPC_LOCK` is charged nothing.
//!
//! # What happens when registered memory goes away
//!
//! The pages stay pinned, and what I/O that is under way reads or writes is them: never another program's, nor what
//! came to the addresses since. What the *process* sees then is another matter:
//!
//! | call | the process afterwards | the registration |
//! | --- | --- | --- |
//! | `munmap`, `mmap` over it | no longer sees the pages | revoked |
//! | `mremap` to elsewhere | sees the same pages at other addresses | revoked |
//! | `MADV_DONTNEED`, `MADV_REMOVE`, a hole in the file | sees zeroes in new pages | revoked |
//! | `fork` | keeps the pages (Linux 5.9; the child has copies) | as it was; the child can not change it |
//! | `mprotect` | may no longer write; devices still may | as it was |
//!
//! *Revoked*: where userfaultfd can be had (Linux 5.19, for anonymous memory, hugetlb and memfd), the call returns only
//! after the registration is marked, and every later use of it says [`RegistrationError::Gone`]. Where it can not
//! ([`Registration::watched`] says why), the registration goes on describing the old pages. Either way they are let go
//! when the buffer is unregistered.
//!
//! ```
//! use pinfold::registered::{Buffers, View};
//! use pinfold_core::access::Access;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut own = vec![0u8; 3 << 20]; // wherever it came from
//! let mut buffers = match Buffers::new(64, View::Process) {
//!     Ok(buffers) => buffers,
//!     Err(_no_io_uring) => return Ok(()),
//! };
//! let index = buffers.register_slice(&mut own, Access::READ | Access::WRITE)?;
//! let hold = buffers.hold(index)?; // I/O begins ...
//! for segment in buffers.segments(index, 4096, 1 << 20)? {
//!     println!("{} bytes at {}", segment.len, segment.iova);
//! }
//! buffers.release(hold)?; // ... and is over
//! println!("{}", buffers.account());
//! # Ok(())
//! # }
//! ```

mod account;
mod coverage;
mod enter;
mod error;
mod footprint;
mod pin;
mod registration;
mod survey;
mod watch;

pub use account::PinnedStats;
pub use error::{Gone, MemoryError, RegistrationError};
pub use pin::RingPlace;
pub use pinfold_core::registered::{BufferIndex, Hold, Registered};
pub use registration::{Registration, View};
pub use survey::{Backing, Means, Piece, Survey};

use crate::memory::OwnedMemory;
use crate::sys::Errno;
use coverage::Coverage;
use enter::Extent;
use pin::PinRings;
use pinfold_core::access::Access;
use pinfold_core::addr::Segment;
use pinfold_core::mem::DmaMemory;
use pinfold_core::registered::{IndexError, Registry, Segments};
use registration::Keeper;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use survey::Eyes;
use watch::Watch;

static LEAKED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes that this process keeps pinned for ever, because a table was dropped while I/O was under way on them.
pub fn quarantined_bytes() -> u64 {
    LEAKED_BYTES.load(Ordering::Relaxed)
}

/// Registered buffers: memory that the program already has, pinned as long as it is in this table.
///
/// It belongs to one thread of control at a time. Dropping it unpins everything, save where I/O is under way on some
/// of it: then all stays pinned for ever, and is [counted](quarantined_bytes).
#[derive(Debug)]
pub struct Buffers<'m> {
    /// Not dropped while I/O is in flight: registrations keep owned memory.
    table: ManuallyDrop<Registry<Registration>>,
    rings: ManuallyDrop<PinRings>,
    eyes: Eyes,
    view: View,
    watch: Result<Watch, Errno>,
    /// The pages that are pinned or locked, each once.
    pinned: Coverage,
    /// The addresses of pages that are locked.
    locked: Coverage,
    /// The process that it belongs to: a child has a copy of the table, and the same rings.
    process: u32,
    /// Whether `CAP_IPC_LOCK` was there when the rings were made: they are charged nothing then.
    lifted: bool,
    memory: PhantomData<DmaMemory<'m>>,
}

impl<'m> Buffers<'m> {
    /// A table with `capacity` places, all vacant, that describes memory as `view` sees it.
    ///
    /// # Errors
    /// [`RegistrationError::Table`] where the capacity is 0 or more than
    /// [16,384](pinfold_core::registered::Registry::MAX_BUFFERS), [`RegistrationError::NoRing`],
    /// [`RegistrationError::Memory`] where `/proc` is not there.
    pub fn new(capacity: usize, view: View) -> Result<Self, RegistrationError> {
        let table = Registry::new(capacity)?;
        let lifted = crate::sys::limits::has_ipc_lock();
        let rings = PinRings::new(capacity).map_err(|errno| RegistrationError::NoRing { errno })?;
        Ok(Self {
            table: ManuallyDrop::new(table),
            rings: ManuallyDrop::new(rings),
            eyes: Eyes::open()?,
            view,
            watch: Watch::new(capacity),
            pinned: Coverage::default(),
            locked: Coverage::default(),
            process: std::process::id(),
            lifted,
            memory: PhantomData,
        })
    }

    /// Registers the memory in the first vacant place.
    ///
    /// Brings in its pages, and pins them. O(pages of 4 KiB) where the frames may be known, else O(mappings and
    /// hugepages).
    ///
    /// # Errors
    /// [`RegistrationError`]; nothing has changed then, and nothing of it is pinned.
    pub fn register(
        &mut self,
        memory: DmaMemory<'m>,
        access: Access,
    ) -> Result<BufferIndex, RegistrationError> {
        // SAFETY: the memory is lent for `'m`, which this table does not outlive, to be reached beside devices.
        unsafe { self.enter(None, memory.into(), access) }.map(|(index, _)| index)
    }

    /// The same, for memory that the program lends as a whole: [`memory`](Self::memory) is how to reach it meanwhile.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    pub fn register_slice(
        &mut self,
        memory: &'m mut [u8],
        access: Access,
    ) -> Result<BufferIndex, RegistrationError> {
        let len = memory.len();
        // SAFETY: the slice is borrowed for `'m`, for nobody else, so that no reference to it is alive; it is one
        // allocation.
        let memory = unsafe { DmaMemory::from_raw(NonNull::from(memory).cast(), len) };
        self.register(memory, access)
    }

    /// Registers owned memory in the first vacant place, and keeps it until it is unregistered.
    ///
    /// Its pieces can be mapped into domains and moved into queues meanwhile.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    pub fn register_owned(
        &mut self,
        memory: &OwnedMemory,
        access: Access,
    ) -> Result<BufferIndex, RegistrationError> {
        let extent = Extent { owned: Some(memory.clone()), ..memory.memory().into() };
        // SAFETY: the table keeps a handle of the memory, which no reference reaches meanwhile.
        unsafe { self.enter(None, extent, access) }.map(|(index, _)| index)
    }

    /// Registers the memory in this place, and unregisters the buffer that is there: I/O that is under way on that one
    /// goes on, and it stays pinned until that is over.
    ///
    /// # Errors
    /// As [`register`](Self::register); what is there stays then.
    pub fn update(
        &mut self,
        index: BufferIndex,
        memory: DmaMemory<'m>,
        access: Access,
    ) -> Result<Left, RegistrationError> {
        // SAFETY: as for `register`.
        unsafe { self.enter(Some(index), memory.into(), access) }.map(|(_, left)| left)
    }

    /// Registers any addresses: in this place as [`update`](Self::update) does, else in the first vacant one.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// What devices do with the memory as long as it is registered must not contradict what Rust believes of it: no
    /// reference to it is alive during their accesses (none that is mutable, where they only read), and its owner
    /// has agreed.
    pub unsafe fn register_addresses(
        &mut self,
        index: Option<BufferIndex>,
        addr: usize,
        len: u64,
        access: Access,
    ) -> Result<BufferIndex, RegistrationError> {
        // SAFETY: passed on to the caller.
        unsafe { self.enter(index, Extent { addr, len, lent: None, owned: None }, access) }
            .map(|(index, _)| index)
    }

    /// Takes the buffer out of the table. Where I/O is under way on it, it stays pinned until that is over.
    ///
    /// # Errors
    /// [`RegistrationError::Index`] where nothing is registered there, also when it is unregistered twice;
    /// [`RegistrationError::Forked`].
    pub fn unregister(&mut self, index: BufferIndex) -> Result<Left, RegistrationError> {
        self.check_process()?;
        let left = self.table.unregister(index)?;
        Ok(self.left(left))
    }

    /// Says that I/O begins on the buffer: until the hold is released it stays pinned, whatever becomes of its place.
    /// Constant time; no read-modify-write of shared memory.
    ///
    /// # Errors
    /// [`RegistrationError::Index`], [`RegistrationError::Gone`].
    #[inline]
    pub fn hold(&mut self, index: BufferIndex) -> Result<Hold, RegistrationError> {
        self.get(index)?;
        Ok(self.table.hold(index)?)
    }

    /// Says that I/O is over. The last one on a buffer that was unregistered unpins it.
    ///
    /// # Errors
    /// [`RegistrationError::Index`] where the hold is not of this table.
    #[inline]
    pub fn release(&mut self, hold: Hold) -> Result<(), RegistrationError> {
        if let Some(registration) = self.table.release(hold)?
            && self.check_process().is_ok()
        {
            self.end(registration);
        }
        Ok(())
    }

    /// The buffer in this place.
    ///
    /// # Errors
    /// [`RegistrationError::Index`] where there is none, [`RegistrationError::Gone`] where its memory went away.
    #[inline]
    pub fn get(&self, index: BufferIndex) -> Result<&Registration, RegistrationError> {
        let registration = self.table.get(index)?;
        if let (Ok(watch), Ok(watched)) = (&self.watch, registration.watched)
            && let Some((why, addr)) = watch.gone(watched)
        {
            return Err(RegistrationError::Gone { index, why, addr });
        }
        Ok(registration)
    }

    /// The memory of a buffer, to be reached beside devices; `None` for what was registered by its addresses only.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn memory(&self, index: BufferIndex) -> Result<Option<DmaMemory<'_>>, RegistrationError> {
        // SAFETY: it was lent to this table for `'m`, which the borrow of `self` that is returned does not outlive.
        Ok(self.get(index)?.lent.map(|memory| unsafe { memory.extend() }))
    }

    /// Where the byte at `offset` of a buffer is for the device: [`Registered::locate`].
    ///
    /// # Errors
    /// As [`get`](Self::get); [`RegistrationError::Index`] where it is not inside.
    #[inline]
    pub fn locate(&self, index: BufferIndex, offset: u64) -> Result<Segment, RegistrationError> {
        Ok(self.get(index)?.table().locate(offset).map_err(IndexError::from)?)
    }

    /// A part of a buffer as the device sees it: [`Registered::segments`].
    ///
    /// # Errors
    /// As [`locate`](Self::locate).
    #[inline]
    pub fn segments(
        &self,
        index: BufferIndex,
        offset: u64,
        len: u64,
    ) -> Result<Segments<'_>, RegistrationError> {
        Ok(self.get(index)?.table().segments(offset, len).map_err(IndexError::from)?)
    }

    /// The buffer that an address of this process lies in, and how far. Logarithmic.
    pub fn find(&self, addr: usize) -> Option<(BufferIndex, u64)> {
        self.table.find(addr)
    }

    /// The buffers and their places, in the order of the places; those that are revoked, too.
    pub fn iter(&self) -> impl Iterator<Item = (BufferIndex, &Registration)> {
        self.table.iter()
    }

    /// How many buffers there are.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// How many places there are.
    pub fn capacity(&self) -> usize {
        self.table.capacity()
    }

    /// What is pinned, and what of it counts against which limit. O(buffers).
    pub fn account(&self) -> PinnedStats {
        let each = || self.table.iter().map(|(_, buffer)| buffer);
        let (limit, kernel_bytes) = account::limit_and_pinned();
        PinnedStats {
            buffers: self.table.len(),
            leaving: self.table.leaving(),
            bytes: each().map(|buffer| buffer.table().len()).sum(),
            table_bytes: each().map(|buffer| buffer.table().table_bytes() as u64).sum(),
            pinned_bytes: self.pinned.bytes(),
            charged_bytes: self.rings.charged(),
            kernel_bytes,
            limit,
            lifted: self.lifted,
        }
    }

    /// The ring whose table has the buffer, and its places there: what a ring of the caller's may clone
    /// (`IORING_REGISTER_CLONE_BUFFERS`, Linux 6.12), so that the memory is pinned and charged once. A buffer has a
    /// place for each GiB of addresses that it touches. `None` where it is locked only.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn ring(
        &self,
        index: BufferIndex,
    ) -> Result<Option<(BorrowedFd<'_>, &[RingPlace])>, RegistrationError> {
        let Keeper::Pinned(pins) = &self.get(index)?.keeper else { return Ok(None) };
        let (ring, places) = pins.places();
        Ok(self.rings.fd(ring).map(|fd| (fd, places)))
    }
}

/// When a buffer that was unregistered or replaced is let go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Left {
    /// It is: nothing was under way on it (or nothing was there).
    Now,
    /// When the I/O that is under way on it is over.
    AfterIo {
        /// How many holds there are.
        holds: u32,
    },
}

impl Drop for Buffers<'_> {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            return;
        }
        let held = self.table.iter().any(|(index, _)| self.table.holds(index).is_ok_and(|holds| holds > 0));
        if held || self.table.leaving() > 0 {
            tracing::warn!(bytes = self.pinned.bytes(), "buffers with I/O under way stay pinned for ever");
            LEAKED_BYTES.fetch_add(self.pinned.bytes(), Ordering::Relaxed);
            return;
        }
        for (_, registration) in self.table.iter() {
            if let Keeper::Locked { first, last } = registration.keeper {
                registration::unlock(first, last);
            }
        }
        // SAFETY: dropped here only, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.rings) };
        // SAFETY: likewise; after the rings, which pin what it keeps.
        unsafe { ManuallyDrop::drop(&mut self.table) };
    }
}
