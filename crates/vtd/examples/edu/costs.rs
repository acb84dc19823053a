//! The cost of flushes: by the size of a batch, and by granularity, with the refills and the
//! refused accesses that follow. Each beside the software IOMMU, whose time is that of its cost
//! model.
//!
//! The time of an emulated unit proves nothing about hardware; counts do. Those of the unit come from
//! QEMU's trace, which `vm/vtd` reads: a write to `FEDATA`, a register of interrupts that are masked,
//! begins a phase there. Each case is a phase with a number, and is printed with what the model counts.
//! Times are printed as medians: of a revocation with its wait, and on the unit also of the flushes
//! and the wait alone. 64 pages are flushed one by one, and 250 by a flush of the domain, whose
//! refills are those of the case `domain-flushed`.

use super::Result;
use super::machine::{Machine, Pages};
use super::orders::part;
use pinfold_core::access::Bidirectional;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{Domain, DomainLocal, Mapping, Pinned};
use pinfold_core::invalidate::InvalidationStats;
use pinfold_soft::{PortStats, SoftConfig};
use std::time::Instant;

/// "Fault Event Data Register".
const FEDATA: usize = 0x3c;
/// One of this many pages is revoked: farther apart than what one flush is widened to.
const APART: usize = 4;
/// The number of pages that the device uses while others are flushed.
const USED: usize = 16;
/// The number of batches of which the median is taken.
const BATCHES: usize = 33;

type Payloads = Vec<Mapping<Pages, Bidirectional>>;

/// A domain under measurement, and hugepages for it.
struct Side<'m> {
    name: &'static str,
    domain: &'m Domain,
    memory: [Pages; 2],
    /// Has the device read a word of four bytes: QEMU refuses a longer one twice.
    read: Box<dyn Fn(u64) + 'm>,
    /// Begins a phase.
    phase: Box<dyn Fn(u32) + 'm>,
    /// The nanoseconds that the queue has taken for flushes and waits so far, if it is timed apart.
    queue_ns: Box<dyn Fn() -> Option<u128> + 'm>,
    /// The counts of its devices' accesses, if they are counted here.
    devices: Box<dyn Fn() -> Option<PortStats> + 'm>,
    /// The cases that were counted.
    cases: u32,
}

pub(crate) fn print(machine: &Machine) -> Result<()> {
    let mut unit = Side {
        name: "unit",
        domain: &machine.domain,
        memory: [machine.pages(2 << 20)?, machine.pages(2 << 20)?],
        read: Box::new(|iova| machine.edu.read(iova, 0, 4)),
        phase: Box::new(|number| machine.hand.mark(FEDATA, number)),
        queue_ns: Box::new(|| Some(machine.hand.state().tails_ns)),
        devices: Box::new(|| None),
        cases: 0,
    };
    let (domain, bus) = pinfold_soft::domain(SoftConfig::default())?;
    let port = bus.port();
    let memory = [machine.pages(2 << 20)?, machine.pages(2 << 20)?];
    for pages in &memory {
        // SAFETY: hugepages are never freed.
        unsafe { domain.register_memory(pages.memory()) }?;
    }
    let mut model = Side {
        name: "model",
        domain: &domain,
        memory,
        read: Box::new(|iova| {
            // A refused access is counted.
            let _ = port.read(Iova::new(iova), &mut [0; 4]);
        }),
        phase: Box::new(|_| {}),
        queue_ns: Box::new(|| None),
        devices: Box::new(|| Some(bus.stats())),
        cases: 0,
    };
    unit.all()?;
    model.all()
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

    /// Counts a case, which is the next phase of QEMU's trace. Prints what the stack has sent and, if
    /// that is counted here, what the devices have done.
    fn count<T>(&mut self, case: &str, work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        self.cases += 1;
        let (sent, done) = (self.invalidations(), (self.devices)());
        (self.phase)(self.cases);
        let worked = work(self);
        (self.phase)(0);
        println!("phase: {} {case}", self.cases);
        if let Some((before, after)) = done.zip((self.devices)()) {
            let flushes = self.invalidations().sent - sent.sent;
            let entries = flushes + self.invalidations().waits - sent.waits;
            let faults = after.faults - before.faults;
            // A walk that ends in a fault fills nothing.
            let refills = after.misses - before.misses - faults;
            println!("counted: {} {case} {flushes} {entries} {refills} {faults}", self.name);
        }
        worked
    }

    /// Revokes pages at once and waits. Returns how many nanoseconds that took.
    fn revoke(&self, owner: &mut DomainLocal, pages: Payloads) -> Result<u128> {
        let mut revoked = Vec::with_capacity(pages.len());
        let start = Instant::now();
        owner.revoke_many(pages, &mut revoked);
        for one in revoked {
            owner.wait(one).map_err(|error| error.error)?;
        }
        Ok(start.elapsed().as_nanos())
    }

    /// Maps pages, of which the first of each [`APART`] are to be revoked at once, and then the others.
    fn apart(&self, owner: &mut DomainLocal, count: usize) -> Result<[Payloads; 2]> {
        let pages = self.pages(owner, count * APART)?.into_iter().enumerate();
        let (first, others): (Vec<_>, Vec<_>) = pages.partition(|(number, _)| number % APART == 0);
        Ok([first, others].map(|pages| pages.into_iter().map(|(_, page)| page).collect()))
    }

    fn invalidations(&self) -> InvalidationStats {
        self.domain.stats().backend.invalidations
    }

    fn all(&mut self) -> Result<()> {
        for batch in [1, 4, 15, 64, 250] {
            self.batch(batch)?;
        }
        self.uses()
    }

    /// Revokes `batch` pages at once, again and again, and once more to be counted.
    fn batch(&mut self, batch: usize) -> Result<()> {
        let mut owner = self.domain.local();
        let (mut times, mut of_queue) = (Vec::new(), Vec::new());
        for _ in 0..BATCHES {
            let [first, others] = self.apart(&mut owner, batch)?;
            let before = (self.queue_ns)();
            times.push(self.revoke(&mut owner, first)?);
            of_queue.extend((self.queue_ns)().zip(before).map(|(after, before)| after - before));
            self.revoke(&mut owner, others)?;
        }
        times.sort_unstable();
        of_queue.sort_unstable();
        println!("time: {}: {batch} pages at once: {} ns", self.name, times[BATCHES / 2]);
        if let Some(median) = of_queue.get(BATCHES / 2) {
            println!(
                "time: {}: {batch} pages at once, flushes and wait alone: {median} ns",
                self.name
            );
        }
        let [first, others] = self.apart(&mut owner, batch)?;
        self.count(&format!("revoke-{batch}"), |side| side.revoke(&mut owner, first))?;
        self.revoke(&mut owner, others)?;
        Ok(())
    }

    /// Has the device use pages, flushes others by range and by domain, and has it use its own again;
    /// and once more when they are revoked.
    fn uses(&mut self) -> Result<()> {
        let mut owner = self.domain.local();
        // QEMU 7.2 compares the lowest 8 bits of a page's number alone (its mask is an `uint8_t`): the
        // pages flushed before the third use are the first four of another window, so the first here
        // go too.
        let used = self.pages(&mut owner, 2 * USED)?.split_off(USED);
        let addresses: Vec<_> = used.iter().map(|page| page.iova().start().raw()).collect();
        let uses = |side: &mut Self, case: &str| {
            side.count(case, |side| {
                addresses.iter().for_each(|iova| (side.read)(*iova));
                Ok(())
            })
        };
        uses(self, "first-use")?;
        uses(self, "used-again")?;
        for (count, case) in [(1, "page-flushed"), (250, "domain-flushed")] {
            let mut owner = self.domain.local();
            for pages in self.apart(&mut owner, count)? {
                self.revoke(&mut owner, pages)?;
            }
            uses(self, case)?;
        }
        self.revoke(&mut owner, used)?;
        uses(self, "revoked")
    }
}
