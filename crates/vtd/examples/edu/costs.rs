//! What flushes cost: by the size of a batch, and by what they name, with the refills that follow.
//! Each beside the software IOMMU, whose time is that of its cost model.
//!
//! The time of an emulated unit proves nothing about hardware; counts do. Those of the unit come from
//! QEMU's trace, which `vm/vtd` reads: a write to `FEDATA`, a register of interrupts that are masked,
//! begins a phase there.

use super::Result;
use super::machine::{Machine, Pages};
use super::orders::part;
use pinfold_core::access::Bidirectional;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{Domain, DomainLocal, Mapping, Pinned};
use pinfold_core::invalidate::InvalidationStats;
use pinfold_soft::SoftConfig;
use std::time::Instant;

/// "Fault Event Data Register".
const FEDATA: usize = 0x3c;
/// Of so many pages one is revoked: farther apart than what one flush is widened to.
const APART: usize = 4;
/// How many pages the device uses while others are flushed.
const USED: usize = 16;
/// Batches of which the median is taken.
const BATCHES: usize = 33;

type Payloads = Vec<Mapping<Pages, Bidirectional>>;

/// A domain under measurement, and hugepages for it.
struct Side<'m> {
    name: &'static str,
    domain: &'m Domain,
    memory: [Pages; 2],
    /// Has the device read a word.
    read: Box<dyn Fn(u64) -> Result<()> + 'm>,
    /// Begins a phase.
    phase: Box<dyn Fn(u32) + 'm>,
    /// What the device's translations had to be read for from the table, if that is counted here.
    refills: Box<dyn Fn() -> Option<u64> + 'm>,
}

pub(crate) fn print(machine: &Machine) -> Result<()> {
    let unit = Side {
        name: "unit",
        domain: &machine.domain,
        memory: [machine.pages(2 << 20)?, machine.pages(2 << 20)?],
        read: Box::new(|iova| {
            machine.edu.read(iova, 0, 8);
            Ok(())
        }),
        phase: Box::new(|number| machine.hand.mark(FEDATA, number)),
        refills: Box::new(|| None),
    };
    let (domain, bus) = pinfold_soft::domain(SoftConfig::default())?;
    let port = bus.port();
    let memory = [machine.pages(2 << 20)?, machine.pages(2 << 20)?];
    for pages in &memory {
        // SAFETY: hugepages are never freed.
        unsafe { domain.register_memory(pages.memory()) }?;
    }
    let model = Side {
        name: "model",
        domain: &domain,
        memory,
        read: Box::new(|iova| Ok(port.read(Iova::new(iova), &mut [0; 8])?)),
        phase: Box::new(|_| {}),
        refills: Box::new(|| Some(bus.stats().misses)),
    };
    for batch in [1, 4, 15, 64, 250] {
        let (there, here) = (unit.batch(batch)?, model.batch(batch)?);
        if there != here {
            let what = format!(
                "of {batch} pages at once, the unit has {there:?} flushes, waits and flushes of the domain, the model {here:?}"
            );
            return Err(what.into());
        }
    }
    unit.refills()?;
    let refills = model.refills()?;
    // vm/vtd expects the same of the unit.
    if refills != [USED as u64, 0, 0, USED as u64] {
        return Err(format!("the model has read {refills:?} translations").into());
    }
    Ok(())
}

impl Side<'_> {
    /// Maps the first `count` pages of the memory, each on its own.
    fn pages(&self, owner: &mut DomainLocal, count: usize) -> Result<Payloads> {
        let map = |number: usize| {
            let page = part(self.memory[number / 512].memory(), number % 512, 1)?;
            Ok(owner.map(page, Bidirectional).map_err(|refused| refused.error)?)
        };
        (0..count).map(map).collect()
    }

    /// Revokes the first of each [`APART`] pages at once, waits, and then the others. Returns how
    /// many nanoseconds the first took, and what it had flushed.
    fn revoke(&self, owner: &mut DomainLocal, pages: Payloads) -> Result<(u128, [u64; 3])> {
        let (mut first, mut others) = (Vec::new(), Vec::new());
        for (number, mapping) in pages.into_iter().enumerate() {
            if number % APART == 0 { first.push(mapping) } else { others.push(mapping) }
        }
        let mut revoked = Vec::with_capacity(first.len().max(others.len()));
        let (start, before) = (Instant::now(), self.invalidations());
        owner.revoke_many(first, &mut revoked);
        for one in revoked.drain(..) {
            owner.wait(one).map_err(|error| error.error)?;
        }
        let (time, after) = (start.elapsed().as_nanos(), self.invalidations());
        owner.revoke_many(others, &mut revoked);
        for one in revoked {
            owner.wait(one).map_err(|error| error.error)?;
        }
        let by_domain = after.domain_flushes - before.domain_flushes;
        Ok((time, [after.sent - before.sent, after.waits - before.waits, by_domain]))
    }

    fn invalidations(&self) -> InvalidationStats {
        self.domain.stats().backend.invalidations
    }

    /// Revokes `batch` pages at once, again and again. Returns what that had flushed.
    fn batch(&self, batch: usize) -> Result<[u64; 3]> {
        let mut owner = self.domain.local();
        let (mut times, mut counts) = (Vec::new(), [0; 3]);
        for _ in 0..BATCHES {
            let pages = self.pages(&mut owner, batch * APART)?;
            let (time, flushed) = self.revoke(&mut owner, pages)?;
            times.push(time);
            counts = flushed;
        }
        times.sort_unstable();
        let ([flushes, waits, _], median, name) = (counts, times[BATCHES / 2], self.name);
        println!(
            "cost: {name}: of {batch} pages at once: {flushes} flushes, {waits} wait, {median} ns"
        );
        Ok(counts)
    }

    /// Has the device use pages, flushes others by range and by domain, and has it use its own again.
    /// Returns how many translations it read each time, if that is counted here.
    fn refills(&self) -> Result<Vec<u64>> {
        let mut owner = self.domain.local();
        // QEMU 7.2 compares the lowest 8 bits of a page's number alone (its mask is an `uint8_t`): the
        // pages flushed in phase 3 are the first four of another window, so the first here go too.
        let used = self.pages(&mut owner, 2 * USED)?.split_off(USED);
        let mut counted = Vec::new();
        let mut touch = |number: u32, what: &str| -> Result<()> {
            let before = (self.refills)();
            (self.phase)(number);
            for mapping in &used {
                (self.read)(mapping.iova().start().raw())?;
            }
            (self.phase)(0);
            if let Some(refills) =
                (self.refills)().zip(before).map(|(after, before)| after - before)
            {
                println!("refills: {}: {what}: {refills} of {USED} pages", self.name);
                counted.push(refills);
            }
            Ok(())
        };
        touch(1, "first use")?;
        touch(2, "used again")?;
        for (number, count, what) in
            [(3, 1, "after a flush of another page"), (4, 250, "after a flush of the domain")]
        {
            let mut others = self.domain.local();
            let pages = self.pages(&mut others, count * APART)?;
            let (_, [flushes, _, by_domain]) = self.revoke(&mut others, pages)?;
            if (flushes, by_domain) != (1, u64::from(number == 4)) {
                let what = format!("{count} pages: {flushes} flushes, {by_domain} of the domain");
                return Err(what.into());
            }
            touch(number, what)?;
        }
        Ok(counted)
    }
}
