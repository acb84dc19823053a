//! The registers of a unit: offsets, bits, and capabilities ("Remapping Hardware Register Set").

use bitflags::bitflags;
use core::task::Waker;

/// Access to the registers of one unit. Offsets are those below, inside of its pages.
///
/// Accesses are volatile, of the width that the name says, and in the order of the calls; a write
/// comes after all stores to memory before it.
pub trait Registers: Send + Sync {
    /// Reads 32 bits.
    fn read32(&self, offset: u32) -> u32;
    /// Writes 32 bits.
    fn write32(&self, offset: u32, value: u32);
    /// Reads 64 bits.
    fn read64(&self, offset: u32) -> u64;
    /// Writes 64 bits.
    fn write64(&self, offset: u32, value: u64);

    /// Returns the time of a monotonic clock in nanoseconds, if the owner of the registers has one.
    /// Without it, waits for flushes are limited by the number of polls alone.
    fn now_ns(&self) -> Option<u64> {
        None
    }

    /// Wakes `waker` after a pause: a task that waits for a flush then looks again. By default at
    /// once, so that the task polls; a platform with a timer overrides it.
    fn wake_later(&self, waker: &Waker) {
        waker.wake_by_ref();
    }
}

/// "Version Register".
pub const VER: u32 = 0x00;
/// "Capability Register".
pub const CAP: u32 = 0x08;
/// "Extended Capability Register".
pub const ECAP: u32 = 0x10;
/// "Global Command Register".
pub const GCMD: u32 = 0x18;
/// "Global Status Register".
pub const GSTS: u32 = 0x1c;
/// "Root Table Address Register".
pub const RTADDR: u32 = 0x20;
/// "Fault Status Register".
pub const FSTS: u32 = 0x34;
/// "Fault Event Control Register".
pub const FECTL: u32 = 0x38;
/// "Protected Memory Enable Register".
pub const PMEN: u32 = 0x64;
/// "Invalidation Queue Head Register".
pub const IQH: u32 = 0x80;
/// "Invalidation Queue Tail Register".
pub const IQT: u32 = 0x88;
/// "Invalidation Queue Address Register".
pub const IQA: u32 = 0x90;
/// "Invalidation Event Control Register".
pub const IECTL: u32 = 0xa0;

bitflags! {
    /// Bits of the command register and of the status register, which are the same ("Global Command
    /// Register", "Global Status Register").
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Global: u32 {
        /// TE, TES: translation.
        const TRANSLATION = 1 << 31;
        /// SRTP, RTPS: sets the root table pointer; it is set.
        const ROOT_TABLE = 1 << 30;
        /// QIE, QIES: queued invalidation.
        const QUEUE = 1 << 26;
        /// IRE, IRES: interrupt remapping.
        const INTERRUPTS = 1 << 25;
        const _ = !0;
    }
}

impl Global {
    /// The bits that a later command must repeat, or it would end their effect: all but one-time
    /// commands (SRTP 30, SFL 29, WBF 27, SIRTP 24) and reserved bits.
    pub const LASTING: u32 = 0x9680_0000;
}

bitflags! {
    /// "Fault Status Register".
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct FaultStatus: u32 {
        /// PFO: a fault was not recorded, because no record was free.
        const OVERFLOW = 1 << 0;
        /// PPF: a record holds a fault.
        const PENDING = 1 << 1;
        /// IQE: the queue's descriptor at the head is wrong, or could not be read.
        const QUEUE_ERROR = 1 << 4;
        /// ICE: a device's answer to a flush of its TLB was wrong.
        const COMPLETION_ERROR = 1 << 5;
        /// ITE: a device did not answer.
        const TIME_OUT = 1 << 6;
        const _ = !0;
    }
}

impl FaultStatus {
    /// Returns FRI, bits 8 to 15: the first record that holds a fault.
    pub const fn first_record(self) -> u32 {
        self.bits() >> 8 & 0xff
    }
}

/// IM, bit 31 of the event control registers: no interrupt is sent.
pub const EVENT_MASKED: u32 = 1 << 31;
/// EPM, bit 31 of `PMEN`: protected memory regions are enabled.
pub const PROTECTED_ENABLE: u32 = 1 << 31;
/// PRS, bit 0 of `PMEN`: they are in force.
pub const PROTECTED_STATUS: u32 = 1 << 0;

/// The capability registers of a unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capabilities {
    /// "Capability Register".
    pub cap: u64,
    /// "Extended Capability Register".
    pub ecap: u64,
}

impl Capabilities {
    /// Reads them.
    pub fn read(registers: &impl Registers) -> Self {
        Self { cap: registers.read64(CAP), ecap: registers.read64(ECAP) }
    }

    const fn cap(self, bit: u32) -> bool {
        self.cap >> bit & 1 != 0
    }

    const fn ecap(self, bit: u32) -> bool {
        self.ecap >> bit & 1 != 0
    }

    #[expect(clippy::cast_possible_truncation, reason = "a field of at most 10 bits")]
    const fn field(word: u64, first: u32, bits: u32) -> u32 {
        (word >> first & ((1 << bits) - 1)) as u32
    }

    /// ND, bits 0 to 2: how many domain identifiers there are. 7 is reserved, and counts as the
    /// least.
    pub const fn domains(self) -> u32 {
        match Self::field(self.cap, 0, 3) {
            7 => 1 << 4,
            field => 1 << (4 + 2 * field),
        }
    }

    /// RWBF, bit 4: the unit buffers writes of the processor, which software has to flush.
    pub const fn needs_write_buffer_flush(self) -> bool {
        self.cap(4)
    }

    /// PLMR and PHMR, bits 5 and 6: it has protected memory regions.
    pub const fn has_protected_regions(self) -> bool {
        self.cap(5) || self.cap(6)
    }

    /// CM, bit 7: entries that are not present are cached too ("Caching Mode").
    pub const fn caching_mode(self) -> bool {
        self.cap(7)
    }

    /// SAGAW, bits 8 to 12: whether tables of `levels` levels are supported; bit 1 of the field
    /// stands for 3, bit 2 for 4, bit 3 for 5.
    pub(crate) const fn has_levels(self, levels: u8) -> bool {
        matches!(levels, 3..=5) && Self::field(self.cap, 8, 5) >> (levels - 2) & 1 != 0
    }

    /// MGAW, bits 16 to 21: the bits of an address that a device may use; the field is one less.
    pub const fn address_bits(self) -> u32 {
        Self::field(self.cap, 16, 6) + 1
    }

    /// FRO, bits 24 to 33, in units of 16 bytes: where the fault records are.
    pub const fn fault_offset(self) -> u32 {
        Self::field(self.cap, 24, 10) * 16
    }

    /// SSLPS, bits 34 and 35: leaves of 2 MiB, of 1 GiB.
    pub const fn has_large_leaves(self) -> (bool, bool) {
        (self.cap(34), self.cap(35))
    }

    /// PSI, bit 39: flushes of pages; without it, each is one of the domain.
    pub const fn flushes_pages(self) -> bool {
        self.cap(39)
    }

    /// NFR, bits 40 to 47: how many fault records there are; the field is one less.
    pub const fn fault_records(self) -> u32 {
        Self::field(self.cap, 40, 8) + 1
    }

    /// Returns the end of the registers in use: the fault records are the last ones. Tables of
    /// firmware are known to describe the first page alone.
    pub const fn end(self) -> u32 {
        self.fault_offset() + self.fault_records() * 16
    }

    /// MAMV, bits 48 to 53: the order of the largest block that a flush can name.
    pub const fn max_order(self) -> u32 {
        Self::field(self.cap, 48, 6)
    }

    /// DWD and DRD, bits 54 and 55: a flush can wait for writes and reads that used the dropped
    /// entries.
    pub const fn drains(self) -> bool {
        self.cap(54) && self.cap(55)
    }

    /// C, bit 0: its accesses to tables look into the processor's caches ("Page-walk Coherency").
    pub const fn coherent(self) -> bool {
        self.ecap(0)
    }

    /// QI, bit 1: queued invalidation.
    pub const fn queued_invalidation(self) -> bool {
        self.ecap(1)
    }

    /// DT, bit 2: TLBs of devices.
    pub const fn device_tlbs(self) -> bool {
        self.ecap(2)
    }

    /// DIT, bit 41: flushes of devices' TLBs are limited by physical function, which they name.
    pub(crate) const fn throttles_by_function(self) -> bool {
        self.ecap(41)
    }

    /// The fewest levels that translate all addresses that a device may use, else the most that
    /// there are.
    pub fn levels(self) -> Option<u8> {
        let bits = |levels: u8| 12 + 9 * u32::from(levels);
        let all = || (3..=5).filter(|levels| self.has_levels(*levels));
        all().find(|levels| bits(*levels) >= self.address_bits()).or_else(|| all().next_back())
    }
}
