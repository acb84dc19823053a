//! `cargo run -p pinfold --example allocator --features allocator-api2`
//!
//! A `Vec` in DMA memory: filled by the program, doubled by a device, read by the program.

use allocator_api2::vec::Vec;
use pinfold::adapters::allocator::{ArenaAlloc, DmaVec};
use pinfold::core::access::Bidirectional;
use pinfold::core::addr::Iova;
use pinfold::soft::Port;
use pinfold::{Arena, Domain};
use std::error::Error;

/// Returns the device of this example: it doubles `count` numbers at `iova`.
fn double(device: &Port, iova: Iova, count: usize) -> Result<(), Box<dyn Error>> {
    let mut bytes = vec![0; count * 4];
    device.read(iova, &mut bytes)?;
    for number in bytes.as_chunks_mut::<4>().0 {
        *number = (u32::from_ne_bytes(*number) * 2).to_ne_bytes();
    }
    Ok(device.write(iova, &bytes)?)
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
    let device = domain.port().ok_or("the devices of this domain are not models")?;
    let arena = Arena::builder().size(4 << 20).build(&domain)?;

    let mut numbers = Vec::new_in(ArenaAlloc::new(&arena)?);
    numbers.extend(1..=100_000_u32);
    println!("{} numbers; frames in use: {}", numbers.len(), arena.stats().frames_in_use);

    let count = numbers.len();
    let mapped = domain.map(DmaVec::new(numbers)?, Bidirectional)?;
    double(&device, mapped.iova().start(), count)?;
    let mut numbers = mapped.unmap()?.into_vec();
    assert!(numbers.iter().zip(1..).all(|(number, i)| *number == 2 * i));
    println!("the device doubled them: {:?} ... {:?}", &numbers[..3], numbers.last());

    // It is a `Vec` as any other.
    numbers.retain(|number| number % 1000 == 0);
    numbers.shrink_to_fit();
    println!("{} kept; frames in use: {}", numbers.len(), arena.stats().frames_in_use);
    drop(numbers);
    assert_eq!(arena.stats().frames_in_use, 0);
    Ok(())
}
