//! The unit, with a hand on its doorbell, and the device behind it.

use super::Result;
use super::host::{Hugepages, Mmio, Tables, Translator};
use pinfold_core::access::Bidirectional;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{Domain, DomainId, Generations, Mapping, Pinned};
use pinfold_core::invalidate::WaitLimit;
use pinfold_core::mem::DmaMemory;
use pinfold_vtd::dmar::Dmar;
use pinfold_vtd::registers::{self, Registers};
use pinfold_vtd::unit::Attachments;
use pinfold_vtd::{SourceId, Unit, WriteBack};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// QEMU's walker reads memory as the processor does, although it reports C = 0; this counts.
pub(crate) struct Counted;

pub(crate) static WRITTEN_BACK: AtomicUsize = AtomicUsize::new(0);

impl WriteBack for Counted {
    const FOR_NON_COHERENT: bool = true;
    fn write_back(words: &[AtomicU64]) {
        WRITTEN_BACK.fetch_add(words.len(), Ordering::Relaxed);
    }
}

/// A use of the doorbell.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Doorbell {
    Rings,
    /// It is held back: a queue may be late.
    Late,
    /// A mistake: flushes are replaced by waits.
    NoFlush,
    /// An error: the first descriptor has an unknown type, once.
    Unknown,
    /// It rings, and the device accesses the page before the caller goes on.
    ThenAccess,
}

/// The unit's registers, with a hand on the doorbell.
#[derive(Clone)]
pub(crate) struct Hand {
    mmio: Mmio,
    memory: Arc<Hugepages>,
    state: Arc<Mutex<HandState>>,
}

pub(crate) struct HandState {
    doorbell: Doorbell,
    held: Option<u64>,
    queue: u64,
    tail: u64,
    pub(crate) access: Option<(Edu, u64, u64)>,
    /// Writes of the tail, and the nanoseconds that they took: QEMU has carried out all flushes when
    /// the write ends.
    pub(crate) tails: u64,
    pub(crate) tails_ns: u128,
}

impl Hand {
    pub(crate) fn state(&self) -> MutexGuard<'_, HandState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes `value` to a register that the unit does nothing with.
    pub(crate) fn mark(&self, register: usize, value: u32) {
        self.mmio.write(register, value);
    }

    pub(crate) fn set(&self, doorbell: Doorbell) {
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
                Doorbell::Unknown => {
                    if let Some(low) = self.memory.word(state.queue + state.tail) {
                        low.store(0xf, Ordering::Relaxed);
                    }
                    state.doorbell = Doorbell::Rings;
                }
                Doorbell::Rings | Doorbell::ThenAccess => {}
            }
            state.tail = value;
            state.tails += 1;
        }
        let start = Instant::now();
        self.mmio.write(offset as usize, value);
        if offset == registers::IQT {
            state.tails_ns += start.elapsed().as_nanos();
        }
        let then_access = offset == registers::IQT && state.doorbell == Doorbell::ThenAccess;
        if then_access && let Some((edu, from, to)) = state.access.take() {
            edu.copy(from, to, 8);
        }
    }
}

/// Where its buffer is for it, and how many bytes of it one transfer can have: QEMU refuses the last.
const BUFFER: u64 = 0x40000;
pub(crate) const BUFFER_BYTES: usize = 4088;

/// QEMU's `edu`: a DMA engine with a buffer of 4 KiB.
#[derive(Clone, Copy)]
pub(crate) struct Edu(Mmio);

impl Edu {
    pub(crate) const ADDRESS: SourceId = SourceId::new(0, 0x12, 0);

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
        // It takes that long.
        std::thread::sleep(Duration::from_millis(100));
        while self.0.read::<u64>(0x98) & 1 != 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Reads `len` bytes at I/O virtual address `from` into its own buffer, at `at`.
    pub(crate) fn read(&self, from: u64, at: u64, len: u64) {
        self.dma(from, BUFFER + at, len, 0);
    }

    /// Writes the first `len` bytes of its buffer to I/O virtual address `to`.
    pub(crate) fn write(&self, to: u64, len: u64) {
        self.dma(BUFFER, to, len, 2);
    }

    /// Copies `len` bytes from I/O virtual address `from` to `to`, through its own buffer.
    pub(crate) fn copy(&self, from: u64, to: u64, len: u64) {
        self.read(from, 0, len);
        self.write(to, len);
    }
}

/// Pages that a round uses again and again.
pub(crate) struct Pages {
    pub(crate) base: NonNull<u8>,
    pub(crate) len: usize,
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

pub(crate) struct Machine {
    pub(crate) unit: Arc<Unit<Hand, Counted>>,
    pub(crate) hand: Hand,
    pub(crate) domain: Domain,
    pub(crate) attachments: Attachments,
    pub(crate) memory: Arc<Hugepages>,
    pub(crate) edu: Edu,
    /// A page of 1 GiB, if the machine has reserved one.
    pub(crate) gigabyte: Option<Pages>,
    /// Where the device puts what it has read.
    pub(crate) seen: Mapping<Pages, Bidirectional>,
}

impl Machine {
    pub(crate) fn pages(&self, bytes: usize) -> Result<Pages> {
        let (base, _) = self.memory.take(bytes).ok_or("no hugepages are left")?;
        Ok(Pages { base, len: bytes })
    }

    /// Returns the word that the device reads at an address now: if it is refused, what it had read
    /// before, or 0.
    pub(crate) fn read(&self, iova: u64) -> Result<u64> {
        self.seen.memory().write_u64(0, 0)?;
        self.edu.copy(iova, self.seen.iova().start().raw(), 8);
        Ok(self.seen.memory().read_u64(0)?)
    }

    /// Ends what a mistake has left in the unit's cache: without caching mode a map flushes nothing, so
    /// that the next one at the same address would be read as the last.
    pub(crate) fn flush_stale(&self) -> Result<()> {
        let (mapping, _) = self.map(self.pages(4096)?)?;
        mapping.unmap()?;
        Ok(())
    }

    pub(crate) fn map(&self, pages: Pages) -> Result<(Mapping<Pages, Bidirectional>, u64)> {
        let mapping = self.domain.map(pages, Bidirectional).map_err(|refused| refused.error)?;
        let iova = mapping.iova().start().raw();
        Ok((mapping, iova))
    }
}

pub(crate) fn open() -> Result<Machine> {
    let dmar = Dmar::parse(&std::fs::read("/sys/firmware/acpi/tables/DMAR")?)?;
    let entry = dmar.unit_of(0, (0, 0x12, 0), |_, _, _| None).ok_or("no unit has the device")?;
    let memory = Hugepages::new(2 << 20, 128)?;
    let gigabyte = Hugepages::new(1 << 30, 1).ok();
    let mmio = Mmio::map("/dev/mem", entry.registers.start().raw(), 4096)?;
    let state = HandState {
        doorbell: Doorbell::Rings,
        held: None,
        queue: 0,
        tail: 0,
        access: None,
        tails: 0,
        tails_ns: 0,
    };
    let hand = Hand { mmio, memory: Arc::clone(&memory), state: Arc::new(Mutex::new(state)) };
    let bits = dmar.address_bits;
    let unit = Unit::<_, Counted>::new(hand.clone(), Box::new(Tables(Arc::clone(&memory))), bits)?;
    let known = unit.capabilities();
    println!("unit at {}: CAP {:#x}, ECAP {:#x}", entry.registers.start(), known.cap, known.ecap);
    let all = [Some(&memory), gigabyte.as_ref()].into_iter().flatten().cloned().collect();
    let translator = Translator(all, Generations::new());
    let limit = WaitLimit { time_ns: u64::MAX, polls: 1_000_000 };
    let tables = Box::new(Tables(Arc::clone(&memory)));
    let (domain, attachments) = unit.create_domain(translator, tables, limit)?;
    unit.enable()?;
    unit.attach(Edu::ADDRESS, &attachments, None)?;
    let edu = Edu::open()?;
    let gigabyte = gigabyte.and_then(|pages| pages.take(1 << 30));
    let gigabyte = gigabyte.map(|(base, _)| Pages { base, len: 1 << 30 });
    let (base, _) = memory.take(4096).ok_or("no hugepages")?;
    let seen =
        domain.map(Pages { base, len: 4096 }, Bidirectional).map_err(|refused| refused.error)?;
    Ok(Machine { unit, hand, domain, attachments, memory, gigabyte, edu, seen })
}
