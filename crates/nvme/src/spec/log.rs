//! Log pages (Base 5.16.1).

use core::mem::offset_of;
use zerocopy::little_endian::{U16, U32, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

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

    #[test]
    fn a_log_page_command_counts_dwords_from_0() {
        assert_eq!(log_page::cdw10(log_page::SMART, 512), 127 << 16 | 2);
        assert_eq!(log_page::parse(127 << 16 | 2), (2, 512));
    }
}
