//! Completion queue entries and status codes (Base 3.3.3.2, figures "Completion Queue Entry" and
//! "Status Code").

use core::fmt;
use core::mem::offset_of;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A completion queue entry: 16 bytes.
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Cqe {
    /// DW0: command specific.
    pub result: U32,
    /// DW1.
    pub result_high: U32,
    /// SQHD: the head of the submission queue.
    pub sq_head: U16,
    /// SQID: the submission queue of the command.
    pub sq_id: U16,
    /// CID: the command identifier.
    pub cid: U16,
    /// Bit 0: the phase tag. Bits 15:1: the status.
    pub status_phase: U16,
}

const _: () = {
    assert!(size_of::<Cqe>() == Cqe::BYTES);
    assert!(offset_of!(Cqe, sq_head) == 8);
    assert!(offset_of!(Cqe, sq_id) == 10);
    assert!(offset_of!(Cqe, cid) == 12);
    assert!(offset_of!(Cqe, status_phase) == 14);
};

impl Cqe {
    /// The size of an entry.
    pub const BYTES: usize = 16;

    /// Returns the phase tag.
    #[cfg(test)]
    fn phase(&self) -> bool {
        self.status_phase.get() & 1 != 0
    }

    /// Returns the status.
    pub fn status(&self) -> Status {
        Status(self.status_phase.get() >> 1)
    }
}

/// A command's status: SC in bits 7:0, SCT in bits 10:8, CRD in 12:11, M in 13, DNR in 14.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(u16);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $sct:literal, $sc:literal, $text:literal;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Self = Self($sct << 8 | $sc);)*

            /// Returns the specification's name of the code, or `None` for one that is not in this
            /// list.
            fn name(self) -> Option<&'static str> {
                match self.code() {
                    $(Self::$name => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

statuses! {
    /// Success.
    SUCCESS = 0, 0x00, "successful completion";
    /// The opcode is not supported.
    INVALID_OPCODE = 0, 0x01, "invalid command opcode";
    /// A field has a value that is not allowed.
    INVALID_FIELD = 0, 0x02, "invalid field in command";
    /// The identifier is in use.
    CID_CONFLICT = 0, 0x03, "command ID conflict";
    /// The data or a list could not be transferred.
    DATA_TRANSFER_ERROR = 0, 0x04, "data transfer error";
    /// An internal error of the controller.
    INTERNAL_ERROR = 0, 0x06, "internal error";
    /// The command was aborted on request.
    ABORT_REQUESTED = 0, 0x07, "command abort requested";
    /// The submission queue was deleted.
    ABORTED_SQ_DELETION = 0, 0x08, "command aborted due to SQ deletion";
    /// The namespace does not exist.
    INVALID_NAMESPACE = 0, 0x0b, "invalid namespace or format";
    /// The command came out of sequence.
    SEQUENCE_ERROR = 0, 0x0c, "command sequence error";
    /// An SGL segment descriptor is invalid.
    INVALID_SGL_SEGMENT_DESCRIPTOR = 0, 0x0d, "invalid SGL segment descriptor";
    /// An SGL has too many descriptors.
    INVALID_SGL_DESCRIPTOR_COUNT = 0, 0x0e, "invalid number of SGL descriptors";
    /// The length of an SGL does not match the transfer.
    DATA_SGL_LENGTH_INVALID = 0, 0x0f, "data SGL length invalid";
    /// The type of an SGL descriptor is not supported.
    SGL_DESCRIPTOR_TYPE_INVALID = 0, 0x11, "SGL descriptor type invalid";
    /// A PRP's offset is not allowed.
    PRP_OFFSET_INVALID = 0, 0x13, "PRP offset invalid";
    /// Past the end of the namespace.
    LBA_OUT_OF_RANGE = 0, 0x80, "LBA out of range";
    /// The namespace's capacity would be exceeded.
    CAPACITY_EXCEEDED = 0, 0x81, "capacity exceeded";
    /// An address or length of an SGL descriptor has the wrong granularity.
    SGL_DATA_BLOCK_GRANULARITY_INVALID = 0, 0x1e, "SGL data block granularity invalid";
    /// The controller interrupted the command, which may succeed later.
    COMMAND_INTERRUPTED = 0, 0x21, "command interrupted";
    /// The namespace is not accessible now.
    NAMESPACE_NOT_READY = 0, 0x82, "namespace not ready";
    /// The completion queue does not exist.
    COMPLETION_QUEUE_INVALID = 1, 0x00, "completion queue invalid";
    /// The queue identifier is not allowed or in use.
    INVALID_QUEUE_ID = 1, 0x01, "invalid queue identifier";
    /// The queue size is 0 or more than CAP.MQES.
    INVALID_QUEUE_SIZE = 1, 0x02, "invalid queue size";
    /// Too many asynchronous event requests.
    ASYNC_EVENT_LIMIT = 1, 0x05, "asynchronous event request limit exceeded";
    /// The interrupt vector is not allowed.
    INVALID_INTERRUPT_VECTOR = 1, 0x08, "invalid interrupt vector";
    /// The log page is not supported.
    INVALID_LOG_PAGE = 1, 0x09, "invalid log page";
    /// The completion queue still has submission queues.
    INVALID_QUEUE_DELETION = 1, 0x0c, "invalid queue deletion";
    /// The medium could not be written.
    WRITE_FAULT = 2, 0x80, "write fault";
    /// The medium could not be read.
    UNRECOVERED_READ_ERROR = 2, 0x81, "unrecovered read error";
}

impl Status {
    /// DNR: the same command will fail again.
    const DO_NOT_RETRY: u16 = 1 << 14;

    /// Creates a status of the low 15 bits.
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits & 0x7fff)
    }

    /// Returns CRD, bits 12:11: which of the controller's delays to wait for before a retry; 0 is
    /// none.
    pub const fn retry_delay(self) -> u8 {
        (self.0 >> 11 & 3) as u8
    }

    /// Returns the status with CRD set to the low two bits of `crd`.
    #[must_use]
    pub const fn with_retry_delay(self, crd: u8) -> Self {
        Self(self.0 & !(3 << 11) | (crd as u16 & 3) << 11)
    }

    /// Returns whether the status type is that of media and data integrity errors (SCT 2h).
    pub const fn is_media_error(self) -> bool {
        self.0 >> 8 & 7 == 2
    }

    /// Returns whether the code says that the controller did not get to the command: the namespace
    /// was not ready, or the command was interrupted. Any other error may be that of an attempt.
    pub const fn is_not_executed(self) -> bool {
        let code = self.code().0;
        code == Self::NAMESPACE_NOT_READY.0 || code == Self::COMMAND_INTERRUPTED.0
    }

    /// Returns whether the controller was not ready for the command and may be later: DNR is clear,
    /// and it asks for a delay (CRD) or its status code means that.
    pub const fn is_not_ready(self) -> bool {
        self.may_retry() && (self.retry_delay() > 0 || self.is_not_executed())
    }

    /// Returns the 15 bits.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// Returns code and type alone, without CRD, M and DNR.
    pub const fn code(self) -> Self {
        Self(self.0 & 0x7ff)
    }

    /// Returns the status with DNR set.
    pub const fn do_not_retry(self) -> Self {
        Self(self.0 | Self::DO_NOT_RETRY)
    }

    /// Returns whether the command succeeded.
    pub const fn is_success(self) -> bool {
        self.code().0 == 0
    }

    /// Returns whether the same command may succeed if it is sent again: DNR is clear.
    pub const fn may_retry(self) -> bool {
        !self.is_success() && self.0 & Self::DO_NOT_RETRY == 0
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sct, sc) = (self.0 >> 8 & 7, self.0 & 0xff);
        match self.name() {
            Some(name) => write!(f, "{name} (type {sct:x}h, code {sc:02x}h)")?,
            None => write!(f, "status type {sct:x}h, code {sc:02x}h")?,
        }
        if self.0 & Self::DO_NOT_RETRY != 0 { f.write_str(", do not retry") } else { Ok(()) }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_separate_type_and_code() {
        let status = Status::LBA_OUT_OF_RANGE.do_not_retry();
        assert_eq!(status.code(), Status::LBA_OUT_OF_RANGE);
        assert!(!status.may_retry() && Status::DATA_TRANSFER_ERROR.may_retry());
        assert!(!Status::SUCCESS.may_retry());
        assert_eq!(status.to_string(), "LBA out of range (type 0h, code 80h), do not retry");
        assert_eq!(Status::from_bits(0x7ff).to_string(), "status type 7h, code ffh");
    }

    #[test]
    fn an_entry_splits_status_and_phase() {
        let cqe = Cqe { status_phase: U16::new(0x80 << 1 | 1), ..Cqe::default() };
        assert!(cqe.phase());
        assert_eq!(cqe.status(), Status::LBA_OUT_OF_RANGE);
    }
}
