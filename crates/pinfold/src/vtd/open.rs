//! Opens a device behind a unit, after checking all requirements in the order in which they would
//! fail, before anything is changed.

use super::{Device, Inner, UnitSide};
use crate::backend::error::{DeviceError, OpenError};
use crate::backend::vtd::{TableChunks, Translator, UnitRegisters};
use crate::domain::Domain;
use crate::pci::Bdf;
use crate::pci::lookup::{self, PciDevice};
use crate::sys::files::{self, Roots};
use crate::sys::window::Window;
use crate::sys::{Errno, kernel};
use pinfold_core::addr::PhysRange;
use pinfold_core::invalidate::WaitLimit;
use pinfold_vtd::dmar::Dmar;
use pinfold_vtd::registers::CAP;
use pinfold_vtd::{Capabilities, SourceId, Unit, UnitError};
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// For how long a flush is waited for: it takes microseconds.
const FLUSH_LIMIT: WaitLimit = WaitLimit::within(Duration::from_secs(10));

impl Device {
    /// Takes the unit of the device at `address` (`0000:01:00.0`), enables it, and opens the device
    /// in a domain of its own, with bus mastering off.
    ///
    /// # Errors
    /// [`OpenError`], which names the missing requirement: the unit is unchanged; bus mastering of
    /// the device may be off.
    ///
    /// # Safety
    /// The caller owns the machine, and guarantees
    /// - that nothing else uses the unit, the kernel included, until the domain of the device and
    ///   all memory in it are gone; this is checked as far as possible;
    /// - that until then nothing relies on another device behind the unit, which reaches nothing;
    /// - that afterwards all these devices may reach all memory, as before;
    /// - that until then the process is not killed, nor replaced by `exec`: the unit would continue
    ///   with tables in memory that the kernel has given to others;
    /// - that the firmware's table describes the machine as it is.
    pub unsafe fn open(address: &str) -> Result<Self, OpenError> {
        // SAFETY: the caller's promise is the one required.
        unsafe { Self::open_at(address, &Roots::default()) }
    }

    /// Opens a device of the machine whose files are in `roots`.
    ///
    /// # Safety
    /// As for [`open`](Self::open).
    unsafe fn open_at(address: &str, roots: &Roots) -> Result<Self, OpenError> {
        let bdf = Bdf::from_str(address)?;
        let found = lookup::find(roots, bdf)?;
        if let Some(driver) = found.driver {
            return Err(OpenError::Bound { bdf, driver });
        }
        let (registers, phys_bits) = unit_of(roots, &found)?;
        kernel::pagemap().map_err(OpenError::FramesHidden)?;
        let at = registers.start().raw();
        let (window, lock) = map(roots, at, registers.len())?;
        // SAFETY: the caller's promise is the one required.
        let registers = unsafe { UnitRegisters::new(window, lock) };
        let tables = TableChunks::default();
        let unit_error = |error| match error {
            UnitError::InUse { status } => OpenError::UnitInUse { at, status },
            error => OpenError::Unit(error),
        };
        let unit = Unit::new(registers, Box::new(tables.clone()), phys_bits).map_err(unit_error)?;
        let created = unit.create_domain(Translator::default(), Box::new(tables), FLUSH_LIMIT);
        let (core, attachments) = created.map_err(unit_error)?;
        let config = File::options().read(true).write(true).open(found.folder.join("config"));
        let config = config.map_err(|error| DeviceError::Kernel {
            call: "open of config",
            bdf,
            errno: Errno::from(&error),
        })?;
        let source = SourceId::new(bdf.bus, bdf.device, bdf.function);
        let domain = Domain::new(core, UnitSide { unit: Arc::clone(&unit), attachments });
        let inner = Inner { bdf, source, folder: found.folder, config, domain };
        // From here on its drop undoes the setup.
        inner.set_bus_master(false)?;
        inner.enable(true)?;
        unit.enable().map_err(unit_error)?;
        let side = inner.domain.device_side();
        let side: &UnitSide = side.ok_or(OpenError::NoUnit(bdf))?;
        unit.attach(source, &side.attachments, None).map_err(unit_error)?;
        Ok(Self(Arc::new(inner)))
    }
}

/// Returns where the unit of a device has its registers, and how many bits a physical address has.
fn unit_of(roots: &Roots, found: &PciDevice) -> Result<(PhysRange, u32), OpenError> {
    let bdf = found.bdf;
    let path = roots.sys.join("firmware/acpi/tables/DMAR");
    let table = std::fs::read(&path);
    let table = table.map_err(|error| OpenError::NoDmar { path, errno: Errno::from(&error) })?;
    let dmar = Dmar::parse(&table)?;
    let segment = u16::try_from(bdf.domain).map_err(|_| OpenError::NoUnit(bdf))?;
    let place = (bdf.bus, bdf.device, bdf.function);
    let devices = lookup::devices(roots);
    let below = |bus, device, function| {
        buses_below(&devices, Bdf { domain: bdf.domain, bus, device, function })
    };
    if let Some(bridge) = aliasing_bridge(&devices, bdf) {
        return Err(OpenError::Aliased { bdf, bridge });
    }
    if let Some(region) = dmar.reserved_for(segment, place, below).next() {
        let (start, len) = (region.range.start().raw(), region.range.len());
        return Err(OpenError::Reserved { bdf, start, len });
    }
    let unit = dmar.unit_of(segment, place, below).ok_or(OpenError::NoUnit(bdf))?;
    Ok((unit.registers, dmar.address_bits))
}

/// Reads the buses below a bridge from its configuration space.
fn buses_below(devices: &Path, bridge: Bdf) -> Option<(u8, u8)> {
    buses_of(&std::fs::read(devices.join(bridge.to_string()).join("config")).ok()?)
}

/// Of a header of type 1, or 2 (a bridge to CardBus), the secondary and the subordinate bus number
/// ("PCI-to-PCI Bridge Architecture Specification", 3.2).
fn buses_of(config: &[u8]) -> Option<(u8, u8)> {
    let is_bridge = matches!(config.get(14)? & 0x7f, 1 | 2);
    is_bridge.then_some((*config.get(25)?, *config.get(26)?))
}

/// Returns the bridge above a device that replaces the requester identifiers of what is below it: any
/// that is not a port of PCI Express. The bus numbers say which bridges are above it.
fn aliasing_bridge(devices: &Path, below: Bdf) -> Option<Bdf> {
    files::names(devices).into_iter().find_map(|name| {
        let bridge = Bdf::from_str(&name).ok().filter(|bridge| bridge.domain == below.domain)?;
        let config = std::fs::read(devices.join(&name).join("config")).ok()?;
        let (first, last) = buses_of(&config)?;
        // One that the firmware has not set up has no bus below it.
        let is_above = first > bridge.bus && (first..=last).contains(&below.bus);
        let replaces = is_above && !is_express_port(&config);
        replaces.then_some(bridge)
    })
}

/// Whether a bridge has the capability of PCI Express (identifier 16) and a type, bits 4 to 7 of the
/// capability's register, that forwards identifiers: a root port (4), or a port of a switch (5, 6).
/// A bridge from PCI Express to PCI is 7, and one in the other direction 8 ("PCI Express Capabilities
/// Register").
fn is_express_port(config: &[u8]) -> bool {
    let byte = |at: u8| config.get(usize::from(at)).copied();
    // "Capabilities List" of the status register: without it the pointer means nothing.
    let mut next = byte(6).filter(|status| status & 1 << 4 != 0).and_then(|_| byte(0x34));
    // Each is four bytes at least behind the header: a longer list goes round.
    for _ in 0..48 {
        let Some(at) = next.map(|at| at & !3).filter(|at| *at >= 0x40) else { return false };
        if byte(at) == Some(16) {
            return byte(at + 2).is_some_and(|flags| matches!(flags >> 4, 4..=6));
        }
        next = byte(at + 1);
    }
    false
}

/// Maps a unit's registers, and locks the file through which they are reached. They may extend
/// beyond the `len` bytes of the firmware's table.
fn map(roots: &Roots, at: u64, len: u64) -> Result<(Window, OwnedFd), OpenError> {
    let path = roots.dev.join("mem");
    let flags = OFlags::RDWR | OFlags::SYNC | OFlags::CLOEXEC;
    let memory = rustix::fs::open(&path, flags, Mode::empty())
        .map_err(|errno| OpenError::PhysMemory { path: path.clone(), errno: errno.into() })?;
    match rustix::fs::flock(&memory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Err(OpenError::UnitLocked(path)),
        Err(errno) => return Err(OpenError::PhysMemory { path, errno: errno.into() }),
    }
    let window = |len| {
        let window = Window::new(memory.as_fd(), at, crate::sys::bytes(len));
        window.map_err(|errno| OpenError::UnitRegisters { at, errno })
    };
    let mut registers = window(len)?;
    if let Some(cap) = registers.read(CAP as usize) {
        let end = u64::from(Capabilities { cap, ecap: 0 }.end());
        if end > len {
            registers = window(end.next_multiple_of(4096))?;
        }
    }
    Ok((registers, memory))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, symlink};
    use std::path::PathBuf;
    use tempfile::TempDir;

    const ADDRESS: &str = "0000:01:00.0";
    const UNIT: u64 = 0xfed9_0000;
    /// Capabilities of QEMU 7.2.
    const QEMU_CAP: u64 = 0xd2_008c_2226_0286;
    const QEMU_ECAP: u64 = 0xf0_0f4a;

    /// A table with a unit for all devices of `segment` and, unless it is empty, a region reserved
    /// for what a device scope names.
    fn dmar(segment: u16, scope: &[u8]) -> Vec<u8> {
        let mut table = b"DMAR".to_vec();
        table.resize(48, 0);
        table[36] = 38;
        table.extend([0, 0, 16, 0, 1, 0]);
        table.extend(segment.to_le_bytes());
        table.extend(UNIT.to_le_bytes());
        if !scope.is_empty() {
            table.extend([1, 0, 24 + u8::try_from(scope.len()).unwrap(), 0, 0, 0]);
            table.extend(segment.to_le_bytes());
            table.extend(0x7f00_0000_u64.to_le_bytes());
            table.extend(0x7f00_1fff_u64.to_le_bytes());
            table.extend(scope);
        }
        let length = u32::try_from(table.len()).unwrap();
        table[4..8].copy_from_slice(&length.to_le_bytes());
        let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        table[9] = 0_u8.wrapping_sub(sum);
        table
    }

    /// A machine in files: the device below a bridge, a unit whose registers keep what is written,
    /// and everything in its place.
    struct Machine(TempDir);

    impl Machine {
        fn new() -> Self {
            let machine = Self(tempfile::tempdir().unwrap());
            let device = machine.device();
            std::fs::create_dir_all(&device).unwrap();
            let mut config = [0_u8; 64];
            // Memory space and bus mastering are on.
            config[4] = 6;
            config[9..12].copy_from_slice(&[2, 8, 1]);
            std::fs::write(device.join("config"), config).unwrap();
            machine.set_bridge("0000:00:04.0", (1, 1), Some(4));
            std::fs::create_dir_all(machine.path("sys/firmware/acpi/tables")).unwrap();
            machine.set_table(&dmar(0, &[]));
            std::fs::create_dir(machine.path("dev")).unwrap();
            machine.set_registers(QEMU_CAP, QEMU_ECAP, 0);
            machine
        }
        fn path(&self, path: &str) -> PathBuf {
            self.0.path().join(path)
        }
        fn device(&self) -> PathBuf {
            self.path("sys/bus/pci/devices").join(ADDRESS)
        }
        fn set_table(&self, table: &[u8]) {
            std::fs::write(self.path("sys/firmware/acpi/tables/DMAR"), table).unwrap();
        }
        /// A bridge to these buses, of PCI Express if it has a type there.
        fn set_bridge(&self, address: &str, buses: (u8, u8), express: Option<u8>) {
            let folder = self.path("sys/bus/pci/devices").join(address);
            std::fs::create_dir_all(&folder).unwrap();
            let mut config = [0_u8; 256];
            (config[14], config[25], config[26]) = (0x81, buses.0, buses.1);
            if let Some(kind) = express {
                // Power management first.
                (config[6], config[0x34]) = (1 << 4, 0xc8);
                (config[0xc8], config[0xc9]) = (1, 0x40);
                (config[0x40], config[0x42]) = (16, kind << 4 | 2);
            }
            std::fs::write(folder.join("config"), config).unwrap();
        }
        fn set_registers(&self, cap: u64, ecap: u64, status: u32) {
            let memory = File::create(self.path("dev/mem")).unwrap();
            memory.set_len(UNIT + (8 << 12)).unwrap();
            memory.write_all_at(&cap.to_le_bytes(), UNIT + 8).unwrap();
            memory.write_all_at(&ecap.to_le_bytes(), UNIT + 0x10).unwrap();
            memory.write_all_at(&status.to_le_bytes(), UNIT + 0x1c).unwrap();
        }
        fn registers(&self) -> Vec<u8> {
            let mut bytes = vec![0; 4096];
            File::open(self.path("dev/mem")).unwrap().read_exact_at(&mut bytes, UNIT).unwrap();
            bytes
        }
        fn roots(&self) -> Roots {
            Roots { sys: self.path("sys"), dev: self.path("dev"), ..Roots::default() }
        }
        fn refused(&self, address: &str) -> OpenError {
            // SAFETY: there is no such machine.
            unsafe { Device::open_at(address, &self.roots()) }.unwrap_err()
        }
        /// Returns the message of a refusal, and checks that no register was written.
        fn message(&self) -> String {
            let before = self.registers();
            let message = self.refused(ADDRESS).to_string();
            assert!(self.registers() == before, "{message}");
            message
        }
    }

    #[test]
    fn what_is_missing_is_named_before_anything_is_changed() {
        let machine = Machine::new();
        assert!(matches!(machine.refused("1:0"), OpenError::Address(_)));
        assert!(matches!(machine.refused("0000:09:00.0"), OpenError::NoDevice(_)));

        symlink("/sys/bus/pci/drivers/nvme", machine.device().join("driver")).unwrap();
        let message = machine.message();
        assert!(message.contains("kernel driver nvme") && message.contains("/unbind"), "{message}");
        std::fs::remove_file(machine.device().join("driver")).unwrap();

        machine.set_table(&dmar(1, &[]));
        assert!(matches!(machine.refused(ADDRESS), OpenError::NoUnit(_)), "another segment");
        // The device by its path, and the bridge with all below it.
        for scope in [&[1, 10, 0, 0, 0, 0, 4, 0, 0, 0][..], &[2, 8, 0, 0, 0, 0, 4, 0]] {
            machine.set_table(&dmar(0, scope));
            let message = machine.message();
            assert!(message.contains("8192 bytes at 0x7f000000"), "{message}");
        }
        machine.set_registers(QEMU_CAP, QEMU_ECAP, 1 << 31);
        machine.set_table(&dmar(0, &[1, 8, 0, 0, 0, 0, 4, 0]));
        let refused = machine.refused(ADDRESS);
        assert!(!matches!(refused, OpenError::Reserved { .. }), "for the bridge alone: {refused}");
        machine.set_table(b"DMAR?");
        assert!(machine.message().contains("ACPI table DMAR"));
        std::fs::remove_file(machine.path("sys/firmware/acpi/tables/DMAR")).unwrap();
        assert!(machine.message().contains("no VT-d unit"));
        assert_eq!(std::fs::read(machine.device().join("config")).unwrap()[4], 6, "as it was");
    }

    /// "PCI Express to PCI/PCI-X Bridge Specification", 2.3: a bridge takes ownership of requests.
    #[test]
    fn a_device_behind_a_bridge_that_replaces_identifiers_is_refused() {
        let machine = Machine::new();
        // What follows, if it is not refused.
        machine.set_registers(QEMU_CAP, QEMU_ECAP, 1 << 31);
        let refused = |bridge: &str| match machine.refused(ADDRESS) {
            OpenError::Aliased { bdf, bridge: found } => {
                assert_eq!(
                    (bdf.to_string().as_str(), found.to_string().as_str()),
                    (ADDRESS, bridge)
                );
                assert!(machine.message().contains(&format!("behind the bridge {bridge}")));
                true
            }
            _ => false,
        };
        let root = "0000:00:04.0";
        for (kind, expected) in [
            (Some(4), false),
            (Some(5), false),
            (Some(6), false),
            (Some(7), true),
            (Some(8), true),
            (None, true),
        ] {
            machine.set_bridge(root, (1, 1), kind);
            assert_eq!(refused(root), expected, "{kind:?}");
        }
        // Farther above, with a port of PCI Express between.
        machine.set_bridge(root, (1, 1), Some(4));
        machine.set_bridge("0000:00:05.0", (1, 3), Some(7));
        assert!(refused("0000:00:05.0"));
        // Above other buses, or other devices of the segment.
        for buses in [(2, 3), (0, 0)] {
            machine.set_bridge("0000:00:05.0", buses, Some(7));
            assert!(!refused(root), "{buses:?}");
        }
        machine.set_bridge("0001:00:05.0", (1, 1), Some(7));
        assert!(!refused(root));
        // A list of capabilities that is endless, and one that is cut off.
        let path = machine.path("sys/bus/pci/devices").join(root).join("config");
        let mut config = std::fs::read(&path).unwrap();
        (config[0xc9], config[0x40]) = (0xc8, 0);
        std::fs::write(&path, &config).unwrap();
        assert!(refused(root));
        machine.set_bridge(root, (1, 1), Some(4));
        let config = std::fs::read(&path).unwrap();
        std::fs::write(&path, &config[..64]).unwrap();
        assert!(refused(root));
    }

    #[test]
    fn a_unit_that_the_kernel_has_is_not_taken() {
        let machine = Machine::new();
        if kernel::pagemap().is_err() {
            assert!(machine.message().contains("run as root"));
            return;
        }
        // Translation; the queue; interrupt remapping.
        for status in [1 << 31, 1 << 26, 1 << 25] {
            machine.set_registers(QEMU_CAP, QEMU_ECAP, status);
            let message = machine.message();
            assert!(message.contains("intel_iommu=off intremap=off iomem=relaxed"), "{message}");
            // A program that was killed has left it so.
            assert!(message.ends_with("was killed while it drove the unit, reboot"), "{message}");
        }
        machine.set_registers(QEMU_CAP, QEMU_ECAP & !2, 0);
        assert!(machine.message().contains("(ECAP, QI)"));

        let other = File::open(machine.path("dev/mem")).unwrap();
        rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
        assert!(machine.message().contains("another process"));
        drop(other);

        std::fs::remove_file(machine.path("dev/mem")).unwrap();
        assert!(machine.refused(ADDRESS).to_string().contains("CONFIG_DEVMEM"));
        symlink("/dev/full", machine.path("dev/mem")).unwrap();
        assert!(machine.refused(ADDRESS).to_string().contains("iomem=relaxed allows it"));
        assert_eq!(std::fs::read(machine.device().join("config")).unwrap()[4], 6, "as it was");
    }

    #[test]
    fn registers_beyond_what_the_table_says_are_mapped() {
        let machine = Machine::new();
        // FRO and NFR: the last record ends with the first page, begins behind it, and is the last
        // possible.
        for (offset, records, len) in [
            (0x22, 1, 4096),
            (0xff, 1, 4096),
            (0x100, 1, 8192),
            (0xfe, 3, 8192),
            (0x3ff, 256, 20480),
        ] {
            let fields = 0x3ff << 24 | 0xff << 40;
            machine.set_registers(
                QEMU_CAP & !fields | offset << 24 | (records - 1) << 40,
                QEMU_ECAP,
                0,
            );
            let (window, _) = map(&machine.roots(), UNIT, 4096).unwrap();
            assert_eq!(window.len(), len, "{offset:#x}, {records}");
        }
        let (window, _) = map(&machine.roots(), UNIT, 1 << 15).unwrap();
        assert_eq!(window.len(), 1 << 15, "what the table says is mapped");
    }

    /// These registers are a file, which carries no command out.
    #[test]
    fn a_unit_that_does_not_obey_is_refused_and_the_device_left_quiet() {
        let machine = Machine::new();
        match machine.refused(ADDRESS) {
            OpenError::Unit(UnitError::Command { .. }) => {}
            OpenError::FramesHidden(_) | OpenError::Unit(UnitError::NoPages { .. }) => {
                return eprintln!("SKIPPED: no hugepage, or frames are hidden here");
            }
            other => panic!("{other}"),
        }
        assert_eq!(std::fs::read(machine.device().join("config")).unwrap()[4], 2);
        assert_eq!(std::fs::read_to_string(machine.device().join("enable")).unwrap(), "0");
    }
}
