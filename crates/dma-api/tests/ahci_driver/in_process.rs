//! The driver and the model in one process.

use crate::attack::Ground;
use crate::block::{Blocks, Registers, Result};
use crate::disk::Disk;
use crate::hba::Hba;
use dma_api::DmaConstraints;
use rdif_block::RequestOp;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

/// 16 MiB.
const BLOCKS: usize = 32768;
/// The last one needs two entries in the PRD table.
const LENS: [usize; 6] = [512, 4096, 4608, 12288, 65536, 5 << 20];
/// The driver's limit for one request.
const MOST: usize = 65535 * 512;

struct Rig {
    ground: Ground,
    hba: Hba,
    registers: Registers,
}

impl Rig {
    fn new(flushes: bool) -> Self {
        let ground = Ground::new(flushes);
        let hba = Hba::spawn(ground.bus.clone(), BLOCKS);
        let words = hba.registers();
        let registers = Registers { at: NonNull::from(words).cast(), len: words.len() * 4 };
        Self { ground, hba, registers }
    }

    fn irq(&self) -> impl FnMut(u16) -> Result<bool> + use<'_> {
        |_| {
            let seen = self.hba.take_interrupt();
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
}

#[test]
fn what_the_driver_has_freed_is_out_of_reach() {
    let rig = Rig::new(true);
    let irq = &mut rig.irq();
    let mut disk = rig.start().unwrap();
    assert_eq!((disk.size(), disk.max_bytes()), ((BLOCKS as u64, 512), MOST));
    let resident = rig.ground.mapped_bytes();
    rig.ground.transfer(&mut disk, irq, &LENS);
    // The buffers of requests are free; command list, received FIS and command tables are not.
    assert_eq!(rig.ground.mapped_bytes(), resident);
    disk.stop().unwrap();
    rig.ground.is_out_of_reach();
    // It starts again, with the memory of before.
    let mut disk = rig.start().unwrap();
    rig.ground.transfer(&mut disk, irq, &LENS);
    disk.stop().unwrap();
    rig.ground.is_out_of_reach();
}

/// The same attack on a known-bad IOMMU.
#[test]
fn a_free_that_does_not_flush_is_seen() {
    let rig = Rig::new(false);
    let irq = &mut rig.irq();
    let ran = rig.start().and_then(|mut disk| {
        disk.write(0, &[1; 4096], irq)?;
        disk.stop()
    });
    rig.ground.is_seen(ran);
}

/// Dropped without being stopped, the driver keeps what its port may still reach.
#[test]
fn a_driver_dropped_with_a_request_in_flight_frees_nothing() {
    let rig = Rig::new(true);
    let mut disk = rig.start().unwrap();
    let resident = rig.ground.mapped_bytes();
    rig.hba.hold(true);
    disk.submit(RequestOp::Read, 0, &[0; 16384]).unwrap();
    drop(disk);
    assert_eq!(rig.ground.mapped_bytes(), resident + 16384);
    rig.hba.hold(false);
    let started = Instant::now();
    while rig.hba.is_busy() {
        assert!(started.elapsed() < Duration::from_secs(60), "the command must end");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(rig.ground.faults(), 0, "what the controller reaches is mapped");
}

/// The disk refuses a command. What its request had is mapped until the port has stopped.
#[test]
fn a_request_that_the_disk_refuses_fails() {
    let rig = Rig::new(true);
    let irq = &mut rig.irq();
    let mut disk = rig.start().unwrap();
    let resident = rig.ground.mapped_bytes();
    rig.hba.refuse();
    let refused = disk.read(0, &mut [0; 4096], irq).unwrap_err();
    assert_eq!(refused.to_string(), "block I/O error");
    assert_eq!(rig.ground.mapped_bytes(), resident + 4096);
    disk.stop().unwrap();
    rig.ground.is_out_of_reach();
}
