//! [`Lane`]: one unit of the IOMMU (the whole is `Unit`): its invalidation queue and its devices.

use crate::config::SoftConfig;
use crate::device::Device;
use crate::timeline::{Clock, Model, Timeline};
use pinfold_core::invalidate::{Descriptor, InvalidationQueue, QueueError, Ticket, WaitLimit};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A queue and the devices that its descriptors reach.
#[derive(Debug)]
pub(super) struct Lane {
    line: Mutex<Line>,
    /// The number of devices with a TLB of their own.
    device_tlbs: AtomicUsize,
    clock: Clock,
    model: Model,
    queue_entries: usize,
    queue_depth: u64,
    limit: WaitLimit,
    caching_mode: bool,
    fail_from: Option<u64>,
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
}

/// The flushes with their times, and the devices that they are executed on: under one lock, which a
/// submission takes once.
#[derive(Debug)]
struct Line {
    timeline: Timeline,
    devices: Vec<Arc<Device>>,
}

impl Lane {
    /// A flush of everything, IOTLB and device TLBs, with its fence and wait, fits into any queue.
    const LEAST_ENTRIES: usize = 4;

    /// Creates the lane of unit `number`, whose random choices are its own.
    pub(super) fn new(config: &SoftConfig, number: u8, clock: Clock) -> Self {
        let timeline = Timeline::new(config.seed.wrapping_add(u64::from(number)));
        Self {
            line: Mutex::new(Line { timeline, devices: Vec::new() }),
            device_tlbs: AtomicUsize::new(0),
            clock,
            model: Model::new(config),
            queue_entries: config.queue_entries.max(Self::LEAST_ENTRIES),
            queue_depth: config.queue_depth,
            limit: WaitLimit::within(config.timeout),
            caching_mode: config.caching_mode,
            fail_from: config.fail_from,
            next_ns: AtomicU64::new(u64::MAX),
            completed: AtomicU64::new(0),
            submitted_ns: AtomicU64::new(0),
            occupied: AtomicUsize::new(0),
            aborted: AtomicBool::new(false),
            failed: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(&self, part: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        let mut line = self.lock();
        if self.fail_from.is_some_and(|first| line.timeline.submitted() + 1 >= first) {
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
            // Nothing is ever in flight, so the flush takes effect here instead of on the timeline.
            flush(&line.devices, part);
            if let Some(ticket) = wait {
                self.completed.store(ticket.0, Ordering::Release);
            }
            return Ok(());
        }
        let now = self.clock.now_ns();
        self.occupied.store(self.occupied.load(Ordering::Relaxed) + entries, Ordering::Relaxed);
        let next = line
            .timeline
            .add(part, wait, now, &self.model)
            .min(self.next_ns.load(Ordering::Relaxed));
        self.submitted_ns.store(now, Ordering::Relaxed);
        if next <= now {
            self.advance(&mut line, now);
        } else {
            self.next_ns.store(next, Ordering::Release);
        }
        Ok(())
    }

    pub(super) fn see_submissions(&self) {
        drop(self.lock());
    }

    /// Returns the last published ticket, and the time of the last submission: for the thread that
    /// made it.
    fn after_submission(&self) -> (Ticket, u64) {
        (Ticket(self.completed.load(Ordering::Acquire)), self.submitted_ns.load(Ordering::Relaxed))
    }

    /// Returns how many entries of the queue are free, those included that are due to become free:
    /// a batch of which nothing but parts is in flight has no wait whose completion would free
    /// them.
    fn accepts(&self) -> usize {
        self.completed();
        self.free_entries()
    }

    fn free_entries(&self) -> usize {
        self.queue_entries.saturating_sub(self.occupied.load(Ordering::Relaxed))
    }

    /// Executes due events. If another thread is already doing so, returns the last published
    /// ticket.
    #[inline]
    pub(super) fn completed(&self) -> Ticket {
        let next = self.next_ns.load(Ordering::Acquire);
        if next < u64::MAX {
            self.advance_if_due(next);
        }
        Ticket(self.completed.load(Ordering::Acquire))
    }

    /// Returns when the next request takes effect or the next batch completes; `u64::MAX` for
    /// never.
    pub(super) fn next_ns(&self) -> u64 {
        self.next_ns.load(Ordering::Acquire)
    }

    fn advance_if_due(&self, next: u64) {
        let now = self.clock.now_ns();
        if next <= now
            && let Ok(mut line) = self.line.try_lock()
        {
            self.advance(&mut line, now);
        }
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

    fn has_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    fn restart(&self) {
        self.aborted.store(false, Ordering::Release);
    }

    pub(super) fn add(&self, device: &Arc<Device>) {
        let has_tlb = device.state().device_tlb.is_some();
        self.lock().devices.push(Arc::clone(device));
        // Its caches are empty, so it reads the entries that a queue which does not see it yet had
        // cleared before `has_device_tlbs`: acquire, of the exchange there, which is before this in
        // the order of changes of this word.
        self.device_tlbs.fetch_add(usize::from(has_tlb), Ordering::AcqRel);
    }

    /// Removes a device. Returns whether it was behind this unit.
    pub(super) fn remove(&self, device: &Arc<Device>) -> bool {
        let mut line = self.lock();
        let before = line.devices.len();
        line.devices.retain(|other| !Arc::ptr_eq(other, device));
        let was_here = line.devices.len() < before;
        drop(line);
        let had_tlb = was_here && device.state().device_tlb.is_some();
        self.device_tlbs.fetch_sub(usize::from(had_tlb), Ordering::AcqRel);
        was_here
    }

    fn has_device_tlbs(&self) -> bool {
        // An exchange reads the last value, so a device that it does not see is added after it
        // (`add`). It costs half of a fence.
        self.device_tlbs.compare_exchange(0, 0, Ordering::AcqRel, Ordering::Relaxed).is_err()
    }

    pub(super) fn each_device(&self, act: &mut impl FnMut(&Device)) {
        self.lock().devices.iter().for_each(|device| act(device));
    }
}

fn flush(devices: &[Arc<Device>], due: &[Descriptor]) {
    devices.iter().for_each(|device| device.flush(due));
}

/// The invalidation queue of one of the units of a [`SoftIommu`](crate::SoftIommu).
#[derive(Debug)]
pub struct UnitQueue(pub(super) Arc<Lane>);

impl InvalidationQueue for UnitQueue {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        self.0.submit(descriptors, wait)
    }

    fn accepts(&self) -> usize {
        self.0.accepts()
    }

    fn completed(&self) -> Ticket {
        self.0.completed()
    }

    #[inline]
    fn after_submission(&self) -> (Ticket, Option<u64>) {
        let (completed, now_ns) = self.0.after_submission();
        (completed, Some(now_ns))
    }

    fn has_device_tlbs(&self) -> bool {
        self.0.has_device_tlbs()
    }

    fn has_aborted(&self) -> bool {
        self.0.has_aborted()
    }

    fn restart(&self) {
        self.0.restart();
    }

    fn has_failed(&self) -> bool {
        self.0.has_failed()
    }

    fn now_ns(&self) -> Option<u64> {
        Some(self.0.clock.now_ns())
    }

    fn limit(&self) -> WaitLimit {
        self.0.limit
    }

    fn queue_depth(&self) -> u64 {
        self.0.queue_depth
    }

    fn caches_not_present(&self) -> bool {
        self.0.caching_mode
    }
}
