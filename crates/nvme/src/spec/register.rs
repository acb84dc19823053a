//! The controller's registers (Base 3.1.3, figure "Property Definition").

/// Byte offsets of the registers.
pub mod offset {
    /// CAP, controller capabilities (64 bits).
    pub const CAP: u32 = 0x00;
    /// VS, version (32 bits).
    pub const VS: u32 = 0x08;
    /// INTMS, interrupt mask set.
    pub const INTMS: u32 = 0x0c;
    /// INTMC, interrupt mask clear.
    pub const INTMC: u32 = 0x10;
    /// CC, controller configuration (32 bits).
    pub const CC: u32 = 0x14;
    /// CSTS, controller status (32 bits).
    pub const CSTS: u32 = 0x1c;
    /// AQA, admin queue attributes (32 bits).
    pub const AQA: u32 = 0x24;
    /// ASQ, admin submission queue base address (64 bits).
    pub const ASQ: u32 = 0x28;
    /// ACQ, admin completion queue base address (64 bits).
    pub const ACQ: u32 = 0x30;
    /// CRTO, controller ready timeouts (32 bits; Base 3.1.3.18).
    pub const CRTO: u32 = 0x68;
    /// The first doorbell.
    pub const DOORBELLS: u32 = 0x1000;
}

/// One of a queue pair's two doorbells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Doorbell {
    /// SQyTDBL: the submission queue's tail.
    SubmissionTail,
    /// CQyHDBL: the completion queue's head.
    CompletionHead,
}

/// Returns the offset of a doorbell, `0x1000 + (2 * queue + is_cq) * (4 << CAP.DSTRD)` (PCIe
/// 3.1.2); `None` where a large stride puts it above 4 GiB. Of `stride_shift` (DSTRD) only 4 bits
/// are used.
pub const fn doorbell_offset(queue: u16, which: Doorbell, stride_shift: u8) -> Option<u32> {
    let index = 2 * queue as u64 + matches!(which, Doorbell::CompletionHead) as u64;
    let offset = offset::DOORBELLS as u64 + (index << (2 + (stride_shift & 0xf)));
    if offset <= u32::MAX as u64 { Some((offset & 0xffff_ffff) as u32) } else { None }
}

/// CAP (Base, figure "Offset 0h: CAP").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cap(pub u64);

impl Cap {
    /// Returns MQES, bits 15:0: the largest I/O queue, in entries, 0-based.
    pub const fn mqes(self) -> u16 {
        (self.0 & 0xffff) as u16
    }
    /// Returns TO, bits 31:24: how long enabling or disabling may take.
    pub const fn timeout_ns(self) -> u64 {
        ((self.0 >> 24) & 0xff) * 500_000_000
    }
    /// Returns DSTRD, bits 35:32: doorbells are `4 << DSTRD` bytes apart.
    pub const fn doorbell_stride_shift(self) -> u8 {
        ((self.0 >> 32) & 0xf) as u8
    }
    /// Returns whether CRTO.CRWMT reports how long enabling may take (CRMS.CRWMS, bit 59).
    pub const fn has_ready_with_media_timeout(self) -> bool {
        self.0 & (1 << 59) != 0
    }
    /// Returns whether there may be namespaces of other I/O command sets (CSS, bits 44:37; IOCSS,
    /// bit 43).
    pub const fn has_io_command_sets(self) -> bool {
        self.0 & (1 << 43) != 0
    }
    /// Returns whether the NVM command set is supported (CSS, bits 44:37; bit 37).
    pub const fn has_nvm_command_set(self) -> bool {
        self.0 & (1 << 37) != 0
    }
    /// Returns the smallest page: `2^(12 + MPSMIN)` bytes, bits 51:48.
    pub const fn min_page_bytes(self) -> u64 {
        1 << (12 + ((self.0 >> 48) & 0xf))
    }
    /// Creates the register of a controller with these limits, CQR set, and the NVM command set.
    pub const fn new(mqes: u16, timeout_500ms: u8, stride_shift: u8) -> Self {
        Self(
            mqes as u64
                | 1 << 16
                | (timeout_500ms as u64) << 24
                | ((stride_shift & 0xf) as u64) << 32
                | 1 << 37,
        )
    }
}

/// CC (Base, figure "Offset 14h: CC").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cc(pub u32);

impl Cc {
    /// EN set: NVM command set, 4096-byte pages, round robin, entries of 64 (IOSQES 6) and 16 bytes
    /// (IOCQES 4).
    pub const ENABLED: Self = Self(1 | 6 << 16 | 4 << 20);
    /// SHN 01b: normal shutdown notification.
    const SHUTDOWN_NORMAL: u32 = 1 << 14;
    /// SHN, bits 15:14.
    const SHUTDOWN: u32 = 3 << 14;
    /// CRIME, bit 24: ready independent of media.
    const READY_WITHOUT_MEDIA: u32 = 1 << 24;

    /// Returns whether EN, bit 0, is set.
    pub const fn enabled(self) -> bool {
        self.0 & 1 != 0
    }
    /// Returns the value with EN and SHN cleared; the other fields do not change together with EN.
    #[must_use]
    pub const fn disabled(self) -> Self {
        Self(self.0 & !(1 | Self::SHUTDOWN))
    }
    /// Returns the value with SHN 01b: normal shutdown notification.
    #[must_use]
    pub const fn shutting_down(self) -> Self {
        Self(self.0 & !Self::SHUTDOWN | Self::SHUTDOWN_NORMAL)
    }
    /// Returns whether CSTS.RDY does not wait for the media (CRIME, bit 24).
    pub const fn ready_without_media(self) -> bool {
        self.0 & Self::READY_WITHOUT_MEDIA != 0
    }
    /// Returns CSS, bits 6:4; 0 is the NVM command set.
    pub const fn command_set(self) -> u8 {
        ((self.0 >> 4) & 7) as u8
    }
    /// Returns log2 of the page size (MPS, bits 10:7).
    pub const fn page_shift(self) -> u32 {
        12 + ((self.0 >> 7) & 0xf)
    }
    /// Returns whether a shutdown was requested (SHN, bits 15:14).
    pub const fn shutdown(self) -> bool {
        self.0 & Self::SHUTDOWN != 0
    }
    /// Returns IOSQES, bits 19:16, in bytes.
    pub const fn submission_entry_bytes(self) -> u32 {
        1 << ((self.0 >> 16) & 0xf)
    }
    /// Returns IOCQES, bits 23:20, in bytes.
    pub const fn completion_entry_bytes(self) -> u32 {
        1 << ((self.0 >> 20) & 0xf)
    }
}

/// CRTO (Base, figure "Offset 68h: CRTO"), in units of 500 ms.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Crto(pub u32);

impl Crto {
    /// Returns CRWMT, bits 15:0: how long enabling may take with CC.CRIME cleared.
    pub const fn with_media_ns(self) -> u64 {
        (self.0 & 0xffff) as u64 * 500_000_000
    }
    /// Returns CRIMT, bits 31:16: how long enabling may take with CC.CRIME set.
    pub const fn without_media_ns(self) -> u64 {
        (self.0 >> 16) as u64 * 500_000_000
    }
}

bitflags::bitflags! {
    /// CSTS (Base, figure "Offset 1Ch: CSTS").
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Csts: u32 {
        /// RDY: enabled, and accepts commands.
        const READY = 1;
        /// CFS: the controller has failed and needs a reset.
        const FATAL = 1 << 1;
        /// SHST = 01b: shutdown processing is in progress.
        const SHUTDOWN_BUSY = 1 << 2;
        /// SHST = 10b: shutdown processing is complete.
        const SHUTDOWN_COMPLETE = 2 << 2;
    }
}

impl Csts {
    /// The value read from a device that is no longer present.
    pub const GONE: u32 = u32::MAX;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbells_follow_the_stride() {
        assert_eq!(doorbell_offset(0, Doorbell::SubmissionTail, 0), Some(0x1000));
        assert_eq!(doorbell_offset(0, Doorbell::CompletionHead, 0), Some(0x1004));
        assert_eq!(doorbell_offset(3, Doorbell::SubmissionTail, 0), Some(0x1018));
        assert_eq!(doorbell_offset(3, Doorbell::CompletionHead, 2), Some(0x1000 + 7 * 16));
    }

    #[test]
    fn the_widest_stride_does_not_overflow() {
        assert_eq!(
            doorbell_offset(16_382, Doorbell::CompletionHead, 15),
            Some(0x1000 + 32_765 * 0x2_0000)
        );
        assert_eq!(
            doorbell_offset(16_383, Doorbell::CompletionHead, 15),
            Some(0x1000 + 32_767 * 0x2_0000)
        );
        assert_eq!(doorbell_offset(16_384, Doorbell::SubmissionTail, 15), None);
        assert_eq!(doorbell_offset(u16::MAX, Doorbell::CompletionHead, 15), None);
    }

    #[test]
    fn capabilities_round_trip() {
        let cap = Cap::new(1023, 3, 2);
        assert_eq!(cap.mqes(), 1023);
        assert_eq!(cap.timeout_ns(), 1_500_000_000);
        assert_eq!(cap.doorbell_stride_shift(), 2);
        assert!(cap.has_nvm_command_set());
        assert_eq!(cap.min_page_bytes(), 4096);
        assert_eq!(Cc::ENABLED.submission_entry_bytes(), 64);
        assert_eq!(Cc::ENABLED.completion_entry_bytes(), 16);
        assert_eq!(Cc::ENABLED.page_shift(), 12);
    }
}
