//! `cargo run -p pinfold-nvme --example unprotected BDF`
//!
//! A controller without an IOMMU: `unprotected BDF` writes over the first MiB of its first
//! namespace and reads it back. The controller must be bound to `vfio-pci` by a kernel that allows
//! this (`enable_unsafe_noiommu_mode`), and hugepages must be reserved: its addresses are physical
//! ones.

use pinfold::core::access::{FromDevice, ToDevice};
use pinfold::vfio::Options;
use pinfold::{Arena, MappingPolicy, Source};
use pinfold_nvme::driver::{Config, Controller, InFlight, Outcome, Queue};
use pinfold_nvme::vfio::{PciController, PciRegisters};
use std::error::Error;
use std::sync::Arc;

type BoxResult<T> = Result<T, Box<dyn Error>>;

const BYTES: usize = 1 << 20;
/// A transfer size that every controller supports.
const PIECE: usize = 4096;

fn finish<P>(queue: &mut Queue<Arc<PciRegisters>, Arena>, in_flight: InFlight<P>) -> BoxResult<P> {
    let completion = queue.wait()?.ok_or("nothing in flight")?;
    match in_flight.finish(completion) {
        Outcome::Completed { payload, result } => result.map(|()| payload).map_err(Into::into),
        _ => Err("the command timed out".into()),
    }
}

/// Returns the byte at offset `at`: no two pages are equal.
fn byte(at: usize) -> u8 {
    u8::try_from((at ^ (at >> 8) ^ (at >> 16)) & 0xff).unwrap_or(0)
}

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

fn run() -> BoxResult<()> {
    let address = std::env::args().nth(1).ok_or("usage: unprotected BDF")?;
    // SAFETY: only the driver below uses the controller, and gives it addresses of live mappings;
    // each command is waited for before its mapping ends, and the controller is disabled by the
    // driver before the arenas go.
    let options = unsafe { Options::new().without_iommu() };
    let pci = PciController::open(&address, &options, 1)?;
    let domain = pci.domain().clone();
    // Two hugepages are adjacent only by chance.
    let page = || {
        Arena::builder()
            .size(2 << 20)
            .source(Source::Hugetlb2M)
            .mapping_policy(MappingPolicy::Whole)
    };
    let (rings, data) = (page().build(&domain)?, page().build(&domain)?);
    println!("rings at {}, data at {}", rings.iova(), data.iova());
    let controller = Controller::start(pci.registers(), rings, Config::default())?;
    let namespace = controller.namespaces().into_iter().next().ok_or("no namespace")?;
    let mut queue = controller.create_queue(8)?;
    let blocks = u32::try_from(PIECE)? / namespace.block_bytes;
    let place = |at: usize| at as u64 / u64::from(namespace.block_bytes);

    let pattern: Vec<u8> = (0..BYTES).map(byte).collect();
    for at in (0..BYTES).step_by(PIECE) {
        let buffer = data.alloc(PIECE)?;
        buffer.memory().copy_from_slice(0, pattern.get(at..at + PIECE).unwrap_or_default())?;
        let mapped = domain.map(buffer, ToDevice)?;
        let flight = queue.write(namespace.nsid, place(at), blocks, mapped)?;
        drop(finish(&mut queue, flight)?.unmap()?);
    }
    let mut found = vec![0; PIECE];
    for at in (0..BYTES).step_by(PIECE) {
        let mapped = domain.map(data.alloc(PIECE)?, FromDevice)?;
        let flight = queue.read(namespace.nsid, place(at), blocks, mapped)?;
        let mapped = finish(&mut queue, flight)?;
        mapped.unmap()?.memory().copy_to_slice(0, &mut found)?;
        if pattern.get(at..at + PIECE) != Some(&found) {
            return Err(format!("the byte read at {at:#x} differs from the one written").into());
        }
    }
    println!("1 MiB written and read back by physical addresses");
    Ok(())
}
