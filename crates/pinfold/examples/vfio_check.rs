//! What the VFIO backend promises, tried on a real device: `vfio_check BDF`. The device must be an NVMe controller that
//! is bound to `vfio-pci`; it is not written to.
#![forbid(unsafe_code)]

use pinfold::vfio::{Device, Options};
use pinfold::{Arena, Exposure};
use pinfold_core::access::Both;
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: vfio_check BDF")?;
    let device = Device::open(&address, &Options::new())?;
    println!("opened {device:?}: {:x?}", device.chosen());
    registers(&device)?;
    memory(&device)?;
    let stats = device.domain().stats();
    println!("{:?}", stats.backend);
    if stats.backend.entries != 0 || stats.backend.pinned_bytes != 0 {
        return Err("a mapping was left behind".into());
    }
    println!("ok");
    Ok(())
}

fn registers(device: &Device) -> Result<(), Box<dyn Error>> {
    let ids = device.ids()?;
    let bar = device.bar(0)?;
    let (cap, version) = (bar.read64(0)?, bar.read32(8)?);
    println!("{ids:x?} {bar:?} CAP {cap:#x} VS {version:#x}, {} interrupts", device.max_interrupts()?);
    if ids.class >> 8 != 0x0108 || version >> 16 == 0 || version >> 16 > 2 {
        return Err("that is no NVMe controller".into());
    }
    if bar.read32(bar.len()).is_ok() || bar.read32(2).is_ok() {
        return Err("an access outside or across registers was let through".into());
    }
    device.set_bus_master(true)?;
    device.reset()?;
    let irqs = device.interrupts(1)?;
    if irqs.iter().any(|irq| irq.take() != Ok(0)) {
        return Err("an interrupt that nobody raised".into());
    }
    Ok(())
}

fn memory(device: &Device) -> Result<(), Box<dyn Error>> {
    let domain = device.domain();
    let arena = Arena::builder().size(64 << 20).exposure(Exposure::Whole).build(domain)?;
    println!("arena at {} from {}: {:?}", arena.iova(), arena.account().source, domain.stats().backend);
    if domain.stats().backend.entries != 1 {
        return Err("an arena is more than one entry".into());
    }
    let lent = Arena::builder().size(16 << 20).build(domain)?;
    let mapped = domain.map(lent.alloc(1 << 20)?, Both)?;
    println!("buffer at {}", mapped.iova());
    drop(mapped.unmap()?);
    Ok(())
}
