//! A device's connection to memory, and the walker that it translates with.

use crate::config::{Fault, FaultKind, PortStats, Stage};
use crate::device::{Device, State};
use crate::memory::{inside, to_usize};
use crate::tlb::{Held, Leaf};
use crate::unit::Unit;
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, PageSize};
use pinfold_core::domain::DomainId;
use pinfold_core::mem::DmaMemory;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[inline]
fn translate(unit: &Unit, state: &mut State, iova: Iova) -> Result<Leaf, FaultKind> {
    if let Some(leaf) = state.device_tlb.as_ref().and_then(|tlb| tlb.get(iova)) {
        state.stats.hits += 1;
        return Ok(leaf);
    }
    let leaf = if let Some(leaf) = state.tlb.get(iova) {
        state.stats.hits += 1;
        leaf
    } else {
        state.stats.misses += 1;
        let leaf = walk(unit, state, iova)?;
        state.tlb.put(iova, leaf);
        leaf
    };
    // A device does not keep that there is no translation (PCIe, "Address Translation Services").
    if let Some(tlb) = state.device_tlb.as_mut().filter(|_| leaf.memory.is_some()) {
        tlb.put(iova, leaf);
    }
    Ok(leaf)
}

/// Returns the memory at `iova` up to the end of its leaf.
#[inline]
fn reach(
    unit: &Unit,
    state: &mut State,
    iova: Iova,
    need: Access,
) -> Result<DmaMemory<'static>, FaultKind> {
    let leaf = translate(unit, state, iova)?;
    let memory = leaf.memory.ok_or(FaultKind::NotMapped)?;
    if !leaf.access.contains(need) {
        return Err(if need == Access::READ { FaultKind::NoRead } else { FaultKind::NoWrite });
    }
    let offset = to_usize(iova.raw() & leaf.size.mask());
    let rest = memory.len().checked_sub(offset).ok_or(FaultKind::BadTable)?;
    memory.part(offset, rest).map_err(|_| FaultKind::BadTable)
}

/// The connection of one device to memory. A clone is another device of the same kind, with caches
/// of its own.
///
/// Accesses are relaxed atomics, because a bus does not order bytes;
/// [`read_u32_acquire`](Self::read_u32_acquire) and [`write_u32_release`](Self::write_u32_release)
/// are ordered. An access across pages takes effect page by page up to the first fault, as on a
/// bus.
pub struct Port {
    unit: Arc<Unit>,
    device: Arc<Device>,
    device_tlb_entries: Option<usize>,
    domain: Option<DomainId>,
}

impl Port {
    /// Bytes moved before a waiting flush gets the device's lock.
    const BURST: usize = 64 << 10;

    pub(super) fn new(unit: &Arc<Unit>, device_tlb_entries: Option<usize>) -> Self {
        Self {
            unit: Arc::clone(unit),
            device: unit.add_device(device_tlb_entries),
            device_tlb_entries,
            domain: None,
        }
    }

    /// Returns the port as that of a device of `domain`, which [`domain`](Self::domain) reports.
    #[must_use]
    pub fn of_domain(mut self, domain: DomainId) -> Self {
        self.domain = Some(domain);
        self
    }

    /// Returns the domain whose mappings the device reaches; `None` if that is no
    /// [`Domain`](pinfold_core::domain::Domain), or is not known.
    pub fn domain(&self) -> Option<DomainId> {
        self.domain
    }

    /// Reads from `iova`, across pages.
    ///
    /// # Errors
    /// [`Fault`] at the first address that may not be read; everything before it has been read.
    pub fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), Fault> {
        self.access(iova, to.len(), Access::READ, |memory, done, n| {
            to.get_mut(done..done + n).is_some_and(|part| memory.copy_to_slice(0, part).is_ok())
        })
    }

    /// Writes to `iova`, across pages.
    ///
    /// # Errors
    /// [`Fault`] at the first address that may not be written; everything before it has been
    /// written.
    pub fn write(&self, iova: Iova, from: &[u8]) -> Result<(), Fault> {
        self.access(iova, from.len(), Access::WRITE, |memory, done, n| {
            from.get(done..done + n).is_some_and(|part| memory.copy_from_slice(0, part).is_ok())
        })
    }

    /// Reads a `u32` (native byte order) with acquire ordering: what its writer stored before it is
    /// visible afterwards.
    ///
    /// # Errors
    /// [`Fault`]; [`FaultKind::Misaligned`] if `iova` is not a multiple of 4.
    pub fn read_u32_acquire(&self, iova: Iova) -> Result<u32, Fault> {
        let mut value = 0;
        self.aligned(iova, 4)?;
        self.access(iova, 4, Access::READ, |memory, _, _| {
            memory.load_acquire_u32(0).map(|found| value = found).is_ok()
        })?;
        Ok(value)
    }

    /// Writes a `u32` (native byte order) with release ordering: after all earlier writes of this
    /// thread.
    ///
    /// # Errors
    /// [`Fault`]; [`FaultKind::Misaligned`] if `iova` is not a multiple of 4.
    pub fn write_u32_release(&self, iova: Iova, value: u32) -> Result<(), Fault> {
        self.aligned(iova, 4)?;
        self.access(iova, 4, Access::WRITE, |memory, _, _| {
            memory.store_release_u32(0, value).is_ok()
        })
    }

    /// Reads a `u64` (native byte order, relaxed) as one access, which is never torn by another
    /// thread's `u64` access.
    ///
    /// # Errors
    /// [`Fault`]; [`FaultKind::Misaligned`] if `iova` is not a multiple of 8.
    pub fn read_u64(&self, iova: Iova) -> Result<u64, Fault> {
        let mut value = 0;
        self.aligned(iova, 8)?;
        self.access(iova, 8, Access::READ, |memory, _, _| {
            memory.read_u64(0).map(|found| value = found).is_ok()
        })?;
        Ok(value)
    }

    /// Writes a `u64` (native byte order, relaxed) as one access.
    ///
    /// # Errors
    /// [`Fault`]; [`FaultKind::Misaligned`] if `iova` is not a multiple of 8.
    pub fn write_u64(&self, iova: Iova, value: u64) -> Result<(), Fault> {
        self.aligned(iova, 8)?;
        self.access(iova, 8, Access::WRITE, |memory, _, _| memory.write_u64(0, value).is_ok())
    }

    /// Waits until the walks of all accesses up to now have ended on the timeline, as a program
    /// does that needs the device's completion: yields the processor meanwhile. Returns at once if
    /// [walks cost nothing](crate::SoftConfig::walk_cost).
    ///
    /// An access returns before, with its data, and takes no time of the thread that plays the
    /// device. The walks of a device follow one another; those since the last call begin no earlier
    /// than this one, because an access reads no clock.
    ///
    /// ```
    /// use pinfold_core::access::ToDevice;
    /// use pinfold_soft::SoftConfig;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = SoftConfig { walk_cost: SoftConfig::WALK_COST, ..SoftConfig::default() };
    /// let (domain, bus) = pinfold_soft::domain(config)?;
    /// let mapping = domain.map(bus.alloc_pages(1)?, ToDevice)?;
    /// let port = bus.port();
    /// let start = std::time::Instant::now();
    /// port.read(mapping.iova().start(), &mut [0; 64])?;
    /// port.wait_for_walks();
    /// assert!(start.elapsed() >= 4 * SoftConfig::WALK_COST, "one entry of each level");
    /// # Ok(()) }
    /// ```
    pub fn wait_for_walks(&self) {
        if self.unit.walk_ns == 0 {
            return;
        }
        let end = self.device.state().place_walks(self.unit.now_ns());
        while self.unit.now_ns() < end {
            std::thread::yield_now();
        }
    }

    /// Returns the bus, device and function that its requests carry, as
    /// [`FaultRecord::source_id`](crate::FaultRecord::source_id) has it.
    pub fn source_id(&self) -> u16 {
        self.device.source_id
    }

    /// Returns what this port has done so far.
    pub(crate) fn stats(&self) -> PortStats {
        self.device.state().stats
    }

    fn aligned(&self, iova: Iova, bytes: u64) -> Result<(), Fault> {
        if iova.is_aligned(bytes) {
            return Ok(());
        }
        // The device's own error: no request reaches the IOMMU.
        self.device.state().stats.faults += 1;
        Err(Fault { iova, kind: FaultKind::Misaligned })
    }

    /// Calls `act` for each piece of the access with its memory, its offset in the access, and its
    /// length.
    #[inline]
    fn access(
        &self,
        iova: Iova,
        len: usize,
        need: Access,
        mut act: impl FnMut(DmaMemory<'_>, usize, usize) -> bool,
    ) -> Result<(), Fault> {
        if iova.checked_add(len as u64).is_none() {
            self.device.state().stats.faults += 1;
            return Err(self.note(Fault { iova, kind: FaultKind::TooWide }, need));
        }
        let mut done = 0;
        while done < len {
            if done > 0 {
                self.device.let_flush_go_first();
            }
            let mut state = self.device.state();
            let pause = len.min(done + Self::BURST);
            while done < pause {
                // No wrap: the sum for the whole length was checked.
                let at = Iova::new(iova.raw() + done as u64);
                let moved = reach(&self.unit, &mut state, at, need).and_then(|memory| {
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
                        return Err(self.note(Fault { iova: at, kind }, need));
                    }
                }
            }
        }
        Ok(())
    }

    fn note(&self, fault: Fault, need: Access) -> Fault {
        self.unit.note_fault(self.device.source_id, fault, need);
        fault
    }
}

impl Clone for Port {
    fn clone(&self) -> Self {
        let mut port = Self::new(&self.unit, self.device_tlb_entries);
        port.domain = self.domain;
        port
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.unit.remove_device(&self.device);
        let stats = std::mem::take(&mut self.device.state().stats);
        self.unit.add_closed(stats);
    }
}

// The walker: reads a table as VT-d specifies it, without the core's code that writes it.
//
// Second stage (VT-d specification, "Second-Stage Paging Entries"): bit 0 allows reads, bit 1
// writes; with neither the entry is not present, whatever the rest says; bits 8..=10 are reserved
// in a leaf, as are bits 52 and up here.
//
// First stage ("First-Stage Paging Entries"): bit 0 means present and allows reads, bit 1 writes;
// an entry without bit 2 is for privileged requests only; bit 63 is reserved here.
//
// In both, bit 7 makes an entry of level 2 or 3 a leaf; bits 12..=51 are the address, those beyond
// the width of physical addresses reserved; in a large leaf the address bits below its size are
// reserved.

const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const LEAF: u64 = 1 << 7;
const USER: u64 = 1 << 2;

/// Finds the leaf for `iova`, starting at the lowest table page in the device's walk cache.
pub(super) fn walk(unit: &Unit, state: &mut State, iova: Iova) -> Result<Leaf, FaultKind> {
    let (levels, root) = unit.root().ok_or(FaultKind::NotMapped)?;
    // In the first stage the highest bit repeats itself up to bit 63: the domain maps in the lower
    // half only.
    let half = u32::from(unit.config.stage == Stage::First);
    if iova.raw() >> (12 + 9 * u32::from(levels) - half) != 0 {
        return Err(FaultKind::TooWide);
    }
    let both = Access::READ | Access::WRITE;
    let (mut level, mut at) = match state.walks.lowest(iova) {
        Some((level, Some(held))) => (level, held),
        Some((_, None)) => return Err(FaultKind::NotMapped),
        None => (levels, Held { page: root, access: both }),
    };
    loop {
        let shift = 12 + 9 * (u32::from(level) - 1);
        let index = to_usize(iova.raw() >> shift & 511);
        let page = unit.tables.page(at.page).ok_or(FaultKind::BadTable)?;
        let entry = page.entries().get(index).ok_or(FaultKind::BadTable)?.load(Ordering::Acquire);
        state.count_walk_read(unit.walk_ns);
        let Some(allowed) = access(unit.config.stage, entry) else {
            if unit.config.caching_mode {
                state.put_absent(level, iova);
            }
            return Err(FaultKind::NotMapped);
        };
        let access = at.access & allowed;
        if (entry & ADDRESS) >> unit.config.phys_bits.min(52) != 0 {
            return Err(FaultKind::ReservedBits);
        }
        if level == 1 || entry & LEAF != 0 {
            return leaf(unit, state, entry, level, access);
        }
        let page = unit.tables.page_at(entry & ADDRESS).ok_or(FaultKind::BadTable)?;
        level -= 1;
        at = Held { page, access };
        state.walks.put(level, iova, Some(at));
    }
}

/// Returns the access that an entry allows, unless it is not present.
fn access(stage: Stage, entry: u64) -> Option<Access> {
    match stage {
        Stage::Second => (entry & 3 != 0).then_some(Access::from_bits_truncate((entry & 3) as u8)),
        Stage::First if entry & 1 == 0 => None,
        Stage::First if entry & USER == 0 => Some(Access::empty()),
        Stage::First if entry & 2 == 0 => Some(Access::READ),
        Stage::First => Some(Access::READ | Access::WRITE),
    }
}

fn leaf(
    unit: &Unit,
    state: &mut State,
    entry: u64,
    level: u8,
    access: Access,
) -> Result<Leaf, FaultKind> {
    let size = match level {
        1 => PageSize::Size4K,
        2 => PageSize::Size2M,
        3 => PageSize::Size1G,
        _ => return Err(FaultKind::ReservedBits),
    };
    let addr = entry & ADDRESS;
    let reserved = match unit.config.stage {
        Stage::First => 1 << 63,
        Stage::Second => 0xfff << 52 | 7 << 8,
    };
    if addr & size.mask() != 0 || entry & reserved != 0 {
        return Err(FaultKind::ReservedBits);
    }
    let (addr, len) = (to_usize(addr), to_usize(size.bytes()));
    let memory = unit.find(state, addr, len).ok_or(FaultKind::NotRegistered)?;
    Ok(Leaf { memory: inside(memory, addr, len), access, size })
}
