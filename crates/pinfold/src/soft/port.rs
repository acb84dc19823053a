//! A device's way to memory.

use super::fault::{Fault, FaultKind};
use super::line::Invalidation;
use super::memory::inside;
use super::tlb::{Iotlb, Leaf, WalkCache};
use super::to_usize;
use super::unit::{Unit, lock};
use super::walk::walk;
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, PageSize};
use pinfold_core::mem::DmaMemory;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

/// What a port has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PortStats {
    /// Translations found in the IOTLB.
    pub hits: u64,
    /// Translations that had to be walked for.
    pub misses: u64,
    /// Table entries read in doing so.
    pub walk_reads: u64,
    /// Accesses that did not land.
    pub faults: u64,
    /// Bytes that the device read.
    pub bytes_read: u64,
    /// Bytes that the device wrote.
    pub bytes_written: u64,
}

impl PortStats {
    fn count(&mut self, access: Access, bytes: usize) {
        let count = if access == Access::READ { &mut self.bytes_read } else { &mut self.bytes_written };
        *count += bytes as u64;
    }

    pub(super) fn add(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.walk_reads += other.walk_reads;
        self.faults += other.faults;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
    }
}

/// What belongs to a device: its caches. Whoever holds the lock is doing DMA, or takes a translation away: so a flush
/// that is over has also waited for the accesses that used what it dropped, and no fill can race with it.
#[derive(Debug)]
pub(super) struct Device {
    unit: Arc<Unit>,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) tlb: Iotlb,
    pub(super) walks: WalkCache,
    pub(super) stats: PortStats,
    /// The admitted memory that was found last, and the generation of the registry at that time.
    last: Option<(u64, DmaMemory<'static>)>,
}

impl State {
    /// The admitted memory around `addr..addr + len`.
    pub(super) fn admitted(&mut self, unit: &Unit, addr: usize, len: usize) -> Option<DmaMemory<'static>> {
        let generation = unit.generation.load(Ordering::Acquire);
        if let Some((then, memory)) = self.last
            && then == generation
            && inside(memory, addr, len).is_some()
        {
            return Some(memory);
        }
        let memory = unit.find(addr, len)?;
        self.last = Some((generation, memory));
        Some(memory)
    }

    #[inline]
    fn translate(&mut self, unit: &Unit, iova: Iova) -> Result<Leaf, FaultKind> {
        if let Some(leaf) = self.tlb.get(iova) {
            self.stats.hits += 1;
            return Ok(leaf);
        }
        self.stats.misses += 1;
        let leaf = walk(unit, self, iova)?;
        self.tlb.put(iova, leaf);
        Ok(leaf)
    }

    /// Caches that the entry for `iova` at `level` is not present.
    pub(super) fn put_absent(&mut self, level: u8, iova: Iova) {
        if level == 1 {
            let nothing = Leaf { memory: None, access: Access::empty(), size: PageSize::Size4K };
            self.tlb.put(iova, nothing);
        } else {
            self.walks.put(level - 1, iova, None);
        }
    }

    /// The memory behind `iova` up to the end of its leaf.
    #[inline]
    fn reach(&mut self, unit: &Unit, iova: Iova, need: Access) -> Result<DmaMemory<'static>, FaultKind> {
        let leaf = self.translate(unit, iova)?;
        let memory = leaf.memory.ok_or(FaultKind::NotMapped)?;
        if !leaf.access.contains(need) {
            return Err(if need == Access::READ { FaultKind::NoRead } else { FaultKind::NoWrite });
        }
        let offset = to_usize(iova.raw() & leaf.size.mask());
        let rest = memory.len().checked_sub(offset).ok_or(FaultKind::BadTable)?;
        memory.part(offset, rest).map_err(|_| FaultKind::BadTable)
    }
}

impl Device {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Drops what the requests name.
    pub(super) fn flush(&self, due: &[Invalidation]) {
        let mut state = self.state();
        for what in due {
            match what {
                Invalidation::Whole => {
                    state.tlb.drop_all();
                    state.walks.drop_all();
                }
                Invalidation::Range(flush) => {
                    state.tlb.drop_range(&flush.range);
                    if !flush.leaf_only {
                        state.walks.drop_range(&flush.range);
                    }
                }
            }
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let stats = self.state().stats;
        self.unit.note_gone(stats);
    }
}

/// One device's way to memory. A clone is another device: it caches for itself.
///
/// Accesses are made of relaxed atomics, as a bus makes no promise about the order of bytes; what orders them is
/// [`read_u32_acquire`](Self::read_u32_acquire) and [`write_u32_release`](Self::write_u32_release). An access across
/// pages lands page by page until the first fault, as on a bus.
pub struct Port(Arc<Device>);

impl Port {
    /// How much is moved before a flush that waits for this device gets its turn.
    const BURST: usize = 64 << 10;

    pub(super) fn new(unit: &Arc<Unit>) -> Self {
        let state = State {
            tlb: Iotlb::new(unit.config.iotlb_entries),
            walks: WalkCache::new(),
            stats: PortStats::default(),
            last: None,
        };
        let device = Arc::new(Device { unit: Arc::clone(unit), state: Mutex::new(state) });
        unit.add_device(&device);
        Self(device)
    }

    /// Reads from `iova`, across pages.
    ///
    /// # Errors
    /// [`Fault`] at the first address that may not be read; what lies before it has been read.
    pub fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), Fault> {
        self.access(iova, to.len(), Access::READ, |memory, done, n| {
            to.get_mut(done..done + n).is_some_and(|part| memory.copy_to_slice(0, part).is_ok())
        })
    }

    /// Writes to `iova`, across pages.
    ///
    /// # Errors
    /// [`Fault`] at the first address that may not be written; what lies before it has been written.
    pub fn write(&self, iova: Iova, from: &[u8]) -> Result<(), Fault> {
        self.access(iova, from.len(), Access::WRITE, |memory, done, n| {
            from.get(done..done + n).is_some_and(|part| memory.copy_from_slice(0, part).is_ok())
        })
    }

    /// Reads a `u32` (native order) so that what its writer wrote before it is seen after it.
    ///
    /// # Errors
    /// [`Fault`]; [`FaultKind::Misaligned`] where `iova` is no multiple of 4.
    pub fn read_u32_acquire(&self, iova: Iova) -> Result<u32, Fault> {
        let mut value = 0;
        self.aligned(iova, 4)?;
        self.access(iova, 4, Access::READ, |memory, _, _| {
            memory.load_acquire_u32(0).map(|found| value = found).is_ok()
        })?;
        Ok(value)
    }

    /// Writes a `u32` (native order) after everything that this thread wrote before.
    ///
    /// # Errors
    /// [`Fault`]; [`FaultKind::Misaligned`] where `iova` is no multiple of 4.
    pub fn write_u32_release(&self, iova: Iova, value: u32) -> Result<(), Fault> {
        self.aligned(iova, 4)?;
        self.access(iova, 4, Access::WRITE, |memory, _, _| memory.store_release_u32(0, value).is_ok())
    }

    /// Reads a `u64` (native order, relaxed) as one access, which another thread's `u64` never tears.
    ///
    /// # Errors
    /// [`Fault`]; [`FaultKind::Misaligned`] where `iova` is no multiple of 8.
    pub fn read_u64(&self, iova: Iova) -> Result<u64, Fault> {
        let mut value = 0;
        self.aligned(iova, 8)?;
        self.access(iova, 8, Access::READ, |memory, _, _| {
            memory.read_u64(0).map(|found| value = found).is_ok()
        })?;
        Ok(value)
    }

    /// Writes a `u64` (native order, relaxed) as one access.
    ///
    /// # Errors
    /// [`Fault`]; [`FaultKind::Misaligned`] where `iova` is no multiple of 8.
    pub fn write_u64(&self, iova: Iova, value: u64) -> Result<(), Fault> {
        self.aligned(iova, 8)?;
        self.access(iova, 8, Access::WRITE, |memory, _, _| memory.write_u64(0, value).is_ok())
    }

    /// What this port has done so far.
    pub fn stats(&self) -> PortStats {
        self.0.state().stats
    }

    fn aligned(&self, iova: Iova, bytes: u64) -> Result<(), Fault> {
        if iova.is_aligned(bytes) { Ok(()) } else { Err(self.fault(iova, FaultKind::Misaligned)) }
    }

    /// Calls `act` for each piece: its memory from the piece on, how far it is into the access, and its length.
    #[inline]
    fn access(
        &self,
        iova: Iova,
        len: usize,
        need: Access,
        mut act: impl FnMut(DmaMemory<'_>, usize, usize) -> bool,
    ) -> Result<(), Fault> {
        if iova.checked_add(len as u64).is_none() {
            return Err(self.fault(iova, FaultKind::TooWide));
        }
        let mut done = 0;
        while done < len {
            let mut state = self.0.state();
            let pause = len.min(done + Self::BURST);
            while done < pause {
                // No wrap: the sum for the whole length was checked.
                let at = Iova::new(iova.raw() + done as u64);
                let moved = state.reach(&self.0.unit, at, need).and_then(|memory| {
                    let n = memory.len().min(pause - done);
                    if act(memory, done, n) { Ok(n) } else { Err(FaultKind::BadTable) }
                });
                match moved {
                    Ok(n) => {
                        state.stats.count(need, n);
                        done += n;
                    }
                    Err(kind) => {
                        state.stats.faults += 1;
                        drop(state);
                        return Err(self.note(Fault { iova: at, kind }));
                    }
                }
            }
        }
        Ok(())
    }

    fn fault(&self, iova: Iova, kind: FaultKind) -> Fault {
        self.0.state().stats.faults += 1;
        self.note(Fault { iova, kind })
    }

    fn note(&self, fault: Fault) -> Fault {
        self.0.unit.note_fault(fault);
        fault
    }
}

impl Clone for Port {
    fn clone(&self) -> Self {
        Self::new(&self.0.unit)
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port").field("stats", &self.stats()).finish_non_exhaustive()
    }
}
