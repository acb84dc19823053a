//! A program without any kernel, which QEMU boots (`vm/bare`): it sets up a VT-d unit by
//! `pinfold-vtd`, and sees what devices reach behind Pinfold's tables. The command line says which
//! device: nothing stands for `edu`, `device-tlb` for one that has a TLB of its own.
//!
//! Everything that `pinfold-vtd` needs of a kernel is in this folder: registers, memory, and a way to
//! write the processor's cache back.
#![no_std]
#![no_main]

extern crate alloc;

mod device_tlb;
mod machine;
mod memory;
mod revocation;
mod unit;
mod virtio;

use alloc::format;
use alloc::string::{String, ToString};
use core::fmt::Display;
use machine::say;

type Result<T> = core::result::Result<T, String>;

/// Called by `boot.s`, once.
#[unsafe(no_mangle)]
extern "C" fn bare_main(start_info: u64) -> ! {
    let ran = match machine::command_line(start_info) {
        b"" => revocation::run(start_info),
        b"device-tlb" => device_tlb::run(start_info),
        other => Err(format!("no such part: {}", String::from_utf8_lossy(other))),
    };
    match ran {
        Ok(()) => {
            say!("OK");
            machine::exit(machine::PASSED)
        }
        Err(error) => {
            say!("failed: {error}");
            machine::exit(machine::FAILED)
        }
    }
}

fn words(error: impl Display) -> String {
    error.to_string()
}

fn check(holds: bool, otherwise: &str) -> Result<()> {
    if holds { Ok(()) } else { Err(otherwise.into()) }
}
