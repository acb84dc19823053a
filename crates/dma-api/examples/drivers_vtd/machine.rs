//! The unit, the PCI functions, and memory that is used again.

use super::block::Result;
use super::host::{Hugepages, Mmio, Tables, Translator};
use pinfold_core::addr::Iova;
use pinfold_core::domain::{Domain, DomainId, Generations, Pinned};
use pinfold_core::invalidate::WaitLimit;
use pinfold_core::mem::DmaMemory;
use pinfold_vtd::dmar::Dmar;
use pinfold_vtd::unit::Attachments;
use pinfold_vtd::{Registers, SourceId, WriteBack};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

impl Registers for Mmio {
    fn read32(&self, offset: u32) -> u32 {
        self.read(offset as usize)
    }
    fn write32(&self, offset: u32, value: u32) {
        self.write(offset as usize, value);
    }
    fn read64(&self, offset: u32) -> u64 {
        self.read(offset as usize)
    }
    fn write64(&self, offset: u32, value: u64) {
        self.write(offset as usize, value);
    }
}

/// QEMU's walker reads memory as the processor does, although it reports C = 0.
pub(crate) struct Emulated;

impl WriteBack for Emulated {
    const FOR_NON_COHERENT: bool = true;
    fn write_back(_: &[AtomicU64]) {}
}

pub(crate) type Unit = Arc<pinfold_vtd::Unit<Mmio, Emulated>>;

/// Enables the unit that has all `functions`.
pub(crate) fn unit(memory: &Arc<Hugepages>, functions: [SourceId; 2]) -> Result<Unit> {
    let dmar = Dmar::parse(&std::fs::read("/sys/firmware/acpi/tables/DMAR")?)?;
    let [first, second] = functions.map(|source| dmar.unit_of(0, parts(source), below));
    let entry = first.filter(|_| first == second).ok_or("no unit has both functions")?;
    let mmio = Mmio::map("/dev/mem", entry.registers.start().raw(), 4096)?;
    let tables = Box::new(Tables(Arc::clone(memory)));
    let unit = pinfold_vtd::Unit::new(mmio, tables, dmar.address_bits)?;
    unit.enable()?;
    Ok(unit)
}

/// Bus, device and function.
fn parts(source: SourceId) -> (u8, u8, u8) {
    let [low, bus] = source.0.to_le_bytes();
    (bus, low >> 3, low & 7)
}

/// Returns the buses below a bridge, if it is one: its secondary and subordinate bus number.
fn below(bus: u8, device: u8, function: u8) -> Option<(u8, u8)> {
    let source = SourceId::new(bus, device, function);
    let config = std::fs::read(format!("/sys/bus/pci/devices/0000:{source}/config")).ok()?;
    // "Type 1 Configuration Space Header"; bit 7: it has more functions.
    let is_bridge = config.get(0x0e)? & 0x7f == 1;
    Some((*config.get(0x19)?, *config.get(0x1a)?)).filter(|_| is_bridge)
}

/// Creates a domain for memory of `pool`.
pub(crate) fn domain(unit: &Unit, pool: &Pool) -> Result<(Domain, Attachments)> {
    let translator = Translator(vec![Arc::clone(&pool.memory)], Generations::new());
    let tables = Box::new(Tables(Arc::clone(&pool.memory)));
    let limit = WaitLimit { time_ns: u64::MAX, polls: 1_000_000_000 };
    Ok(unit.create_domain(translator, tables, limit)?)
}

/// A PCI function that no driver of the kernel's is bound to.
pub(crate) struct Function {
    pub(crate) registers: NonNull<u8>,
    pub(crate) len: usize,
    config: File,
}

impl Function {
    /// Enables the function, and maps BAR number `bar`. It sends no interrupts.
    pub(crate) fn open(source: SourceId, bar: usize) -> Result<Self> {
        let folder = format!("/sys/bus/pci/devices/0000:{source}");
        if std::fs::exists(format!("{folder}/driver"))? {
            return Err(format!("a driver of the kernel's is bound to {source}: unbind it").into());
        }
        std::fs::write(format!("{folder}/enable"), "1")?;
        let config = OpenOptions::new().read(true).write(true).open(format!("{folder}/config"))?;
        let path = format!("{folder}/resource{bar}");
        let len = usize::try_from(std::fs::metadata(&path)?.len())?;
        let mmio = Mmio::map(&path, 0, len)?;
        let registers = NonNull::new(mmio.at::<u8>(0)).ok_or("a mapping at 0")?;
        let function = Self { registers, len, config };
        function.mask_messages()?;
        Ok(function)
    }

    /// Enables MSI-X with all messages masked: a queue may then name any vector.
    fn mask_messages(&self) -> Result<()> {
        const CAPABILITIES: u64 = 0x34;
        const MSI_X: u8 = 0x11;
        const ENABLE_AND_MASK: u16 = 1 << 15 | 1 << 14;
        let mut at = [0];
        self.config.read_exact_at(&mut at, CAPABILITIES)?;
        while at != [0] {
            let mut head = [0; 4];
            self.config.read_exact_at(&mut head, at[0].into())?;
            let [id, next, low, high] = head;
            if id == MSI_X {
                let control = u16::from_le_bytes([low, high]) | ENABLE_AND_MASK;
                let place = u64::from(at[0]) + 2;
                self.config.write_all_at(&control.to_le_bytes(), place)?;
            }
            at = [next];
        }
        Ok(())
    }

    /// Sets bus mastering; interrupts by pin stay off.
    pub(crate) fn set_bus_master(&self, on: bool) -> Result<()> {
        const COMMAND: u64 = 4;
        const MEMORY: u16 = 1 << 1;
        const MASTER: u16 = 1 << 2;
        const NO_INTX: u16 = 1 << 10;
        let mut command = [0; 2];
        self.config.read_exact_at(&mut command, COMMAND)?;
        let rest = u16::from_le_bytes(command) & !MASTER | MEMORY | NO_INTX;
        let command = if on { rest | MASTER } else { rest };
        Ok(self.config.write_all_at(&command.to_le_bytes(), COMMAND)?)
    }
}

/// Parses `0000:bb:dd.f`.
pub(crate) fn source_of(bdf: &str) -> Result<SourceId> {
    let parse = || {
        let (bus, rest) = bdf.strip_prefix("0000:")?.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        let number = |text| u8::from_str_radix(text, 16).ok();
        Some(SourceId::new(number(bus)?, number(device)?, number(function)?))
    };
    Ok(parse()
        .ok_or_else(|| format!("{bdf} is no address of a PCI function, as 0000:01:00.0 is"))?)
}

/// Memory for drivers, of which the last that was freed is the next that is used: what a device
/// still reached would be another request's.
pub(crate) struct Pool {
    memory: Arc<Hugepages>,
    /// By their length.
    free: Mutex<BTreeMap<usize, Vec<NonNull<u8>>>>,
}

// SAFETY: memory that is never unmapped; each piece is in the map, or one value's.
unsafe impl Sync for Pool {}
// SAFETY: as for `Sync`.
unsafe impl Send for Pool {}

impl Pool {
    /// A pool that lives until the process ends, as platforms do.
    pub(crate) fn new(memory: Arc<Hugepages>) -> &'static Self {
        Box::leak(Box::new(Self { memory, free: Mutex::default() }))
    }
}

/// Whole pages of a pool.
pub(crate) struct Pages {
    pool: &'static Pool,
    base: NonNull<u8>,
    len: usize,
}

impl Pages {
    pub(crate) fn of(pool: &'static Pool, bytes: usize) -> Option<Self> {
        let len = bytes.next_multiple_of(4096);
        let mut free = pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        let used = free.get_mut(&len).and_then(Vec::pop);
        let base = used.or_else(|| Some(pool.memory.take(len)?.0))?;
        Some(Self { pool, base, len })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.entry(self.len).or_default().push(self.base);
    }
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
