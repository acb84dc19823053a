//! A domain's share of the unit's queue: [`InvalidationQueue`] for its flushes, with a status word
//! of its own, and the translation of its memory.

use crate::descriptor::{self, TlbDevice, Words};
use crate::queue::{Aborts, CAPACITY, HardwarePage, Queue, Sender};
use crate::registers::Registers;
use crate::source::SourceId;
use crate::write_back::WriteBack;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use core::task::Waker;
use pinfold_core::addr::PhysAddr;
use pinfold_core::domain::{BackendError, Generation, PhysExtent, PhysTranslator};
use pinfold_core::invalidate::{
    Descriptor, InvalidationQueue, QueueError, Scope, Ticket, WaitLimit,
};
use pinfold_core::mem::DmaMemory;
use spin::Mutex;

/// The number of unsuccessful polls between two checks of the unit's error bits: waits are polled
/// in memory.
const POLLS_PER_LOOK: u32 = 256;

/// The largest number of devices of a domain that have TLBs. After an abort the domain is flushed by
/// one batch: its translations, a fence, each device's TLB, and a wait.
pub(crate) const MAX_TLBS: usize = CAPACITY - 3;

/// The state of a domain that it shares with its unit.
pub(crate) struct DomainState {
    /// DID.
    pub(crate) id: u16,
    /// The word that waits write, and its place.
    status: &'static AtomicU64,
    status_at: PhysAddr,
    devices: Mutex<Vec<TlbDevice>>,
    /// The number of these devices.
    tlbs: AtomicUsize,
}

impl DomainState {
    /// The domain `id`, whose status is word `id` of `page`, modulo its words.
    pub(crate) fn new(id: u16, page: &HardwarePage) -> Self {
        let word = usize::from(id) % 512;
        let offset = word as u64 * 8;
        Self {
            id,
            status: page.word(word),
            // In the page.
            status_at: PhysAddr::new(page.phys.raw() + offset),
            devices: Mutex::new(Vec::new()),
            tlbs: AtomicUsize::new(0),
        }
    }

    /// Returns false if it has [`MAX_TLBS`].
    #[must_use]
    pub(crate) fn add_tlb(&self, device: TlbDevice) -> bool {
        let mut devices = self.devices.lock();
        if devices.len() >= MAX_TLBS {
            return false;
        }
        devices.push(device);
        self.tlbs.store(devices.len(), Ordering::SeqCst);
        // Ordered with the fence in `has_device_tlbs`.
        fence(Ordering::SeqCst);
        true
    }

    pub(crate) fn remove_tlb(&self, device: SourceId) {
        let mut devices = self.devices.lock();
        devices.retain(|tlb| tlb.device != device);
        self.tlbs.store(devices.len(), Ordering::SeqCst);
    }

    pub(crate) fn tlb_of(&self, device: SourceId) -> Option<TlbDevice> {
        self.devices.lock().iter().find(|tlb| tlb.device == device).copied()
    }
}

/// The queue of one domain of a unit.
pub struct DomainQueue<R, W, T> {
    queue: Arc<Queue<R, W>>,
    state: Arc<DomainState>,
    translator: T,
    limit: WaitLimit,
    aborts: Aborts,
    /// The last ticket submitted, and the last one that has completed.
    submitted: AtomicU64,
    completed: AtomicU64,
    /// Whether a part of a batch was submitted, and its wait was not.
    in_part: AtomicBool,
    /// The number of unsuccessful polls.
    polls: AtomicU32,
}

impl<R, W, T> fmt::Debug for DomainQueue<R, W, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (submitted, completed) =
            (self.submitted.load(Ordering::Relaxed), self.completed.load(Ordering::Relaxed));
        f.debug_struct("DomainQueue")
            .field("domain", &self.state.id)
            .field("submitted", &submitted)
            .field("completed", &completed)
            .finish_non_exhaustive()
    }
}

impl<R: Registers, W: WriteBack, T> DomainQueue<R, W, T> {
    /// The queue's tickets continue after `first`.
    pub(crate) fn new(
        queue: Arc<Queue<R, W>>,
        state: Arc<DomainState>,
        translator: T,
        limit: WaitLimit,
        first: Ticket,
    ) -> Self {
        // Nothing is in flight: as if the wait of `first` had been carried out.
        state.status.store(u64::from(low_half(first.0)), Ordering::Relaxed);
        Self {
            aborts: Aborts::new(&queue),
            queue,
            state,
            translator,
            limit,
            submitted: AtomicU64::new(first.0),
            completed: AtomicU64::new(first.0),
            in_part: AtomicBool::new(false),
            polls: AtomicU32::new(0),
        }
    }

    fn is_in_flight(&self) -> bool {
        let submitted = self.submitted.load(Ordering::Acquire);
        self.completed_ticket() < submitted || self.in_part.load(Ordering::Acquire)
    }

    /// The status word has the low 32 bits of a ticket. Those in flight are far fewer than 2^32, so
    /// that one of them, or the last that completed, has these bits, or the word is not believed.
    fn completed_ticket(&self) -> u64 {
        let before = self.completed.load(Ordering::Acquire);
        let submitted = self.submitted.load(Ordering::Acquire);
        let status = low_half(self.state.status.load(Ordering::Acquire));
        let steps = u64::from(status.wrapping_sub(low_half(before)));
        if steps == 0 || before + steps > submitted {
            return before;
        }
        self.completed.fetch_max(before + steps, Ordering::AcqRel).max(before + steps)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
const fn low_half(word: u64) -> u32 {
    word as u32
}

impl<R: Registers, W: WriteBack, T: Send + Sync> InvalidationQueue for DomainQueue<R, W, T> {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        let did = self.state.id;
        let narrow = self.queue.capabilities.flushes_pages();
        let throttled = self.queue.capabilities.throttles_by_function();
        // Locked until all are written: there is one flush for each device that is counted.
        let devices = self.state.devices.lock();
        let fill = |put: &mut dyn FnMut(Words)| {
            let mut behind_flush = false;
            for descriptor in descriptors {
                // Without flushes of pages each is one of the domain, and one directly behind another
                // has nothing left to do.
                let repeats = behind_flush && !narrow;
                behind_flush = matches!(descriptor, Descriptor::Iotlb { .. });
                match *descriptor {
                    Descriptor::Iotlb { .. } if repeats => {}
                    Descriptor::Iotlb { scope, leaf_only } => {
                        let scope = if narrow { scope } else { Scope::Domain };
                        put(descriptor::translations(did, scope, leaf_only));
                    }
                    Descriptor::Fence => put(self.queue.fence()),
                    Descriptor::DeviceTlb(scope) => {
                        for tlb in devices.iter() {
                            put(descriptor::device_tlb(*tlb, throttled, scope));
                        }
                    }
                }
            }
            if let Some(ticket) = wait {
                put(descriptor::wait(self.state.status_at, low_half(ticket.0), false));
            }
        };
        let mut count = 0;
        fill(&mut |_| count += 1);
        let sender = Sender::Domain { begun: self.is_in_flight() };
        self.queue.submit(count, &self.aborts, sender, fill)?;
        drop(devices);
        if let Some(ticket) = wait {
            self.submitted.store(ticket.0, Ordering::Release);
        }
        self.in_part.store(wait.is_none(), Ordering::Release);
        self.polls.store(0, Ordering::Relaxed);
        Ok(())
    }

    fn accepts(&self) -> usize {
        // A flush of devices' TLBs needs one descriptor for each.
        let each = self.state.tlbs.load(Ordering::Relaxed).max(1);
        self.queue.accepts() / each
    }

    fn completed(&self) -> Ticket {
        Ticket(self.completed_ticket())
    }

    /// The unit's own interrupt is not used: a task looks again after a pause.
    fn wake(&self, ticket: Option<Ticket>, _: u64, waker: &Waker) {
        match ticket {
            Some(ticket) if self.completed() >= ticket => waker.wake_by_ref(),
            _ => self.queue.registers.wake_later(waker),
        }
    }

    fn now_ns(&self) -> Option<u64> {
        self.queue.registers.now_ns()
    }

    fn caches(&self) -> bool {
        self.queue.caches()
    }

    fn limit(&self) -> WaitLimit {
        self.limit
    }

    fn queue_depth(&self) -> u64 {
        4
    }

    fn max_order(&self) -> u32 {
        self.queue.capabilities.max_order()
    }

    fn has_device_tlbs(&self) -> bool {
        fence(Ordering::SeqCst);
        self.state.tlbs.load(Ordering::SeqCst) > 0
    }

    fn has_aborted(&self) -> bool {
        if !self.is_in_flight() {
            return false;
        }
        if self.queue.has_aborted(&self.aborts) {
            return true;
        }
        if self.polls.fetch_add(1, Ordering::Relaxed) % POLLS_PER_LOOK == POLLS_PER_LOOK - 1 {
            self.queue.recover();
        }
        self.queue.has_aborted(&self.aborts)
    }

    fn restart(&self) {
        self.in_part.store(false, Ordering::Release);
        self.queue.restart(&self.aborts);
    }

    fn has_failed(&self) -> bool {
        self.queue.has_failed()
    }

    fn caches_not_present(&self) -> bool {
        self.queue.capabilities.caching_mode()
    }
}

impl<R: Registers, W: WriteBack, T: PhysTranslator> PhysTranslator for DomainQueue<R, W, T> {
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise is the one that the translator asks for.
        unsafe { self.translator.register_memory(memory) }
    }

    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        self.translator.unregister_memory(memory)
    }

    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        self.translator.extent(memory)
    }

    fn generation(&self) -> Generation {
        self.translator.generation()
    }
}
