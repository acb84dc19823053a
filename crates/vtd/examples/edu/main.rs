//! `edu [ROUNDS]`, as root in a machine of QEMU with `intel-iommu` and `edu`, booted with
//! `intel_iommu=off intremap=off iomem=relaxed` (`vm/vtd` does all of it).
//!
//! QEMU's unit walks Pinfold's tables and drains its queue, and QEMU's device `edu` copies behind it.
//! In the right order no stale page is ever reached; each wrong order is seen to leak one.
//!
//! The device needs 100 ms of the machine's time for each copy, so that rounds are few.

mod host;

use host::{Hugepages, Mmio, Tables, Translator};
use pinfold_core::access::Bidirectional;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{Domain, DomainId, Generations, Mapping, Pinned, Revoked};
use pinfold_core::invalidate::WaitLimit;
use pinfold_core::known_bad::{self, Mistake};
use pinfold_core::mem::DmaMemory;
use pinfold_vtd::dmar::Dmar;
use pinfold_vtd::fault::{Fault, Reason};
use pinfold_vtd::registers::{self, Registers};
use pinfold_vtd::{SourceId, Unit, WriteBack};
use std::error::Error;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// QEMU's walker reads memory as the processor does, although it reports C = 0; this counts.
struct Counted;

static WRITTEN_BACK: AtomicUsize = AtomicUsize::new(0);

impl WriteBack for Counted {
    const FOR_NON_COHERENT: bool = true;
    fn write_back(words: &[AtomicU64]) {
        WRITTEN_BACK.fetch_add(words.len(), Ordering::Relaxed);
    }
}

/// What is done to the doorbell.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Doorbell {
    Rings,
    /// It is held back: a queue may be late.
    Late,
    /// A mistake: flushes are replaced by waits.
    NoFlush,
    /// It rings, and the device accesses the page before the caller goes on.
    ThenAccess,
}

/// The unit's registers, with a hand on the doorbell.
#[derive(Clone)]
struct Hand {
    mmio: Mmio,
    memory: Arc<Hugepages>,
    state: Arc<Mutex<HandState>>,
}

struct HandState {
    doorbell: Doorbell,
    held: Option<u64>,
    queue: u64,
    tail: u64,
    access: Option<(Edu, u64, u64)>,
}

impl Hand {
    fn state(&self) -> MutexGuard<'_, HandState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, doorbell: Doorbell) {
        let mut state = self.state();
        state.doorbell = doorbell;
        if let Some(tail) = state.held.take() {
            self.mmio.write(registers::IQT as usize, tail);
        }
    }
}

impl Registers for Hand {
    fn read32(&self, offset: u32) -> u32 {
        self.mmio.read(offset as usize)
    }
    fn write32(&self, offset: u32, value: u32) {
        self.mmio.write(offset as usize, value);
    }
    fn read64(&self, offset: u32) -> u64 {
        self.mmio.read(offset as usize)
    }
    fn write64(&self, offset: u32, value: u64) {
        let mut state = self.state();
        if offset == registers::IQA {
            (state.queue, state.tail) = (value, 0);
        }
        if offset == registers::IQT {
            match state.doorbell {
                Doorbell::Late => {
                    state.held = Some(value);
                    return;
                }
                Doorbell::NoFlush => {
                    let (mut at, queue) = (state.tail, state.queue);
                    while at != value {
                        let words =
                            (self.memory.word(queue + at), self.memory.word(queue + at + 8));
                        if let (Some(low), Some(high)) = words
                            && low.load(Ordering::Relaxed) & 0xf == 2
                        {
                            // A wait that writes into its own descriptor.
                            low.store(0x25, Ordering::Relaxed);
                            high.store(queue + at + 4, Ordering::Relaxed);
                        }
                        at = (at + 16) % 4096;
                    }
                }
                Doorbell::Rings | Doorbell::ThenAccess => {}
            }
            state.tail = value;
        }
        self.mmio.write(offset as usize, value);
        let then_access = offset == registers::IQT && state.doorbell == Doorbell::ThenAccess;
        if then_access && let Some((edu, from, to)) = state.access.take() {
            edu.copy(from, to, 8);
        }
    }
}

/// QEMU's `edu`: a DMA engine with a buffer of 4 KiB at 0x40000.
#[derive(Clone, Copy)]
struct Edu(Mmio);

impl Edu {
    const ADDRESS: SourceId = SourceId::new(0, 0x12, 0);

    fn open() -> Result<Self> {
        let folder = "/sys/bus/pci/devices/0000:00:12.0";
        std::fs::write(format!("{folder}/enable"), "1")?;
        let config = OpenOptions::new().read(true).write(true).open(format!("{folder}/config"))?;
        let mut command = [0; 2];
        config.read_exact_at(&mut command, 4)?;
        // Memory space and bus mastering.
        config.write_all_at(&(u16::from_le_bytes(command) | 6).to_le_bytes(), 4)?;
        Ok(Self(Mmio::map(&format!("{folder}/resource0"), 0, 1 << 20)?))
    }

    fn dma(&self, source: u64, destination: u64, len: u64, command: u64) {
        self.0.write(0x80, source);
        self.0.write(0x88, destination);
        self.0.write(0x90, len);
        self.0.write(0x98, command | 1);
        while self.0.read::<u64>(0x98) & 1 != 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Copies `len` bytes from I/O virtual address `from` to `to`, through its own buffer.
    fn copy(&self, from: u64, to: u64, len: u64) {
        self.dma(from, 0x40000, len, 0);
        self.dma(0x40000, to, len, 2);
    }
}

/// Pages that a round uses again and again.
struct Pages {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: in hugepages that are never freed, and owned by one value.
unsafe impl Send for Pages {}
// SAFETY: as for `Send`, and nothing refers into them.
unsafe impl Pinned for Pages {
    fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: as for the trait.
        unsafe { DmaMemory::from_raw(self.base, self.len) }
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

struct Machine {
    unit: Arc<Unit<Hand, Counted>>,
    hand: Hand,
    domain: Domain,
    memory: Arc<Hugepages>,
    edu: Edu,
    /// Where the device puts what it has read.
    seen: Mapping<Pages, Bidirectional>,
}

impl Machine {
    fn pages(&self, bytes: usize) -> Result<Pages> {
        let (base, _) = self.memory.take(bytes).ok_or("no hugepages are left")?;
        Ok(Pages { base, len: bytes })
    }

    /// What the device reads at an address now: if it is refused, what it had read before, or 0.
    fn read(&self, iova: u64) -> Result<u64> {
        self.seen.memory().write_u64(0, 0)?;
        self.edu.copy(iova, self.seen.iova().start().raw(), 8);
        Ok(self.seen.memory().read_u64(0)?)
    }

    /// Ends what a mistake has left in the unit's cache: without caching mode a map flushes nothing, so
    /// that the next one at the same address would be read as the last.
    fn flush_stale(&self) -> Result<()> {
        let (mapping, _) = self.map(self.pages(4096)?)?;
        mapping.unmap()?;
        Ok(())
    }

    fn map(&self, pages: Pages) -> Result<(Mapping<Pages, Bidirectional>, u64)> {
        let mapping = self.domain.map(pages, Bidirectional).map_err(|refused| refused.error)?;
        let iova = mapping.iova().start().raw();
        Ok((mapping, iova))
    }
}

fn late(revoked: Revoked<Pages>) -> Result<Pages> {
    revoked.wait().map_err(|error| error.error.into())
}

fn open() -> Result<Machine> {
    let dmar = Dmar::parse(&std::fs::read("/sys/firmware/acpi/tables/DMAR")?)?;
    let entry = dmar.unit_of(0, (0, 0x12, 0), |_, _, _| None).ok_or("no unit has the device")?;
    let memory = Hugepages::new(64)?;
    let mmio = Mmio::map("/dev/mem", entry.registers.start().raw(), 4096)?;
    let state =
        HandState { doorbell: Doorbell::Rings, held: None, queue: 0, tail: 0, access: None };
    let hand = Hand { mmio, memory: Arc::clone(&memory), state: Arc::new(Mutex::new(state)) };
    let bits = dmar.address_bits;
    let unit = Unit::<_, Counted>::new(hand.clone(), Box::new(Tables(Arc::clone(&memory))), bits)?;
    let known = unit.capabilities();
    println!("unit at {}: CAP {:#x}, ECAP {:#x}", entry.registers.start(), known.cap, known.ecap);
    let translator = Translator(Arc::clone(&memory), Generations::new());
    let limit = WaitLimit { time_ns: u64::MAX, polls: 1_000_000 };
    let tables = Box::new(Tables(Arc::clone(&memory)));
    let (domain, attachments) = unit.create_domain(translator, tables, limit)?;
    unit.enable()?;
    unit.attach(Edu::ADDRESS, &attachments, None)?;
    let edu = Edu::open()?;
    let (base, _) = memory.take(4096).ok_or("no hugepages")?;
    let seen =
        domain.map(Pages { base, len: 4096 }, Bidirectional).map_err(|refused| refused.error)?;
    Ok(Machine { unit, hand, domain, memory, edu, seen })
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

/// Maps parts of two hugepages at random, in leaves of 4 KiB and 2 MiB, and revokes them by each
/// policy in turn: whether the device ever reads what was written after that. What is mapped it must
/// read, at every offset.
fn right_order(machine: &Machine, rounds: usize) -> Result<bool> {
    let whole = [machine.pages(2 << 20)?, machine.pages(2 << 20)?];
    let mut random = 1_u64;
    let mut below = |limit: usize| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % limit
    };
    let mut owner = machine.domain.local();
    let mut large = 0;
    for round in 0..rounds {
        let memory = whole[below(2)].memory();
        // Every fourth time a whole hugepage, which has one leaf.
        let (first, count) = if below(4) == 0 {
            (0, 512)
        } else {
            let first = below(512);
            (first, 1 + below(512 - first))
        };
        large += usize::from(count == 512);
        let part = memory.part(first * 4096, count * 4096)?;
        let pages = Pages { base: part.as_ptr(), len: part.len() };
        let offset = below(count * 512) * 8;
        let (marker, secret) = (2 * round as u64 + 0x1000, 2 * round as u64 + 0x1001);
        part.write_u64(offset, marker)?;
        let policy = round % 4;
        let mapping = match policy {
            0 => machine.domain.map(pages, Bidirectional),
            _ => owner.map(pages, Bidirectional),
        };
        let mapping = mapping.map_err(|refused| refused.error)?;
        let at = mapping.iova().start().raw() + offset as u64;
        let read = machine.read(at)?;
        if read != marker {
            return Err(
                format!("round {round}: the device reads {read:#x}, not {marker:#x}").into()
            );
        }
        let pages = match policy {
            0 => mapping.unmap()?,
            1 => owner.unmap(mapping)?,
            2 => late(owner.revoke(mapping))?,
            _ => {
                let mut revoked = Vec::new();
                owner.revoke_many([mapping], &mut revoked);
                late(revoked.pop().ok_or("nothing was revoked")?)?
            }
        };
        pages.memory().write_u64(offset, secret)?;
        if machine.read(at)? == secret {
            println!("round {round}: {count} pages, at {offset:#x}");
            return Ok(true);
        }
    }
    println!("{large} of {rounds} were whole hugepages");
    Ok(false)
}

/// Whether an access after a revocation is recorded as what it was. The unit has one record, which
/// a device of the kernel's may have taken: its driver knows nothing of this.
fn records_faults(machine: &Machine) -> Result<bool> {
    let (mapping, iova) = machine.map(machine.pages(4096)?)?;
    mapping.unmap()?;
    for _ in 0..10 {
        machine.unit.take_faults();
        machine.read(iova)?;
        let expected = |fault: &Fault| {
            (fault.device, fault.reason, fault.write) == (Edu::ADDRESS, Reason::NoRead, false)
                && fault.page.raw() == iova
        };
        let (faults, _) = machine.unit.take_faults();
        for (fault, domain) in &faults {
            println!("of domain {}: {fault}", domain.unwrap_or_default());
        }
        if faults.iter().any(|(fault, _)| expected(fault)) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn run(rounds: usize) -> Result<bool> {
    let machine = open()?;
    let (mut passed, start) = (true, Instant::now());
    let mut check = |name: &str, leaked: bool, expected: bool| {
        let verdict = if leaked == expected { "ok" } else { "WRONG" };
        passed &= leaked == expected;
        println!(
            "{verdict}: {name}: {}",
            if leaked { "a stale page is read" } else { "nothing is read" }
        );
    };
    let stale = right_order(&machine, rounds)?;
    check(&format!("the right order, {rounds} rounds"), stale, false);
    if !records_faults(&machine)? {
        return Err("an access after a revocation is not recorded".into());
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

fn main() -> Result<()> {
    let rounds = std::env::args().nth(1).map_or(Ok(5), |word| word.parse())?;
    if !run(rounds)? {
        return Err("an order was not seen as expected".into());
    }
    println!("edu: all as expected");
    Ok(())
}
