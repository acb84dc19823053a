//! The table of registered buffers.

use super::footprint::{self, Coverage, PinnedStats};
use super::pin::{PinRings, RingPlace};
use super::registration::{self, Extent, PinKind, Registration, Released, View};
use super::survey::{Inspector, RegistrationError};
use super::unmap_monitor::UnmapMonitor;
use crate::memory::OwnedMemory;
use crate::sys::Errno;
use crate::sys::kernel::RingRefusal;
use pinfold_core::access::Access;
use pinfold_core::addr::Segment;
#[cfg(doc)]
use pinfold_core::folio::Registered;
use pinfold_core::folio::{BufferIndex, Hold, IndexError, NotHeld, Registry, Segments};
use pinfold_core::mem::DmaMemory;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

static QUARANTINED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Returns how many bytes this process has quarantined: they stay pinned, since a table was dropped
/// while I/O on them was in flight.
pub fn quarantined_bytes() -> u64 {
    QUARANTINED_BYTES.load(Ordering::Relaxed)
}

/// A table of registered buffers: memory that the program already has, pinned while it is in the
/// table.
///
/// It belongs to one thread of control at a time. Dropping it unpins everything; if I/O on some of
/// it is in flight, all of it is quarantined instead, and [counted](quarantined_bytes).
#[derive(Debug)]
pub struct Buffers<'m> {
    /// Not dropped while I/O is in flight: registrations keep owned memory.
    pub(super) table: ManuallyDrop<Registry<Registration>>,
    pub(super) rings: ManuallyDrop<PinRings>,
    pub(super) inspector: Inspector,
    pub(super) view: View,
    pub(super) monitor: Result<UnmapMonitor, Errno>,
    /// The pages that are pinned or locked.
    pub(super) pinned: Coverage,
    /// The addresses of pages that are locked.
    pub(super) locked: Coverage,
    /// The process that it belongs to: a child has a copy of the table and the same rings.
    pub(super) process: u32,
    /// Whether `CAP_IPC_LOCK` was effective when the rings were created: then they are not charged.
    pub(super) lifted: bool,
    memory: PhantomData<DmaMemory<'m>>,
}

impl<'m> Buffers<'m> {
    /// Returns a table with `capacity` vacant places, which describes memory as `view` sees it.
    ///
    /// # Errors
    /// [`RegistrationError::Table`] if the capacity is 0 or more than
    /// [16,384](pinfold_core::folio::Registry::MAX_BUFFERS), [`RegistrationError::NoRing`],
    /// [`RegistrationError::Memory`] without `/proc`.
    pub fn new(capacity: usize, view: View) -> Result<Self, RegistrationError> {
        let table = Registry::new(capacity)?;
        let lifted = crate::sys::limits::has_ipc_lock();
        let rings = PinRings::new(capacity)
            .map_err(|errno| RegistrationError::NoRing(RingRefusal::of(errno, (5, 19), 1, 0)))?;
        Ok(Self {
            table: ManuallyDrop::new(table),
            rings: ManuallyDrop::new(rings),
            inspector: Inspector::open()?,
            view,
            monitor: UnmapMonitor::new(capacity),
            pinned: Coverage::default(),
            locked: Coverage::default(),
            process: std::process::id(),
            lifted,
            memory: PhantomData,
        })
    }

    /// Registers the memory in the first vacant place.
    ///
    /// Faults its pages in and pins them. O(pages of 4 KiB) if the frames are visible to the
    /// process, else O(mappings and hugepages).
    ///
    /// # Errors
    /// [`RegistrationError`]; nothing is pinned then.
    pub fn register(
        &mut self,
        memory: DmaMemory<'m>,
        access: Access,
    ) -> Result<BufferIndex, RegistrationError> {
        // SAFETY: the memory is lent for `'m`, which this table does not outlive, for access beside
        // devices.
        unsafe { self.enter(None, memory.into(), access) }.map(|(index, _)| index)
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

    /// Registers the memory in place `index`, and unregisters the buffer that is there: it stays
    /// pinned until its I/O in flight has completed.
    ///
    /// # Errors
    /// As [`register`](Self::register); the place is unchanged then.
    pub fn update(
        &mut self,
        index: BufferIndex,
        memory: DmaMemory<'m>,
        access: Access,
    ) -> Result<Released, RegistrationError> {
        // SAFETY: as for `register`.
        unsafe { self.enter(Some(index), memory.into(), access) }.map(|(_, released)| released)
    }

    /// Registers memory by its addresses: in place `index` as [`update`](Self::update) does, or in
    /// the first vacant one.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// While the memory is registered, device accesses to it must be valid: no reference to it is
    /// alive during them (no mutable one, if they only read), and its owner permits them.
    pub unsafe fn register_addresses(
        &mut self,
        index: Option<BufferIndex>,
        addr: usize,
        len: u64,
        access: Access,
    ) -> Result<BufferIndex, RegistrationError> {
        // SAFETY: the caller's promise.
        unsafe { self.enter(index, Extent { addr, len, lent: None, owned: None }, access) }
            .map(|(index, _)| index)
    }

    /// Unregisters the buffer. It stays pinned until its I/O in flight has completed.
    ///
    /// # Errors
    /// [`RegistrationError::Index`] if nothing is registered there, also the second time;
    /// [`RegistrationError::Forked`].
    pub fn unregister(&mut self, index: BufferIndex) -> Result<Released, RegistrationError> {
        self.check_process()?;
        let unregistered = self.table.unregister(index)?;
        Ok(self.finish(unregistered))
    }

    /// Marks the begin of I/O on the buffer: it stays pinned until the hold is released, even if it
    /// is unregistered. Constant time; no read-modify-write of shared memory.
    ///
    /// # Errors
    /// [`RegistrationError::Index`], [`RegistrationError::Gone`].
    #[inline]
    pub fn hold(&mut self, index: BufferIndex) -> Result<Hold, RegistrationError> {
        self.get(index)?;
        Ok(self.table.hold(index)?)
    }

    /// Marks the end of I/O. The last release of an unregistered buffer unpins it.
    ///
    /// # Errors
    /// [`NotHeld`], with the hold, if it is another table's.
    #[inline]
    pub fn release(&mut self, hold: Hold) -> Result<(), NotHeld> {
        if let Some(registration) = self.table.release(hold)?
            && self.check_process().is_ok()
        {
            self.end(registration);
        }
        Ok(())
    }

    /// Returns the buffer in a place.
    ///
    /// # Errors
    /// [`RegistrationError::Index`] if there is none, [`RegistrationError::Gone`] if its memory was
    /// unmapped.
    #[inline]
    pub fn get(&self, index: BufferIndex) -> Result<&Registration, RegistrationError> {
        let registration = self.table.get(index)?;
        if let (Ok(monitor), Ok(monitored)) = (&self.monitor, registration.monitored)
            && let Some((why, addr)) = monitor.gone(monitored)
        {
            return Err(RegistrationError::Gone { index, why, addr });
        }
        Ok(registration)
    }

    /// Returns the memory of a buffer for access beside devices; `None` if it was registered by its
    /// addresses.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn memory(&self, index: BufferIndex) -> Result<Option<DmaMemory<'_>>, RegistrationError> {
        // SAFETY: it was lent to this table for `'m`, which the borrow of `self` that is returned
        // does not outlive.
        Ok(self.get(index)?.lent.map(|memory| unsafe { memory.extend() }))
    }

    /// Returns where the byte at `offset` of a buffer is for the device: [`Registered::locate`].
    ///
    /// # Errors
    /// As [`get`](Self::get); [`RegistrationError::Index`] if it is outside.
    #[inline]
    pub fn locate(&self, index: BufferIndex, offset: u64) -> Result<Segment, RegistrationError> {
        Ok(self.get(index)?.table().locate(offset).map_err(IndexError::from)?)
    }

    /// Returns a part of a buffer as the device sees it: [`Registered::segments`].
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

    /// Returns the buffer that contains an address of this process, and the offset in it.
    /// Logarithmic.
    pub fn find(&self, addr: usize) -> Option<(BufferIndex, u64)> {
        self.table.find(addr)
    }

    /// Returns the buffers in the order of their places, revoked ones included.
    pub fn iter(&self) -> impl Iterator<Item = (BufferIndex, &Registration)> {
        self.table.iter()
    }

    /// Returns the number of buffers.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Returns whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Returns the number of places.
    pub fn capacity(&self) -> usize {
        self.table.capacity()
    }

    /// Returns what is pinned, and how much of it counts against which limit. O(buffers).
    pub fn stats(&self) -> PinnedStats {
        let each = || self.table.iter().map(|(_, buffer)| buffer);
        let (limit, kernel_bytes) = footprint::limit_and_pinned();
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

    /// Returns the ring whose table has the buffer, and its places there: what the caller's ring
    /// may clone (`IORING_REGISTER_CLONE_BUFFERS`, Linux 6.12), so that the memory is pinned and
    /// charged once. A buffer has a place for each GiB of addresses that it touches. `None` if it
    /// is only locked.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn ring(
        &self,
        index: BufferIndex,
    ) -> Result<Option<(BorrowedFd<'_>, &[RingPlace])>, RegistrationError> {
        let PinKind::Pinned(pins) = &self.get(index)?.pin else { return Ok(None) };
        let (ring, places) = pins.places();
        Ok(self.rings.fd(ring).map(|fd| (fd, places)))
    }
}

impl Drop for Buffers<'_> {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            return;
        }
        let held = self
            .table
            .iter()
            .any(|(index, _)| self.table.holds(index).is_ok_and(|holds| holds > 0));
        if held || self.table.leaving() > 0 {
            tracing::warn!(
                bytes = self.pinned.bytes(),
                "buffers with I/O in flight are quarantined"
            );
            QUARANTINED_BYTES.fetch_add(self.pinned.bytes(), Ordering::Relaxed);
            return;
        }
        for (_, registration) in self.table.iter() {
            if let PinKind::Locked { first, last } = registration.pin {
                registration::unlock(first, last);
            }
        }
        // SAFETY: dropped here only, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.rings) };
        // SAFETY: likewise; after the rings, which pin what it keeps.
        unsafe { ManuallyDrop::drop(&mut self.table) };
    }
}
