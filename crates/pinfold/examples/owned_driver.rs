//! `cargo run -p pinfold --example owned_driver`
//!
//! A driver that owns all that it uses: domain, arena, descriptor ring and mapped buffers in one
//! struct, which moves between threads and drops in any order.
//!
//! The device is the model of a network card: a thread that receives a frame into each buffer of
//! its ring.

use pinfold::core::access::{Bidirectional, FromDevice};
use pinfold::core::domain::Mapping;
use pinfold::soft::{Nic, NicEvent};
use pinfold::{Arena, Buffer, Domain, DomainLocal};
use std::error::Error;

const ENTRIES: usize = 8;
const BUFFER_BYTES: usize = 4096;
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
            descriptors.memory().write_u32(at + 8, u32::try_from(mapping.iova().len())?.to_le())?;
            descriptors.memory().store_release_u32(at + 12, Nic::OWNED.to_le())?;
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

/// Receives a frame for each buffer of the ring: its bytes are its number.
fn receive_frames(card: &mut Nic) -> Result<(), Box<dyn Error + Send + Sync>> {
    for entry in 0..ENTRIES {
        let frame = [u8::try_from(entry)?; BUFFER_BYTES];
        if card.receive(&frame)? != NicEvent::Moved(BUFFER_BYTES) {
            return Err(format!("frame {entry} was dropped").into());
        }
    }
    Ok(())
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
    let arena = Arena::builder().size(2 << 20).build(&domain)?;
    let port = domain.port().ok_or("no software IOMMU")?;
    let mut driver = Driver::new(&domain, &arena)?;
    // The driver keeps alive what it needs.
    drop((domain, arena));

    // It only receives, so it needs no second ring.
    let ring = driver.descriptors.iova().start();
    let mut card = Nic::new(port).receive_ring(ring, u32::try_from(ENTRIES)?);
    std::thread::scope(|scope| scope.spawn(|| receive_frames(&mut card)).join())
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
    if receive_frames(&mut card).is_ok() {
        return Err("the device reached memory after the driver was dropped".into());
    }
    Ok(())
}
