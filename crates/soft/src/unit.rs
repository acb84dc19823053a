//! [`Unit`]: the whole IOMMU, which all ports share. Its units, one or more, are [`Lane`]s.

use crate::config::{Fault, PortStats, SoftConfig};
use crate::device::{Device, State};
use crate::lane::{Lane, UnitQueue};
use crate::memory::{PageNumber, Registry, Tables, inside, to_usize};
use crate::record::{FaultReason, FaultRecord, FaultRegisters, FaultReport};
use crate::timeline::Clock;
use pinfold_core::access::Access;
use pinfold_core::addr::{PhysAddr, PhysRange};
use pinfold_core::domain::{BackendError, Generation, Generations, PhysExtent};
use pinfold_core::invalidate::{FanOut, InvalidationQueue};
use pinfold_core::mem::DmaMemory;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

const PAGE: u64 = 4096;

/// Lock order: the `line` of a lane, a device's state, `registry`, `faults`.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) config: SoftConfig,
    pub(super) tables: Tables,
    clock: Clock,
    /// The number of the root, with the number of levels in the lower 3 bits; 0 means no table.
    root: AtomicU64,
    registry: RwLock<Registry>,
    /// Advanced when memory is unregistered.
    generations: Generations,
    /// The first unit, and the others: a device's cached entries are flushed by the queue of its
    /// lane.
    first: Arc<Lane>,
    others: Box<[Arc<Lane>]>,
    /// The source identifier of the next device. It wraps.
    sources: AtomicU16,
    /// The cost of a table entry that a walk reads.
    pub(super) walk_ns: u64,
    faults: Mutex<FaultRegisters>,
    /// The statistics of ports that were dropped.
    closed: Mutex<PortStats>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Unit {
    pub(super) fn new(config: SoftConfig) -> Result<Self, BackendError> {
        let clock = Clock::start();
        let lane = |number| Arc::new(Lane::new(&config, number, clock));
        let (first, others) = (lane(0), (1..config.units).map(lane).collect());
        Ok(Self {
            tables: Tables::new(config.table_bytes, config.table_reserved)?,
            clock,
            root: AtomicU64::new(0),
            registry: RwLock::default(),
            generations: Generations::new(),
            first,
            others,
            sources: AtomicU16::new(8),
            walk_ns: u64::try_from(config.walk_cost.as_nanos()).unwrap_or(u64::MAX),
            faults: Mutex::default(),
            closed: Mutex::default(),
            config,
        })
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    pub(super) fn attach(&self, root: PhysAddr, levels: u8) {
        let page = self.tables.page_at(root.raw()).filter(|_| root.is_aligned(PAGE));
        let value = page.map_or(0, |page| page.pack() << 3 | u64::from(levels.clamp(1, 5)));
        self.root.store(value, Ordering::Release);
        self.drop_everywhere();
    }

    pub(super) fn detach(&self) {
        self.root.store(0, Ordering::Release);
        self.drop_everywhere();
    }

    /// Returns the number of levels, and the number of the root among the table pages.
    pub(super) fn root(&self) -> Option<(u8, PageNumber)> {
        let root = self.root.load(Ordering::Acquire);
        (root != 0).then_some(((root & 7) as u8, PageNumber::unpack(root >> 3)))
    }

    /// # Safety
    /// The caller keeps the memory valid until `unregister_memory` has returned.
    pub(super) unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller keeps it valid until `unregister_memory` has returned, which removes
        // it here and from every device.
        let memory = unsafe { memory.extend() };
        self.registry.write().unwrap_or_else(PoisonError::into_inner).add(memory)
    }

    pub(super) fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        if !self.registry.write().unwrap_or_else(PoisonError::into_inner).remove(memory) {
            return Err(BackendError::NotRegistered { addr: memory.addr(), len: memory.len() });
        }
        self.generations.advance();
        // A device that found the memory before it left the registry did so under its own lock:
        // afterwards its access has ended and what it found is dropped.
        let removed = |page: &DmaMemory| inside(memory, page.addr(), page.len()).is_some();
        self.each_device(|device| device.state().drop_memory(removed));
        Ok(())
    }

    /// Returns the registered memory around the start of `memory`, as far as it is contiguous.
    pub(super) fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        let error = || BackendError::NotRegistered { addr, len };
        let found = self.registry.read().unwrap_or_else(PoisonError::into_inner).find(addr, len);
        let found = found.ok_or_else(error)?;
        let (mut start, mut end) = (found.addr() as u64, found.addr() as u64 + found.len() as u64);
        if let Some(piece) = self.config.contiguous_bytes {
            let piece = piece.max(PAGE).checked_next_power_of_two().unwrap_or(1 << 63);
            let border = addr as u64 & !(piece - 1);
            (start, end) = (start.max(border), end.min(border.saturating_add(piece)));
        }
        let phys = PhysRange::new(PhysAddr::new(start), end - start).map_err(|_| error())?;
        Ok(PhysExtent::new(to_usize(start), phys))
    }

    pub(super) fn generation(&self) -> Generation {
        self.generations.current()
    }

    /// Returns the registered memory that contains `addr..addr + len`, from `state` if it was found
    /// last.
    pub(super) fn find(
        &self,
        state: &mut State,
        addr: usize,
        len: usize,
    ) -> Option<DmaMemory<'static>> {
        let generation = self.generation();
        if let Some(memory) = state.last_found(generation, addr, len) {
            return Some(memory);
        }
        let memory =
            self.registry.read().unwrap_or_else(PoisonError::into_inner).find(addr, len)?;
        state.last = Some((generation, memory));
        Some(memory)
    }

    fn lanes(&self) -> impl Iterator<Item = &Arc<Lane>> {
        core::iter::once(&self.first).chain(&self.others)
    }

    /// Returns the queue over those of all units, each of which, with its number, is used through
    /// what `over` makes of it.
    pub(super) fn queues<Q: InvalidationQueue>(
        &self,
        over: impl Fn(usize, UnitQueue) -> Q,
    ) -> FanOut<Q> {
        let queue = |(number, lane): (usize, &Arc<Lane>)| over(number, UnitQueue(Arc::clone(lane)));
        FanOut::new(queue((0, &self.first)), (1..).zip(&self.others).map(queue))
    }

    /// Creates a device behind the next unit in sequence, with a TLB of its own of
    /// `device_tlb_entries` if there is such a number.
    pub(super) fn add_device(&self, device_tlb_entries: Option<usize>) -> Arc<Device> {
        // Function 0 of each device: 00:01.0, 00:02.0 ... 01:00.0 and so on.
        let source_id = self.sources.fetch_add(8, Ordering::Relaxed);
        let device =
            Arc::new(Device::new(source_id, self.config.iotlb_entries, device_tlb_entries));
        let unit = usize::from(source_id >> 3).wrapping_sub(1) % (1 + self.others.len());
        if let Some(lane) = self.lanes().nth(unit) {
            lane.add(&device);
        }
        device
    }

    pub(super) fn remove_device(&self, device: &Arc<Device>) {
        let _ = self.lanes().any(|lane| lane.remove(device));
    }

    /// Returns when the next request takes effect or the next batch completes; `u64::MAX` for
    /// never.
    pub(super) fn next_ns(&self) -> u64 {
        self.lanes().map(|lane| lane.next_ns()).min().unwrap_or(u64::MAX)
    }

    /// Orders the caller behind all submissions that have ended: it sees their events. A submission
    /// that has not ended sees the caller's earlier stores.
    pub(super) fn see_submissions(&self) {
        self.lanes().for_each(|lane| lane.see_submissions());
    }

    /// Executes due events in all units.
    pub(super) fn advance(&self) {
        for lane in self.lanes() {
            lane.completed();
        }
    }

    /// Records a request that the unit has blocked.
    pub(super) fn note_fault(&self, source_id: u16, fault: Fault, need: Access) {
        if let Some(reason) = FaultReason::of(fault.kind, need, self.root().is_some()) {
            lock(&self.faults).record(FaultRecord::new(source_id, fault.iova, need, reason));
        }
    }

    pub(super) fn take_faults(&self) -> FaultReport {
        lock(&self.faults).take()
    }

    pub(super) fn add_closed(&self, stats: PortStats) {
        lock(&self.closed).add(stats);
    }

    pub(super) fn stats(&self) -> PortStats {
        let mut sum = *lock(&self.closed);
        self.each_device(|device| sum.add(device.state().stats));
        sum
    }

    fn drop_everywhere(&self) {
        self.each_device(|device| device.state().drop_all());
    }

    fn each_device(&self, mut act: impl FnMut(&Device)) {
        self.lanes().for_each(|lane| lane.each_device(&mut act));
    }
}
