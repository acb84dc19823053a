//! A DMA pool for a program without a standard library: its own source of chunks over a static
//! buffer, and a driver struct that owns pool and blocks. `pool.rs` is `no_std`; `checks/no-std`
//! links it into a program without `std`.
//!
//! Run with `cargo run -p pinfold-core --example no_std_pool`.

extern crate alloc;

mod pool;

use pinfold_core::addr::Iova;
use pool::{Driver, StaticSource};

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

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let source = StaticSource::take()?.ok_or("the buffer is in use")?;
    let mut driver = Driver::new(source)?;
    for i in 0..4 {
        let descriptor = driver.submit(Iova::new(0x1000_0000 + i * 4096), 4096)?;
        println!("descriptor at {descriptor}");
    }
    while driver.complete() {}
    Ok(())
}
