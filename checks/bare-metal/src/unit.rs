//! The unit that the ACPI table names, with its registers where the table says.

use crate::machine::{At, Pci, acpi_table, say};
use crate::memory::{Clflush, Identity, Pages, Tables};
use crate::{Result, words};
use alloc::boxed::Box;
use alloc::format;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};
use pinfold_core::access::Bidirectional;
use pinfold_core::domain::{Domain, Generations, Mapping};
use pinfold_core::invalidate::WaitLimit;
use pinfold_vtd::dmar::Dmar;
use pinfold_vtd::fault::Fault;
use pinfold_vtd::registers::{IQA, IQT};
use pinfold_vtd::unit::Attachments;
use pinfold_vtd::{Registers, SourceId};
use spin::Mutex;

/// A mistake in the flushes submitted to the unit.
pub(crate) enum Mistake {
    None,
    /// Flushes of devices' TLBs are replaced by waits.
    NoDeviceFlush,
    /// The TLB of the device is flushed first, then this happens, then the IOTLB is flushed.
    DeviceTlbFirst(Box<dyn FnOnce() + Send>),
}

static MISTAKE: Mutex<Mistake> = Mutex::new(Mistake::None);

/// Makes a mistake until another one is named.
pub(crate) fn make(mistake: Mistake) {
    *MISTAKE.lock() = mistake;
}

/// A unit's registers.
pub(crate) struct Mmio {
    at: At,
    /// The address of the queue, and the part of it that has been submitted to the unit.
    queue: AtomicU64,
    tail: AtomicU64,
}

impl Mmio {
    /// Returns the first descriptor of a type among those up to `tail` that the unit has not been
    /// told of.
    fn find(&self, kind: u64, tail: u64) -> Option<u64> {
        let (queue, from) = (self.queue.load(Ordering::Relaxed), self.tail.load(Ordering::Relaxed));
        let untold = (from..).step_by(16).map(|at| at % 4096).take_while(|at| *at != tail);
        untold.into_iter().find(|at| At(queue + at).read::<u64>(0) & 0xf == kind)
    }

    /// Makes the mistake with the descriptors up to `tail`.
    fn spoil(&self, tail: u64) {
        const IOTLB: u64 = 2;
        const DEVICE_TLB: u64 = 3;
        let queue = self.queue.load(Ordering::Relaxed);
        let mut mistake = MISTAKE.lock();
        match core::mem::replace(&mut *mistake, Mistake::None) {
            Mistake::None => {}
            Mistake::NoDeviceFlush => {
                *mistake = Mistake::NoDeviceFlush;
                while let Some(at) = self.find(DEVICE_TLB, tail) {
                    // A wait that writes into its own descriptor.
                    At(queue + at).write::<u64>(8, queue + at + 4);
                    At(queue + at).write::<u64>(0, 0x25);
                }
            }
            Mistake::DeviceTlbFirst(then) => {
                let both = self.find(IOTLB, tail).zip(self.find(DEVICE_TLB, tail));
                let Some((iotlb, device)) = both else {
                    *mistake = Mistake::DeviceTlbFirst(then);
                    return;
                };
                let (one, other) = (At(queue + iotlb), At(queue + device));
                for word in [0, 8] {
                    let (a, b) = (one.read::<u64>(word), other.read::<u64>(word));
                    one.write(word, b);
                    other.write(word, a);
                }
                self.at.write(IQT.into(), (iotlb + 16) % 4096);
                then();
            }
        }
    }
}

impl Registers for Mmio {
    fn read32(&self, offset: u32) -> u32 {
        self.at.read(offset.into())
    }
    fn write32(&self, offset: u32, value: u32) {
        self.at.write(offset.into(), value);
    }
    fn read64(&self, offset: u32) -> u64 {
        self.at.read(offset.into())
    }
    fn write64(&self, offset: u32, value: u64) {
        match offset {
            IQA => self.queue.store(value, Ordering::Relaxed),
            IQT => {
                self.spoil(value);
                self.tail.store(value, Ordering::Relaxed);
            }
            _ => {}
        }
        self.at.write(offset.into(), value);
    }
}

pub(crate) type Unit = pinfold_vtd::Unit<Mmio, Clflush>;

/// Enables the unit that has PCI function `device`, with one domain, which no device is attached to.
pub(crate) fn open(
    start_info: u64,
    device: (u8, u8, u8),
) -> Result<(Arc<Unit>, Domain, Attachments)> {
    let table = acpi_table(start_info, b"DMAR").ok_or("no DMAR table: no unit")?;
    let dmar = Dmar::parse(table).map_err(words)?;
    let entry = dmar.unit_of(0, device, below).ok_or("no unit has the device")?;
    let at = At(entry.registers.start().raw());
    let (queue, tail) = (AtomicU64::new(0), AtomicU64::new(0));
    let registers = Mmio { at, queue, tail };
    let unit = Unit::new(registers, Box::new(Tables), dmar.address_bits).map_err(words)?;
    say!("unit at {}: {:x?}", entry.registers.start(), unit.capabilities());
    let limit = WaitLimit { time_ns: u64::MAX, polls: 100_000_000 };
    let created = unit.create_domain(Identity(Generations::new()), Box::new(Tables), limit);
    let (domain, attachments) = created.map_err(words)?;
    unit.enable().map_err(words)?;
    Ok((unit, domain, attachments))
}

/// Returns the buses below a bridge, if it is one: its secondary and subordinate bus number.
fn below(bus: u8, device: u8, function: u8) -> Option<(u8, u8)> {
    let pci = Pci(SourceId::new(bus, device, function));
    let [_, _, kind, _] = pci.read(0x0c).to_le_bytes();
    let [_, secondary, subordinate, _] = pci.read(0x18).to_le_bytes();
    // Bit 7: it has more functions.
    (kind & 0x7f == 1).then_some((secondary, subordinate))
}

/// Maps a page for both directions.
pub(crate) fn map(domain: &Domain) -> Result<Mapping<Pages, Bidirectional>> {
    let pages = Pages::take(1).ok_or("no pages are left: enlarge PAGES")?;
    domain.map(pages, Bidirectional).map_err(|refused| words(refused.error))
}

/// The unit has refused an access of a device of `domain`, or of one that is attached to none, and
/// says so in the words that are `expected`.
pub(crate) fn refused(
    unit: &Unit,
    domain: Option<&Attachments>,
    expected: impl Fn(&Fault) -> bool,
) -> Result<()> {
    let (faults, _) = match domain {
        Some(domain) => unit.take_faults(domain),
        None => unit.take_stray_faults(),
    };
    for fault in &faults {
        say!("{fault}");
    }
    let found = faults.iter().any(expected);
    if found { Ok(()) } else { Err(format!("not the fault that was expected: {faults:?}")) }
}
