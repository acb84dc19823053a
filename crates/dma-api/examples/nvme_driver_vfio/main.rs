//! `cargo run -p pinfold-dma-api --example nvme_driver_vfio BDF [drop]`
//!
//! The crate `nvme-driver`, unmodified, on Pinfold's memory, with an NVMe controller through VFIO:
//! without hardware, under check:
//!
//! ```text
//! pinfold check -- target/debug/examples/nvme_driver_vfio 0000:01:00.0
//! ```
//!
//! It **overwrites** the first 4 MiB of the disk, in requests of many sizes, and reads them back. It
//! fails if the data differs or memory has leaked. With `drop` the driver is dropped without being
//! stopped.

mod disk;

use disk::{Disk, Registers, Result, WaitIrq};
use dma_api::DmaConstraints;
use pinfold::Arena;
use pinfold::vfio::{Device, Options};
use pinfold_dma_api::Platform;
use rdif_block::BlkError;
use std::process::ExitCode;
use std::time::Duration;

/// The part of the disk that is written.
const BYTES: usize = 4 << 20;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let ran = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [bdf] => run(bdf, true),
        [bdf, "drop"] => run(bdf, false),
        _ => Err("usage: nvme_driver_vfio BDF [drop]".into()),
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

/// Writes the start of the disk and reads it back; returns whether it is the same.
fn verify(disk: &mut Disk, wait: &mut WaitIrq) -> Result<bool> {
    let (blocks, block_bytes) = disk.size();
    let most = disk.max_bytes();
    println!("{blocks} blocks of {block_bytes} bytes, requests of up to {most}");
    let words = (1u32..).map(|word| word.wrapping_mul(0x9e37_79b1));
    let data: Vec<u8> = words.flat_map(u32::to_le_bytes).take(BYTES).collect();
    let mut back = vec![0; BYTES];
    // One block, one page and a block, three pages: PRP 1, PRP 2, and a list.
    let sizes = [block_bytes, 4096 + block_bytes, 3 * 4096, 256 << 10];
    let pieces = || {
        let mut at = 0;
        sizes.into_iter().cycle().map_while(move |size| {
            let from = at;
            at = (from + size.min(most) / block_bytes * block_bytes).min(BYTES);
            (from < BYTES).then_some(from..at)
        })
    };
    for piece in pieces() {
        let lba = (piece.start / block_bytes) as u64;
        let piece = data.get(piece).unwrap_or_default();
        retried(|| disk.write(lba, piece, wait))?;
    }
    for piece in pieces() {
        let lba = (piece.start / block_bytes) as u64;
        let piece = back.get_mut(piece).unwrap_or_default();
        retried(|| disk.read(lba, piece, wait))?;
    }
    Ok(back == data)
}

/// Repeats a request that failed: the driver does not, and its error does not tell whether that can
/// help.
fn retried(mut request: impl FnMut() -> Result<()>) -> Result<()> {
    let mut result = request();
    for _ in 0..16 {
        match &result {
            Err(error) if error.downcast_ref() == Some(&BlkError::Io) => result = request(),
            _ => break,
        }
    }
    result
}
