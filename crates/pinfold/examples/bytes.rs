//! `cargo run -p pinfold --example bytes --features bytes`
//!
//! A message that a device wrote is handed on as `Bytes`, without a copy.

use bytes::Bytes;
use pinfold::adapters::bytes::freeze;
use pinfold::core::access::FromDevice;
use pinfold::{Arena, Domain};
use std::error::Error;
use std::thread;

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
    let device = domain.port().ok_or("the devices of this domain are not models")?;
    let arena = Arena::builder().size(1 << 20).build(&domain)?;

    // The device writes two messages into one buffer.
    let mapped = domain.map(arena.alloc(8192)?, FromDevice)?;
    let iova = mapped.iova().start();
    device.write(iova, b"first|second")?;
    let buffer = mapped.unmap()?;
    let written_at = buffer.memory().addr();

    // The buffer is not written from here on, so it can be shared.
    let bytes = freeze(buffer)?;
    let (first, second): (Bytes, Bytes) = (bytes.slice(..5), bytes.slice(6..12));
    drop(bytes);
    assert_eq!(first.as_ptr().addr(), written_at);
    println!("{} bytes, where the device wrote them", first.len() + second.len());

    // Two consumers in two threads; the memory returns to the arena with the last of them.
    let consumers = [first, second].map(|part| thread::spawn(move || part.to_ascii_uppercase()));
    for consumer in consumers {
        println!("{}", String::from_utf8(consumer.join().map_err(|_| "a consumer panicked")?)?);
    }
    assert_eq!(arena.stats().frames_in_use, 0);

    // The device knows the address still, and reaches nothing by it.
    let Err(fault) = device.write(iova, b"late") else { return Err("a late write landed".into()) };
    println!("a late write: {fault}");
    Ok(())
}
