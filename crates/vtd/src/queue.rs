//! The queue of a unit ("Queued Invalidation Interface"): a ring of descriptors that the domains of
//! the unit share. Each batch is one write of the tail register; completions are read in memory.

use crate::descriptor::{self, Words};
use crate::registers::{Capabilities, FSTS, FaultStatus, IQA, IQH, IQT, Registers};
use crate::write_back::WriteBack;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use pinfold_core::addr::PhysAddr;
use pinfold_core::invalidate::QueueError;
use pinfold_core::table::TablePage;
use spin::Mutex;

/// Descriptors in a ring of one page: `QS` 0 of the queue's address register means 256.
pub(crate) const SLOTS: usize = 256;
/// A ring with `SLOTS` entries would appear empty ("the queue is full when the tail is one behind
/// the head").
pub(crate) const CAPACITY: usize = SLOTS - 1;

/// The number of polls of a register before the unit counts as failed. A read takes at least a
/// fraction of a microsecond.
pub(crate) const REGISTER_POLLS: u32 = if cfg!(test) { 1_000 } else { 10_000_000 };

/// The number of times that errors found during a recovery are cleared before the unit counts as
/// failed.
const RECOVERIES: u32 = 8;

/// A page for the unit, and where the unit finds it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HardwarePage {
    pub(crate) page: &'static TablePage,
    pub(crate) phys: PhysAddr,
}

impl HardwarePage {
    /// Returns word `index` of 512.
    pub(crate) fn word(&self, index: usize) -> &'static core::sync::atomic::AtomicU64 {
        // Every caller masks its index or counts to 512.
        &self.page.entries()[index % 512]
    }

    /// Sets every word to 0, and has the unit see it.
    pub(crate) fn zero<W: WriteBack>(&self) {
        for word in self.page.entries() {
            word.store(0, Ordering::Relaxed);
        }
        W::write_back(self.page.entries());
    }
}

pub(crate) struct Queue<R, W> {
    pub(crate) registers: R,
    pub(crate) capabilities: Capabilities,
    ring: Mutex<Ring>,
    /// The number of times that the unit has aborted the descriptors in flight. Changed with the
    /// ring locked. It names an abort to requesters that may look at any later time, so it must not
    /// wrap.
    aborts: AtomicU64,
    /// Whether the unit may use what it has cached: from before translation is enabled until it has
    /// been seen to have ended.
    caches: AtomicBool,
    /// Whether it no longer carries out anything.
    failed: AtomicBool,
    /// Errors of devices' answers ("Invalidation Completion Error").
    pub(crate) wrong_answers: AtomicU32,
    /// The address that waits write whose completion is of no interest.
    unseen: PhysAddr,
    write_back: PhantomData<fn() -> W>,
}

struct Ring {
    page: HardwarePage,
    /// The next slot to be written, not masked.
    tail: usize,
    /// Everything before this slot is known to have been fetched; not masked.
    head: usize,
    /// Whether domains may submit: between `enable` and `disable`. Descriptors written while the
    /// unit accepts none are lost when it does again.
    open: bool,
}

impl Ring {
    fn free(&self) -> usize {
        CAPACITY.saturating_sub(self.tail.wrapping_sub(self.head))
    }

    /// Reads how far the unit has come. QH is in bits 4 to 18 of the head register: the byte offset
    /// of a descriptor of 16 bytes.
    fn advance(&mut self, registers: &impl Registers) {
        let head = slot_of(registers.read64(IQH));
        let fetched = head.wrapping_sub(self.head) % SLOTS;
        // Descriptors that were never written do not count as fetched.
        self.head = self.head.wrapping_add(fetched.min(self.tail.wrapping_sub(self.head)));
    }

    fn write<W: WriteBack>(&self, slot: usize, [low, high]: Words) {
        let first = slot % SLOTS * 2;
        let (a, b) = (self.page.word(first), self.page.word(first + 1));
        a.store(low, Ordering::Relaxed);
        b.store(high, Ordering::Relaxed);
        // One line: a descriptor is aligned to its size.
        if let Some(words) = self.page.page.entries().get(first..first + 2) {
            W::write_back(words);
        }
    }
}

/// The requester on whose behalf descriptors are submitted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sender {
    /// A domain, which submits as it is used. `begun` says whether it has waits in flight, or a part
    /// of a batch: then nothing is accepted after an abort until it has restarted.
    Domain {
        /// See above.
        begun: bool,
    },
    /// The unit between its commands. It knows whether the queue is enabled, and submits to one that
    /// is closed to domains, too.
    Unit,
}

fn slot_of(register: u64) -> usize {
    (register >> 4) as usize % SLOTS
}

/// The waits of one requester, which an abort ends.
pub(crate) struct Aborts(AtomicU64);

impl Aborts {
    pub(crate) fn new<R, W>(queue: &Queue<R, W>) -> Self {
        Self(AtomicU64::new(queue.aborts.load(Ordering::Acquire)))
    }
}

impl<R: Registers, W: WriteBack> Queue<R, W> {
    /// A queue in `page`, which is zero, and not yet enabled. Waits of no interest write to `unseen`.
    pub(crate) fn new(registers: R, page: HardwarePage, unseen: PhysAddr) -> Self {
        Self {
            capabilities: Capabilities::read(&registers),
            registers,
            ring: Mutex::new(Ring { page, tail: 0, head: 0, open: false }),
            aborts: AtomicU64::new(0),
            caches: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            wrong_answers: AtomicU32::new(0),
            unseen,
            write_back: PhantomData,
        }
    }

    /// Sets the registers of an empty queue, before it is enabled: the tail first, then the address
    /// with QS 0 and DW 0, 256 descriptors of 128 bits ("Invalidation Queue Address Register").
    pub(crate) fn place(&self) {
        let mut ring = self.ring.lock();
        (ring.tail, ring.head) = (0, 0);
        self.registers.write64(IQT, 0);
        self.registers.write64(IQA, ring.page.phys.raw());
    }

    /// Accepts descriptors of domains from now on, or refuses them as a full queue does: they are submitted at
    /// a poll when it accepts again.
    pub(crate) fn set_open(&self, open: bool) {
        self.ring.lock().open = open;
    }

    /// Notes that translation is about to be enabled, or has ended.
    pub(crate) fn set_caches(&self, caches: bool) {
        self.caches.store(caches, Ordering::SeqCst);
    }

    pub(crate) fn caches(&self) -> bool {
        self.caches.load(Ordering::SeqCst)
    }

    pub(crate) fn is_open(&self) -> bool {
        self.ring.lock().open
    }

    /// A wait that only holds back what follows.
    pub(crate) fn fence(&self) -> Words {
        descriptor::wait(self.unseen, 0, true)
    }

    /// Returns how many descriptors are accepted now. Reads a register only when few are.
    pub(crate) fn accepts(&self) -> usize {
        let mut ring = self.ring.lock();
        if !ring.open {
            return 0;
        }
        if ring.free() < SLOTS / 2 {
            ring.advance(&self.registers);
        }
        ring.free()
    }

    /// Submits `count` descriptors, which `fill` passes one after the other to its argument, by one
    /// write of the tail. Allocates nothing.
    pub(crate) fn submit(
        &self,
        count: usize,
        aborts: &Aborts,
        sender: Sender,
        fill: impl FnOnce(&mut dyn FnMut(Words)),
    ) -> Result<(), QueueError> {
        if self.has_failed() {
            return Err(QueueError::Failed);
        }
        let mut ring = self.ring.lock();
        let now = self.aborts.load(Ordering::Relaxed);
        let refused = match sender {
            Sender::Domain { begun } => {
                !ring.open || begun && aborts.0.load(Ordering::Relaxed) != now
            }
            Sender::Unit => false,
        };
        if refused {
            return Err(QueueError::Full);
        }
        if ring.free() < count {
            ring.advance(&self.registers);
        }
        if ring.free() < count {
            return Err(QueueError::Full);
        }
        aborts.0.store(now, Ordering::Relaxed);
        fill(&mut |descriptor| {
            ring.write::<W>(ring.tail, descriptor);
            ring.tail = ring.tail.wrapping_add(1);
        });
        self.ring_doorbell(ring.tail);
        Ok(())
    }

    /// QT is in bits 4 to 18 of the tail register.
    fn ring_doorbell(&self, tail: usize) {
        // Cleared entries and descriptors are in memory before the doorbell.
        fence(Ordering::SeqCst);
        self.registers.write64(IQT, ((tail % SLOTS) as u64) << 4);
    }

    /// Whether the requester's descriptors in flight were aborted.
    pub(crate) fn has_aborted(&self, aborts: &Aborts) -> bool {
        self.aborts.load(Ordering::Acquire) != aborts.0.load(Ordering::Relaxed)
    }

    /// Records that the requester submits the aborted descriptors again.
    pub(crate) fn restart(&self, aborts: &Aborts) {
        aborts.0.store(self.aborts.load(Ordering::Acquire), Ordering::Relaxed);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Returns the errors of the queue that are set.
    fn errors(&self) -> FaultStatus {
        FaultStatus::from_bits_retain(self.registers.read32(FSTS))
            & (FaultStatus::QUEUE_ERROR | FaultStatus::COMPLETION_ERROR | FaultStatus::TIME_OUT)
    }

    /// Checks for errors, and recovers from them ("Hardware Handling of Queued Invalidation
    /// Interface Errors"): the unit fetches nothing while IQE or ITE is set. On a time-out, it has
    /// aborted all waits that it had fetched. So everything in the queue counts as aborted:
    /// descriptors that it has not fetched are replaced by waits without a reader, and the errors
    /// are cleared, by writing them back. The same tail is written again: a unit may go on as soon
    /// as the errors are cleared, and QEMU's goes on when the tail is written. The requesters submit
    /// their descriptors in flight again.
    pub(crate) fn recover(&self) {
        if self.has_failed() {
            return;
        }
        let mut ring = self.ring.lock();
        let errors = self.errors();
        if errors.is_empty() {
            return;
        }
        if errors == FaultStatus::COMPLETION_ERROR {
            // The device has still to answer: a time-out follows, if it does not.
            self.wrong_answers.fetch_add(1, Ordering::Relaxed);
            self.registers.write32(FSTS, errors.bits());
            return;
        }
        ring.advance(&self.registers);
        let mut slot = ring.head;
        while slot != ring.tail {
            ring.write::<W>(slot, descriptor::wait(self.unseen, 0, false));
            slot = slot.wrapping_add(1);
        }
        fence(Ordering::SeqCst);
        // Before the unit continues, so that no requester mistakes a later wait for an older one.
        self.aborts.fetch_add(1, Ordering::Release);
        let mut errors = errors;
        for _ in 0..RECOVERIES {
            self.registers.write32(FSTS, errors.bits());
            self.ring_doorbell(ring.tail);
            for _ in 0..REGISTER_POLLS {
                ring.advance(&self.registers);
                if ring.head == ring.tail {
                    return;
                }
                errors = self.errors();
                if errors.intersects(FaultStatus::QUEUE_ERROR | FaultStatus::TIME_OUT) {
                    break;
                }
                core::hint::spin_loop();
            }
        }
        self.failed.store(true, Ordering::Release);
    }
}
