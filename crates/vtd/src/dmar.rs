//! The ACPI table that describes the units ("DMA Remapping Reporting Structure").
//!
//! Written for hostile input: every length is checked against the structure around it, and nothing
//! is read outside. Structures of unknown types are skipped, as the section asks.

use alloc::vec::Vec;
use pinfold_core::addr::{PhysAddr, PhysRange};

/// Why a table was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DmarError {
    /// It does not begin with `DMAR`.
    #[error("the table begins with {found:02x?}, not with \"DMAR\"")]
    Signature {
        /// Its first bytes.
        found: [u8; 4],
    },
    /// It is shorter than it says, or than its header.
    #[error("the table has {have} bytes of {need}")]
    Cut {
        /// The number of bytes passed.
        have: usize,
        /// The number of bytes required.
        need: usize,
    },
    /// Its bytes do not add up to 0.
    #[error("the bytes of the table add up to {sum:#04x}, not to 0")]
    Checksum {
        /// Their sum.
        sum: u8,
    },
    /// A structure or a device scope is too short for its type, or longer than what is around it.
    #[error(
        "the structure at byte {at} of the table has length {length}; between {least} and {most} are possible"
    )]
    Length {
        /// The offset of the structure.
        at: usize,
        /// Its length, as it says.
        length: usize,
        /// The least for its type.
        least: usize,
        /// The number of bytes left.
        most: usize,
    },
    /// A device scope has no path, or half an entry of one.
    #[error(
        "the device scope at byte {at} has a path of {bytes} bytes; an entry has 2, and at least one is needed"
    )]
    Path {
        /// The offset of the scope.
        at: usize,
        /// The bytes of its path.
        bytes: usize,
    },
    /// An address is not that of a page, or a region ends before it begins.
    #[error(
        "the structure at byte {at} has the addresses {base:#x} to {last:#x}, which are not whole pages"
    )]
    Address {
        /// The offset of the structure.
        at: usize,
        /// Its first address.
        base: u64,
        /// Its last address.
        last: u64,
    },
    /// The width of addresses is below 32 or above 64 bits.
    #[error("the table says that addresses have {bits} bits; 32 to 64 are possible")]
    Width {
        /// The width in the table.
        bits: u32,
    },
}

/// The contents of the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dmar {
    /// The bits of a physical address that devices can reach ("Host Address Width").
    pub address_bits: u32,
    /// Whether the platform supports interrupt remapping (`INTR_REMAP`).
    pub interrupt_remapping: bool,
    /// The units.
    pub units: Vec<UnitEntry>,
    /// Regions that firmware has devices access by their physical addresses.
    pub reserved: Vec<ReservedRegion>,
    /// Root ports below which devices may have TLBs of their own ("Root Port ATS Capability
    /// Reporting Structure").
    pub ats: Vec<AtsPorts>,
}

/// A unit ("DMA Remapping Hardware Unit Definition Structure").
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitEntry {
    /// The PCI segment.
    pub segment: u16,
    /// The addresses of its registers.
    pub registers: PhysRange,
    /// Whether it has all devices of its segment that no other unit names (`INCLUDE_PCI_ALL`).
    pub includes_all: bool,
    /// The devices that it names.
    pub scopes: Vec<Scope>,
}

/// A region that must stay mapped at its physical address for the devices that it names ("Reserved
/// Memory Region Reporting Structure").
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReservedRegion {
    /// The PCI segment.
    pub segment: u16,
    /// The region.
    pub range: PhysRange,
    /// The devices.
    pub scopes: Vec<Scope>,
}

/// Root ports ("Root Port ATS Capability Reporting Structure").
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AtsPorts {
    /// The PCI segment.
    pub segment: u16,
    /// Whether all ports of the segment are meant (`ALL_PORTS`).
    pub all: bool,
    /// The ports that it names.
    pub scopes: Vec<Scope>,
}

/// The kind of a device scope ("Device Scope Structure").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScopeKind {
    /// A device.
    Endpoint,
    /// A bridge and all below it.
    Bridge,
    /// An I/O APIC.
    IoApic,
    /// A timer that sends message-signalled interrupts.
    Hpet,
    /// A device of the ACPI namespace.
    Namespace,
    /// A type that this crate does not know.
    Other(u8),
}

/// A device, by the path to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scope {
    /// The kind of the device.
    pub kind: ScopeKind,
    /// The number of an I/O APIC, a timer, or a device of the namespace.
    pub enumeration: u8,
    /// The bus on which the path begins.
    pub bus: u8,
    /// Device and function of each bridge on the way, and last of the device itself.
    pub path: Vec<(u8, u8)>,
}

/// The buses below a bridge: its secondary and its subordinate bus number.
pub type Buses = (u8, u8);

impl Scope {
    /// Whether the scope names device `device`, function `function` on `bus`. `bridge` returns the
    /// buses below a bridge, from its configuration space.
    pub(crate) fn names(
        &self,
        (bus, device, function): (u8, u8, u8),
        bridge: impl Fn(u8, u8, u8) -> Option<Buses>,
    ) -> bool {
        let Some(((last_device, last_function), bridges)) = self.path.split_last() else {
            return false;
        };
        let mut at = self.bus;
        for (device, function) in bridges {
            match bridge(at, *device, *function) {
                Some((secondary, _)) => at = secondary,
                None => return false,
            }
        }
        let itself = (at, *last_device, *last_function) == (bus, device, function);
        match self.kind {
            ScopeKind::Endpoint => itself,
            ScopeKind::Bridge => {
                let below = bridge(at, *last_device, *last_function);
                itself || below.is_some_and(|(first, last)| (first..=last).contains(&bus))
            }
            _ => false,
        }
    }
}

impl Dmar {
    /// The bytes of the header, before the first structure.
    const HEADER: usize = 48;

    /// Parses a table, which may be followed by other bytes.
    ///
    /// # Errors
    /// [`DmarError`].
    pub fn parse(table: &[u8]) -> Result<Self, DmarError> {
        let cut = |need| DmarError::Cut { have: table.len(), need };
        let found = *table.first_chunk::<4>().ok_or(cut(Self::HEADER))?;
        if &found != b"DMAR" {
            return Err(DmarError::Signature { found });
        }
        let length = Bytes(table).u32(4).ok_or(cut(Self::HEADER))? as usize;
        let need = length.max(Self::HEADER);
        let table = table.get(..length).filter(|_| length >= Self::HEADER).ok_or(cut(need))?;
        let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        if sum != 0 {
            return Err(DmarError::Checksum { sum });
        }
        let bytes = Bytes(table);
        let bits = u32::from(bytes.u8(36).ok_or(cut(Self::HEADER))?) + 1;
        if !(32..=64).contains(&bits) {
            return Err(DmarError::Width { bits });
        }
        let mut dmar = Self {
            address_bits: bits,
            interrupt_remapping: bytes.u8(37).ok_or(cut(Self::HEADER))? & 1 != 0,
            units: Vec::new(),
            reserved: Vec::new(),
            ats: Vec::new(),
        };
        let mut at = Self::HEADER;
        while at < table.len() {
            at += dmar.structure(bytes, at)?;
        }
        Ok(dmar)
    }

    /// Parses the structure at `at` and returns its length.
    fn structure(&mut self, table: Bytes<'_>, at: usize) -> Result<usize, DmarError> {
        let most = table.0.len().saturating_sub(at);
        let cut = |length, least| DmarError::Length { at, length, least, most };
        let (Some(kind), Some(length)) = (table.u16(at), table.u16(at + 2)) else {
            return Err(cut(most, 4));
        };
        let length = usize::from(length);
        // The bytes before the device scopes.
        let least = match kind {
            0 => 16,
            1 => 24,
            2 => 8,
            _ => 4,
        };
        let bytes = table.0.get(at..at + length).filter(|_| length >= least);
        let bytes = Bytes(bytes.ok_or(cut(length, least))?);
        // Inside, by `least`.
        let segment = || bytes.u16(6).ok_or(cut(length, least));
        let address = |offset| bytes.u64(offset).ok_or(cut(length, least));
        let flag = || Ok(bytes.u8(4).ok_or(cut(length, least))? & 1 != 0);
        match kind {
            0 => {
                let base = address(8)?;
                let size = bytes.u8(5).ok_or(cut(length, least))? & 0xf;
                let len = 4096_u64 << size;
                let range = pages(at, base, base.wrapping_add(len - 1))?;
                let scopes = scopes(bytes, at, least)?;
                let (segment, includes_all) = (segment()?, flag()?);
                self.units.push(UnitEntry { segment, registers: range, includes_all, scopes });
            }
            1 => {
                let range = pages(at, address(8)?, address(16)?)?;
                let scopes = scopes(bytes, at, least)?;
                self.reserved.push(ReservedRegion { segment: segment()?, range, scopes });
            }
            2 => {
                let scopes = scopes(bytes, at, least)?;
                self.ats.push(AtsPorts { segment: segment()?, all: flag()?, scopes });
            }
            _ => {}
        }
        Ok(length)
    }

    /// Returns the unit that has a device: the one that names it, else the one that includes all of
    /// its segment.
    pub fn unit_of(
        &self,
        segment: u16,
        device: (u8, u8, u8),
        bridge: impl Fn(u8, u8, u8) -> Option<Buses>,
    ) -> Option<&UnitEntry> {
        let units = || self.units.iter().filter(|unit| unit.segment == segment);
        let names =
            |unit: &&UnitEntry| unit.scopes.iter().any(|scope| scope.names(device, &bridge));
        units().find(names).or_else(|| units().find(|unit| unit.includes_all))
    }

    /// Returns the regions that must stay mapped for a device.
    pub fn reserved_for(
        &self,
        segment: u16,
        device: (u8, u8, u8),
        bridge: impl Fn(u8, u8, u8) -> Option<Buses>,
    ) -> impl Iterator<Item = &ReservedRegion> {
        let regions = self.reserved.iter().filter(move |region| region.segment == segment);
        regions.filter(move |region| region.scopes.iter().any(|scope| scope.names(device, &bridge)))
    }
}

/// Whole pages from `base` to `last`.
fn pages(at: usize, base: u64, last: u64) -> Result<PhysRange, DmarError> {
    let wrong = DmarError::Address { at, base, last };
    let len = last.checked_sub(base).and_then(|len| len.checked_add(1)).ok_or(wrong)?;
    let range = PhysRange::new(PhysAddr::new(base), len).map_err(|_| wrong)?;
    if range.is_aligned(4096) { Ok(range) } else { Err(wrong) }
}

/// The device scopes of the structure `bytes`, which begins at byte `start` of the table, from byte
/// `at` of it to its end.
fn scopes(bytes: Bytes<'_>, start: usize, mut at: usize) -> Result<Vec<Scope>, DmarError> {
    let mut scopes = Vec::new();
    while at < bytes.0.len() {
        let most = bytes.0.len() - at;
        let length = bytes.u8(at + 1).map_or(most, usize::from);
        let wrong = DmarError::Length { at: start + at, length, least: 6, most };
        let scope = bytes.0.get(at..at + length).filter(|_| length >= 6).ok_or(wrong)?;
        let ([kind, _, _, _, enumeration, bus], path) = scope.split_first_chunk().ok_or(wrong)?;
        if path.is_empty() || path.len() % 2 != 0 {
            return Err(DmarError::Path { at: start + at, bytes: path.len() });
        }
        let kind = match kind {
            1 => ScopeKind::Endpoint,
            2 => ScopeKind::Bridge,
            3 => ScopeKind::IoApic,
            4 => ScopeKind::Hpet,
            5 => ScopeKind::Namespace,
            other => ScopeKind::Other(*other),
        };
        let path = path.as_chunks::<2>().0.iter().map(|[device, function]| (*device, *function));
        scopes.push(Scope { kind, enumeration: *enumeration, bus: *bus, path: path.collect() });
        at += length;
    }
    Ok(scopes)
}

/// Bytes from which little-endian numbers are read.
#[derive(Clone, Copy)]
struct Bytes<'b>(&'b [u8]);

impl Bytes<'_> {
    fn chunk<const N: usize>(self, at: usize) -> Option<[u8; N]> {
        self.0.get(at..)?.first_chunk().copied()
    }
    fn u8(self, at: usize) -> Option<u8> {
        self.0.get(at).copied()
    }
    fn u16(self, at: usize) -> Option<u16> {
        self.chunk(at).map(u16::from_le_bytes)
    }
    fn u32(self, at: usize) -> Option<u32> {
        self.chunk(at).map(u32::from_le_bytes)
    }
    fn u64(self, at: usize) -> Option<u64> {
        self.chunk(at).map(u64::from_le_bytes)
    }
}
