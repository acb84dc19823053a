//! `drivers_vtd NVME_BDF AHCI_BDF`, as root in a machine of QEMU with `intel-iommu`, booted with
//! `intel_iommu=off intremap=off iomem=relaxed`, with no driver bound to the two (`vm/vtd` does all
//! of it).
//!
//! The crates `nvme-driver` and `ahci-driver`, unmodified, behind a VT-d unit that `pinfold-vtd`
//! drives, without any driver of the kernel's. They find their completions by polling.
//!
//! It **overwrites** the first 4 MiB of both disks, in requests of many sizes, and reads them back.
//! It fails if the data differs, memory has leaked, an access was refused, or a device can still
//! access what its driver has freed.

#[path = "../ahci_driver_vfio/disk.rs"]
mod ahci;
#[path = "../block/mod.rs"]
mod block;
#[expect(dead_code, reason = "shared with the example that looks into the unit's queue")]
#[path = "../../../vtd/examples/edu/host.rs"]
mod host;
mod machine;
#[path = "../nvme_driver_vfio/disk.rs"]
mod nvme;
#[path = "../block/verify.rs"]
mod verify;

use block::{Blocks, Registers, Result, WaitIrq};
use dma_api::{DeviceDma, DmaConstraints};
use machine::{Function, Pages, Pool, Unit};
use pinfold_dma_api::Platform;
use pinfold_vtd::SourceId;
use std::process::ExitCode;
use std::time::Duration;
use verify::{BYTES, verify};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let ran = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [nvme, ahci] => run(nvme, ahci),
        _ => Err("usage: drivers_vtd NVME_BDF AHCI_BDF".into()),
    };
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("drivers_vtd: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(nvme: &str, ahci: &str) -> Result<()> {
    let (nvme, ahci) = (machine::source_of(nvme)?, machine::source_of(ahci)?);
    let memory = host::Hugepages::new(2 << 20, 32)?;
    let pool = Pool::new(memory.clone());
    let unit = machine::unit(&memory, [nvme, ahci])?;
    drive(&unit, pool, nvme, 0, |registers, dma, wait| {
        // With one queue pair the driver needs the first doorbells only.
        let registers = Registers { len: registers.len.min(0x2000), ..registers };
        let mut disk = nvme::Disk::start(&registers, dma, wait)?;
        let same = same_bytes(&mut disk, wait);
        disk.stop(wait)?;
        same
    })?;
    // AHCI 1.3.1, 2.1.11: the registers are in BAR 5.
    drive(&unit, pool, ahci, 5, |registers, dma, wait| {
        let mut disk = ahci::Disk::start(&registers, dma, wait)?;
        let same = same_bytes(&mut disk, wait);
        disk.stop()?;
        same
    })?;
    // SAFETY: neither function masters the bus any more, and no other device is attached.
    unsafe { unit.disable() }?;
    println!("drivers_vtd: all as expected");
    Ok(())
}

/// Runs a driver on a function, in a domain of its own.
fn drive(
    unit: &Unit,
    pool: &'static Pool,
    source: SourceId,
    bar: usize,
    driver: impl FnOnce(Registers, DeviceDma, &mut WaitIrq) -> Result<()>,
) -> Result<()> {
    let function = Function::open(source, bar)?;
    let (domain, attachments) = machine::domain(unit, pool)?;
    unit.attach(source, &attachments, None)?;
    let platform = Platform::leak(domain.clone(), move |bytes| Pages::of(pool, bytes));
    let wait = &mut |_| {
        std::thread::sleep(Duration::from_millis(1));
        Ok(true)
    };
    function.set_bus_master(true)?;
    let registers = Registers { at: function.registers, len: function.len };
    let ran = driver(registers, platform.device(DmaConstraints::new(u64::MAX)), wait);
    function.set_bus_master(false)?;
    let (faults, _) = unit.take_faults(&attachments);
    let fault = faults.first().map(|fault| format!("; {fault}"));
    match (ran, &fault) {
        (Ok(()), None) => {}
        (Ok(()), Some(fault)) => return Err(format!("{source}: the data is right{fault}").into()),
        (Err(error), fault) => {
            return Err(format!("{source}: {error}{}", fault.as_deref().unwrap_or_default()).into());
        }
    }
    unit.detach(source, &attachments)?;
    let (stats, backend) = (platform.stats(), domain.stats().backend);
    println!("{source}: {stats}");
    println!(
        "{source}: {BYTES} bytes written and read back; {} IOMMU entries afterwards; {:?}",
        backend.entries, backend.invalidations
    );
    if !stats.is_clean() || backend.entries != 0 {
        return Err(format!("{source}: memory has leaked").into());
    }
    Ok(())
}

fn same_bytes(disk: &mut impl Blocks, wait: &mut WaitIrq) -> Result<()> {
    if verify(disk, wait)? { Ok(()) } else { Err("the data read back differs".into()) }
}
