//! A driver that owns all that it uses: domain, arena, descriptor ring and mapped buffers in one struct, which moves
//! between threads and drops in any order.
//!
//! The device is a toy: a thread that reads 16-byte descriptors (address, length) from a ring and fills the buffers.
//!
//! `cargo run --example owned_driver`

use pinfold::core::access::{Bidirectional, FromDevice};
use pinfold::core::addr::Iova;
use pinfold::core::domain::Mapping;
use pinfold::{Arena, Buffer, Domain, DomainLocal};
use std::error::Error;

const ENTRIES: usize = 8;
const BUFFER_BYTES: usize = 4096;
/// Two little-endian words: the address and the length of a buffer.
const DESCRIPTOR_BYTES: usize = 16;

/// Fields in any order: nothing in it borrows from another field.
struct Driver {
    domain: DomainLocal,
    descriptors: Mapping<Buffer, Bidirectional>,
    ring: Vec<Mapping<Buffer, FromDevice>>,
}

impl Driver {
    /// Maps the ring and a buffer for each of its descriptors.
    fn new(domain: &Domain, arena: &Arena) -> Result<Self, Box<dyn Error>> {
        let mut domain = domain.local();
        let descriptors = domain.map(arena.alloc(ENTRIES * DESCRIPTOR_BYTES)?, Bidirectional)?;
        let buffers: Result<Vec<_>, _> = (0..ENTRIES).map(|_| arena.alloc(BUFFER_BYTES)).collect();
        // All of them or none, at consecutive addresses.
        let ring = domain.map_many(buffers?, FromDevice)?;
        for (entry, mapping) in ring.iter().enumerate() {
            let at = entry * DESCRIPTOR_BYTES;
            descriptors.memory().write_u64(at, mapping.iova().start().raw().to_le())?;
            descriptors.memory().write_u64(at + 8, mapping.iova().len().to_le())?;
        }
        Ok(Self { domain, descriptors, ring })
    }

    /// Revokes all buffers with one flush and returns them when the device cannot reach them.
    fn receive(&mut self) -> Result<Vec<Buffer>, Box<dyn Error>> {
        let mut revoked = Vec::with_capacity(self.ring.len());
        self.domain.revoke_many(self.ring.drain(..), &mut revoked);
        revoked.into_iter().map(|one| Ok(self.domain.wait(one)?)).collect()
    }
}

/// Fills the buffers of the ring at `ring`, each with its number.
fn device(port: &pinfold::soft::Port, ring: Iova) -> Result<(), Box<dyn Error + Send + Sync>> {
    for entry in 0..ENTRIES {
        let mut descriptor = [0; DESCRIPTOR_BYTES];
        let at = ring.checked_add((entry * DESCRIPTOR_BYTES) as u64).ok_or("the ring wraps")?;
        port.read(at, &mut descriptor)?;
        let (addr, len) = descriptor.split_at(8);
        let addr = Iova::new(u64::from_le_bytes(addr.try_into()?));
        let len = usize::try_from(u64::from_le_bytes(len.try_into()?))?;
        port.write(addr, &vec![u8::try_from(entry)?; len])?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let domain = Domain::soft()?;
    let arena = Arena::builder().size(2 << 20).build(&domain)?;
    let port = domain.port().ok_or("no software IOMMU")?;
    let mut driver = Driver::new(&domain, &arena)?;
    // The driver keeps alive what it needs.
    drop((domain, arena));

    let ring = driver.descriptors.iova().start();
    std::thread::scope(|scope| scope.spawn(|| device(&port, ring)).join())
        .map_err(|_| "the device panicked")?
        .map_err(|error| error.to_string())?;

    // Another thread takes over the driver, with live mappings.
    let buffers = std::thread::spawn(move || driver.receive().map_err(|error| error.to_string()))
        .join()
        .map_err(|_| "the driver panicked")??;
    for (entry, mut buffer) in buffers.into_iter().enumerate() {
        let expected = u8::try_from(entry)?;
        if buffer.as_slice()?.iter().any(|byte| *byte != expected) {
            return Err(format!("buffer {entry} has other data").into());
        }
    }
    println!("{ENTRIES} buffers of {BUFFER_BYTES} bytes received through a ring of descriptors");
    // The domain went with the driver: the device finds nothing.
    if device(&port, ring).is_ok() {
        return Err("the device reached memory after the driver was dropped".into());
    }
    Ok(())
}
