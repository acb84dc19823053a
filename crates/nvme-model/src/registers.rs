//! What the register side and the thread that executes commands have in common.

use pinfold_nvme::Registers;
use pinfold_nvme::spec::{Cap, Cc, Csts, Doorbell, offset};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::Duration;

/// A doorbell: its value, and the size of its queue (0: there is none).
#[derive(Debug, Default)]
pub(crate) struct Bell {
    value: AtomicU32,
    size: AtomicU32,
}

impl Bell {
    pub(crate) fn value(&self) -> u32 {
        self.value.load(Ordering::SeqCst)
    }
    /// The queue begins, with this many entries, or ends, with 0.
    pub(crate) fn set_size(&self, size: u32) {
        self.value.store(0, Ordering::Release);
        self.size.store(size, Ordering::Release);
    }
}

/// What was wrong with a doorbell write; the values are those of the asynchronous event (Base 5.2, figure
/// "Asynchronous Event Information - Error Status").
pub(crate) const EVENT_NO_SUCH_DOORBELL: u32 = 0;
pub(crate) const EVENT_BAD_DOORBELL_VALUE: u32 = 1;
const NO_EVENT: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct RegisterFile {
    cap: Cap,
    /// VS.
    pub(crate) version: u32,
    cc: AtomicU32,
    csts: AtomicU32,
    aqa: AtomicU32,
    asq: AtomicU64,
    acq: AtomicU64,
    bells: Box<[Bell]>,
    event: AtomicU32,
    pub(crate) bad_doorbells: AtomicU64,
    pub(crate) doorbells: AtomicU64,
    /// How often CC.EN was changed while CSTS.RDY had not followed the last change: undefined results.
    pub(crate) early_changes: AtomicU64,
    parked: AtomicBool,
    pub(crate) stop: AtomicBool,
}

impl RegisterFile {
    pub(crate) fn new(cap: Cap, version: u32, queues: u16) -> Self {
        Self {
            cap,
            version,
            cc: AtomicU32::new(0),
            csts: AtomicU32::new(0),
            aqa: AtomicU32::new(0),
            asq: AtomicU64::new(0),
            acq: AtomicU64::new(0),
            bells: (0..2 * (usize::from(queues) + 1)).map(|_| Bell::default()).collect(),
            event: AtomicU32::new(NO_EVENT),
            bad_doorbells: AtomicU64::new(0),
            doorbells: AtomicU64::new(0),
            early_changes: AtomicU64::new(0),
            parked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        }
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
        self.csts.store(csts.bits(), Ordering::Release);
    }
    /// Entries of the admin submission and completion queue, and where they are.
    pub(crate) fn admin_queues(&self) -> (u32, u32, u64, u64) {
        let aqa = self.aqa.load(Ordering::Acquire);
        let (asq, acq) = (self.asq.load(Ordering::Acquire), self.acq.load(Ordering::Acquire));
        ((aqa & 0xfff) + 1, (aqa >> 16 & 0xfff) + 1, asq, acq)
    }
    pub(crate) fn bell(&self, queue: u16, which: Doorbell) -> Option<&Bell> {
        self.bells.get(2 * usize::from(queue) + usize::from(which == Doorbell::CompletionHead))
    }
    /// The doorbell error since the last call, if there was one.
    pub(crate) fn take_event(&self) -> Option<u32> {
        if self.event.load(Ordering::Acquire) == NO_EVENT {
            return None;
        }
        Some(self.event.swap(NO_EVENT, Ordering::AcqRel)).filter(|event| *event != NO_EVENT)
    }

    /// Sleeps until [`wake`](Self::wake), unless `has_work` says that something came in the meantime.
    pub(crate) fn park(&self, has_work: impl FnOnce() -> bool) {
        // SeqCst here, in `wake`, and for what is looked at and written before it: either the writer sees `parked`, or
        // this thread sees what was written.
        self.parked.store(true, Ordering::SeqCst);
        if has_work() || self.stop.load(Ordering::SeqCst) {
            self.parked.store(false, Ordering::SeqCst);
            return;
        }
        // The limit bounds what a lost wake-up could cost; none is known.
        std::thread::park_timeout(Duration::from_millis(100));
        self.parked.store(false, Ordering::SeqCst);
    }

    pub(crate) fn wake(&self, thread: &Thread) {
        if self.parked.load(Ordering::SeqCst) && self.parked.swap(false, Ordering::SeqCst) {
            thread.unpark();
        }
    }

    fn configure(&self, value: u32) {
        let before = Cc(self.cc.swap(value, Ordering::SeqCst));
        let (csts, enabled) = (self.csts(), Cc(value).enabled());
        // After a failure or a shutdown a reset is what is wanted.
        let settled = csts.contains(Csts::READY) == before.enabled()
            || csts.intersects(Csts::FATAL | Csts::SHUTDOWN_BUSY | Csts::SHUTDOWN_COMPLETE);
        if before.enabled() != enabled && !settled {
            self.early_changes.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn ring(&self, at: u32, value: u32) {
        let stride = 4 << self.cap.doorbell_stride_shift();
        let distance = at - offset::DOORBELLS;
        let bell = usize::try_from(distance / stride).ok().and_then(|i| self.bells.get(i));
        let size = bell.map_or(0, |bell| bell.size.load(Ordering::Acquire));
        match bell {
            Some(bell) if distance.is_multiple_of(stride) && value < size => {
                bell.value.store(value, Ordering::SeqCst);
                self.doorbells.fetch_add(1, Ordering::Relaxed);
            }
            _ => {
                let event = if size == 0 { EVENT_NO_SUCH_DOORBELL } else { EVENT_BAD_DOORBELL_VALUE };
                self.bad_doorbells.fetch_add(1, Ordering::Relaxed);
                self.event.store(event, Ordering::SeqCst);
            }
        }
    }
}

/// The model's register file: what the driver is given. When the model is gone it reads as all ones.
#[derive(Clone, Debug)]
pub struct ModelRegisters {
    pub(crate) shared: Arc<RegisterFile>,
    pub(crate) thread: Thread,
}

impl Registers for ModelRegisters {
    fn read32(&self, at: u32) -> u32 {
        let s = &self.shared;
        if s.stop.load(Ordering::Acquire) {
            return u32::MAX;
        }
        match at {
            offset::CAP..0x08 => {
                let [a, b, c, d, e, f, g, h] = s.cap.0.to_le_bytes();
                if at == 0 { u32::from_le_bytes([a, b, c, d]) } else { u32::from_le_bytes([e, f, g, h]) }
            }
            offset::VS => s.version,
            offset::INTMS | offset::INTMC => 0,
            offset::CC => s.cc.load(Ordering::Acquire),
            offset::CSTS => s.csts.load(Ordering::Acquire),
            offset::AQA => s.aqa.load(Ordering::Acquire),
            offset::DOORBELLS.. => 0,
            _ => u32::MAX,
        }
    }

    fn read64(&self, at: u32) -> u64 {
        match at {
            _ if self.shared.stop.load(Ordering::Acquire) => u64::MAX,
            offset::CAP => self.shared.cap.0,
            offset::ASQ => self.shared.asq.load(Ordering::Acquire),
            offset::ACQ => self.shared.acq.load(Ordering::Acquire),
            _ => u64::from(self.read32(at)) | u64::from(self.read32(at.saturating_add(4))) << 32,
        }
    }

    fn write32(&self, at: u32, value: u32) {
        match at {
            offset::CC => self.shared.configure(value),
            offset::AQA => self.shared.aqa.store(value, Ordering::SeqCst),
            offset::DOORBELLS.. => self.shared.ring(at, value),
            _ => return,
        }
        self.shared.wake(&self.thread);
    }

    fn write64(&self, at: u32, value: u64) {
        match at {
            offset::ASQ => self.shared.asq.store(value, Ordering::SeqCst),
            offset::ACQ => self.shared.acq.store(value, Ordering::SeqCst),
            _ => {}
        }
    }
}
