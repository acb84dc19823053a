//! `cargo run -p pinfold --example vm_memory --features vm-memory`
//!
//! A guest's memory in an arena: the monitor loads it through `vm-memory`; a device that is passed
//! through to the guest reaches it by the guest's addresses, translated once.

use pinfold::adapters::vm_memory::{GuestArena, GuestRegion};
use pinfold::{Arena, Domain, Iova, MappingPolicy};
use std::error::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

const LOW: GuestAddress = GuestAddress(0);
/// Above the hole for devices below 4 GiB.
const HIGH: GuestAddress = GuestAddress(4 << 30);

/// Returns the I/O virtual address of a guest address.
fn for_device(arena: &Arena, guest: &GuestArena, addr: GuestAddress) -> Option<Iova> {
    let (region, offset) = guest.to_region_addr(addr)?;
    region.iova(arena)?.checked_add(offset.0)
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

fn run() -> Result<(), Box<dyn Error>> {
    let domain = Domain::soft()?;
    // The guest may give any of its memory to the device, so all of it is mapped for the guest's
    // lifetime.
    let arena =
        Arena::builder().size(8 << 20).mapping_policy(MappingPolicy::Whole).build(&domain)?;
    let guest = GuestArena::from_regions(vec![
        GuestRegion::new(arena.alloc_zeroed(2 << 20)?, LOW)?,
        GuestRegion::new(arena.alloc_zeroed(4 << 20)?, HIGH)?,
    ])?;
    for region in guest.iter() {
        println!(
            "guest {:#x}: {} bytes, {:?} for the device",
            region.start_addr().0,
            region.len(),
            region.iova(&arena)
        );
    }

    // The monitor loads a kernel; the guest would store the address of its buffer.
    guest.write_slice(b"kernel", GuestAddress(0x10_0000))?;
    let buffer = GuestAddress(HIGH.0 + 0x3000);
    guest.write_obj(buffer.0, GuestAddress(0x7000))?;

    // The device receives that address, and writes there.
    let target = GuestAddress(guest.read_obj(GuestAddress(0x7000))?);
    let at = for_device(&arena, &guest, target).ok_or("no such guest address")?;
    domain.port().ok_or("the devices of this domain are not models")?.write(at, b"packet")?;

    let mut packet = [0; 6];
    guest.read_slice(&mut packet, buffer)?;
    assert_eq!(&packet, b"packet");
    println!("the guest finds {:?}", str::from_utf8(&packet)?);
    let hole = GuestAddress(3 << 30);
    let Err(refused) = guest.write_obj(0_u8, hole) else {
        return Err("something is in the hole".into());
    };
    println!("in the hole: {refused}");
    Ok(())
}
