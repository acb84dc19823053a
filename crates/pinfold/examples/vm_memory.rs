//! A guest's memory over an arena: the monitor loads it through `vm-memory`, and a device that is passed through to the
//! guest reaches it by the guest's own addresses, translated once.
//!
//! `cargo run -p pinfold --example vm_memory --features vm-memory`

use pinfold::adapters::vm_memory::{GuestArena, GuestRegion};
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::addr::Iova;
use std::error::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

const LOW: GuestAddress = GuestAddress(0);
/// Above the hole for devices below 4 GiB.
const HIGH: GuestAddress = GuestAddress(4 << 30);

/// Where a device of the domain finds what the guest calls `addr`.
fn for_device(guest: &GuestArena, addr: GuestAddress) -> Option<Iova> {
    let (region, offset) = guest.to_region_addr(addr)?;
    region.iova()?.checked_add(offset.0)
}

fn main() -> Result<(), Box<dyn Error>> {
    let domain = Domain::soft()?;
    // The guest gives any of its memory to the device, so all of it is mapped, as long as the guest lives.
    let arena = Arena::builder().size(8 << 20).mapping_policy(MappingPolicy::Whole).build(&domain)?;
    let guest = GuestArena::from_regions(vec![
        GuestRegion::new(arena.alloc_zeroed(2 << 20)?, LOW)?,
        GuestRegion::new(arena.alloc_zeroed(4 << 20)?, HIGH)?,
    ])?;
    for region in guest.iter() {
        println!(
            "guest {:#x}: {} bytes, {:?} for the device",
            region.start_addr().0,
            region.len(),
            region.iova()
        );
    }

    // The monitor loads a kernel; the guest would fill in where its buffer is.
    guest.write_slice(b"kernel", GuestAddress(0x10_0000))?;
    let buffer = GuestAddress(HIGH.0 + 0x3000);
    guest.write_obj(buffer.0, GuestAddress(0x7000))?;

    // The device is told where that is, and writes there.
    let told = GuestAddress(guest.read_obj(GuestAddress(0x7000))?);
    let at = for_device(&guest, told).ok_or("no such guest address")?;
    domain.port().ok_or("the devices of this domain are not models")?.write(at, b"packet")?;

    let mut packet = [0; 6];
    guest.read_slice(&mut packet, buffer)?;
    assert_eq!(&packet, b"packet");
    println!("the guest finds {:?}", str::from_utf8(&packet)?);
    let hole = GuestAddress(3 << 30);
    let Err(refused) = guest.write_obj(0_u8, hole) else { return Err("something is in the hole".into()) };
    println!("in the hole: {refused}");
    Ok(())
}
