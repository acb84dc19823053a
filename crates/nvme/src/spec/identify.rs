//! Identify data structures (Base 5.17.2.1, NVM 4.1.5): 4096 bytes each.

use core::mem::offset_of;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Values of CNS (Base, figure "Identify - CNS Values").
pub mod cns {
    /// Identify namespace.
    pub const NAMESPACE: u8 = 0x00;
    /// Identify controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespace list (since 1.1).
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// Namespace identification descriptors (since 1.3).
    pub const DESCRIPTORS: u8 = 0x03;
}

/// A power state (Base, figure "Power State Descriptor Data Structure").
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PowerState {
    /// Maximum power, in units of 0.01 W.
    pub max_power: U16,
    /// The rest.
    pub rest: [u8; 30],
}

/// Identify controller (Base, figure "Identify - Identify Controller Data Structure").
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ControllerData {
    /// VID: PCI vendor.
    pub vid: U16,
    /// SSVID: PCI subsystem vendor.
    pub ssvid: U16,
    /// SN: serial number, ASCII, padded with spaces.
    pub serial: [u8; 20],
    /// MN: model number, ASCII, padded with spaces.
    pub model: [u8; 40],
    /// FR: firmware revision, ASCII, padded with spaces.
    pub firmware: [u8; 8],
    /// RAB: recommended arbitration burst.
    pub rab: u8,
    /// IEEE OUI.
    pub ieee: [u8; 3],
    /// CMIC.
    pub cmic: u8,
    /// MDTS: largest transfer, as a power of two of the smallest page (CAP.MPSMIN); 0 means no
    /// limit.
    pub mdts: u8,
    /// CNTLID.
    pub controller_id: U16,
    /// VER.
    pub version: U32,
    /// RTD3R: resume latency, microseconds.
    pub rtd3_resume_us: U32,
    /// RTD3E: entry latency, microseconds: how long a shutdown may take; 0 means not reported.
    pub rtd3_entry_us: U32,
    /// OAES: optional asynchronous events.
    pub oaes: U32,
    /// CTRATT to FGUID.
    pub reserved_96: [u8; 32],
    /// CRDT1 to CRDT3: how long to wait before a command is retried, in units of 100 ms; the status
    /// selects one by CRD.
    pub retry_delays: [U16; 3],
    /// To the end of the first 256 bytes.
    pub reserved_134: [u8; 122],
    /// OACS: optional admin commands.
    pub oacs: U16,
    /// ACL: abort command limit, 0-based.
    pub acl: u8,
    /// AERL: asynchronous event request limit, 0-based.
    pub aerl: u8,
    /// FRMW to the end of the admin part.
    pub reserved_260: [u8; 252],
    /// SQES: smallest (3:0) and largest (7:4) submission entry, as powers of two.
    pub sqes: u8,
    /// CQES: the same for completion entries.
    pub cqes: u8,
    /// MAXCMD: most commands outstanding.
    pub max_commands: U16,
    /// NN: the highest namespace identifier.
    pub namespaces: U32,
    /// ONCS: optional NVM commands; bit 2 is dataset management, bit 3 write zeroes.
    pub oncs: U16,
    /// FUSES.
    pub fuses: U16,
    /// FNA.
    pub fna: u8,
    /// VWC: bit 0, a volatile write cache is present.
    pub vwc: u8,
    /// AWUN to SGLS.
    pub reserved_526: [u8; 10],
    /// SGLS: SGL support; bits 1:0 for I/O commands.
    pub sgls: U32,
    /// MNAN to SUBNQN.
    pub reserved_540: [u8; 228],
    /// SUBNQN: the subsystem's qualified name, UTF-8, ended by a 0.
    pub subnqn: [u8; 256],
    /// To the power states.
    pub reserved_1024: [u8; 1024],
    /// PSD0 to PSD31.
    pub power_states: [PowerState; 32],
    /// Vendor specific.
    pub vendor: [u8; 1024],
}

const _: () = {
    assert!(size_of::<PowerState>() == 32);
    assert!(size_of::<ControllerData>() == 4096);
    assert!(offset_of!(ControllerData, serial) == 4);
    assert!(offset_of!(ControllerData, model) == 24);
    assert!(offset_of!(ControllerData, firmware) == 64);
    assert!(offset_of!(ControllerData, mdts) == 77);
    assert!(offset_of!(ControllerData, version) == 80);
    assert!(offset_of!(ControllerData, oacs) == 256);
    assert!(offset_of!(ControllerData, rtd3_entry_us) == 88);
    assert!(offset_of!(ControllerData, oaes) == 92);
    assert!(offset_of!(ControllerData, oacs) == 256);
    assert!(offset_of!(ControllerData, retry_delays) == 128);
    assert!(offset_of!(ControllerData, sqes) == 512);
    assert!(offset_of!(ControllerData, namespaces) == 516);
    assert!(offset_of!(ControllerData, oncs) == 520);
    assert!(offset_of!(ControllerData, vwc) == 525);
    assert!(offset_of!(ControllerData, sgls) == 536);
    assert!(offset_of!(ControllerData, subnqn) == 768);
    assert!(offset_of!(ControllerData, power_states) == 2048);
};

impl ControllerData {
    /// OAES bit 8: namespace attribute notices.
    pub const OAES_NAMESPACE_ATTRIBUTES: u32 = 1 << 8;
    /// The unit of [`retry_delays`](Self::retry_delays).
    pub const RETRY_DELAY_UNIT_NS: u64 = 100_000_000;
    /// ONCS bit 2: dataset management.
    pub const ONCS_DATASET_MANAGEMENT: u16 = 1 << 2;
    /// ONCS bit 3: write zeroes.
    pub const ONCS_WRITE_ZEROES: u16 = 1 << 3;

    /// Returns the structure with all bytes 0.
    pub fn zeroed() -> Box<Self> {
        Box::new(Self::new_zeroed())
    }

    /// Returns whether queue entries may have these sizes, which are powers of two (SQES, CQES).
    pub fn supports_entries(&self, submission: usize, completion: usize) -> bool {
        let allows = |field: u8, bytes: usize| {
            let shift = bytes.trailing_zeros();
            (u32::from(field & 0xf)..=u32::from(field >> 4)).contains(&shift)
        };
        allows(self.sqes, submission) && allows(self.cqes, completion)
    }

    /// Returns the SGL support for I/O commands (SGLS bits 1:0).
    pub fn sgl_support(&self) -> SglSupport {
        match self.sgls.get() & 3 {
            1 => SglSupport::AnyAlignment,
            2 => SglSupport::DwordAligned,
            _ => SglSupport::Unsupported,
        }
    }
}

/// Support of SGLs for I/O commands (Identify Controller, SGLS bits 1:0).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum SglSupport {
    /// 00b: no SGLs.
    #[default]
    Unsupported,
    /// 01b: data blocks of any address and length.
    AnyAlignment,
    /// 10b: data blocks whose address and length are multiples of 4.
    DwordAligned,
}

/// An LBA format (NVM, figure "LBA Format Data Structure").
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LbaFormat {
    /// MS: bytes of metadata per block.
    pub metadata: U16,
    /// LBADS: log2 of the block size; 0 means not available.
    pub data_shift: u8,
    /// RP: relative performance.
    pub performance: u8,
}

/// Identify namespace (NVM, figure "Identify Namespace Data Structure").
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct NamespaceData {
    /// NSZE: size in blocks.
    pub size: U64,
    /// NCAP: capacity in blocks.
    pub capacity: U64,
    /// NUSE: blocks in use.
    pub used: U64,
    /// NSFEAT.
    pub features: u8,
    /// NLBAF: number of LBA formats, 0-based.
    pub formats: u8,
    /// FLBAS: the format in use: bits 3:0, with bits 6:5 above them.
    pub format: u8,
    /// MC.
    pub mc: u8,
    /// DPC.
    pub dpc: u8,
    /// DPS.
    pub dps: u8,
    /// NMIC.
    pub nmic: u8,
    /// RESCAP.
    pub rescap: u8,
    /// FPI.
    pub fpi: u8,
    /// DLFEAT bits 2:0: the content that a deallocated block reads as; 001b is zeroes.
    pub deallocate: u8,
    /// NAWUN to the formats.
    pub reserved_34: [u8; 94],
    /// LBAF0 to LBAF63.
    pub lba_formats: [LbaFormat; 64],
    /// Vendor specific.
    pub vendor: [u8; 3712],
}

const _: () = {
    assert!(size_of::<LbaFormat>() == 4);
    assert!(size_of::<NamespaceData>() == 4096);
    assert!(offset_of!(NamespaceData, formats) == 25);
    assert!(offset_of!(NamespaceData, format) == 26);
    assert!(offset_of!(NamespaceData, deallocate) == 33);
    assert!(offset_of!(NamespaceData, lba_formats) == 128);
    assert!(offset_of!(NamespaceData, vendor) == 384);
};

impl NamespaceData {
    /// DLFEAT 001b: deallocated blocks read as zeroes.
    pub const DEALLOCATE_ZEROES: u8 = 1;

    /// Returns the structure with all bytes 0, as of an inactive namespace.
    pub fn zeroed() -> Box<Self> {
        Box::new(Self::new_zeroed())
    }

    /// Returns the index of the format in use: FLBAS bits 3:0, with 6:5 above them.
    pub fn format_index(&self) -> u8 {
        self.format & 0xf | (self.format >> 5 & 3) << 4
    }

    /// Returns whether metadata is interleaved with the data (FLBAS bit 4).
    pub fn is_interleaved(&self) -> bool {
        self.format & 1 << 4 != 0
    }

    /// Returns the type of protection information (DPS bits 2:0); 0 means disabled.
    pub fn protection(&self) -> u8 {
        self.dps & 7
    }

    /// Returns the format in use, or `None` where FLBAS names one that does not exist.
    pub fn current_format(&self) -> Option<LbaFormat> {
        let index = self.format_index();
        (index <= self.formats).then(|| self.lba_formats.get(usize::from(index)).copied()).flatten()
    }
}

/// Active namespace identifiers, ascending, ended by a 0 (Base 5.17.2.3).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct NamespaceList {
    /// The identifiers.
    pub nsids: [U32; 1024],
}

const _: () = assert!(size_of::<NamespaceList>() == 4096);

/// Namespace identification descriptors (Base 5.17.2.4): NIDT, NIDL, two reserved bytes, and NIDL
/// bytes each; ended by NIDL 0.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct NamespaceDescriptors {
    /// All of them.
    pub bytes: [u8; 4096],
}

impl NamespaceDescriptors {
    /// NIDT 04h: the I/O command set.
    pub const COMMAND_SET: u8 = 4;

    /// Returns CSI, the I/O command set of the namespace, if a descriptor names it. Linear in the
    /// bytes.
    pub fn command_set(&self) -> Option<u8> {
        let mut rest = self.bytes.as_slice();
        while let [kind, len, _, _, after @ ..] = rest {
            let (id, next) = after.split_at_checked((*len).into())?;
            match id {
                [] => return None,
                [csi, ..] if *kind == Self::COMMAND_SET => return Some(*csi),
                _ => rest = next,
            }
        }
        None
    }
}

/// CSI values (Base, figure "Command Set Identifiers").
pub mod csi {
    /// The NVM command set.
    pub const NVM: u8 = 0;
    /// The key value command set.
    pub const KEY_VALUE: u8 = 1;
    /// The zoned namespace command set.
    pub const ZONED: u8 = 2;
}

// Log pages (Base 5.16.1).

/// Log page identifiers (Base, figure "Get Log Page - Log Page Identifiers"), and the fields of the
/// command.
pub mod log_page {
    /// SMART / health information.
    pub const SMART: u8 = 0x02;

    /// Changed namespace list.
    pub const CHANGED_NAMESPACES: u8 = 0x04;

    /// Returns CDW10 of a command for the first `bytes` bytes of a page: LID in 7:0, NUMDL (dwords,
    /// 0-based) in 31:16.
    pub const fn cdw10(page: u8, bytes: u32) -> u32 {
        // At most 256 KiB: NUMDU, in CDW11, stays 0.
        page as u32 | ((bytes / 4).wrapping_sub(1) & 0xffff) << 16
    }

    /// Returns the page and the bytes that a command requests, by NUMDL alone.
    pub const fn parse(cdw10: u32) -> (u8, u32) {
        ((cdw10 & 0xff) as u8, ((cdw10 >> 16) + 1) * 4)
    }
}

/// SMART / health information (Base 5.16.1.3): 512 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SmartData {
    /// Critical warning: bit 0 spare, 1 temperature, 2 reliability, 3 read-only, 4 volatile backup,
    /// 5 persistent memory.
    pub critical_warning: u8,
    /// Composite temperature, kelvin.
    pub temperature: U16,
    /// Available spare, per cent.
    pub available_spare: u8,
    /// Spare threshold, per cent.
    pub spare_threshold: u8,
    /// Percentage used; may exceed 100.
    pub percentage_used: u8,
    /// Endurance group critical warning summary.
    pub endurance_warning: u8,
    /// Reserved.
    pub reserved_7: [u8; 25],
    /// Data units read: thousands of 512 bytes, rounded up.
    pub data_units_read: U128,
    /// Data units written: likewise.
    pub data_units_written: U128,
    /// Host read commands.
    pub host_reads: U128,
    /// Host write commands.
    pub host_writes: U128,
    /// Controller busy time, minutes.
    pub busy_minutes: U128,
    /// Power cycles.
    pub power_cycles: U128,
    /// Power on hours.
    pub power_on_hours: U128,
    /// Unsafe shutdowns.
    pub unsafe_shutdowns: U128,
    /// Media and data integrity errors.
    pub media_errors: U128,
    /// Number of error information log entries.
    pub error_entries: U128,
    /// Warning composite temperature time, minutes.
    pub warning_minutes: U32,
    /// Critical composite temperature time, minutes.
    pub critical_minutes: U32,
    /// Temperature sensors, kelvin; 0 means not implemented.
    pub sensors: [U16; 8],
    /// Thermal management, and reserved.
    pub reserved_216: [u8; 296],
}

const _: () = {
    assert!(size_of::<SmartData>() == SmartData::BYTES);
    assert!(offset_of!(SmartData, temperature) == 1);
    assert!(offset_of!(SmartData, percentage_used) == 5);
    assert!(offset_of!(SmartData, data_units_read) == 32);
    assert!(offset_of!(SmartData, power_cycles) == 112);
    assert!(offset_of!(SmartData, error_entries) == 176);
    assert!(offset_of!(SmartData, warning_minutes) == 192);
    assert!(offset_of!(SmartData, sensors) == 200);
};

impl SmartData {
    /// The size of the page.
    pub const BYTES: usize = 512;

    /// Returns the structure with all bytes 0.
    pub fn zeroed() -> Box<Self> {
        Box::new(Self::new_zeroed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_command_set_is_found_after_other_descriptors() {
        let mut list = NamespaceDescriptors { bytes: [0; 4096] };
        assert_eq!(list.command_set(), None);
        // A UUID of 16 bytes, then CSI.
        list.bytes[..2].copy_from_slice(&[3, 16]);
        list.bytes[20..25].copy_from_slice(&[4, 1, 0, 0, 2]);
        assert_eq!(list.command_set(), Some(csi::ZONED));
    }

    proptest! {
        #[test]
        fn descriptors_with_any_content_terminate(bytes in proptest::collection::vec(any::<u8>(), 4096)) {
            let list = NamespaceDescriptors::read_from_bytes(&bytes).unwrap();
            prop_assert!(list.command_set().is_none_or(|csi| bytes.contains(&csi)));
        }
    }
}

#[cfg(test)]
mod log_tests {
    use super::*;

    #[test]
    fn a_log_page_command_counts_dwords_from_0() {
        assert_eq!(log_page::cdw10(log_page::SMART, 512), 127 << 16 | 2);
        assert_eq!(log_page::parse(127 << 16 | 2), (2, 512));
    }
}
