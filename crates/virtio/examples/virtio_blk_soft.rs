//! `cargo run -p pinfold-virtio --example virtio_blk_soft`
//!
//! The virtio-blk driver of `virtio-drivers` on Pinfold's memory, against a model disk behind the
//! software IOMMU.

use pinfold::{Arena, Domain};
use pinfold_virtio::model::Disk;
use pinfold_virtio::{PinfoldHal, Process, Translated, install};
use std::error::Error;
use virtio_drivers::device::blk::VirtIOBlk;

fn main() -> std::process::ExitCode {
    // Its message: an error that `main` returned would print its fields.
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let domain = Domain::soft()?;
    let stack = install::<Process>(&domain, Arena::builder().size(8 << 20))?;
    let disk =
        Disk::new(domain.port().ok_or("the devices of this domain are not models")?, 16 << 20);

    let mut driver = VirtIOBlk::<PinfoldHal, _>::new(Translated::new(disk.clone()))?;
    println!("a disk of {} sectors", driver.capacity());

    // From the heap: by way of a copy.
    let text = [b"from the heap   ".as_slice(); 32].concat();
    driver.write_blocks(7, &text)?;

    // Into Pinfold's memory: mapped where it lies, as long as the request takes.
    let mut buffer = stack.arena().alloc(4096)?;
    driver.read_blocks(7, buffer.as_mut_slice()?)?;
    assert_eq!(buffer.as_slice()?[..512], text);
    println!("read back: {:?}", str::from_utf8(&buffer.as_slice()?[..13])?);

    // The device still knows where that was.
    let data = disk.given()[1];
    let Err(fault) = disk.attack(data.iova, &[0; 4096]) else {
        return Err("a stale write landed".into());
    };
    println!("a stale write: {fault}");

    drop((driver, buffer));
    let stats = stack.finish()?;
    println!("{stats}");
    if stats.is_clean() { Ok(()) } else { Err("memory has leaked".into()) }
}
