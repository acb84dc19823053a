//! The register file, shared by the driver and the thread that executes commands.

use crate::door::{QueueKind, RegisterWindow, UNWRITTEN};
use pinfold_core::domain::DomainId;
use pinfold_nvme::Registers;
use pinfold_nvme::spec::{Cap, Cc, Csts, Doorbell, offset};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::Duration;

/// A doorbell: its value, the size of its queue (0: there is none), and the queue's other end, as
/// the controller has it. Of a completion queue that is the entry which it writes next, of a
/// submission queue the head that completions have reported.
#[derive(Debug, Default)]
struct DoorbellRegister {
    value: AtomicU32,
    queue_size: AtomicU32,
    end: AtomicU32,
}

impl DoorbellRegister {
    /// Returns whether the value may become `new`. A head passes no entry that is empty; a tail
    /// passes the head by no entry, as it does for more commands than are free: a driver that goes
    /// around the whole queue between two looks is not told apart from one that does not.
    fn may_become(&self, new: u32, size: u32, is_completion: bool) -> bool {
        let (value, end) = (self.value.load(Ordering::SeqCst), self.end.load(Ordering::SeqCst));
        let distance = |from: u32, to: u32| (to + size - from) % size;
        match is_completion {
            true => distance(value, new) <= distance(value, end),
            false => distance(end, value) <= distance(end, new),
        }
    }
}

// Errors of doorbell writes, by the values of the asynchronous event (Base 5.2, figure
// "Asynchronous Event Information - Error Status").
pub(crate) const EVENT_NO_SUCH_DOORBELL: u32 = 0;
pub(crate) const EVENT_BAD_DOORBELL_VALUE: u32 = 1;
const NO_EVENT: u32 = u32::MAX;

/// The admin queues as the host configured them.
pub(crate) struct AdminQueues {
    pub(crate) sq_size: u32,
    pub(crate) cq_size: u32,
    pub(crate) asq: u64,
    pub(crate) acq: u64,
}

/// A doorbell write that was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BadDoorbell {
    pub(crate) at: u32,
    pub(crate) queue: Option<(u16, QueueKind)>,
    pub(crate) value: u32,
    pub(crate) entries: u32,
    /// For a value that passes the queue's other end: that end.
    pub(crate) passed: Option<u32>,
}

/// The findings of a scan of the shared registers.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// A register has changed.
    pub(crate) any: bool,
    pub(crate) admin_queues_changed: bool,
    pub(crate) early_change: bool,
    /// Allocated only where a driver makes mistakes.
    pub(crate) bad_doorbells: Vec<BadDoorbell>,
}

pub(crate) struct RegisterFile {
    cap: Cap,
    /// VS.
    pub(crate) version: u32,
    cc: AtomicU32,
    csts: AtomicU32,
    aqa: AtomicU32,
    asq: AtomicU64,
    acq: AtomicU64,
    doorbells: Box<[DoorbellRegister]>,
    event: AtomicU32,
    pub(crate) bad_doorbells: AtomicU64,
    pub(crate) doorbell_writes: AtomicU64,
    /// Changes of CC.EN before CSTS.RDY had followed the last one: undefined results.
    pub(crate) early_changes: AtomicU64,
    parked: AtomicBool,
    reset: AtomicBool,
    window: Option<Arc<dyn RegisterWindow>>,
    pub(crate) stop: AtomicBool,
}

impl RegisterFile {
    pub(crate) fn new(
        cap: Cap,
        version: u32,
        queues: u16,
        window: Option<Arc<dyn RegisterWindow>>,
    ) -> Self {
        let file = Self {
            cap,
            version,
            cc: AtomicU32::new(0),
            csts: AtomicU32::new(0),
            aqa: AtomicU32::new(0),
            asq: AtomicU64::new(0),
            acq: AtomicU64::new(0),
            doorbells: (0..2 * (usize::from(queues) + 1))
                .map(|_| DoorbellRegister::default())
                .collect(),
            event: AtomicU32::new(NO_EVENT),
            bad_doorbells: AtomicU64::new(0),
            doorbell_writes: AtomicU64::new(0),
            early_changes: AtomicU64::new(0),
            parked: AtomicBool::new(false),
            reset: AtomicBool::new(false),
            window,
            stop: AtomicBool::new(false),
        };
        file.show_reset();
        file
    }

    /// Writes the shared registers as they are after a reset.
    pub(crate) fn show_reset(&self) {
        let Some(window) = &self.window else { return };
        for at in (0..offset::DOORBELLS.min(window.len())).step_by(4) {
            let value = match at {
                offset::CAP | 4 => self.cap_half(at),
                offset::VS => self.version,
                _ => 0,
            };
            window.store(at, value);
        }
        self.clear_doorbells();
        self.cc.store(0, Ordering::SeqCst);
        self.aqa.store(0, Ordering::SeqCst);
        self.asq.store(0, Ordering::SeqCst);
        self.acq.store(0, Ordering::SeqCst);
        self.csts.store(0, Ordering::SeqCst);
    }

    /// Forgets doorbell writes that no scan has seen.
    pub(crate) fn clear_doorbells(&self) {
        let Some(window) = &self.window else { return };
        for at in (offset::DOORBELLS..window.len()).step_by(4) {
            window.store(at, UNWRITTEN);
        }
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.window.is_some()
    }

    pub(crate) fn request_reset(&self) {
        self.reset.store(true, Ordering::SeqCst);
    }
    pub(crate) fn is_reset_pending(&self) -> bool {
        self.reset.load(Ordering::SeqCst)
    }
    pub(crate) fn finish_reset(&self) {
        self.reset.store(false, Ordering::SeqCst);
    }

    /// Ends the engine, as a removal does: all registers read as ones.
    pub(crate) fn remove(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.csts.store(u32::MAX, Ordering::SeqCst);
        if let Some(window) = &self.window {
            for at in (0..window.len()).step_by(4) {
                window.store(at, u32::MAX);
            }
        }
    }

    fn cap_half(&self, at: u32) -> u32 {
        let [a, b, c, d, e, f, g, h] = self.cap.0.to_le_bytes();
        u32::from_le_bytes(if at == offset::CAP { [a, b, c, d] } else { [e, f, g, h] })
    }

    /// Applies what the driver has written to the shared registers since the last scan. `all`:
    /// also looks for writes to doorbells that no queue can have.
    pub(crate) fn scan(&self, all: bool) -> Scan {
        let mut scan = Scan::default();
        let Some(window) = &self.window else { return scan };
        // First CC: what a driver wrote before it is then visible.
        let cc = window.load(offset::CC);
        let wide = |at: u32| u64::from(window.load(at)) | u64::from(window.load(at + 4)) << 32;
        let (aqa, asq, acq) = (window.load(offset::AQA), wide(offset::ASQ), wide(offset::ACQ));
        let changed = aqa != self.aqa.swap(aqa, Ordering::SeqCst);
        let changed = changed | (asq != self.asq.swap(asq, Ordering::SeqCst));
        let changed = changed | (acq != self.acq.swap(acq, Ordering::SeqCst));
        scan.admin_queues_changed = changed && self.cc().enabled();
        if cc != self.cc.load(Ordering::SeqCst) {
            let before = self.early_changes.load(Ordering::Relaxed);
            self.configure(cc);
            scan.early_change = self.early_changes.load(Ordering::Relaxed) != before;
            scan.any = true;
        }
        let csts = self.csts.load(Ordering::SeqCst);
        if window.load(offset::CSTS) != csts {
            window.store(offset::CSTS, csts);
        }
        if all {
            for at in [offset::CAP, 4, offset::VS] {
                let value = if at == offset::VS { self.version } else { self.cap_half(at) };
                if window.load(at) != value {
                    window.store(at, value);
                }
            }
        }
        let stride = 4u32 << self.cap.doorbell_stride_shift();
        let used = u32::try_from(self.doorbells.len()).unwrap_or(0).saturating_mul(stride);
        let (end, step) = match all {
            true => (window.len(), 4),
            false => (offset::DOORBELLS.saturating_add(used).min(window.len()), stride),
        };
        let mut at = offset::DOORBELLS;
        while at < end {
            if window.load(at) != UNWRITTEN {
                let value = window.swap(at, UNWRITTEN);
                scan.any = true;
                scan.bad_doorbells.extend(self.write_doorbell(at, value).err());
            }
            at = at.saturating_add(step);
        }
        scan
    }

    pub(crate) fn cap(&self) -> Cap {
        self.cap
    }
    pub(crate) fn cc(&self) -> Cc {
        Cc(self.cc.load(Ordering::SeqCst))
    }
    pub(crate) fn csts(&self) -> Csts {
        Csts::from_bits_retain(self.csts.load(Ordering::Acquire))
    }
    pub(crate) fn set_csts(&self, csts: Csts) {
        self.csts.store(csts.bits(), Ordering::SeqCst);
        if let Some(window) = &self.window {
            window.store(offset::CSTS, csts.bits());
        }
    }
    /// Returns AQA, ASQ and ACQ.
    pub(crate) fn admin_queues(&self) -> AdminQueues {
        let aqa = self.aqa.load(Ordering::Acquire);
        AdminQueues {
            sq_size: (aqa & 0xfff) + 1,
            cq_size: (aqa >> 16 & 0xfff) + 1,
            asq: self.asq.load(Ordering::Acquire),
            acq: self.acq.load(Ordering::Acquire),
        }
    }

    fn doorbell_register(&self, queue: u16, which: Doorbell) -> Option<&DoorbellRegister> {
        self.doorbells.get(2 * usize::from(queue) + usize::from(which == Doorbell::CompletionHead))
    }

    /// Returns the value last written to a doorbell.
    pub(crate) fn doorbell(&self, queue: u16, which: Doorbell) -> u32 {
        self.doorbell_register(queue, which)
            .map_or(0, |doorbell| doorbell.value.load(Ordering::SeqCst))
    }

    /// Resets a doorbell for a new queue of `size` entries, or, with 0, for a deleted one.
    pub(crate) fn set_queue_size(&self, queue: u16, which: Doorbell, size: u32) {
        if let Some(doorbell) = self.doorbell_register(queue, which) {
            doorbell.value.store(0, Ordering::Release);
            doorbell.end.store(0, Ordering::Release);
            doorbell.queue_size.store(size, Ordering::Release);
        }
    }

    /// Shows the other end of a queue: which entry of a completion queue is written next, or which
    /// head of a submission queue a completion reports; before that completion becomes valid.
    pub(crate) fn set_end(&self, queue: u16, which: Doorbell, end: u32) {
        if let Some(doorbell) = self.doorbell_register(queue, which) {
            doorbell.end.store(end, Ordering::SeqCst);
        }
    }

    /// Returns the last doorbell error since the last call.
    pub(crate) fn take_event(&self) -> Option<u32> {
        if self.event.load(Ordering::Acquire) == NO_EVENT {
            return None;
        }
        Some(self.event.swap(NO_EVENT, Ordering::AcqRel)).filter(|event| *event != NO_EVENT)
    }

    /// Sleeps until [`wake`](Self::wake), for at most `limit`, unless `has_work`.
    pub(crate) fn park(&self, limit: Duration, has_work: impl FnOnce() -> bool) {
        // SeqCst here, in `wake`, and for the registers: either the writer sees `parked`, or this
        // thread sees the write.
        self.parked.store(true, Ordering::SeqCst);
        if has_work() || self.stop.load(Ordering::SeqCst) {
            self.parked.store(false, Ordering::SeqCst);
            return;
        }
        std::thread::park_timeout(limit);
        self.parked.store(false, Ordering::SeqCst);
    }

    /// Returns whether the engine sleeps, having found nothing to do. It may be about to look once
    /// more.
    pub(crate) fn is_parked(&self) -> bool {
        self.parked.load(Ordering::SeqCst)
    }

    pub(crate) fn wake(&self, thread: &Thread) {
        if self.parked.load(Ordering::SeqCst) && self.parked.swap(false, Ordering::SeqCst) {
            thread.unpark();
        }
    }

    fn configure(&self, value: u32) {
        let before = Cc(self.cc.swap(value, Ordering::SeqCst));
        let (csts, enabled) = (self.csts(), Cc(value).enabled());
        // After a failure or a shutdown a reset is expected.
        let settled = csts.contains(Csts::READY) == before.enabled()
            || csts.intersects(Csts::FATAL | Csts::SHUTDOWN_BUSY | Csts::SHUTDOWN_COMPLETE);
        if before.enabled() != enabled && !settled {
            self.early_changes.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn write_doorbell(&self, at: u32, value: u32) -> Result<(), BadDoorbell> {
        let stride = 4 << self.cap.doorbell_stride_shift();
        let distance = at - offset::DOORBELLS;
        let index = distance / stride;
        let doorbell = usize::try_from(index).ok().and_then(|i| self.doorbells.get(i));
        let doorbell = doorbell.filter(|_| distance.is_multiple_of(stride));
        let size = doorbell.map_or(0, |doorbell| doorbell.queue_size.load(Ordering::Acquire));
        let is_completion = !index.is_multiple_of(2);
        let passed = match doorbell {
            Some(doorbell) if value < size => {
                if doorbell.may_become(value, size, is_completion) {
                    doorbell.value.store(value, Ordering::SeqCst);
                    self.doorbell_writes.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
                Some(doorbell.end.load(Ordering::SeqCst))
            }
            _ => None,
        };
        let event = if size == 0 { EVENT_NO_SUCH_DOORBELL } else { EVENT_BAD_DOORBELL_VALUE };
        self.bad_doorbells.fetch_add(1, Ordering::Relaxed);
        self.event.store(event, Ordering::SeqCst);
        let kind = if is_completion { QueueKind::Completion } else { QueueKind::Submission };
        let queue = u16::try_from(index / 2).ok().map(|id| (id, kind));
        let queue = queue.filter(|_| distance.is_multiple_of(stride));
        Err(BadDoorbell { at, queue, value, entries: size, passed })
    }
}

/// The model's registers, for the driver. After the model is dropped they read as all ones.
#[derive(Clone)]
pub struct ModelRegisters {
    pub(crate) file: Arc<RegisterFile>,
    pub(crate) thread: Thread,
    pub(crate) domain: Option<DomainId>,
}

impl std::fmt::Debug for ModelRegisters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelRegisters").field("cc", &self.file.cc()).finish_non_exhaustive()
    }
}

impl Registers for ModelRegisters {
    fn domain(&self) -> Option<DomainId> {
        self.domain
    }

    fn read32(&self, at: u32) -> u32 {
        let file = &self.file;
        if file.stop.load(Ordering::Acquire) {
            return u32::MAX;
        }
        match at {
            offset::CAP..0x08 => file.cap_half(at),
            offset::VS => file.version,
            offset::INTMS | offset::INTMC => 0,
            offset::CC => file.cc.load(Ordering::Acquire),
            offset::CSTS => file.csts.load(Ordering::Acquire),
            offset::AQA => file.aqa.load(Ordering::Acquire),
            offset::DOORBELLS.. => 0,
            _ => u32::MAX,
        }
    }

    fn read64(&self, at: u32) -> u64 {
        match at {
            _ if self.file.stop.load(Ordering::Acquire) => u64::MAX,
            offset::CAP => self.file.cap.0,
            offset::ASQ => self.file.asq.load(Ordering::Acquire),
            offset::ACQ => self.file.acq.load(Ordering::Acquire),
            _ => u64::from(self.read32(at)) | u64::from(self.read32(at.saturating_add(4))) << 32,
        }
    }

    fn write32(&self, at: u32, value: u32) {
        match at {
            offset::CC => self.file.configure(value),
            offset::AQA => self.file.aqa.store(value, Ordering::SeqCst),
            offset::DOORBELLS.. => drop(self.file.write_doorbell(at, value)),
            _ => return,
        }
        self.file.wake(&self.thread);
    }

    fn write64(&self, at: u32, value: u64) {
        match at {
            offset::ASQ => self.file.asq.store(value, Ordering::SeqCst),
            offset::ACQ => self.file.acq.store(value, Ordering::SeqCst),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue pair of eight entries; `write` rings its doorbell, and returns the end that the value
    /// passes.
    fn pair() -> RegisterFile {
        let file = RegisterFile::new(Cap::new(63, 1, 0), 0x20000, 1, None);
        file.set_queue_size(1, Doorbell::SubmissionTail, 8);
        file.set_queue_size(1, Doorbell::CompletionHead, 8);
        file
    }

    fn ring(file: &RegisterFile, at: u32, value: u32) -> Option<u32> {
        file.write_doorbell(offset::DOORBELLS + at, value).err().map(|bad| bad.passed.unwrap())
    }

    #[test]
    fn a_tail_passes_no_head() {
        let file = pair();
        let tail = |value| ring(&file, 8, value);
        assert_eq!([7, 0, 3, 6].map(tail), [None, Some(0), Some(0), Some(0)]);
        assert_eq!(file.doorbell(1, Doorbell::SubmissionTail), 7);
        // The same value again adds nothing.
        assert_eq!(tail(7), None);
        file.set_end(1, Doorbell::SubmissionTail, 5);
        assert_eq!([0, 4, 5, 3].map(tail), [None, None, Some(5), Some(5)]);
        file.set_end(1, Doorbell::SubmissionTail, 4);
        assert_eq!([5, 3, 4].map(tail), [None, None, Some(4)]);
        // A new queue begins anew.
        file.set_queue_size(1, Doorbell::SubmissionTail, 8);
        assert_eq!([1, 7].map(tail), [None, None]);
    }

    #[test]
    fn a_head_passes_no_tail() {
        let file = pair();
        let head = |value| ring(&file, 12, value);
        assert_eq!([0, 1].map(head), [None, Some(0)]);
        file.set_end(1, Doorbell::CompletionHead, 5);
        assert_eq!([3, 6, 2, 5, 6].map(head), [None, Some(5), Some(5), None, Some(5)]);
        file.set_end(1, Doorbell::CompletionHead, 2);
        assert_eq!([7, 2, 3].map(head), [None, None, Some(2)]);
    }
}
