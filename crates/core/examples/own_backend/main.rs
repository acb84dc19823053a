//! `cargo run -p pinfold-core --example own_backend`
//!
//! A backend of one's own, written from the page of `Backend`: the translation unit of a small
//! device, whose table is an array in static memory, and which caches nothing, so that a revocation
//! has completed when it returns. The buffers are static memory too. `unit.rs` is `no_std`, and
//! `checks/no-std` links it into a program without `std`.

mod unit;

use pinfold_core::access::FromDevice;
use pinfold_core::domain::Domain;
use pinfold_core::iova::IovaSpace;
use std::error::Error;
use std::sync::Arc;
use unit::{Page, Unit, device_writes};

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
    let domain = Domain::new(Arc::new(Unit), IovaSpace::new(unit::BITS)?);
    // SAFETY: the memory is static.
    unsafe { domain.register_memory(unit::memory()) }?;
    let mut local = domain.local();
    let pages = [Page::take(), Page::take()].into_iter().flatten();
    let mapped = local.map_many(pages, FromDevice)?;
    let first = mapped.first().ok_or("two pages are free")?.iova().start();
    println!("the device reaches {first}: {}", device_writes(first, 1));
    let mut revoked = Vec::new();
    local.revoke_many(mapped, &mut revoked); // adjacent: one range for both
    for page in revoked {
        local.wait(page)?;
    }
    if device_writes(first, 2) {
        return Err("the device reaches it after the revocation".into());
    }
    println!("and not after the revocation");
    let one = domain.map(Page::take().ok_or("the pages have come back")?, FromDevice)?;
    domain.unmap(one)?;
    domain.unregister_memory(unit::memory())?;
    Ok(())
}
