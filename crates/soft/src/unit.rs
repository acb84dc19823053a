//! The IOMMU that all ports share.

use crate::config::SoftConfig;
use crate::device::{Device, State};
use crate::fault::Fault;
use crate::int::to_usize;
use crate::memory::{Registry, inside};
use crate::record::{FaultReason, FaultRecord, FaultRegisters, FaultReport};
use crate::stats::PortStats;
use crate::tables::{PageNumber, Tables};
use crate::timeline::{Model, Timeline};
use pinfold_core::access::Access;
use pinfold_core::addr::{PhysAddr, PhysRange};
use pinfold_core::domain::{BackendError, PhysExtent};
use pinfold_core::invalidate::{Descriptor, QueueError, Ticket};
use pinfold_core::mem::DmaMemory;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

const PAGE: u64 = 4096;

/// Lock order: `line`, a device's state, `registry`, `faults`.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) config: SoftConfig,
    pub(super) tables: Tables,
    start: Instant,
    /// The number of the root, with the number of levels in the lower 3 bits; 0 means no table.
    root: AtomicU64,
    registry: RwLock<Registry>,
    /// Incremented when memory is unregistered.
    generation: AtomicU64,
    line: Mutex<Line>,
    /// The source identifier of the next device. It wraps.
    sources: AtomicU16,
    /// How many devices have a TLB of their own.
    device_tlbs: AtomicUsize,
    model: Model,
    /// What a table entry costs that a walk reads.
    pub(super) walk_ns: u64,
    /// When the next request takes effect or the next batch completes; `u64::MAX` for never.
    next_ns: AtomicU64,
    completed: AtomicU64,
    /// When the last batch was submitted.
    submitted_ns: AtomicU64,
    /// The entries of the queue that are occupied. Changed with `line` held.
    occupied: AtomicUsize,
    /// Whether everything in flight was aborted, and the queue was not restarted.
    aborted: AtomicBool,
    /// Whether the unit has refused a batch for good.
    failed: AtomicBool,
    faults: Mutex<FaultRegisters>,
    /// The statistics of ports that were dropped.
    closed: Mutex<PortStats>,
}

/// What is to be flushed when, and the devices that it is flushed from: under one lock, which a submission takes once.
#[derive(Debug)]
struct Line {
    timeline: Timeline,
    devices: Vec<Arc<Device>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Unit {
    /// A flush of everything, IOTLB and device TLBs, with its fence and wait, fits into any queue.
    const LEAST_ENTRIES: usize = 4;

    pub(super) fn new(config: SoftConfig) -> Result<Self, BackendError> {
        Ok(Self {
            tables: Tables::new(config.table_bytes)?,
            start: Instant::now(),
            root: AtomicU64::new(0),
            registry: RwLock::default(),
            generation: AtomicU64::new(0),
            line: Mutex::new(Line { timeline: Timeline::new(config.seed), devices: Vec::new() }),
            sources: AtomicU16::new(8),
            device_tlbs: AtomicUsize::new(0),
            model: Model::new(&config),
            walk_ns: u64::try_from(config.walk_cost.as_nanos()).unwrap_or(u64::MAX),
            next_ns: AtomicU64::new(u64::MAX),
            completed: AtomicU64::new(0),
            submitted_ns: AtomicU64::new(0),
            occupied: AtomicUsize::new(0),
            aborted: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            faults: Mutex::default(),
            closed: Mutex::default(),
            config,
        })
    }

    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
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
        // SAFETY: the caller keeps it valid until `unregister_memory` has returned, which removes it here and from every device.
        let memory = unsafe { memory.extend() };
        self.registry.write().unwrap_or_else(PoisonError::into_inner).add(memory)
    }

    pub(super) fn unregister_memory(&self, memory: DmaMemory) {
        if !self.registry.write().unwrap_or_else(PoisonError::into_inner).remove(memory) {
            return;
        }
        self.generation.fetch_add(1, Ordering::Release);
        // A device that found the memory before it left the registry did so under its own lock: afterwards its access has
        // ended and what it found is dropped.
        let removed = |page: &DmaMemory| inside(memory, page.addr(), page.len()).is_some();
        self.each_device(|device| device.state().drop_memory(removed));
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

    /// Returns how often memory has been unregistered.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns the registered memory that contains `addr..addr + len`, from `state` if it was found last.
    pub(super) fn find(&self, state: &mut State, addr: usize, len: usize) -> Option<DmaMemory<'static>> {
        let generation = self.generation();
        if let Some(memory) = state.last_found(generation, addr, len) {
            return Some(memory);
        }
        let memory = self.registry.read().unwrap_or_else(PoisonError::into_inner).find(addr, len)?;
        state.last = Some((generation, memory));
        Some(memory)
    }

    pub(super) fn submit(&self, part: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        let mut line = lock(&self.line);
        if self.config.fail_from.is_some_and(|first| line.timeline.submitted() + 1 >= first) {
            // Nothing that is in flight takes effect or completes from here on.
            self.next_ns.store(u64::MAX, Ordering::Release);
            self.failed.store(true, Ordering::Release);
            return Err(QueueError::Failed);
        }
        let entries = part.len() + usize::from(wait.is_some());
        if self.aborted.load(Ordering::Relaxed) || self.free_entries() < entries {
            return Err(QueueError::Full);
        }
        if self.model.is_immediate() {
            // Nothing is ever in flight: what the timeline would do at once.
            flush(&line.devices, part);
            if let Some(ticket) = wait {
                self.completed.store(ticket.0, Ordering::Release);
            }
            return Ok(());
        }
        let now = self.now_ns();
        self.occupied.store(self.occupied.load(Ordering::Relaxed) + entries, Ordering::Relaxed);
        let next = line.timeline.add(part, wait, now, &self.model).min(self.next_ns.load(Ordering::Relaxed));
        self.submitted_ns.store(now, Ordering::Relaxed);
        if next <= now {
            self.advance(&mut line, now);
        } else {
            self.next_ns.store(next, Ordering::Release);
        }
        Ok(())
    }

    /// Returns the last published ticket, and the time of the last submission: for the thread that made it.
    pub(super) fn after_submission(&self) -> (Ticket, u64) {
        (Ticket(self.completed.load(Ordering::Acquire)), self.submitted_ns.load(Ordering::Relaxed))
    }

    /// Returns how many entries of the queue are free, those included that are due to become free: a batch of which nothing but
    /// parts is in flight has no wait whose completion would free them.
    pub(super) fn accepts(&self) -> usize {
        self.completed();
        self.free_entries()
    }

    fn free_entries(&self) -> usize {
        let entries = self.config.queue_entries.max(Self::LEAST_ENTRIES);
        entries.saturating_sub(self.occupied.load(Ordering::Relaxed))
    }

    /// Executes what is due. If another thread is already doing so, returns the last published ticket.
    pub(super) fn completed(&self) -> Ticket {
        let next = self.next_ns.load(Ordering::Acquire);
        if next < u64::MAX {
            let now = self.now_ns();
            if next <= now
                && let Ok(mut line) = self.line.try_lock()
            {
                self.advance(&mut line, now);
            }
        }
        Ticket(self.completed.load(Ordering::Acquire))
    }

    fn advance(&self, line: &mut Line, now: u64) {
        let Line { timeline, devices } = line;
        let progress = timeline.advance(now, |due| flush(devices, due));
        if let Some(ticket) = progress.completed {
            self.completed.store(ticket.0, Ordering::Release);
        }
        if progress.aborted {
            self.aborted.store(true, Ordering::Release);
        }
        if progress.entries > 0 {
            let occupied = self.occupied.load(Ordering::Relaxed) - progress.entries;
            self.occupied.store(occupied, Ordering::Relaxed);
        }
        self.next_ns.store(timeline.next_ns(), Ordering::Release);
    }

    pub(super) fn has_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn restart(&self) {
        self.aborted.store(false, Ordering::Release);
    }

    /// Creates a device, with a TLB of its own of `device_tlb_entries` if there is such a number.
    pub(super) fn add_device(&self, device_tlb_entries: Option<usize>) -> Arc<Device> {
        // Function 0 of each device: 00:01.0, 00:02.0 ... 01:00.0 and so on.
        let source_id = self.sources.fetch_add(8, Ordering::Relaxed);
        let device = Arc::new(Device::new(source_id, self.config.iotlb_entries, device_tlb_entries));
        lock(&self.line).devices.push(Arc::clone(&device));
        // Its caches are empty, so it reads the entries that a queue which does not see it yet had cleared before
        // `has_device_tlbs`: acquire, of the exchange there, which is before this in the order of changes of this word.
        self.device_tlbs.fetch_add(usize::from(device_tlb_entries.is_some()), Ordering::AcqRel);
        device
    }

    pub(super) fn remove_device(&self, device: &Arc<Device>) {
        lock(&self.line).devices.retain(|other| !Arc::ptr_eq(other, device));
        let had_tlb = device.state().device_tlb.is_some();
        self.device_tlbs.fetch_sub(usize::from(had_tlb), Ordering::AcqRel);
    }

    pub(super) fn has_device_tlbs(&self) -> bool {
        // An exchange reads the last value, so a device that it does not see is added after it (`add_device`). It costs half
        // of a fence.
        self.device_tlbs.compare_exchange(0, 0, Ordering::AcqRel, Ordering::Relaxed).is_err()
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
        lock(&self.line).devices.iter().for_each(|device| act(device));
    }
}

fn flush(devices: &[Arc<Device>], due: &[Descriptor]) {
    devices.iter().for_each(|device| device.flush(due));
}
