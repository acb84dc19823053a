//! The driver and the model in one process. The model polls memory that the driver writes as its
//! registers.

use crate::block::{Blocks, Registers, Result, WaitIrq};
use crate::disk::Disk;
use dma_api::DmaConstraints;
use pinfold::soft::Port;
use pinfold::{Arena, Buffer, Domain};
use pinfold_core::addr::Iova;
use pinfold_dma_api::{Platform, Stats};
use pinfold_nvme_model::{
    Bus, BusFault, Door, Fault, InterruptSink, MemoryMedia, ModelConfig, ModelController,
    Namespace, RegisterWindow, Trigger,
};
use rdif_block::RequestOp;
use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Registers in memory: never freed, since the driver keeps their address.
struct Window(&'static [AtomicU32]);

impl Window {
    fn new() -> Self {
        Self(Box::leak((0..0x2000 / 4).map(|_| AtomicU32::new(0)).collect()))
    }
}

impl RegisterWindow for Window {
    fn load(&self, at: u32) -> u32 {
        self.0.get(at as usize / 4).map_or(0, |word| word.load(Ordering::SeqCst))
    }

    fn store(&self, at: u32, value: u32) {
        self.swap(at, value);
    }

    fn swap(&self, at: u32, value: u32) -> u32 {
        self.0.get(at as usize / 4).map_or(0, |word| word.swap(value, Ordering::SeqCst))
    }

    fn len(&self) -> u32 {
        0x1000 + 4 * 2 * 2
    }
}

/// The interrupts that were raised and not taken.
#[derive(Default)]
struct Raised([AtomicU64; 2]);

impl InterruptSink for Raised {
    fn raise(&self, vector: u16) {
        self.0[usize::from(vector)].fetch_add(1, Ordering::SeqCst);
    }
}

/// The model's bus, which remembers every page that the controller reached.
#[derive(Clone)]
struct Seen {
    port: Port,
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
        self.note(iova, len, Bus::read(&self.port, iova, to))
    }

    fn write(&self, iova: Iova, from: &[u8]) -> std::result::Result<(), BusFault> {
        self.note(iova, from.len(), Bus::write(&self.port, iova, from))
    }

    fn write_u32_release(&self, iova: Iova, value: u32) -> std::result::Result<(), BusFault> {
        self.note(iova, 4, Bus::write_u32_release(&self.port, iova, value))
    }
}

type Source = Box<dyn Fn(usize) -> Option<Buffer> + Send + Sync>;

struct Rig {
    domain: Domain,
    bus: Seen,
    model: ModelController,
    raised: Arc<Raised>,
    registers: Registers,
    platform: &'static Platform<Source, Buffer>,
}

impl Rig {
    fn new(change: impl FnOnce(&mut ModelConfig)) -> Self {
        let domain = Domain::soft().unwrap();
        let arena = Arena::builder().size(8 << 20).build(&domain).unwrap();
        let source: Source = Box::new(move |bytes| arena.alloc(bytes).ok());
        let platform = Platform::leak((*domain).clone(), source);
        let port = domain.port().unwrap();
        let bus = Seen { port, pages: Arc::default(), faults: Arc::default() };
        let window = Window::new();
        let at = NonNull::from(window.0).cast();
        let registers = Registers { at, len: window.0.len() * 4 };
        let raised = Arc::new(Raised::default());
        let door = Door {
            window: Some(Arc::new(window)),
            interrupts: Some(raised.clone()),
            ..Door::default()
        };
        let namespace = Namespace::new(Arc::new(MemoryMedia::new(16 << 20)), 512).unwrap();
        let mut config = ModelConfig::new(vec![namespace]);
        (config.queues, config.vectors) = (1, 2);
        change(&mut config);
        let model = ModelController::spawn_behind(bus.clone(), config, door).unwrap();
        Self { domain, bus, model, raised, registers, platform }
    }

    fn irq(&self) -> impl FnMut(u16) -> Result<bool> + use<> {
        let raised = self.raised.clone();
        move |vector| {
            let seen = raised.0[usize::from(vector)].swap(0, Ordering::SeqCst) > 0;
            if !seen {
                std::thread::sleep(Duration::from_micros(100));
            }
            Ok(seen)
        }
    }

    fn start(&self) -> Result<Disk> {
        let dma = self.platform.device(DmaConstraints::new(u64::MAX));
        Disk::start(&self.registers, dma, &mut self.irq())
    }

    /// Lets `tamper` change the data of Identify Namespace.
    fn identify_as(&self, tamper: impl Fn(&mut [u8]) + Send + 'static) {
        self.model.faults().tamper(move |command, data| {
            if command.opcode == 0x06 && command.cdw10.get() & 0xff == 0 {
                tamper(data);
            }
        });
    }

    /// Attacks every page that the controller has ever reached; returns how many it still reaches.
    fn attack(&self) -> usize {
        let pages = self.bus.pages.lock().unwrap();
        assert!(!pages.is_empty());
        let reached = |page: &&u64| {
            let page = Iova::new(**page);
            let read = self.bus.port.read(page, &mut [0; 4096]).is_ok();
            self.bus.port.write(page, &[0xbd; 4096]).is_ok() || read
        };
        pages.iter().filter(reached).count()
    }

    fn mapped_bytes(&self) -> u64 {
        self.domain.mapped().unwrap().map(|run| run.iova.len()).sum()
    }
}

fn transfer(disk: &mut Disk, irq: &mut WaitIrq) {
    let max = disk.max_bytes();
    for (number, len) in [512, 4096, 4608, 12288, 65536, max.min(1 << 20)].into_iter().enumerate() {
        let (lba, mut back) = (number as u64 * 2048, vec![0; len]);
        let words = (lba + 1..).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let data: Vec<u8> = words.flat_map(u64::to_le_bytes).take(len).collect();
        disk.write(lba, &data, irq).unwrap();
        disk.read(lba, &mut back, irq).unwrap();
        assert!(back == data, "{len} bytes");
    }
}

fn clean(stats: Stats) {
    assert!(stats.is_clean(), "{stats}");
}

#[test]
fn what_the_driver_has_freed_is_out_of_reach() {
    let rig = Rig::new(|_| {});
    let irq = &mut rig.irq();
    let mut disk = rig.start().unwrap();
    assert_eq!(disk.size(), (32768, 512));
    let resident = rig.mapped_bytes();
    transfer(&mut disk, irq);
    // The buffers of requests are free, the queues are not.
    assert_eq!(rig.mapped_bytes(), resident);
    disk.stop(irq).unwrap();
    assert_eq!((rig.mapped_bytes(), rig.attack()), (0, 0));
    assert_eq!(rig.bus.faults.load(Ordering::SeqCst), 0, "of the controller");
    clean(rig.platform.stats());
    // It starts again, with the memory of before.
    let mut disk = rig.start().unwrap();
    transfer(&mut disk, irq);
    disk.stop(irq).unwrap();
    assert_eq!((rig.mapped_bytes(), rig.attack()), (0, 0));
    drop(rig.model);
}

/// The driver frees its queues when it is dropped, and has no drop that stops the controller: a
/// command in flight completes into memory that is free. Behind the domain the access faults.
#[test]
fn a_driver_dropped_with_a_request_in_flight_reaches_nothing_free() {
    let rig = Rig::new(|_| {});
    let irq = &mut rig.irq();
    let mut disk = rig.start().unwrap();
    transfer(&mut disk, irq);
    let delay = Fault::Delay(Duration::from_millis(200));
    rig.model.faults().inject(Trigger::Matches(Box::new(|_| true)), delay);
    disk.submit(RequestOp::Read, 0, &[0; 16384]).unwrap();
    let faults = rig.bus.faults.load(Ordering::SeqCst);
    // Fetched before the queue is gone.
    std::thread::sleep(Duration::from_millis(50));
    drop(disk);
    // The driver keeps the buffer of the request, and nothing else: it is quarantined there.
    assert_eq!(rig.platform.stats().live_bytes, 16384);
    assert_eq!(rig.mapped_bytes(), 16384);
    let started = std::time::Instant::now();
    while rig.bus.faults.load(Ordering::SeqCst) == faults {
        assert!(started.elapsed() < Duration::from_secs(60), "the completion must fault");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(rig.platform.stats().quarantined_bytes, 0);
}

/// The driver looks at the format in use only if it is not the first, and takes that for 512 bytes.
#[test]
fn a_first_format_of_4096_bytes_is_taken_for_512() {
    let rig = Rig::new(|_| {});
    rig.identify_as(|data| data[128 + 2] = 12);
    assert_eq!(rig.start().unwrap().size(), (32768, 512));
}

/// The driver reads 32 of the 64 bits of a namespace's size.
#[test]
fn a_namespace_of_two_terabytes_is_taken_for_none() {
    let rig = Rig::new(|_| {});
    rig.identify_as(|data| data[..8].copy_from_slice(&(1u64 << 32).to_le_bytes()));
    assert_eq!(rig.start().err().unwrap().to_string(), "block I/O error");
    let rig = Rig::new(|_| {});
    rig.identify_as(|data| data[..8].copy_from_slice(&(5u64 << 32 | 8).to_le_bytes()));
    assert_eq!(rig.start().unwrap().size(), (8, 512));
}
