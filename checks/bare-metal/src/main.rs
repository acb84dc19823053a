//! A program without any kernel, which QEMU boots (`vm/bare`): it sets up a VT-d unit by
//! `pinfold-vtd`, has QEMU's device `edu` copy behind Pinfold's tables, and sees that the device
//! reaches nothing any more once a mapping is revoked, and that the unit says so.
//!
//! Everything that `pinfold-vtd` needs of a kernel is in this folder: registers, memory, and a way to
//! write the processor's cache back.
#![no_std]
#![no_main]

extern crate alloc;

mod edu;
mod machine;
mod memory;

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use core::fmt::Display;
use edu::Edu;
use machine::{At, say};
use memory::{Clflush, Identity, Pages, Tables};
use pinfold_core::access::Bidirectional;
use pinfold_core::domain::{Domain, Generations, Mapping, Pinned};
use pinfold_core::invalidate::WaitLimit;
use pinfold_core::mem::DmaMemory;
use pinfold_vtd::dmar::Dmar;
use pinfold_vtd::fault::{Fault, Reason};
use pinfold_vtd::{Registers, Unit};

type Result<T> = core::result::Result<T, String>;

/// A unit's registers.
struct Mmio(At);

impl Registers for Mmio {
    fn read32(&self, offset: u32) -> u32 {
        self.0.read(offset.into())
    }
    fn write32(&self, offset: u32, value: u32) {
        self.0.write(offset.into(), value);
    }
    fn read64(&self, offset: u32) -> u64 {
        self.0.read(offset.into())
    }
    fn write64(&self, offset: u32, value: u64) {
        self.0.write(offset.into(), value);
    }
}

/// Called by `boot.s`, once.
#[unsafe(no_mangle)]
extern "C" fn bare_main(start_info: u64) -> ! {
    match run(start_info) {
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

fn run(start_info: u64) -> Result<()> {
    let table = machine::acpi_table(start_info, b"DMAR").ok_or("no DMAR table: no unit")?;
    let dmar = Dmar::parse(table).map_err(words)?;
    let entry = dmar.unit_of(0, (0, 0x12, 0), |_, _, _| None).ok_or("no unit has the device")?;
    let registers = Mmio(At(entry.registers.start().raw()));
    let unit = Unit::<_, Clflush>::new(registers, Box::new(Tables), dmar.address_bits);
    let unit = unit.map_err(words)?;
    say!("unit at {}: {:x?}", entry.registers.start(), unit.capabilities());
    let limit = WaitLimit { time_ns: u64::MAX, polls: 100_000_000 };
    let created = unit.create_domain(Identity(Generations::new()), Box::new(Tables), limit);
    let (domain, attachments) = created.map_err(words)?;
    unit.enable().map_err(words)?;
    let edu = Edu::open().ok_or("no device edu at 00:12.0")?;

    // Attached to nothing, it reaches nothing.
    let (source, destination) = (map(&domain)?, map(&domain)?);
    let (from, to) = (source.iova().start().raw(), destination.iova().start().raw());
    check(from != source.memory().addr() as u64, "the addresses are the physical ones")?;
    fill(source.memory(), 1)?;
    edu.copy(from, to, BYTES as u64);
    check(!same(&destination, 1)?, "a device that is attached to nothing has copied")?;
    refused(&unit, |fault| fault.reason == Reason::NoRootEntry)?;

    unit.attach(Edu::ADDRESS, &attachments, None).map_err(words)?;
    for round in 2..5 {
        fill(source.memory(), round)?;
        edu.copy(from, to, BYTES as u64);
        check(same(&destination, round)?, "the device has not copied what is mapped")?;
    }
    check(unit.take_faults().0.is_empty(), "an access to what is mapped was refused")?;
    say!("copied {BYTES} bytes from {from:#x} to {to:#x}");

    // Revoked, and used for something else at once.
    let secret = source.unmap().map_err(words)?;
    fill(secret.memory(), 9)?;
    edu.copy(from, to, BYTES as u64);
    check(!same(&destination, 9)?, "the device has read a page after its revocation")?;
    refused(&unit, |fault| {
        (fault.device, fault.write) == (Edu::ADDRESS, false)
            && (fault.page.raw(), fault.reason) == (from, Reason::NoRead)
    })?;

    let secret = domain.map(secret, Bidirectional).map_err(|refused| words(refused.error))?;
    unit.detach(Edu::ADDRESS, &attachments).map_err(words)?;
    edu.copy(secret.iova().start().raw(), to, BYTES as u64);
    check(!same(&destination, 9)?, "a device that is detached has copied")?;
    refused(&unit, |fault| fault.reason == Reason::NoContextEntry)
}

/// The unit has refused an access, and says so in the words that are `expected`.
fn refused(unit: &Unit<Mmio, Clflush>, expected: impl Fn(&Fault) -> bool) -> Result<()> {
    let (faults, _) = unit.take_faults();
    for (fault, domain) in &faults {
        say!("of domain {domain:?}: {fault}");
    }
    let found = faults.iter().any(|(fault, _)| expected(fault));
    if found { Ok(()) } else { Err(format!("not the fault that was expected: {faults:?}")) }
}

/// What is copied: a part of a page.
const BYTES: usize = 2048;

fn map(domain: &Domain) -> Result<Mapping<Pages, Bidirectional>> {
    let pages = Pages::take(1).ok_or("no pages are left: enlarge PAGES")?;
    domain.map(pages, Bidirectional).map_err(|refused| words(refused.error))
}

/// Byte `at` of pattern `number`.
fn byte(number: u8, at: usize) -> u8 {
    (at as u8).wrapping_mul(31).wrapping_add(number)
}

fn fill(memory: DmaMemory<'_>, number: u8) -> Result<()> {
    let bytes: [u8; BYTES] = core::array::from_fn(|at| byte(number, at));
    memory.copy_from_slice(0, &bytes).map_err(words)
}

fn same(mapping: &Mapping<Pages, Bidirectional>, number: u8) -> Result<bool> {
    let mut bytes = [0; BYTES];
    mapping.memory().copy_to_slice(0, &mut bytes).map_err(words)?;
    Ok((0..BYTES).all(|at| bytes[at] == byte(number, at)))
}
