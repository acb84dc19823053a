//! The fault recording registers (VT-d specification, "Fault Recording Registers" and "Primary
//! Fault Logging").

use crate::config::FaultKind;
use pinfold_core::access::Access;
use pinfold_core::addr::Iova;
use std::fmt;

/// Why the unit has blocked a request: the encodings that it uses of those in the specification's
/// appendix "Fault Reason Encodings".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
#[repr(u8)]
pub enum FaultReason {
    /// The device has no table.
    NoTable = 0x2,
    /// The address is beyond those that the table translates.
    TooWide = 0x4,
    /// A write without the permission to write. An entry of a second-stage table that allows
    /// nothing is not present.
    NoWrite = 0x5,
    /// A read without the permission to read.
    NoRead = 0x6,
    /// A link to a table page that cannot be read.
    BadLink = 0x7,
    /// Reserved bits are set in an entry.
    ReservedBits = 0xc,
}

impl FaultReason {
    const ALL: [Self; 6] = [
        Self::NoTable,
        Self::TooWide,
        Self::NoWrite,
        Self::NoRead,
        Self::BadLink,
        Self::ReservedBits,
    ];

    /// Returns the reason that the unit records; `None` for accesses that the device or memory
    /// refuses, and not the unit.
    pub(super) fn of(kind: FaultKind, need: Access, has_table: bool) -> Option<Self> {
        let denied = if need == Access::READ { Self::NoRead } else { Self::NoWrite };
        match kind {
            FaultKind::NotMapped if !has_table => Some(Self::NoTable),
            FaultKind::NotMapped | FaultKind::NoRead | FaultKind::NoWrite => Some(denied),
            FaultKind::TooWide => Some(Self::TooWide),
            FaultKind::BadTable => Some(Self::BadLink),
            FaultKind::ReservedBits => Some(Self::ReservedBits),
            FaultKind::Misaligned | FaultKind::NotRegistered => None,
        }
    }
}

/// A fault recording register: 128 bits, as two words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultRecord([u64; 2]);

impl FaultRecord {
    /// F: the register holds a fault.
    const FAULT: u64 = 1 << 63;
    /// T1: with T2 clear, the request was a read. A write has neither.
    const READ: u64 = 1 << 62;
    /// The lowest bit of the reason; that of the source identifier is 0.
    const REASON: u32 = 32;
    /// The fault info is the page of the address.
    const PAGE: u64 = !0xfff;

    pub(super) fn new(source_id: u16, at: Iova, need: Access, reason: FaultReason) -> Self {
        let read = if need == Access::READ { Self::READ } else { 0 };
        let cause = u64::from(reason as u8) << Self::REASON | u64::from(source_id);
        Self([at.raw() & Self::PAGE, Self::FAULT | read | cause])
    }

    /// Returns the register as software reads it: bits 0..=63, and 64..=127.
    #[cfg(test)]
    fn words(self) -> [u64; 2] {
        self.0
    }

    /// Returns the requester: bus, device and function.
    pub fn source_id(self) -> u16 {
        (self.0[1] & 0xffff) as u16
    }

    /// Returns the start of the page at which the request faulted.
    pub fn page(self) -> Iova {
        Iova::new(self.0[0] & Self::PAGE)
    }

    /// Returns whether the request was a read.
    pub fn is_read(self) -> bool {
        self.0[1] & Self::READ != 0
    }

    /// Returns the reason; `None` if the unit does not use that encoding.
    pub fn reason(self) -> Option<FaultReason> {
        let code = (self.0[1] >> Self::REASON & 0xff) as u8;
        FaultReason::ALL.into_iter().find(|reason| *reason as u8 == code)
    }
}

impl fmt::Display for FaultRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, id) = (if self.is_read() { "read" } else { "write" }, self.source_id());
        let (bus, device, function) = (id >> 8, id >> 3 & 0x1f, id & 7);
        write!(
            f,
            "{what} by {bus:02x}:{device:02x}.{function} at {} blocked: {:?}",
            self.page(),
            self.reason()
        )
    }
}

/// The records that software finds when it handles faults.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct FaultReport {
    /// The registers that held a fault, in the order of the faults.
    pub records: Vec<FaultRecord>,
    /// Whether faults were lost because all registers held one (the status register's PFO).
    pub overflow: bool,
}

/// The registers, and the status that belongs to them.
#[derive(Debug, Default)]
pub(super) struct FaultRegisters {
    records: [Option<FaultRecord>; Self::COUNT],
    /// The register for the next fault.
    next: usize,
    /// The first register with a fault, while there is one (FRI).
    first: usize,
    /// Set by a fault that finds its register occupied; from then on none is recorded (PFO).
    overflow: bool,
}

impl FaultRegisters {
    pub(super) const COUNT: usize = 8;

    pub(super) fn record(&mut self, record: FaultRecord) {
        if self.overflow {
            return;
        }
        let is_pending = self.records.iter().any(Option::is_some);
        match self.records.get_mut(self.next) {
            Some(register) if register.is_none() => *register = Some(record),
            _ => return self.overflow = true,
        }
        if !is_pending {
            self.first = self.next;
        }
        self.next = (self.next + 1) % Self::COUNT;
    }

    /// Reads and clears all registers from the first with a fault on, and then the overflow, as the
    /// handler of the fault interrupt does.
    pub(super) fn take(&mut self) -> FaultReport {
        let mut report = FaultReport::default();
        while let Some(record) = self.records.get_mut(self.first).and_then(Option::take) {
            report.records.push(record);
            self.first = (self.first + 1) % Self::COUNT;
        }
        report.overflow = std::mem::take(&mut self.overflow);
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// The bits where the specification has them.
    #[test]
    fn the_fields_of_a_register_follow_the_specification() {
        let record = FaultRecord::new(
            0x0abc,
            Iova::new(0x1234_5678_9abc),
            Access::READ,
            FaultReason::NoRead,
        );
        assert_eq!(record.words(), [0x1234_5678_9000, 1 << 63 | 1 << 62 | 6 << 32 | 0x0abc]);
        let record = FaultRecord::new(8, Iova::new(0), Access::WRITE, FaultReason::ReservedBits);
        assert_eq!(record.words(), [0, 1 << 63 | 0xc << 32 | 8]);
        assert_eq!(record.to_string(), "write by 00:01.0 at iova:0x0 blocked: Some(ReservedBits)");
    }

    proptest! {
        /// Against a queue of as many entries: what fits is reported once, in order; what does not
        /// is an overflow, and nothing is recorded until that has been handled.
        #[test]
        fn registers_hold_the_first_faults_until_they_are_handled(steps in prop::collection::vec(prop::option::weighted(0.8, 0u64..99), 0..80)) {
            let (mut registers, mut model, mut overflow) = (FaultRegisters::default(), VecDeque::new(), false);
            for step in steps {
                if let Some(page) = step {
                    let record = FaultRecord::new(1, Iova::new(page << 12), Access::READ, FaultReason::NoRead);
                    registers.record(record);
                    overflow |= model.len() == FaultRegisters::COUNT;
                    if !overflow {
                        model.push_back(record);
                    }
                } else {
                    let report = registers.take();
                    prop_assert_eq!(report.records, Vec::from(std::mem::take(&mut model)));
                    prop_assert_eq!(report.overflow, std::mem::take(&mut overflow));
                }
            }
        }
    }
}
