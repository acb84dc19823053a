//! Memory for a driver behind the software IOMMU, and a device that attacks what the driver has
//! freed. Shared by the tests of drivers.

use crate::block::{Blocks, Result, WaitIrq};
use pinfold::soft::{Port, SoftConfig, UnitQueue};
use pinfold::{Arena, Buffer, Domain};
use pinfold_core::addr::Iova;
use pinfold_core::invalidate::{Descriptor, InvalidationQueue, QueueError, Ticket, WaitLimit};
use pinfold_dma_api::{Platform, Stats};
use pinfold_nvme_model::{Bus, BusFault};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A device's access path that remembers every page reached.
#[derive(Clone)]
pub(crate) struct Seen {
    // Shared: a clone of a port is another device, which has cached nothing.
    port: Arc<Port>,
    pages: Arc<Mutex<BTreeSet<u64>>>,
    faults: Arc<AtomicU64>,
}

impl Seen {
    fn note<T>(
        &self,
        iova: Iova,
        len: usize,
        result: std::result::Result<T, BusFault>,
    ) -> std::result::Result<T, BusFault> {
        if result.is_ok() {
            let pages = (iova.raw() & !4095..iova.raw() + len as u64).step_by(4096);
            self.pages.lock().unwrap().extend(pages);
        } else {
            self.faults.fetch_add(1, Ordering::SeqCst);
        }
        result
    }
}

impl Bus for Seen {
    fn read(&self, iova: Iova, to: &mut [u8]) -> std::result::Result<(), BusFault> {
        let len = to.len();
        self.note(iova, len, Bus::read(&*self.port, iova, to))
    }

    fn write(&self, iova: Iova, from: &[u8]) -> std::result::Result<(), BusFault> {
        self.note(iova, from.len(), Bus::write(&*self.port, iova, from))
    }

    fn write_u32_release(&self, iova: Iova, value: u32) -> std::result::Result<(), BusFault> {
        self.note(iova, 4, Bus::write_u32_release(&*self.port, iova, value))
    }
}

pub(crate) type Source = Box<dyn Fn(usize) -> Option<Buffer> + Send + Sync>;

/// A domain, the memory of its driver, and its device.
pub(crate) struct Ground {
    domain: Domain,
    pub(crate) bus: Seen,
    pub(crate) platform: &'static Platform<Source, Buffer>,
}

impl Ground {
    /// Creates them over an IOMMU that flushes what it is told, or is known to be bad.
    pub(crate) fn new(flushes: bool) -> Self {
        let over = |_, queue| Flushing { queue, flushes };
        // SAFETY: without flushes a device may reach what a driver has freed: arenas keep that
        // memory, and nothing refers to it when it is attacked.
        let domain = unsafe { Domain::soft_over(SoftConfig::default(), over) }.unwrap();
        let arena = Arena::builder().size(16 << 20).build(&domain).unwrap();
        let source: Source = Box::new(move |bytes| arena.alloc(bytes).ok());
        let platform = Platform::leak((*domain).clone(), source);
        // With a TLB of its own, for all that it uses here.
        let port = Arc::new(domain.soft_bus().unwrap().port_with_device_tlb(4096));
        let bus = Seen { port, pages: Arc::default(), faults: Arc::default() };
        Self { domain, bus, platform }
    }

    /// Attacks every page that the device has ever reached and that is not mapped now; returns how
    /// many it still reaches. The attacker is the device itself, with what it has cached.
    pub(crate) fn attack(&self) -> usize {
        let mut pages = self.bus.pages.lock().unwrap().clone();
        assert!(!pages.is_empty());
        for run in self.domain.mapped().unwrap() {
            pages.retain(|page| !run.iova.contains(Iova::new(*page)));
        }
        let reached = |page: &&u64| {
            let page = Iova::new(**page);
            let read = self.bus.port.read(page, &mut [0; 4096]).is_ok();
            self.bus.port.write(page, &[0xbd; 4096]).is_ok() || read
        };
        pages.iter().filter(reached).count()
    }

    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.domain.mapped().unwrap().map(|run| run.iova.len()).sum()
    }

    /// Returns how many accesses of the device were refused, the attacks not counted.
    pub(crate) fn faults(&self) -> u64 {
        self.bus.faults.load(Ordering::SeqCst)
    }

    /// Writes and reads requests of `lens` bytes, compares them, and attacks what the driver has
    /// freed after each.
    pub(crate) fn transfer(&self, disk: &mut impl Blocks, irq: &mut WaitIrq, lens: &[usize]) {
        for (number, &len) in lens.iter().enumerate() {
            let (lba, mut back) = (number as u64 * 2048, vec![0; len]);
            let words = (lba + 1..).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let data: Vec<u8> = words.flat_map(u64::to_le_bytes).take(len).collect();
            disk.write(lba, &data, irq).unwrap();
            assert_eq!(self.attack(), 0, "after a write of {len} bytes");
            disk.flush(irq).unwrap();
            disk.read(lba, &mut back, irq).unwrap();
            assert_eq!(self.attack(), 0, "after a read of {len} bytes");
            assert!(back == data, "{len} bytes");
        }
    }

    /// Asserts that the driver has freed all that it had, and that its device reaches none of it.
    pub(crate) fn is_out_of_reach(&self) {
        assert_eq!((self.mapped_bytes(), self.attack()), (0, 0));
        assert_eq!(self.faults(), 0, "of the controller");
        let stats: Stats = self.platform.stats();
        assert!(stats.is_clean(), "{stats}");
    }

    /// Runs a driver on a ground whose frees do not flush, and attacks what it has freed.
    pub(crate) fn is_seen(&self, ran: Result<()>) {
        // It may find what another of its requests got.
        println!("without flushes: {ran:?}");
        assert_eq!(self.mapped_bytes(), 0, "the table maps nothing");
        assert_ne!(self.attack(), 0, "and pages are still reached");
    }
}

/// The queue of a unit. A known-bad one completes each flush without carrying it out.
struct Flushing {
    queue: UnitQueue,
    flushes: bool,
}

impl InvalidationQueue for Flushing {
    fn submit(
        &self,
        descriptors: &[Descriptor],
        wait: Option<Ticket>,
    ) -> std::result::Result<(), QueueError> {
        self.queue.submit(if self.flushes { descriptors } else { &[] }, wait)
    }
    fn completed(&self) -> Ticket {
        self.queue.completed()
    }
    fn accepts(&self) -> usize {
        self.queue.accepts()
    }
    fn now_ns(&self) -> Option<u64> {
        self.queue.now_ns()
    }
    fn limit(&self) -> WaitLimit {
        self.queue.limit()
    }
    fn has_device_tlbs(&self) -> bool {
        self.queue.has_device_tlbs()
    }
    fn has_failed(&self) -> bool {
        self.queue.has_failed()
    }
}
