//! `cargo run -p pinfold-dma-api --example ahci_driver_vfio BDF`
//!
//! The crate `ahci-driver`, unmodified, on Pinfold's memory, with a SATA controller through VFIO
//! (`vm/run` provides one; `vm/guest/tests/dma_api.sh` runs this there).
//!
//! It **overwrites** the first 4 MiB of the disk at the first port with one, in requests of many
//! sizes, and reads them back. It fails if the data differs or memory has leaked.

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
use verify::{BYTES, verify};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let ran = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [bdf] => run(bdf),
        _ => Err("usage: ahci_driver_vfio BDF".into()),
    };
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ahci_driver_vfio: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(bdf: &str) -> Result<()> {
    let device = Device::open(bdf, &Options::new())?;
    let arena = Arena::builder().size(8 << 20).build(device.domain())?;
    let domain = device.domain().clone();
    let platform = Platform::leak((*domain).clone(), move |bytes| arena.alloc(bytes).ok());
    // AHCI 1.3.1, 2.1.11: the registers are in BAR 5.
    let bar = device.bar(5)?;
    let len = usize::try_from(bar.len())?;
    let at = bar.as_ptr(0, len).ok_or("the registers are not mapped in one piece")?;
    let irqs = device.interrupts(1)?;
    let wait = &mut |vector: u16| {
        let irq = irqs.get(usize::from(vector)).ok_or("no such vector")?;
        Ok(irq.wait(Duration::from_millis(100))? > 0)
    };
    device.set_bus_master(true)?;

    let dma = platform.device(DmaConstraints::new(u64::MAX));
    let mut disk = Disk::start(&Registers { at, len }, dma, wait)?;
    let same = verify(&mut disk, wait);
    disk.stop()?;
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
