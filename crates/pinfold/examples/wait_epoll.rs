//! `cargo run -p pinfold --example wait_epoll`
//!
//! Waits for a device's interrupt with epoll, as an event loop (tokio's `AsyncFd` works alike)
//! does:
//!
//! - `wait_epoll` waits for a device model behind the software IOMMU, which raises an eventfd. Runs
//!   anywhere.
//! - `wait_epoll BDF` waits up to 5 s for the first interrupt of a real device, which must be bound
//!   to `vfio-pci`. Without a driver that starts it the device raises none: this shows the call.

use pinfold::vfio::{Device, Options};
use pinfold::{Arena, Domain, FromDevice};
use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use std::error::Error;
use std::os::fd::AsFd;

/// Returns whether `interrupt` became readable within `seconds`. The caller resets it.
fn wait(interrupt: impl AsFd, seconds: i64) -> Result<bool, Box<dyn Error>> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, interrupt, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    let mut events = Vec::with_capacity(1);
    let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
    epoll::wait(&epoll, spare_capacity(&mut events), Some(&timeout))?;
    Ok(!events.is_empty())
}

fn model() -> Result<(), Box<dyn Error>> {
    let domain = Domain::soft()?;
    let port = domain.port().ok_or("a soft domain has ports")?;
    let arena = Arena::builder().size(4 << 20).build(&domain)?;
    let mapped = domain.map(arena.alloc(4096)?, FromDevice)?;
    let iova = mapped.iova().start();
    let interrupt = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let raise = interrupt.try_clone()?;
    let device = std::thread::spawn(move || -> Result<(), String> {
        port.write(iova, b"completed").map_err(|fault| fault.to_string())?;
        rustix::io::write(&raise, &1u64.to_ne_bytes()).map_err(|errno| errno.to_string())?;
        Ok(())
    });
    if !wait(&interrupt, 5)? {
        return Err("the model raised no interrupt".into());
    }
    device.join().map_err(|_| "the model panicked")??;
    let mut count = [0; 8];
    rustix::io::read(&interrupt, &mut count)?;
    let mut buffer = mapped.unmap()?;
    let text = String::from_utf8_lossy(&buffer.as_slice()?[..9]).into_owned();
    println!("{} interrupt, the device wrote {text:?}", u64::from_ne_bytes(count));
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
    let Some(address) = std::env::args().nth(1) else { return model() };
    let device = Device::open(&address, &Options::new())?;
    let interrupts = device.interrupts(1)?;
    let interrupt = interrupts.first().ok_or("no interrupt")?;
    let raised = wait(interrupt, 5)?;
    println!(
        "{address}: {}, {} interrupts taken",
        if raised { "raised" } else { "timeout" },
        interrupt.take()?
    );
    Ok(())
}
