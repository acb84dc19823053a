//! `cargo run -p pinfold-dma-api --example nvme_driver_vfio BDF [OUT | --drop]`
//!
//! The crate `nvme-driver`, unmodified, on Pinfold's memory, with an NVMe controller through VFIO:
//! without hardware, under check:
//!
//! ```text
//! pinfold check -- target/debug/examples/nvme_driver_vfio 0000:01:00.0
//! ```
//!
//! It **overwrites** the first 4 MiB of the disk, in requests of many sizes, and reads them back. It
//! fails if the data differs or memory has leaked. OUT gets what the disk must have then, for others
//! to compare. With `--drop` the driver is dropped without being stopped.

#[path = "../block/mod.rs"]
mod block;
mod disk;
#[path = "../block/verify.rs"]
mod verify;

use block::{Registers, Result};
use disk::Disk;
use dma_api::DmaConstraints;
use pinfold::Arena;
use pinfold::vfio::{Device, Options};
use pinfold_dma_api::Platform;
use std::process::ExitCode;
use std::time::Duration;
use verify::{BYTES, data, verify};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let ran = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [bdf] => run(bdf, true),
        [bdf, "--drop"] => run(bdf, false),
        [bdf, out] => run(bdf, true).and_then(|()| Ok(std::fs::write(out, data())?)),
        _ => Err("usage: nvme_driver_vfio BDF [OUT | --drop]".into()),
    };
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nvme_driver_vfio: {error}");
            ExitCode::FAILURE
        }
    }
}

pub(crate) fn run(bdf: &str, stop: bool) -> Result<()> {
    let device = Device::open(bdf, &Options::new())?;
    let arena = Arena::builder().size(8 << 20).build(device.domain())?;
    let domain = device.domain().clone();
    let platform = Platform::leak((*domain).clone(), move |bytes| arena.alloc(bytes).ok());
    let bar = device.bar(0)?;
    let len = usize::try_from(bar.len())?;
    // With one queue pair the driver needs the first doorbells only.
    let len = len.min(0x2000);
    let at = bar.as_ptr(0, len).ok_or("the registers are not mapped in one piece")?;
    let irqs = device.interrupts(2)?;
    let wait = &mut |vector: u16| {
        let irq = irqs.get(usize::from(vector)).ok_or("no such vector")?;
        Ok(irq.wait(Duration::from_millis(100))? > 0)
    };
    device.set_bus_master(true)?;

    let dma = platform.device(DmaConstraints::new(u64::MAX));
    let mut disk = Disk::start(&Registers { at, len }, dma, wait)?;
    let same = verify(&mut disk, wait);
    if stop {
        disk.stop(wait)?;
    } else {
        drop(disk);
    }
    let same = same?;
    let stats = platform.stats();
    println!("{stats}");
    if !same {
        return Err("the data read back differs".into());
    }
    let entries = domain.stats().backend.entries;
    println!("{BYTES} bytes written and read back; {entries} IOMMU entries afterwards");
    if stats.is_clean() { Ok(()) } else { Err("memory has leaked".into()) }
}
