//! Fault records ("Fault Recording Registers", "Translation Fault Conditions"): refused accesses of
//! a device, and the reasons.

use crate::source::SourceId;
use core::fmt;
use pinfold_core::addr::Iova;

/// An access that a unit has refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The device.
    pub device: SourceId,
    /// The page that it accessed.
    pub page: Iova,
    /// Whether it wrote, an atomic operation included.
    pub write: bool,
    /// Why.
    pub reason: Reason,
}

/// Why an access was refused: the reasons of legacy mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// 1: the bus has no context table.
    NoRootEntry,
    /// 2: the device has no context entry: it is attached to no domain.
    NoContextEntry,
    /// 3: the context entry is wrong.
    BadContextEntry,
    /// 4: the address is above those that the domain's table translates.
    BeyondWidth,
    /// 5: not mapped for writing.
    NoWrite,
    /// 6: not mapped for reading.
    NoRead,
    /// 7: an entry of the page table could not be read.
    TableUnreadable,
    /// 8: the root table could not be read.
    RootUnreadable,
    /// 9: the context table could not be read.
    ContextUnreadable,
    /// 10: reserved bits of the root entry are set.
    RootReserved,
    /// 11: reserved bits of the context entry are set.
    ContextReserved,
    /// 12: reserved bits of a page table entry are set.
    TableReserved,
    /// 13: the device has translated the address by itself, and its context entry does not allow
    /// that.
    TranslatedBlocked,
    /// Another one.
    Other(u8),
}

impl Reason {
    const fn new(code: u8) -> Self {
        match code {
            1 => Self::NoRootEntry,
            2 => Self::NoContextEntry,
            3 => Self::BadContextEntry,
            4 => Self::BeyondWidth,
            5 => Self::NoWrite,
            6 => Self::NoRead,
            7 => Self::TableUnreadable,
            8 => Self::RootUnreadable,
            9 => Self::ContextUnreadable,
            10 => Self::RootReserved,
            11 => Self::ContextReserved,
            12 => Self::TableReserved,
            13 => Self::TranslatedBlocked,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoRootEntry => "no device of its bus is attached to a domain",
            Self::NoContextEntry => "it is attached to no domain",
            Self::BadContextEntry => "its context entry is wrong",
            Self::BeyondWidth => "the address is above what the domain translates",
            Self::NoWrite => "not mapped for writing",
            Self::NoRead => "not mapped for reading",
            Self::TableUnreadable => "the unit could not read the page table",
            Self::RootUnreadable => "the unit could not read the root table",
            Self::ContextUnreadable => "the unit could not read the context table",
            Self::RootReserved => "reserved bits of the root entry are set",
            Self::ContextReserved => "reserved bits of the context entry are set",
            Self::TableReserved => "reserved bits of a page table entry are set",
            Self::TranslatedBlocked => "it may not use translations of its own",
            Self::Other(code) => return write!(f, "reason {code}"),
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, page, write, reason } = self;
        let access = if *write { "a write to" } else { "a read of" };
        write!(f, "device {device} was refused {access} the page at {page}: {reason}")
    }
}

impl Fault {
    /// F, bit 63 of the high half: the record holds a fault. Written as 1, it is free.
    pub(crate) const HELD: u64 = 1 << 63;

    /// Decodes a record. Low half: FI, the page, in bits 12 to 63. High half: SID in bits 0 to 15,
    /// FR in bits 32 to 39. T1 in bit 62 and T2 in bit 28: neither is a write, T1 alone a read, and both
    /// an atomic operation, which writes, too. Units that do not tell these have T2 0.
    #[expect(clippy::cast_possible_truncation, reason = "fields of 16 and 8 bits")]
    pub(crate) const fn decode(low: u64, high: u64) -> Option<Self> {
        if high & Self::HELD == 0 {
            return None;
        }
        Some(Self {
            device: SourceId(high as u16),
            page: Iova::new(low & !0xfff),
            write: high >> 62 & 1 == 0 || high >> 28 & 1 != 0,
            reason: Reason::new((high >> 32) as u8),
        })
    }
}
