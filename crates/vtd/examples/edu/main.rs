//! `edu [ROUNDS [SEED]]` or `edu costs`, as root in a machine of QEMU with `intel-iommu` and `edu`, booted with
//! `intel_iommu=off intremap=off iomem=relaxed` (`vm/vtd` does all of it).
//!
//! QEMU's unit walks Pinfold's tables and drains its queue, and QEMU's device `edu` copies behind it.
//! In the right order no stale page is ever reached; each wrong order is seen to leak one; what the
//! device reads is what the table says; and what flushes cost is counted.
//!
//! The device needs 100 ms of the machine's time for each transfer. Where that passes as it is
//! waited for (`vm/run --accel icount`), 100,000 rounds take minutes.

mod costs;
mod host;
mod machine;
mod orders;

use machine::{Doorbell, Edu, Machine, Pages, WRITTEN_BACK};
use pinfold_core::access::Bidirectional;
use pinfold_core::domain::{Mapping, Pinned, Revoked};
use pinfold_core::known_bad::{self, Mistake};
use pinfold_vtd::fault::{Fault, Reason};
use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn late(revoked: Revoked<Pages>) -> Result<Pages> {
    revoked.wait().map_err(|error| error.error.into())
}

/// A page is mapped, cached by the unit, revoked by `revoke`, and then has a secret: whether the
/// device reads it.
fn leaks(
    machine: &Machine,
    revoke: impl FnOnce(Mapping<Pages, Bidirectional>, u64) -> Result<Pages>,
) -> Result<bool> {
    let pages = machine.pages(4096)?;
    pages.memory().write_u64(0, 0x1111)?;
    let (mapping, iova) = machine.map(pages)?;
    if machine.read(iova)? != 0x1111 {
        return Err("the device does not read what is mapped".into());
    }
    let pages = revoke(mapping, iova)?;
    pages.memory().write_u64(0, 0x5ec2e7)?;
    Ok(machine.read(iova)? == 0x5ec2e7)
}

/// Whether an access after a revocation is recorded as what it was. The unit has one record, which
/// a device of the kernel's may have taken: its driver knows nothing of this.
fn records_faults(machine: &Machine) -> Result<bool> {
    let (mapping, iova) = machine.map(machine.pages(4096)?)?;
    mapping.unmap()?;
    for _ in 0..10 {
        machine.unit.take_faults(&machine.attachments);
        machine.read(iova)?;
        let expected = |fault: &Fault| {
            (fault.device, fault.reason, fault.write) == (Edu::ADDRESS, Reason::NoRead, false)
                && fault.page.raw() == iova
        };
        let (faults, _) = machine.unit.take_faults(&machine.attachments);
        for fault in &faults {
            println!("of the domain: {fault}");
        }
        if faults.iter().any(expected) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn run(rounds: usize, seed: u64) -> Result<bool> {
    let machine = machine::open()?;
    let (mut passed, start) = (true, Instant::now());
    let mut check = |name: &str, leaked: bool, expected: bool| {
        let verdict = if leaked == expected { "ok" } else { "WRONG" };
        passed &= leaked == expected;
        println!(
            "{verdict}: {name}: {}",
            if leaked { "a stale page is read" } else { "nothing is read" }
        );
    };
    let stale = orders::right_order(&machine, rounds, seed)?;
    check(&format!("the right order, {rounds} rounds"), stale, false);
    orders::walk_agrees(&machine, rounds.div_ceil(100).max(20), seed)?;
    if !records_faults(&machine)? {
        return Err("an access after a revocation is not recorded".into());
    }

    let resubmitted = || machine.domain.stats().backend.invalidations.resubmitted;
    for errors in 1..=5 {
        let leaked = leaks(&machine, |mapping, _| {
            machine.hand.set(Doorbell::Unknown);
            Ok(mapping.unmap()?)
        })?;
        check("an error of the queue", leaked, false);
        if resubmitted() != errors {
            return Err(format!("after {errors} errors: resubmitted {}", resubmitted()).into());
        }
    }

    machine.hand.set(Doorbell::NoFlush);
    let leaked = leaks(&machine, |mapping, _| Ok(mapping.unmap()?))?;
    machine.hand.set(Doorbell::Rings);
    check("no flush", leaked, true);
    machine.flush_stale()?;

    let leaked = leaks(&machine, |mapping, iova| {
        let to = machine.seen.iova().start().raw();
        machine.hand.state().access = Some((machine.edu, iova, to));
        machine.hand.set(Doorbell::ThenAccess);
        known_bad::make(Some(Mistake::FlushBeforeClear));
        let pages = mapping.unmap();
        known_bad::make(None);
        machine.hand.set(Doorbell::Rings);
        Ok(pages?)
    })?;
    check("flush before clear", leaked, true);
    machine.flush_stale()?;

    let leaked = leaks(&machine, |mapping, _| {
        machine.hand.set(Doorbell::Late);
        known_bad::make(Some(Mistake::BufferEarly));
        let pages = late(mapping.revoke());
        known_bad::make(None);
        pages
    })?;
    machine.hand.set(Doorbell::Rings);
    check("a payload returned early", leaked, true);

    // The addresses of a page whose flush is late are given to another one.
    let pages = machine.pages(4096)?;
    pages.memory().write_u64(0, 0x1111)?;
    let (mapping, iova) = machine.map(pages)?;
    machine.read(iova)?;
    machine.hand.set(Doorbell::Late);
    known_bad::make(Some(Mistake::IovaEarly));
    let revoked = mapping.revoke();
    known_bad::make(None);
    let pages = machine.pages(4096)?;
    pages.memory().write_u64(0, 0x2222)?;
    // Not by a map that waits for its own flush, as with caching mode.
    let stale = machine.read(iova)? == 0x1111;
    check("addresses reused early", stale, true);
    machine.hand.set(Doorbell::Rings);
    late(revoked)?;

    println!("words written back: {}", WRITTEN_BACK.load(Ordering::Relaxed));
    println!("invalidations: {:?}", machine.domain.stats().backend.invalidations);
    println!("{} s", start.elapsed().as_secs());
    Ok(passed)
}

fn run_as_asked() -> Result<()> {
    if std::env::args().nth(1).as_deref() == Some("costs") {
        return costs::print(&machine::open()?);
    }
    let rounds = std::env::args().nth(1).map_or(Ok(5), |word| word.parse())?;
    let seed = std::env::args().nth(2).map_or(Ok(1), |word| word.parse())?;
    println!("seed {seed}");
    if !run(rounds, seed)? {
        return Err("an order was not seen as expected".into());
    }
    println!("edu: all as expected");
    Ok(())
}

fn main() -> ExitCode {
    match run_as_asked() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("edu: {error}");
            ExitCode::FAILURE
        }
    }
}
