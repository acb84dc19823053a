//! The driver and the model in one process. The model polls memory that the driver writes as its
//! registers.

use crate::attack::Ground;
use crate::block::{Blocks, Registers, Result};
use crate::disk::Disk;
use dma_api::DmaConstraints;
use pinfold_nvme_model::{
    Door, Fault, InterruptSink, MemoryMedia, ModelConfig, ModelController, Namespace,
    RegisterWindow, Trigger,
};
use rdif_block::RequestOp;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
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

struct Rig {
    ground: Ground,
    model: ModelController,
    raised: Arc<Raised>,
    registers: Registers,
}

impl Rig {
    fn new(flushes: bool) -> Self {
        let ground = Ground::new(flushes);
        let window = Window::new();
        let at = NonNull::from(window.0).cast();
        let registers = Registers { at, len: window.0.len() * 4 };
        let raised = Arc::new(Raised::default());
        let door = Door {
            window: Some(Arc::new(window)),
            interrupts: Some(raised.clone()),
            ..Door::default()
        };
        let namespace = Namespace::new(Arc::new(MemoryMedia::new(16 << 20).unwrap()), 512).unwrap();
        let mut config = ModelConfig::new(vec![namespace]);
        (config.queues, config.vectors) = (1, 2);
        let model = ModelController::spawn_behind(ground.bus.clone(), config, door).unwrap();
        Self { ground, model, raised, registers }
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
        let dma = self.ground.platform.device(DmaConstraints::new(u64::MAX));
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
}

#[test]
fn what_the_driver_has_freed_is_out_of_reach() {
    let rig = Rig::new(true);
    let irq = &mut rig.irq();
    let mut disk = rig.start().unwrap();
    assert_eq!(disk.size(), (32768, 512));
    let resident = rig.ground.mapped_bytes();
    let lens = [512, 4096, 4608, 12288, 65536, disk.max_bytes().min(1 << 20)];
    rig.ground.transfer(&mut disk, irq, &lens);
    // The buffers of requests are free, the queues are not.
    assert_eq!(rig.ground.mapped_bytes(), resident);
    disk.stop(irq).unwrap();
    rig.ground.is_out_of_reach();
    // It starts again, with the memory of before.
    let mut disk = rig.start().unwrap();
    rig.ground.transfer(&mut disk, irq, &lens);
    disk.stop(irq).unwrap();
    rig.ground.is_out_of_reach();
    drop(rig.model);
}

/// The same attack on a known-bad IOMMU.
#[test]
fn a_free_that_does_not_flush_is_seen() {
    let rig = Rig::new(false);
    let irq = &mut rig.irq();
    let ran = rig.start().and_then(|mut disk| {
        disk.write(0, &[1; 4096], irq)?;
        disk.stop(irq)
    });
    rig.ground.is_seen(ran);
}

/// The driver frees its queues when it is dropped, and has no drop that stops the controller: a
/// command in flight completes into memory that is free. Behind the domain the access faults.
#[test]
fn a_driver_dropped_with_a_request_in_flight_reaches_nothing_free() {
    let rig = Rig::new(true);
    let irq = &mut rig.irq();
    let mut disk = rig.start().unwrap();
    rig.ground.transfer(&mut disk, irq, &[4096]);
    // Not complete before the queue is gone, and fetched.
    let delay = Fault::Delay(Duration::from_secs(3));
    let (fetched, is_fetched) = std::sync::mpsc::channel();
    let seen = move |_: &_| fetched.send(()).is_ok();
    rig.model.faults().inject(Trigger::Matches(Box::new(seen)), delay);
    disk.submit(RequestOp::Read, 0, &[0; 16384]).unwrap();
    let faults = rig.ground.faults();
    is_fetched.recv_timeout(Duration::from_secs(60)).unwrap();
    drop(disk);
    // The driver keeps the buffer of the request, and nothing else: it is quarantined there.
    assert_eq!(rig.ground.platform.stats().live_bytes, 16384);
    assert_eq!(rig.ground.mapped_bytes(), 16384);
    let started = std::time::Instant::now();
    while rig.ground.faults() == faults {
        assert!(started.elapsed() < Duration::from_secs(60), "the completion must fault");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(rig.ground.platform.stats().quarantined_bytes, 0);
}

/// The driver looks at the format in use only if it is not the first, and takes that for 512 bytes.
#[test]
fn a_first_format_of_4096_bytes_is_taken_for_512() {
    let rig = Rig::new(true);
    rig.identify_as(|data| data[128 + 2] = 12);
    assert_eq!(rig.start().unwrap().size(), (32768, 512));
}

/// The driver reads 32 of the 64 bits of a namespace's size.
#[test]
fn a_namespace_of_two_terabytes_is_taken_for_none() {
    let rig = Rig::new(true);
    rig.identify_as(|data| data[..8].copy_from_slice(&(1u64 << 32).to_le_bytes()));
    assert_eq!(rig.start().err().unwrap().to_string(), "block I/O error");
    let rig = Rig::new(true);
    rig.identify_as(|data| data[..8].copy_from_slice(&(5u64 << 32 | 8).to_le_bytes()));
    assert_eq!(rig.start().unwrap().size(), (8, 512));
}
